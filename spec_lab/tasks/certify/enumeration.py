"""Random draws that enumerate instead of sampling: every outcome of every random choice, with its probability.

All random choices go through ``Draws``. A ``Script`` replays recorded choices and then always takes the first index
with positive probability; the choices not taken become new scripts (depth-first search). The probability of an outcome
is the product of the probabilities of its choices, so those of all outcomes sum to 1. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from spec_lab.core.faults import Passing
from spec_lab.core.randomness import Draws, Key, Purpose

T = TypeVar("T")


SAME = 1e-4
"""Largest difference between the weights of a choice when it is replayed. Rounding in float32 differs by less."""


class Reused(Passing, AssertionError):
    """One random key was used for two choices: the second would reuse the noise of the first."""


class Continuous(Passing, ValueError):
    """Gumbel noise has uncountably many values; it is tested by samples instead."""


class TooMany(Passing, ValueError):
    """An instance has more outcomes than the limit."""


class Unrepeatable(Passing, ValueError):
    """After the same choices were replayed, the next choice was a different one."""


class RandomChoice(NamedTuple):
    """A random choice: its key, but for request and step, its probabilities ``[V]``, and the number of requests for
    which the same call chose.
    """

    key: Key
    weights: np.ndarray
    batch: int = 1

    def difference(self, other: RandomChoice) -> str:
        """Return how two choices that should be the same differ; empty where they do not. Other requests of the batch
        may pad the weights with zeros and change their rounding.
        """
        if self.key == other.key:
            size = max(len(self.weights), len(other.weights))
            mine, theirs = (np.pad(choice.weights, (0, size - len(choice.weights))) for choice in (self, other))
            index = int(np.abs(mine - theirs).argmax())
            if abs(mine[index] - theirs[index]) <= SAME:
                return ""
            what = f"their weights differ by up to {abs(mine[index] - theirs[index]):.3g}, of index {index}: "
            what += f"{mine[index]:.3g}, then {theirs[index]:.3g}"
        else:
            what = f"they are for {_words(self.key)} and for {_words(other.key)}"
        return f"{what}; batches of {self.batch} and of {other.batch} requests"

    def __str__(self) -> str:
        options = np.flatnonzero(self.weights > 0).tolist()
        purpose = {int(purpose): purpose.name for purpose in Purpose}.get(self.key.purpose, self.key.purpose)
        return f"{purpose} among {options}"


def _words(key: Key) -> str:
    """Return which choice of a request a key is for."""
    return f"index {key.index} of purpose {key.purpose} in branch {key.branch}"


class Script:
    """The choices of one request: a recorded prefix, then the first index with positive probability each time.

    What has only one possibility does not count as a choice: whether it is drawn at all may depend on the other
    requests of the batch.

    Args:
        prefix: indices to choose.
        known: the choices from which the prefix was recorded; empty: they are not checked.
    """

    def __init__(self, prefix: tuple[int, ...] = (), known: Sequence[RandomChoice] = ()) -> None:
        self.prefix, self.known, self.probability = prefix, known, 1.0
        self.choices: list[RandomChoice] = []
        self.chosen: list[int] = []
        self.options: list[list[int]] = []
        self.keys: set[Key] = set()

    def choose(self, weights: np.ndarray, key: Key, batch: int = 1) -> int:
        """Return an index of ``weights`` ``[V]``, in a call for ``batch`` requests.

        Raises:
            Reused: the key was used before.
            Unrepeatable: a choice of the prefix differs from the recorded one.
            ValueError: no weight is positive.
        """
        if key in self.keys:
            raise Reused(f"{key} is used for two choices")
        self.keys.add(key)
        options = np.flatnonzero(weights > 0).tolist()
        if not options:
            raise ValueError(f"{key} chooses among weights none of which is positive: {weights.tolist()}")
        if len(options) == 1:
            return int(options[0])
        number, probabilities = len(self.chosen), weights / weights.sum()
        choice = RandomChoice(key._replace(request=0, step=0), probabilities, batch)
        if number < len(self.known) and (what := self.known[number].difference(choice)):
            raise Unrepeatable(f"choice {number} was {self.known[number]}, and is {choice} when it is replayed: {what}")
        self.choices.append(choice)
        index = self.prefix[number] if number < len(self.prefix) else options[0]
        self.probability *= float(probabilities[index])
        self.chosen.append(index)
        self.options.append(options)
        return index

    def others(self) -> Iterator[tuple[int, ...]]:
        """Yield the prefixes of the outcomes that branch off after this one's prefix."""
        for number in range(len(self.prefix), len(self.chosen)):
            for other in self.options[number][1:]:
                yield (*self.chosen[:number], other)


class Scripts:
    """``Draws`` that follow one script for each request, numbered from 0; a single script makes the choices of all."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts

    def pick(self, weights: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
        """See ``Draws.pick``. Probabilities are those of the weights as they are, also in float32."""
        rows, single = weights.cpu().double().numpy(), len(self.scripts) == 1
        batch = len({key.request for key in keys})
        chosen = [
            self.scripts[0 if single else key.request].choose(row, key, batch)
            for row, key in zip(rows, keys, strict=True)
        ]
        return torch.tensor(chosen, dtype=torch.int64, device=weights.device)

    def race(self, width: int, keys: Sequence[Key]) -> np.ndarray:
        """Refused: see ``Continuous``."""
        raise Continuous("Gumbel noise cannot be enumerated")


class Watched:
    """Draws that raise ``Reused`` where a random key is used twice."""

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
            raise Reused(f"{twice} is used for two choices")
        self.keys.update(keys)


def explore(play: Callable[[Draws], T]) -> Iterator[tuple[float, T]]:
    """Yield every outcome of ``play`` with its probability."""
    return ((mass, outcome) for mass, outcome in side_by_side(lambda draws, _: [play(draws)], 1))


def side_by_side(
    play: Callable[[Draws, int], Sequence[T]], wide: int = 256, max_outcomes: int | None = None
) -> Iterator[tuple[float, T]]:
    """Yield every outcome of one request with its probability; up to ``wide`` of them are decoded as one batch.

    Args:
        play: given draws and a number n, decodes n copies of the request as requests 0 .. n - 1 and returns n outcomes.
        wide: largest batch.
        max_outcomes: largest number of outcomes; None for no limit.

    Raises:
        TooMany: there are more outcomes.
        Unrepeatable: a replay of the same choices led to a different one.
    """
    waiting: list[tuple[tuple[int, ...], Sequence[RandomChoice]]] = [((), ())]
    completed = 0
    while waiting:
        scripts = [Script(*recorded) for recorded in waiting[-wide:]]
        del waiting[-wide:]
        completed += len(scripts)
        if max_outcomes is not None and completed + len(waiting) > max_outcomes:
            raise TooMany(f"more than {max_outcomes} outcomes")
        outcomes = play(Scripts(scripts), len(scripts))
        for script, outcome in zip(scripts, outcomes, strict=True):
            if len(script.chosen) < len(script.prefix):
                raise Unrepeatable(
                    f"{len(script.prefix)} choices were made, but only {len(script.chosen)} when they were replayed"
                )
            yield script.probability, outcome
            waiting += [(prefix, script.choices[: len(prefix)]) for prefix in script.others()]
