"""The masks of the run's own constraint on the run's own vocabulary, compared with those of fresh states.

Speculative decoding asks a constraint for the masks of whole draft trees, step after step, from states that have seen
drafts before. Autoregressive decoding asks a state that has only ever moved forward. Both must give the same masks, or
the output does not have the distribution of autoregressive decoding. ``walk`` decodes random texts with random drafts
and compares every row of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spec_lab.constrain import AppliedConstraint, ConstraintError, ConstraintState
from spec_lab.constrain.applied import DraftTreeMasks, forced_token
from spec_lab.constrain.protocol import Constraint, allows, full_mask, masks_by_forking, pack, unpack, width
from spec_lab.core.draft import Shape, chain, forest
from spec_lab.engine.request import Request

HEADS = 4
"""Sequences that are drafted for at once, at most."""

NODES = 24
"""Draft tokens of one tree, at most."""

LONGEST = 160
"""Tokens of a text, at most; then another one begins."""

ILLEGAL = 0.05
"""Share of the draft tokens that are drawn from the whole vocabulary, legal or not."""

STRUCTURE = 0.25
"""Share of the legal tokens that are drawn among those of ``PUNCTUATION`` and white space, where there are any."""

PUNCTUATION = b"{}[]()<>\"':,;="

ENDS = 0.1
"""Share of the legal tokens that may end the text."""

AGAIN = 0.8
"""Share of the texts that begin as an earlier one did."""

KEPT = 64
"""Earlier texts that new ones may begin with."""


@dataclass(frozen=True)
class Difference:
    """A row whose mask is not that of a fresh state.

    Args:
        request: its name.
        committed: tokens of the output before the draft.
        drafted: tokens of the draft that lead to the row.
        asked: what gave the mask: the "masks" of a draft tree, or the "guide" of a growing draft.
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
class Walked:
    """What ``walk`` found.

    Args:
        rows: compared.
        different: of them, those that differ from those of a fresh state.
        steps: in which they were drafted.
        texts: begun.
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
    """The mask after a path of tokens, whether the path is legal, and whether the constraint requires an action."""

    bits: np.ndarray  # [W], all zero where nothing may come
    legal: bool
    barrier: bool


@dataclass(eq=False)
class _Text:
    """A text that grows: its tokens after the prompt, and the state at its end, on which drafts have been tried."""

    request: Request
    state: ConstraintState
    tokens: list[int] = field(default_factory=list)


def walk(
    binding: AppliedConstraint,
    requests: Sequence[Request],
    rows: int,
    seed: int,
    pieces: Sequence[bytes] | None = None,
    tick: Callable[[int], object] = lambda _: None,
) -> Walked:
    """Decode random texts under random drafts, and compare every mask with that of a state that never saw a draft.

    In each step some texts get a random tree or chain each, of tokens that are mostly legal. The constraint gives its
    masks as it does in decoding; in half of the steps the guide of a growing draft is asked before. Then a part of a
    legal path is committed, and one more token. States live on from step to step. Their masks are compared with those
    of fresh states: started at the prompt and only ever advanced, over the committed tokens and down one path of the
    draft.

    Tokens without letters and white space are preferred, and most texts begin as an earlier one did. So texts
    nest deeply, where tokens drawn uniformly would soon end them or stay within one long string.

    A text ends at a stop token, where nothing may come, and where the constraint wants an action (to fork, to take
    tokens back, to end); what follows an action is not compared. Where states cannot be forked nothing is drafted.

    Args:
        binding: the run's.
        requests: those of the run at whose prompts the constraint can start; texts follow their prompts in turn.
            Without any, nothing is compared.
        rows: to compare; the last step may compare a few more.
        seed: of all random choices.
        pieces: the bytes of each token; None where they are not known.
        tick: told how many rows were compared.
    """
    found = Walked()
    walker = _Walker(binding, np.random.default_rng([seed, 20_000]), pieces, found)
    if not requests:
        return found
    live = [walker.begin(requests) for _ in range(HEADS)]
    while found.rows < rows:
        before = found.rows
        heads = np.sort(walker.rng.permutation(HEADS)[: walker.rng.integers(1, HEADS + 1)]).tolist()
        ended = walker.step([live[head] for head in heads])
        for head, over in zip(heads, ended, strict=True):
            if over:
                live[head] = walker.begin(requests)
        tick(min(found.rows, rows) - min(before, rows))
    return found


class _Walker:
    """The texts of ``walk``."""

    def __init__(
        self, binding: AppliedConstraint, rng: np.random.Generator, pieces: Sequence[bytes] | None, found: Walked
    ) -> None:
        self.constraint: Constraint = binding.constraint
        self.fast_forward = bool(binding.fast_forward)
        self.guide = AppliedConstraint(binding.constraint, "both")  # no budget: every mask counts
        self.supports_drafts = bool(getattr(binding.constraint, "supports_drafts", True))
        self.vocabulary = binding.constraint.vocabulary
        self.rng, self.found = rng, found
        pieces = pieces or [b""] * self.vocabulary
        self.kind = np.array([(piece.strip() or b"\0")[0] for piece in pieces])
        self.structure = np.array([bool(piece.strip()) and not piece.strip().strip(PUNCTUATION) for piece in pieces])
        self.past: list[tuple[Request, list[int]]] = []
        self.begun = 0

    def begin(self, requests: Sequence[Request]) -> _Text:
        """A new text, which may begin as an earlier one did."""
        self.found.texts += 1
        if self.past and self.rng.random() < AGAIN:
            request, tokens = self.past[int(self.rng.integers(len(self.past)))]
            own = tokens[: int(self.rng.integers(len(tokens) + 1))]
            return _Text(request, self._fresh(request, own), list(own))
        self.begun += 1
        request = requests[self.begun % len(requests)]
        return _Text(request, self._fresh(request, ()))

    def step(self, texts: Sequence[_Text]) -> list[bool]:
        """Draft, compare and commit; returns which texts have ended."""
        self.found.steps += 1
        over: dict[int, bool] = {}
        going = []
        for text in texts:
            self.found.longest = max(self.found.longest, len(text.tokens))
            here = _row_of(self._fresh(text.request, text.tokens), self.vocabulary)
            if here.bits.any():
                going.append(text)
            else:  # nothing may come, or an action
                over[id(text)] = True
                self._compare(text, (), here, _row_of(text.state, self.vocabulary))
        if going:
            over |= {id(text): ended for text, ended in zip(going, self._drafted(going), strict=True)}
        return [over[id(text)] for text in texts]

    def _drafted(self, texts: Sequence[_Text]) -> list[bool]:
        """As ``step``, for texts that go on."""
        trees = [self._tree() for _ in texts]
        shape, tokens, wanted = forest(tuple(trees)), [], [_Row(np.empty(0), True, False)] * len(texts)
        for head, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            own, rows = self._expected(text, tree)
            tokens += own
            wanted[head] = rows[0]
            wanted += rows[1:]
        token = np.array(tokens, dtype=np.int64)
        wrong = self._asked(texts, shape, token, wanted)
        ended = []
        for head, text in enumerate(texts):
            ended.append(self._commit(text, head, shape, tokens, wanted) or wrong[head])
            if ended[-1] and not wrong[head] and text.tokens:
                self.past = [*self.past[-KEPT + 1 :], (text.request, text.tokens)]
        return ended

    def _tree(self) -> Shape:
        """A chain or a tree of a random shape, sometimes an empty one."""
        if not self.supports_drafts:
            return chain(0)
        nodes = int(self.rng.integers(NODES + 1))
        if self.rng.random() < 1 / 3:
            return chain(nodes)
        latest = self.rng.random(nodes) < 0.5  # deeper than a tree of uniformly drawn parents
        parents = [row if latest[row] else int(self.rng.integers(row + 1)) for row in range(nodes)]
        return Shape(1, np.array(parents, dtype=np.int64))

    def _expected(self, text: _Text, tree: Shape) -> tuple[list[int], list[_Row]]:
        """Tokens for a tree, and the rows of fresh states. Each leaf has a state of its own."""
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
            one = ready.pop(parent, None)
            try:
                if one is None:
                    path = [tokens[row - 1] for row in tree.path(parent)]
                    one = self._fresh(text.request, [*text.tokens, *path])
                one.advance(tokens[-1])
                rows.append(_row_of(one, self.vocabulary))
                ready[node + 1] = one
            except ConstraintError:  # nothing comes after it
                rows.append(_Row(nothing, True, False))
        return tokens, rows

    def _asked(self, texts: Sequence[_Text], shape: Shape, token: np.ndarray, wanted: Sequence[_Row]) -> list[bool]:
        """Compare the constraint's masks of the forest; returns in which trees it is wrong."""
        states: list[ConstraintState | None] = [text.state for text in texts]
        wrong = [False] * len(texts)
        if self.supports_drafts and self.rng.random() < 0.5:
            guide = DraftTreeMasks(states, self.guide)
            for depth in range(int(shape.depth.max()) + 1):
                level = np.flatnonzero(shape.depth == depth)
                for row, allowed in zip(level.tolist(), guide(shape, level, token), strict=True):
                    below = wanted[row]._replace(bits=pack(allowed))  # it does not say why nothing may come
                    head = int(shape.root[row])
                    wrong[head] |= self._compare(texts[head], _path(shape, token, row), wanted[row], below, "guide")
        fast = getattr(self.constraint, "masks", None)
        try:
            masks = fast(states, shape, token) if fast else masks_by_forking(states, shape, token, self.vocabulary)
        except ConstraintError:
            masks = None
        for row, known in enumerate(wanted):
            head = int(shape.root[row])
            said = None if masks is None else _Row(masks.bits[row], bool(masks.legal[row]), bool(masks.barrier[row]))
            wrong[head] |= self._compare(texts[head], _path(shape, token, row), known, said)
        return wrong

    def _compare(
        self, text: _Text, drafted: tuple[int, ...], wanted: _Row, said: _Row | None, asked: str = "masks"
    ) -> bool:
        """Whether a row is wrong, which is counted; None: the constraint failed where a fresh state does not."""
        self.found.rows += 1
        if said is not None and said[1:] == wanted[1:] and np.array_equal(said.bits, wanted.bits):
            return False
        self.found.different += 1
        if self.found.first is None:
            what, added, missing = "failure", np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
            if said is not None:
                what = (
                    "legality" if said.legal != wanted.legal else "action" if said.barrier != wanted.barrier else "mask"
                )
                drafting, fresh = unpack(said.bits, self.vocabulary), unpack(wanted.bits, self.vocabulary)
                added, missing = drafting & ~fresh, fresh & ~drafting
            tokens = tuple(np.flatnonzero(added).tolist()), tuple(np.flatnonzero(missing).tolist())
            self.found.first = Difference(text.request.name, tuple(text.tokens), drafted, asked, what, *tokens)
        return True

    def _commit(self, text: _Text, head: int, shape: Shape, tokens: Sequence[int], wanted: Sequence[_Row]) -> bool:
        """Commit a part of a legal path and one more token; returns whether the text has ended."""
        row, path = head, []
        while children := [int(one) for one in shape.children[row] if wanted[one].legal]:
            if self.rng.random() < 0.25:
                break
            row = children[int(self.rng.integers(len(children)))]
            path.append(tokens[row - shape.roots])
        if wanted[row].bits.any():
            path.append(self._draw(wanted[row].bits, text.request.stop, 0.0))
        try:
            if any(_extend(text, token) for token in path):
                return True
            while self.fast_forward and (forced := forced_token(text.state)) is not None:
                if _extend(text, forced):
                    return True
        except ConstraintError:
            return True
        return not wanted[row].bits.any()

    def _draw(self, bits: np.ndarray, stop: frozenset[int], illegal: float) -> int:
        """A token, mostly one that the mask allows; rarely one that ends the text."""
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
        """A state that has seen no draft, after ``tokens``."""
        state = self.constraint.start(request)
        for token in tokens:
            state.advance(token)
        return state


def _row_of(state: ConstraintState, vocabulary: int) -> _Row:
    """The row of a state; one that allows nothing where the state raises ``ConstraintError``."""
    nothing = np.zeros(width(vocabulary), dtype=np.uint32)
    try:
        if state.action() is not None:
            return _Row(nothing, True, True)
        mask = state.mask()
    except ConstraintError:
        return _Row(nothing, True, False)
    return _Row(full_mask(vocabulary) if mask is None else mask.copy(), True, False)


def _extend(text: _Text, token: int) -> bool:
    """Commit a token, unless the text ends there; returns whether it has ended."""
    if token in text.request.stop or len(text.tokens) == LONGEST:
        return True
    text.state.advance(token)
    text.tokens.append(token)
    return text.state.action() is not None


def _path(shape: Shape, token: np.ndarray, row: int) -> tuple[int, ...]:
    """The draft tokens that lead to ``row``."""
    return tuple(int(token[one - shape.roots]) for one in shape.path(row))
