"""The printed summary and the figure of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis.figures import COLOURS, STYLE
from spec_lab.core.files import own_folder, replacing


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
    """Draw loss, acceptance and agreement at each draft position over the steps; return the file."""
    if not curve:
        return []
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots(1, 3)
        steps = [line["step"] for line in curve]
        names = (("loss", "loss, nats"), ("accepted", "chance that a drafted token is accepted"),
                 ("agreed", "share of likeliest tokens that agree"))  # fmt: skip
        for axis, (key, label) in zip(axes, names, strict=True):
            for position in range(len(curve[0][key])):
                shade = 1 - 0.8 * position / max(1, len(curve[0][key]))
                values = [line[key][position] for line in curve]
                axis.plot(steps, values, color=COLOURS[0], alpha=shade, label=str(position + 1))
            axis.set_xlabel("training step")
            axis.set_ylabel(label)
        axes[-1].legend(title="draft position", fontsize="x-small", ncols=2)
    own_folder(folder)
    path = folder / "learning.png"
    with rc_context(STYLE), replacing(path) as stream:
        figure.savefig(stream, bbox_inches="tight")
    return [path]
