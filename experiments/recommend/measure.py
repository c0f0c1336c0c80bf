"""Compare what ``spec-lab recommend`` recommends with an exhaustive sweep: python -m experiments.recommend.measure.

For each target, text and temperature the command recommends a mode; then one run measures every mode of a grid, and the
recommended one, in paired groups. The proof is the recommended mode's speed over that of the fastest, and the time of
both. The same command resumes; ``--times`` repeats the recommendation, to see how often it makes the same choice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import runs
from spec_lab.analysis import metrics
from spec_lab.tasks.recommend.modes import NONE, WITHOUT_FILES, SpeculativeMode

TARGETS = {
    "bundled": [],
    "smollm2_llama_cpp": ["target=smollm2"],
    "smollm2_transformers": ["target=smollm2", "target.engine=transformers"],
}
"""Options of each target."""

TEXTS, TEMPERATURES = ("code", "json", "prose"), (0, 1)

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)

FOUND = "recommended"
"""Arm of the recommended mode in the exhaustive run."""


def grid() -> dict[str, SpeculativeMode]:
    """Return the modes of the exhaustive run by the name of their arm: every family without files, at many sizes."""
    modes = [
        SpeculativeMode(name, {"depth": depth}) for name, depth in product(("ngram", "suffix", "pld_plus"), DEPTHS)
    ]
    modes += [
        SpeculativeMode("ngram_tree", {"nodes": n, "depth": depth}) for n, depth in product((4, 8, 16), (2, 4, 8))
    ]
    modes += [
        SpeculativeMode("recycling", {"tree": tree}) for tree in ("2", "4", "1x1", "2x1", "4x2", "4x2x1", "4x2x1x1")
    ]
    modes += [SpeculativeMode(name, {"depth": depth}) for name, depth in product(("early_exit", "skip"), (1, 2, 4))]
    modes += [SpeculativeMode("jacobi", {"depth": depth}) for depth in (1, 4)]
    modes += [family.mode for family in WITHOUT_FILES if family.mode.proposer in ("union", "lookahead")]
    return {f"mode_{number}": mode for number, mode in enumerate(modes)}


def arm_options(arm: str, overrides: Sequence[str]) -> list[str]:
    """Return the options that measure a mode as an arm of a run, from those of the mode."""
    named = []
    for text in overrides:
        key, _, value = text.partition("=")
        key = key.replace("proposer@proposer.", f"proposer@arms.{arm}.")
        if key == "proposer":
            key = f"+proposer@arms.{arm}"
        elif key == "policy":
            key = f"+policy@arms.{arm}.policy"
        elif key.startswith(("proposer.", "policy.")):
            key = f"arms.{arm}.{key.removeprefix('proposer.')}"
        named.append(f"{key}={value}")
    return named


def recommended(out: Path, options: Sequence[str], minutes: float) -> tuple[dict[str, Any], float]:
    """Recommend a mode; return the summary and the seconds that this process took, 0 of one that has ended before."""
    began, ended = time.perf_counter(), (out / "ended.json").exists()
    command = [sys.executable, "-m", "spec_lab", "recommend", *options, f"minutes={minutes:g}", f"output_dir={out}"]
    subprocess.run(command, check=True)
    return json.loads((out / "summary.json").read_text()), 0.0 if ended else time.perf_counter() - began


def exhaustive(
    out: Path, options: Sequence[str], refused: Sequence[str], chosen: Sequence[str], best: Sequence[str]
) -> float:
    """Measure every mode of the grid that the target supports, and the recommended one; return the seconds.

    Args:
        out: the run's folder.
        options: target, text and temperature.
        refused: names of modes that the recommendation could not run; their proposers are left out.
        chosen: options of the run.
        best: options of the recommended mode; empty for none.
    """
    without = {name.partition(" ")[0] for name in refused}
    modes = {arm: mode for arm, mode in grid().items() if mode.proposer not in without}
    named = [text for arm, mode in modes.items() for text in arm_options(arm, mode.overrides)]
    named += arm_options(FOUND, best)
    began = time.perf_counter()
    command = [sys.executable, "-m", "spec_lab", *options, "proposer=none", *named, *chosen, f"output_dir={out}"]
    subprocess.run(command, check=True)
    return time.perf_counter() - began


def compared(run: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of the fastest arm's speed that the recommended mode has in the exhaustive run.

    Args:
        run: the folder of the exhaustive run.
        summary: of the recommendation.
    """
    requests = metrics.load(run).requests
    speeds = {arm: metrics.tokens_per_second(requests, arm) for arm in requests["arm"].unique()}
    recommended_arm = "baseline" if summary["recommended"]["mode"] == NONE else FOUND
    fastest = max(speeds, key=lambda arm: speeds[arm])
    modes = {arm: mode.name for arm, mode in grid().items()}
    return {
        "recommended": summary["recommended"]["mode"], "share": speeds[recommended_arm] / speeds[fastest],
        "fastest": modes.get(fastest, fastest), "speedup": speeds[recommended_arm] / speeds["baseline"],
        "fastest_speedup": speeds[fastest] / speeds["baseline"], "seconds": summary["seconds"],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write ``results.csv``.

    Raises:
        CalledProcessError: a command failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/recommend", 24)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each recommendation (10)")
    parser.add_argument("--times", type=int, default=1, help="recommendations of each setting (1)")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="which targets (all)")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help="which texts (all)")
    chosen: argparse.Namespace = parser.parse_args(arguments)
    rows = []
    for target, text, temperature in product(chosen.targets, chosen.texts, TEMPERATURES):
        folder = chosen.out / f"{target}_{text}_{temperature}"
        usual = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"threads={chosen.threads}"]
        options = [*TARGETS[target], f"prompts={text}", f"sampling.temperature={temperature}", *usual]
        summaries = [recommended(folder / f"recommend_{n}", options, chosen.minutes)[0] for n in range(chosen.times)]
        names = [summary["recommended"]["mode"] for summary in summaries]
        best = [] if names[0] == NONE else summaries[0]["recommended"]["overrides"]
        refused = [line["mode"] for line in summaries[0]["refused"]]
        took = exhaustive(folder / "exhaustive", options, refused, ["name=exhaustive", "record=none"], best)
        row = {
            "target": target,
            "text": text,
            "temperature": temperature,
            **compared(folder / "exhaustive", summaries[0]),
        }
        rows.append(row | {"exhaustive_seconds": took, "same_choice": names.count(names[0]), "times": chosen.times})
        pd.DataFrame(rows).to_csv(chosen.out / "results.csv", index=False)


if __name__ == "__main__":
    main()
