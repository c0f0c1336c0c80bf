"""One self-contained page about a result: a template, its style, its script, tables and figures."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spec_lab.analysis import figures
from spec_lab.analysis.figures.palette import on_dark
from spec_lab.analysis.figures.themed import dark_colours
from spec_lab.core.terminal import visible
from spec_lab.results.result import Result

HERE = Path(__file__).parent


def render(
    result: Result,
    folder: Path,
    title: str,
    facts: Mapping[str, Any],
    files: str = "figures",
    view: Any = None,
    names: Sequence[str] = (),
    where: str = "",
) -> str:
    """Return the page's text, and write its figures.

    Args:
        folder: where the page will be.
        facts: configuration and machine; empty values are left out.
        files: the folder of the figures' files, beside the page.
        view: the outputs token by token, of a run (``token_view``); ``names``: of its arms.
        where: the name of the folder, below the heading.
    """
    drawn = result.draw()
    saved = {file.stem for file in figures.save(drawn, folder / files)}
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible, "on_dark": on_dark, "dark_colours": dark_colours}
    environment.filters["heading_width"] = heading_width
    code, looks = (
        [(HERE / f"{name}.{ending}").read_text(encoding="utf-8") for name in ("page", *["tokens"] * (view is not None))]
        for ending in ("js", "css")
    )
    return environment.get_template("page.html.j2").render(
        result=result, title=title, facts=facts, files=files, view=view, names=names, where=where,
        svg={name: Markup(figures.svg(figure, name)) for name, figure in drawn.items() if name in saved},
        scripts=[Markup(text) for text in code], policy=_policy(code), style=Markup("".join(looks)),
    )  # fmt: skip


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy: these scripts run and no other, and nothing is fetched."""
    # A browser hashes what it has parsed: with "\n" for every kind of line end.
    hashes = (sha256(re.sub("\r\n?", "\n", text).encode()).digest() for text in scripts)
    allowed = " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def heading_width(heading: str) -> int:
    """Return the letters at which a column's heading has at most two lines; 24 of one that is still longer."""
    return min(24, (len(heading) + max(map(len, heading.split(" ")))) // 2 + 1)
