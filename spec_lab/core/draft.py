"""A draft: tokens on the nodes of a forest (``core.shape``), and the distributions that they were drawn from.

Letters used in shapes everywhere: B roots (live sequences), M nodes, R = B + M rows, V vocabulary, E expanded parents,
K maximum number of children of a row, D depth of the deepest node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.limit import Limit
from spec_lab.core.protocols import Declared
from spec_lab.core.shape import Shape

Drawn = Literal["deterministic", "iid", "without_replacement", "gumbel"]
"""How a node's token was drawn, given its earlier siblings:

``deterministic``         as a function of the context (top-k, n-gram)
``iid``                   from the parent's q; how many siblings there are was known before the first of them was drawn,
                          or follows from anything but their tokens (K-SEQ relies on it; a count that follows a drawn
                          token is that of ``without_replacement``)
``without_replacement``   from the parent's q off the tokens of earlier siblings drawn so, renormalised
``gumbel``                as the best of a race whose noise the verifier shares (``Draft.noise``)
"""

WAYS: tuple[Drawn, ...] = ("deterministic", "iid", "without_replacement", "gumbel")
"""The ways of drawing; a way's place is its code in ``Draft.drawn``."""

DETERMINISTIC, IID, WITHOUT_REPLACEMENT, GUMBEL = range(4)

WAY = Declared(f"one of {', '.join(WAYS)}", lambda value: isinstance(value, str) and value in WAYS)
SOME_WAYS = Declared(
    f"a frozenset of some of {', '.join(WAYS)}",
    lambda value: isinstance(value, frozenset) and bool(value) and value <= frozenset(WAYS),
)
"""Type of an attribute that declares ways of drawing."""


class ComputedOnly(NamedTuple):
    """Rows that the target computes with a draft and no verifier accepts, such as lookahead's window (2402.02057).

    They are numbered after all nodes, from R. A verifier does not see them, no node may hang below one, and no
    probabilities of theirs are read; proposers that declare it observe their logits.

    Args:
        parent: ``[X]`` int64, the row above each: a root, a node, or an earlier one of them.
        token: ``[X]`` int64, on the target's device.
    """

    parent: np.ndarray
    token: Tensor


BROKEN = "the draft's logits are NaN or infinite"
"""Why a tree whose draft logits hold no distribution ends."""


class Late(NamedTuple):
    """Values of a draft that the host learns only with the outcome of its verification.

    Args:
        broken: ``[B]`` bool, on the device: trees whose draft logits hold no distribution.
        q_row: ``[R]`` ``Draft.q_row`` on the device, 0 for -1.
        finish: receives the drafted tokens ``[M]``; None where nobody needs them.
    """

    broken: Tensor
    q_row: Tensor
    finish: Callable[[np.ndarray], None] | None


@dataclass(frozen=True, eq=False)
class Draft:
    """A forest with its tokens, and the draft distributions they were drawn from.

    Siblings below one parent may be drawn in several ways, for example an n-gram's continuation (``deterministic``) and
    sampled tokens. They are verified in the order drawn, each by the distribution it was drawn from. The q of a parent
    is the one *before* anything was drawn there: a proposer that samples off its deterministic tokens states a q in
    which these are zeroed (and accepts more: what was rejected as a deterministic token is not drawn again).

    Args:
        shape: the forest.
        token: ``[M]`` int64, on the target's device.
        drawn: how all nodes were drawn, or ``[M]`` int8, how each was (its place in ``WAYS``).
        q: ``[E, V]`` float, the distribution at each parent with sampled children before anything was drawn there; rows
            sum to 1. None where all nodes are deterministic.
        q_row: ``[R]`` int64, which row of ``q`` belongs to each row of the forest; -1 where nothing was sampled.
        noise: ``[E, V]`` float64, only of a draft drawn ``gumbel``: standard Gumbel noise g of each expanded parent,
            whose children are the arg max of log q + g, then the second best, and so on.
        broken: trees that could not be drafted, because the draft's logits are NaN or infinite, each with the reason:
            their sequences end.
        computed_only: rows that are computed with the draft and never accepted.
        one_hot: whether every q is one-hot, as at temperature 0, so that sampled nodes are verified as deterministic
            ones.
        limits: ``[B]`` what a policy allowed, for records; empty without one.
        late: of a draft that nobody has looked at; no node of it can be left out. None elsewhere.
        predict: computes, for records, the drafter's own prediction for each node of this draft or a part of it: the
            probability ``[M]`` that it is accepted if its parent is. None of a drafter that predicts nothing.
        measured: ``[R]`` what a policy measures at each row before its children are drawn (``Batch.measure``), NaN at
            rows from which nothing was drawn; None where nothing is measured.
        greedy_q: ``[M]``, for records, the probability that the drafter gave each token that it chose as the likeliest:
            of a model at temperature 1, of counts the share of what led there. NaN where it is not known; None where it
            is not recorded (``Batch.recorded``), of sampled nodes, and of a drafter that computes none.
    """

    shape: Shape
    token: Tensor  # [M]
    drawn: Drawn | np.ndarray = "deterministic"
    q: Tensor | None = None  # [E, V]
    q_row: np.ndarray | None = None  # [R]
    noise: Tensor | None = None  # [E, V]
    broken: Mapping[int, str] = field(default_factory=dict)
    computed_only: ComputedOnly | None = None
    one_hot: bool = False
    limits: Sequence[Limit] = ()
    late: Late | None = None
    predict: Callable[[Draft], Tensor] | None = None
    measured: np.ndarray | None = None  # [R]
    greedy_q: Tensor | None = None  # [M]

    def __post_init__(self) -> None:
        if self.token.numel() != self.shape.nodes:
            raise ValueError(f"{self.token.numel()} tokens for {self.shape.nodes} nodes")
        if isinstance(self.drawn, str):
            if (self.drawn == "deterministic") != (self.q is None) or (self.q is None) != (self.q_row is None):
                raise ValueError("a draft drawn 'deterministic' carries neither q nor q_row, any other both")
        else:
            self._check_each()
        if ("gumbel" in self.ways) != (self.noise is not None):
            raise ValueError("a draft drawn 'gumbel' carries the noise of its race, no other does")
        extra = self.computed_only
        if extra is not None and len(extra.token) != self.computed_shape.nodes - self.shape.nodes:
            raise ValueError(f"{len(extra.token)} tokens for {len(extra.parent)} rows that are computed only")

    def _check_each(self) -> None:
        assert isinstance(self.drawn, np.ndarray)
        if self.drawn.shape != (self.shape.nodes,):
            raise ValueError(f"{len(self.drawn)} ways of drawing for {self.shape.nodes} nodes")
        sampled = self.shape.parent[self.drawn != DETERMINISTIC]
        if (self.q is None) != (self.q_row is None) or (self.q_row is None and len(sampled)):
            raise ValueError("a draft with sampled nodes carries q and q_row")
        if self.q_row is not None and (self.q_row[sampled] < 0).any():
            raise ValueError("a parent of sampled nodes has a row of q")

    @cached_property
    def ways(self) -> frozenset[Drawn]:
        """The ways of drawing that occur."""
        if isinstance(self.drawn, str):
            return frozenset({self.drawn})
        return frozenset(WAYS[code] for code in np.unique(self.drawn).tolist())

    @cached_property
    def codes(self) -> np.ndarray:  # [M] int8
        """How each node was drawn, as its place in ``WAYS``."""
        if isinstance(self.drawn, str):
            return np.full(self.shape.nodes, WAYS.index(self.drawn), dtype=np.int8)
        return self.drawn

    @cached_property
    def computed_shape(self) -> Shape:
        """The forest of all rows that the target computes: the draft's, then ``computed_only``."""
        if self.computed_only is None:
            return self.shape
        return Shape(self.shape.roots, np.concatenate([self.shape.parent, self.computed_only.parent]))

    @cached_property
    def computed_token(self) -> Tensor:  # [M + X]
        """The tokens of ``computed_shape``."""
        if self.computed_only is None:
            return self.token
        return torch.cat([self.token, self.computed_only.token])

    @cached_property
    def array(self) -> np.ndarray | None:  # [M + X]
        """``computed_token`` where it is in the host's memory, as NumPy's; None on a device."""
        return self.computed_token.numpy() if self.token.device.type == "cpu" else None

    @property
    def acceptable_nodes(self) -> np.ndarray:  # [B]
        """The number of each tree's nodes."""
        return np.bincount(self.shape.root, minlength=self.shape.roots) - 1

    @property
    def computed_only_nodes(self) -> np.ndarray:  # [B]
        """The number of each tree's rows that are computed and never accepted."""
        return np.bincount(self.computed_shape.root[self.shape.rows :], minlength=self.shape.roots)

    def cut(self, depth: Sequence[int]) -> Draft:
        """Return the draft without rows deeper than ``depth[b]`` in tree b. Lossless: it looks at no token."""
        shape = self.computed_shape
        if not shape.nodes or shape.deepest <= min(depth):
            return self
        allowed = shape.depth <= np.asarray(depth)[shape.root]
        return self if allowed.all() else self._keep(allowed)[0]

    def cut_nodes(self, depth: Sequence[int]) -> Draft:
        """Return the draft without nodes deeper than ``depth[b]`` in tree b; rows that are only computed stay."""
        shape = self.shape
        if not shape.nodes or shape.deepest <= min(depth):
            return self
        return self.keep(shape.depth <= np.asarray(depth)[shape.root])[0]

    def keep(self, rows: np.ndarray) -> tuple[Draft, np.ndarray]:
        """Return the draft of the marked nodes whose ancestors are all marked.

        Rows that are only computed stay where what is above them does. Lossless only where the marks follow from the
        path above each node and its distribution, never from what was drawn there; a point may always be dropped.

        Args:
            rows: ``[R]`` bool, the rows to keep.

        Returns:
            The draft, and the old numbers of its rows ``[R']``.
        """
        return self._keep(np.append(rows, np.ones(self.computed_shape.rows - len(rows), dtype=bool)))

    def _keep(self, rows: np.ndarray) -> tuple[Draft, np.ndarray]:
        """``rows``: ``[R + X]``."""
        assert self.late is None, "nothing is left out of a draft that stays on the device"
        shape, extra = self.shape, self.computed_only
        smaller, kept = self.computed_shape.keep(rows)
        if extra is not None:
            nodes, others = kept[kept < shape.nodes], kept[kept >= shape.nodes]
            parent = smaller.parent
            smaller, kept = Shape(shape.roots, parent[: len(nodes)]), nodes
            extra = ComputedOnly(parent[len(nodes) :], extra.token[torch.from_numpy(others - shape.nodes)])
        both = np.concatenate([np.arange(shape.roots), shape.roots + kept])
        q_row = None if self.q_row is None else self.q_row[both]
        token = self.token[torch.from_numpy(kept)]
        drawn, noise = self.drawn, self.noise
        if not isinstance(drawn, str):
            drawn = drawn[kept]
            noise = noise if GUMBEL in drawn else None
        measured = None if self.measured is None else self.measured[both]
        greedy_q = None if self.greedy_q is None else self.greedy_q[torch.from_numpy(kept)]
        kept_draft = replace(
            self, shape=smaller, token=token, drawn=drawn, q_row=q_row, noise=noise, computed_only=extra,
            measured=measured, greedy_q=greedy_q,
        )  # fmt: skip
        return kept_draft, both


def empty(roots: int, device: torch.device | str = "cpu") -> Draft:
    """Return the draft of the null proposer for ``roots`` sequences: no nodes."""
    return Draft(Shape(roots, np.empty(0, dtype=np.int64)), torch.empty(0, dtype=torch.long, device=device))
