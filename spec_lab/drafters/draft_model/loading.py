"""Loads a draft model for a target, and checks that both have the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from spec_lab.core.options import WrongOption
from spec_lab.models import gguf
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.loading import load_model
from spec_lab.models.support import is_recurrent, model_context
from spec_lab.models.target import Target, end_tokens
from spec_lab.runners.runner import DraftRunner


class Loaded(NamedTuple):
    """A draft model that was loaded, and what computes it, which is checked when it is made."""

    runner: Callable[[Tensor | None], DraftRunner]
    """Returns a runner with the rows ``[W]`` of its LM head that are left; with all rows for None."""
    tokenizer: Any
    vocabulary: int
    ends: frozenset[int]
    context: int
    sha256: str
    config: Any = None
    """Config of transformers; None for a GGUF file."""
    chains: bool = False
    """Whether it has recurrent layers, with which only chains can be drafted."""


def load_draft(target: Target, path: str, revision: str | None = None) -> Loaded:
    """Load a draft model. Arguments and errors as in ``DraftModel.load``."""
    if str(path).endswith(".gguf"):
        loaded = gguf.load_draft(path, target)

        def run_file(rows: Tensor | None) -> DraftRunner:
            if rows is not None:
                raise WrongOption(
                    f"tokens: llama.cpp computes all logits of the draft {path}: set it to null, or choose a draft of "
                    "transformers"
                )
            return cast(DraftRunner, loaded.lm)

        return Loaded(
            run_file,
            loaded.tokenizer,
            loaded.vocabulary,
            loaded.ends,
            loaded.context,
            loaded.sha256,
        )
    dtype = str(target.lm.dtype).removeprefix("torch.")
    model, tokenizer, folder = load_model(path, str(target.lm.device), dtype, revision=revision)
    sha256, width = weights_hash(folder), int(model.get_output_embeddings().weight.shape[0])
    context, ends = model_context(model.config), end_tokens(width, tokenizer, model)
    run, chains = partial(target.draft_runner, model, sha256), is_recurrent(model.config)
    return Loaded(run, tokenizer, width, ends, context, sha256, model.config, chains)


def check_same_tokens(
    target: Target, vocabulary: int, tokenizer: Any, path: str, advice: str = "", mask_token: int | None = None
) -> None:
    """Refuse a draft with other tokens than the target's.

    Args:
        vocabulary: V of the draft.
        tokenizer: the draft's.
        path: of the draft, for messages.
        advice: what ends a message.
        mask_token: a token that is never drafted and may be the draft's own.

    Raises:
        ValueError: other vocabulary sizes, tokens or splitting; the message states how they differ.
    """
    if target.tokenizer is not None:
        mine, theirs = (
            {number: token for token, number in t.get_vocab().items()} for t in (target.tokenizer, tokenizer)
        )
        wrong = [number for number in sorted({*mine, *theirs}) if mine.get(number) != theirs.get(number)]
        wrong = [number for number in wrong if number != mask_token]
        if wrong:
            some = "; ".join(f"{n} is {mine.get(n)!r} against {theirs.get(n)!r}" for n in wrong[:3])
            raise ValueError(
                f"the draft {path} has another tokenizer than the target {target.name}: {len(mine)} tokens in the "
                f"target's, {len(theirs)} in the draft's, {len(wrong)} ids differ (target against draft: {some})"
                f"{advice}"
            )
        probe = "def f(x):\n    return {'né': [x, 1.5]}  # 2024 naïve"
        ours, other = (t(probe, add_special_tokens=False)["input_ids"] for t in (target.tokenizer, tokenizer))
        if ours != other:
            raise ValueError(
                f"the draft {path} has the target's tokens but splits text otherwise: {probe!r} becomes {ours} in the "
                f"target's tokenizer and {other} in the draft's{advice}"
            )
    if vocabulary != target.vocabulary:
        raise ValueError(
            f"the draft {path} has logits for {vocabulary} tokens, the target {target.name} for {target.vocabulary}; "
            f"they must agree{advice}"
        )
