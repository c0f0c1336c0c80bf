"""The states of a grammar, and the masks of a forest of them.

llguidance never raises: after every call its error must be asked for, since the mask of a matcher in error lets the
text end. It stays in error for good, so a state can make itself a new matcher: what drafts try must not break it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from spec_lab.constrain.state import Masks, Onward, Stuck, everything, width
from spec_lab.draft import Shape

NOWHERE = "NoExtensionBias"
"""How the engine's error begins where no token may come and the text may not end either."""


class Matched:
    """What a grammar knows after one path of tokens.

    After the end of a text only ends come, unless the grammar itself goes on there. Where no token may come and the
    text may not end either, the mask is empty. Where the mask forces one spelling, ``advance`` takes others as well.

    Args:
        matcher: the engine's state, owned by this one.
        vocabulary: V.
        rolls: whether the matcher can take tokens back.
        request: its name, for messages.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, rolls: bool, request: str) -> None:
        self.matcher, self.vocabulary, self.rolls, self.request = matcher, vocabulary, rolls, request
        self._origin = matcher.deep_copy()  # never advanced; shared by forks
        self._path: tuple[int, Any] | None = None  # what came since, the last token first
        self._mask: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """Whether the mask is at hand."""
        return self._mask is not None

    def fork(self) -> Matched:
        """An independent copy."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def mend(self) -> None:
        """A new matcher in place of one that a draft broke, or left elsewhere."""
        tokens, path = [], self._path
        while path is not None:
            token, path = path
            tokens.append(token)
        self.matcher = self._origin.deep_copy()
        self.matcher.consume_tokens(tokens[::-1])

    def advance(self, token: int) -> None:
        """``token`` comes next.

        Raises:
            Stuck: the engine refuses it, or broke.
        """
        if not 0 <= token < self.vocabulary:
            raise Stuck(f"request '{self.request}': there is no token {token} in a vocabulary of {self.vocabulary}")
        self._mask, self._path = None, (int(token), self._path)
        if not self.matcher.consume_token(int(token)):
            raise Stuck(f"request '{self.request}': {brief(self.matcher.get_error())}")

    def mask(self) -> np.ndarray:  # [W] uint32
        """What may come next; not to be written to.

        Raises:
            Stuck: the engine broke, at one of its limits for instance.
        """
        if self._mask is None:
            mask = np.zeros(width(self.vocabulary), dtype=np.uint32)
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self.matcher.is_error():
                error = self.matcher.get_error()
                if not error.startswith(NOWHERE):
                    raise Stuck(f"request '{self.request}': {brief(error)}")
                mask[:] = 0
            mask.flags.writeable = False
            self._mask = mask
        return self._mask

    def action(self) -> tuple[Onward, ...] | None:
        """None: a grammar only says what may come."""
        return None


def brief(error: str) -> str:
    """What the engine says, without its state, the grammar and its stack."""
    for rest in ("<state>", "<grammar>", "<backtrace>"):
        error = error.partition(rest)[0]
    error = " ".join(error.split())
    return error if len(error) <= 300 else f"{error[:300]} ..."


def masks(
    states: Sequence[Matched | None],
    shape: Shape,
    token: np.ndarray,
    vocabulary: int,
    ends: frozenset[int],
    pool: LLExecutor | None = None,
) -> Masks:
    """The masks of a forest, as ``by_forks`` gives them.

    Each tree is walked depth first by the state's own matcher, which then takes the tokens back; with a pool, chains go
    to the engine together instead. A fork for each node is left for what can do neither: grammars that cannot take
    tokens back, drafts in which the text ends, and drafts at which the engine breaks.

    Args:
        states: ``[B]`` at the heads, in the end as they were; None binds nothing.
        shape: the forest.
        token: ``[M]`` its tokens.
        vocabulary: V.
        ends: tokens that end a text.
        pool: threads for chains; they pay where masks are dear.

    Raises:
        Stuck: from a state at a head; names the request.
    """
    assert len(states) == shape.heads and len(token) == shape.nodes, "a state for each head, a token for each node"
    forest = _Forest(shape, _form(shape), token.tolist(), vocabulary, ends)
    chains: dict[int, tuple[int, Matched]] = {}
    for head, state in enumerate(states):
        if state is None:
            forest.open(head)
            continue
        assert state.vocabulary == vocabulary, "a state of another vocabulary"
        swift = state.rolls and forest.plain(head)
        if swift and pool is not None and forest.form.chain[head] and id(state) not in chains:
            chains[id(state)] = head, state  # the engine takes no matcher twice in one call
        elif not (swift and forest.walk(head, state)):
            forest.fork(head, state)
    if pool is not None and chains:
        forest.together([*chains.values()], pool)
    return Masks(forest.bits, np.frombuffer(forest.legal, dtype=bool), np.zeros(shape.rows, dtype=bool))


@dataclass(frozen=True)
class _Form:
    """A shape as walks want it.

    Args:
        parent: of every row; heads are their own.
        order: for each head the rows of its tree, depth first.
        depth: of every row.
        chain: whether a tree is one path of one or more nodes, whose rows follow each other.
    """

    parent: list[int]
    order: list[list[int]]
    depth: list[int]
    chain: list[bool]


@lru_cache(maxsize=256)
def _form(shape: Shape) -> _Form:
    parent = [*range(shape.heads), *shape.parent.tolist()]
    children: list[list[int]] = [[] for _ in range(shape.rows)]
    depth = [0] * shape.rows
    for row in range(shape.heads, shape.rows):
        children[parent[row]].append(row)
        depth[row] = depth[parent[row]] + 1
    orders, chain = [], []
    for head in range(shape.heads):
        order, left = [], [head]
        while left:
            order.append(left.pop())
            left += reversed(children[order[-1]])
        orders.append(order)
        nodes = order[1:]
        chain.append(
            len(nodes) > 0 and nodes == list(range(nodes[0], nodes[0] + len(nodes))) and depth[nodes[-1]] == len(nodes)
        )
    return _Form(parent, orders, depth, chain)


class _Forest:
    """The masks of a forest, filled in tree by tree."""

    def __init__(self, shape: Shape, form: _Form, tokens: list[int], vocabulary: int, ends: frozenset[int]) -> None:
        self.form, self.vocabulary = form, vocabulary
        self.token = [-1] * shape.heads + tokens
        self.bits = np.zeros((shape.rows, width(vocabulary)), dtype=np.uint32)
        self.legal = bytearray(shape.rows)  # as bool
        self.stride = self.bits.shape[1] * 4
        self.bytes = self.bits.data.cast("B")  # the same memory; single bytes are read faster so
        self.start = addressof(c_char.from_buffer(self.bytes))
        self.odd = {token for token in tokens if token in ends or not 0 <= token < vocabulary}

    def plain(self, head: int) -> bool:
        """Whether the tree has neither ends of the text nor tokens beyond the vocabulary.

        What it takes to take an end back depends on the match; a token that is none breaks the engine.
        """
        return not self.odd or self.odd.isdisjoint(self.token[row] for row in self.form.order[head])

    def allows(self, row: int, token: int) -> bool:
        """Whether ``token`` may come after ``row``."""
        return 0 <= token < self.vocabulary and bool(self.bytes[row * self.stride + (token >> 3)] >> (token & 7) & 1)

    def open(self, head: int) -> None:
        """A tree that nothing binds: all tokens but padding."""
        all_tokens = everything(self.vocabulary)
        for row in self.form.order[head]:
            self.legal[row] = row == head or (
                self.legal[self.form.parent[row]] and 0 <= self.token[row] < self.vocabulary
            )
            if self.legal[row]:
                self.bits[row] = all_tokens

    def fork(self, head: int, state: Matched) -> None:
        """A tree, one fork a node."""
        at = {head: state}
        self.bits[head], self.legal[head] = state.mask(), True
        for row in self.form.order[head][1:]:
            parent = self.form.parent[row]
            self.legal[row] = self.legal[parent] and self.allows(parent, self.token[row])
            self.bits[row] = 0
            if self.legal[row]:
                try:
                    at[row] = at[parent].fork()
                    at[row].advance(self.token[row])
                    self.bits[row] = at[row].mask()
                except Stuck:  # nothing comes after it; whether anything comes to it is not decided yet
                    at.pop(row, None)

    def walk(self, head: int, state: Matched) -> bool:
        """A tree, depth first by the state's matcher, which takes the tokens back; False where it breaks."""
        rows, start, stride, memory = self.form.order[head], self.start, self.stride, self.bytes
        parents, depths, tokens, legal = self.form.parent, self.form.depth, self.token, self.legal
        legal[head] = True
        if state.known or len(rows) == 1:
            self.bits[head] = state.mask()
            if len(rows) == 1:
                return True
        matcher, at = state.matcher, 0
        consume, fill = matcher.consume_token, matcher.unsafe_compute_mask_ptr
        if not state.known:
            fill(start + head * stride, stride)
        for row in rows[1:]:
            parent, token = parents[row], tokens[row]
            if not legal[parent] or not memory[parent * stride + (token >> 3)] >> (token & 7) & 1:
                continue
            depth = depths[row]
            if at >= depth:
                matcher.rollback(at - depth + 1)
            consume(token)
            fill(start + row * stride, stride)
            legal[row], at = True, depth
        if at:
            matcher.rollback(at)
        if matcher.is_error():  # it would have stayed so, with masks that allow nothing drafted here
            state.mend()
            return False
        return True

    def together(self, chains: list[tuple[int, Matched]], pool: LLExecutor) -> None:
        """Chains, in parallel: first the masks of the heads, then those below legal first tokens."""
        memory = (self.start, self.stride, len(self.bits))
        heads = [(state.matcher, head) for head, state in chains if not state.known]
        if heads:
            pool.unsafe_compute_mask_ptr(heads, *memory)
        lone, longer, asked = [], [], []
        for head, state in chains:
            if state.known or state.matcher.is_error():
                self.bits[head] = state.mask()
            self.legal[head] = True
            first, *rest = self.form.order[head][1:]
            if self.allows(head, self.token[first]):
                state.matcher.consume_token(self.token[first])
                assert first + len(rest) < len(self.bits), "the engine checks the first row only"
                if rest:
                    longer.append((state.matcher, first, self.token[first + 1 : first + 1 + len(rest)]))
                else:
                    lone.append((state.matcher, first))
                asked.append((head, state))
        if lone:
            pool.unsafe_compute_mask_ptr(lone, *memory)
        if longer:
            pool.unsafe_compute_mask_ptr_with_draft_token(longer, *memory)
        for head, state in asked:
            state.matcher.rollback(1)
            if state.matcher.is_error():
                state.mend()
                self.fork(head, state)
                continue
            for row in self.form.order[head][1:]:  # the engine goes on where the mask does not: at forced tokens
                parent = self.form.parent[row]
                self.legal[row] = self.legal[parent] and self.allows(parent, self.token[row])
                if not self.legal[row]:
                    self.bits[row] = 0
