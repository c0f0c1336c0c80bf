"""Figures for papers and for a run's end, drawn by matplotlib from the tables of ``spec_lab.analysis.metrics.frames``.

``draw`` makes the three that every run leaves behind; ``draw_all`` all of a run, ``draw_sweep`` those of a sweep. Each
figure is also a function of its own that returns a matplotlib ``Figure``, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures.layout import Place, lay_out
from spec_lab.analysis.figures.of_run import acceptance, accepted_trees, cost, phases, throughput, tokens
from spec_lab.analysis.figures.of_sweep import MOST_RUNS, forest, lines, lines_file, worth, worth_file
from spec_lab.analysis.figures.style import BASELINE, COLOURS, GREY, PHASES, SEQUENCE, STYLE, colours, short
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.core.files import own_folder, replacing

__all__ = [
    "BASELINE",
    "COLOURS",
    "GREY",
    "MOST_RUNS",
    "PHASES",
    "SEQUENCE",
    "STYLE",
    "Place",
    "acceptance",
    "accepted_trees",
    "colours",
    "cost",
    "draw",
    "draw_all",
    "draw_sweep",
    "forest",
    "lay_out",
    "lines",
    "lines_file",
    "phases",
    "short",
    "throughput",
    "tokens",
    "worth",
    "worth_file",
]

PAPERS = ("png", "svg")


def draw(tables: Tables, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw acceptance, throughput and phases, those that the run has data for; returns the files."""
    return _save({one.__name__: partial(one, tables) for one in (acceptance, throughput, phases)}, folder, formats)


def draw_all(
    tables: Tables, folder: Path, trees: Mapping[str, Collection[Ranks]] | None = None, formats: Sequence[str] = PAPERS
) -> list[Path]:
    """Draw every figure that the run has data for; returns the files.

    Args:
        tables: the run's rows.
        folder: where the files go.
        trees: the arms' static draft trees, as paths of ranks.
        formats: of the files.
    """
    plain = {one.__name__: partial(one, tables) for one in (acceptance, throughput, phases, tokens, cost)}
    return _save(plain | {"accepted_trees": partial(accepted_trees, tables, trees or {})}, folder, formats)


def draw_sweep(table: pd.DataFrame, keys: Sequence[str], folder: Path, formats: Sequence[str] = PAPERS) -> list[Path]:
    """Draw the figures of a sweep that there is data for; returns the files.

    Args:
        table: of ``spec_lab.results.sweep.collect``.
        keys: its columns that are options.
        folder: where the files go: ``speedups``, ``worth_<key>`` for each varied option (``worth_arm`` for several
            arms), and ``along_<key>`` for each swept number.
        formats: of the files.
    """
    wanted: dict[str, Callable[[], Figure | None]] = {"speedups": partial(forest, table, keys)}
    for by in frames.worth(table, keys)[1]:
        wanted[worth_file(by)] = partial(worth, table, keys, by)
    for key in frames.numeric(table, keys):
        wanted[lines_file(key)] = partial(lines, table, keys, key)
    return _save(wanted, folder, formats)


def _save(wanted: Mapping[str, Callable[[], Figure | None]], folder: Path, formats: Sequence[str]) -> list[Path]:
    own_folder(folder)
    # Compressing hard takes longer than drawing. Without a date the same rows give the same file.
    extra: dict[str, dict[str, Any]] = {
        "png": {"pil_kwargs": {"compress_level": 3}},
        "svg": {"metadata": {"Date": None}},
    }
    drawn = []
    with rc_context(STYLE):
        for name, make in wanted.items():
            figure = make()
            if figure is not None:
                for form in formats:
                    drawn.append(folder / f"{name}.{form}")
                    with replacing(drawn[-1]) as stream:
                        figure.savefig(stream, format=form, **extra.get(form, {}))
    return drawn
