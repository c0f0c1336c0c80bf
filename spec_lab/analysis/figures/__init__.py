# ruff: noqa: F401
"""Figures for papers, for a run's end and for the report, drawn by matplotlib from tidy tables of ``metrics``.

``draw`` makes the three figures that every run writes; ``run_figures`` all of a run, ``sweep_figures`` those of a
sweep, ``save`` writes files, ``svg`` returns a figure for a web page. Each figure is also a function of its own that
returns a matplotlib ``Figure``, or None where there is nothing to draw.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures.certificate import convergence, detectable, pair_name
from spec_lab.analysis.figures.comparison import MAX_CHANGES, changes
from spec_lab.analysis.figures.cost import step_costs
from spec_lab.analysis.figures.distance import distance
from spec_lab.analysis.figures.latency import latency
from spec_lab.analysis.figures.palette import (
    BASELINE,
    COLOURS,
    GREY,
    PHASES,
    PROPOSERS,
    SEQUENCE,
    colour,
    colours,
    option_colours,
)
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
from spec_lab.analysis.figures.style import SPEEDUP, STYLE, short
from spec_lab.analysis.figures.sweep import MAX_ROWS, forest, lines, tau_and_speedup
from spec_lab.analysis.figures.themed import svg
from spec_lab.analysis.figures.training import held_out, learning
from spec_lab.analysis.figures.verifiers import verifier_figures, verifier_label
from spec_lab.analysis.metrics import Tables, sweeps
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.core.files import own_folder, replacing

Figures = dict[str, Figure]
"""Figures by the name of their file, without ending."""


def draw(tables: Tables, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw acceptance, throughput and phases, where the run has data for them; returns the files."""
    return save(
        _drawn({one.__name__: partial(one, tables) for one in (acceptance, throughput, phases)}), folder, formats
    )


def run_figures(
    tables: Tables,
    trees: Mapping[str, Collection[Ranks]] | None = None,
    bounds: Mapping[str, Mapping[str, Any]] | None = None,
) -> Figures:
    """Draw every figure that the run has data for.

    Args:
        tables: the run's rows.
        trees: the arms' static draft trees, as paths of child ranks.
        bounds: of arms whose distributions were recorded, as in ``summary.json``.
    """
    plain = {one.__name__: partial(one, tables) for one in (throughput, acceptance, tokens, phases, cost)}
    more = {"accepted_trees": partial(accepted_trees, tables, trees), "lost": partial(lost, bounds or {})}
    return _drawn(plain | more)


def sweep_figures(table: pd.DataFrame, keys: Sequence[str]) -> Figures:
    """Draw the figures of a sweep that there is data for.

    Args:
        table: of ``spec_lab.results.sweep.collect``.
        keys: its columns that are options.

    Returns:
        ``speedups``; ``tau_speedup_<key>`` for each varied option (``tau_speedup_arm`` for several arms); and
        ``by_<key>`` for each numeric option (``file_name``).
    """
    makers: dict[str, Callable[[], Figure | None]] = {"speedups": partial(forest, table, keys)}
    for by in sweeps.tau_and_speedup(table, keys)[1]:
        makers[file_name("tau_speedup", by)] = partial(tau_and_speedup, table, keys, by)
    for key in sweeps.numeric(table, keys):
        makers[file_name("by", key)] = partial(lines, table, keys, key)
    return _drawn(makers)


def training_figures(curve: Sequence[Mapping[str, Any]]) -> Figures:
    """Draw the figures of a training that there is data for, from the lines of ``training/learning.jsonl``."""
    return _drawn({one.__name__: partial(one, curve) for one in (learning, held_out)})


def certificate_figures(certificate: Mapping[str, Any]) -> Figures:
    """Draw the figures of a certificate that there is data for, from ``certificate.json``."""
    curves = certificate.get("convergence")
    makers: dict[str, Callable[[], Figure | None]] = {"detectable": partial(detectable, certificate["pairs"])}
    return _drawn(({"convergence": partial(convergence, curves)} if curves else {}) | makers)


def file_name(figure: str, key: str) -> str:
    """Return the name, without ending, of a figure's file for one option."""
    return figure + "_" + re.sub(r"[^\w.@-]", "_", key)


def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write each figure in each format; returns the files."""
    own_folder(folder)
    # Strong compression takes longer than drawing. Without a date the same rows give the same file.
    options: dict[str, dict[str, Any]] = {
        "png": {"pil_kwargs": {"compress_level": 3}},
        "svg": {"metadata": {"Date": None}},
    }
    files = [(folder / f"{name}.{form}", form, figure) for name, figure in figures.items() for form in formats]
    with rc_context(STYLE):
        for file, form, figure in files:
            with replacing(file) as stream:
                figure.savefig(stream, format=form, **options.get(form, {}))
    return [file for file, *_ in files]


def _drawn(makers: Mapping[str, Callable[[], Figure | None]]) -> Figures:
    """Return the figures that have something to draw."""
    made = {name: make() for name, make in makers.items()}
    return {name: figure for name, figure in made.items() if figure is not None}
