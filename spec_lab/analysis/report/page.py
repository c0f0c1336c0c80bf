"""One self-contained page: a template, its style, its scripts, and charts as data."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import altair
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spec_lab.core.terminal import visible

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """Charts under one heading.

    Args:
        title: the heading.
        how: how to read them, in a sentence or two.
        charts: the charts; each may have a heading of its own.
        why: why there are none; shown where there are none.
        layout: 'columns-2': two side by side where there is room; 'flow': likewise, of uneven heights; or one below
            the other.
        files: names of the same figure for papers, in ``figures/``, without ending.
    """

    title: str
    how: str
    charts: Sequence[tuple[str, altair.TopLevelMixin]] = ()
    why: str = ""
    layout: str = ""
    files: Sequence[str] = field(default_factory=tuple)


def render(template: str, figures: Sequence[Figure], drawn: Sequence[Path], **facts: Any) -> str:
    """The page.

    Args:
        template: its name, without ending.
        figures: in order.
        drawn: files of figures; those that exist are linked.
        facts: what else the template asks for.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seen": visible, "number": number}
    scripts = [_bundle(), (HERE / "page.js").read_text(encoding="utf-8")]
    charts = [[(head, as_data(chart.to_dict())) for head, chart in figure.charts] for figure in figures]
    names = {file.name for file in drawn}
    return environment.get_template(f"{template}.html.j2").render(
        figures=list(zip(figures, charts, strict=True)),
        names=names,
        scripts=[Markup(one) for one in scripts],
        policy=_policy(scripts),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        **facts,
    )


def as_data(value: Any) -> Markup:
    """JSON that may stand inside a script element, whatever texts it holds; NaN and infinities as null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))  # ASCII only, U+2028 escaped
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def placed(path: object) -> str:
    """A path without what is of one machine: from ``zoo/`` on in the package, else its last two parts.

    Names of the hub and relative paths stay as they are; None is nothing.
    """
    text = "" if path is None else str(path)
    if not text.startswith(("/", "~")):
        return text
    _, package, inside = text.rpartition("/spec_lab/zoo/")
    return f"zoo/{inside}" if package else "/".join([part for part in text.split("/") if part][-2:])


def number(value: Any, form: str = ".2f") -> str:
    """A number as text; nothing for None and NaN."""
    return "" if value is None or not math.isfinite(value) else format(value, form)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, of the version that altair writes charts for."""
    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    bundle: Any = vl_convert.javascript_bundle  # its stub asks for a snippet, which only bundles without globals need
    script = str(bundle(vl_version=version))
    return re.sub("</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: these scripts run and no others, and nothing is fetched."""
    # A browser hashes what it has parsed: with "\n" for every kind of line end.
    known = (b64encode(sha256(re.sub("\r\n?", "\n", one).encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in known)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
