"""Several constraints at once: what all of them allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from spec_lab.constrain.protocol import Constraint, Masks, Onward, State, by_forks
from spec_lab.core.draft import Shape
from spec_lab.engine.request import Request

Past = tuple["Past", int] | None
"""The tokens of a path, the last one first: forks share it."""


class Together:
    """Binds by all of its parts. See ``Constraint``.

    Where one part takes tokens back, the others are run again over what is left; so one of them may act, and no more.

    Args:
        parts: at least one, all with the same vocabulary.

    Raises:
        ValueError: two parts that act, or vocabularies that differ.
    """

    def __init__(self, parts: Sequence[Constraint]) -> None:
        acting = [part.name for part in parts if part.acts]
        if len(acting) > 1:
            raise ValueError(f"{' and '.join(acting)} both take tokens back or fork; only one of them can be in charge")
        if len({part.vocabulary for part in parts}) != 1:
            widths = ", ".join(f"{part.name}: {part.vocabulary}" for part in parts)
            raise ValueError(f"constraints over different vocabularies cannot bind together ({widths})")
        self.parts = tuple(parts)
        self.name = " + ".join(part.name for part in parts)
        self.vocabulary = parts[0].vocabulary
        self.acts = bool(acting)
        self.peeks = all(getattr(part, "peeks", True) for part in parts)
        self.keep = next((keep for part in parts if (keep := getattr(part, "keep", None)) is not None), None)
        self.wants_logprobs = any(getattr(part, "wants_logprobs", False) for part in parts)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        return {"parts": [{"name": part.name, **(getattr(part, "facts", None) or {})} for part in self.parts]}

    def start(self, request: Request) -> All:
        """See ``Constraint``."""
        states = tuple(part.start(request) for part in self.parts)
        return All(states, tuple(state.fork() for state in states) if self.acts else states, None)

    def masks(self, states: Sequence[All | None], shape: Shape, token: np.ndarray) -> Masks:
        """See ``Constraint``."""
        each = []
        for number, part in enumerate(self.parts):
            own = [None if state is None else state.states[number] for state in states]
            fast = getattr(part, "masks", None)
            each.append(by_forks(own, shape, token, self.vocabulary) if fast is None else fast(own, shape, token))
        return reduce(Masks.both, each)


class All:
    """The states of all parts. See ``State``.

    Args:
        states: of the parts.
        origins: as they were at the start, never advanced; used only where a part acts.
        past: the tokens since then.
    """

    def __init__(self, states: tuple[State, ...], origins: tuple[State, ...], past: Past) -> None:
        self.states, self.origins, self.past = states, origins, past

    def fork(self) -> All:
        """See ``State``."""
        return All(tuple(state.fork() for state in self.states), self.origins, self.past)

    def advance(self, token: int) -> None:
        """See ``State``."""
        for state in self.states:
            state.advance(token)
        self.past = (self.past, token)

    def mask(self) -> np.ndarray | None:
        """See ``State``."""
        masks = [mask for mask in (state.mask() for state in self.states) if mask is not None]
        return reduce(np.bitwise_and, masks) if masks else None

    def action(self) -> tuple[Onward, ...] | None:
        """See ``State``."""
        for number, state in enumerate(self.states):
            wanted = state.action()
            if wanted is not None:
                return tuple(Onward(one.backtrack, self._onward(number, one)) for one in wanted)
        return None

    def _onward(self, acting: int, onward: Onward) -> All:
        past = self.past
        for _ in range(onward.backtrack):
            if past is None:
                break  # into the prompt: refused by whoever takes the tokens back
            past = past[0]
        states = []
        for number, (state, origin) in enumerate(zip(self.states, self.origins, strict=True)):
            if number == acting:
                states.append(onward.state)
            elif not onward.backtrack:
                states.append(state.fork())
            else:
                states.append(_again(origin, past))
        return All(tuple(states), self.origins, past)


def _again(origin: State, past: Past) -> State:
    """The state after ``past``, run from the start."""
    tokens = []
    while past is not None:
        past, token = past
        tokens.append(token)
    state = origin.fork()
    for token in reversed(tokens):
        state.advance(token)
    return state
