"""Constraints: a state that is carried along a sequence, and the token masks of draft trees.

Masks are packed. Bit t of a row, lowest bit first, is set if token t is allowed next; ``W = ceil(V / 32)`` words of 32
bits make a row. A token is forced (a jump-forward token) where its mask allows no other token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spec_lab.core.faults import attributed
from spec_lab.core.options import brief_repr
from spec_lab.core.protocols import COUNT, FACTS, FLAG, TEXT, Part, check_spelling, default
from spec_lab.core.request import Ended, Request
from spec_lab.core.shape import Shape

if TYPE_CHECKING:
    from spec_lab.constrain.vocabulary import Vocabulary


class ConstraintError(ValueError):
    """A constraint that cannot continue for one request: unsatisfiable, beyond a limit, broken. The message says why.

    It ends that request with the finish reason "stuck"; the rest of the batch continues. Any other error that a
    constraint raises ends the run.
    """


def calling(constraint: Constraint) -> attributed:
    """A context for calls of a constraint: ``ConstraintError`` passes, any other error names the constraint."""
    return attributed("constraint", constraint, ConstraintError)


class TokenWeights(NamedTuple):
    """Factors of the target probabilities after one row; they are renormalised after that.

    Args:
        tokens: ``[n]`` the tokens that may come next.
        weight: ``[n]`` float64, at least 0 and at most 1.
    """

    tokens: np.ndarray
    weight: np.ndarray


class ConstraintState(ABC):
    """State of a constraint after the tokens of one sequence.

    A state is a function of the tokens. Advancing a fork has no effect on the original, so draft tokens are tried on
    forks. Any method may raise ``ConstraintError``; the request ends with it only once its tokens are committed.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class with a name that is nearly that of a member.

        Raises:
            TypeError: names both.
        """
        super().__init_subclass__(**options)
        check_spelling(cls, ConstraintState, vars(cls))

    @abstractmethod
    def fork(self) -> ConstraintState:
        """Return an independent copy."""

    @abstractmethod
    def advance(self, token: int) -> None:
        """Append ``token``, which the mask allows. Not called while there is an action."""

    @abstractmethod
    def mask(self) -> np.ndarray | None:  # [W] uint32
        """Return which tokens are allowed next; None allows every token. Not called while there is an action."""

    def action(self) -> tuple[Continuation, ...] | None:
        """Return what must happen before the next token; None for nothing.

        An empty tuple ends the sequence. Otherwise the sequence continues as the first entry, and one fork of it as
        each further entry.
        """
        return None

    def potential(self) -> TokenWeights | None:
        """Return the potentials of the tokens that may come next; None where all have the same.

        They are h(text + token) up to a factor common to all, where h is the probability under the model that a text is
        completed to a valid output (``constrain.potential``). Not called while there is an action.
        """
        return None


@dataclass(frozen=True)
class Continuation:
    """How a sequence continues after an action.

    Args:
        backtrack: number of tokens to remove from the sequence's end. Tokens of the prompt cannot be removed.
        state: the constraint's state after that.
    """

    backtrack: int
    state: ConstraintState


DECLARED = {
    "name": TEXT,
    "vocabulary": COUNT,
    "has_actions": FLAG,
    "supports_drafts": FLAG,
    "reads_logprobs": FLAG,
    "prompt": FLAG,
    "facts": FACTS,
}
"""Required types of a constraint's attributes."""


class Constraint(Part):
    """Restricts which tokens may come next in each request."""

    @default
    @abstractmethod
    def vocabulary(self) -> int:
        """V, the width of its masks and of the target's logits."""

    @default
    def has_actions(self) -> bool:
        """Whether its states may return actions."""
        return False

    @default
    def supports_drafts(self) -> bool:
        """Whether draft tokens can be tried on forks of its states; without forks nothing is drafted."""
        return True

    @default
    def keep(self) -> Callable[[Sequence[Ended]], Collection[int]] | None:
        """Called with all finished sequences of a request, in order of lineage; returns the indices of those to keep.

        None keeps every sequence.
        """
        return None

    @default
    def reads_logprobs(self) -> bool:
        """Whether ``keep`` reads the sequences' log-probabilities, which must then be computed."""
        return False

    @default
    def parts(self) -> Sequence[Constraint]:
        """The constraints of which it is made, all of which apply."""
        return (self,)

    @default
    def source(self) -> object:
        """The pattern, schema or grammar of requests that bring none; None: every request must bring one."""
        return ""

    @default
    def prompt(self) -> bool:
        """Whether the constrained text begins with the prompt rather than after it."""
        return False

    @abstractmethod
    def start(self, request: Request) -> ConstraintState:
        """Return the state after the request's prompt.

        Raises:
            ConstraintError: the constraint cannot apply to this request.
        """

    def masks(self, states: Sequence[Any], shape: Shape, token: np.ndarray) -> Masks:
        """Return what ``masks_by_forking`` returns for states that this constraint started, perhaps faster."""
        return masks_by_forking(states, shape, token, self.vocabulary)

    def toy(self, vocabulary: Vocabulary) -> Constraint | None:
        """Return the same constraint over a vocabulary of a few tokens, so that ``certify`` can enumerate it.

        None where it cannot be built for another vocabulary.
        """
        return None


def tokens_of(mask: np.ndarray | None, size: int) -> np.ndarray:  # [W] -> [n]
    """Return the tokens that a mask allows, in ascending order; None allows all."""
    return np.arange(size) if mask is None else np.flatnonzero(unpack(mask, size))


# Masks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Masks:
    """The token masks of a draft forest. Rows are the roots, then the nodes.

    Args:
        bits: ``[R, W]`` uint32, the tokens allowed after each row; all zero below an illegal token and at an action.
        legal: ``[R]`` bool, whether every token from the root to the row is allowed; roots are legal.
        barrier: ``[R]`` bool, legal rows whose state has an action: no token is drafted or emitted below them.
        potential: ``[R]`` the potentials of states that have them, none of any token at illegal rows and
            barriers; None: no state has them.
    """

    bits: np.ndarray  # [R, W]
    legal: np.ndarray  # [R]
    barrier: np.ndarray  # [R]
    potential: Sequence[TokenWeights | None] | None = None

    def of(self, rows: np.ndarray) -> Masks:
        """Return the masks of these rows."""
        potential = None if self.potential is None else [self.potential[row] for row in rows.tolist()]
        return Masks(self.bits[rows], self.legal[rows], self.barrier[rows], potential)

    def intersect(self, other: Masks) -> Masks:
        """Return the masks under two constraints at once."""
        legal = self.legal & other.legal
        barrier = (self.barrier | other.barrier) & legal
        bits = np.where((legal & ~barrier)[:, None], self.bits & other.bits, np.uint32(0))
        return Masks(bits, legal, barrier)

    @property
    def forced(self) -> np.ndarray:  # [R]
        """Rows with a forced token: exactly one token is allowed after them."""
        return np.bitwise_count(self.bits).sum(-1) == 1

    @property
    def dead_end(self) -> np.ndarray:  # [R]
        """Legal rows without an action after which no token is allowed."""
        return self.legal & ~self.barrier & ~self.bits.any(-1)


def masks_by_forking(
    states: Sequence[ConstraintState | None], shape: Shape, token: np.ndarray, vocabulary: int
) -> Masks:
    """Return the masks of a forest with one fork per node: the readable way, and the oracle of faster ones.

    Args:
        states: ``[B]`` at the roots; they are not changed. None allows every token.
        shape: of the forest.
        token: ``[M]`` the nodes' tokens.
        vocabulary: V.

    Raises:
        ConstraintError: at a root. A node where it is raised becomes a dead end.
    """
    bits = np.zeros((shape.rows, width(vocabulary)), dtype=np.uint32)
    legal, barrier = np.zeros(shape.rows, dtype=bool), np.zeros(shape.rows, dtype=bool)
    potential: list[TokenWeights | None] = [NO_TOKENS] * shape.rows
    at: list[ConstraintState | None] = list(states)
    for row in range(shape.roots):
        legal[row] = True
        bits[row], barrier[row] = _mask_or_barrier(at[row], vocabulary)
        if not barrier[row]:
            potential[row] = None if (state := at[row]) is None else state.potential()
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
            bits[row], barrier[row] = _mask_or_barrier(at[row], vocabulary)
            if not barrier[row]:
                potential[row] = None if (state := at[row]) is None else state.potential()
        except ConstraintError:  # a dead end; an error only if the verifier accepts the node
            at[row] = None
    has_potential = any(weights is not None and weights is not NO_TOKENS for weights in potential)
    return Masks(bits, legal, barrier, potential if has_potential else None)


NO_TOKENS = TokenWeights(np.empty(0, dtype=np.int64), np.empty(0))


def _mask_or_barrier(state: ConstraintState | None, vocabulary: int) -> tuple[np.ndarray | np.uint32, bool]:
    """Return a state's mask, and whether it has an action instead (then the mask is zero)."""
    if state is not None and state.action() is not None:
        return np.uint32(0), True
    mask = None if state is None else packed_mask(state, vocabulary)
    return full_mask(vocabulary) if mask is None else mask, False


def packed_mask(state: ConstraintState, vocabulary: int) -> np.ndarray | None:
    """Return the mask of a state over V tokens.

    Raises:
        TypeError: it is not packed; names the method, and where it is defined.
    """
    mask = state.mask()
    packed = isinstance(mask, np.ndarray) and mask.shape == (width(vocabulary),) and mask.dtype != np.bool_
    if mask is None or packed:
        return mask
    given, code = np.asarray(mask), type(state).mask.__code__
    raise TypeError(
        f"{type(state).__name__}.mask() must return packed bits [{width(vocabulary)}] (mask_of(tokens, vocabulary), "
        f"or pack(allowed)), not {given.dtype} {list(given.shape)} ({code.co_filename}:{code.co_firstlineno})"
    )


def width(vocabulary: int) -> int:
    """Return W, the number of 32-bit words for V tokens."""
    return -(-vocabulary // 32)


def pack(allowed: np.ndarray) -> np.ndarray:  # [.., V] bool -> [.., W]
    """Return packed masks."""
    short = -allowed.shape[-1] % 32
    if short:
        allowed = np.concatenate([allowed, np.zeros((*allowed.shape[:-1], short), dtype=bool)], axis=-1)
    return np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)


def unpack(bits: np.ndarray, vocabulary: int) -> np.ndarray:  # [.., W] -> [.., V] bool
    """Return masks as booleans."""
    return np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little", count=vocabulary).view(bool)


def mask_of(tokens: Collection[int], vocabulary: int) -> np.ndarray:  # [W]
    """Return the mask that allows these tokens and no others."""
    allowed = np.zeros(vocabulary, dtype=bool)
    allowed[list(tokens)] = True
    return pack(allowed)


def full_mask(vocabulary: int) -> np.ndarray:  # [W]
    """Return the mask that allows all V tokens; padding bits are zero."""
    return pack(np.ones(vocabulary, dtype=bool))


def allows(mask: np.ndarray, token: int) -> bool:
    """Return whether the mask ``[W]`` allows ``token``."""
    return bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def single_token(mask: np.ndarray) -> int | None:
    """Return the one token that the mask ``[W]`` allows; None where it allows none or several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def started(constraint: Constraint, request: Request) -> ConstraintState:
    """Return the state after a request's prompt.

    Raises:
        TypeError: ``start`` returns something else.
    """
    state = constraint.start(request)
    if not isinstance(state, ConstraintState):
        raise TypeError(f"start must return a ConstraintState, not {brief_repr(state)}: derive its class from it")
    return state


def action_of(constraint: Constraint, state: ConstraintState) -> tuple[Continuation, ...] | None:
    """Return what must happen before the next token, by ``ConstraintState.action``.

    Raises:
        TypeError: an action, which the constraint does not declare; what relies on that would be wrong.
    """
    action = state.action()
    if action is not None and not constraint.has_actions:
        raise TypeError(f"{type(state).__name__}.action acts, but {type(constraint).__name__}.has_actions is False")
    return action
