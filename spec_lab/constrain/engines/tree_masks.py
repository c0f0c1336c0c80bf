"""The state of an llguidance grammar, and the token masks of draft forests.

llguidance does not raise errors: its error state must be read after every call, since the mask of a matcher in error
allows the end of the text. Its rollback is not used either: some sequences of consuming and rolling back leave a
matcher with other masks than a new matcher has after the same tokens, for the rest of the text. Draft tokens are
consumed by copies of the matcher; a state's own matcher consumes committed tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import addressof, c_char
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from spec_lab.constrain.protocol import ConstraintError, ConstraintState, Masks, full_mask, width
from spec_lab.core.shape import Shape

DEAD_END = "NoExtensionBias"
"""How the engine's error begins where no token is allowed and the text may not end either."""


class GrammarState(ConstraintState):
    """A grammar's state after the tokens of one sequence. See ``ConstraintState``.

    After the end of a text only end tokens are allowed, unless the grammar continues there. At a dead end the mask is
    empty. Where the mask forces one spelling, ``advance`` accepts other spellings as well.

    Args:
        matcher: the engine's state; not shared.
        vocabulary: V.
        request: its name, for messages.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, request: str) -> None:
        self.matcher, self.vocabulary, self.request = matcher, vocabulary, request
        self._mask: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """Whether the mask is computed already."""
        return self._mask is not None

    def fork(self) -> GrammarState:
        """See ``ConstraintState``."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def advance(self, token: int) -> None:
        """Consume ``token``.

        Raises:
            ConstraintError: the engine refuses the token, or reports an error.
        """
        if not 0 <= token < self.vocabulary:
            raise ConstraintError(
                f"request '{self.request}': there is no token {token} in a vocabulary of {self.vocabulary}"
            )
        self._mask = None
        if not self.matcher.consume_token(int(token)):
            raise ConstraintError(f"request '{self.request}': {brief(self.matcher.get_error())}")

    def mask(self) -> np.ndarray:  # [W] uint32
        """Return the allowed tokens; a read-only array.

        Raises:
            ConstraintError: the engine reports an error, for instance at one of its limits.
        """
        if self._mask is None:
            mask = np.zeros(width(self.vocabulary), dtype=np.uint32)
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self.matcher.is_error():
                error = self.matcher.get_error()
                if not error.startswith(DEAD_END):
                    raise ConstraintError(f"request '{self.request}': {brief(error)}")
                mask[:] = 0
            mask.flags.writeable = False
            self._mask = mask
        return self._mask


def brief(error: str) -> str:
    """Return the engine's error message without its state, the grammar and its backtrace."""
    for rest in ("<state>", "<grammar>", "<backtrace>"):
        error = error.partition(rest)[0]
    error = " ".join(error.split())
    error = error if len(error) <= 300 else f"{error[:300]} ..."
    return f"the engine llguidance fails on it ({error}): write it in another way" if "panic:" in error else error


def masks(
    states: Sequence[GrammarState | None],
    shape: Shape,
    token: np.ndarray,
    vocabulary: int,
    ends: frozenset[int],
    pool: LLExecutor | None = None,
) -> Masks:
    """Return the masks of a forest, equal to ``masks_by_forking`` and faster.

    Each tree is computed with copies of its root's matcher, one per leaf: a node's last child uses the node's own copy.
    With a pool, the engine computes all chains in parallel.

    Args:
        states: ``[B]`` at the roots; they are not changed. None allows every token.
        token: ``[M]`` the nodes' tokens.
        vocabulary: V.
        ends: tokens that end a text.
        pool: threads for chains; they help where masks are expensive.

    Raises:
        ConstraintError: at a root; names the request.
    """
    assert len(states) == shape.roots and len(token) == shape.nodes, "one state per root, one token per node"
    forest = _Forest(shape, _form(shape), token.tolist(), vocabulary)
    chains: list[tuple[int, GrammarState]] = []
    for root, state in enumerate(states):
        if state is None:
            forest.open(root)
            continue
        assert state.vocabulary == vocabulary, "a state of another vocabulary"
        if pool is not None and forest.form.chain[root] and forest.plain(root, ends):
            chains.append((root, state))
        else:
            forest.follow(root, state)
    if pool is not None and chains:
        forest.parallel(chains, pool)
    return Masks(forest.bits, np.frombuffer(forest.legal, dtype=bool), np.zeros(shape.rows, dtype=bool))


@dataclass(frozen=True)
class _Form:
    """A forest's structure as lists, which are fast to walk.

    Args:
        children: of every row.
        rows: of every tree, parents first.
        chain: of every tree, whether it is one path of one or more nodes with consecutive rows.
    """

    children: list[list[int]]
    rows: list[list[int]]
    chain: list[bool]


def _form(shape: Shape) -> _Form:
    children, rows = [below.tolist() for below in shape.children], [tree.tolist() for tree in shape.trees]
    chain = [
        len(tree) > 1 and children[tree[0]] == [tree[1]] and all(children[row] == [row + 1] for row in tree[1:-1])
        for tree in rows
    ]
    return _Form(children, rows, chain)


class _Forest:
    """The masks of a forest, computed tree by tree."""

    def __init__(self, shape: Shape, form: _Form, tokens: list[int], vocabulary: int) -> None:
        self.form, self.vocabulary = form, vocabulary
        self.token = [-1] * shape.roots + tokens
        self.bits = np.zeros((shape.rows, width(vocabulary)), dtype=np.uint32)
        self.legal = bytearray(shape.rows)  # as bool
        self.stride = self.bits.shape[1] * 4
        self.bytes = self.bits.data.cast("B")  # the same memory, from which single bytes are read faster
        self.start = addressof(c_char.from_buffer(self.bytes))

    def plain(self, root: int, ends: frozenset[int]) -> bool:
        """Return whether the tree has neither end tokens nor tokens beyond the vocabulary."""
        tokens = [self.token[row] for row in self.form.rows[root][1:]]
        return ends.isdisjoint(tokens) and all(0 <= token < self.vocabulary for token in tokens)

    def allows(self, row: int, token: int) -> bool:
        """Return whether ``token`` is allowed after ``row``."""
        return 0 <= token < self.vocabulary and bool(self.bytes[row * self.stride + (token >> 3)] >> (token & 7) & 1)

    def open(self, root: int) -> None:
        """Allow every token but padding in a tree without a constraint."""
        all_tokens, self.legal[root] = full_mask(self.vocabulary), True
        for row in self.form.rows[root]:
            if self.legal[row]:
                self.bits[row] = all_tokens
                for child in self.form.children[row]:
                    self.legal[child] = 0 <= self.token[child] < self.vocabulary

    def follow(self, root: int, state: GrammarState) -> None:
        """Compute a tree with copies of the state's matcher. A row where a copy reports an error is a dead end."""
        self.bits[root], self.legal[root] = state.mask(), True
        children, at = self.form.children, {root: state.matcher}
        for row in self.form.rows[root]:
            matcher = at.pop(row, None)
            if matcher is None:
                continue
            drafted = [child for child in children[row] if self.allows(row, self.token[child])]
            for child in drafted:
                fork = matcher if child == drafted[-1] and row != root else matcher.deep_copy()
                self.legal[child] = True
                if fork.consume_token(self.token[child]):
                    fork.unsafe_compute_mask_ptr(self.start + child * self.stride, self.stride)
                if fork.is_error():  # the engine's mask would allow the end of the text
                    self.bits[child] = 0
                elif children[child]:
                    at[child] = fork

    def parallel(self, chains: list[tuple[int, GrammarState]], pool: LLExecutor) -> None:
        """Compute chains in parallel with one copy each, since the engine's call for drafts rolls back.

        First the masks of the roots, then those below legal first tokens.
        """
        memory, asked = (self.start, self.stride, len(self.bits)), []
        copies = [(root, state, state.matcher.deep_copy()) for root, state in chains]
        if roots := [(matcher, root) for root, state, matcher in copies if not state.known]:
            pool.unsafe_compute_mask_ptr(roots, *memory)
        lone, longer = [], []
        for root, state, matcher in copies:
            if state.known or matcher.is_error():
                self.bits[root] = state.mask()
            self.legal[root] = True
            first, *rest = self.form.rows[root][1:]
            if not self.allows(root, self.token[first]):
                continue
            matcher.consume_token(self.token[first])
            assert first + len(rest) < len(self.bits), "the engine checks the first row only"
            if rest:
                longer.append((matcher, first, self.token[first + 1 : first + 1 + len(rest)]))
            else:
                lone.append((matcher, first))
            asked.append((root, state, matcher))
        if lone:
            pool.unsafe_compute_mask_ptr(lone, *memory)
        if longer:
            pool.unsafe_compute_mask_ptr_with_draft_token(longer, *memory)
        for root, state, matcher in asked:
            parent, *nodes = self.form.rows[root]
            if matcher.is_error():  # of one of the rows, or only of the rollback
                self.bits[nodes] = 0
                self.follow(root, state)
                continue
            for row in nodes:  # where a token is forced, the engine accepts others than the mask allows
                self.legal[row] = self.legal[parent] and self.allows(parent, self.token[row])
                if not self.legal[row]:
                    self.bits[row] = 0
                parent = row
