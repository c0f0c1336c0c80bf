"""Figures as SVG elements of a page that has a light and a dark theme."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from io import StringIO

from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures.palette import GRID, on_dark
from spec_lab.analysis.figures.style import STYLE

NEUTRAL = {"#000000": "var(--ink)", "#ffffff": "var(--card)", GRID: "var(--line)"}
"""Colours that become those of the page: of text and axes, of the paper, of the grid."""


def svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element that can stand inside an HTML page, its text as text.

    Its background is transparent, and its colours are CSS variables: black, white and grid those of the page
    (``NEUTRAL``), any other ``--c-RRGGBB``, which is itself unless ``dark_colours`` defines it.

    Args:
        figure: the figure.
        name: unique in the page; a prefix of the element's ids.
    """
    stream = StringIO()
    with rc_context(STYLE | {"svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"<[^>]*>", lambda tag: _in_page(tag[0], name), text)  # texts keep what looks like an id or a colour
    width = round(figure.get_figwidth() * 96)
    label = "; ".join(axes.get_title(loc="left") for axes in figure.axes)  # for screen readers
    style = f"width:{width}px;max-width:100%;min-width:{round(0.72 * width)}px;fill:var(--ink)"
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}" style="{style}"', 1)


def dark_colours(elements: Iterable[str]) -> str:
    """Return declarations of the variables in SVG elements for which a dark page needs another colour."""
    used = {colour for text in elements for colour in re.findall(r"var\(--c-([0-9a-f]{6})", text)}
    changed = {colour: on_dark(f"#{colour}") for colour in sorted(used)}
    return "".join(f"--c-{colour}:{dark};" for colour, dark in changed.items() if dark != f"#{colour}")


def _in_page(tag: str, name: str) -> str:
    """Return a tag with ids of its own and colours of the page."""
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag)
    return re.sub(r"(?<=[ :])#[0-9a-f]{6}\b", lambda match: NEUTRAL.get(match[0], _variable(match[0])), tag)


def _variable(colour: str) -> str:
    return f"var(--c-{colour[1:]},{colour})"
