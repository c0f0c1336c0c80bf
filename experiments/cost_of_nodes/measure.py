"""Measure the cost of draft nodes, and compare the speed-up predicted from it with the measured one; bundled models.

First the costs are measured, on prose; then prompts of code are decoded by every method, and the speed-ups compared.
Writes ``results.csv``, ``cost.png`` and ``predicted.png`` into this folder, and the tables into its README. Finished
parts are kept under ``--out``: the same command resumes. ``--read OUT`` measures nothing: it reads the files of an
earlier measurement.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

import spec_lab
from experiments.plots import baseline_share, bounds, factor, fill, markdown, shown
from spec_lab.analysis import figures, metrics
from spec_lab.analysis.figures import COLOURS, GREY, STYLE
from spec_lab.analysis.tracking import Files
from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.propose.ngram import Ngram
from spec_lab.tasks import cost as costs
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.cost.summary import summarise
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Token

HERE = Path(__file__).resolve().parent
ZOO = Path(spec_lab.__file__).parent / "zoo"
TEMPERATURES = (0, 1)
GOAL = 0.10  # largest error of a prediction
FAMILIES = ("medusa", "draft_chain", "ngram")


def methods(target: Target, zoo: Path, trees: Sequence[int], depths: Sequence[int]) -> dict[str, Proposer]:
    """Return the methods: Medusa with likeliest trees of so many nodes, full chains of a draft model, prompt lookup."""
    heads, made = str(zoo / "medusa"), dict[str, Proposer]()
    for nodes in trees:
        made[f"medusa {nodes}"] = Medusa.load(target, heads, tree="likeliest", max_nodes=nodes)
    for depth in depths:
        made[f"draft_chain {depth}"] = DraftModel.load(target, str(zoo / "draft"), depth=depth)
    return made | {"ngram": Ngram.load(target)}


# Measuring ---------------------------------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace) -> None:
    """Measure the cost of nodes on the whole grid, then that of nodes and methods for the runs, then do the runs.

    Each measurement has a directory under ``--out``.

    Raises:
        SystemExit: it was interrupted.
    """
    target = Target.load(str(chosen.zoo / "target"), dtype=chosen.dtype)
    more = methods(target, chosen.zoo, chosen.trees, chosen.depths)
    config = {name: str(value) for name, value in vars(chosen).items() if name not in ("out", "folder", "read")}
    quiet = Console(quiet=True)

    def lab(workload: str, temperature: int, limit: int | None) -> Lab:
        prompts = jsonl(str(chosen.zoo / "prompts" / f"{workload}.jsonl"), limit)
        return Lab(target, Null(), Token(), Sampling(temperature), prompts, Files(), more)

    def settings(name: str, batch: int = 1) -> Settings:
        usual = {"max_new_tokens": chosen.new, "warmup": min(16, chosen.new), "seed": 0, "threads": chosen.threads}
        return Settings(output_dir=chosen.out / name, name=name, batch_size=batch, baseline=True, **usual)

    alone = replace(lab("prose", 0, None), more_proposers={})
    wide = {"batches": chosen.batches, "contexts": chosen.contexts, "repeats": chosen.repeats}
    finished(costs.measure(alone, settings("nodes"), config, quiet, nodes=chosen.nodes, **wide))
    near = [batch for batch in chosen.batches if batch <= max(chosen.runs)]
    for temperature in TEMPERATURES:
        places = {"batches": near, "contexts": chosen.near, "repeats": chosen.repeats + 2}
        parts = lab("prose", temperature, None), settings(f"cost-{temperature}")
        finished(costs.measure(*parts, config, quiet, nodes=chosen.nodes, **places))
    for temperature in TEMPERATURES:
        for batch in chosen.runs:
            limit = chosen.limit * (1 if batch == 1 else 2)  # groups are paired, and there are fewer large ones
            name = f"run-{temperature}-{batch}"
            finished(run(lab("code", temperature, limit), settings(name, batch), config, quiet))


def finished(code: int) -> None:
    """Exit after Ctrl-C."""
    if code:
        raise SystemExit(code)


# Results -----------------------------------------------------------------------------------------------------------


def results(out: Path) -> pd.DataFrame:
    """Return one row for each temperature, batch size and method: predicted and measured speed-ups of the same groups.

    ``speedup_mean_of_groups`` and ``predicted_mean_of_groups`` are arithmetic means of the groups' speed-ups, not the
    ratio of sums that ``metrics.speedup`` returns. ``predicted_over_measured`` is the geometric mean of the groups'
    ratios, with an interval over groups.

    Raises:
        ValueError: there is no run, or its costs were not measured.
    """
    rows: list[dict[str, Any]] = []
    for temperature, batch, folder in runs_of(out):
        cost = costs.Cost.of(costs.load(out / f"cost-{temperature}"))
        tables = metrics.load(folder)
        if not (folder / "summary.json").is_file():
            print(f"{folder} is not done: only its {tables.requests['group'].nunique()} finished groups are read")
        for arm in sorted(set(metrics.arms(tables)) - {"baseline"}, key=by_size):
            both, steps = costs.predicted_and_measured(cost, tables, arm), metrics.decode_steps(tables.steps, arm)
            off = factor(np.log(both["predicted"] / both["measured"]).to_numpy())
            rows.append(
                {
                    "temperature": temperature,
                    "batch": batch,
                    "method": arm,
                    "groups": len(both),
                    "nodes_per_step": metrics.ratio(steps["nodes"].sum(), len(steps)),
                    "tau": metrics.tau_pooled(steps),
                    "tau_pooled_raw": metrics.tau_pooled_raw(steps),
                    "expected_tau": metrics.expected_tau(steps),
                    **bounds("speedup_mean_of_groups", metrics.interval(both["measured"])),
                    **bounds("predicted_mean_of_groups", metrics.interval(both["predicted"])),
                    **bounds("predicted_over_measured", off),
                    "error": off.mean - 1,
                    "within": within(off.mean, off.mean),
                    "surely_within": within(off.low, off.high),
                }
            )
    return pd.DataFrame(rows)


def runs_of(out: Path) -> list[tuple[int, int, Path]]:
    """Return temperature, batch size and directory of every run under ``out``.

    Raises:
        ValueError: there is none.
    """
    runs = []
    for folder in out.glob("run-*-*"):
        temperature, batch = (int(part) for part in folder.name.split("-")[1:])
        runs.append((temperature, batch, folder))
    if not runs:
        raise ValueError(f"{out} holds no run-TEMPERATURE-BATCH; measure first, without --read")
    return sorted(runs)


def by_size(method: str) -> tuple[str, int]:
    """Return a method's family and number of nodes, by which methods are sorted."""
    family, _, size = method.partition(" ")
    return family, int(size or 0)


def within(low: float, high: float) -> bool:
    """Return whether the ratios from ``low`` to ``high`` lie within the goal; False for an unknown interval."""
    return bool(low >= 1 - GOAL and high <= 1 + GOAL)


def draw(table: pd.DataFrame) -> Figure:
    """Plot predicted against measured speed-ups, with the band of the goal; a panel for each batch and temperature."""
    batches, temperatures = (sorted(table[name].unique()) for name in ("batch", "temperature"))
    figure = Figure(figsize=(4.4 * len(temperatures), 4.4 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), len(temperatures), squeeze=False)
    for (number, batch), (column, temperature) in product(enumerate(batches), enumerate(temperatures)):
        axes, rows = panels[number][column], table[(table["batch"] == batch) & (table["temperature"] == temperature)]
        both = rows[["speedup_mean_of_groups", "predicted_mean_of_groups"]]
        low, top = 0.9 * both.min().min(), 1.1 * both.max().max()
        line = np.array([low, top])
        axes.fill_between(line, (1 - GOAL) * line, (1 + GOAL) * line, color=GREY, alpha=0.2, lw=0)
        axes.plot(line, line, color=GREY, linestyle="--", linewidth=1)
        for row in rows.to_dict("records"):
            family, _, size = row["method"].partition(" ")
            colour, off = COLOURS[FAMILIES.index(family)], row["predicted_over_measured"]
            x, y = row["speedup_mean_of_groups"], row["predicted_mean_of_groups"]
            ends = [row[f"predicted_over_measured_{end}"] / off * y for end in ("low", "high")]
            axes.vlines(x, *ends, color=colour, linewidth=1, alpha=0.6)
            axes.plot(x, y, "o", color=colour, markersize=5)
            axes.annotate(size, (x, y), (5, -9), textcoords="offset points", fontsize=9)
        axes.set(title=f"batch {batch}, temperature {temperature}", xlim=(low, top), ylim=(low, top), aspect="equal")
    for family, colour in zip(FAMILIES, COLOURS, strict=False):
        panels[0][0].plot([], [], "o", color=colour, label=family)
    panels[0][0].legend(fontsize=9, loc="upper left")
    figure.supxlabel("measured: mean of per-group speed-ups", fontsize=10)
    figure.supylabel("predicted: mean of per-group speed-ups", fontsize=10)
    note = f"Grey: within {GOAL:.0%}. Lines: 95 % of predicted over measured, over groups. Numbers: nodes."
    note = re.sub(r"(?<=\d)%", " %", note)
    figure.suptitle(note, fontsize=9, x=0.01, ha="left")
    return figure


# README ------------------------------------------------------------------------------------------------------------


def of_nodes(frame: pd.DataFrame) -> str:
    """Return the table of t(n) in milliseconds, and of t(n) / t(0)."""
    rows = pd.DataFrame(summarise(frame)["nodes"])
    table = [["batch", "context", *(f"n = {n:g}" for n in sorted(rows["nodes"].unique()))]]
    for (batch, context), measured in rows.groupby(["batch", "context"]):
        each = measured.sort_values("nodes")["seconds"].to_numpy()
        table.append([f"{batch}", f"{context}", *(f"{1e3 * t:.1f} ({t / each[0]:.2f})" for t in each)])
    return markdown(table)


def compared(table: pd.DataFrame) -> str:
    """Return the table of predicted and measured speed-ups, and a summary."""
    means = ["predicted mean of per-group speed-ups", "measured mean [95 %]"]
    rows = [["temperature", "batch", "method", "nodes", "expected tau", *means, "error [95 %]"]]
    for row in table.to_dict("records"):
        low, high = row["predicted_over_measured_low"] - 1, row["predicted_over_measured_high"] - 1
        rows.append([
            f"{row['temperature']}", f"{row['batch']}", row["method"], f"{row['nodes_per_step']:.1f}",
            f"{row['expected_tau']:.2f}", f"{row['predicted_mean_of_groups']:.2f}",
            shown(row, "speedup_mean_of_groups"),
            f"{row['error']:+.1%}" + (f" [{low:+.1%}, {high:+.1%}]" if np.isfinite(low) else ""),
        ])  # fmt: skip
    worst = table.loc[table["error"].abs().idxmax()]
    said = (
        f"{table['within'].sum()} of {len(table)} predictions are within {GOAL:.0%} of the measurement; for "
        f"{table['surely_within'].sum()} the whole interval is. Half are within {table['error'].abs().median():.1%}. "
        f"The largest error is {worst['error']:+.1%} ({worst['method']}, temperature {worst['temperature']}, batch "
        f"{worst['batch']}). Only the cost is predicted: acceptance, nodes and the number of live sequences are those "
        "of the run."
    )
    return re.sub(r"(?<=\d)%", " %", f"{markdown(rows)}\n\n{said}")


def report(out: Path, folder: Path) -> pd.DataFrame:
    """Write results, figures and tables from the measured rows; no model is loaded."""
    table, frame = results(out), costs.load(out / "nodes")
    if frame.empty:
        raise ValueError(f"{out / 'nodes'} holds no costs; measure first, without --read")
    table.to_csv(folder / "results.csv", index=False, float_format="%.4g")
    figures.save({"cost": figures.step_costs(summarise(frame)["nodes"])}, folder, ("png",))
    with rc_context(STYLE):
        draw(table).savefig(folder / "predicted.png", bbox_inches="tight")
    for part, text in {"cost": of_nodes(frame), "predicted": f"{compared(table)}\n\n{baseline_share(out)}"}.items():
        fill(folder / "README.md", text, part)
    return table


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/cost_of_nodes"), help="where the rows go")
    parser.add_argument("--read", type=Path, help="read the rows in this folder, and measure nothing")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of results, figures and README")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="folder of target, draft, medusa and prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=16, help="prompts decoded at batch 1; twice that in batches")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of the grid; two more for the runs' costs")
    numbers = {
        "nodes": ([0, 1, 2, 4, 8, 16, 26, 32, 64], "numbers of nodes whose cost is measured"),
        "batches": ([1, 2, 4, 8], "batch sizes at which it is measured"),
        "contexts": ([64, 320, 1024], "contexts at which it is measured"),
        "near": ([64, 320], "contexts that enclose those of the runs"),
        "runs": ([1, 4], "batch sizes of the runs"),
        "trees": ([4, 10, 26, 64], "nodes of Medusa's trees"),
        "depths": ([2, 4, 8], "depths of the draft model's chains"),
    }
    for name, (usual, what) in numbers.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=usual, help=what)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, unless ``--read`` is given, and write the results."""
    chosen = options().parse_args(arguments)
    if chosen.read is None:
        torch.set_num_threads(chosen.threads)
        measure(chosen)
    print(compared(report(chosen.read or chosen.out, chosen.folder)))


if __name__ == "__main__":
    main()
