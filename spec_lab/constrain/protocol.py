"""What a constraint is: a state that is carried along a sequence, and the token masks of draft trees.

Masks are packed. Bit t of a row, lowest bit first, is set if token t is allowed next; ``W = ceil(V / 32)`` words of 32
bits make a row. A token is forced (a jump-forward token) where its mask allows no other token.

Abilities that a constraint may have besides are Protocols of their own, asked for with ``isinstance``: ``TreeMasks``,
``LimitsDrafts``, ``SelectsSequences``, ``ReadsLogprobs``, ``Composite``, ``PerRequestSource``, ``ReadsPrompt``,
``CertifiableConstraint``, and ``core.protocols.Described``. An ability of its states: ``HasPotential``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from spec_lab.core.draft import Shape
from spec_lab.core.faults import attributed
from spec_lab.core.protocols import COUNT, FACTS, FLAG, TEXT
from spec_lab.core.request import Ended, Request

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


class ConstraintState(Protocol):
    """What a constraint knows after the tokens of one sequence.

    A state is a function of the tokens. Advancing a fork has no effect on the original, so draft tokens are tried on
    forks. Any method may raise ``ConstraintError``; the request ends with it only once its tokens are committed.
    """

    def fork(self) -> ConstraintState:
        """Return an independent copy."""
        ...

    def advance(self, token: int) -> None:
        """Append ``token``, which the mask allows. Not called while there is an action."""
        ...

    def mask(self) -> np.ndarray | None:  # [W] uint32
        """Return which tokens are allowed next; None allows every token. Not called while there is an action."""
        ...

    def action(self) -> tuple[Continuation, ...] | None:
        """Return what must happen before the next token; None for nothing.

        An empty tuple ends the sequence. Otherwise the sequence continues as the first entry, and one fork of it as
        each further entry.
        """
        ...


@dataclass(frozen=True)
class Continuation:
    """How a sequence continues after an action.

    Args:
        backtrack: number of tokens to remove from the sequence's end. Tokens of the prompt cannot be removed.
        state: the constraint's state after that.
    """

    backtrack: int
    state: ConstraintState


DECLARED = {"name": TEXT, "vocabulary": COUNT, "has_actions": FLAG, "supports_drafts": FLAG, "facts": FACTS}
"""What a constraint's attributes must be."""


@runtime_checkable
class Constraint(Protocol):
    """Restricts which tokens may come next in each request."""

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...

    @property
    def vocabulary(self) -> int:
        """V, the width of its masks and of the target's logits."""
        ...

    @property
    def has_actions(self) -> bool:
        """Whether its states may return actions."""
        ...

    def start(self, request: Request) -> ConstraintState:
        """Return the state after the request's prompt.

        Raises:
            ConstraintError: the constraint cannot apply to this request.
        """
        ...


# Abilities -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class TreeMasks(Protocol):
    """A constraint that computes the masks of whole draft trees faster than by forking states."""

    def masks(self, states: Sequence[Any], shape: Shape, token: np.ndarray) -> Masks:
        """Return what ``masks_by_forking`` returns for states that this constraint started."""
        ...


@runtime_checkable
class LimitsDrafts(Protocol):
    """A constraint that may be unable to fork its states, so that it decodes without drafts."""

    @property
    def supports_drafts(self) -> bool:
        """Whether draft tokens can be tried on forks of its states."""
        ...


@runtime_checkable
class SelectsSequences(Protocol):
    """A constraint that forks requests and may keep only some of the finished sequences."""

    @property
    def keep(self) -> Callable[[Sequence[Ended]], Collection[int]] | None:
        """Called with all finished sequences of a request, in order of lineage; returns the indices of those to keep.

        None keeps every sequence.
        """
        ...


@runtime_checkable
class ReadsLogprobs(Protocol):
    """A constraint that selects sequences, perhaps by their log-probabilities."""

    @property
    def reads_logprobs(self) -> bool:
        """Whether ``keep`` reads the sequences' log-probabilities, which must then be computed."""
        ...


@runtime_checkable
class Composite(Protocol):
    """A constraint that is made of several."""

    @property
    def parts(self) -> Sequence[Constraint]:
        """The constraints, all of which apply."""
        ...


@runtime_checkable
class PerRequestSource(Protocol):
    """A constraint that is compiled from a source, such as a pattern, and for which requests may bring their own."""

    @property
    def source(self) -> object:
        """The source of requests that bring none; None: every request must bring one."""
        ...


@runtime_checkable
class ReadsPrompt(Protocol):
    """A constraint whose text may begin with the prompt."""

    @property
    def prompt(self) -> bool:
        """Whether the constrained text begins with the prompt rather than after it."""
        ...


@runtime_checkable
class CertifiableConstraint(Protocol):
    """A constraint that can also be built for a vocabulary of a few tokens, so that ``certify`` can enumerate it."""

    def toy(self, vocabulary: Vocabulary) -> Constraint:
        """Return the same constraint over another vocabulary."""
        ...


class TokenWeights(NamedTuple):
    """What the target probabilities after one row are multiplied by; they are renormalised after that.

    Args:
        tokens: ``[n]`` the tokens that may come next.
        weight: ``[n]`` float64, at least 0 and at most 1.
    """

    tokens: np.ndarray
    weight: np.ndarray


@runtime_checkable
class HasPotential(Protocol):
    """A state that knows the potential of the tokens that may come next: h(text + token) up to a factor common to all.

    h is the probability under the model that a text is completed to a valid output (``constrain.potential``).
    """

    def potential(self) -> TokenWeights | None:
        """Return the potentials; None where all tokens have the same. Not called while there is an action."""
        ...


def tokens_of(mask: np.ndarray | None, size: int) -> np.ndarray:  # [W] -> [n]
    """Return the tokens that a mask allows, in ascending order; None allows all."""
    return np.arange(size) if mask is None else np.flatnonzero(unpack(mask, size))


def supports_drafts(constraint: Constraint) -> bool:
    """Return whether anything can be drafted under a constraint; one that is not ``LimitsDrafts`` supports drafts."""
    return not isinstance(constraint, LimitsDrafts) or constraint.supports_drafts


# Masks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Masks:
    """The token masks of a draft forest. Rows are the roots, then the nodes.

    Args:
        bits: ``[R, W]`` uint32, the tokens allowed after each row; all zero below an illegal token and at an action.
        legal: ``[R]`` bool, whether every token from the root to the row is allowed; roots are legal.
        barrier: ``[R]`` bool, legal rows whose state has an action: no token is drafted or emitted below them.
        potential: ``[R]`` the potentials of states that have them (``HasPotential``), none of any token at illegal rows
            and barriers; None: no state has them.
    """

    bits: np.ndarray  # [R, W]
    legal: np.ndarray  # [R]
    barrier: np.ndarray  # [R]
    potential: Sequence[TokenWeights | None] | None = None

    def of(self, rows: np.ndarray) -> Masks:
        """Return the masks of these rows."""
        own = None if self.potential is None else [self.potential[row] for row in rows.tolist()]
        return Masks(self.bits[rows], self.legal[rows], self.barrier[rows], own)

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


def masks_of(
    constraint: Constraint, states: Sequence[ConstraintState | None], shape: Shape, token: np.ndarray
) -> Masks:
    """Return the masks of a forest: by the constraint's own fast path if it has one, else by forking its states.

    Arguments and errors as in ``masks_by_forking``.
    """
    if isinstance(constraint, TreeMasks):
        return constraint.masks(states, shape, token)
    return masks_by_forking(states, shape, token, constraint.vocabulary)


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
    potential: list[TokenWeights | None] | None = None
    if any(isinstance(state, HasPotential) for state in states):
        potential = [NO_TOKENS] * shape.rows
    at: list[ConstraintState | None] = list(states)
    for row in range(shape.roots):
        legal[row] = True
        bits[row], barrier[row] = _mask_or_barrier(at[row], vocabulary)
        if potential is not None and not barrier[row]:
            potential[row] = _potential(at[row])
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
            if potential is not None and not barrier[row]:
                potential[row] = _potential(at[row])
        except ConstraintError:  # a dead end; an error only if the verifier accepts the node
            at[row] = None
    return Masks(bits, legal, barrier, potential)


NO_TOKENS = TokenWeights(np.empty(0, dtype=np.int64), np.empty(0))


def _potential(state: ConstraintState | None) -> TokenWeights | None:
    return state.potential() if isinstance(state, HasPotential) else None


def _mask_or_barrier(state: ConstraintState | None, vocabulary: int) -> tuple[np.ndarray | np.uint32, bool]:
    """Return a state's mask, and whether it has an action instead (then the mask is zero)."""
    if state is not None and state.action() is not None:
        return np.uint32(0), True
    mask = None if state is None else state.mask()
    return full_mask(vocabulary) if mask is None else mask, False


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
