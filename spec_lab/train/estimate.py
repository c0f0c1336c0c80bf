"""How much memory and time a training takes, from a trial on one text, and how many texts are computed together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spec_lab.core.device_memory import readable
from spec_lab.train.pieces import CHUNK
from spec_lab.train.texts import Texts

OPTIMISER = 4 * (1 + 1 + 2)
"""Bytes of a trained number in float32: its gradient, that of a part of a step, and the state of AdamW."""
WORKING = 6 * 4 * CHUNK
"""Bytes of the logits that are computed at a time, and of what follows from them."""


@dataclass(frozen=True)
class TrainingNeed:
    """Memory and time that a training needs beside the target and the drafter's weights.

    Args:
        fixed: bytes of gradients, optimiser and logits.
        text: bytes that the loss of one text keeps for its gradients.
        tokens: length of that text.
        seconds: of that loss and its gradients.
    """

    fixed: int
    text: int
    tokens: int
    seconds: float

    def bytes(self, texts: int) -> int:
        """Return the memory, in bytes, of the loss and gradients of this number of texts together."""
        return self.fixed + texts * self.text

    def part(self, rows: int, room: int | None, threads: int = 1) -> int:
        """Return how many texts each thread computes together: the most that fit, at most half of a step.

        Args:
            rows: texts of a step.
            room: available bytes; None where they are not known.
            threads: that compute at the same time.

        Raises:
            ValueError: one text does not fit.
        """
        parts = [part for part in range(1, max(1, rows // 2) + 1) if rows % part == 0]
        fitting = [part for part in parts if room is None or self.bytes(part * threads) <= room]
        if not fitting:
            assert room is not None
            raise ValueError(
                f"training on one text of {self.tokens} tokens needs {readable(self.bytes(threads))} of memory, and "
                f"{readable(room)} are available: set max_new_tokens to less, choose a smaller drafter (options of "
                "task.recipe), or a device with more memory"
            )
        return fitting[-1]


def kept_bytes(compute: Callable[[], Tensor], weights: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that a loss keeps for its gradients, and the loss.

    Args:
        weights: tensors that are there anyway and are not counted.
    """
    known = {weight.untyped_storage()._cdata for weight in weights if not weight.is_mkldnn}
    kept = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_mkldnn and (storage := tensor.untyped_storage())._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # otherwise a node and the result that it saves would hold each other for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute()
    return sum(kept.values()), loss


def trial_text(tokens: int, width: int, device: torch.device) -> Texts:
    """Return a text of which everything is learned.

    Args:
        tokens: its length.
        width: of its hidden states.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    hidden = torch.zeros(1, tokens, width, dtype=torch.bfloat16, device=device)
    return Texts(ids, torch.ones(1, dtype=torch.long), torch.tensor([tokens]), hidden)


def estimate(
    loss_of: Callable[[Texts], Tensor], trained: Iterable[Tensor], others: Iterable[Tensor], text: Texts
) -> TrainingNeed:
    """Compute the loss of a text and its gradients, and count and time it.

    Args:
        loss_of: the loss of texts, in the precision of the training.
        trained: weights in float32.
        others: tensors that are in memory anyway, such as those of the target.
        text: as in ``trial_text``.
    """
    weights, tokens = list(trained), text.ids.shape[1]
    text_bytes, loss = kept_bytes(lambda: loss_of(text), [*weights, *others])
    torch.autograd.grad(loss, weights, allow_unused=True)
    fixed = OPTIMISER * sum(weight.numel() for weight in weights) + WORKING
    if loss.device.type == "meta":
        return TrainingNeed(fixed, text_bytes, tokens, 0.0)
    began = time.monotonic()
    loss = loss_of(text)
    torch.autograd.grad(loss, weights, allow_unused=True)
    float(loss.detach())  # waits for the device
    return TrainingNeed(fixed, text_bytes, tokens, time.monotonic() - began)
