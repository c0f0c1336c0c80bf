"""The page about a training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.report.facts import page_of_run, read_summary
from spec_lab.analysis.report.page import DataTable, Section, render, short_path, value_cell
from spec_lab.core.files import Unreadable, expect, read_text
from spec_lab.results.manifest import begun

SUMMARY = {
    "drafter": str, "sha256": str, "texts": int, "steps": int, "parameters": int, "temperature": float,
    "accepted": [float], "agreed": [float], "estimated_length": float, "measured_length": float,
}  # fmt: skip
"""What is read of ``summary.json``."""

LINE = {
    "step": int, "seconds": float, "loss": [float], "accepted": [float], "agreed": [float],
    "?held_out": {"accepted": [float], "agreed": [float], "accepted_length": float, "agreed_length": float},
}  # fmt: skip
"""What is read of a line of ``training/learning.jsonl``."""

HELD_OUT = (
    "Held-out prompts: the drafter learns nothing from their answers. Accepted: the chance that the drafted token at "
    "this position is accepted if all before it were; agrees: the likeliest token of the drafter is the target's. The "
    "length is the mean number of accepted tokens of a chain: estimated from the acceptance at each position without "
    "decoding, and measured by decoding. At temperature 0 the estimate uses what agrees."
)


def page(folder: Path) -> str:
    """Return the page's text; writes the figures to ``figures/`` as well. A training may still be running.

    Raises:
        ValueError: files that are not readable; no training has begun.
    """
    manifest, summary = begun(folder) or {}, read_summary(folder, SUMMARY)
    curve = learning_curve(folder)
    if not curve and not summary:
        raise ValueError(f"{folder} has no line in training/learning.jsonl: the target is still answering the prompts")
    config = manifest["config"]
    task = config.get("task") or {}
    recipe = task.get("recipe") or {}
    name = summary.get("drafter") or (manifest["arms"] or ["drafter"])[0]
    target = short_path((config.get("target") or {}).get("path"))
    steps = summary.get("steps") or curve[-1]["step"]
    content = page_of_run(
        folder,
        manifest,
        lead=f"Training of {name}{f' for {target}' if target else ''}, {steps} steps",
        warnings=[] if summary else [f"This training has not ended: {steps} steps are on disk and shown here."],
        drawn=figures.training_figures(curve),
        recipe=_options(recipe),
        training=_options({key: value for key, value in task.items() if key != "recipe"}),
        texts=summary.get("texts"),
    )
    sections = [
        Section("Acceptance on held-out prompts", HELD_OUT, _positions(summary), ["held_out"], _lengths(summary),
                missing="No line of the learning curve has a measurement on held-out prompts."),
        Section("Learning curve", "On the texts that the drafter learns from: means since the line before, by draft "
                "position.", None, ["learning"], missing="No line of the learning curve is on disk yet."),
        Section("The drafter", "", None, notes=_drafter(folder, summary)),
    ]  # fmt: skip
    return render("sections", content, folder, sections=sections)


def learning_curve(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``training/learning.jsonl``; empty without the file.

    Raises:
        Unreadable: a line is not one of a learning curve.
    """
    file = folder / "training" / "learning.jsonl"
    try:
        lines = [json.loads(line) for line in read_text(file).splitlines()] if file.is_file() else []
        expect(lines, [LINE], "")
        if lines:
            depths = {len(line[key]) for line in lines for key in ("loss", "accepted", "agreed")}
            depths |= {
                len(line["held_out"][key]) for line in lines if "held_out" in line for key in ("accepted", "agreed")
            }
            if len(depths) != 1:
                raise ValueError("its lines have different numbers of draft positions")
    except (ValueError, RecursionError) as error:
        raise Unreadable(
            f"{file} is not a learning curve ({error}); run the same command again to write it anew"
        ) from error
    return lines


def _positions(summary: Mapping[str, Any]) -> DataTable | None:
    if not summary:
        return None
    both = zip(summary["accepted"], summary["agreed"], strict=False)
    rows = [[value_cell(place, ".0f"), value_cell(one, ".3f"), value_cell(other, ".3f")]
            for place, (one, other) in enumerate(both, start=1)]  # fmt: skip
    names = ("draft position", "drafted token accepted", "likeliest token agrees")
    return DataTable([(name, True) for name in names], rows)


def _lengths(summary: Mapping[str, Any]) -> list[str]:
    if not summary:
        return []
    return [
        f"Accepted tokens of a chain of {len(summary['accepted'])} at temperature {summary['temperature']:g}: "
        f"{summary['estimated_length']:.2f} estimated, {summary['measured_length']:.2f} measured."
    ]


def _drafter(folder: Path, summary: Mapping[str, Any]) -> Sequence[str]:
    if not summary:
        return [f"It is written to {short_path(folder.absolute() / 'drafter')} when the training ends."]
    return [
        f"Weights: {short_path(folder.absolute() / 'drafter')} (the folder drafter beside this page), "
        f"{summary['parameters'] / 1e6:.2f} M parameters, trained on {summary['texts']} texts.",
        f"SHA-256: {summary['sha256']}",
    ]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if key != "_target_" and value is not None)
