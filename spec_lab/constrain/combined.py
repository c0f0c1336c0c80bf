"""Several constraints at once: a token is allowed where all of them allow it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from spec_lab.constrain.protocol import (
    Constraint,
    ConstraintState,
    Continuation,
    Masks,
    action_of,
    calling,
    packed_mask,
    started,
)
from spec_lab.core.request import Ended, Request
from spec_lab.core.shape import Shape

T = TypeVar("T")

History = tuple["History", int] | None
"""The tokens since the start as a linked list, the last one first, which forks share."""


class Combined(Constraint):
    """Several constraints that all apply. See ``Constraint``.

    Where one of them backtracks, the states of the others are advanced again from the start; so at most one of them may
    have actions.

    Args:
        parts: at least one constraint, all with the same vocabulary.

    Raises:
        ValueError: two constraints that have actions, or vocabularies that differ.
    """

    parts: tuple[Constraint, ...]
    name: str
    vocabulary: int
    has_actions: bool
    supports_drafts: bool
    keep: Callable[[Sequence[Ended]], Collection[int]] | None
    reads_logprobs: bool

    def __init__(self, parts: Sequence[Constraint]) -> None:
        acting = [part.name for part in parts if part.has_actions]
        if len(acting) > 1:
            raise ValueError(f"{' and '.join(acting)} both backtrack or fork: only one constraint of a run may do so")
        if len({part.vocabulary for part in parts}) != 1:
            widths = ", ".join(f"{part.name}: {part.vocabulary}" for part in parts)
            raise ValueError(f"constraints over vocabularies of different sizes cannot be combined ({widths})")
        self.parts = tuple(parts)
        self.name = " + ".join(part.name for part in parts)
        self.vocabulary = parts[0].vocabulary
        self.has_actions = bool(acting)
        self.supports_drafts = all(part.supports_drafts for part in parts)
        self.keep = next((part.keep for part in parts if part.keep is not None), None)
        self.reads_logprobs = any(part.reads_logprobs for part in parts)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"parts": [{"name": part.name, **part.facts} for part in self.parts]}

    def start(self, request: Request) -> CombinedState:
        """See ``Constraint``."""
        origins = tuple(_call(part, started, part, request) for part in self.parts)
        state = CombinedState(self.parts, origins, origins, None)
        return state.fork() if self.has_actions else state

    def masks(self, states: Sequence[CombinedState | None], shape: Shape, token: np.ndarray) -> Masks:
        """See ``Constraint``."""
        each = []
        for number, part in enumerate(self.parts):
            of_part = [None if state is None else state.states[number] for state in states]
            each.append(_call(part, part.masks, of_part, shape, token))
        return reduce(Masks.intersect, each)


class CombinedState(ConstraintState):
    """The states of all parts. See ``ConstraintState``.

    Args:
        states: theirs.
        origins: the states at the start, never advanced; used only where a part has actions.
        history: the tokens since then.
    """

    def __init__(
        self,
        parts: tuple[Constraint, ...],
        states: tuple[ConstraintState, ...],
        origins: tuple[ConstraintState, ...],
        history: History,
    ) -> None:
        self.parts, self.states, self.origins, self.history = parts, states, origins, history

    def fork(self) -> CombinedState:
        """See ``ConstraintState``."""
        states = tuple(_call(part, state.fork) for part, state in zip(self.parts, self.states, strict=True))
        return CombinedState(self.parts, states, self.origins, self.history)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        for part, state in zip(self.parts, self.states, strict=True):
            _call(part, state.advance, token)
        self.history = (self.history, token)

    def mask(self) -> np.ndarray | None:
        """See ``ConstraintState``."""
        pairs = zip(self.parts, self.states, strict=True)
        each = [_call(part, packed_mask, state, part.vocabulary) for part, state in pairs]
        masks = [mask for mask in each if mask is not None]
        return reduce(np.bitwise_and, masks) if masks else None

    def action(self) -> tuple[Continuation, ...] | None:
        """See ``ConstraintState``."""
        for number, (part, state) in enumerate(zip(self.parts, self.states, strict=True)):
            action = _call(part, action_of, part, state)
            if action is not None:
                return tuple(Continuation(after.backtrack, self._continued(number, after)) for after in action)
        return None

    def _continued(self, acting: int, continuation: Continuation) -> CombinedState:
        """Return all states after one part's continuation."""
        history = self.history
        for _ in range(continuation.backtrack):
            if history is None:
                break  # into the prompt: the engine, which removes the tokens, refuses it
            history = history[0]
        states = []
        for number, (part, state, origin) in enumerate(zip(self.parts, self.states, self.origins, strict=True)):
            if number == acting:
                states.append(continuation.state)
            elif not continuation.backtrack:
                states.append(_call(part, state.fork))
            else:
                states.append(_call(part, _advanced, origin, history))
        return CombinedState(self.parts, tuple(states), self.origins, history)


def _call(part: Constraint, call: Callable[..., T], *arguments: Any) -> T:
    """Call a method of one constraint, so that an error names it and not all of them."""
    with calling(part):
        return call(*arguments)


def _advanced(origin: ConstraintState, history: History) -> ConstraintState:
    """Return a fork of a state, advanced by the tokens of ``history``."""
    tokens = []
    while history is not None:
        history, token = history
        tokens.append(token)
    state = origin.fork()
    for token in reversed(tokens):
        state.advance(token)
    return state
