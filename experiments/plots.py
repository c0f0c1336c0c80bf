"""Common parts of the studies' scripts: a sweep's table, paired comparisons, plots, and tables in Markdown.

Every study's ``figure.py`` reads the files of its runs and writes ``results.csv``, a PNG and the table of its README.
A figure's title states its finding in the results that are stored; one that is not computed from them must be checked
after a new measurement.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.figures import GREY, STYLE
from spec_lab.analysis.metrics.paired import Totals, acceptance_totals, change, speedup_totals
from spec_lab.analysis.roofline_text import baselines_in_words
from spec_lab.results.sweep import collect, runs

NAMES = {
    "medusa": "Medusa tree",
    "chain": "draft chain",
    "draft_chain": "draft chain",
    "tree": "draft tree",
    "draft_tree": "draft tree",
    "ngram": "n-gram",
    "ngram_chain": "n-gram",
    "ngram_tree": "n-gram tree",
    "eagle3": "EAGLE-3",
    "eagle1": "EAGLE-1",
    "mtp": "MTP",
    "hydra": "Hydra",
    "pard": "PARD",
    "draft": "draft model",
    "suffix": "suffix",
    "sam": "SAM",
    "rest": "REST",
    "pld_plus": "PLD+",
    "recycling": "token recycling",
    "lookahead": "lookahead",
    "jacobi": "Jacobi",
    "early_exit": "early exit",
    "sparse_kv": "small KV cache",
    "triforce": "TriForce",
    "kangaroo": "Kangaroo",
    "skip": "skipped sublayers",
    "cascade": "cascade",
    "lookup": "transformers, prompt lookup",
    "assisted": "transformers, assisted",
}
"""Names of the arms in figures and tables."""

COLOURED_AS = {
    "chain": "draft_chain", "confident": "draft_chain", "draft": "draft_chain", "tree": "draft_tree", "eagle1": "eagle",
}  # fmt: skip
"""Arms of other names than their proposers, whose colours they have."""

PROPOSERS = ("medusa", "draft_chain", "draft_tree", "ngram_chain", "ngram_tree")
"""The bundled proposers, in the order of the tables."""

WORKLOADS = ("code", "json", "prose", "repetitive")


def swept(sweep: Path) -> pd.DataFrame:
    """Return the rows of ``sweep.collect`` without the baselines'; the main arm has its proposer's name.

    Added columns: ``recorded``, the arm's name in the run's rows; ``baseline_repeated_8grams``, the share of repeated
    8-grams in the baseline's text.

    Raises:
        ValueError: the folder holds no sweep, or no run of it is done.
    """
    left = [run.folder.name for run in runs(sweep) if run.state != "done"]
    if left:
        print(f"{sweep}: {len(left)} runs are not done and left out: {', '.join(left)}")
    table = collect(sweep)
    if table.empty:
        raise ValueError(f"{sweep}: no run is done; run the sweep first")
    plain = table[table["arm"] == "baseline"].set_index("run")["repeated_8gram_share"]
    table = table[table["arm"] != "baseline"].copy()
    table["recorded"], table["baseline_repeated_8grams"] = table["arm"], table["run"].map(plain)
    return table.reset_index(drop=True)


# Paired comparisons ------------------------------------------------------------------------------------------------

RunArm = tuple[metrics.Tables, str]
"""An arm of a run."""


def tau_beyond(compared: RunArm, reference: RunArm, figure: str = "tau_pooled") -> metrics.Interval:
    """Return the difference of a figure between two arms, paired over prompts, so that a prompt's difficulty cancels.

    Args:
        compared, reference: the arms, of one run or of two with the same prompts.
        figure: of ``metrics.paired.FIGURES``.

    Raises:
        ValueError: runs of different prompts.
    """
    same_prompts(compared[0], reference[0])
    of = [acceptance_totals(metrics.decode_steps(tables.steps, arm))[figure] for tables, arm in (reference, compared)]
    both = of[0].index.union(of[1].index)
    before, after = (Totals(*totals.reindex(both, fill_value=0.0).to_numpy().T) for totals in of)
    return change(before, after, paired=True).interval()


def speed_over(requests: pd.DataFrame, arm: str, reference: str) -> metrics.Interval:
    """Return the geometric mean of an arm's tokens per second over another's in the same run, paired over groups."""
    logs = speedup_totals(requests, arm, reference)
    return factor(logs["top"].to_numpy())


def speedup_over(compared: RunArm, reference: RunArm) -> metrics.Interval:
    """Return the ratio of the speed-ups of two arms of different runs, each over its own run's baseline.

    It is the geometric mean of the groups' ratios.

    Raises:
        ValueError: runs of different prompts, or with other groups.
    """
    same_prompts(compared[0], reference[0])
    logs = [speedup_totals(tables.requests, arm)["top"] for tables, arm in (compared, reference)]
    grouped = [tables.requests.groupby("request")["group"].first() for tables, _ in (compared, reference)]
    if not grouped[0].equals(grouped[1]):
        raise ValueError(
            "the runs have different groups of prompts, so groups cannot be paired; use the same batch_size"
        )
    return factor((logs[0] - logs[1]).dropna().to_numpy())


def factor(logarithms: np.ndarray) -> metrics.Interval:
    """Return the geometric mean of factors, given as logarithms ``[N]``, with Student's t interval."""
    ones = np.ones(len(logarithms))
    nothing = Totals(np.zeros(len(logarithms)), ones)
    return change(nothing, Totals(logarithms, ones), paired=True, relative=True).interval()


def same_prompts(compared: metrics.Tables, other: metrics.Tables) -> None:
    """Check that two runs can be paired by prompts.

    Raises:
        ValueError: the runs decoded different prompts.
    """
    texts = [tables.requests.groupby("request")["prompt"].first() for tables in (compared, other)]
    if not texts[0].equals(texts[1]):
        raise ValueError("the runs decoded different prompts and cannot be paired; compare runs with the same prompts")


def versus(
    sweep: Path, table: pd.DataFrame, keys: Sequence[str], against: Mapping[str, Any], name: str
) -> pd.DataFrame:
    """Compare each row of ``table`` with the same arm of a reference run.

    Args:
        sweep: the sweep's directory.
        table: as returned by ``swept``.
        keys: the columns that identify a run.
        against: the reference's values in some of these columns; in the others it equals the row.
        name: name of the reference in the new columns.

    Returns:
        The table with ``tau_beyond_NAME``, ``expected_tau_beyond_NAME`` and ``speed_over_NAME``, each with the ends of
        its interval; NaN in the rows of the reference itself.

    Raises:
        ValueError: a row has no reference, or several.
    """
    read = {run: metrics.load(sweep / run) for run in table["run"].unique()}
    rows = []
    for row in table.to_dict("records"):
        where = {key: row[key] for key in (*keys, "arm")} | dict(against)
        reference = row_where(table, **where)
        if reference is None:
            raise ValueError(f"{sweep} has no run that is done with {where}, which others are compared with: run it")
        if reference["run"] == row["run"]:
            rows.append(row)
            continue
        two = (read[row["run"]], row["recorded"]), (read[reference["run"]], reference["recorded"])
        rows.append(
            row
            | bounds(f"tau_beyond_{name}", tau_beyond(*two))
            | bounds(f"expected_tau_beyond_{name}", tau_beyond(*two, figure="expected_tau"))
            | bounds(f"speed_over_{name}", speedup_over(*two))
        )
    columns = [f"{what}_{name}{end}" for what in VERSUS for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*table.columns, *columns])))


VERSUS = ("tau_beyond", "expected_tau_beyond", "speed_over")
"""The columns that ``versus`` adds."""


# Figures and tables ------------------------------------------------------------------------------------------------


def bounds(name: str, value: metrics.Interval) -> dict[str, float]:
    """Return a value and the ends of its interval, as columns."""
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def ordered(values: Sequence[Any], order: Sequence[Any]) -> list[Any]:
    """Return the distinct values: first those of ``order``, in its order, then the others as they appear."""
    distinct = list(dict.fromkeys(values))
    return [name for name in order if name in distinct] + [name for name in distinct if name not in order]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each arm: its proposer's in the package's table, the same in every study and report."""
    return {name: figures.colour(COLOURED_AS.get(name, name)) for name in names}


def band(row: Mapping[str, Any], column: str) -> tuple[float, float]:
    """Return the ends of a value's intervals; NaN where there is none."""
    return float(row.get(f"{column}_low", np.nan)), float(row.get(f"{column}_high", np.nan))


def line(axes: Axes, table: pd.DataFrame, x: str, y: str, colour: str, label: str, **look: Any) -> None:
    """Plot ``y`` against ``x`` with its 95 % band; each row of ``table`` is a point."""
    table = table.sort_values(x)
    axes.plot(table[x], table[y], color=colour, label=label, **{"marker": "o", "markersize": 4, **look})
    ends = np.array([band(row, y) for row in table.to_dict("records")], dtype=float).T
    axes.fill_between(table[x], *ends, color=colour, alpha=0.15, linewidth=0)


def forest(axes: Axes, table: pd.DataFrame, value: str, rows: str, lines: str, colour: Mapping[str, str]) -> None:
    """Plot a point with its 95 % interval for each row of ``table``; ``rows`` top to bottom, ``lines`` by colour."""
    down = list(dict.fromkeys(table[rows]))
    for number, (name, ink) in enumerate(colour.items()):
        for row in table[table[lines] == name].to_dict("records"):
            height = down.index(row[rows]) + (number - (len(colour) - 1) / 2) * 0.7 / len(colour)
            low, high = band(row, value)
            whiskers = [[row[value] - low], [high - row[value]]] if np.isfinite(low) else None
            axes.errorbar(row[value], height, xerr=whiskers, fmt="o", color=ink, markersize=4, capsize=2)
        axes.plot([], [], "o", color=ink, label=NAMES.get(name, name))
    axes.set_yticks(range(len(down)), down)
    axes.set_ylim(len(down) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def texts_and_temperatures(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Return a title for each temperature and text, and which rows of ``table`` belong to it."""
    return [
        (f"{text}, T = {temperature:g}", here)
        for temperature in sorted(table["temperature"].unique())
        for text in ordered(list(table["prompts"]), WORKLOADS)
        if (here := (table["prompts"] == text) & (table["temperature"] == temperature)).any()
    ]


MOST_ACROSS = 5
"""Number of panels that stand in one row; of more, four do."""


def arms_by_place(
    table: pd.DataFrame, value: str, label: str, places: Sequence[tuple[str, pd.Series]], arms: Mapping[str, str]
) -> Figure:
    """Plot a ratio of every arm with its 95 % interval: a panel for each place, arms from top to bottom.

    Args:
        table: a row for each arm and place.
        value: the column.
        label: of the axis.
        places: the panels' titles, in rows of at most four, and which rows of ``table`` each shows.
        arms: the arms' names, in order.
    """
    across = len(places) if len(places) <= MOST_ACROSS else 4
    down = -(-len(places) // across)
    size = (2.2 * across + 1.9, (0.24 * len(arms) + 0.75) * down + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True, sharex=False)
    colour = figures.colours(arms)
    for axes, (title, here) in zip(grid.flat, places, strict=False):
        for height, arm in enumerate(arms):
            row = row_where(table[here], arm=arm)
            if row is None or not np.isfinite(row[value]):
                continue
            low, high = band(row, value)
            whiskers = [[row[value] - low], [high - row[value]]] if np.isfinite(low) else None
            axes.errorbar(row[value], height, xerr=whiskers, fmt="o", color=colour[arm], markersize=5, capsize=2)
        no_gain(axes, along="x")
        axes.set_title(title)
        axes.set_yticks(range(len(arms)), list(arms.values()))
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    for axes in grid[-1]:
        axes.set_xlabel(label)
    for axes in list(grid.flat)[len(places) :]:
        axes.set_visible(False)
    return figure


def speedups_by_place(table: pd.DataFrame, arms: Mapping[str, str]) -> Figure:
    """Plot every arm's speed-up over the baseline; a panel for each text and temperature.

    Args:
        table: a row for each arm, text and temperature.
        arms: the arms' names, in order.
    """
    figure = arms_by_place(table, "speedup", "", texts_and_temperatures(table), arms)
    figure.supxlabel("speed-up over autoregressive decoding; 95 % intervals over prompts", fontsize=9)
    return figure


def taus_by_place(table: pd.DataFrame, arms: Mapping[str, str]) -> str:
    """Return a Markdown table of tau: a row for each arm, a column for each text and temperature.

    The last row is the share of repeated 8-grams in the baseline's text.
    """
    places = texts_and_temperatures(table)
    lines = [["tau", *(title for title, _ in places)]]
    for arm, name in arms.items():
        rows = [row_where(table[here], arm=arm) for _, here in places]
        lines.append([name, *(f"{row['tau_pooled']:.2f}" if row else "-" for row in rows)])
    shares = [table.loc[here, "baseline_repeated_8grams"].iloc[0] for _, here in places]
    return markdown([*lines, ["repeated 8-grams", *map(percent, shares)]])


def no_gain(axes: Axes, along: str = "y", at: float = 1.0) -> None:
    """Draw a dashed line at 1, the speed of the baseline."""
    (axes.axhline if along == "y" else axes.axvline)(at, color=GREY, linestyle="--", linewidth=1)


def shown(row: Mapping[str, Any] | None, column: str = "speedup") -> str:
    """Return a value with its interval, as tables show it."""
    if row is None or not np.isfinite(row[column]):
        return "-"
    low, high = band(row, column)
    return f"{row[column]:.2f}" + (f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) else "")


def percent(value: float | None) -> str:
    """Return a share in per cent, as tables show it."""
    return "-" if value is None or np.isnan(value) else f"{value:.0%}".replace("%", " %")


def row_where(table: pd.DataFrame, **values: Any) -> dict[str, Any] | None:
    """Return the row with these values; None if there is none.

    Raises:
        ValueError: there are several, so the sweep varied an option that the figure does not show.
    """
    for name, value in values.items():
        table = table[table[name] == value]
    if len(table) > 1:
        raise ValueError(
            f"{len(table)} runs have {values}: the sweep varied something else; use another output_dir for each"
        )
    return None if table.empty else dict(table.iloc[0])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *rest = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def fill(readme: Path, text: str, part: str = "results") -> None:
    """Replace the text between the README's marks of this ``part``; do nothing if there is no README.

    Raises:
        ValueError: the README has no marks.
    """
    if not readme.is_file():
        return
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    old = readme.read_text()
    if begin not in old or end not in old:
        raise ValueError(f"{readme} needs the lines {begin} and {end}, between which the table goes")
    readme.write_text(re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL))


def save(figure: Figure, file: Path, claim: str = "") -> None:
    """Write a figure of a page, with its finding as the title."""
    if claim:
        text = textwrap.fill(claim, int(10.5 * figure.get_figwidth()))
        figure.suptitle(text, fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.savefig(file, bbox_inches="tight", dpi=110)


def study(
    script: str,
    results: Callable[[Path], pd.DataFrame],
    draw: Callable[[pd.DataFrame], Figure],
    written: Callable[[pd.DataFrame], str],
    arguments: Sequence[str] | None = None,
    claim: str | Callable[[pd.DataFrame], str] = "",
    part: str = "",
) -> pd.DataFrame:
    """Run a study's command: write results, figure and the README's table from the files of its runs.

    With ``--redraw`` only the figure is written, from the results that are there.

    Args:
        script: the file in the study's folder, whose name is also the default of the runs' directory.
        results: the table of the runs in a directory.
        draw: its figure.
        written: its table as Markdown.
        arguments: of the command line.
        claim: the figure's finding, which is its title; or the function that states it of the results.
        part: name of a second question of the same study; its files are PART.csv and PART.png.
    """
    here = Path(script).resolve().parent
    name = part or here.name
    parser = argparse.ArgumentParser(description=f"Results, figure and table of the study {name}.")
    parser.add_argument(
        "runs", type=Path, nargs="?", default=Path("outputs", name), help="output_dir= of the study's runs"
    )
    parser.add_argument("--folder", type=Path, default=here, help="where results, figure and README are")
    parser.add_argument("--redraw", action="store_true", help="draw the figure from results.csv, without the runs")
    chosen = parser.parse_args(arguments)
    file = chosen.folder / f"{part or 'results'}.csv"
    table = pd.read_csv(file) if chosen.redraw else results(chosen.runs)
    with rc_context(STYLE):
        save(draw(table), chosen.folder / f"{name}.png", claim if isinstance(claim, str) else claim(table))
    if chosen.redraw:
        return table
    table.to_csv(file, index=False, float_format="%.4g")
    text = f"{written(table)}\n\n{baseline_share(chosen.runs)}"
    fill(chosen.folder / "README.md", text, part or "results")
    print(text)
    return table


def study_by_place(
    script: str, names: Mapping[str, str], order: Sequence[str], arguments: Sequence[str] | None, claim: str, part: str
) -> pd.DataFrame:
    """Run the command of a study that compares arms on each text and temperature, as ``study`` does.

    Args:
        names: how arms are shown; ``order`` is theirs in figures and tables.
    """

    def named(table: pd.DataFrame) -> dict[str, str]:
        return {arm: names[arm] for arm in ordered(list(table["arm"]), order)}

    return study(
        script, lambda runs: kept(swept(runs), "prompts", "temperature"),
        lambda table: speedups_by_place(table, named(table)), lambda table: taus_by_place(table, named(table)),
        arguments, claim, part,
    )  # fmt: skip


def baseline_share(runs: Path) -> str:
    """Return the sentence that states how close the baselines of all runs in a folder come to their machine's roofline.

    Args:
        runs: a run, a sweep, or a folder of them.
    """
    summaries = [json.loads(file.read_text()) for file in sorted(runs.rglob("summary.json"))]
    known = [summary for summary in summaries if summary.get("baseline_roofline_share") is not None]
    if not known:
        return NO_SHARE
    memory = [summary["arms"]["baseline"]["memory_bound_steps"] for summary in known]
    return baselines_in_words([summary["baseline_roofline_share"] for summary in known], memory)


NO_SHARE = "The baseline's share of its machine's memory roofline was not measured in these runs."
"""Note on runs of older versions."""


def kept(table: pd.DataFrame, *keys: str, more: Sequence[str] = ()) -> pd.DataFrame:
    """Return the columns of ``results.csv``: the study's ``keys``, the usual figures and ``more``, with intervals."""
    figures = ("requests", "groups", "tokens", "steps", "nodes_per_step", "lossless", "baseline_repeated_8grams")
    spread = ("speedup", "tau_pooled", "tau_macro", "expected_tau", "tau_pooled_raw")
    rest = ("tokens_per_second", "baseline_tokens_per_second", "overhead", "roofline_share", "baseline_roofline_share")
    rest += ("identical_outputs", "repeated_8gram_share")
    bands = [f"{name}{end}" for name in (*spread, *more) for end in ("", "_low", "_high")]
    names = [*keys, "arm", *figures, *bands, *rest, "commit"]
    return (
        table[[name for name in dict.fromkeys(names) if name in table]]
        .sort_values([*keys, "arm"])
        .reset_index(drop=True)
    )
