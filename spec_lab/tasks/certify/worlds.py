"""Toy worlds: a target and a draft over a few tokens, whose laws depend on the whole text, as tables.

A text after the prompt is its tokens read as digits in base V, the first one highest: the laws after all texts of one
length are one array ``[V ** length, V]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from spec_lab.core.probabilities import Sampling, logits_to_probs

PROMPT = (0, 1, 2, 0, 1, 3, 2, 0, 1)
"""What every toy text begins with. Its end has occurred before, so that prompt lookup has something to draft."""

IMPOSSIBLE = -1e6
"""A logit that has no mass at all, yet is finite: its exponential is zero in float64, at any temperature below 1000."""


class World(Protocol):
    """The laws of a target and of a draft after every text."""

    @property
    def v(self) -> int:
        """V, the number of tokens."""
        ...

    def laws(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The laws p and q after every text of ``length`` tokens, each ``[V ** length, V]``."""
        ...


@dataclass(frozen=True)
class Random:
    """Laws of all kinds: generic ones, p = q, disjoint supports, one-hot p, one-hot q, zeros in either.

    Args:
        seed: of the world.
        v: V.
        support: most tokens of q; p has one more at most. It bounds what there is to enumerate.
        plain: generic laws only; p is nowhere zero.
    """

    seed: int
    v: int = 4
    support: int = 3
    plain: bool = False

    @cache  # noqa: B019
    def laws(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """See ``World.laws``."""
        rng = np.random.default_rng([self.seed, length])
        pairs = [self._pair(rng) for _ in range(self.v**length)]
        return np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])

    def _law(self, rng: np.random.Generator, support: np.ndarray) -> np.ndarray:
        law = np.zeros(self.v)
        law[support] = rng.dirichlet(np.ones(len(support)))
        return law

    def _pair(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        order = rng.permutation(self.v)
        few, more = order[: self.support], order[: self.support + 1]
        if self.plain:
            return self._law(rng, order), self._law(rng, few)
        kind = rng.choice(
            ["generic", "zeros", "equal", "disjoint", "one-hot p", "one-hot q"], p=[0.5, 0.2] + [0.075] * 4
        )
        if kind == "disjoint":
            return self._law(rng, order[:2]), self._law(rng, order[2 : 2 + self.support])
        q = self._law(rng, few[:1] if kind == "one-hot q" else few)
        if kind == "equal":
            return q.copy(), q
        if kind == "one-hot p":
            return self._law(rng, few[-1:]), q
        return self._law(rng, rng.permutation(self.v)[: self.support] if kind == "zeros" else more), q


def code(text: Sequence[int], v: int) -> int:
    """The text's number among those of its length."""
    number = 0
    for token in text:
        number = number * v + token
    return number


def text_of(number: int, length: int, v: int) -> tuple[int, ...]:
    """The text with this number."""
    return tuple(number // v**place % v for place in reversed(range(length)))


def logits(laws: np.ndarray) -> np.ndarray:
    """Logits whose softmax is ``laws``."""
    return np.log(laws, out=np.full_like(laws, IMPOSSIBLE), where=laws > 0)


def warped(world: World, lengths: int, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> list[np.ndarray]:
    """What autoregressive decoding samples: p after every text of 0 .. ``lengths`` tokens, as ``sampling`` warps it."""
    found = []
    for length in range(lengths + 1):
        raw = torch.from_numpy(logits(world.laws(length)[0]))
        seen = torch.zeros(raw.shape, dtype=torch.bool)
        seen[:, list(prompt)] = True
        for number in range(len(raw)):
            seen[number, list(text_of(number, length, world.v))] = True
        found.append(logits_to_probs(raw, [sampling], seen).numpy())
    return found
