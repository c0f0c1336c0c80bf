"""Figures as SVG elements of a page that has a light and a dark theme."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from io import StringIO
from itertools import pairwise

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spec_lab.analysis.figures.palette import GRID, on_dark
from spec_lab.analysis.figures.style import STYLE

NEUTRAL = {"#000000": "var(--ink)", "#ffffff": "var(--card)", GRID: "var(--line)"}
"""Colours that become those of the page: of text and axes, of the paper, of the grid."""


def svg(figure: Figure, name: str) -> str:
    """Return the figure as SVG elements that can stand inside an HTML page, its text as text.

    A figure whose panels stand side by side is several elements, one for each column of panels: next to each other they
    are the figure, and on a narrow page they wrap below each other. The first element holds the drawing, and the others
    show other parts of it.

    Its background is transparent, and its colours are CSS variables: black, white and grid those of the page
    (``NEUTRAL``), any other ``--c-RRGGBB``, which is itself unless ``dark_colours`` defines it.

    Args:
        name: unique in the page; a prefix of the element's ids.
    """
    stream = StringIO()
    with rc_context(STYLE | {"svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"<[^>]*>", lambda tag: _in_page(tag[0], name), text)  # texts keep what looks like an id or a colour
    label = "; ".join(axes.get_title(loc="left") for axes in figure.axes)  # for screen readers
    (left, right), *others = parts = _columns(figure)
    drawing = text[text.index(">") + 1 :]
    elements = [_element(figure, (left, right), f'role="img" aria-label="{escape(label)}"', drawing)]
    for part in others:
        reference = f'<use xlink:href="#{name}-figure_1"/></svg>'
        elements.append(_element(figure, part, 'aria-hidden="true"', reference))
    assert len(parts) == 1 or f'id="{name}-figure_1"' in text
    return "".join(elements)


def _element(figure: Figure, part: tuple[float, float], attributes: str, content: str) -> str:
    """Return an SVG element that shows the part of the figure between two distances from its left edge, in inches."""
    left, right = part
    width = round((right - left) * 96)
    style = f"width:{width}px;max-width:100%;min-width:{round(0.65 * width)}px;fill:var(--ink)"
    view = f"{72 * left:g} 0 {72 * (right - left):g} {72 * figure.get_figheight():g}"
    return f'<svg {attributes} style="{style}" viewBox="{view}" version="1.1">{content}'


def _columns(figure: Figure) -> list[tuple[float, float]]:
    """Return the ends of the columns of panels, in inches; one for the whole figure where its panels cannot be parted.

    They cannot where something belongs to all panels (a title or legend of the figure), or columns overlap.
    """
    whole = [(0.0, figure.get_figwidth())]
    if len(figure.axes) < 2 or figure.legends or figure.get_suptitle():
        return whole
    renderer = FigureCanvasAgg(figure).get_renderer()
    columns: dict[float, list[float]] = {}  # ends of what is drawn, by the left edge of the axes
    for axes in figure.axes:
        box = axes.get_tightbbox(renderer)
        if box is None:
            return whole
        ends = columns.setdefault(round(axes.get_position().x0, 3), [box.x0, box.x1])
        ends[:] = min(ends[0], box.x0), max(ends[1], box.x1)
    drawn = [columns[left] for left in sorted(columns)]
    gaps = [(before[1], after[0]) for before, after in pairwise(drawn)]
    if any(after < before for before, after in gaps):
        return whole
    cuts = [0.0, *((before + after) / 2 / figure.dpi for before, after in gaps), figure.get_figwidth()]
    return list(pairwise(cuts))


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
