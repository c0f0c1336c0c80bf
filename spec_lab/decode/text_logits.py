"""The target's logits after many texts of one prompt, computed as a draft tree; and along one text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.history import History, TextHistories
from spec_lab.core.probabilities import finite_, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain
from spec_lab.models.target import Target
from spec_lab.runners.runner import KVSequence

ROWS = 256
"""Most texts of one forward; the prefixes that they share with the texts before come on top."""

Text = tuple[int, ...]


class TextLogits(NamedTuple):
    """Logits after some texts.

    Args:
        numbers: ``[n]`` which texts.
        logits: ``[n, V]`` float64, of the model.
        history: of the texts; None where the sampling has no penalties, biases or banned words.
        request: whose sampling parameters apply.
    """

    numbers: np.ndarray
    logits: Tensor
    history: History | None
    request: Request

    def log_probabilities(self, mask: np.ndarray | None = None) -> np.ndarray:  # [n, V]
        """Return log p as the request samples, float64; -inf is no mass.

        Args:
            mask: ``[n, V]`` bool, tokens that a constraint allows; None allows all.
        """
        allowed = None if mask is None else torch.from_numpy(mask).to(self.logits.device)
        p = logits_to_probs(self.logits, [self.request.sampling], self.history, allowed)
        return p.log().cpu().numpy()


def text_logits(target: Target, request: Request, texts: Sequence[Text], rows: int = ROWS) -> Iterator[TextLogits]:
    """Yield the logits after every text, a forward at a time.

    Texts are computed in lexicographic order, so that those of one forward share most of their prefixes.

    Args:
        request: its prompt, and its sampling parameters.
        texts: tokens after the prompt.
        rows: most texts of one forward.

    Raises:
        ValueError: logits that are NaN or infinite.
    """
    lm = target.lm
    lm.capture(())
    chains = lm.capabilities.rollback is not None  # such a runner verifies one chain at a time
    leaves = 1 if chains else lm.capabilities.leaves
    order = sorted(range(len(texts)), key=lambda number: texts[number])
    for some in _forwards([texts[number] for number in order], rows, leaves):
        numbers = np.array(order[some.start : some.stop])
        chosen = [texts[number] for number in numbers.tolist()]
        row, draft = _tree(chosen, lm.device)
        kv = lm.open(len(request.tokens) + draft.shape.nodes)
        try:
            with torch.inference_mode():
                output = lm.run(lm.prepare([kv], [list(request.tokens)], draft))
                logits = output.logits[torch.from_numpy(row).to(output.logits.device)].double()
                broken = finite_(logits)
        finally:
            kv.close()
        if broken is not None and bool(broken.any()):
            raise ValueError(f"request '{request.name}': the target's logits are NaN or infinite")
        whole, prompts = ([*request.tokens, *text] for text in chosen), [len(request.tokens)] * len(chosen)
        histories = TextHistories.of(whole, prompts, [request.sampling], logits.shape[-1], logits.device)
        yield TextLogits(numbers, logits, None if histories is None else histories.here(), request)
    lm.clock.take()


class TextForward(NamedTuple):
    """A text that is computed but for its last token.

    Args:
        kv: the KV cache of its computed tokens; the caller closes it.
        logits: ``[n, V]`` from which the n tokens of the answer are chosen.
        hidden: ``[tokens - 1, layers * H]`` hidden states of the computed tokens; None where none are asked for.
    """

    kv: KVSequence
    logits: Tensor
    hidden: Tensor | None


@torch.inference_mode()
def compute_text(
    target: Target, prompt: Sequence[int], answer: Sequence[int], hidden: tuple[int, ...], more: int = 0
) -> TextForward:
    """Compute a prompt and an answer of at least one token by one forward.

    Args:
        hidden: numbers of the hidden states to return (``Capabilities.hidden_layers``).
        more: positions that the KV cache has room for besides.
    """
    lm, count = target.lm, len(answer) - 1
    lm.capture(hidden)
    kv = lm.open(len(prompt) + len(answer) + more)
    try:
        draft = Draft(chain(count), torch.tensor(answer[:-1], dtype=torch.int64, device=lm.device))
        output = lm.run(lm.prepare([kv], [list(prompt)], draft))
        kv.accept(range(count))
    except BaseException:
        kv.close()
        raise
    lm.clock.take()
    return TextForward(kv, output.logits.clone(), output.observed(0, range(count)) if hidden else None)


def _forwards(texts: Sequence[Text], rows: int, leaves: int | None) -> Iterator[range]:
    """Which of the sorted texts are computed together."""
    start = ends = 0
    for number, text in enumerate(texts):
        starts_leaf = number == start or text[: len(texts[number - 1])] != texts[number - 1]
        ends += starts_leaf
        if number - start >= rows or (leaves is not None and ends > leaves):
            yield range(start, number)
            start, ends = number, 1
    if start < len(texts):
        yield range(start, len(texts))


def _tree(texts: Sequence[Text], device: torch.device) -> tuple[np.ndarray, Draft]:
    """The draft tree of all prefixes of some texts, and the row of each text."""
    row: dict[Text, int] = {(): 0}
    parent, token = [], []
    for text in texts:
        for length in range(1, len(text) + 1):
            if text[:length] not in row:
                parent.append(row[text[: length - 1]])
                token.append(text[length - 1])
                row[text[:length]] = len(row)
    shape = Shape(1, np.array(parent, dtype=np.int64))
    draft = Draft(shape, torch.tensor(token, dtype=torch.int64, device=device))
    return np.array([row[text] for text in texts], dtype=np.int64), draft
