"""Draws that enumerate: the seam through which everything is chosen, driven through all that can happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from spec_lab.core.faults import Passing
from spec_lab.core.randomness import Draws, Key, Purpose

T = TypeVar("T")


SAME = 1e-4
"""How much the weights of one choice may differ when it is made again. Rounding in float32 differs by less."""


class Reused(Passing, AssertionError):
    """One key named two choices: the second would reuse the noise of the first."""


class Continuous(Passing, ValueError):
    """The noise of a race has uncountably many values; it is certified otherwise."""


class TooMany(Passing, ValueError):
    """More outcomes than are worth enumerating."""


class Unrepeatable(Passing, ValueError):
    """The same choices were made again, and the next choice was another one."""


class Asked(NamedTuple):
    """A choice: its key, but for request and round, and its weights ``[V]``, which sum to 1."""

    key: Key
    weights: np.ndarray

    def like(self, other: Asked) -> bool:
        """Whether both are the same choice. Batch mates may add zeros to the weights, and change their rounding."""
        mine, theirs = np.zeros((2, max(len(self.weights), len(other.weights))))
        mine[: len(self.weights)], theirs[: len(other.weights)] = self.weights, other.weights
        return self.key == other.key and np.allclose(mine, theirs, rtol=0, atol=SAME)

    def __str__(self) -> str:
        options = np.flatnonzero(self.weights > 0).tolist()
        purpose = {int(one): one.name for one in Purpose}.get(self.key.purpose, self.key.purpose)
        return f"{purpose} among {options}"


class Script:
    """One text's choices: a recorded prefix, then the first possible index each time.

    What has just one possibility is no choice: whether it is asked for at all may depend on batch mates.

    Args:
        prefix: indices to choose.
        known: what these indices were chosen among when the prefix was recorded; empty: not checked.
    """

    def __init__(self, prefix: tuple[int, ...] = (), known: Sequence[Asked] = ()) -> None:
        self.prefix, self.known, self.probability = prefix, known, 1.0
        self.asked: list[Asked] = []
        self.chosen: list[int] = []
        self.options: list[list[int]] = []
        self.keys: set[Key] = set()

    def choose(self, weights: np.ndarray, key: Key) -> int:
        """An index of ``weights`` ``[V]``.

        Raises:
            Reused: the key has named a choice before.
            Unrepeatable: a choice of the prefix is another one than when it was recorded.
        """
        if key in self.keys:
            raise Reused(f"{key} names two choices")
        self.keys.add(key)
        options = np.flatnonzero(weights > 0).tolist()
        if not options:
            raise ValueError(f"{key} chooses among weights of which none is positive: {weights.tolist()}")
        if len(options) == 1:
            return int(options[0])
        number = len(self.chosen)
        asked = Asked(key._replace(request=0, round=0), weights / weights.sum())
        if number < len(self.known) and not asked.like(self.known[number]):
            raise Unrepeatable(f"choice {number} was {self.known[number]}, and is {asked}")
        self.asked.append(asked)
        index = self.prefix[number] if number < len(self.prefix) else options[0]
        self.probability *= float(weights[index] / weights.sum())
        self.chosen.append(index)
        self.options.append(options)
        return index

    def others(self) -> Iterator[tuple[int, ...]]:
        """Prefixes of the outcomes that branch off beyond this one's prefix."""
        for number in range(len(self.prefix), len(self.chosen)):
            for other in self.options[number][1:]:
                yield (*self.chosen[:number], other)


class Scripts:
    """``Draws`` that follow one script for each request, numbered from 0; a single script serves all requests."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts

    def pick(self, weights: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
        """See ``Draws.pick``. Weights that float32 made count as they are."""
        rows, one = weights.cpu().double().numpy(), len(self.scripts) == 1
        chosen = [self.scripts[0 if one else key.request].choose(row, key) for row, key in zip(rows, keys, strict=True)]
        return torch.tensor(chosen, dtype=torch.int64, device=weights.device)

    def race(self, width: int, keys: Sequence[Key]) -> np.ndarray:
        """Refused: see ``Continuous``."""
        raise Continuous("the noise of a race cannot be enumerated")


class Watched:
    """Draws that refuse a key they have seen before.

    Args:
        draws: who chooses.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.keys: set[Key] = set()

    def pick(self, weights: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
        """See ``Draws.pick``."""
        self._watch(keys)
        return self.draws.pick(weights, keys)

    def race(self, width: int, keys: Sequence[Key]) -> np.ndarray:
        """See ``Draws.race``."""
        self._watch(keys)
        return self.draws.race(width, keys)

    def _watch(self, keys: Sequence[Key]) -> None:
        if len(self.keys | set(keys)) < len(self.keys) + len(keys):
            twice = next(key for number, key in enumerate(keys) if key in self.keys or key in keys[:number])
            raise Reused(f"{twice} names two choices")
        self.keys.update(keys)


def explore(play: Callable[[Draws], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of ``play`` with its probability."""
    return ((mass, outcome) for mass, outcome in side_by_side(lambda draws, _: [play(draws)], 1))


def side_by_side(
    play: Callable[[Draws, int], Sequence[T]], wide: int = 256, most: int | None = None
) -> Iterator[tuple[float, T]]:
    """Every outcome of one request with its probability; up to ``wide`` of them are played at once.

    Args:
        play: given draws and a number n, plays the same request n times as requests 0 .. n - 1: n outcomes.
        wide: most requests at once.
        most: outcomes to enumerate at most.

    Raises:
        TooMany: there are more.
        Unrepeatable: after the same choices another one came than before.
    """
    waiting: list[tuple[tuple[int, ...], Sequence[Asked]]] = [((), ())]
    found = 0
    while waiting:
        scripts = [Script(*recorded) for recorded in waiting[-wide:]]
        del waiting[-wide:]
        found += len(scripts)
        if most is not None and found + len(waiting) > most:
            raise TooMany(f"more than {most} outcomes")
        outcomes = play(Scripts(scripts), len(scripts))
        for script, outcome in zip(scripts, outcomes, strict=True):
            if len(script.chosen) < len(script.prefix):
                raise Unrepeatable(f"{len(script.prefix)} choices were made, and now {len(script.chosen)}")
            yield script.probability, outcome
            waiting += [(prefix, script.asked[: len(prefix)]) for prefix in script.others()]
