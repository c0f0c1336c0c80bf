"""Compare what ``spec-lab recommend`` recommends with an exhaustive sweep: python -m experiments.recommend.measure.

For each target, text and temperature the command recommends a mode, and one run measures every mode of a grid, both
on the first prompts of the text. Then the recommended mode, the grid's fastest and the baseline take turns on three
times as many other prompts: the fastest of some 50 was chosen by its own measurement, which favours it there, and not
here. The same command resumes and keeps what ``results.csv`` has of other settings; ``--times`` repeats the
recommendation, to see how often it makes the same choice.
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
from experiments.plots import bounds, speed_over
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

RECOMMENDED, FASTEST, BASELINE = "recommended", "fastest", "baseline"
"""Arms of the last run."""

OTHERS = 3
"""Prompts on which the two modes are compared, for each prompt on which they were chosen, if the text has so many."""

KEYS = ["target", "text", "temperature"]
"""Columns of ``results.csv`` that name a setting."""


def grid() -> dict[str, SpeculativeMode]:
    """Return the modes of the exhaustive run by the name of their arm: the families without files, at many sizes.

    Without ``sparse_kv``, which is for contexts longer than those of these texts.
    """
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


def timed(out: Path, *arguments: str) -> float:
    """Run the command line with its output in a folder; return the seconds of the process that ended it.

    They are kept in a file beside the folder, and a run that has ended is not started again with the same options.

    Raises:
        CalledProcessError: it failed; its message is on the terminal.
    """
    file, command = out.with_suffix(".json"), [*arguments, f"output_dir={out}"]
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known.get("command") != command:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "spec_lab", *command], check=True)
        known = {"seconds": time.perf_counter() - began, "command": command}
        file.write_text(json.dumps(known))
    return float(known["seconds"])


def recommended(out: Path, options: Sequence[str], minutes: float) -> tuple[dict[str, Any], float]:
    """Recommend a mode; return the summary and the seconds."""
    seconds = timed(out, "recommend", *options, f"minutes={minutes:g}")
    return json.loads((out / "summary.json").read_text()), seconds


def exhaustive(out: Path, options: Sequence[str], refused: Sequence[str]) -> tuple[SpeculativeMode | None, float]:
    """Measure every mode of the grid that the target supports; return the fastest, None: the baseline, and the seconds.

    Args:
        out: the run's folder.
        options: target, text and temperature.
        refused: names of modes that the recommendation could not run; their proposers are left out.
    """
    without = {name.partition(" ")[0] for name in refused}
    modes = {arm: mode for arm, mode in grid().items() if mode.proposer not in without}
    named = [text for arm, mode in modes.items() for text in arm_options(arm, mode.overrides)]
    took = timed(out, *options, "proposer=none", *named, "name=exhaustive", "record=none")
    requests = metrics.load(out).requests
    return modes.get(max([BASELINE, *modes], key=lambda arm: metrics.tokens_per_second(requests, arm))), took


def compared(
    out: Path, options: Sequence[str], arms: Mapping[str, Sequence[str]], skipped: int
) -> dict[tuple[str, str], metrics.Interval]:
    """Return the speed of each arm over the baseline's, and of the recommended mode over the fastest's.

    Args:
        out: the run's folder.
        options: target, text and temperature, with all prompts.
        arms: options of the two modes by name; empty for autoregressive decoding, whose arm is the baseline.
        skipped: prompts from the first that do not count: the modes were chosen on them.
    """
    named = [text for arm, overrides in arms.items() for text in arm_options(arm, overrides)]
    timed(out, *options, "proposer=none", *named, "name=compared", "record=none")
    requests = metrics.load(out).requests
    requests = requests[requests["request"] >= skipped]
    names = {arm: arm if overrides else BASELINE for arm, overrides in arms.items()}
    pairs = [(RECOMMENDED, FASTEST), (RECOMMENDED, BASELINE), (FASTEST, BASELINE)]
    return {(a, b): speed_over(requests, names[a], names.get(b, b)) for a, b in pairs}


def row_of(folder: Path, chosen: argparse.Namespace, target: str, text: str, temperature: int) -> dict[str, Any]:
    """Measure a setting; return its row of ``results.csv``."""
    few = [f"prompts.limit={chosen.limit}"]
    options = [*TARGETS[target], f"prompts={text}", f"sampling.temperature={temperature}"]
    options += [f"max_new_tokens={chosen.new}", f"threads={chosen.threads}"]
    runs_of = [recommended(folder / f"recommend_{n}", [*options, *few], chosen.minutes) for n in range(chosen.times)]
    summary, seconds = runs_of[0]
    names = [summary["recommended"]["mode"] for summary, _ in runs_of]
    refused = [line["mode"] for line in summary["refused"] if "the time ended" not in line["reason"]]
    fastest, exhaustive_seconds = exhaustive(folder / "exhaustive", [*options, *few], refused)
    arms = {
        RECOMMENDED: [] if names[0] == NONE else summary["recommended"]["overrides"],
        FASTEST: [] if fastest is None else fastest.overrides,
    }
    all_prompts = f"prompts.limit={(1 + OTHERS) * chosen.limit}"
    ratios = compared(folder / "compared", [*options, all_prompts], arms, chosen.limit)
    row: dict[str, Any] = {
        "target": target, "text": text, "temperature": temperature, "prompts": chosen.limit, "tokens": chosen.new,
        "recommended": names[0], "fastest": NONE if fastest is None else fastest.name,
    }  # fmt: skip
    for name, (arm, reference) in {
        "share": (RECOMMENDED, FASTEST), "speedup": (RECOMMENDED, BASELINE), "fastest_speedup": (FASTEST, BASELINE),
    }.items():  # fmt: skip
        row |= bounds(name, ratios[arm, reference])
    took = {"seconds": seconds, "exhaustive_seconds": exhaustive_seconds}
    return row | took | {"same_choice": names.count(names[0]), "times": chosen.times}


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
    file = chosen.out / "results.csv"
    table = pd.read_csv(file) if file.is_file() else pd.DataFrame(columns=KEYS)
    for setting in product(chosen.targets, chosen.texts, TEMPERATURES):
        if (table[KEYS] == list(setting)).all(axis=1).any():
            continue
        row = row_of(chosen.out / "_".join(map(str, setting)), chosen, *setting)
        table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
        table.to_csv(file, index=False)


if __name__ == "__main__":
    main()
