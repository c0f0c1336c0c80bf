"""The result of ``task=train``: what the drafter learned, and how much of its drafts is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.core.files import Unreadable, expect, read_text
from spec_lab.core.terminal import short_path
from spec_lab.results.result import DataTable, Result, Section, cell, read_run, run_title, target_name

SUMMARY = {
    "drafter": str, "sha256": str, "texts": int, "steps": int, "parameters": int, "temperature": float,
    "accepted": [float], "agreed": [float], "estimated_length": float, "measured_length": float,
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

LINE = {
    "step": int, "texts": int, "seconds": float, "loss": [float], "accepted": [float], "agreed": [float],
    "length_at_1": float, "length_greedy": float,
    "?held_out": {"accepted": [float], "agreed": [float], "accepted_length": float, "agreed_length": float},
}  # fmt: skip
"""A line of ``training/learning.jsonl``, and of the same in ``summary.json``."""

HELD_OUT = (
    "Held-out prompts: the drafter learns nothing from their answers. Accepted: the chance that the drafted token at "
    "this position is accepted if all before it were; agrees: the likeliest token of the drafter is the target's. The "
    "length is the mean number of accepted tokens of a chain: estimated from the acceptance at each position without "
    "decoding, and measured by decoding. At temperature 0 the estimate uses what agrees."
)
LEARNING = "On the texts that the drafter learns from: means since the line before, by draft position."


def result(folder: Path) -> Result:
    """Return the result in a run's directory. A training may still be running.

    Raises:
        ValueError: files that are not readable; no training has begun.
    """
    (manifest, summary), curve = read_run(folder, SUMMARY), learning_curve(folder)
    if not curve and not summary:
        raise ValueError(f"{folder} has no line in training/learning.jsonl: the target is still answering the prompts")
    config, drafter = manifest["config"], short_path(folder.absolute() / "drafter")
    task = config.get("task") or {}
    name = summary.get("drafter") or (manifest["arms"] or ["drafter"])[0]
    target = target_name(manifest)
    steps = summary.get("steps") or curve[-1]["step"]
    table, lengths, about = None, [], [f"It is written to {drafter} when the training ends."]
    if summary:
        both = zip(summary["accepted"], summary["agreed"], strict=False)
        rows = [[cell(depth, ".0f"), *(cell(share, ".3f") for share in each)] for depth, each in enumerate(both, 1)]
        names = ("draft position", "drafted token accepted", "likeliest token agrees")
        table = DataTable([(name, True) for name in names], rows)
        lengths = [
            f"Accepted tokens of a chain of {len(summary['accepted'])} at temperature {summary['temperature']:g}: "
            f"{summary['estimated_length']:.2f} estimated, {summary['measured_length']:.2f} measured."
        ]
        about = [
            f"Weights: {drafter} (the folder drafter beside this page), "
            f"{summary['parameters'] / 1e6:.2f} M parameters, trained on {summary['texts']} texts.",
            f"SHA-256: {summary['sha256']}",
        ]
    return Result(
        run_title(manifest),
        f"training of {name}{f' for {target}' if target else ''}, {steps} steps",
        [
            Section("Acceptance on held-out prompts", HELD_OUT, table, {"held_out": partial(figures.held_out, curve)},
                    lengths, missing="No line of the learning curve has a measurement on held-out prompts."),
            Section("Learning curve", LEARNING, None, {"learning": partial(figures.learning, curve)},
                    missing="No line of the learning curve is on disk yet."),
            Section("The drafter", notes=about),
        ],
        warnings=[] if summary else [f"This training has not ended: {steps} steps are on disk and shown here."],
        facts={
            "recipe": _options(task.get("recipe") or {}),
            "training": _options({key: value for key, value in task.items() if key != "recipe"}),
            "texts": summary.get("texts"),
        },
    )  # fmt: skip


def learning_curve(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the lines of ``training/learning.jsonl``; empty without the file.

    Raises:
        Unreadable: a line is not one of a learning curve.
    """
    file = folder / "training" / "learning.jsonl"
    try:
        lines = [json.loads(line) for line in read_text(file).splitlines()] if file.is_file() else []
        expect(lines, [LINE], "")
        measured = [*lines, *(line["held_out"] for line in lines if "held_out" in line)]
        depths = {len(line[key]) for line in measured for key in ("loss", "accepted", "agreed") if key in line}
        if len(depths) > 1:
            raise ValueError("its lines have different numbers of draft positions")
    except (ValueError, RecursionError) as error:
        raise Unreadable(
            f"{file} is not a learning curve ({error}); run the same command again to write it anew"
        ) from error
    return lines


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if key != "_target_" and value is not None)
