"""The table and the figure of the distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis import figures

GUARANTEES = {
    "exact": "every valid output enumerated; exact up to the rounding of the target's probabilities",
    "rejection": "global outputs are independent exact samples, unless task.attempts ended the sampling (then their "
    "number depends on them, and estimates can be biased); distances are estimates with 95 % bootstrap intervals",
    "expected_futures": "global outputs are exact only in the limit of many samples; distances are approximations",
}
"""What is exact and what is not, by method or sampler."""


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print ``summary.json`` as a table."""
    name = summary["constraint"]["name"]
    console.print(
        f"{summary['experiment']}: {name}, masked token by token (local) against the model given a valid output "
        f"(global), temperature {summary['temperature']:g}, up to {summary['max_new_tokens']} tokens",
        style="bold",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt")
    for heading in ("method", "outputs", "Z", "invalid", "TV", "KL"):
        table.add_column(heading, justify="right")
    for row in summary["prompts"]:
        if row["method"] == "none":
            table.add_row(row["prompt"], "none", row["error"])
            continue
        outputs = str(row["outputs"]) if row["method"] == "exact" else f"{row['global_samples']} of {row['attempts']}"
        z = _number(row["z"]["mean"] if isinstance(row["z"], Mapping) else row["z"])  # its interval is in the summary
        tv, kl = (_number(row.get(key)) for key in ("tv", "kl"))
        table.add_row(row["prompt"], row.get("sampler", "exact"), outputs, z, f"{row['local_invalid']:.1%}", tv, kl)
    console.print(table)
    console.print(
        "Z: probability of a valid output without the constraint; invalid: share of masked outputs that do not end "
        "within max_new_tokens; TV: total variation; KL: KL(global || local) in nats.",
        highlight=False,
    )
    if cut := [row["prompt"] for row in summary["prompts"] if row.get("stopped_by_attempts")]:
        console.print(
            f"task.attempts ended the sampling of {', '.join(cut)} before there were task.samples global outputs.",
            highlight=False, markup=False,
        )  # fmt: skip
    for used in dict.fromkeys(row.get("sampler", row["method"]) for row in summary["prompts"]):
        if used in GUARANTEES:
            console.print(f"{used}: {GUARANTEES[used]}.", highlight=False)


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{_number(value['mean'])} [{_number(value['low'])}, {_number(value['high'])}]"
    return "" if value is None else f"{value:.3g}"


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the total variation of every prompt; nothing where none was measured."""
    figure = figures.distance(rows)
    return [] if figure is None else figures.save({"distance": figure}, folder, ("png",))
