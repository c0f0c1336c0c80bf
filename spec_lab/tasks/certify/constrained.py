"""The exact layer under constraints: what the decode loop puts out, and what autoregressive decoding by hand does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from spec_lab.constrain import AppliedConstraint, ConstraintState, Continuation
from spec_lab.constrain.applied import PLACES
from spec_lab.constrain.banned import Banned
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.engines.grammar import regex
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.protocol import unpack
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.draft import Drawn
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import Draws
from spec_lab.engine.engine import fixed_group
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.enumerate import side_by_side
from spec_lab.tasks.certify.exact import MOST, PLAIN, Finding, Instance, request_of, toy
from spec_lab.tasks.certify.exact import examine as free
from spec_lab.tasks.certify.outputs import EXACT, unlike
from spec_lab.tasks.certify.worlds import Random, code, logits
from spec_lab.verify import Verifier

Output = tuple[tuple[tuple[int, ...], str], ...]
"""Every sequence of a request, in the order of lineages: its text and why it ended."""

Law = dict[Output, float]

PIECES = (b"a", b"b", b"ab", b"c", b"")
"""The toy's tokens as text; the last one ends it."""

END = frozenset({4})
WORLD = Random(8, v=5, support=2)


@cache
def bound() -> tuple[Instance, ...]:
    """Loops under constraints of every kind: grammars on every placement, a fork, a text taken back."""
    vocabulary = Vocabulary.plain(PIECES, 4)
    grammar = regex(vocabulary, "(ab|c)(a|b|c)*b|a[bc]")
    bindings = [AppliedConstraint(grammar, placement, fast_forward=placement == "both") for placement in PLACES]
    bindings.append(
        AppliedConstraint(ControllerConstraint(lambda _: Forking(), vocabulary.size, "a controller that forks"))
    )
    bindings.append(AppliedConstraint(Combined([Banned(("bb", "ca"), PIECES), MinNewTokens(2, vocabulary.size)])))
    trees = ("1x1", "2x1", "1x1", "1x1", "1", "1x1")
    return tuple(Instance(WORLD, tree, 2, END, binding=binding) for tree, binding in zip(trees, bindings, strict=True))


def own(binding: AppliedConstraint | None) -> tuple[Instance, ...]:
    """Loops under a run's own constraint, on every placement that it can have; none where it offers no ``toy``."""
    make = None if binding is None else getattr(binding.constraint, "toy", None)
    if make is None:
        return ()
    constraint = make(Vocabulary.plain(PIECES, 4))
    places = [place for place in PLACES if place in ("target", "both") or not constraint.has_actions]
    bindings = [AppliedConstraint(constraint, place, fast_forward=place == "both") for place in places]
    return tuple(Instance(WORLD, tree, n, END, binding=one) for tree, n in (("2x1", 2), ("1x1", 3)) for one in bindings)


@dataclass
class Forking:
    """Goes two ways after the first token, one of them from before it."""

    steps: int = 0

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        self.steps += 1
        if self.steps == 2:
            return [Branch(allow={0, 1, 2}), Branch(backtrack=1, ff=((3, 0),))]
        return [Branch()]

    def fork(self) -> Forking:
        """See ``Controller``."""
        return Forking(self.steps)


def examine(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    sampling: Sampling = PLAIN,
    most: int = MOST,
) -> Finding:
    """Enumerate an instance, bound or not. See ``exact.examine``."""
    if instance.binding is None:
        return free(instance, proposer, verifier, sampling, most)
    wanted, seen = truth(instance, sampling), Seen()
    found = decoded(instance, proposer, verifier, sampling, most, seen)
    outputs = {*found, *wanted}
    tv = 0.5 * sum(abs(found.get(one, 0.0) - wanted.get(one, 0.0)) for one in outputs)
    worst = max(outputs, key=lambda one: abs(found.get(one, 0.0) - wanted.get(one, 0.0)))
    failure = None
    if not tv <= EXACT:
        failure = f"outputs are {worst} with probability {unlike(found.get(worst, 0.0), wanted.get(worst, 0.0))}"
    mass = sum(found.values())
    return Finding(instance.name, tv, mass, failure, seen.accepted, seen.expected, seen.outcomes, seen.drafted)


@dataclass
class Seen:
    """What ``decoded`` came across: accepted tokens that were not forced, as found and as expected, and how much."""

    accepted: float = 0.0
    expected: float = 0.0
    outcomes: int = 0
    drafted: int = 0


@torch.inference_mode()
def decoded(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    sampling: Sampling = PLAIN,
    most: int = MOST,
    seen: Seen | None = None,
) -> Law:
    """The law of what the decode loop puts out, every choice enumerated. Errors as in ``exact.examine``."""
    parts = toy(instance, proposer, sampling)
    seen, found = seen or Seen(), Law()

    def play(draws: Draws, count: int) -> list[tuple[Output, float, float]]:
        requests = [request_of(number, instance, sampling) for number in range(count)]
        group = fixed_group(parts.target, parts.proposer, verifier, requests, draws, instance.binding)
        took, hoped = np.zeros(count), np.zeros(count)
        for done in group:
            seen.drafted += done.draft.shape.nodes
            for head, (live, got) in enumerate(zip(done.sequences, done.committed, strict=True)):
                took[live.request.id] += len(got.path) - got.count(accepted=True, forced=True)
                hoped[live.request.id] += done.expected[head]
        each: list[list[Any]] = [[] for _ in range(count)]
        for one in group.sequences:
            each[one.request.id].append((one.lineage, tuple(one.emitted), one.finish))
        outputs = [tuple((text, finish) for _, text, finish in sorted(every)) for every in each]
        return list(zip(outputs, took.tolist(), hoped.tolist(), strict=True))

    for probability, (output, took, hoped) in side_by_side(play, most=most):
        seen.outcomes += 1
        seen.accepted += probability * took
        seen.expected += probability * hoped
        found[output] = found.get(output, 0.0) + probability
    return found


def truth(instance: Instance, sampling: Sampling = PLAIN) -> Law:
    """The law of autoregressive decoding under the same constraint, by hand: no loop, no cells, no drafts.

    One token is sampled from the masked law after another; after each the constraint's action is taken.
    """
    request, binding = request_of(0, instance, sampling), instance.binding
    tables = [logits(instance.world.laws(length)[0]) for length in range(instance.tokens)]
    by_hand = _ByHand(instance.world.v, instance.tokens, request.stop, tables, sampling)
    start = binding.constraint.start(request) if binding is not None and binding.on_target else None
    found = Law()
    for probability, ended in by_hand.ways(_Live((), start)):
        key: Output = tuple((text, finish) for _, text, finish in sorted(ended))
        found[key] = found.get(key, 0.0) + probability
    return found


Ended = tuple[tuple[int, ...], tuple[int, ...], str]
"""A lineage, its text and why it ended."""


@dataclass(frozen=True)
class _Live:
    text: tuple[int, ...]
    state: ConstraintState | None
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

    def _acted(self, live: _Live, action: tuple[Continuation, ...]) -> Iterator[tuple[float, list[Ended]]]:
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
        return logits_to_probs(row, [self.sampling], None, allowed)[0].numpy()
