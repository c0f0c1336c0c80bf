# ruff: noqa: F401
"""Figures for papers, for a run's end and for the report, drawn by matplotlib from tidy tables of ``metrics``.

``save`` writes files, ``svg`` returns a figure for a web page. Each figure is a function that
returns a matplotlib ``Figure``, or None where there is nothing to draw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures.certificate import convergence, detectable, pair_name
from spec_lab.analysis.figures.comparison import changes
from spec_lab.analysis.figures.cost import step_costs
from spec_lab.analysis.figures.distance import distance
from spec_lab.analysis.figures.drafter_check import by_depth, reading_taus, reliability
from spec_lab.analysis.figures.latency import latency
from spec_lab.analysis.figures.palette import (
    BASELINE,
    COLOURS,
    GREY,
    PHASES,
    PROPOSERS,
    colour,
    colours,
    option_colours,
)
from spec_lab.analysis.figures.ranges import by_range
from spec_lab.analysis.figures.run import (
    NodePosition,
    acceptance,
    accepted_trees,
    cost,
    lost,
    phases,
    throughput,
    tokens,
    tree_layout,
)
from spec_lab.analysis.figures.style import SPEEDUP, STYLE
from spec_lab.analysis.figures.sweep import MAX_ROWS, forest, lines, tau_and_speedup
from spec_lab.analysis.figures.themed import svg
from spec_lab.analysis.figures.training import held_out, learning
from spec_lab.analysis.figures.verifiers import verifier_label, verifier_panels
from spec_lab.core.files import own_folder, replacing
from spec_lab.results.result import no_figure

Figures = dict[str, Figure]
"""Figures by the name of their file, without ending."""


def file_name(figure: str, key: str) -> str:
    """Return the name, without ending, of a figure's file for one option."""
    return figure + "_" + re.sub(r"[^\w.@-]", "_", key)


def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write each figure in each format; returns the files. One that cannot be rendered is left out, with a warning.

    Raises:
        OSError: a file cannot be written.
    """
    own_folder(folder)
    # Strong compression takes longer than drawing. Without a date the same rows give the same file.
    options: dict[str, dict[str, Any]] = {
        "png": {"pil_kwargs": {"compress_level": 3}},
        "svg": {"metadata": {"Date": None}},
    }
    files: list[Path] = []
    with rc_context(STYLE):
        for name, figure in figures.items():
            each = [folder / f"{name}.{form}" for form in formats]
            try:
                for file, form in zip(each, formats, strict=True):
                    with replacing(file) as stream:
                        figure.savefig(stream, format=form, **options.get(form, {}))
            except OSError:
                raise
            except Exception as error:  # matplotlib parses some texts only when it draws
                no_figure(name, error)
            else:
                files += each
    return files
