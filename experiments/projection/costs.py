"""Measure the cost of draft nodes, and compare the speed-up predicted from it with the measured one; bundled models.

First the costs are measured, on prose; then prompts of code are decoded by every method, and the speed-ups compared.
Writes ``costs.csv`` (speed-ups), ``nodes.csv`` (seconds of a step) and ``cost.png`` into this folder. Finished parts
are kept under ``--out``: the same command resumes. ``--read OUT`` measures nothing: it reads the files of an earlier
measurement. ``--redraw`` draws the figure from nodes.csv.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

import spec_lab
from experiments.plots import bounds, factor, no_gain, save
from spec_lab.analysis import metrics
from spec_lab.analysis.figures import STYLE
from spec_lab.analysis.figures.palette import option_colours
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
CLAIM = "64 nodes of each sequence make a step twice as long at batch 1, and 4.5 to 5 times at batch 8"


def methods(target: Target, zoo: Path, trees: Sequence[int], depths: Sequence[int]) -> dict[str, Proposer]:
    """Return the methods: Medusa with likeliest trees of so many nodes, full chains of a draft model, prompt lookup."""
    heads, made = str(zoo / "medusa"), dict[str, Proposer]()
    for nodes in trees:
        made[f"medusa {nodes}"] = Medusa.load(target, heads, tree="likeliest", max_nodes=nodes)
    for depth in depths:
        made[f"draft_chain {depth}"] = DraftModel.load(target, str(zoo / "draft"), depth=depth)
    return made | {"ngram": Ngram.load(target, depth=10)}


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


def draw(nodes: pd.DataFrame) -> Figure:
    """Plot t(n) / t(0) by nodes; a panel for each context, a line for each batch size."""
    contexts, batches = (sorted(nodes[name].unique()) for name in ("context", "batch"))
    colour = option_colours([f"batch {batch}" for batch in batches])
    figure = Figure(figsize=(3.1 * len(contexts) + 0.6, 3.5), layout="constrained")
    panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for axes, context in zip(panels, contexts, strict=True):
        for (name, ink), batch in zip(colour.items(), batches, strict=True):
            rows = nodes[(nodes["context"] == context) & (nodes["batch"] == batch)].sort_values("nodes")
            axes.plot(
                rows["nodes"], rows["seconds"] / rows["seconds"].iloc[0], "o-", color=ink, label=name, markersize=4
            )
        axes.set(title=f"{context} tokens of context", xlabel="nodes n of each sequence")
        no_gain(axes)
    panels[0].set_ylabel("t(n) / t(0): time of a step\nover that of one without nodes")
    panels[0].legend(fontsize=8)
    return figure


# README ------------------------------------------------------------------------------------------------------------


def in_words(table: pd.DataFrame) -> str:
    """Return the summary of predicted and measured speed-ups."""
    worst = table.loc[table["error"].abs().idxmax()]
    text = (
        f"{table['within'].sum()} of {len(table)} predictions are within {GOAL:.0%} of the measurement; for "
        f"{table['surely_within'].sum()} the whole interval is. Half are within {table['error'].abs().median():.1%}. "
        f"The largest error is {worst['error']:+.1%} ({worst['method']}, temperature {worst['temperature']}, batch "
        f"{worst['batch']})."
    )
    return re.sub(r"(?<=\d)%", " %", text)


def report(out: Path, folder: Path) -> pd.DataFrame:
    """Write results and figure from the measured rows; no model is loaded."""
    table, frame = results(out), costs.load(out / "nodes")
    if frame.empty:
        raise ValueError(f"{out / 'nodes'} holds no costs; measure first, without --read")
    table.to_csv(folder / "costs.csv", index=False, float_format="%.4g")
    nodes = pd.DataFrame(summarise(frame)["nodes"])
    nodes.to_csv(folder / "nodes.csv", index=False, float_format="%.4g")
    with rc_context(STYLE):
        save(draw(nodes), folder / "cost.png", CLAIM)
    return table


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/cost_of_nodes"), help="where the rows go")
    parser.add_argument("--read", type=Path, help="read the rows in this folder, and measure nothing")
    parser.add_argument("--redraw", action="store_true", help="draw the figure from nodes.csv, and measure nothing")
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
    if chosen.redraw:
        with rc_context(STYLE):
            save(draw(pd.read_csv(chosen.folder / "nodes.csv")), chosen.folder / "cost.png", CLAIM)
        return
    if chosen.read is None:
        torch.set_num_threads(chosen.threads)
        measure(chosen)
    print(in_words(report(chosen.read or chosen.out, chosen.folder)))


if __name__ == "__main__":
    main()
