"""The constraint under which whole outputs have the target's distribution given that they are valid."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.potential import Potential, PotentialState, Prefixes, TooManyPrefixes, explore, log_potential
from spec_lab.constrain.protocol import Constraint, ConstraintError, calling
from spec_lab.core.request import Request
from spec_lab.decode.text_logits import text_logits
from spec_lab.models.target import Target

GLOBAL = "constraint.distribution=global"


@dataclass(eq=False)
class Conditional(Constraint):
    """A constraint whose states have the potential of every next token. See ``Constraint`` and ``constrain.potential``.

    Args:
        target: whose probabilities the potentials are computed from, when a request starts.
    """

    applied: AppliedConstraint
    target: Target
    _explored: dict[Request, Prefixes] = field(default_factory=dict, init=False, repr=False)  # of waiting requests
    _last: tuple[Request, Potential] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the constraint itself."""
        return self.applied.constraint.name

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.applied.constraint.vocabulary

    def check(self, request: Request) -> None:
        """Refuse a request whose valid outputs cannot be enumerated; no model is run.

        Raises:
            ValueError: why not, and what to do.
        """
        self.check_request(request)
        same = _same(request)
        if same in self._explored or (self._last is not None and self._last[0] == same):
            return
        try:
            self._explored[same] = self.prefixes(request)
        except TooManyPrefixes as error:
            raise self.refusal(request, error) from error
        except ConstraintError:
            pass  # ends this request when it starts

    def check_request(self, request: Request) -> None:
        """Refuse a request whose outputs have no distribution given that they are valid.

        Raises:
            ValueError: why not, and what to do.
        """
        wrong = ""
        if request.sampling.temperature == 0:
            wrong = (
                "at temperature 0 the model has one output, which is valid or not: set sampling.temperature above 0, "
                "or constraint.distribution=local"
            )
        elif request.stop_strings:
            wrong = "stop strings end outputs that the constraint does not: set stop_strings=[]"
        elif not request.stop:
            wrong = "the target has no token that ends a text, so that no output is complete"
        if wrong:
            raise ValueError(f"request '{request.name}': {GLOBAL} is not possible: {wrong}")

    def refusal(self, request: Request, error: TooManyPrefixes) -> ValueError:
        """Return the refusal of a request whose valid outputs cannot be enumerated."""
        return ValueError(
            f"request '{request.name}': {GLOBAL} needs a potential for every prefix of a valid output, but {error} of "
            f"up to {self._length(request)} tokens: set a smaller max_new_tokens, a constraint with fewer outputs or a "
            "larger constraint.max_prefixes, sample with task=constraint_distance, or set constraint.distribution=local"
        )

    def prefixes(self, request: Request) -> Prefixes:
        """Return the prefixes of the request's valid outputs.

        Raises:
            TooManyPrefixes: they are more than ``max_prefixes``.
            ConstraintError: there are none; or as the constraint.
        """
        constraint = self.applied.constraint
        with calling(constraint):
            state, length = constraint.start(request), self._length(request)
            return explore(state, request.stop, self.vocabulary, length, self.applied.max_prefixes)

    def start(self, request: Request) -> PotentialState:
        """Return the state after the prompt.

        Raises:
            ConstraintError: no valid output exists; or as the constraint.
        """
        same = _same(request)
        if self._last is None or self._last[0] != same:  # copies of a request come one after another
            explored = self._explored.pop(same, None)
            prefixes = self.prefixes(request) if explored is None else explored
            self._last = same, potential(self.target, request, prefixes)
        return PotentialState(self._last[1])

    def _length(self, request: Request) -> int:
        return min(request.max_new_tokens, self.target.context - len(request.tokens))


def _same(request: Request) -> Request:
    """The request without what its potential does not depend on."""
    return replace(request, id=0, name="", logprobs=False)


def potential(target: Target, request: Request, prefixes: Prefixes) -> Potential:
    """Return the potential of a request, from forwards over all prefixes of its valid outputs."""
    log_p: list[np.ndarray] = [np.empty(0)] * len(prefixes)
    for some in text_logits(target, request, prefixes.texts):
        rows = some.log_probabilities()
        for row, node in zip(rows, some.numbers.tolist(), strict=True):
            log_p[node] = row[prefixes.tokens[node]]
    return Potential(prefixes, log_potential(prefixes, log_p))


def conditioned(applied: AppliedConstraint, target: Target) -> tuple[AppliedConstraint, Conditional | None]:
    """Return a constraint as the steps of an engine apply it, and what checks requests; None of a local one."""
    if not applied.is_global:
        return applied, None
    constraint = Conditional(applied, target)
    return replace(applied, constraint=constraint), constraint
