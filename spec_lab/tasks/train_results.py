"""The printed summary and the figures of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis import figures


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the acceptance at each draft position, and the estimated and measured lengths."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{summary['drafter']} on held-out prompts", title_justify="left")
    for name in ("draft position", "drafted token accepted", "likeliest token agrees"):
        table.add_column(name, justify="right")
    for number, (accepted, agreed) in enumerate(zip(summary["accepted"], summary["agreed"], strict=True), start=1):
        table.add_row(str(number), f"{accepted:.3f}", f"{agreed:.3f}")
    console.print(table)
    console.print(
        f"Accepted tokens of a chain of {len(summary['accepted'])} at temperature {summary['temperature']:g}: "
        f"{summary['estimated_length']:.2f} estimated from these without decoding, {summary['measured_length']:.2f} "
        f"measured. {summary['steps']} steps on {summary['texts']} texts, {summary['parameters'] / 1e6:.2f} M "
        "parameters.",
        highlight=False,
    )


def draw(curve: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the learning curve, and the acceptance on held-out prompts by time; return the files."""
    return figures.save(figures.training_figures(curve), folder, ("png",))
