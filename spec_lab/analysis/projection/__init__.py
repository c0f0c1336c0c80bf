"""The speed-up of recorded designs on other hardware: recorded acceptance, and a model of cost. No model is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import STYLE, file_name, save
from spec_lab.analysis.figures.projection import best_designs, speedups_by_batch_and_length
from spec_lab.analysis.projection.acceptance import Acceptance, RecordedDesign, recorded
from spec_lab.analysis.projection.console_tables import notes, show
from spec_lab.analysis.projection.deployments import deployments_of, measured_deployment
from spec_lab.analysis.projection.overlap import Overlap
from spec_lab.analysis.projection.project import Deployment, Prefill, break_even, project, speedup
from spec_lab.analysis.projection.run_costs import measured_forwards, verdict_of_costs
from spec_lab.core.files import Unreadable, expect, own_folder, read_json, write_json, write_text
from spec_lab.core.options import brief

__all__ = [
    "Acceptance",
    "Deployment",
    "Overlap",
    "Prefill",
    "RecordedDesign",
    "break_even",
    "deployments_of",
    "draw",
    "measured_deployment",
    "measured_forwards",
    "notes",
    "project",
    "recorded",
    "show",
    "speedup",
    "verdict_of_costs",
    "write",
]

FORMATS = ("png", "svg")


def draw(cells: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures: the fastest design by device and batch, and a heat map of each design with several lengths.

    Args:
        cells: of ``project``.
    """
    with rc_context(STYLE):
        made: dict[str, Figure | None] = {"best": best_designs(cells)}
        for design, of_design in cells.groupby("design", sort=False):
            if of_design["length"].nunique() > 1:
                made[file_name("speedup", str(design))] = speedups_by_batch_and_length(cells, str(design))
    return {name: figure for name, figure in made.items() if figure is not None}


INDEX = "projection.json"
"""Lists the files of a folder that a projection has written."""

OWN = re.compile(r"(projection|break_even)\.csv|(best|speedup_[\w.@-]+)\.(png|svg)")
"""Names of files that are written; nothing else in a folder is ever removed, whatever its index lists."""


def write(cells: pd.DataFrame, even: pd.DataFrame, folder: Path) -> list[Path]:
    """Write ``projection.csv``, ``break_even.csv`` and the figures (PNG, SVG) into a folder; returns the files.

    Files that an earlier projection wrote there, as ``projection.json`` lists them, are removed unless replaced. Each
    file is replaced atomically, and the list names every file that is there, also when writing is interrupted.

    Raises:
        ValueError: ``projection.json`` is not such a list.
        OSError: it cannot be written.
    """
    own_folder(folder)
    tables = {"projection.csv": cells, "break_even.csv": even}
    figures = draw(cells)
    names = [*tables, *(f"{name}.{form}" for name in figures for form in FORMATS)]
    earlier = _written(folder)
    write_json(folder / INDEX, {"files": list(dict.fromkeys([*names, *earlier]))})
    for name, frame in tables.items():
        write_text(folder / name, frame.to_csv(index=False, float_format="%.6g"))
    save(figures, folder, FORMATS)
    for name in earlier:
        if name not in names:
            (folder / name).unlink(missing_ok=True)
    write_json(folder / INDEX, {"files": names})
    return [folder / name for name in names]


def _written(folder: Path) -> list[str]:
    """Return the names of the files that an earlier projection has written into a folder."""
    there = read_json(folder / INDEX)
    if there is None:
        return []
    try:
        expect(there, {"files": [str]}, "")
        if wrong := [name for name in there["files"] if not OWN.fullmatch(name)]:
            raise ValueError(f"no projection writes {brief(wrong[0])}")
    except ValueError as error:
        why = f"is no list of a projection's files ({error}); choose another --out"
        raise Unreadable(f"{folder / INDEX} {why}") from error
    return list(there["files"])
