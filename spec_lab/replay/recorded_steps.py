"""Expected tokens of a step at the recorded steps: every verifier, on every subtree of the recorded trees.

Given a recorded tree, a subtree's p and q are recorded as well, so the expected number of accepted tokens is exact (up
to what ``pseudo_tokens`` bounds). tau is then the mean over the recorded steps: what the design does where the
recorded run's steps began. A design's own steps begin elsewhere; ``steps_along_texts`` follows them.

Where tokens are not recorded, two completions of each row (``pseudo_tokens``) bound the acceptance of each of its
children. For ``token``, ``lenient`` and ``kseq`` the value of a tree is linear in each of them, so that the least and
the largest follow from the leaves up, whatever the completion: the interval is a proof (``Replayed.in_turn``).
``match`` and ``relaxed`` read recorded tokens only; ``typical`` reads the entropy, whose least and largest value are
known. For ``traversal`` it is a proof on chains; on trees it is the spread of the two completions, no bound, and so is
any value at another temperature on trees. The column ``bound_kind`` states which. ``cascade`` requires whole rows.

Other draft temperatures, of sampled static trees, are estimated: each step has the weight with which the recorded
tokens would have been drawn, prod q'(c) / q(c), and tau is self-normalised, sum w (1 + E) / sum w: an estimate, even of
whole rows. The effective sample size is (sum w)^2 / sum w^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import DETERMINISTIC, GUMBEL, WAYS, WITHOUT_REPLACEMENT, Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape
from spec_lab.replay import pseudo_tokens
from spec_lab.replay.pseudo_tokens import PSEUDO, Reduced
from spec_lab.replay.recorded_trees import NeedsModel, RecordedTrees
from spec_lab.replay.subtrees import Subtree, check_not_cut
from spec_lab.verify import Match, Relaxed, Token, Typical, Verifier, misfit

KINDS = ("exact", "proved", "estimate", "spread")
"""How well the variants of sums are known, best first: "exact" (one), "proved" (the value lies between them),
"estimate" (of drafts at another temperature, by weights: it has a sampling error however the rows are completed) or
"spread" (they differ by so much, and the value may lie outside)."""


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums over each cluster of steps in tau's numerator and denominator.

    Args:
        clusters: ``[N]`` the requests.
        tokens: ``[variants, N]`` expected tokens, the bonus or recovered one included.
        steps: ``[variants, N]`` (weighted) steps.
        ess: the effective number of steps.
        kind: one of ``KINDS``.
    """

    clusters: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    ess: float
    kind: str = "exact"


class _TypicalOfRest(Typical):
    """``typical`` where the entropy of the tokens that were not recorded is bounded.

    The last column of p holds the entropy of the rest given that the token is one of it; the column before, its mass.
    """

    def bound(self, p: Tensor) -> Tensor:
        """See ``Typical``."""
        entropy = torch.special.entr(p[:, :-1]).sum(-1) + p[:, -2] * p[:, -1]
        return (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon)


def as_draft(trees: RecordedTrees, q: np.ndarray) -> Draft:
    """Return the recorded forest as a draft, tokens numbered within their rows.

    Args:
        trees: the recorded trees. Races count as deterministic: their noise is not recorded.
        q: ``[R, W + PSEUDO]``.
    """
    codes = np.where(trees.codes == GUMBEL, DETERMINISTIC, trees.codes).astype(np.int8)
    ways, token = np.unique(codes), torch.from_numpy(trees.local)
    if not len(codes) or (ways == DETERMINISTIC).all():
        return Draft(trees.shape, token)
    rows = np.flatnonzero(trees.expanded)
    q_row = np.full(trees.shape.rows, -1, dtype=np.int64)
    q_row[rows] = np.arange(len(rows))
    drawn = codes if len(ways) > 1 else WAYS[int(ways[0])]
    return Draft(trees.shape, token, drawn, torch.from_numpy(q[rows]), q_row)


def check(trees: RecordedTrees, verifier: Verifier) -> None:
    """Refuse a verifier that cannot verify the recorded drafts.

    Raises:
        NeedsModel: it does not support how they were drawn, or reads what is not recorded.
    """
    if verifier.accepts == {"gumbel"}:
        raise NeedsModel(f"verifier '{verifier.name}' reads the noise of the draft's race, which is not recorded")
    if why := misfit(trees.arm, trees.ways or frozenset({"deterministic"}), verifier, trees.shape.branches):
        raise NeedsModel(why)


def accepted(trees: RecordedTrees, verifier: Verifier, p: np.ndarray, q: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Return the expected number of accepted tokens of each tree ``[B]``, given its draft.

    Args:
        p, q: ``[R, W + PSEUDO]``.
        keep: ``[M]`` the nodes of the subtree.
    """
    draft, shape = as_draft(trees, q), trees.shape
    rows = np.append(np.ones(shape.roots, dtype=bool), keep)
    kept = np.arange(shape.rows)
    if not keep.all():
        draft, kept = draft.keep(rows)
    verdict = verifier(draft, torch.from_numpy(p[kept]))
    return np.asarray(verdict.expected_accepted(draft.shape))


def summed(shape: Shape, stop: np.ndarray) -> np.ndarray:  # [R] -> [M]
    """Return the probability that each node is accepted, given that of each stop."""
    total, depth = stop.copy(), shape.depth[shape.roots :]
    for level in range(shape.deepest, 1, -1):
        nodes = np.flatnonzero(depth == level)
        np.add.at(total, shape.parent[nodes], total[shape.roots + nodes])
    return total[shape.roots :]


def reached(trees: RecordedTrees, verifier: Verifier, p: np.ndarray, q: np.ndarray) -> np.ndarray:  # [M]
    """Return the probability that each node is accepted, by a verifier that is ``Replayed.top_down``."""
    return summed(trees.shape, np.asarray(verifier(as_draft(trees, q), torch.from_numpy(p)).stop))


def conditional(trees: RecordedTrees, reach: np.ndarray) -> np.ndarray:  # [M]
    """Return the probability that each node is accepted once its parent is and its earlier siblings are not.

    Args:
        reach: ``[M]`` as in ``reached``.
    """
    shape = trees.shape
    left = np.concatenate([np.ones(shape.roots), reach])  # of each row, what its children tried so far have left
    chances = np.zeros(shape.nodes)
    for rank in range(int(shape.rank.max(initial=-1)) + 1):
        nodes = np.flatnonzero(shape.rank == rank)
        above = left[shape.parent[nodes]]
        chances[nodes] = np.divide(reach[nodes], above, out=np.zeros(len(nodes)), where=above > 1e-300).clip(0.0, 1.0)
        left[shape.parent[nodes]] = above - reach[nodes]
    return chances


def extremes(shape: Shape, keep: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest expected number of accepted tokens of each tree, ``[B]`` each.

    Args:
        keep: ``[M]`` the nodes of the subtree.
        lower, upper: ``[M]`` bounds of each node's acceptance, once its parent is and its earlier siblings are not.
    """
    low, high = np.zeros(shape.rows), np.zeros(shape.rows)
    depth = shape.depth[shape.roots :]
    for level in range(shape.deepest, 0, -1):
        here = keep & (depth == level)
        for rank in range(int(shape.rank[here].max(initial=-1)), -1, -1):
            nodes = np.flatnonzero(here & (shape.rank == rank))
            above, rows = shape.parent[nodes], shape.roots + nodes
            value, other = 1 + low[rows], low[above]
            a = np.where(value > other, lower[nodes], upper[nodes])
            low[above] = a * value + (1 - a) * other
            value, other = 1 + high[rows], high[above]
            a = np.where(value > other, upper[nodes], lower[nodes])
            high[above] = a * value + (1 - a) * other
    return low[: shape.roots], high[: shape.roots]


def tempered_weights(trees: RecordedTrees, q: np.ndarray) -> np.ndarray:  # [M]
    """Return each node's log of q'(c) / q(c), q' the draft's distribution at another temperature.

    Args:
        trees: sampled ones.
        q: ``[R, W + PSEUDO]``, q'.
    """
    shape, parent = trees.shape, trees.shape.parent
    recorded_q = trees.q / np.maximum((trees.q.sum(1) + trees.rest[:, 1])[:, None], 1e-300)
    logs = []
    for x in (q, recorded_q):
        chance = x[parent, trees.local]
        left = np.ones(shape.nodes)  # the mass that earlier siblings drawn without replacement have left
        taken = np.zeros(shape.rows)
        for rank in range(int(shape.rank.max(initial=-1)) + 1):
            nodes = np.flatnonzero((shape.rank == rank) & (trees.codes == WITHOUT_REPLACEMENT))
            left[nodes] = np.maximum(1.0 - taken[parent[nodes]], 1e-300)
            taken[parent[nodes]] += chance[nodes]
        with np.errstate(divide="ignore"):
            logs.append(np.log(chance) - np.log(left))
    return logs[0] - logs[1]


def check_reweighted(trees: RecordedTrees) -> None:
    """Refuse another draft temperature or width where the recorded drafts do not identify it.

    Raises:
        NeedsModel: deterministic drafts, mixed ways of drawing, or trees whose shape follows from q.
    """
    if not trees.ways <= {"iid"} and not trees.ways <= {"without_replacement"}:
        drawn = ", ".join(sorted(trees.ways))
        raise NeedsModel(f"another draft temperature is identified by sampled drafts only, not by ones drawn {drawn}")
    if trees.stops_by_q:
        raise NeedsModel("the shape of the recorded trees follows from q, which another draft temperature changes")


def evaluate(
    trees: RecordedTrees,
    verifier: Verifier,
    subtrees: Sequence[Subtree],
    sampling: Sampling | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int = 0,
) -> Iterator[Sums | NeedsModel]:
    """Yield the sums of each subtree's steps, or why the recorded rows do not identify it.

    Args:
        sampling: of the target; None for the recorded one.
        draft_temperature, draft_top_k: of the drafter; None and 0 for the recorded.
    """
    try:
        check(trees, verifier)
        p = pseudo_tokens.target(trees, sampling)
        other = draft_temperature not in (None, trees.draft_temperature) or draft_top_k > 0
        if other:
            check_reweighted(trees)
        q = pseudo_tokens.drafted(trees, draft_temperature, draft_top_k)
    except NeedsModel as why:
        for _ in subtrees:
            yield why
        return
    variants = pseudo_tokens.variants(trees, p, q)
    both = [pseudo_tokens.complete(p, q, variant) for variant in variants]
    logs = [tempered_weights(trees, mass) for _, mass in both] if other else []
    if other:
        both = [(target, _possible(trees, mass)) for target, mass in both]
    try:
        verdicts = _Verdicts(trees, verifier, p, both, p.exact and q.exact)
    except NeedsModel as why:
        for _ in subtrees:
            yield why
        return
    clusters, cluster = np.unique(trees.steps["request"].to_numpy()[trees.decode], return_inverse=True)
    root, decode = trees.shape.root[trees.shape.roots :], trees.decode
    for subtree in subtrees:
        try:
            check_not_cut(trees, subtree)
            keep = subtree.keeps(trees.shape)
        except NeedsModel as why:
            yield why
            continue
        weights = [np.ones(trees.shape.roots)]
        if other:
            sums = [np.bincount(root[keep], node_logs[keep], minlength=trees.shape.roots) for node_logs in logs]
            weights = [np.exp(total - max(total[decode].max(initial=-np.inf), -700.0)) for total in sums]
        weighted = [(weight[decode], mean[decode]) for mean in verdicts.means(keep) for weight in weights]
        tokens = [np.bincount(cluster, weight * (1 + mean), minlength=len(clusters)) for weight, mean in weighted]
        steps = [np.bincount(cluster, weight, minlength=len(clusters)) for weight, _ in weighted]
        kind = "estimate" if other and verdicts.kind != "spread" else verdicts.kind
        size = min(weight.sum() ** 2 / max(np.square(weight).sum(), 1e-300) for weight, _ in weighted)
        yield Sums(clusters, np.array(tokens), np.array(steps), float(size), kind)


class _Verdicts:
    """A verifier's expectations on subtrees, one for each completion, or two between which the value lies.

    Args:
        p: the target probabilities, not completed.
        both: p and q, completed in every way.
        known: whether the masses of the rests are.

    Raises:
        NeedsModel: the verifier reads what is not recorded.
    """

    def __init__(
        self,
        trees: RecordedTrees,
        verifier: Verifier,
        p: Reduced,
        both: Sequence[tuple[np.ndarray, np.ndarray]],
        known: bool,
    ) -> None:
        rest = bool((p.upper > 0).any())
        if verifier.replayed.whole_rows and (rest or (trees.rest[:, 1] > 0).any()):
            raise NeedsModel(
                f"verifier '{verifier.name}' reads whole rows (Verifier.replayed); record with record_top of the "
                "vocabulary's size"
            )
        if isinstance(verifier, Relaxed) and rest:
            both = [(_without_rest(p, verifier, trees), q) for _, q in both[:1]]
        if isinstance(verifier, Typical) and rest:
            both = [(full, q) for target, q in both for full in _with_entropy(target, trees)]
            verifier = _TypicalOfRest(verifier.epsilon, verifier.delta)
        self.trees, self.verifier, self.both = trees, verifier, both
        assumed, chains = verifier.replayed, not trees.shape.branches
        self.proves = len(both) > 1 and assumed.in_turn
        settled = known or (chains and isinstance(verifier, Token | Match))
        proved = settled and (assumed.bounded == "always" or (chains and assumed.bounded == "chains"))
        self.kind = "exact" if len(both) == 1 else "proved" if proved else "spread"
        self.once = [reached(trees, verifier, *completion) for completion in both] if assumed.top_down else []

    def means(self, keep: np.ndarray) -> list[np.ndarray]:
        """Return the expected numbers of accepted tokens, ``[B]`` each, of the nodes marked in ``keep`` ``[M]``."""
        shape = self.trees.shape
        if self.once and not self.proves:
            root = shape.root[shape.roots :][keep]
            return [np.bincount(root, node_reach[keep], minlength=shape.roots) for node_reach in self.once]
        if not self.proves:
            return [accepted(self.trees, self.verifier, *completion, keep) for completion in self.both]
        reach = self.once or [self._reached(*completion, keep) for completion in self.both]
        chances = np.array([conditional(self.trees, node_reach) for node_reach in reach])
        return [*extremes(shape, keep, chances.min(0), chances.max(0))]

    def _reached(self, p: np.ndarray, q: np.ndarray, keep: np.ndarray) -> np.ndarray:  # [M]
        """Return the probability that each node of the subtree is accepted; 0 of others."""
        shape = self.trees.shape
        draft, rows = as_draft(self.trees, q), np.arange(shape.rows)
        if not keep.all():
            draft, rows = draft.keep(np.append(np.ones(shape.roots, dtype=bool), keep))
        stop = np.zeros(shape.rows)
        stop[rows] = np.asarray(self.verifier(draft, torch.from_numpy(p[rows])).stop)
        return summed(shape, stop)


def _without_rest(p: Reduced, verifier: Relaxed, trees: RecordedTrees) -> np.ndarray:  # [R, W + PSEUDO]
    """The target probabilities of the recorded tokens, where they settle which ``verifier.top`` are the likeliest.

    Raises:
        NeedsModel: they do not, or the temperature is not the recorded one.
    """
    if not p.exact or verifier.top > p.top.shape[1]:
        raise NeedsModel("verifier 'relaxed' ranks tokens that are not recorded; set a larger record_top")
    full = p.complete("upper", 0)
    share = np.divide(full[:, :-PSEUDO].sum(1), p.top.sum(1), out=np.zeros(len(full)), where=p.top.sum(1) > 0)
    last = -np.sort(-full[:, :-PSEUDO], axis=1)[:, verifier.top - 1]
    if ((trees.rest[:, 0] > 0) & (last < trees.rest[:, 2] * share)).any():
        raise NeedsModel("verifier 'relaxed' ranks tokens that are not recorded; set a larger record_top")
    full[:, -PSEUDO:] = 0.0
    return full


def _with_entropy(p: np.ndarray, trees: RecordedTrees) -> list[np.ndarray]:  # [R, W + PSEUDO] each
    """P with the least and the largest entropy of the rest: as many tokens as can have the largest mass; all equal."""
    mass, largest = trees.rest[:, 0], trees.rest[:, 2]
    others = np.maximum(trees.vocabulary - (trees.ids >= 0).sum(1), 1)
    peaked = np.log(np.maximum(np.divide(mass, largest, out=np.ones_like(mass), where=largest > 0), 1.0))
    completions = []
    for entropy in (peaked, np.log(others)):
        full = p.copy()
        full[:, -1] = entropy
        completions.append(full)
    return completions


def _possible(trees: RecordedTrees, q: np.ndarray) -> np.ndarray:  # [R, W + PSEUDO]
    """Q with a little mass at drawn tokens that have none: verifiers refuse these, and their trees have no weight."""
    drawn = q[trees.shape.parent, trees.local]
    q[trees.shape.parent, trees.local] = np.where(drawn > 0, drawn, 1e-12)
    return q
