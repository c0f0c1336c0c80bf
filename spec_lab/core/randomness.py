"""Keyed randomness: the one seam through which anything is ever chosen. It can be sampled, enumerated or replayed."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.upload import upload


class Purpose(IntEnum):
    """The use of a choice. Two choices of one request in one step never share a purpose and an index."""

    STOP = 0
    EMIT = 1
    DRAFT = 2
    RACE = 3
    POLICY = 4
    RECORD = 5


class Key(NamedTuple):
    """Names one random choice for ever: the same key under the same seed is the same uniform.

    Args:
        request: id of the request.
        branch: of its forks (``SequenceState.branch``); 0 for the first sequence.
        step: steps that have sampled for the sequence before.
        purpose: a ``Purpose``.
        index: tells choices of one purpose in one step apart, such as the number of a node.
    """

    request: int
    branch: int
    step: int
    purpose: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which no key needs


class Draws(Protocol):
    """The one seam through which anything is chosen: it can be sampled, enumerated or replayed."""

    def pick(self, weights: Tensor, keys: Sequence[Key]) -> Tensor:
        """Choose one index for each row of weights.

        Sampling needs one uniform for each key, drawn on the host, and reads nothing back from the weights' device.
        Enumerating needs the weights on the host.

        Args:
            weights: ``[n, V]``, not negative, some of each row positive; they need not sum to 1.
            keys: ``[n]`` a key for each choice.

        Returns:
            ``[n]`` int64, on the weights' device.
        """
        ...

    def race(self, width: int, keys: Sequence[Key]) -> np.ndarray:
        """Draw standard Gumbel noise: the arg max of log w + noise is distributed as w (Gumbel-max).

        Args:
            width: number of values for each key.
            keys: ``[n]``.

        Returns:
            ``[n, width]`` float64, on the host.
        """
        ...


@dataclass(frozen=True)
class CounterDraws:
    """Inverse transform sampling from uniforms that are a pure function of (seed, key).

    Nothing is carried along, so runs resume and forks pair exactly, and batch mates cannot matter.
    """

    seed: int

    def uniform(self, key: Key) -> float:
        """One double in [0, 1), all 53 bits random."""
        secret = struct.pack("<q", self.seed)
        digest = blake2b(struct.pack("<5q", *key), digest_size=8, key=secret).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def pick(self, weights: Tensor, keys: Sequence[Key]) -> Tensor:
        """See ``Draws.pick``."""
        return invert(weights, keys.uniform if isinstance(keys, UploadedKeys) else self.uniforms(keys))

    def uniforms(self, keys: Sequence[Key]) -> np.ndarray:  # [n]
        """The uniforms of some keys."""
        return np.array([self.uniform(key) for key in keys], dtype=np.float64)

    def race(self, width: int, keys: Sequence[Key]) -> np.ndarray:
        """See ``Draws.race``. One key's uniforms come from a counter-based generator of its own (Philox)."""
        race = np.array([self._generator(key).standard_exponential(width) for key in keys]).reshape(-1, width)
        return -np.log(np.maximum(race, np.finfo(np.float64).tiny))

    def _generator(self, key: Key) -> np.random.Generator:
        digest = blake2b(struct.pack("<5q", *key), digest_size=16, key=struct.pack("<q", self.seed)).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


class UploadedKeys(list[Key]):
    """Keys whose uniforms are on the device already.

    Args:
        keys: ``[n]``.
        uniform: ``[n]`` float64.
    """

    def __init__(self, keys: Sequence[Key], uniform: Tensor) -> None:
        super().__init__(keys)
        self.uniform = uniform


def upload_keys(draws: Draws, device: torch.device, *groups: Sequence[Key]) -> list[Sequence[Key]]:
    """Return groups of keys for ``Draws.pick``; what the draws need on a device of all of them is uploaded at once."""
    if device.type == "cpu" or not isinstance(draws, CounterDraws):
        return list(groups)
    given = upload(device, *(draws.uniforms(keys) for keys in groups))
    return [UploadedKeys(keys, uniform) for keys, uniform in zip(groups, given, strict=True)]


def invert(weights: Tensor, uniform: np.ndarray | Tensor) -> Tensor:  # [n, V], [n] -> [n]
    """Inverse transform sampling: the first index whose cumulated weight exceeds ``uniform`` times the total.

    Sums run in float64: float32 sums over a large vocabulary lose the tail. (On the CPU those over ``BLOCK`` neighbours
    run in the weights' own precision.) An index of weight zero is never returned.

    Raises:
        ValueError: a row of weights whose sum is zero or not finite, on the CPU. (On a device the index is then -1.)
    """
    if weights.device.type != "cpu":
        given = upload(weights.device, uniform)[0] if isinstance(uniform, np.ndarray) else uniform
        return _invert_on_device(weights, given)
    assert isinstance(uniform, np.ndarray)
    return torch.from_numpy(np.asarray(_invert_on_host(weights, uniform)))


def _invert_on_host(weights: Tensor, uniform: np.ndarray) -> np.ndarray | list[int]:
    rows, width = weights.shape
    if width <= BLOCK:
        if rows <= FEW:
            return [_search(row, u)[0] for row, u in zip(weights.tolist(), uniform.tolist(), strict=True)]
        return _search_all(weights.numpy(), uniform)[0]
    # Find the block, then the index within it: a running sum over the whole vocabulary would take far longer.
    if width % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -width % BLOCK))
    blocks = weights.reshape(rows, -1, BLOCK)
    sums, values = blocks.sum(-1), blocks.numpy()  # torch sums ten times as fast as NumPy
    if rows <= FEW:
        chosen = []
        for row, (masses, u) in enumerate(zip(sums.tolist(), uniform.tolist(), strict=True)):
            block, within = _search(masses, u)
            chosen.append(block * BLOCK + _search(values[row, block].tolist(), within)[0])
        return chosen
    every = np.arange(rows)
    several, mass, total = _search_all(sums.numpy(), uniform)
    below = np.where(several > 0, total[every, several - 1], 0.0)
    shares = (mass - below) / (total[every, several] - below)
    return several * BLOCK + _search_all(values[every, several], shares)[0]


BLOCK = 128
FEW = 4  # rows that are searched in lists, without NumPy's cost per call


def _search(weights: list[float], u: float) -> tuple[int, float]:
    """The index by a running sum, and how far into the share of its index ``u`` lay: one again, given it.

    Rounding can push the mass looked for up to the last total; the last index that adds to it is then meant.
    """
    total = list(accumulate(weights))
    _check_total(total[-1])
    mass = u * total[-1]
    index = min(bisect_right(total, mass), bisect_left(total, total[-1]))
    below = total[index - 1] if index else 0.0
    return index, (mass - below) / (total[index] - below)


def _search_all(weights: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The index of ``_search`` of many rows ``[n]``, the mass looked for ``[n]`` and the running sums ``[n, V]``."""
    total = weights.cumsum(-1, dtype=np.float64)
    whole = total[:, -1]
    for mass in whole.tolist():
        _check_total(mass)
    masses = uniform * whole
    return (total > np.minimum(masses, np.nextafter(whole, 0.0))[:, None]).argmax(-1), masses, total


def _invert_on_device(weights: Tensor, uniform: Tensor) -> Tensor:
    total = weights.double().cumsum(-1)
    chosen = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True).clamp_max_(weights.shape[-1] - 1)
    # A parallel sum can round up where nothing is added: the last index with weight up to there is meant.
    index = torch.arange(weights.shape[-1], device=weights.device)
    weighty = torch.where(weights > 0, index, 0).cummax(-1).values
    whole = total[:, -1]
    return torch.where((whole > 0) & (whole < torch.inf), weighty.gather(-1, chosen)[:, 0], -1)


def _check_total(total: float) -> None:
    if not 0 < total < math.inf:
        raise ValueError(f"a distribution to sample from has total mass {total}; it must be finite and positive")
