"""The reference of the decode loop: autoregressive decoding of a toy, enumerated without engine, KV cache or drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from spec_lab.constrain import Constraint, ConstraintState, Continuation
from spec_lab.constrain.protocol import allows, unpack
from spec_lab.core.history import TextHistories
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.tasks.certify.instances import PLAIN, Instance
from spec_lab.tasks.certify.outputs import Distribution, Output
from spec_lab.tasks.certify.toy_models import code, logits


def truth(instance: Instance, sampling: Sampling = PLAIN) -> Distribution:
    """Return the distribution of the outputs of autoregressive decoding under the instance's constraint; where that
    asks for ``distribution="global"``, the distribution without it given that the output is valid.

    Tokens are sampled one after another from the masked probabilities; after each the constraint's action is applied.
    All outcomes are visited, each with the product of its tokens' probabilities.
    """
    request, applied = instance.request(0, sampling), instance.applied
    if applied is not None and applied.is_global:
        return _given_valid(instance, sampling, applied.constraint)
    tables = [logits(instance.toy.probabilities(length)[0]) for length in range(instance.tokens)]
    constraint = applied.constraint if applied is not None and applied.on_target else None
    forked = constraint is None or constraint.has_actions
    decoding = _Autoregressive(instance.toy.v, request, tables, None if forked else constraint)
    start = None if constraint is None else constraint.start(request)
    distribution = Distribution()
    for probability, ended in decoding.outcomes(_Live((), start)):
        output: Output = tuple((text, finish) for _, text, finish in sorted(ended))
        distribution[output] = distribution.get(output, 0.0) + probability
    return distribution


def _given_valid(instance: Instance, sampling: Sampling, constraint: Constraint) -> Distribution:
    """Return p(x | valid): every output without the constraint, those that are not valid removed, renormalised.

    Valid are outputs that end with a stop token and of which the constraint allows every token.
    """
    request = instance.request(0, sampling)
    distribution = Distribution()
    for output, probability in truth(replace(instance, applied=None), sampling).items():
        ((text, finish),) = output
        state, valid = constraint.start(request), finish == "stop"
        for position, token in enumerate(text):
            mask = state.mask()
            valid = valid and (mask is None or allows(mask, token))
            if not valid:
                break
            if position + 1 < len(text):
                state.advance(token)
        if valid:
            distribution[output] = probability
    total = sum(distribution.values())
    return Distribution({output: probability / total for output, probability in distribution.items()})


Ended = tuple[tuple[int, ...], tuple[int, ...], str]
"""A lineage, its text and why it ended."""


@dataclass(frozen=True)
class _Live:
    text: tuple[int, ...]
    state: ConstraintState | None
    lineage: tuple[int, ...] = ()
    forks: int = 0


@dataclass(frozen=True)
class _Autoregressive:
    """Autoregressive decoding of one request, every outcome with its probability.

    Args:
        v: V.
        tables: the target's logits after every text of each length.
        constraint: starts a new state for every text, so that the reference needs no ``fork``; None where states are
            forked: those of a constraint with actions.
    """

    v: int
    request: Request
    tables: Sequence[np.ndarray]
    constraint: Constraint | None = None

    def outcomes(self, live: _Live) -> Iterator[tuple[float, list[Ended]]]:
        """Yield every way in which a sequence and its forks can end."""
        action = None if live.state is None else live.state.action()
        if action:
            yield from self._acted(live, action)
        elif action is not None:
            yield 1.0, [(live.lineage, live.text, "constraint")]
        elif len(live.text) >= self.request.max_new_tokens:
            yield 1.0, [(live.lineage, live.text, "length")]
        else:
            p = self._probabilities(live)
            if not p.any():
                yield 1.0, [(live.lineage, live.text, "stuck")]
            for token in np.flatnonzero(p).tolist():
                text, state = (*live.text, token), live.state
                if token in self.request.stop:
                    yield float(p[token]), [(live.lineage, text, "stop")]
                    continue
                if self.constraint is not None:
                    state = self.constraint.start(self.request)
                    for earlier in text:
                        state.advance(earlier)
                elif state is not None:
                    state = state.fork()
                    state.advance(token)
                for probability, ended in self.outcomes(replace(live, text=text, state=state)):
                    yield float(p[token]) * probability, ended

    def _acted(self, live: _Live, action: tuple[Continuation, ...]) -> Iterator[tuple[float, list[Ended]]]:
        forks, each = live.forks + (len(action) > 1), []
        for number, onward in enumerate(action):
            text = live.text[: len(live.text) - onward.backtrack]
            if number:
                sequence = _Live(text, onward.state, (*live.lineage, live.forks, number))
            else:
                sequence = _Live(text, onward.state, live.lineage, forks)
            each.append(list(self.outcomes(sequence)))
        for some in product(*each):
            yield float(np.prod([p for p, _ in some])), [output for _, ended in some for output in ended]

    def _probabilities(self, live: _Live) -> np.ndarray:  # [V]
        mask = None if live.state is None else live.state.mask()
        allowed = None if mask is None else torch.from_numpy(unpack(mask, self.v))[None]
        row = torch.from_numpy(self.tables[len(live.text)][code(live.text, self.v)])[None]
        prompt, sampling = self.request.tokens, [self.request.sampling]
        histories = TextHistories.of([[*prompt, *live.text]], [len(prompt)], sampling, self.v, row.device)
        return logits_to_probs(row, sampling, None if histories is None else histories.here(), allowed)[0].numpy()
