"""The speed-up of recorded designs on other hardware: recorded acceptance, and a model of cost. No model is loaded."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import STYLE, file_name, save
from spec_lab.analysis.figures.projection import best_designs, speedups_by_batch_and_length
from spec_lab.analysis.projection.acceptance import Acceptance, RecordedDesign, recorded
from spec_lab.analysis.projection.deployments import deployments_of, measured_deployment
from spec_lab.analysis.projection.project import Deployment, Prefill, break_even, project, speedup
from spec_lab.analysis.projection.show import notes, show
from spec_lab.core.files import own_folder, write_text

__all__ = [
    "Acceptance",
    "Deployment",
    "Prefill",
    "RecordedDesign",
    "break_even",
    "deployments_of",
    "draw",
    "measured_deployment",
    "notes",
    "project",
    "recorded",
    "show",
    "speedup",
    "write",
]


def draw(cells: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures: the fastest design by device and batch, and a heat map of each design with several lengths.

    Args:
        cells: of ``project``.
    """
    with rc_context(STYLE):
        made: dict[str, Figure | None] = {"best": best_designs(cells)}
        for design, own in cells.groupby("design", sort=False):
            if own["length"].nunique() > 1:
                made[file_name("speedup", str(design))] = speedups_by_batch_and_length(cells, str(design))
    return {name: figure for name, figure in made.items() if figure is not None}


def write(cells: pd.DataFrame, even: pd.DataFrame, folder: Path) -> list[Path]:
    """Write ``projection.csv``, ``break_even.csv`` and the figures (PNG, SVG) into a folder; returns the files.

    Raises:
        OSError: it cannot be written.
    """
    own_folder(folder)
    files = [folder / "projection.csv", folder / "break_even.csv"]
    for file, frame in zip(files, (cells, even), strict=True):
        write_text(file, frame.to_csv(index=False, float_format="%.6g"))
    return files + save(draw(cells), folder, ("png", "svg"))
