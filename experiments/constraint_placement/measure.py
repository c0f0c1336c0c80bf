"""Where should a constraint apply? Every placement, proposer and workload, alternating in one process.

Writes ``results.csv`` and ``placement.png`` into this folder, and the tables into its README. Finished groups are kept
under ``--out``: the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra import compose, initialize_config_dir
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments import plots
from spec_lab.analysis import figures, metrics
from spec_lab.analysis.figures import BASELINE, GREY, STYLE
from spec_lab.analysis.figures.palette import GRID
from spec_lab.cli import main as cli
from spec_lab.constrain import AppliedConstraint, ConstraintError
from spec_lab.core.randomness import CounterDraws
from spec_lab.propose import Null
from spec_lab.results.manifest import begun
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.lab import Lab, Loop, Settings, requests_of
from spec_lab.verify import Match

HERE = Path(__file__).resolve().parent
PLACEMENTS = (("none", False), ("draft", False), ("target", False), ("both", False), ("target", True), ("both", True))
"""Distributions that the masks apply to, and whether forced tokens are appended at once."""
WORKLOADS = {
    "records": ("JSON of a schema, white space free", ["constraint=records", "constraint.lines=false", "prompts=json"]),
    "records_exact": ("the same records as json.dumps lays them out", ["constraint=records_exact", "prompts=json"]),
    "patterns": ("a regular expression of each prompt's own", ["constraint=regex", "prompts=patterns"]),
}
PROPOSERS = {
    "ngram_chain": "n-gram chain",
    "ngram_tree": "n-gram tree",
    "draft_chain": "draft chain",
    "draft_tree": "draft tree",
    "medusa": "Medusa tree",
}
NULL = "autoregressive"
TEMPERATURES = {0: tuple(PROPOSERS), 1: ("draft_chain",)}
"""Temperatures, and the proposers measured at each."""


@dataclass(frozen=True)
class Way:
    """One way to decode: a proposer (or ``NULL``), and a placement of the constraint."""

    proposer: str
    placement: str
    fast_forward: bool = False

    @property
    def arm(self) -> str:
        """The arm's name; that of the run's own baseline for autoregressive decoding without a constraint."""
        if self.proposer == NULL and self.placement == "none":
            return "baseline"
        return f"{self.proposer}:{self.placement}{':forward' if self.fast_forward else ''}"

    @property
    def plain(self) -> Way:
        """Autoregressive decoding with the same target distribution, token by token."""
        return Way(NULL, "target" if self.placement in ("target", "both") else "none")

    @property
    def best(self) -> Way:
        """The same with forced tokens appended at once, if the masks apply to the target."""
        return replace(self.plain, fast_forward=self.plain.placement == "target")


def ways(temperature: int) -> list[Way]:
    """All ways that are measured at a temperature."""
    drafted = [Way(name, *at) for name in TEMPERATURES[temperature] for at in PLACEMENTS]
    return [*drafted, Way(NULL, "none"), Way(NULL, "target"), Way(NULL, "target", True)]


# Measuring ---------------------------------------------------------------------------------------------------------


def configured(workload: str, temperature: int, options: Sequence[str]) -> DictConfig:
    """The experiment's config for one run."""
    sampling = "greedy" if temperature == 0 else "temperature_1"
    overrides = ["+experiment=constraint_placement", *WORKLOADS[workload][1], f"sampling={sampling}", *options]
    with initialize_config_dir(cli.conf(), version_base="1.3"):
        return compose("config", overrides)


def measure(config: DictConfig, out: Path, limit: int, temperature: int) -> int:
    """Measure one workload at one temperature with all ways; return the exit code of ``run``."""
    if tree := chosen_tree(out.parent):
        OmegaConf.update(config, "arms.medusa.tree", tree)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    settings = Settings(output_dir=out, **{name: resolved[name] for name in Settings.names()})
    settings.use_threads()
    target = cli.build(config, "target")
    names = TEMPERATURES[temperature]
    parts = {"draft_chain": "proposer"} | {name: f"arms.{name}" for name in names if name != "draft_chain"}
    proposers = {name: cli.build(config, parts[name], target=target) for name in names}
    verifier, sampling = cli.build(config, "verifier"), cli.build(config, "sampling")
    applied = cli.apply_constraint(config, settings, target)[0]
    arms = {}
    for way in ways(temperature):
        way_applied = replace(applied, placement=way.placement, fast_forward=way.fast_forward)
        if way.proposer != NULL:
            arms[way.arm] = Loop(target, proposers[way.proposer], verifier, CounterDraws(settings.seed), way_applied)
        elif way.arm != "baseline":  # that one every run has
            arms[way.arm] = Loop(target, Null.load(target), Match(), CounterDraws(settings.seed), way_applied)
    prompts = [prompt for prompt in cli.build(config, "prompts") if follows(applied, target, prompt, sampling)]
    tracker = cli.build(config, "tracker")
    lab = Lab(target, Null.load(target), Match(), sampling, prompts[:limit], tracker, peers=arms)
    resolved["limit"] = limit
    if "medusa" in proposers:
        resolved["arms"]["medusa"]["tree"] = proposers["medusa"].facts["tree"]
    return run(lab, settings, resolved, Console(quiet=True))


def chosen_tree(out: Path) -> str | None:
    """Medusa's calibrated tree: that of the first run under ``out`` for all runs, so that they can be compared."""
    there = [begun(run) for run in sorted(out.glob("*"), key=lambda run: run.stat().st_mtime)]
    trees = [summary["config"]["arms"]["medusa"]["tree"] for summary in there if summary]
    return next((tree for tree in trees if tree != "calibrated"), None)


def follows(applied: AppliedConstraint, target: Any, prompt: Any, sampling: Any) -> bool:
    """Whether the constrained text can begin with the prompt: JSON Lines are not JSON."""
    try:
        applied.constraint.start(requests_of(target, [prompt], sampling, 1)[0])
    except ConstraintError:
        return False
    return True


# Results -----------------------------------------------------------------------------------------------------------


def results(tables: metrics.Tables, workload: str, temperature: int) -> Iterator[dict[str, Any]]:
    """One row for each way to decode."""
    for way in ways(temperature):
        steps = metrics.decode_steps(tables.steps, way.arm)
        seconds = metrics.decode_seconds(tables.forwards, way.arm)
        busy, waited = metrics.mask_seconds(tables.forwards, way.arm)
        emitted, free = steps["emitted_kept"] - steps["forced_emitted_kept"], steps["nodes"] - steps["forced"]
        accepted = steps["accepted"] - steps["forced_accepted"]
        requests, drafted = (
            steps["request"],
            steps[(steps["nodes"] > 0) & not_violated(steps, tables.requests, way.arm)],
        )
        ones = pd.Series(1, index=steps.index)
        yield {
            "workload": workload,
            "temperature": temperature,
            "proposer": way.proposer,
            "placement": way.placement,
            "fast_forward": way.fast_forward,
            "requests": tables.requests["request"].nunique(),
            "tokens_per_second": metrics.tokens_per_second(tables.requests, way.arm),
            **spread("speedup_mean_of_groups", mean_of_speedups(tables.requests, way, way.plain)),
            **spread("speedup_over_best_mean_of_groups", mean_of_speedups(tables.requests, way, way.best)),
            **spread("tau", pooled(emitted, ones, requests)),
            **spread("tau_with_forced", pooled(steps["emitted_kept"], ones, requests)),
            "nodes_per_step": float(steps["nodes"].mean()),
            **spread("legal_share", pooled(drafted["legal"], drafted["nodes"], drafted["request"])),
            **spread("accepted_forced", pooled(steps["forced_accepted"], steps["forced"], requests)),
            **spread("accepted_free", pooled(accepted, free, requests)),
            "mask_share": busy / seconds if seconds else float("nan"),
            "mask_wait_share": waited / seconds if seconds else float("nan"),
            "overhead": metrics.overhead(tables.forwards, way.arm),
            "identical_outputs": metrics.identical_outputs(tables.requests, way.arm, way.plain.arm),
            "repeated_8gram_share": metrics.repeated_8gram_share(
                tables.requests.loc[tables.requests["arm"] == way.arm, "tokens"]
            ),
            "violated": float((tables.requests.loc[tables.requests["arm"] == way.arm, "violated"] >= 0).mean()),
            "broken_groups": len(metrics.broken_groups(tables.requests)),
        }


def not_violated(steps: pd.DataFrame, requests: pd.DataFrame, arm: str) -> pd.Series:
    """Steps that began before the output violated the constraint: after that no node is legal or illegal."""
    arm_requests = requests[requests["arm"] == arm].set_index("request")
    emitted = steps["context"] - steps["request"].map(arm_requests["prompt_tokens"])
    violated = steps["request"].map(arm_requests["violated"])
    return (violated < 0) | (emitted <= violated)


def mean_of_speedups(requests: pd.DataFrame, way: Way, baseline: Way) -> metrics.Interval:
    """Return the arithmetic mean of the prompts' speed-ups, each of one way over another on the same prompt.

    Unlike ``metrics.speedup``, which is a ratio of sums, it gives every prompt the same weight.
    """
    return metrics.interval(metrics.walltime_speedup_paired(requests, way.arm, baseline.arm))


def spread(name: str, value: metrics.Interval) -> dict[str, float]:
    """A value and its ends, as columns."""
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def pooled(part: pd.Series, whole: pd.Series, requests: pd.Series, resamples: int = 2000) -> metrics.Interval:
    """Sum of ``part`` / sum of ``whole``, and its 95 % bootstrap interval over requests."""
    each = pd.DataFrame({"part": part, "whole": whole}).groupby(requests).sum()
    nothing = float("nan")
    if not len(each) or each["whole"].sum() == 0:
        return metrics.Interval(nothing, nothing, nothing)
    mean = float(each["part"].sum() / each["whole"].sum())
    drawn = each.to_numpy(dtype=float)[np.random.default_rng(0).integers(0, len(each), (resamples, len(each)))].sum(1)
    drawn = drawn[drawn[:, 1] > 0]
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return metrics.Interval(mean, float(low), float(high))


# Figure ------------------------------------------------------------------------------------------------------------

CLAIM = "Much of the gain under a constraint is not speculation: forced tokens alone give 1.3 to 2.1 times"


def place_name(placement: str, fast_forward: bool) -> str:
    """Return a way's name in tables and on axes."""
    return f"{placement}, forward" if fast_forward else placement


def draw(table: pd.DataFrame) -> Figure:
    """Greedy decoding: the speed-up over token by token; a panel for each workload, placements down."""
    table = table[table["temperature"] == 0]
    workloads = [name for name in WORKLOADS if name in set(table["workload"])]
    label = PROPOSERS | {NULL: "no draft"}
    colour = {name: figures.colour(name) for name in PROPOSERS} | {NULL: BASELINE}
    figure = Figure(figsize=(3.4 * len(workloads) + 1.4, 4.6), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        for number, name in enumerate(label):
            for down, placement in enumerate(PLACEMENTS):
                row = _row(table, workload, name, placement)
                if row is not None:
                    height = down + (number - (len(label) - 1) / 2) * 0.125
                    _point(axes, row, "speedup_mean_of_groups", height, {"color": colour[name]})
            axes.plot([], [], "o", color=colour[name], label=label[name])
        for border in range(1, len(PLACEMENTS)):
            axes.axhline(border - 0.5, color=GRID, linewidth=0.8)
        axes.set_title(workload)
        axes.set_yticks(range(len(PLACEMENTS)), [place_name(*placement) for placement in PLACEMENTS])
        axes.set_ylim(len(PLACEMENTS) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    panels[0].set_ylabel("masks apply to")
    middle = panels[len(panels) // 2]
    middle.set_xlabel("mean of the prompts' speed-ups over decoding token by token; 95 % intervals")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(label), fontsize=9)
    return figure


def _point(axes: Any, row: pd.Series, column: str, height: float, look: Mapping[str, Any]) -> None:
    whiskers = None
    if f"{column}_low" in row and np.isfinite(row[f"{column}_low"]):
        whiskers = [[row[column] - row[f"{column}_low"]], [row[f"{column}_high"] - row[column]]]
    axes.errorbar(row[column], height, xerr=whiskers, fmt="o", markersize=4.5, capsize=2, elinewidth=1, **look)


def _row(table: pd.DataFrame, workload: str, proposer: str, placement: tuple[str, bool]) -> pd.Series | None:
    rows = table[
        (table["workload"] == workload)
        & (table["proposer"] == proposer)
        & (table["placement"] == placement[0])
        & (table["fast_forward"] == placement[1])
    ]
    return None if rows.empty else rows.iloc[0]


# README ------------------------------------------------------------------------------------------------------------


def shown(row: pd.Series | None, column: str) -> str:
    """A value with its interval."""
    if row is None or not np.isfinite(row[column]):
        return "-"
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return f"{row[column]:.2f}" + (f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) else "")


def written(table: pd.DataFrame) -> str:
    """The README's table: masks on both and forced tokens appended, over either way without a draft."""
    head = ["workload", "T", "arm", "over token by token", "over the best without a draft", "tau", "tau, no constraint"]
    rows = [head]
    for (temperature, workload), part in table.groupby(["temperature", "workload"], sort=False):
        for name in (name for name in PROPOSERS if name in set(part["proposer"])):
            row, plain = _row(part, workload, name, ("both", True)), _row(part, workload, name, ("none", False))
            assert row is not None and plain is not None, "every place is measured"
            over = shown(row, "speedup_mean_of_groups"), shown(row, "speedup_over_best_mean_of_groups")
            rows.append(
                [workload, f"{temperature}", PROPOSERS[name], *over, f"{row['tau']:.2f}", f"{plain['tau']:.2f}"]
            )
    return plots.markdown(rows)


def report(out: Path, folder: Path) -> pd.DataFrame:
    """Results, figure and tables of all runs under ``out``."""
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        for workload in WORKLOADS:
            there = out / f"{workload}-{temperature}"
            if (there / "summary.json").is_file():
                rows += results(metrics.load(there), workload, temperature)
    table = pd.DataFrame(rows)
    table.to_csv(folder / "results.csv", index=False, float_format="%.4g")
    with rc_context(STYLE):
        plots.save(draw(table), folder / "placement.png", CLAIM)
    plots.fill(folder / "README.md", written(table))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/constraint_placement"), help="where the rows go")
    parser.add_argument("--folder", type=Path, default=HERE, help="where results, figure and README are")
    parser.add_argument("--redraw", action="store_true", help="draw the figure from results.csv, without the runs")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each workload")
    parser.add_argument("options", nargs="*", help="of the runs, as on spec_lab's command line: threads=1")
    chosen = parser.parse_args(arguments)
    if chosen.redraw:
        with rc_context(STYLE):
            plots.save(draw(pd.read_csv(chosen.folder / "results.csv")), chosen.folder / "placement.png", CLAIM)
        return
    for temperature in TEMPERATURES:
        for workload in WORKLOADS:
            config = configured(workload, temperature, chosen.options)
            code = measure(config, chosen.out / f"{workload}-{temperature}", chosen.prompts, temperature)
            if code:
                raise SystemExit(code)
    report(chosen.out, chosen.folder)


if __name__ == "__main__":
    main()
