"""The states of a grammar, and the masks of a forest of them.

llguidance never raises: after every call its error must be asked for, since the mask of a matcher in error lets the
text end. Nor can a matcher be trusted after it has rolled back: some sequences of consuming and rolling back leave it
with other masks than a new matcher has after the same tokens, for the rest of the text. So nothing here rolls back. A
draft is followed by copies, and a state's own matcher reads committed tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from llguidance import LLExecutor, LLMatcher

from spec_lab.constrain.protocol import ConstraintError, Continuation, Masks, full_mask, width
from spec_lab.core.draft import Shape

NOWHERE = "NoExtensionBias"
"""How the engine's error begins where no token may come and the text may not end either."""


class GrammarState:
    """What a grammar knows after one path of tokens.

    After the end of a text only ends come, unless the grammar itself goes on there. Where no token may come and the
    text may not end either, the mask is empty. Where the mask forces one spelling, ``advance`` takes others as well.

    Args:
        matcher: the engine's state, owned by this one.
        vocabulary: V.
        request: its name, for messages.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, request: str) -> None:
        self.matcher, self.vocabulary, self.request = matcher, vocabulary, request
        self._mask: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """Whether the mask is at hand."""
        return self._mask is not None

    def fork(self) -> GrammarState:
        """An independent copy."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def advance(self, token: int) -> None:
        """``token`` comes next.

        Raises:
            ConstraintError: the engine refuses it, or broke.
        """
        if not 0 <= token < self.vocabulary:
            raise ConstraintError(
                f"request '{self.request}': there is no token {token} in a vocabulary of {self.vocabulary}"
            )
        self._mask = None
        if not self.matcher.consume_token(int(token)):
            raise ConstraintError(f"request '{self.request}': {brief(self.matcher.get_error())}")

    def mask(self) -> np.ndarray:  # [W] uint32
        """What may come next; not to be written to.

        Raises:
            ConstraintError: the engine broke, at one of its limits for instance.
        """
        if self._mask is None:
            mask = np.zeros(width(self.vocabulary), dtype=np.uint32)
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self.matcher.is_error():
                error = self.matcher.get_error()
                if not error.startswith(NOWHERE):
                    raise ConstraintError(f"request '{self.request}': {brief(error)}")
                mask[:] = 0
            mask.flags.writeable = False
            self._mask = mask
        return self._mask

    def action(self) -> tuple[Continuation, ...] | None:
        """None: a grammar only says what may come."""
        return None


def brief(error: str) -> str:
    """What the engine says, without its state, the grammar and its stack."""
    for rest in ("<state>", "<grammar>", "<backtrace>"):
        error = error.partition(rest)[0]
    error = " ".join(error.split())
    return error if len(error) <= 300 else f"{error[:300]} ..."


def masks(
    states: Sequence[GrammarState | None],
    shape: Shape,
    token: np.ndarray,
    vocabulary: int,
    ends: frozenset[int],
    pool: LLExecutor | None = None,
) -> Masks:
    """The masks of a forest, as ``masks_by_forking`` gives them, faster.

    Each tree is followed by copies of its root's matcher, one for each leaf, since a node's last child uses the node's
    own copy. With a pool, the engine computes all chains together.

    Args:
        states: ``[B]`` at the roots, left as they are; None allows everything.
        shape: the forest.
        token: ``[M]`` its tokens.
        vocabulary: V.
        ends: tokens that end a text.
        pool: threads for chains; they pay off where masks are expensive.

    Raises:
        ConstraintError: from a state at a root; names the request.
    """
    assert len(states) == shape.roots and len(token) == shape.nodes, "a state for each head, a token for each node"
    forest = _Forest(shape, _form(shape), token.tolist(), vocabulary)
    chains: list[tuple[int, GrammarState]] = []
    for head, state in enumerate(states):
        if state is None:
            forest.open(head)
            continue
        assert state.vocabulary == vocabulary, "a state of another vocabulary"
        if pool is not None and forest.form.chain[head] and forest.plain(head, ends):
            chains.append((head, state))
        else:
            forest.follow(head, state)
    if pool is not None and chains:
        forest.together(chains, pool)
    return Masks(forest.bits, np.frombuffer(forest.legal, dtype=bool), np.zeros(shape.rows, dtype=bool))


@dataclass(frozen=True)
class _Form:
    """A shape as walks want it.

    Args:
        children: of every row.
        rows: of every tree, each after its parent.
        chain: whether a tree is one path of one or more nodes, whose rows follow each other.
    """

    children: list[list[int]]
    rows: list[list[int]]
    chain: list[bool]


@lru_cache(maxsize=256)
def _form(shape: Shape) -> _Form:
    children: list[list[int]] = [[] for _ in range(shape.rows)]
    rows: list[list[int]] = [[head] for head in range(shape.roots)]
    for row, (parent, root) in enumerate(zip(shape.parent.tolist(), shape.root.tolist()[shape.roots :], strict=True)):
        children[parent].append(row + shape.roots)
        rows[root].append(row + shape.roots)
    chain = [
        len(one) > 1 and all(children[row] == [row + 1] for row in one[1:-1]) and children[one[0]] == [one[1]]
        for one in rows
    ]
    return _Form(children, rows, chain)


class _Forest:
    """The masks of a forest, filled in tree by tree."""

    def __init__(self, shape: Shape, form: _Form, tokens: list[int], vocabulary: int) -> None:
        self.form, self.vocabulary = form, vocabulary
        self.token = [-1] * shape.roots + tokens
        self.bits = np.zeros((shape.rows, width(vocabulary)), dtype=np.uint32)
        self.legal = bytearray(shape.rows)  # as bool
        self.stride = self.bits.shape[1] * 4
        self.bytes = self.bits.data.cast("B")  # the same memory; single bytes are read faster so
        self.start = addressof(c_char.from_buffer(self.bytes))

    def plain(self, head: int, ends: frozenset[int]) -> bool:
        """Whether the tree has neither ends of the text nor tokens beyond the vocabulary."""
        tokens = [self.token[row] for row in self.form.rows[head][1:]]
        return ends.isdisjoint(tokens) and all(0 <= token < self.vocabulary for token in tokens)

    def allows(self, row: int, token: int) -> bool:
        """Whether ``token`` may come after ``row``."""
        return 0 <= token < self.vocabulary and bool(self.bytes[row * self.stride + (token >> 3)] >> (token & 7) & 1)

    def open(self, head: int) -> None:
        """A tree without a constraint: all tokens but padding."""
        all_tokens, self.legal[head] = full_mask(self.vocabulary), True
        for row in self.form.rows[head]:
            if self.legal[row]:
                self.bits[row] = all_tokens
                for child in self.form.children[row]:
                    self.legal[child] = 0 <= self.token[child] < self.vocabulary

    def follow(self, head: int, state: GrammarState) -> None:
        """A tree, by copies of the state's matcher. Where one breaks nothing may come after its row."""
        self.bits[head], self.legal[head] = state.mask(), True
        children, at = self.form.children, {head: state.matcher}
        for row in self.form.rows[head]:
            matcher = at.pop(row, None)
            if matcher is None:
                continue
            drafted = [child for child in children[row] if self.allows(row, self.token[child])]
            for child in drafted:
                own = matcher if child == drafted[-1] and row != head else matcher.deep_copy()
                self.legal[child] = True
                if own.consume_token(self.token[child]):
                    own.unsafe_compute_mask_ptr(self.start + child * self.stride, self.stride)
                if own.is_error():  # the engine's mask would let the text end
                    self.bits[child] = 0
                elif children[child]:
                    at[child] = own

    def together(self, chains: list[tuple[int, GrammarState]], pool: LLExecutor) -> None:
        """Chains, in parallel, by one copy each: the engine's call for drafts rolls back inside.

        First the masks of the roots, then those below legal first tokens.
        """
        memory, asked = (self.start, self.stride, len(self.bits)), []
        copies = [(head, state, state.matcher.deep_copy()) for head, state in chains]
        if roots := [(matcher, head) for head, state, matcher in copies if not state.known]:
            pool.unsafe_compute_mask_ptr(roots, *memory)
        lone, longer = [], []
        for head, state, matcher in copies:
            if state.known or matcher.is_error():
                self.bits[head] = state.mask()
            self.legal[head] = True
            first, *rest = self.form.rows[head][1:]
            if not self.allows(head, self.token[first]):
                continue
            matcher.consume_token(self.token[first])
            assert first + len(rest) < len(self.bits), "the engine checks the first row only"
            if rest:
                longer.append((matcher, first, self.token[first + 1 : first + 1 + len(rest)]))
            else:
                lone.append((matcher, first))
            asked.append((head, state, matcher))
        if lone:
            pool.unsafe_compute_mask_ptr(lone, *memory)
        if longer:
            pool.unsafe_compute_mask_ptr_with_draft_token(longer, *memory)
        for head, state, matcher in asked:
            parent, *nodes = self.form.rows[head]
            if matcher.is_error():  # of a row that is not known, or only of rolling back
                self.bits[nodes] = 0
                self.follow(head, state)
                continue
            for row in nodes:  # the engine goes on where the mask does not: at forced tokens
                self.legal[row] = self.legal[parent] and self.allows(parent, self.token[row])
                if not self.legal[row]:
                    self.bits[row] = 0
                parent = row
