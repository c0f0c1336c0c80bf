"""A test of the masks of the run's own constraint, on the run's own vocabulary.

Speculative decoding asks a constraint for the masks of whole draft trees, step after step, from states that have
processed drafts before. Autoregressive decoding asks states that have only ever been advanced. Both must give the same
masks, or the output does not have the distribution of autoregressive decoding. ``compare_masks`` samples random texts
and random drafts, and compares every row of every step exactly: there is no tolerance. What it does not sample is not
tested; under toy vocabularies ``certify`` enumerates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spec_lab.constrain import AppliedConstraint, ConstraintError, ConstraintState
from spec_lab.constrain.applied import DraftTreeMasks, forced_token
from spec_lab.constrain.protocol import allows, full_mask, pack, unpack, width
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest

BATCH = 4
"""Largest number of texts that get a draft in one step."""

NODES = 24
"""Largest number of draft tokens of one tree."""

LONGEST = 160
"""Largest number of tokens of a text; after them it ends."""

ILLEGAL = 0.05
"""Share of the draft tokens that are drawn from the whole vocabulary, legal or not."""

STRUCTURE = 0.25
"""Share of the legal tokens that are drawn from those made of ``PUNCTUATION`` and white space, where there are any."""

PUNCTUATION = b"{}[]()<>\"':,;="

ENDS = 0.1
"""Share of the legal tokens that may be stop tokens."""

AGAIN = 0.8
"""Share of the texts that begin with the beginning of an earlier one."""

KEPT = 64
"""Number of earlier texts that are kept for this."""


@dataclass(frozen=True)
class Difference:
    """A row whose mask is not that of a fresh state.

    Args:
        committed: tokens of the output before the draft.
        drafted: draft tokens from the root to the row.
        asked: which masks: those of a "complete" draft or of a "growing" one.
        what: what differs: "mask", "legality", "action" or "failure".
        added: tokens that only the drafting state allows.
        missing: tokens that only the fresh state allows.
    """

    request: str
    committed: tuple[int, ...]
    drafted: tuple[int, ...]
    asked: str
    what: str
    added: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


@dataclass
class MaskComparison:
    """The result of ``compare_masks``.

    Args:
        rows: number of rows compared.
        different: of them, those that differ from the rows of fresh states.
        texts: number of texts begun.
        longest: tokens of the longest text.
        first: the first row that differs; None for none.
    """

    rows: int = 0
    different: int = 0
    steps: int = 0
    texts: int = 0
    longest: int = 0
    first: Difference | None = None


class _Row(NamedTuple):
    """The mask after a path of tokens, whether the path is legal, and whether the state has an action."""

    bits: np.ndarray  # [W], all zero where no token is allowed
    legal: bool
    barrier: bool


@dataclass(eq=False)
class _Text:
    """A text that grows: its tokens after the prompt, and the state at its end, on forks of which drafts were tried."""

    request: Request
    state: ConstraintState
    tokens: list[int] = field(default_factory=list)


def compare_masks(
    applied: AppliedConstraint,
    requests: Sequence[Request],
    rows: int,
    seed: int,
    pieces: Sequence[bytes] | None = None,
    tick: Callable[[int], object] = lambda _: None,
) -> MaskComparison:
    """Decode random texts under random drafts, and compare every mask with that of a state that never processed a
    draft.

    In each step some texts get a random tree or chain of mostly legal tokens. The constraint computes its masks as in
    decoding; in half of the steps the masks of a growing draft are computed before. Then a part of a legal path and one
    more token are committed, and the states are kept for the next step. Fresh states are started at the prompt and only
    advanced, over the committed tokens and one path of the draft.

    Tokens of punctuation and white space are preferred, and most texts begin as an earlier one, so that texts nest
    deeply; uniformly drawn tokens would soon end them or stay within one long string.

    A text ends at a stop token, where no token is allowed, and at an action (a fork, backtracking, the end); what
    follows an action is not compared. Where states cannot be forked nothing is drafted.

    Args:
        requests: those at whose prompts the constraint can start; texts follow their prompts in turn. Without any,
            nothing is compared.
        rows: number of rows to compare; the last step may compare a few more.
        pieces: the bytes of each token; None where they are not known.
        tick: called with the number of rows compared.
    """
    texts = _Texts(applied, np.random.default_rng([seed, 20_000]), pieces)
    wrong = texts.found
    if not requests:
        return wrong
    live = [texts.begin(requests) for _ in range(BATCH)]
    while wrong.rows < rows:
        before = wrong.rows
        chosen = np.sort(texts.rng.permutation(BATCH)[: texts.rng.integers(1, BATCH + 1)]).tolist()
        ended = texts.step([live[number] for number in chosen])
        for number, over in zip(chosen, ended, strict=True):
            if over:
                live[number] = texts.begin(requests)
        tick(min(wrong.rows, rows) - min(before, rows))
    return wrong


class _Texts:
    """The texts of ``compare_masks``."""

    def __init__(self, applied: AppliedConstraint, rng: np.random.Generator, pieces: Sequence[bytes] | None) -> None:
        self.constraint = applied.constraint
        self.fast_forward = bool(applied.fast_forward)
        self.unlimited = AppliedConstraint(applied.constraint, "both")  # no draft budget: every mask is computed
        self.supports_drafts = applied.constraint.supports_drafts
        self.vocabulary = applied.constraint.vocabulary
        self.rng, self.found = rng, MaskComparison()
        pieces = pieces or [b""] * self.vocabulary
        self.kind = np.array([(piece.strip() or b"\0")[0] for piece in pieces])
        self.structure = np.array([bool(piece.strip()) and not piece.strip().strip(PUNCTUATION) for piece in pieces])
        self.past: list[tuple[Request, list[int]]] = []
        self.begun = 0

    def begin(self, requests: Sequence[Request]) -> _Text:
        """Return a new text, which may begin as an earlier one."""
        self.found.texts += 1
        if self.past and self.rng.random() < AGAIN:
            request, tokens = self.past[int(self.rng.integers(len(self.past)))]
            prefix = tokens[: int(self.rng.integers(len(tokens) + 1))]
            return _Text(request, self._fresh(request, prefix), list(prefix))
        self.begun += 1
        request = requests[self.begun % len(requests)]
        return _Text(request, self._fresh(request, ()))

    def step(self, texts: Sequence[_Text]) -> list[bool]:
        """Draft, compare and commit; return which texts have ended."""
        self.found.steps += 1
        over: dict[int, bool] = {}
        going = []
        for text in texts:
            self.found.longest = max(self.found.longest, len(text.tokens))
            here = _row_of(self._fresh(text.request, text.tokens), self.vocabulary)
            if here.bits.any():
                going.append(text)
            else:  # no token is allowed, or there is an action
                over[id(text)] = True
                self._compare(text, (), here, _row_of(text.state, self.vocabulary))
        if going:
            over |= {id(text): ended for text, ended in zip(going, self._drafted(going), strict=True)}
        return [over[id(text)] for text in texts]

    def _drafted(self, texts: Sequence[_Text]) -> list[bool]:
        """Do what ``step`` does for texts at whose end a token is allowed."""
        trees = [self._tree() for _ in texts]
        shape, tokens, fresh = forest(tuple(trees)), [], [_Row(np.empty(0), True, False)] * len(texts)
        for root, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            accepted, rows = self._draft(text, tree)
            tokens += accepted
            fresh[root] = rows[0]
            fresh += rows[1:]
        token = np.array(tokens, dtype=np.int64)
        wrong = self._wrong(texts, shape, token, fresh)
        ended = []
        for root, text in enumerate(texts):
            ended.append(self._commit(text, root, shape, tokens, fresh) or wrong[root])
            if ended[-1] and not wrong[root] and text.tokens:
                self.past = [*self.past[-KEPT + 1 :], (text.request, text.tokens)]
        return ended

    def _tree(self) -> Shape:
        """Return a chain or a tree of a random shape, sometimes an empty one."""
        if not self.supports_drafts:
            return chain(0)
        nodes = int(self.rng.integers(NODES + 1))
        if self.rng.random() < 1 / 3:
            return chain(nodes)
        latest = self.rng.random(nodes) < 0.5  # deeper than a tree of uniformly drawn parents
        parents = [row if latest[row] else int(self.rng.integers(row + 1)) for row in range(nodes)]
        return Shape(1, np.array(parents, dtype=np.int64))

    def _draft(self, text: _Text, tree: Shape) -> tuple[list[int], list[_Row]]:
        """Return tokens for a tree, and the rows of fresh states. Each leaf has a state of its own."""
        state = self._fresh(text.request, text.tokens)
        tokens: list[int] = []
        rows, ready = [_row_of(state, self.vocabulary)], {0: state}
        nothing = np.zeros(width(self.vocabulary), dtype=np.uint32)
        for node, parent in enumerate(tree.parent.tolist()):
            above = rows[parent]
            tokens.append(self._draw(above.bits, text.request.stop, ILLEGAL))
            if not (above.legal and allows(above.bits, tokens[-1])):
                rows.append(_Row(nothing, False, False))
                continue
            leaf = ready.pop(parent, None)
            try:
                if leaf is None:
                    path = [tokens[row - 1] for row in tree.path(parent)]
                    leaf = self._fresh(text.request, [*text.tokens, *path])
                leaf.advance(tokens[-1])
                rows.append(_row_of(leaf, self.vocabulary))
                ready[node + 1] = leaf
            except ConstraintError:  # no token is allowed after it
                rows.append(_Row(nothing, True, False))
        return tokens, rows

    def _wrong(self, texts: Sequence[_Text], shape: Shape, token: np.ndarray, fresh: Sequence[_Row]) -> list[bool]:
        """Compare the constraint's masks of the forest; return in which trees one is wrong."""
        states: list[ConstraintState | None] = [text.state for text in texts]
        wrong = [False] * len(texts)
        if self.supports_drafts and self.rng.random() < 0.5:
            growing = DraftTreeMasks(states, self.unlimited)
            for depth in range(shape.deepest + 1):
                level = np.flatnonzero(shape.depth == depth)
                for row, allowed in zip(level.tolist(), growing(shape, level, token), strict=True):
                    grown = fresh[row]._replace(bits=pack(allowed))  # the reason for an empty mask is not known here
                    root = int(shape.root[row])
                    wrong[root] |= self._compare(texts[root], _path(shape, token, row), fresh[row], grown, "growing")
        try:
            masks = self.constraint.masks(states, shape, token)
        except ConstraintError:
            masks = None
        for row, expected in enumerate(fresh):
            root = int(shape.root[row])
            drafted = None if masks is None else _Row(masks.bits[row], bool(masks.legal[row]), bool(masks.barrier[row]))
            wrong[root] |= self._compare(texts[root], _path(shape, token, row), expected, drafted)
        return wrong

    def _compare(
        self, text: _Text, drafted: tuple[int, ...], fresh: _Row, row: _Row | None, asked: str = "complete"
    ) -> bool:
        """Return whether a row is wrong, and count it; None: the constraint failed where a fresh state does not."""
        self.found.rows += 1
        if row is not None and row[1:] == fresh[1:] and np.array_equal(row.bits, fresh.bits):
            return False
        self.found.different += 1
        if self.found.first is None:
            what, added, missing = "failure", np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
            if row is not None:
                what = "legality" if row.legal != fresh.legal else "action" if row.barrier != fresh.barrier else "mask"
                mine, theirs = unpack(row.bits, self.vocabulary), unpack(fresh.bits, self.vocabulary)
                added, missing = mine & ~theirs, theirs & ~mine
            tokens = tuple(np.flatnonzero(added).tolist()), tuple(np.flatnonzero(missing).tolist())
            self.found.first = Difference(text.request.name, tuple(text.tokens), drafted, asked, what, *tokens)
        return True

    def _commit(self, text: _Text, root: int, shape: Shape, tokens: Sequence[int], fresh: Sequence[_Row]) -> bool:
        """Commit a part of a legal path and one more token; return whether the text has ended."""
        row, path = root, []
        while children := [int(child) for child in shape.children[row] if fresh[child].legal]:
            if self.rng.random() < 0.25:
                break
            row = children[int(self.rng.integers(len(children)))]
            path.append(tokens[row - shape.roots])
        if fresh[row].bits.any():
            path.append(self._draw(fresh[row].bits, text.request.stop, 0.0))
        try:
            if any(_extend(text, token) for token in path):
                return True
            while self.fast_forward and (forced := forced_token(text.state)) is not None:
                if _extend(text, forced):
                    return True
        except ConstraintError:
            return True
        return not fresh[row].bits.any()

    def _draw(self, bits: np.ndarray, stop: frozenset[int], illegal: float) -> int:
        """Return a token, mostly one that the mask allows; rarely a stop token."""
        tokens = np.flatnonzero(unpack(bits, self.vocabulary))
        if not len(tokens) or self.rng.random() < illegal:
            return int(self.rng.integers(self.vocabulary))
        if self.rng.random() < 1 - ENDS and len(going := np.setdiff1d(tokens, list(stop))):
            tokens = going
        if self.rng.random() < STRUCTURE and self.structure[tokens].any():
            tokens = tokens[self.structure[tokens]]
        kinds = self.kind[tokens]
        return int(self.rng.choice(tokens[kinds == self.rng.choice(np.unique(kinds))]))

    def _fresh(self, request: Request, tokens: Sequence[int]) -> ConstraintState:
        """Return a state after ``tokens`` that has processed no draft."""
        state = self.constraint.start(request)
        for token in tokens:
            state.advance(token)
        return state


def _row_of(state: ConstraintState, vocabulary: int) -> _Row:
    """Return the row of a state; one that allows nothing where the state raises ``ConstraintError``."""
    nothing = np.zeros(width(vocabulary), dtype=np.uint32)
    try:
        if state.action() is not None:
            return _Row(nothing, True, True)
        mask = state.mask()
    except ConstraintError:
        return _Row(nothing, True, False)
    return _Row(full_mask(vocabulary) if mask is None else mask.copy(), True, False)


def _extend(text: _Text, token: int) -> bool:
    """Commit a token unless the text ends there; return whether it has ended."""
    if token in text.request.stop or len(text.tokens) == LONGEST:
        return True
    text.state.advance(token)
    text.tokens.append(token)
    return text.state.action() is not None


def _path(shape: Shape, token: np.ndarray, row: int) -> tuple[int, ...]:
    """Return the draft tokens from the root to ``row``."""
    return tuple(int(token[node - shape.roots]) for node in shape.path(row))
