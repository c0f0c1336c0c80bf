"""The summary of a recommendation: its table, the verdict in one sentence, commands, and what would have to change."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spec_lab.analysis import metrics, projection
from spec_lab.analysis.projection.acceptance import of_steps
from spec_lab.core.files import own_folder, write_text
from spec_lab.results.writer import load
from spec_lab.tasks.recommend.confirm import Confirmed
from spec_lab.tasks.recommend.engines import flags
from spec_lab.tasks.recommend.judge import ADAPTIVE, JudgedMode, best_few
from spec_lab.tasks.recommend.modes import NONE, SpeculativeMode
from spec_lab.tasks.recommend.stages import Stages

MAX_LINES = 10
"""Lines of the table."""

CHOSEN = ("task", "proposer", "policy", "output_dir", "name", "hydra")
"""Options of the command line that the recommended command does not repeat."""

PROJECTION_ERROR = (
    "Known error: projections of published tables to named hardware were 5 to 55 % too high, median by table; with a "
    "run's own measured costs half were within 5 % and all within 25 % (experiments/projection)."
)


def summarise(
    stages: Stages, judged: Sequence[JudgedMode], few: Sequence[JudgedMode], confirmed: Confirmed,
    given: Sequence[str], projected: tuple[str, str, Sequence[int]] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the contents of ``summary.json``, without the verdict on the times; write the preset.

    Args:
        stages: the stages, done.
        judged: all modes that were judged.
        few: those that were measured.
        confirmed: the result of measuring.
        given: the options of the command line.
        projected: hardware, model and batch sizes of a projection; None for none.
    """
    settings, batch = stages.settings, stages.batch
    best = next((mode for mode in few if mode.mode.name == confirmed.fastest), None)
    steps = load(settings.output_dir).steps
    steps = steps[steps["group"] >= stages.first]
    of_mode = {mode.mode.name: metrics.decode_steps(steps, mode.mode.name) for mode in few}
    chosen = SpeculativeMode(NONE) if best is None else best.mode
    speedup = {"mean": 1.0, "low": 1.0, "high": 1.0} if best is None else confirmed.speedups[chosen.name]._asdict()
    kept = [text for text in given if text.lstrip("+~").split("=")[0].split(".")[0].partition("@")[0] not in CHOSEN]
    command = " ".join(["spec-lab", *(shlex.quote(text) for text in [*kept, *chosen.overrides])])
    preset = own_folder(settings.output_dir / "experiment") / "recommended.yaml"
    write_text(preset, chosen.preset(f"Recommended by spec-lab recommend for {stages.lab.target.name}."))
    modes = [*_measured(few, confirmed, of_mode, batch), *_others(judged, few, batch)][:MAX_LINES]
    depth = 0 if best is None or not len(of_mode[chosen.name]) else int(of_mode[chosen.name]["depth"].max())
    return {
        "experiment": settings.name, "target": stages.lab.target.name, "temperature": stages.lab.sampling.temperature,
        "batch_size": batch, "seconds": stages.limit.spent, "minutes": stages.limit.seconds / 60,
        "max_new_tokens": stages.tokens, "judged": len(judged), "level": confirmed.level, "ended": confirmed.ended,
        "recommended": {"mode": chosen.name, "command": command, "speedup": speedup, "overrides": chosen.overrides,
                        "preset": f"spec-lab --config-dir {shlex.quote(str(preset.parents[1]))} "
                                  "+experiment=recommended"},
        "conclusion": conclusion(stages, few, confirmed),
        "modes": modes,
        "costs": [{"batch": size, "nodes": nodes, "seconds": seconds, "spread": stages.spread.get(size)}
                  for size, costs in stages.costs.items() for nodes, seconds in costs.items()],
        "refused": [{"mode": name, "reason": reason} for name, reason in stages.refused.items()],
        "engines": {} if best is None else flags(chosen, depth, stages.facts.get(chosen.name, {})),
        "changes": [] if best is not None else changes(stages, judged, confirmed, modes),
        "batches": _by_batch(judged, batch),
        "projection": None if projected is None else _projected(of_mode, stages, *projected),
    }  # fmt: skip


def conclusion(stages: Stages, few: Sequence[JudgedMode], confirmed: Confirmed) -> str:
    """Return the verdict in one sentence."""
    name = confirmed.leader
    if stages.too_slow:
        return f"Run no speculation: nothing was measured, since {stages.too_slow}; give more minutes."
    if not few:
        return "Run no speculation: no mode could be judged on this target."
    if all(mode.mode.name in stages.refused for mode in few):
        return "Run no speculation: no mode that was judged could run; the reasons are listed."
    if name not in confirmed.speedups:
        return "Run no speculation: the time ended before a mode was measured; give more minutes."
    mean, low, high = confirmed.speedups[name]
    groups = confirmed.groups[name]
    measured = len(confirmed.speedups)
    best = f"the best of {measured} measured" if measured > 1 else "the only one measured"
    if math.isnan(low):
        return (
            f"Run no speculation: the time ended after {groups} groups of prompts, too few to show that a mode is "
            f"faster ({name}, {best}: {mean:.2f}); give more minutes."
        )
    percent = f"{confirmed.level:.1%}: 95 % for all looks together"
    if confirmed.fastest:
        return (
            f"Run {name}: {mean:.2f} times the speed of decoding without speculation [{low:.2f}, {high:.2f}], measured "
            f"on {groups} groups of prompts after it was {best} (an interval of {percent})."
        )
    shown = "is slower" if high < 1 else "was not shown to be faster"
    return (
        f"Run no speculation: {name}, {best}, {shown}: {mean:.2f} times the baseline's speed [{low:.2f}, {high:.2f}] "
        f"(an interval of {percent})."
    )


def changes(
    stages: Stages, judged: Sequence[JudgedMode], confirmed: Confirmed, modes: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what would have to change for speculation to be faster.

    Args:
        stages, judged, confirmed: as of ``summarise``.
        modes: the rows of the table of modes, whose numbers stand for their names.
    """
    if stages.too_slow:
        return [f"minutes: {stages.too_slow}."]
    if not judged:
        return []
    batch = stages.batch
    best = best_few(judged, batch, 1)[0]
    need = best.tau / best.at(batch)
    numbers = {row["mode"]: number for number, row in enumerate(modes, 1)}
    name = f"mode {numbers[best.mode.name]}" if best.mode.name in numbers else best.mode.name
    tau = next((row["tau"] for row in modes if row["mode"] == best.mode.name), None)
    emits = f"is predicted to emit {best.tau:.2f}" if tau is None else f"emitted {tau:.2f} ({best.tau:.2f} predicted)"
    lines = [
        f"A better draft: {name}, the best prediction, {emits} tokens a step and needs more than {need:.2f}, since its "
        f"step takes {need:.2f} times as long as one without a draft."
    ] * ((best.tau if tau is None else tau) <= need)
    rows = stages.table.of(best.nodes, batch) / stages.table.of(0, batch)
    if best.free > best.at(batch) * 1.05:
        lines.append(
            f"Cheaper rows: a step with the {best.nodes:.1f} draft nodes of {name} takes {rows:.2f} times as long as "
            f"one without; if they cost nothing the prediction would be {best.free:.2f}."
        )
    others = {size: max(mode.speedup.get(size, 0.0) for mode in judged) for size in stages.costs if size != batch}
    lines += [
        f"Another batch size: at {size} the best prediction is {value:.2f}."
        for size, value in others.items()
        if value > max(1.05, best.at(batch))
    ]
    if confirmed.ended == "time":
        lines.append("More minutes: the time ended before the intervals were narrow enough.")
    return lines


def _measured(
    few: Sequence[JudgedMode], confirmed: Confirmed, steps: Mapping[str, pd.DataFrame], batch: int
) -> list[dict[str, Any]]:
    rows = []
    for mode in few:
        name = mode.mode.name
        of_mode, interval = steps[name], confirmed.speedups.get(name)
        tau = float(of_mode["emitted_kept"].sum() / len(of_mode)) if len(of_mode) else None
        state = "recommended" if name == confirmed.fastest else "not chosen" if name != confirmed.leader else (
            "slower" if interval and interval.high < 1 else "not shown faster")  # fmt: skip
        rows.append(_line(mode, batch) | {"measured": interval and interval._asdict(), "tau": tau, "state": state,
                                          "groups": confirmed.groups.get(name, 0)})  # fmt: skip
    return sorted(rows, key=lambda row: -((row["measured"] or {}).get("mean") or 0.0))


def _others(judged: Sequence[JudgedMode], few: Sequence[JudgedMode], batch: int) -> list[dict[str, Any]]:
    """Return the best modes of the families that were not measured."""
    families = {mode.family for mode in few}
    rest = [mode for mode in judged if mode.family not in families]
    firsts = best_few(rest, batch, len({mode.family for mode in rest})) if rest else []
    unmeasured = {"measured": None, "tau": None, "state": "not measured", "groups": 0}
    return [_line(mode, batch) | unmeasured for mode in firsts]


def _line(mode: JudgedMode, batch: int) -> dict[str, Any]:
    return {"mode": mode.mode.name, "predicted": {"mean": mode.at(batch), "low": mode.low, "high": mode.high},
            "predicted_tau": mode.tau, "nodes": mode.nodes}  # fmt: skip


def _by_batch(judged: Sequence[JudgedMode], batch: int) -> list[dict[str, Any]]:
    """Return the best predicted mode at each batch size that was judged."""
    rows = []
    for size in sorted({size for mode in judged for size in mode.speedup}):
        if able := [mode for mode in judged if size in mode.speedup and mode.mode.policy != ADAPTIVE]:
            best = max(able, key=lambda mode: mode.at(size))
            rows.append({"batch": size, "mode": best.mode.name, "predicted": best.at(size), "measured": size == batch})
    return rows


def _projected(
    steps: Mapping[str, pd.DataFrame], stages: Stages, hardware: str, model: str, batches: Sequence[int]
) -> dict[str, Any]:
    """Return the projection of the measured modes to other hardware, or why there is none."""
    designs = []
    for name, of_mode in steps.items():
        if len(of_mode) and of_mode["depth"].max() > 0:
            facts = stages.facts.get(name, {})
            designs.append(of_steps(of_mode, name, str(facts.get("name", name)), stages.lab.verifier.name, facts))
    context, rows, why = 1024, [], ""
    try:
        deployments = projection.deployments_of(designs, [hardware], model=model, context=context)
        cells = projection.project(designs, deployments, list(batches), context)
        for (device, batch), of_batch in cells[cells["best"]].groupby(["hardware", "batch"]):
            best = of_batch.iloc[0]
            speedup = {"mean": best["speedup"], "low": best["speedup_low"], "high": best["speedup_high"]}
            rows.append({"hardware": str(device), "batch": int(batch), "mode": best["design"],
                         "length": int(best["length"]), "speedup": speedup})  # fmt: skip
    except ValueError as error:
        why = str(error)
    return {"model": model, "context": context, "rows": rows, "why_not": why, "error": PROJECTION_ERROR}


def check_projection(hardware: str, model: str) -> None:
    """Refuse hardware or a model that the projection does not know.

    Raises:
        ValueError: one of them; names those that are known.
    """
    from spec_lab.analysis.projection import catalogue

    catalogue.hardware([hardware])
    catalogue.model("task.model", model)
