"""How far a recorded run is from what is possible: shares of the optimum, and where the missing tokens are lost.

A step whose tree has depth D emits at most D + 1 tokens. What it emits less than that is split into four parts:

- ``verifier``: the best lossless verifier of this project accepts more of the same trees;
- ``open``: no verifier here accepts it, and it is not proved that none can. 0 where the optimum is attained: for
  chains (block verification), and for deterministic trees;
- ``tree``: another tree of as many nodes and at most the same depth. An estimate: acceptance follows from depth and
  rank alone, as in Sequoia (2402.12374), and each node is verified optimally;
- ``draft``: the rest. A draft whose q is p has every token of a chain accepted, D + 1 tokens.

They sum to D + 1 - tau. All are means over the recorded steps after the prefill (see ``recorded_steps``), with
bootstrap intervals over requests. ``optimum`` describes the bound of whole trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, Interval, quantiles, resampled_sums
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.progress import Progress
from spec_lab.core.tables import read_table
from spec_lab.propose.trees import by_rank as value_by_rank
from spec_lab.propose.trees import grow
from spec_lab.replay import optimum, pseudo_tokens, recorded_steps
from spec_lab.replay.designs import verifier_of
from spec_lab.replay.pseudo_tokens import PSEUDO, Variant
from spec_lab.replay.recorded_trees import VERIFIERS, NeedsModel, RecordedTrees, read
from spec_lab.replay.subtrees import Subtree
from spec_lab.verify import KSeq, Match, Token, Traversal, Verifier
from spec_lab.verify.transport import spechub_acceptance

RESAMPLES = 1999
MAX_ROWS = 20_000
"""Recorded rows of which a run computes the bounds when it ends; it takes about half a minute."""
PARTS = ("verifier", "open", "tree", "draft")
"""The parts of the loss, as ``lost_*``."""

FIRST_LEVEL, WHOLE_TREES = Subtree(depth=1), Subtree()


@dataclass(frozen=True, eq=False)
class VerifierBounds:
    """One verifier on the trees of an arm.

    Args:
        name: as it is written.
        lossless: whether its output has the target's distribution. Others can exceed the optimum.
        used: whether the run used it.
        tau: expected tokens of a step.
        unknown: half the width of what tokens that were not recorded leave open of tau.
        share_first: P(a child of the root is accepted) over its optimum, where only the first level is drafted.
        share: accepted tokens over the optimum of the trees, or over its bound.
        lost: tokens a step that are lost, by part; they sum to depth + 1 - tau.
    """

    name: str
    lossless: bool
    used: bool
    tau: Interval
    unknown: float
    share_first: Interval
    share: Interval
    lost: Mapping[str, Interval]


@dataclass(frozen=True, eq=False)
class ArmBounds:
    """The bounds of one arm.

    Args:
        drawn: how its nodes were drawn.
        steps: recorded steps after the prefill.
        nodes, depth: their means.
        optimum: most expected tokens of a step by any lossless verifier of these trees.
        kind: "exact"; "bound" where no verifier need reach it; "estimate" where the masses of the tokens that were not
            recorded are not known (other temperatures than 1).
        deterministic: a bound of the expected tokens of any deterministic tree of as many nodes and at most this
            depth, whichever draft chose it.
        best: the lossless verifier of this project with the largest tau.
        verifiers: all that fit, most tokens first.
        spechub: the share of the optimum of the first level, of two children, that SpecHub accepts of two drafts of
            its own (``verify.transport``); NaN where another number was drawn, or they were not sampled.
        spechub_kind: "exact"; "estimate" where rows were truncated: both of its terms then have the rest's p and q
            overlap as much as they can.
        needs: why there are no bounds; empty where there are.
    """

    arm: str
    drawn: str = ""
    steps: int = 0
    nodes: float = float("nan")
    depth: float = float("nan")
    optimum: Interval = Interval(*[float("nan")] * 3)
    kind: str = ""
    deterministic: Interval = Interval(*[float("nan")] * 3)
    best: str = ""
    verifiers: tuple[VerifierBounds, ...] = ()
    needs: str = ""
    spechub: Interval = Interval(*[float("nan")] * 3)
    spechub_kind: str = ""

    def figures(self) -> dict[str, Any]:
        """The figures of the run's own verifier, by their names in ``summary.json``; empty where it is not known."""
        used = next((bounds for bounds in self.verifiers if bounds.used), None)
        if used is None:
            return {}
        figures = {"optimum_tau": self.optimum, "share_of_optimum": used.share}
        figures |= {"share_of_optimum_first": used.share_first}
        figures |= {f"lost_{part}": value for part, value in used.lost.items()}
        return {name: value._asdict() for name, value in figures.items()}

    def summary(self) -> dict[str, Any]:
        """The contents of ``bounds`` in ``summary.json``."""
        if self.needs:
            return {"needs": self.needs}
        by_name = {
            bound.name: {
                "lossless": bound.lossless,
                "used": bound.used,
                "tau": bound.tau._asdict(),
                "not_recorded": bound.unknown,
                "share_first": bound.share_first._asdict(),
                "share": bound.share._asdict(),
                "lost": {part: value._asdict() for part, value in bound.lost.items()},
            }
            for bound in self.verifiers
        }
        return {
            "drawn": self.drawn, "steps": self.steps, "nodes": self.nodes, "depth": self.depth,
            "optimum": self.optimum._asdict(), "kind": self.kind, "best_points": self.deterministic._asdict(),
            "best": self.best, "spechub": self.spechub._asdict(), "spechub_kind": self.spechub_kind,
            "verifiers": by_name,
        }  # fmt: skip


def of_run(folder: Path, arms: Sequence[str] = ()) -> dict[str, ArmBounds]:
    """Return the bounds of every recorded arm of a run or a verifier study.

    Args:
        arms: of the run; all if empty.

    Raises:
        ValueError: no recorded run there, or an unknown arm.
        OSError: a file that cannot be read.
    """
    recorded = read(folder, tuple(arms))
    shown = Progress(recorded.items(), desc="bounds", unit="arm", disable=len(recorded) < 2)
    return {name: bounds_of(trees) for name, trees in shown}


def for_summary(folder: Path) -> dict[str, ArmBounds]:
    """``of_run`` at the end of a run, which neither fails nor takes long for it: many rows are left to the command."""
    arms = read_table(folder / "replay.parquet", ["arm"]).to_pandas()["arm"]
    needs = f"{len(arms)} rows were recorded: spec-lab bounds DIR computes the bounds"
    if len(arms) <= MAX_ROWS:
        try:
            return of_run(folder)
        except ValueError as error:
            needs = str(error)
    return {name: ArmBounds(name, needs=needs) for name in arms.unique()}


def bounds_of(trees: RecordedTrees) -> ArmBounds:
    """Return the bounds of an arm; of one whose trees have none, the reason."""
    try:
        return _bounds(trees)
    except NeedsModel as why:
        return ArmBounds(trees.arm, " and ".join(sorted(trees.ways)), needs=str(why))


def check(trees: RecordedTrees) -> None:
    """Refuse trees of which no bound is known.

    Raises:
        NeedsModel: nothing was drafted, mixed ways of drawing, or shapes that follow from the tokens that were drawn.
    """
    if not trees.decode.any() or not trees.shape.nodes:
        raise NeedsModel("no step after the prefill has drafted anything")
    ways = sorted(trees.ways)
    if len(ways) > 1:
        raise NeedsModel(f"no bound is known for trees drawn {' and '.join(ways)}")
    if ways == ["gumbel"]:
        raise NeedsModel("the noise of drafts drawn gumbel is not recorded, so that what was accepted is not known")
    if ways == ["deterministic"] or not trees.shape.branches:
        return
    tree = trees.proposer.get("tree")
    if trees.stops_by_q or not isinstance(tree, str) or not tree:
        raise NeedsModel("the shape of the sampled trees follows from their tokens; bounds are known for static trees")


def acceptance(verifier: Verifier, p: np.ndarray, q: np.ndarray, count: np.ndarray) -> np.ndarray | None:
    """Return P(one of a row's iid children is accepted) ``[n]``, over their drawing; None without a closed form.

    Args:
        verifier: the verifier, of one level.
        p, q: ``[n, V]`` float64, distributions.
        count: ``[n]`` children.
    """
    max_children = int(count.max(initial=0))
    if isinstance(verifier, Match):
        return np.asarray((p * -np.expm1(count[:, None] * np.log1p(-np.minimum(q, 1 - 1e-16)))).sum(1))
    if not isinstance(verifier, Token | Traversal):
        return None
    # the theta of each rejection: P = (p - theta q)+ / S (``steps_along_texts``)
    theta, total, left = np.zeros(len(p)), np.ones(len(p)), np.ones(len(p))
    for rank in range(max_children):
        rest = np.maximum(p - theta[:, None] * q, 0.0)
        total = rest.sum(1)
        shares = np.divide(rest, total[:, None], out=np.zeros_like(rest), where=total[:, None] > 0)
        here = np.where(total > 0, np.minimum(q, shares).sum(1), 1.0)
        left = np.where(rank < count, left * (1.0 - here), left)
        theta = theta + total
    return 1.0 - left


def best_deterministic(trees: RecordedTrees, p: np.ndarray) -> np.ndarray:  # [B]
    """Return a bound of the accepted tokens of any deterministic tree with each tree's nodes and at most its depth.

    No verifier accepts more of deterministic tokens than the probability of their texts, so the nodes are the likeliest
    texts. Below a token that was not drafted nothing is recorded: what follows it is taken as certain.

    Args:
        p: ``[R, W + PSEUDO]``.
    """
    shape = trees.shape
    ordered = np.argsort(-p, axis=1, kind="stable")[:, : max(int(shape.sizes.max()) - 1, 1)]
    sorted_p = np.take_along_axis(p, ordered, 1)
    child = [dict[int, int]() for _ in range(shape.rows)]
    for node, (above, token) in enumerate(zip(shape.parent.tolist(), trees.local.tolist(), strict=True)):
        child[above].setdefault(token, shape.roots + node)
    accepted = np.zeros(shape.roots)
    for tree, rows in enumerate(shape.trees):
        nodes, depth = len(rows) - 1, int(shape.depth[rows].max())
        # (minus the probability, row of the parent or -1, rank in it, depth, probability of the parent)
        open_: list[tuple[float, int, int, int, float]] = [(-float(sorted_p[tree, 0]), tree, 0, 1, 1.0)]
        for _ in range(nodes):
            if not open_ or depth == 0:
                break
            minus, row, rank, level, above_p = heapq.heappop(open_)
            accepted[tree] -= minus
            below = -1 if row < 0 else child[row].get(int(ordered[row, rank]), -1)
            if level < depth:
                child_p = float(sorted_p[below, 0]) if below >= 0 else 1.0
                heapq.heappush(open_, (minus * child_p, below, 0, level + 1, -minus))
            if row >= 0 and rank + 1 < ordered.shape[1]:
                heapq.heappush(open_, (-above_p * float(sorted_p[row, rank + 1]), row, rank + 1, level, above_p))
    return accepted


def tree_gain(trees: RecordedTrees, draft: Draft, p: torch.Tensor, weight: np.ndarray) -> np.ndarray:  # [B]
    """Return how many more tokens each tree would be expected to accept with the best shape for its size.

    The best shape has as many nodes as the tree and is not deeper. It is chosen by the accuracy of the draft's token of
    each rank at each depth, averaged over steps.

    Args:
        trees: the recorded trees; acceptance is averaged over steps after the prefill.
        draft: the recorded trees as one draft.
        p: ``[R, V]`` the target's probabilities.
        weight: ``[R]``, as in ``optimum.levels``.

    Returns:
        ``[B]`` accepted tokens of a step, at least 0.
    """
    shape = trees.shape
    rows = np.where(trees.decode[shape.root], weight, 0.0)
    accuracy = optimum.by_rank(draft, p, rows, int(shape.sizes.max()) - 1)
    expected = optimum.modelled(shape, accuracy)
    value = value_by_rank([chances.tolist() for chances in accuracy])
    depth = np.zeros(shape.roots, dtype=np.int64)
    np.maximum.at(depth, shape.root, shape.depth)
    known: dict[tuple[int, int], float] = {}
    for pair in set(zip((shape.sizes - 1).tolist(), depth.tolist(), strict=True)):
        nodes, deepest = pair
        known[pair] = sum(chance for _, chance in grow(value, nodes, deepest, accuracy.shape[1]))
    best = np.array([known[pair] for pair in zip((shape.sizes - 1).tolist(), depth.tolist(), strict=True)])
    return np.maximum(best - expected, 0.0)


def _bounds(trees: RecordedTrees) -> ArmBounds:
    """See ``bounds_of``.

    Raises:
        NeedsModel: no bound is known.
    """
    check(trees)
    shape, decode = trees.shape, trees.decode
    reduced = pseudo_tokens.target(trees), pseudo_tokens.drafted(trees)
    p, q = pseudo_tokens.complete(*reduced, Variant("shared"))
    draft, target = recorded_steps.as_draft(trees, q), torch.from_numpy(p)
    way = optimum.way_of(draft)
    level_bounds = optimum.levels(draft, target, lumps=PSEUDO)
    clusters, cluster = np.unique(trees.steps["request"].to_numpy()[decode], return_inverse=True)

    def per_request(values: np.ndarray) -> np.ndarray:  # [B] -> [N]
        return np.bincount(cluster, values[decode], minlength=len(clusters))

    depth = np.zeros(shape.roots)
    np.maximum.at(depth, shape.root, shape.depth)
    gain = per_request(tree_gain(trees, draft, target, level_bounds.weight))
    deterministic = per_request(best_deterministic(trees, p))
    count, deep = per_request(np.ones(shape.roots)), per_request(depth)
    at_least = np.stack([per_request(column) for column in level_bounds.at_least.T], 1)  # [N, D]
    if not deep.sum():
        raise NeedsModel("no step after the prefill has drafted anything")

    used = trees.verifier.written if trees.verifier else ""
    measured = _measured(trees, used)
    lossless = [name for name, result in measured.items() if result.verifier.lossless]
    best = max(lossless, key=lambda name: float(measured[name].accepted.sum()))
    block = next((result for result in measured.values() if isinstance(result.verifier, Traversal)), None)
    chains = way != "deterministic" and not shape.branches and block is not None
    attained = way == "deterministic" or chains or shape.deepest == 1
    all_recorded = len(pseudo_tokens.variants(trees, *reduced)) == 1
    kind = "exact" if attained and all_recorded else "bound"
    if not reduced[0].exact or not reduced[1].exact:
        kind = "estimate"

    names = list(measured)
    spechub = _spechub(trees, p, q)
    columns = [count, deep, gain, deterministic, per_request(0.0 * depth if spechub is None else spechub), *at_least.T]
    columns += [block.max_accepted if chains and block else np.zeros(len(clusters))]
    for result in measured.values():
        columns += [result.accepted, result.first]
    sums = np.stack(columns, 1)
    statistics = partial(_statistics, levels=at_least.shape[1], best=names.index(best), chains=chains, way=way)
    values = statistics(sums.sum(0, keepdims=True))[0]
    ends = np.full((2, len(values)), np.nan)
    if len(clusters) >= MIN_CLUSTERS:
        ends = quantiles(statistics(resampled_sums(sums, RESAMPLES)), 0.95)
    intervals = [Interval(*map(float, numbers)) for numbers in zip(values, *ends, strict=True)]
    rows = []
    for index, (name, result) in enumerate(measured.items()):
        figures = intervals[3 + 7 * index : 10 + 7 * index]
        tau, share_first, share, *parts = figures
        unknown, lost = result.unknown / float(count.sum()), dict(zip(PARTS, parts, strict=True))
        keeps = result.verifier.lossless
        rows.append(VerifierBounds(name, keeps, name == used, tau, unknown, share_first, share, lost))
    rows.sort(key=lambda bound: (not bound.lossless, -bound.tau.mean))
    total = float(count.sum())
    return ArmBounds(
        trees.arm, " and ".join(sorted(trees.ways)), int(total), float(per_request(shape.sizes - 1.0).sum() / total),
        float(deep.sum() / total), intervals[0], kind, intervals[1], best, tuple(rows),
        spechub=Interval(*[float("nan")] * 3) if spechub is None else intervals[2],
        spechub_kind="" if spechub is None else "exact" if all_recorded else "estimate",
    )  # fmt: skip


def _statistics(totals: np.ndarray, levels: int, best: int, chains: bool, way: Drawn) -> np.ndarray:
    """Return the figures of sums over requests: ``[n, columns]`` to ``[n, S]``, columns as in ``_bounds``.

    Args:
        totals: the sums; the first column counts steps.
        levels: columns with the bounds of levels.
        best: the index of the best lossless verifier.
        chains: whether block verification, whose column follows the levels, attains the optimum.
        way: how drafts were drawn.
    """
    means = totals[:, 1:] / np.maximum(totals[:, :1], 1e-300)
    deep, gain, deterministic, hub = means[:, :4].T
    rows = means[:, 4 : 4 + levels]
    rest = means[:, 4 + levels :]
    attainable = rest[:, 0] if chains else rows.sum(1) if way == "deterministic" else optimum.summed(rows)
    accepted, first = rest[:, 1::2], rest[:, 2::2]
    top = accepted[:, best]
    tree = np.clip(gain, 0.0, np.maximum(deep - np.maximum(attainable, top), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = [1 + attainable, 1 + deterministic, hub / rows[:, 0]]
        for its_accepted, its_first in zip(accepted.T, first.T, strict=True):
            figures += [1 + its_accepted, its_first / rows[:, 0], its_accepted / attainable]
            figures += [top - its_accepted, attainable - top, tree, deep - attainable - tree]
    return np.stack(figures, 1)


def _spechub(trees: RecordedTrees, p: np.ndarray, q: np.ndarray) -> np.ndarray | None:  # [B]
    """Return P(SpecHub accepts one of its two drafts) below each root that has two sampled children, else 0.

    None if a root has another number of children, or they are not sampled.

    Args:
        p, q: ``[R, W + PSEUDO]``.
    """
    roots = slice(trees.shape.roots)
    count = trees.shape.count[roots]
    if "deterministic" in trees.ways or not np.isin(count[trees.decode], (0, 2)).all():
        return None
    accepted = spechub_acceptance(torch.from_numpy(p[roots]), torch.from_numpy(q[roots]), PSEUDO)
    return np.where(count == 2, accepted, 0.0)


@dataclass(frozen=True, eq=False)
class _Measured:
    """Acceptance by a verifier in each request: ``[N]`` sums over steps.

    Args:
        max_accepted: the same with the completion of the rows that has the most.
        first: P(a child is accepted), the first level alone.
        unknown: half the difference that the completions make, over all requests.
    """

    verifier: Verifier
    accepted: np.ndarray
    max_accepted: np.ndarray
    first: np.ndarray
    unknown: float


def _measured(trees: RecordedTrees, used: str) -> dict[str, _Measured]:
    """Return the acceptance by each verifier that fits, by name.

    Raises:
        NeedsModel: none does, or no lossless one.
    """
    measured: dict[str, _Measured] = {}
    wanted = {name: name for name in VERIFIERS} | ({used.partition(":")[0]: used} if used else {})
    why: NeedsModel | None = None
    for name in wanted.values():
        verifier = verifier_of(name)
        sums = []
        for outcome in recorded_steps.evaluate(trees, verifier, [WHOLE_TREES, FIRST_LEVEL]):
            if isinstance(outcome, NeedsModel):
                why = outcome
                break
            sums.append(outcome)
        if len(sums) < 2:
            continue
        whole, first = ((outcome.tokens - outcome.steps) for outcome in sums)  # [variants, N]
        at_first = _closed(trees, verifier)
        totals = whole.sum(1)
        measured[name] = _Measured(
            verifier,
            whole.mean(0),
            whole[int(totals.argmax())],
            first.mean(0) if at_first is None else at_first,
            float(totals.max() - totals.min()) / 2,
        )
    if not any(result.verifier.lossless for result in measured.values()):
        raise why or NeedsModel("no lossless verifier supports these trees")
    return measured


def _closed(trees: RecordedTrees, verifier: Verifier) -> np.ndarray | None:  # [N]
    """P(a child of the root is accepted), over the drawing of the children, where it has a closed form."""
    if not (trees.ways <= {"iid"} or (trees.ways <= {"without_replacement"} and int(trees.shape.count.max()) == 1)):
        return None
    if isinstance(verifier, KSeq) or not isinstance(verifier, Token | Traversal | Match):
        return None
    reduced = pseudo_tokens.target(trees), pseudo_tokens.drafted(trees)
    roots, decode = np.arange(trees.shape.roots), trees.decode
    count = trees.shape.count[roots]
    values = []
    for variant in pseudo_tokens.variants(trees, *reduced):
        p, q = (mass[roots] for mass in pseudo_tokens.complete(*reduced, variant))
        value = acceptance(verifier, p, q, count)
        assert value is not None
        values.append(value)
    request = np.unique(trees.steps["request"].to_numpy()[decode], return_inverse=True)[1]
    return np.bincount(request, np.mean(values, 0)[decode])


def table(bounds: Mapping[str, ArmBounds]) -> pd.DataFrame:
    """Return one row for each arm and verifier; of an arm without bounds one that says why."""
    rows: list[dict[str, Any]] = []
    for name, arm in bounds.items():
        if arm.needs:
            rows.append({"arm": name, "drawn": arm.drawn, "needs": arm.needs})
            continue
        shared = {
            "arm": name, "drawn": arm.drawn, "steps": arm.steps, "nodes": arm.nodes, "depth": arm.depth,
            **_columns("optimum", arm.optimum), "optimum_kind": arm.kind, **_columns("best_points", arm.deterministic),
            **_columns("share_spechub", arm.spechub), "spechub_kind": arm.spechub_kind,
        }  # fmt: skip
        for bound in arm.verifiers:
            columns = {"verifier": bound.name, "lossless": bound.lossless, "used": bound.used}
            columns |= {**_columns("tau", bound.tau), "not_recorded": bound.unknown}
            columns |= _columns("share_first", bound.share_first)
            columns |= _columns("share", bound.share)
            for part, value in bound.lost.items():
                columns |= _columns(f"lost_{part}", value)
            rows.append(shared | columns | {"needs": ""})
    return pd.DataFrame(rows)


def _columns(name: str, value: Interval) -> dict[str, float]:
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
