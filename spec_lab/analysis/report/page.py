"""One self-contained page: a template, its style, its script, tables and figures."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spec_lab.analysis import figures
from spec_lab.analysis.figures.palette import on_dark
from spec_lab.analysis.figures.themed import dark_colours
from spec_lab.analysis.text import COLUMNS
from spec_lab.core.terminal import visible

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it shows.
        value: what a number sorts by; None where the cell is not a number.
        link: where it leads.
        badge: a CSS class of a badge around the text.
        title: a text shown on hovering.
        colour: of a square before the text.
    """

    text: str
    value: float | None = None
    link: str = ""
    badge: str = ""
    title: str = ""
    colour: str = ""


@dataclass(frozen=True)
class DataTable:
    """A table that a click on a heading sorts.

    Args:
        columns: headings, each with whether it holds numbers.
        rows: the cells.
        searchable: whether an input filters its rows.
        filters: headings of columns by whose values a list filters the rows, where there are several values.
    """

    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    searchable: bool = False
    filters: Sequence[str] = ()

    @property
    def choices(self) -> dict[int, list[str]]:
        """The values of each column of ``filters``, by the column's number."""
        headings = [name for name, _ in self.columns]
        places = [headings.index(name) for name in self.filters if name in headings]
        values = {place: list(dict.fromkeys(row[place].text for row in self.rows)) for place in places}
        return {place: found for place, found in values.items() if len(found) > 1}


@dataclass(frozen=True)
class Page:
    """What every page has.

    Args:
        title: the heading.
        lead: the line below.
        warnings: what a reader must know first.
        verdict: on the times of a result, a line or several; empty of a result without times.
        drawn: figures by name.
        facts: configuration and machine; empty values are left out.
        files: the folder of the figures' files, beside the page.
    """

    title: str
    lead: str
    warnings: Sequence[str]
    drawn: figures.Figures
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: str = "figures"
    verdict: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A part of a page of ``sections.html.j2``.

    Args:
        title: its heading.
        how: what it shows, and how it was measured.
        table: its table.
        drawn: names of its figures, of those that the page has.
        notes: sentences below.
        failures: what contradicts what was declared.
        missing: what stands in place of figures where there are none.
    """

    title: str
    how: str = ""
    table: DataTable | None = None
    drawn: Sequence[str] = ()
    notes: Sequence[str] = ()
    failures: Sequence[str] = ()
    missing: str = ""


def value_cell(value: Mapping[str, float | None] | float | None, form: str = ".2f", scale: float = 1.0) -> Cell:
    """Return the cell of a number, or of an interval, which sorts by its mean; empty for None and NaN."""
    number = value.get("mean") if isinstance(value, Mapping) else value
    if number is None or number != number:
        return Cell("", float("nan"))
    text = f"{scale * number:{form}}"
    low, high = (value.get("low"), value.get("high")) if isinstance(value, Mapping) else (None, None)
    if low is not None and high is not None and low == low and high == high:
        text += f" [{scale * low:{form}}, {scale * high:{form}}]"
    return Cell(text, number)


def figure_cell(name: str, value: Mapping[str, float] | float | None) -> Cell:
    """Return the cell of a figure of ``COLUMNS``; intervals sort by their mean."""
    number = value["mean"] if isinstance(value, Mapping) else value
    return Cell(COLUMNS[name].text(value), float("nan") if number is None else number)


def render(
    template: str,
    page: Page,
    folder: Path,
    scripts: Sequence[str] = ("page.js",),
    styles: Sequence[str] = ("page.css",),
    **facts: Any,
) -> str:
    """Return the page's text, and write its figures to ``page.files``.

    Args:
        template: its name, without ending.
        page: what every page has.
        folder: where the page will be.
        scripts: files of this package, in order; ``styles``: likewise.
        facts: what else the template requires.
    """
    figures.save(page.drawn, folder / page.files)
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible, "on_dark": on_dark, "dark_colours": dark_colours}
    code, looks = ([(HERE / name).read_text(encoding="utf-8") for name in names] for names in (scripts, styles))
    shown = {name: Markup(figures.svg(figure, name)) for name, figure in page.drawn.items()}
    return environment.get_template(f"{template}.html.j2").render(
        page=page, svg=shown, scripts=[Markup(one) for one in code], policy=_policy(code), style=Markup("".join(looks)),
        **facts,
    )  # fmt: skip


def short_path(path: object) -> str:
    """Return a path without directories of one machine: from ``zoo/`` on in the package, else its last two parts.

    Names on the hub and relative paths are kept; None is empty.
    """
    text = "" if path is None else str(path)
    if not text.startswith(("/", "~")):
        return text
    _, package, inside = text.rpartition("/spec_lab/zoo/")
    return f"zoo/{inside}" if package else "/".join([part for part in text.split("/") if part][-2:])


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy: these scripts run and no other, and nothing is fetched."""
    # A browser hashes what it has parsed: with "\n" for every kind of line end.
    hashes = (sha256(re.sub("\r\n?", "\n", one).encode()).digest() for one in scripts)
    allowed = " ".join(f"'sha256-{b64encode(one).decode()}'" for one in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
