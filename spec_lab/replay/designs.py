"""Many designs on one recording: expected tokens of a step (tau) of each, with intervals.

Two methods, named in the column ``method``:

- ``steps``: the exact expectation at the steps of the recorded run (``recorded_steps``), for all verifiers and
  subtrees;
- ``along``: the design's own steps along the recorded texts (``steps_along_texts``), for lossless verifiers of a draft
  model's samples, and of deterministic trees that were recorded at every position.

Each tau has two intervals. ``low`` to ``high`` is the 95 % bootstrap interval over requests, NaN for fewer
than ``MIN_CLUSTERS``. ``bound_low`` to
``bound_high`` is what the tokens that were not recorded leave open (``pseudo_tokens``); ``low`` and ``high`` include
it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, Resampler, quantiles
from spec_lab.core.options import brief
from spec_lab.core.probabilities import Sampling
from spec_lab.replay import recorded_steps, steps_along_texts
from spec_lab.replay.recorded_steps import Sums
from spec_lab.replay.recorded_trees import VERIFIERS, NeedsModel, RecordedTrees
from spec_lab.replay.steps_along_texts import Rule, TextRows, static
from spec_lab.replay.subtrees import Subtree
from spec_lab.verify import Verifier

RESAMPLES = 1999


def verifier_of(text: str) -> Verifier:
    """Read a verifier, as "token", "typical:epsilon=0.2,delta=0.4" or "my_package.Mine:epsilon=0.2".

    Raises:
        ValueError: an unknown name or option, or a wrong value.
    """
    name, _, given = text.partition(":")
    make: Callable[..., Verifier] = VERIFIERS.get(name) or _class(name)
    options: dict[str, Any] = {"lenience": 0.8} if name == "lenient" else {}
    for option in filter(None, given.split(",")):
        key, _, value = option.partition("=")
        if re.fullmatch(r"[+-]?\d+", value):
            options[key] = int(value)
        else:
            try:
                options[key] = float(value)
            except ValueError:
                options[key] = value
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ValueError(f"verifier {brief(text)}: {error}; the options of {name} are {known}") from None
    return make(**options)


def _class(path: str) -> type[Verifier]:
    """Return the class of a verifier of one's own, by its import path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(
            f"replay has no verifier {brief(path)}; it has {', '.join(VERIFIERS)}, and classes by their import path"
        )
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the verifier {brief(path)} cannot be imported ({error}): install its package, or add its folder to "
            "PYTHONPATH"
        ) from error
    if not isinstance(made, type) or not issubclass(made, Verifier):
        raise ValueError(
            f"{path} is no class of a verifier but {brief(made)}: name a class derived from spec_lab.verify.Verifier"
        )
    return made


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
        for part in text.split("+"):
            share, _, shape = part.partition("*")
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
    """A configuration that would be run.

    Args:
        verifier: the verifier, as it is written.
        draft_temperature, draft_top_k: of the drafter; None and 0 for the recorded.
        confidence: see ``steps_along_texts.Rule``; None for the recorded one.
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
        method: "steps" or "along".
        tau, low, high: expected tokens of a step, and its 95 % interval.
        bound_low, bound_high: what the tokens that were not recorded leave open.
        bound_kind: one of ``recorded_steps.KINDS``.
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
        design = self.design
        return {
            "method": self.method, "verifier": design.verifier, "lossless": verifier_of(design.verifier).lossless,
            "shape": str(design.shapes), "drawn": design.drawn or "", "draft_temperature": design.draft_temperature,
            "draft_top_k": design.draft_top_k, "confidence": design.confidence,
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
        temperatures, top_ks, confidences, drawn: as in ``Design``; what was recorded if empty.
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
            recorded_steps.check(trees, verifier_of(name))
            named.append(name)
        except NeedsModel:
            continue
    for text in named:
        verifier_of(text)
    every = [Shares(((1.0, subtree),)) for subtree in limits(trees)]
    shapes = [Shares.parse(text) for text in options.shapes] or every
    return [
        Design(verifier, shape, temperature, top_k, confidence, way)
        for verifier in named
        for shape in shapes
        for temperature in options.temperatures or (None,)
        for top_k in options.top_ks or (0,)
        for confidence in options.confidences or (None,)
        for way in options.drawn or (None,)
    ]


def limits(trees: RecordedTrees) -> list[Subtree]:
    """Return every limit of depth, of children and of nodes that cuts the recorded trees, the whole trees first."""
    shape = trees.shape
    wide, max_nodes = int(shape.count.max(initial=0)), int(shape.sizes.max(initial=1)) - 1
    subtrees = [Subtree()]
    for depth in range(1, shape.deepest + 1):
        for children in range(1, wide + 1):
            if depth < shape.deepest or children < wide:
                subtrees.append(Subtree(depth=depth, children=children))
    if wide > 1:
        subtrees += [Subtree(nodes=nodes) for nodes in range(1, max_nodes)]
    return subtrees


def evaluate(trees: RecordedTrees, wanted: Sequence[Design], sampling: Sampling | None = None) -> Iterator[Estimate]:
    """Yield every design's estimates: one by each method that identifies it, or one that says what is missing.

    Args:
        trees: the recorded trees of one arm.
        sampling: of the target, for ``steps``; None for the recorded one.
    """
    try:
        texts: TextRows | NeedsModel = TextRows.of(trees)
    except NeedsModel as why:
        texts = why
    resampled = Resampler(RESAMPLES)
    groups: dict[tuple[Any, ...], list[Design]] = {}
    for design in wanted:
        drafter = design.draft_temperature, design.draft_top_k, design.confidence, design.drawn
        groups.setdefault((design.verifier, *drafter), []).append(design)
    for (name, temperature, top_k, confidence, drawn), group in groups.items():
        verifier = verifier_of(name)
        every = list(dict.fromkeys(shape for design in group for _, shape in design.shapes.parts))
        at_steps: dict[Subtree, Sums | NeedsModel] = {}
        changed = _changed(trees, confidence, drawn)
        if not changed:
            sums = recorded_steps.evaluate(trees, verifier, every, sampling, temperature, top_k)
            at_steps = dict(zip(every, sums, strict=True))
        for design in group:
            needs, given = [changed] if changed else [], []
            try:
                if not changed:
                    total = mixed([(share, at_steps[shape]) for share, shape in design.shapes.parts])
                    yield estimate(design, "steps", total, resampled)
                    given.append("steps")
            except NeedsModel as why:
                needs.append(str(why))
            try:
                if sampling not in (None, trees.sampling):
                    raise NeedsModel("another sampling of the target emits other texts than the recorded ones")
                if isinstance(texts, NeedsModel):
                    raise texts
                yield estimate(design, "along", _along(texts, verifier, design), resampled)
                given.append("along")
            except NeedsModel as why:
                needs.append(str(why))
            if not given:
                yield Estimate(design, "", needs="; ".join(dict.fromkeys(needs)))


def _changed(trees: RecordedTrees, confidence: float | None, drawn: str | None) -> str:
    """Why the recorded trees are not those of the design; empty where they are."""
    if confidence not in (None, trees.proposer.get("confidence", 0.0)):
        return "needs the model: trees stopped by another confidence are estimated along the texts only"
    if confidence is not None and trees.policy:
        return "needs the model: a policy decided how far was drafted; a confidence is estimated along the texts only"
    if drawn is not None and not trees.ways <= {drawn}:
        return f"needs the model: trees drawn '{drawn}' were not recorded"
    return ""


def _along(texts: TextRows, verifier: Verifier, design: Design) -> Sums:
    """The sums of a design's steps along the texts."""
    trees = texts.trees
    if not trees.expanded.any():
        if design.draft_temperature is not None or design.draft_top_k or design.confidence is not None:
            raise NeedsModel("the recorded drafts are deterministic and carry no q; record drawn=iid")
        if len(design.shapes.parts) > 1:
            raise NeedsModel("a mixture of deterministic trees along the texts")
        return steps_along_texts.evaluate_deterministic(texts, verifier, design.shapes.parts[0][1])
    ways = sorted(trees.ways)
    drawn = design.drawn or (ways[0] if len(ways) == 1 else " and ".join(ways))
    confidence = trees.proposer.get("confidence", 0.0) if design.confidence is None else design.confidence
    temperature = None if drawn == "deterministic" else design.draft_temperature
    rules = [
        (share, Rule(static(trees, shape), drawn, temperature, design.draft_top_k, float(confidence)))
        for share, shape in design.shapes.parts
    ]
    if any(rule.confidence for _, rule in rules) and trees.draft_temperature == 0:
        raise NeedsModel("drafts at temperature 0 do not show the draft probabilities that a confidence compares")
    return steps_along_texts.evaluate(texts, verifier, rules)


def mixed(parts: Sequence[tuple[float, Sums | NeedsModel]]) -> Sums:
    """Return the sums of a policy that takes each of several rules with a probability, its share.

    Raises:
        NeedsModel: one of them is not identified.
    """
    known = []
    for share, sums in parts:
        if isinstance(sums, NeedsModel):
            raise sums
        known.append((share, sums))
    if len(known) == 1:
        return known[0][1]
    first = known[0][1]
    totals = [sums.steps.sum(1, keepdims=True) for _, sums in known]  # each rule's steps are all recorded steps
    scaled = [(share, sums, 1.0 / total) for (share, sums), total in zip(known, totals, strict=True)]
    tokens = sum(share * sums.tokens * scale for share, sums, scale in scaled)
    counted = sum(share * sums.steps * scale for share, sums, scale in scaled)
    kinds = max((sums.kind for _, sums in known), key=recorded_steps.KINDS.index)
    return Sums(first.clusters, np.asarray(tokens), np.asarray(counted), min(sums.ess for _, sums in known), kinds)


def estimate(
    design: Design, method: str, sums: Sums, resampled: Resampler | None = None, level: float = 0.95
) -> Estimate:
    """Return a design's tau with its intervals.

    Args:
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
