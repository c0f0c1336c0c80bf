"""The exact layer under constraints: what the decode loop puts out, and what autoregressive decoding by hand does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from spec_lab.certify.enumerate import side_by_side
from spec_lab.certify.exact import MOST, PLAIN, Instance, request_of, toy
from spec_lab.certify.worlds import code, logits
from spec_lab.constrain import Binding, Onward, State
from spec_lab.constrain.state import unpack
from spec_lab.decode import Group
from spec_lab.draft import Drawn
from spec_lab.law import Draws, Sampling, law
from spec_lab.propose import Proposer
from spec_lab.verify import Verifier

Output = tuple[tuple[tuple[int, ...], str], ...]
"""Every sequence of a request, in the order of lineages: its text and why it ended."""

Law = dict[Output, float]


@torch.inference_mode()
def decoded(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    binding: Binding,
    sampling: Sampling = PLAIN,
    most: int = MOST,
) -> Law:
    """The law of what the decode loop puts out, every choice enumerated. See ``exact.examine``."""
    parts = toy(instance, proposer, sampling)
    found: Law = {}

    def play(draws: Draws, count: int) -> list[Output]:
        requests = [request_of(number, instance, sampling) for number in range(count)]
        group = Group(parts.target, parts.proposer, verifier, requests, draws, binding)
        for _ in group:
            pass
        each: list[list[Any]] = [[] for _ in range(count)]
        for one in group.sequences:
            each[one.request.id].append((one.lineage, tuple(one.emitted), one.finish))
        return [tuple((text, finish) for _, text, finish in sorted(every)) for every in each]

    for probability, output in side_by_side(play, most=most):
        found[output] = found.get(output, 0.0) + probability
    return found


def truth(instance: Instance, binding: Binding, sampling: Sampling = PLAIN) -> Law:
    """The law of autoregressive decoding under the same constraint, by hand: no loop, no cells, no drafts.

    One token is sampled from the masked law after another; after each the constraint's action is taken.
    """
    request = request_of(0, instance, sampling)
    tables = [logits(instance.world.laws(length)[0]) for length in range(instance.tokens)]
    by_hand = _ByHand(instance.world.v, instance.tokens, request.stop, tables, sampling)
    start = binding.constraint.start(request)
    found: Law = {}
    for probability, ended in by_hand.ways(_Live((), start if binding.on_target else None)):
        key: Output = tuple((text, finish) for _, text, finish in sorted(ended))
        found[key] = found.get(key, 0.0) + probability
    return found


Ended = tuple[tuple[int, ...], tuple[int, ...], str]
"""A lineage, its text and why it ended."""


@dataclass(frozen=True)
class _Live:
    text: tuple[int, ...]
    state: State | None
    lineage: tuple[int, ...] = ()
    forks: int = 0


@dataclass(frozen=True)
class _ByHand:
    """Autoregressive decoding of a toy, every outcome with its probability."""

    v: int
    tokens: int
    stop: frozenset[int]
    tables: Sequence[np.ndarray]
    sampling: Sampling

    def ways(self, live: _Live) -> Iterator[tuple[float, list[Ended]]]:
        """Every way in which a sequence and its forks can end."""
        action = None if live.state is None else live.state.action()
        if action:
            yield from self._acted(live, action)
        elif action is not None:
            yield 1.0, [(live.lineage, live.text, "constraint")]
        elif len(live.text) >= self.tokens:
            yield 1.0, [(live.lineage, live.text, "length")]
        else:
            p = self._law(live)
            if not p.any():
                yield 1.0, [(live.lineage, live.text, "stuck")]
            for token in np.flatnonzero(p).tolist():
                text, state = (*live.text, token), live.state
                if token in self.stop:
                    yield float(p[token]), [(live.lineage, text, "stop")]
                    continue
                if state is not None:
                    state = state.fork()
                    state.advance(token)
                for probability, ended in self.ways(replace(live, text=text, state=state)):
                    yield float(p[token]) * probability, ended

    def _acted(self, live: _Live, action: tuple[Onward, ...]) -> Iterator[tuple[float, list[Ended]]]:
        forks, each = live.forks + (len(action) > 1), []
        for number, onward in enumerate(action):
            text = live.text[: len(live.text) - onward.backtrack]
            if number:
                one = _Live(text, onward.state, (*live.lineage, live.forks, number))
            else:
                one = _Live(text, onward.state, live.lineage, forks)
            each.append(list(self.ways(one)))
        for some in product(*each):
            yield float(np.prod([p for p, _ in some])), [one for _, ended in some for one in ended]

    def _law(self, live: _Live) -> np.ndarray:  # [V]
        mask = None if live.state is None else live.state.mask()
        allowed = None if mask is None else torch.from_numpy(unpack(mask, self.v))[None]
        row = torch.from_numpy(self.tables[len(live.text)][code(live.text, self.v)])[None]
        return law(row, [self.sampling], None, allowed)[0].numpy()
