"""What a constraint is: a state along a path of tokens, and the masks of whole trees that follow from it.

Masks are packed: bit t of a row, lowest bit first, says whether token t may come next; ``W = ceil(V / 32)`` words of 32
bits make a row. A token is forced where its mask allows no other; there is no other way to say so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spec_lab.core.draft import Shape
from spec_lab.engine.request import Request


class Stuck(ValueError):
    """A constraint that cannot go on for one request: unsatisfiable, out of its limits, broken. It says why."""


class State(Protocol):
    """What a constraint knows after one path of tokens.

    A state is a function of the path: stepping a fork has no effect outside it, so that drafts may be tried on forks.
    Any method may raise ``Stuck``, which ends its own request only, and only once its path has been committed.
    """

    def fork(self) -> State:
        """An independent copy."""
        ...

    def advance(self, token: int) -> None:
        """``token``, which the mask allows, comes next. Never called while there is an action."""
        ...

    def mask(self) -> np.ndarray | None:  # [W] uint32
        """What may come next; None for everything. Not called while there is an action."""
        ...

    def action(self) -> tuple[Onward, ...] | None:
        """What must happen before anything else comes; None for nothing.

        The sequence ends on an empty tuple; otherwise it goes on as the first entry says, and one fork of it as each
        further entry says.
        """
        ...


@dataclass(frozen=True)
class Onward:
    """How a sequence goes on.

    Args:
        backtrack: tokens to take back, counted from the sequence's end: 1 takes back the token that came last. Tokens
            of the prompt cannot be taken back.
        state: the constraint from then on.
    """

    backtrack: int
    state: State


class Constraint(Protocol):
    """Binds requests.

    It may also offer ``masks(states, shape, token)``, equal to ``by_forks`` but faster; ``facts``, a mapping of what a
    record should keep; ``peeks``, False where states cannot be forked, so that nothing can be drafted;
    ``toy(vocabulary)``, the same constraint over a toy's few tokens, which ``certify`` then enumerates; and
    ``keep(ended)``, which is asked once all sequences of a request have finished (``Ended``, in the order of lineages)
    and gives the places of those to keep, with ``wants_logprobs``, True where it reads their log-probabilities.
    """

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...

    @property
    def vocabulary(self) -> int:
        """V, the width of its masks: that of the target's logits."""
        ...

    @property
    def acts(self) -> bool:
        """Whether its states may want actions."""
        ...

    def start(self, request: Request) -> State:
        """The state at the end of the request's prompt.

        Raises:
            Stuck: this request cannot be bound.
        """
        ...


@dataclass(frozen=True, eq=False)
class Masks:
    """A forest under a constraint.

    Args:
        bits: ``[R, W]`` uint32, what may come after each row; all zero below an illegal token and at an action.
        legal: ``[R]`` bool, whether every token on the way to the row was allowed; heads are.
        barrier: ``[R]`` bool, legal rows whose state wants an action: nothing is drafted below, nothing emitted there.
    """

    bits: np.ndarray  # [R, W]
    legal: np.ndarray  # [R]
    barrier: np.ndarray  # [R]

    def both(self, other: Masks) -> Masks:
        """Under two constraints at once."""
        legal = self.legal & other.legal
        barrier = (self.barrier | other.barrier) & legal
        bits = np.where((legal & ~barrier)[:, None], self.bits & other.bits, np.uint32(0))
        return Masks(bits, legal, barrier)

    @property
    def single(self) -> np.ndarray:  # [R]
        """Rows after which just one token may come."""
        return np.bitwise_count(self.bits).sum(-1) == 1

    @property
    def stuck(self) -> np.ndarray:  # [R]
        """Legal rows after which nothing may come, though no action is wanted."""
        return self.legal & ~self.barrier & ~self.bits.any(-1)


def by_forks(states: Sequence[State | None], shape: Shape, token: np.ndarray, vocabulary: int) -> Masks:
    """The masks of a forest, one fork a node: the readable way, and the oracle of faster ones.

    Args:
        states: ``[B]`` at the heads, left as they are; None binds nothing.
        shape: the forest.
        token: ``[M]`` its tokens.
        vocabulary: V.

    Raises:
        Stuck: at a head. At a node, it is a row after which nothing may come.
    """
    bits = np.zeros((shape.rows, width(vocabulary)), dtype=np.uint32)
    legal, barrier = np.zeros(shape.rows, dtype=bool), np.zeros(shape.rows, dtype=bool)
    at: list[State | None] = list(states)
    for row in range(shape.roots):
        legal[row] = True
        bits[row], barrier[row] = _here(at[row], vocabulary)
    for row, parent in enumerate(shape.parent.tolist(), start=shape.roots):
        at.append(None)
        drafted, above = int(token[row - shape.roots]), at[parent]
        legal[row] = legal[parent] and allows(bits[parent], drafted)
        if not legal[row]:
            continue
        try:
            if above is not None:
                at[row] = above.fork()
                at[row].advance(drafted)  # type: ignore[union-attr]
            bits[row], barrier[row] = _here(at[row], vocabulary)
        except Stuck:  # nothing comes after it; whether anything comes to it is not decided yet
            at[row] = None
    return Masks(bits, legal, barrier)


def _here(state: State | None, vocabulary: int) -> tuple[np.ndarray | np.uint32, bool]:
    """What may come after a state, and whether it wants an action instead."""
    if state is not None and state.action() is not None:
        return np.uint32(0), True
    mask = None if state is None else state.mask()
    return everything(vocabulary) if mask is None else mask, False


def width(vocabulary: int) -> int:
    """W, words of 32 bits for V tokens."""
    return -(-vocabulary // 32)


def pack(allowed: np.ndarray) -> np.ndarray:  # [.., V] bool -> [.., W]
    """Packed masks."""
    short = -allowed.shape[-1] % 32
    if short:
        allowed = np.concatenate([allowed, np.zeros((*allowed.shape[:-1], short), dtype=bool)], axis=-1)
    return np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)


def unpack(bits: np.ndarray, vocabulary: int) -> np.ndarray:  # [.., W] -> [.., V] bool
    """Masks as truth values."""
    return np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little", count=vocabulary).view(bool)


def only(tokens: Collection[int], vocabulary: int) -> np.ndarray:  # [W]
    """The mask that allows these tokens and no others."""
    allowed = np.zeros(vocabulary, dtype=bool)
    allowed[list(tokens)] = True
    return pack(allowed)


def everything(vocabulary: int) -> np.ndarray:  # [W]
    """The mask that allows all tokens, and no padding."""
    return pack(np.ones(vocabulary, dtype=bool))


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether the mask ``[W]`` allows ``token``."""
    return bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def the_only(mask: np.ndarray) -> int | None:
    """The one token that the mask ``[W]`` allows; None where it allows none or several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None
