"""Many designs on one recording: expected tokens of a step (tau) of each, with intervals.

Two methods, named in the column ``method``:

- ``steps``: the exact expectation at the steps of the recorded run (``steps``), for all verifiers and subtrees;
- ``along``: the design's own steps along the recorded texts (``along``), for lossless verifiers of a draft model's
  samples, and of points that were recorded at every position.

Each tau has two intervals. ``low`` to ``high`` is the 95 % bootstrap interval over requests, NaN for fewer
than ``MIN_CLUSTERS``. ``bound_low`` to
``bound_high`` is what the tokens that were not recorded leave open (``pseudo_tokens``); ``low`` and ``high`` include
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, Resampler, quantiles
from spec_lab.core.options import brief
from spec_lab.core.probabilities import Sampling
from spec_lab.replay import along, steps
from spec_lab.replay.along import Along, Rule
from spec_lab.replay.shapes import Subtree
from spec_lab.replay.steps import Sums
from spec_lab.replay.trees import VERIFIERS, NeedsModel, RecordedTrees
from spec_lab.verify import Verifier

RESAMPLES = 1999


def verifier_of(text: str) -> Verifier:
    """Read a verifier, as "token" or "typical:epsilon=0.2,delta=0.4".

    Raises:
        ValueError: an unknown name or option, or a wrong value.
    """
    name, _, given = text.partition(":")
    if name not in VERIFIERS:
        raise ValueError(f"replay has no verifier {brief(name)}; it has {', '.join(VERIFIERS)}")
    options: dict[str, Any] = {"lenience": 0.8} if name == "lenient" else {}
    for one in filter(None, given.split(",")):
        key, _, value = one.partition("=")
        if re.fullmatch(r"[+-]?\d+", value):
            options[key] = int(value)
        else:
            try:
                options[key] = float(value)
            except ValueError:
                options[key] = value
    try:
        return VERIFIERS[name](**options)
    except TypeError:
        raise ValueError(f"verifier '{name}' has no option {', '.join(map(brief, options)) or given}") from None


@dataclass(frozen=True)
class Shares:
    """A policy that draws the tree of each step at random: subtrees with their shares."""

    parts: tuple[tuple[float, Subtree], ...]

    @staticmethod
    def parse(text: str) -> Shares:
        """Read a shape (``Subtree.parse``), or several with shares: "0.3*1x1+0.7*3x2x1".

        Raises:
            ValueError: none of these, or shares that do not sum to 1.
        """
        if "*" not in text:
            return Shares(((1.0, Subtree.parse(text)),))
        parts = []
        for one in text.split("+"):
            share, _, shape = one.partition("*")
            try:
                parts.append((float(share), Subtree.parse(shape.strip())))
            except ValueError as error:
                how = f"a mixture of shapes is written as 0.3*1x1+0.7*3x2x1 (got {brief(text)})"
                raise ValueError(f"{how}: {error}") from None
        if abs(sum(share for share, _ in parts) - 1) > 1e-9 or min(share for share, _ in parts) < 0:
            raise ValueError(f"the shares of a mixture sum to 1, unlike those of {brief(text)}")
        return Shares(tuple(parts))

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.parts[0][1])
        return "+".join(f"{share:g}*{shape}" for share, shape in self.parts)


@dataclass(frozen=True)
class Design:
    """What would be run.

    Args:
        verifier: the verifier, as it is written.
        shapes: the draft trees.
        draft_temperature, draft_top_k: of the drafter; None and 0 for the recorded.
        confidence: see ``along.Rule``; None for the recorded one.
        drawn: how a draft model's trees are drawn, along the texts; None for as recorded.
    """

    verifier: str
    shapes: Shares
    draft_temperature: float | None = None
    draft_top_k: int = 0
    confidence: float | None = None
    drawn: str | None = None


@dataclass(frozen=True)
class Estimate:
    """A design's tau by one method.

    Args:
        design: the design.
        method: "steps" or "along".
        tau, low, high: expected tokens of a step, and its 95 % interval.
        bound_low, bound_high: what the tokens that were not recorded leave open.
        bound_kind: one of ``steps.KINDS``.
        ess: the effective number of steps.
        needs: why the recorded rows do not identify it; empty where they do.
    """

    design: Design
    method: str
    tau: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    bound_low: float = float("nan")
    bound_high: float = float("nan")
    bound_kind: str = ""
    ess: float = float("nan")
    needs: str = ""

    def row(self) -> dict[str, Any]:
        """Columns of the table."""
        own = self.design
        return {
            "method": self.method, "verifier": own.verifier, "lossless": verifier_of(own.verifier).lossless,
            "shape": str(own.shapes), "drawn": own.drawn or "",
            "draft_temperature": own.draft_temperature, "draft_top_k": own.draft_top_k, "confidence": own.confidence,
            "tau": self.tau, "low": self.low, "high": self.high, "bound_low": self.bound_low,
            "bound_high": self.bound_high, "bound_kind": self.bound_kind, "effective_steps": self.ess,
            "needs": self.needs,
        }  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The values that are combined to designs.

    Args:
        verifiers: as ``verifier_of`` reads them; all that fit if empty.
        shapes: as ``Shares.parse`` reads them; all ``limits`` if empty.
        temperatures, top_ks, confidences, drawn: as of ``Design``; what was recorded if empty.
    """

    verifiers: Sequence[str] = ()
    shapes: Sequence[str] = ()
    temperatures: Sequence[float] = ()
    top_ks: Sequence[int] = ()
    confidences: Sequence[float] = ()
    drawn: Sequence[str] = ()


def designs(trees: RecordedTrees, options: Options) -> list[Design]:
    """Return all combinations of the options.

    Raises:
        ValueError: an unknown verifier or shape.
    """
    named = list(options.verifiers)
    for name in () if named else VERIFIERS:
        try:
            steps.check(trees, verifier_of(name))
            named.append(name)
        except NeedsModel:
            continue
    for one in named:
        verifier_of(one)
    written = [Shares.parse(one) for one in options.shapes] or [Shares(((1.0, one),)) for one in limits(trees)]
    return [
        Design(verifier, shape, temperature, top_k, confidence, way)
        for verifier in named
        for shape in written
        for temperature in options.temperatures or (None,)
        for top_k in options.top_ks or (0,)
        for confidence in options.confidences or (None,)
        for way in options.drawn or (None,)
    ]


def limits(trees: RecordedTrees) -> list[Subtree]:
    """Return every limit of depth, of children and of nodes that cuts the recorded trees, the whole trees first."""
    shape = trees.shape
    wide, most = int(shape.count.max(initial=0)), int(shape.sizes.max(initial=1)) - 1
    found = [Subtree()]
    for depth in range(1, shape.deepest + 1):
        for children in range(1, wide + 1):
            if depth < shape.deepest or children < wide:
                found.append(Subtree(depth=depth, children=children))
    if wide > 1:
        found += [Subtree(nodes=nodes) for nodes in range(1, most)]
    return found


def evaluate(trees: RecordedTrees, wanted: Sequence[Design], sampling: Sampling | None = None) -> Iterator[Estimate]:
    """Yield every design's estimates: one by each method that identifies it, or one that says what is missing.

    Args:
        trees: the recorded trees of one arm.
        wanted: the designs.
        sampling: of the target, for ``steps``; None for the recorded one.
    """
    try:
        texts: Along | NeedsModel = Along.of(trees)
    except NeedsModel as why:
        texts = why
    resampled = Resampler(RESAMPLES)
    groups: dict[tuple[Any, ...], list[Design]] = {}
    for one in wanted:
        groups.setdefault((one.verifier, one.draft_temperature, one.draft_top_k, one.confidence, one.drawn), []).append(
            one
        )
    for (name, temperature, top_k, confidence, drawn), each in groups.items():
        verifier = verifier_of(name)
        every = list(dict.fromkeys(shape for one in each for _, shape in one.shapes.parts))
        at_steps: dict[Subtree, Sums | NeedsModel] = {}
        changed = _changed(trees, confidence, drawn)
        if not changed:
            found = steps.evaluate(trees, verifier, every, sampling, temperature, top_k)
            at_steps = dict(zip(every, found, strict=True))
        for one in each:
            needs, given = [changed] if changed else [], []
            try:
                if not changed:
                    own = mixed([(share, at_steps[shape]) for share, shape in one.shapes.parts])
                    yield estimate(one, "steps", own, resampled)
                    given.append("steps")
            except NeedsModel as why:
                needs.append(str(why))
            try:
                if sampling not in (None, trees.sampling):
                    raise NeedsModel("another sampling of the target emits other texts than the recorded ones")
                if isinstance(texts, NeedsModel):
                    raise texts
                yield estimate(one, "along", _along(texts, verifier, one), resampled)
                given.append("along")
            except NeedsModel as why:
                needs.append(str(why))
            if not given:
                yield Estimate(one, "", needs="; ".join(dict.fromkeys(needs)))


def _changed(trees: RecordedTrees, confidence: float | None, drawn: str | None) -> str:
    """Why the recorded trees are not those of the design; empty where they are."""
    if confidence not in (None, trees.proposer.get("confidence", 0.0)):
        return "needs the model: trees stopped by another confidence are estimated along the texts only"
    if confidence is not None and trees.policy:
        return "needs the model: a policy decided how far was drafted; a confidence is estimated along the texts only"
    if drawn is not None and not trees.ways <= {drawn}:
        return f"needs the model: trees drawn '{drawn}' were not recorded"
    return ""


def _along(texts: Along, verifier: Verifier, one: Design) -> Sums:
    """What a design's steps along the texts add to tau."""
    trees = texts.trees
    if not trees.expanded.any():
        if one.draft_temperature is not None or one.draft_top_k or one.confidence is not None:
            raise NeedsModel("the recorded drafts are points, which carry no q; record drawn=iid")
        if len(one.shapes.parts) > 1:
            raise NeedsModel("a mixture of point trees along the texts")
        return along.of_points(texts, verifier, one.shapes.parts[0][1])
    ways = sorted(trees.ways)
    drawn = one.drawn or (ways[0] if len(ways) == 1 else " and ".join(ways))
    confidence = trees.proposer.get("confidence", 0.0) if one.confidence is None else one.confidence
    rules = [
        (share, Rule(along.static(trees, shape), drawn, one.draft_temperature, one.draft_top_k, float(confidence)))
        for share, shape in one.shapes.parts
    ]
    if drawn == "point" and one.draft_temperature is not None:
        rules = [(share, replace(rule, temperature=None)) for share, rule in rules]
    if any(rule.confidence for _, rule in rules) and trees.draft_temperature == 0:
        raise NeedsModel("drafts at temperature 0 do not show the draft probabilities that a confidence compares")
    return along.evaluate(texts, verifier, rules)


def mixed(parts: Sequence[tuple[float, Sums | NeedsModel]]) -> Sums:
    """Return the sums of a policy that takes each of several rules with a probability, its share.

    Raises:
        NeedsModel: one of them is not identified.
    """
    each = []
    for share, one in parts:
        if isinstance(one, NeedsModel):
            raise one
        each.append((share, one))
    if len(each) == 1:
        return each[0][1]
    first = each[0][1]
    totals = [one.steps.sum(1, keepdims=True) for _, one in each]  # each rule's steps are all recorded steps
    scaled = [(share, one, 1.0 / total) for (share, one), total in zip(each, totals, strict=True)]
    tokens = sum(share * one.tokens * scale for share, one, scale in scaled)
    counted = sum(share * one.steps * scale for share, one, scale in scaled)
    kinds = max((one.kind for _, one in each), key=steps.KINDS.index)
    return Sums(first.clusters, np.asarray(tokens), np.asarray(counted), min(one.ess for _, one in each), kinds)


def estimate(
    design: Design, method: str, sums: Sums, resampled: Resampler | None = None, level: float = 0.95
) -> Estimate:
    """Return a design's tau with its intervals.

    Args:
        design: the design.
        method: how its sums were computed.
        sums: what each request adds.
        resampled: draws the requests; one for all designs spares drawing them again. None: one of its own.
        level: of the interval.
    """
    totals = np.array([sums.tokens.sum(1), sums.steps.sum(1)])  # [2, variants]
    if not (totals[1] > 0).all():
        raise NeedsModel("no recorded step has a weight")
    tau = totals[0] / totals[1]
    low, high = float(tau.min()), float(tau.max())
    ends = np.full((2, len(tau)), np.nan)
    if len(sums.clusters) >= MIN_CLUSTERS:
        totals_of = (resampled or Resampler(RESAMPLES))(np.concatenate([sums.tokens, sums.steps]).T)
        tops, bottoms = np.split(totals_of, 2, axis=1)
        ratios = np.divide(tops, bottoms, out=np.full_like(tops, np.nan), where=bottoms > 0)
        ends = quantiles(ratios, level)
    middle = (low + high) / 2
    return Estimate(design, method, middle, float(ends[0].min()), float(ends[1].max()), low, high, sums.kind, sums.ess)


def table(estimates: Sequence[Estimate]) -> pd.DataFrame:
    """Return the estimates as a table, in their order."""
    return pd.DataFrame([estimate.row() for estimate in estimates], columns=[*Estimate(DESIGN, "").row()])


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with lossless designs before lossy ones, each most expected tokens first; those that need the
    model last.
    """
    frame = frame.assign(known=frame["needs"] == "")
    frame = frame.sort_values(["known", "lossless", "tau"], ascending=False, kind="stable", ignore_index=True)
    return frame.drop(columns="known")


DESIGN = Design("token", Shares(((1.0, Subtree()),)))
