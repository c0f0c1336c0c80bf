"""Texts to train drafters on, with hidden states of the target.

Letters: B texts, T tokens of the longest, k kinds of hidden states, H hidden size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.tensors import read_tensors, save_tensors


@dataclass(frozen=True, eq=False)
class Texts:
    """A batch of texts to learn from.

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

    def rows(self, rows: slice | Tensor) -> Texts:
        """Some of the texts, without the padding that none of them needs."""
        length = self.length[rows]
        longest = int(length.max()) if len(length) else 0
        ids, hidden, written = (
            None if kept is None else kept[rows, :longest] for kept in (self.ids, self.hidden, self.written)
        )
        assert ids is not None
        return Texts(ids, self.first[rows], length, hidden, written)

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

    def generators(self, seed: int) -> Iterator[torch.Generator]:
        """Yield for each text a generator of random numbers that it has whenever it is seen."""
        for ids, length in zip(self.ids.cpu(), self.length.tolist(), strict=True):
            yield torch.Generator().manual_seed(zlib.crc32(ids[:length].numpy().tobytes(), seed))

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


def frequent(paths: Sequence[Path], vocabulary: int, width: int) -> Tensor:  # [W], ascending
    """The most frequent tokens among those that the target wrote."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for path in paths:
        text = Texts.read(path, hidden=False)
        counts += np.bincount(text.ids[text.counts(0)].numpy(), minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:width]))
