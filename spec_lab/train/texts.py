"""Texts to train drafters on, with hidden states of the target.

Letters: B texts, T tokens of the longest, k kinds of hidden states, H hidden size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_lab.core.tensors import read_tensors, save_tensors


def generator_of(ids: Tensor, seed: int) -> torch.Generator:
    """Return a generator of random numbers that a text with these tokens ``[T]`` has whenever it is seen."""
    return torch.Generator().manual_seed(zlib.crc32(ids.cpu().numpy().tobytes(), seed))


@dataclass(frozen=True, eq=False)
class Texts:
    """Several texts.

    Args:
        ids: ``[B, T]`` tokens; padded with any token.
        first: ``[B]`` the first token of each that the target wrote; 0 of plain text. Only from there on is learned.
        length: ``[B]`` tokens of each.
        hidden: ``[B, T, k * H]`` hidden states at their positions; None where they are not kept.
        written: ``[B, T]`` bool, which tokens the target wrote, of conversations with several answers; None: all from
            ``first`` on.
    """

    ids: Tensor
    first: Tensor
    length: Tensor
    hidden: Tensor | None = None
    written: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, rows: slice) -> Texts:
        """Some of the texts."""
        hidden, written = (None if kept is None else kept[rows] for kept in (self.hidden, self.written))
        return Texts(self.ids[rows], self.first[rows], self.length[rows], hidden, written)

    def to(self, device: torch.device) -> Texts:
        """The same texts on a device; what says which tokens are learned stays on the host."""
        hidden = None if self.hidden is None else self.hidden.to(device)
        return Texts(self.ids.to(device), self.first, self.length, hidden, self.written)

    def padded(self, length: int) -> Texts:
        """The same texts with room for at least so many tokens."""
        more = length - self.ids.shape[1]
        if more <= 0:
            return self
        pad = torch.nn.functional.pad
        hidden = None if self.hidden is None else pad(self.hidden, (0, 0, 0, more))
        written = None if self.written is None else pad(self.written, (0, more))
        return Texts(pad(self.ids, (0, more)), self.first, self.length, hidden, written)

    def counts(self, ahead: int) -> Tensor:  # [B, T - ahead]
        """At which positions j the token ``ahead`` places later is one to learn from. It is on the host."""
        places = torch.arange(ahead, self.ids.shape[1], device=self.first.device)
        learned = (places >= self.first[:, None]) & (places < self.length[:, None])
        return learned if self.written is None else learned & self.written[:, ahead:]

    def answers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each answer's tokens ``[n]``, after the states from which they were chosen ``[n, k * H]``."""
        assert self.hidden is not None
        for ids, hidden, learned in zip(self.ids, self.hidden, self.counts(0), strict=True):
            places = learned.nonzero()[:, 0]
            for answer in places.tensor_split(((places.diff() > 1).nonzero()[:, 0] + 1).tolist()):
                if len(answer):
                    yield hidden[answer - 1], ids[answer]

    def write(self, path: Path) -> None:
        """Write a file, replaced atomically."""
        tensors = {"ids": self.ids.to(torch.int32), "first": self.first, "length": self.length}
        kept = {"hidden": self.hidden, "written": self.written}
        save_tensors(tensors | {name: tensor for name, tensor in kept.items() if tensor is not None}, path)

    @staticmethod
    def read(path: Path, hidden: bool = True) -> Texts:
        """Read a file that ``write`` or ``generate.generate`` wrote.

        Args:
            path: the file.
            hidden: whether to read its hidden states.
        """
        tensors, facts = read_tensors(path, () if hidden else ("hidden",))
        ids = tensors["ids"].long()
        rows, length = ids.shape
        if "first" not in tensors:
            prefix = int(facts["prefix"])
            tensors["first"] = torch.full((rows,), 0 if prefix == length else prefix)
            tensors["length"] = torch.full((rows,), length)
        return Texts(ids, tensors["first"], tensors["length"], tensors.get("hidden"), tensors.get("written"))
