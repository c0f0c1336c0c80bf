"""Which tree a drafter drafts, and how its nodes are drawn: what all drafters that state distributions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import Share, Temperature, WrongOption, brief, checked
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape, forest
from spec_lab.core.shape import tree as shape_of
from spec_lab.decode.sequence import Batch
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.device_levels import DeviceLevels
from spec_lab.propose.expansion import Computed, Expand, RowLogits
from spec_lab.propose.grower import Grower
from spec_lab.propose.levels import ForcedChains, LevelByLevel
from spec_lab.propose.stop_rules import Confidence, Stop
from spec_lab.propose.trees import (
    MAX_NODES,
    Choices,
    TreeDepth,
    TreeNodes,
    TreeText,
    depth_of,
    parse,
    width_of,
    widths,
    write,
)


class TreeOptions(TypedDict, total=False):
    """Options of ``TreePlan.read``, which every drafter with a plan has. One of the first three is given.

    Args:
        depth: maximum length of a chain; of depth, tree and nodes one is given.
        tree: of a static tree: paths of child ranks, widths (3x2x1) or a published tree (vicuna_7b_stage1).
        nodes: maximum nodes of a tree that grows best first; each forward of the draft expands its likeliest nodes.
        children: with nodes: children of each expanded node.
        max_depth: with nodes: maximum depth.
        width: with nodes: nodes expanded by each forward of the draft; 1: strictly best first.
        rerank: true: grow level by level and keep the best nodes of all (EAGLE-2); requires drawn=deterministic.
        drawn: siblings: iid, without_replacement, deterministic (the likeliest); unless nodes: gumbel (for
                verifier=gumbel).
        temperature: of the draft; None: each request's; 0 requires drawn=deterministic.
        confidence: a token drawn where no token has this draft probability ends its path; 0: never.
    """

    depth: TreeDepth | None
    tree: TreeText | None
    nodes: TreeNodes | None
    children: TreeNodes
    max_depth: TreeDepth
    width: TreeNodes
    rerank: bool
    drawn: Drawn
    temperature: Temperature | None
    confidence: Share


class Grown(NamedTuple):
    """A draft, and everything that was drawn, of which it may be a part.

    Args:
        draft: what the target verifies.
        shape: all that was drawn. The drafter was asked to ``expand`` rows of this forest.
        token: ``[M]`` the tokens of its nodes.
        kept: those of the draft.
    """

    draft: Draft
    shape: Shape
    token: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True, eq=False)
class TreePlan:
    """A static tree below every root, or trees that grow best first; and how tokens are drawn.

    Siblings are drawn from q at their parent, with the sampling parameters of the request: ``iid``;
    ``without_replacement``, fewer where the support is exhausted; or as ``deterministic``, the likeliest tokens.
    ``gumbel`` also draws without replacement: the siblings are the best of log q + g (Gumbel-top-k, 1903.06059), and
    the draft carries the Gumbel noise g of each parent, with which a verifier of that name samples from the target. A
    row without children has no noise. At temperature 0 q is one-hot, so only ``deterministic`` would draw a second
    sibling: a tree then needs ``deterministic`` or a temperature of the drafter's own (``check_sampling``). Which
    siblings are left out depends on q alone, never on a drawn value.

    With a ``confidence``, drafting stops early: children of a row at which no token has that draft probability get no
    children, since these are likely to be rejected and cost a forward of the drafter. Dynamic draft lengths
    (2405.04304) and transformers' ``assistant_confidence_threshold`` compare the probability of the drawn token; here
    it is the maximum, so that whether drafting stops depends on the path above only, and verification stays exact.

    Args:
        tree: the static tree.
        drawn: how siblings are drawn.
        temperature: the drafter's own; None uses each request's.
        confidence: between 0, off, and 1.
        budget: of trees that grow best first, in place of ``tree``; None for none.
        penalized: whether the requests' penalties, biases and banned words apply; False where the drafter has tokens of
            its own.

    Raises:
        ValueError: options that exclude each other; names them.
    """

    tree: Choices = ()
    drawn: Drawn = "iid"
    temperature: float | None = None
    confidence: float = 0.0
    budget: Budget | None = None
    penalized: bool = True

    def __post_init__(self) -> None:
        if self.budget is None:
            return
        if self.drawn == "gumbel":
            raise WrongOption("nodes does not support drawn=gumbel")
        if self.confidence and self.budget.rerank:
            raise WrongOption("rerank keeps the best of all nodes; it does not support confidence")
        if self.budget.rerank and self.drawn != "deterministic":
            raise WrongOption(
                "rerank leaves out drawn nodes by their tokens, which changes the distribution of nodes drawn "
                f"{self.drawn}: set drawn=deterministic, or rerank=false"
            )

    @staticmethod
    @checked
    def read(
        depth: TreeDepth | None = None,
        tree: TreeText | None = None,
        nodes: TreeNodes | None = None,
        children: TreeNodes = 2,
        max_depth: TreeDepth = 8,
        width: TreeNodes = 4,
        rerank: bool = False,
        drawn: Drawn = "iid",
        temperature: Temperature | None = None,
        confidence: Share = 0.0,
    ) -> TreePlan:
        """Read options. Exactly one of ``depth``, ``tree`` and ``nodes`` is given.

        Args:
            depth: drafts a chain of so many tokens, at most ``trees.MAX_DEPTH``; or
            tree: drafts a tree, written as ``trees.parse`` reads it; or
            nodes: grows trees of at most so many nodes best first, with so many
            children: below each expanded node, at most
            max_depth: levels, and
            width: nodes expanded by each forward of the drafter.
            rerank: grow level by level, and keep the ``nodes`` best at the end (EAGLE-2), which
                requires drawn "deterministic".
            drawn: "iid", "without_replacement", "deterministic" or "gumbel".
            temperature: the drafter's own, at most 1e6; None uses each request's.
            confidence: a token drawn where none was this likely ends its path; 0 never ends one.

        Raises:
            ValueError: a wrong option.
        """
        if sum(given is not None for given in (depth, tree, nodes)) != 1:
            raise WrongOption(
                "depth, for a chain, tree, for a fixed tree, and nodes, for a tree that grows best first: give one of "
                f"them (got depth={brief(depth)}, tree={brief(tree)} and nodes={brief(nodes)}), set the others to null"
            )
        budget: Budget | None = None
        choices: Choices = ()
        if nodes is not None:
            if children > nodes and not rerank:
                raise WrongOption(f"children must be at most nodes, {nodes}, not {children}")
            budget = Budget(nodes, children, max_depth, width, rerank)
            if budget.drawn > MAX_DRAWN:
                raise WrongOption(
                    f"rerank draws {budget.drawn} nodes before it keeps {nodes}, at most {MAX_DRAWN} are "
                    "possible: set a smaller width, children or max_depth"
                )
        elif rerank:
            raise WrongOption("rerank requires nodes, the number of nodes to keep")
        elif depth is not None:
            choices = widths([1] * depth)
        else:
            choices = parse(cast(TreeText, tree))
        return TreePlan(choices, drawn, temperature, confidence, budget)

    @property
    def nodes(self) -> int:
        """Most nodes below one root that the target computes."""
        return len(self.tree) if self.budget is None else self.budget.nodes

    @property
    def computed(self) -> int:
        """Most nodes below one root that the drafter computes."""
        return len(self.tree) if self.budget is None else self.budget.drawn

    @property
    def branches(self) -> bool:
        """Whether drafts may be trees; False: they are chains."""
        return (width_of(self.tree) if self.budget is None else self.budget.children) > 1

    @property
    def depth(self) -> int:
        """The deepest level."""
        return depth_of(self.tree) if self.budget is None else self.budget.depth

    @property
    def kind(self) -> str:
        """For names of proposers: "best_first", "reranked", "chain" or "tree"."""
        if self.budget is not None:
            return "reranked" if self.budget.rerank else "best_first"
        return "chain" if width_of(self.tree) == 1 else "tree"

    @property
    def facts(self) -> dict[str, Any]:
        """Options of the tree, as ``Part.facts`` of its proposer."""
        facts = {"tree": write(self.tree), "nodes": self.nodes, "temperature": self.temperature}
        if self.budget is not None:
            budget = self.budget
            facts |= {
                "tree": "best first",
                "children": budget.children,
                "max_depth": budget.depth,
                "width": budget.width,
            }
            if budget.rerank:
                facts |= {"tree": "reranked"}
        return facts | {"confidence": self.confidence}

    def toy(self, tree: Choices) -> TreePlan:
        """The same way of drawing with another tree; a budget is reduced to a few nodes."""
        if self.budget is None:
            return replace(self, tree=tree)
        budget = self.budget
        return replace(
            self, budget=replace(budget, nodes=min(budget.nodes, 3), children=min(budget.children, 2), depth=2)
        )

    def sampling(self, request: Sampling) -> Sampling:
        """How the drafter samples for a request."""
        request = request if self.penalized else request.without_penalties
        return request if self.temperature is None else request.at(self.temperature)

    def stop(self, batch: Batch) -> Stop | None:
        """Where drafts of a batch stop early: by its policy's rule, else by the ``confidence``."""
        if batch.stop is not None:
            return Stop(batch.stop, np.array([limits.threshold for limits in batch.limits]))
        return Stop(Confidence(), np.full(len(batch.sequences), self.confidence)) if self.confidence else None

    @property
    def why_not_stopped(self) -> str:
        """See ``Proposer``."""
        if self.budget is not None and self.budget.rerank:
            return "proposer.rerank keeps the best of all nodes: set it to false"
        return f"proposer.confidence={self.confidence} stops them already: set it to 0" if self.confidence else ""

    @property
    def why_not_admitted(self) -> str:
        """See ``Proposer``."""
        if self.budget is None or self.drawn == "deterministic" or self.budget.children == 1:
            return ""
        return (
            f"in a tree that grows best first (proposer.nodes={self.budget.nodes}), whether one node has children "
            "follows from tokens sampled at others, so that a token would be left out because of its value: set "
            "proposer.drawn=deterministic, or draft a chain or a static tree in place of nodes"
        )

    def check_sampling(self, request: Sampling) -> None:
        """Refuse what could draw only a chain.

        Raises:
            ValueError: siblings sampled at temperature 0.
        """
        if self.drawn != "deterministic" and self.branches and self.sampling(request).temperature == 0:
            raise ValueError(
                f"at temperature 0 the draft distribution is one-hot, so siblings drawn {self.drawn} shrink the tree "
                "to a chain: set proposer.drawn=deterministic, or a draft temperature such as proposer.temperature=1"
            )

    def check_width(self, vocabulary: int) -> None:
        """Refuse trees wider than a vocabulary of so many tokens.

        Raises:
            ValueError: names the option.
        """
        if width_of(self.tree) > vocabulary:
            raise WrongOption(f"tree: a tree {width_of(self.tree)} wide does not fit a vocabulary of {vocabulary}")
        if self.budget is not None and self.budget.children > vocabulary:
            raise WrongOption(f"children: {self.budget.children} children do not fit a vocabulary of {vocabulary}")

    def levels_ahead(self, batch: Batch, depths: Sequence[int]) -> DeviceLevels | None:
        """Return the forest of a batch where it can be drafted without a look at a token; else None.

        Args:
            batch, depths: as in ``draft``.
        """
        samplings = [self.sampling(sequence.request.sampling) for sequence in batch.sequences]
        if self.budget is not None or self.stop(batch) is not None or batch.measure is not None:
            return None
        if not DeviceLevels.fits(self.drawn, batch, self.branches, samplings):
            return None
        return DeviceLevels(self.drawn, batch, self._forest(depths), samplings)

    def _forest(self, depths: Sequence[int]) -> Shape:
        """The static trees of these depths."""
        return forest(tuple(self._cut[min(depth, len(self._cut) - 1)] for depth in depths))

    def draft(
        self,
        batch: Batch,
        depths: Sequence[int],
        roots: Computed | None,
        expand: Expand | None,
        lenient: bool = False,
        forced: Sequence[int] | None = None,
    ) -> Grown:
        """Draft below every sequence of a batch.

        Args:
            depths: ``[B]`` most levels of each tree; the plan's own apply as well. 0 or less: nothing is drafted.
            roots: logits at the roots of the trees with a depth above 0, in order; None if there are none.
            expand: computes further rows; None where ``roots`` is.
            lenient: draft nothing below rows whose logits hold no distribution. Their trees are named in
                ``Draft.broken`` all the same.
            forced: ``[B]`` most nodes of chains whose forced tokens do not count as levels; None: they do.
        """
        if roots is None or expand is None:
            roots, expand = RowLogits(torch.empty(0, batch.target.vocabulary, device=batch.device)), _never
        samplings = [self.sampling(sequence.request.sampling) for sequence in batch.sequences]
        depths = [max(0, depth) for depth in depths]
        grower: Grower
        if self.budget is not None:
            grower = BestFirst(self.budget, self.drawn, batch, depths, samplings, self.stop(batch), lenient)
        elif forced is not None:
            grower = ForcedChains(self.drawn, batch, depths, forced, samplings, self.stop(batch))
        else:
            grower = LevelByLevel(self.drawn, batch, self._forest(depths), samplings, self.stop(batch), lenient)
        draft = grower.grow(roots, expand)
        return Grown(draft, grower.shape, grower.token, grower.kept)

    @cached_property
    def _cut(self) -> list[Shape]:
        """The static tree without the levels below each depth."""
        depths = range(depth_of(self.tree) + 1)
        return [shape_of(tuple(path for path in self.tree if len(path) <= depth)) for depth in depths]


def _never(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
    raise AssertionError("no root has logits, so no row is expanded")


MAX_DRAWN = 16 * MAX_NODES
"""Most nodes that are drawn before some are left out."""
