"""Protocol of drafters that can be trained: the target's states that it reads, a network, a loss, and files."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_lab.core.options import WrongOption, check_fields
from spec_lab.models.packed import dense_copy
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.fit import Objective
from spec_lab.train.objectives import TV

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Beginning:
    """A drafter that is about to be trained.

    Args:
        module: its parameters are trained.
        objective: its loss.
        facts: what follows from the options, the target and the texts, for checkpoints and the summary.
        calibrate: measures the drafter that is written in a folder on files of held-out answers (``texts.Texts``) at a
            temperature, and writes there what its proposer reads to choose a tree; None where it reads nothing.
        advance: called before each training step with the share of all steps that are done; None for losses that do
            not depend on it.
    """

    module: nn.Module
    objective: Objective
    facts: Mapping[str, Any]
    calibrate: Callable[[Path, Sequence[Path], float], None] | None = None
    advance: Callable[[float], None] | None = None


class Recipe(ABC):
    """A kind of drafter, and how it is trained. Its attributes are its options."""

    name: ClassVar[str]
    """Name of the drafter, as in configs and records."""

    def __post_init__(self) -> None:
        check_fields(self)
        if vars(self).get("loss") == "tv":
            log.warning(
                "task.recipe.loss=tv is %s; -log alpha, which had this name before, is task.recipe.loss=nla", TV
            )

    @property
    @abstractmethod
    def depth(self) -> int:
        """Maximum number of tokens that it drafts in a chain."""

    def states(self, target: Target) -> tuple[int, ...]:
        """Numbers of the target's hidden states that texts must bring; the last is -1, after the final norm."""
        return (-1,)

    @abstractmethod
    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """A fresh network, in float32, and its loss.

        Args:
            target: to draft for.
            paths: files of the texts (``texts.Texts``); none where only the options are checked.
            seed: of the initial weights.

        Raises:
            ValueError: the target is not supported, or an option does not suit it.
        """

    @abstractmethod
    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """Write the drafter's files, in bfloat16; return the SHA-256 of its weights."""

    @abstractmethod
    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """The written drafter as a proposer of chains, sampled as the request samples."""

    def resume(self, module: Any, target: Target, folder: Path) -> str:
        """Give a fresh network the weights of a written drafter; return their SHA-256.

        Raises:
            WrongOption: no drafter of this kind can be read back, or it has other sizes; names ``start``.
            OSError, ValueError: its files cannot be read.
        """
        raise WrongOption(
            f"start={folder} names a drafter to begin with, and {self.name} cannot read one: set start=null"
        )


def settings_of(recipe: Recipe, target: Target, begun: Beginning) -> dict[str, Any]:
    """Return what a checkpoint records of a training besides its plan: it is resumed only with the same."""
    facts = {"recipe": recipe.name, "options": vars(recipe), "target_sha256": target.sha256, **begun.facts}
    return facts | ({"tv": TV} if vars(recipe).get("loss") == "tv" else {})  # other checkpoints had another loss


@dataclass(frozen=True, eq=False)
class TargetHead:
    """The target's embedding and LM head as parts of a computation with gradients; their weights get none.

    (``TargetServices`` returns tensors of inference mode, which autograd cannot keep.)

    Args:
        model: a causal LM of transformers whose parameters require no gradient.
    """

    model: Any
    _copies: dict[torch.dtype, nn.Module] = field(default_factory=dict)

    @staticmethod
    def of(target: Target) -> TargetHead:
        """Return the embedding and LM head of a target of transformers.

        Raises:
            Unsupported: it is a target of another kind, or it changes the logits after its LM head (Cohere and Granite
                scale them, Gemma 2 caps them). Proposers that share the LM head draft without this too.
        """
        head = TargetHead(target.model.requires_grad_(False))
        tokens = torch.linspace(0, target.vocabulary - 1, 8, device=target.lm.device).long()[None]
        with torch.no_grad():
            made = head.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            logits = head.lm_head(made.hidden_states[-1]).to(made.logits.device)
        if not (made.logits - logits).abs().max() <= 0.01 * logits.abs().max():
            raise Unsupported(
                f"target '{target.name}' scales or caps its logits after the LM head, which no drafter is trained for "
                "(and none that shares the LM head drafts with): choose another target"
            )
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """``[..]`` int64 -> ``[.., H]``."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def lm_head(self, hidden: Tensor) -> Tensor:
        """``[.., H] -> [.., V]``, computed in the dtype of ``hidden``."""
        head = self.model.get_output_embeddings()
        if hidden.dtype == head.weight.dtype and not head.weight.is_mkldnn:
            logits: Tensor = head(hidden)
            return logits
        if hidden.dtype not in self._copies:
            with torch.inference_mode(False):  # tensors of inference mode could not be kept for gradients
                self._copies[hidden.dtype] = dense_copy(head).to(hidden.dtype)
        logits = self._copies[hidden.dtype](hidden)
        return logits

    @cached_property
    def embedding_scale(self) -> float:
        """The power of two that makes the target's embeddings about as large as its normed hidden states."""
        size = float(self.model.get_input_embeddings().weight.detach().float().square().mean().sqrt())
        return 2.0 ** round(-math.log2(size))


def layer_of(target: Target, heads: int | None, intermediate_size: int | None) -> dict[str, Any]:
    """The config of a Llama layer of the target's hidden size, by default with its heads, MLP and rotary embedding.

    Raises:
        ValueError: so many heads have no even size.
    """
    config, h = target.model.config, target.services.hidden_size
    if heads and h % (2 * heads):
        raise ValueError(
            f"task.recipe.heads must divide the target's hidden size {h} into even sizes, which rotary embeddings "
            f"require, not {heads}"
        )
    count = heads or int(config.num_attention_heads)
    shared = count if heads else int(getattr(config, "num_key_value_heads", None) or count)
    fields: dict[str, Any] = {
        "model_type": "llama", "hidden_size": h, "num_attention_heads": count, "num_key_value_heads": shared,
        "intermediate_size": intermediate_size or int(getattr(config, "intermediate_size", None) or 4 * h),
        "head_dim": int(getattr(config, "head_dim", None) or h // count) if not heads else h // count,
        "hidden_act": "silu", "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or target.context),
    }  # fmt: skip
    rope = getattr(config, "rope_parameters", None)
    return fields | ({"rope_parameters": dict(rope)} if isinstance(rope, dict) and "rope_type" in rope else {})
