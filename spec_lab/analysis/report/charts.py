"""Interactive charts, as Vega-Lite: the tables of ``spec_lab.analysis.metrics.frames``, drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.figures import BASELINE, COLOURS, GREY, PHASES, SEQUENCE, lay_out
from spec_lab.analysis.report.page import visible

FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
CONFIG: dict[str, Any] = {
    "font": FONT,
    "numberFormat": ".12~g",  # of axes: Vega's own rounds the ticks of short axes to whole numbers
    "view": {"stroke": None},
    "axis": {"gridColor": "#ebebeb", "domainColor": "#999", "tickColor": "#999", "labelLimit": 320, "labelFontSize": 12,
             "titleFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"labelLimit": 420, "symbolLimit": 24, "labelFontSize": 12, "titleFontSize": 12, "orient": "top",
               "titleFontWeight": "normal", "symbolOpacity": 1, "symbolStrokeWidth": 2},
}  # fmt: skip

MOST_TICKS = 12
"""Most values of an axis that has a tick at each; with more, Vega chooses the ticks."""


def speedups(each: pd.DataFrame, means: pd.DataFrame, colours: Mapping[str, str]) -> alt.TopLevelMixin:
    """Forest plot of a run's arms; a tick for each group (``frames.throughput``, ``frames.speedups``)."""
    order = _seen(means["arm"])
    means = means.assign(text=[_interval(*row) for row in means[["mean", "low", "high"]].itertuples(index=False)])
    each = each[each["speedup"].notna()]
    y = alt.Y("arm:N", sort=order, title=None)
    colour = alt.Color("arm:N", scale=_scale(colours, means["arm"]), legend=None)
    x = "times the baseline's tokens/s on the same prompts"
    groups = alt.Chart(_data(each)).mark_tick(thickness=1.5, size=15, opacity=0.45)
    groups = groups.encode(x=alt.X("speedup:Q", title=x, scale=alt.Scale(zero=True)), y=y, color=colour, tooltip=[
        "arm:N", "group:Q", _number("speedup"), _number("tokens_per_second", "tokens/s", ".1f"),
        _number("baseline", "baseline, tokens/s", ".1f"),
    ])  # fmt: skip
    base = alt.Chart(_data(means)).encode(y=y, color=colour)
    told = ["arm:N", _number("mean"), _number("low", "95 % from"), _number("high", "95 % to"), "groups:Q"]
    span = base.mark_rule(strokeWidth=2.5).encode(x="low:Q", x2="high:Q", tooltip=told)
    middle = base.mark_point(shape="diamond", filled=True, size=110, opacity=1).encode(x="mean:Q", tooltip=told)
    text = base.mark_text(dy=-15, fontSize=11).encode(x="mean:Q", text="text:N")
    return _framed(alt.layer(_rule(1.0), groups, *_if_known(means, span), middle, text), 44 * len(order) + 10)


def depth(frame: pd.DataFrame, kind: str, colours: Mapping[str, str], x: str) -> alt.TopLevelMixin:
    """Acceptance by depth (``frames.by_depth``), one kind; a click in the legend picks arms."""
    own = frame[frame["kind"] == kind]
    arms = list(frame["arm"].unique())
    order = _seen(arms)
    picked = alt.selection_point(fields=["arm"], bind="legend")
    base = alt.Chart(_data(own)).encode(
        x=alt.X("depth:Q", title=x, axis=_ticks(own["depth"]), scale=alt.Scale(nice=False, padding=12)),
        color=alt.Color("arm:N", scale=_scale(colours, arms), title=None, sort=order),
    )
    share = alt.Scale(domain=[0, 1])
    title = "share of steps" if kind == "survival" else "share of those that reached k"
    band = base.mark_area(opacity=0.14).encode(
        y=alt.Y("low:Q", scale=share, title=title),
        y2="high:Q",
        opacity=alt.condition(picked, alt.value(0.14), alt.value(0.0)),
    )
    line = base.mark_line(point=alt.OverlayMarkDef(size=45, filled=True)).encode(
        y=alt.Y("value:Q", scale=share, title=title),
        opacity=alt.condition(picked, alt.value(1.0), alt.value(0.12)),
        tooltip=["arm:N", "depth:Q", _number("value", kind, ".3f"), _number("low", "95 % from", ".3f"),
                 _number("high", "95 % to", ".3f")],
    )  # fmt: skip
    return _framed(alt.layer(*_if_known(own, band), line.add_params(picked)), 250, order)


def tokens(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Shares of steps by the tokens they gave (``frames.tokens_per_step``), with tau."""
    order, last = _seen(frame["arm"].unique()), len(SEQUENCE) - 1
    words = [str(count) for count in range(last)] + [f"{last} or more"]
    shown = frame["tokens"].clip(upper=last)
    frame = frame.assign(place=shown, step=[words[count] for count in shown])
    used = [(word, colour) for count, (word, colour) in enumerate(zip(words, SEQUENCE, strict=True))
            if (shown == count).any()]  # fmt: skip
    y = alt.Y("arm:N", sort=order, title=None)
    bars = alt.Chart(_data(frame)).mark_bar(stroke="white", strokeWidth=0.7, height=20)
    bars = bars.encode(
        x=alt.X("share:Q", title="share of steps", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        y=y,
        color=alt.Color("step:N", title="tokens", scale=_pairs(used), sort=[word for word, _ in used]),
        order=alt.Order("tokens:Q"),
        tooltip=["arm:N", "tokens:Q", "steps:Q", _number("share", form=".1%"), _number("tau")],
    )  # fmt: skip
    each = frame.drop_duplicates("arm").assign(text=lambda one: [f"tau {tau:.2f}" for tau in one["tau"]], end=1.0)
    text = alt.Chart(_data(each)).mark_text(align="left", dx=6, fontSize=12).encode(x="end:Q", y=y, text="text:N")
    return _framed(alt.layer(bars, text), 28 * len(order) + 10, words)


def phases(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Milliseconds per token by phase (``frames.time_by_phase``), stacked."""
    order = _seen(frame["arm"].unique())
    spent = frame.groupby("phase")["ms_per_token"].max()
    used = [(metrics.PHASES[phase], colour) for phase, colour in PHASES.items() if spent[phase] > 0]
    place = {phase: number for number, phase in enumerate(PHASES)}
    frame = frame[frame["phase"].map(spent) > 0].assign(place=frame["phase"].map(place))
    y = alt.Y("arm:N", sort=order, title=None)
    whole = frame.groupby("arm", sort=False).agg(end=("ms_per_token", "sum"), overhead=("overhead", "first"))
    whole = whole.reset_index()
    whole["text"] = [f"{one.end:.2f} ms, overhead {one.overhead:.1%}" for one in whole.itertuples()]
    widest = float(whole["end"].max())
    bars = alt.Chart(_data(frame)).mark_bar(height=20)
    bars = bars.encode(
        x=alt.X("ms_per_token:Q", title="milliseconds of decoding per emitted token",
                scale=alt.Scale(domain=[0, 1.3 * widest], nice=False)),
        y=y,
        color=alt.Color("what:N", title=None, scale=_pairs(used), sort=[word for word, _ in used]),
        order=alt.Order("place:Q"),
        tooltip=["arm:N", alt.Tooltip("what:N", title="phase"), _number("ms_per_token", "ms per token", ".3f"),
                 _number("share", "share of the time", ".1%")],
    )  # fmt: skip
    text = alt.Chart(_data(whole)).mark_text(align="left", dx=6, fontSize=12).encode(x="end:Q", y=y, text="text:N")
    return _framed(alt.layer(bars, text), 28 * len(order) + 10, [word for word, _ in used])


def cost(frame: pd.DataFrame, colours: Mapping[str, str]) -> alt.TopLevelMixin:
    """Milliseconds of the target by nodes (``frames.cost_of_nodes``), for one number of live sequences at a time."""
    arms = list(frame["arm"].unique())
    order = _seen(arms)
    rounds = frame.groupby("live")["rounds"].sum()
    picked = alt.selection_point(fields=["arm"], bind="legend", name="arms")
    base = alt.Chart(_data(frame)).encode(
        x=alt.X("nodes:Q", title="drafted nodes per sequence", axis=alt.Axis(tickMinStep=1)),
        color=alt.Color("arm:N", scale=_scale(colours, arms), title=None, sort=order),
        opacity=alt.condition(picked, alt.value(0.9), alt.value(0.1)),
        tooltip=["arm:N", "live:Q", "nodes:Q", _number("ms", "median, ms"), _number("low", "quartile from"),
                 _number("high", "quartile to"), "rounds:Q"],
    )  # fmt: skip
    spread = base.mark_rule(strokeWidth=1.5).encode(y="low:Q", y2="high:Q")
    point = base.mark_point(filled=True).encode(
        y=alt.Y("ms:Q", title="milliseconds of the target", scale=alt.Scale(zero=True)),
        size=alt.Size("rounds:Q", scale=alt.Scale(type="sqrt", range=[25, 220]), legend=None),
    )
    layered = alt.layer(spread, point.add_params(picked))
    if len(rounds) > 1:
        options = [int(live) for live in sorted(rounds.index, reverse=True)]
        live = alt.param("live", int(rounds.idxmax()), bind=alt.binding_select(options=options, name="live sequences "))
        layered = layered.add_params(live).transform_filter("datum.live == live")
    return _framed(layered, 260, order)


def tree(frame: pd.DataFrame, colour: str) -> alt.TopLevelMixin:
    """Accepted paths on a draft tree (``frames.accepted_tree``): wide where accepted often, hollow where never."""
    places = lay_out(frame["path"])
    nodes, edges = [], []
    for number, one in enumerate(frame.to_dict("records")):
        path, at = one["path"], places[one["path"]]
        told = {"ranks": ".".join(map(str, path)) or "root", "share": one["share"], "depth": one["depth"],
                "accepted": int(one["accepted"]), "ended": int(one["ended"])}  # fmt: skip
        text = f"{one['share']:.0%}" if one["share"] >= 0.01 else f"{one['share']:.1%}"
        nodes.append(told | {"x": at.across, "y": at.down, "text": text if path and one["accepted"] else ""})
        if path:
            above = places[path[:-1]]
            corners = [(above.across, above.down), (above.across + 0.35, at.down), (at.across, at.down)]
            edges += [told | {"x": x, "y": y, "edge": number, "turn": turn} for turn, (x, y) in enumerate(corners)]
    deepest, lowest = (max(one[axis] for one in nodes) for axis in "xy")
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.15, max(deepest, 4) + 0.45], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[lowest + 0.5, -0.8], nice=False))
    tips = [alt.Tooltip("ranks:N", title="child ranks"), _number("share", "share of steps", ".1%"),
            alt.Tooltip("accepted:Q", title="steps that accepted it"),
            alt.Tooltip("ended:Q", title="steps that ended here")]  # fmt: skip
    never = alt.datum.accepted == 0
    lines = alt.Chart(_data(pd.DataFrame(edges))).mark_line(strokeCap="round", opacity=0.75).encode(
        x=x, y=y, detail="edge:N", order="turn:Q", tooltip=tips,
        color=alt.condition(never, alt.value("#cfcfcf"), alt.value(colour)),
        strokeWidth=alt.StrokeWidth("share:Q", scale=alt.Scale(domain=[0, 1], range=[1, 8]), legend=None),
    )  # fmt: skip
    base = alt.Chart(_data(pd.DataFrame(nodes))).encode(x=x, y=y)
    discs = base.mark_circle(opacity=1, strokeWidth=1).encode(
        size=alt.Size("share:Q", scale=alt.Scale(domain=[0, 1], range=[28, 260]), legend=None),
        fill=alt.condition(never, alt.value("#ffffff"), alt.value(colour)),
        stroke=alt.condition(never, alt.value("#b5b5b5"), alt.value("#ffffff")),
        tooltip=tips,
    )
    text = base.mark_text(align="left", dx=6, dy=-9, fontSize=11, color="#333").encode(text="text:N")
    return _framed(alt.layer(lines, discs, text), 25 * (lowest + 1.6))


def forest(frame: pd.DataFrame, colours: Mapping[str, str]) -> alt.TopLevelMixin:
    """Speed-ups of a sweep's rows (``frames.over_sweep``), in their order; ``colours`` of all its arms."""
    shown = _only_told(frame).assign(row=range(len(frame)))
    names = [str(visible(label)) for label in shown["label"]]
    y = alt.Y("row:O", title=None, axis=alt.Axis(labelExpr=_lookup(names), labelLimit=480))
    arms = [arm for arm in colours if (frame["arm"] == arm).any()]
    several = alt.Color("arm:N", title=None, scale=_scale(colours, arms), sort=_seen(arms))
    colour = several if len(arms) > 1 else alt.value(colours[arms[0]])
    base = alt.Chart(_data(shown)).encode(y=y, color=colour, tooltip=_told(frame))
    span = base.mark_rule(strokeWidth=2).encode(x="speedup_low:Q", x2="speedup_high:Q")
    x = alt.X("speedup:Q", title="times the baseline's tokens/s on the same prompts", scale=alt.Scale(zero=True))
    middle = base.mark_point(shape="diamond", filled=True, size=70, opacity=1).encode(x=x)
    known = _if_known(frame, span, "speedup_low")
    return _framed(alt.layer(_rule(1.0), *known, middle), 19 * len(frame) + 20, _seen(arms))


def scatter(frame: pd.DataFrame, shades: Mapping[str, pd.Series]) -> alt.TopLevelMixin:
    """Tau against speed-up, a point for each row of a sweep coloured by one of ``shades``, to choose.

    Args:
        frame: the rows.
        shades: by what they may be coloured, row by row as in ``frame`` (``frames.worth`` gives both).
    """
    columns = list(shades)
    coloured = {f"by{number}": shades[name].astype(str) for number, name in enumerate(columns)}
    # Of these, Vega-Lite gives colours to those that are there, in this order; no two options share a word.
    order = _seen([word for values in shades.values() for word in values.cat.categories])
    picked = alt.selection_point(fields=["colour"], bind="legend", name="colours")
    chart = alt.Chart(_data(_only_told(frame).assign(**coloured))).mark_point(filled=True, size=55)
    if len(columns) > 1:
        menu = alt.binding_select(options=list(coloured), labels=[visible(one) for one in columns], name="colour by ")
        chart = chart.add_params(alt.param("by", "by0", bind=menu)).transform_calculate(colour="datum[by]")
    else:
        chart = chart.transform_calculate(colour="datum.by0")
    scale = alt.Scale(zero=False, padding=12)
    chart = chart.encode(
        x=alt.X("tau_pooled:Q", title="tau, tokens per step", scale=scale),
        y=alt.Y("speedup:Q", title="speed-up over the baseline", scale=scale),
        color=alt.Color("colour:N", title=None, sort=order, scale=alt.Scale(range=list(COLOURS))),
        opacity=alt.condition(picked, alt.value(0.75), alt.value(0.06)),
        tooltip=_told(frame),
    )
    return _framed(chart.add_params(picked), 340, order)


def lines(frame: pd.DataFrame, x: str, y: str, order: Sequence[str], mark: float | None = None) -> alt.TopLevelMixin:
    """One line for each setting, with bands (``frames.along``); ``order`` of all settings fixes the colours."""
    order = _seen(order)
    scale = alt.Scale(domain=order, range=[COLOURS[number % len(COLOURS)] for number in range(len(order))])
    picked = alt.selection_point(fields=["line"], bind="legend")
    base = alt.Chart(_data(frame)).encode(
        x=alt.X("x:Q", title=visible(x), scale=alt.Scale(zero=False, padding=12, nice=False), axis=_ticks(frame["x"])),
        color=alt.Color("line:N", title=None, scale=scale, sort=order),
    )
    band = base.mark_area(opacity=0.14).encode(
        y=alt.Y("low:Q", title=y, scale=alt.Scale(zero=False)), y2="high:Q",
        opacity=alt.condition(picked, alt.value(0.14), alt.value(0.0)),
    )  # fmt: skip
    line = base.mark_line(point=alt.OverlayMarkDef(size=45, filled=True)).encode(
        y=alt.Y("value:Q", title=y, scale=alt.Scale(zero=False)),
        opacity=alt.condition(picked, alt.value(1.0), alt.value(0.12)),
        tooltip=["line:N", alt.Tooltip("x:Q", title=visible(x)), _number("value", y, ".3f"),
                 _number("low", "95 % from", ".3f"), _number("high", "95 % to", ".3f"), "runs:Q"],
    )  # fmt: skip
    base_line = [] if mark is None else [_rule(mark, "y")]
    return _framed(alt.layer(*base_line, *_if_known(frame, band), line.add_params(picked)), 260, order)


def _ticks(values: pd.Series) -> alt.Axis:
    """An axis with a tick at each of a few values; of many whole numbers with ticks at whole numbers only."""
    distinct = sorted(values.dropna().unique().tolist())
    if len(distinct) <= MOST_TICKS:
        return alt.Axis(values=distinct)
    return alt.Axis(tickMinStep=1) if all(value % 1 == 0 for value in distinct) else alt.Axis()


def _framed(chart: Any, height: float, legend: Sequence[str] = ()) -> alt.TopLevelMixin:
    """As wide as the page allows; ``page.js`` gives the legend as many columns as fit, from the width of its names."""
    widest = 7 * max(map(len, legend), default=0) + 30
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    framed = chart.properties(width="container", height=round(height), autosize=fit, usermeta={"legend": widest})
    return framed.configure(**CONFIG)


def _if_known(frame: pd.DataFrame, layer: alt.Chart, low: str = "low") -> list[alt.Chart]:
    """The layer of intervals, if there is any: Vega complains of a scale over nothing."""
    return [layer] if low in frame and frame[low].notna().any() else []


def _rule(at: float, axis: str = "x") -> alt.Chart:
    dashed = alt.Chart(alt.InlineData(values=[{"at": at}])).mark_rule(strokeDash=[5, 4], color=GREY)
    return dashed.encode(alt.X("at:Q") if axis == "x" else alt.Y("at:Q"))


def _data(frame: pd.DataFrame) -> alt.InlineData:
    """The rows, without limit of their number, texts made safe to look at; no column's name has a dot or a bracket."""
    texts = {name: frame[name].map(visible) for name in frame if not pd.api.types.is_numeric_dtype(frame[name])}
    plain = [name for name in frame if not set(str(name)) & set(".[]\\'\"")]
    rows = frame.assign(**{name: texts[name] for name in texts})[plain]
    return alt.InlineData(values=json.loads(rows.to_json(orient="records", double_precision=6)))


def _seen(names: Iterable[str]) -> list[str]:
    """The names as ``_data`` has them; what is compared with data must be."""
    return [visible(name) for name in names]


def _scale(colours: Mapping[str, str], arms: Iterable[str]) -> alt.Scale:
    """Colours of arms, which are named as in the tables."""
    arms = list(arms)
    return alt.Scale(domain=_seen(arms), range=[colours.get(arm, BASELINE) for arm in arms])


def _pairs(pairs: Sequence[tuple[str, str]]) -> alt.Scale:
    return alt.Scale(domain=[word for word, _ in pairs], range=[colour for _, colour in pairs])


def _number(name: str, title: str | None = None, form: str = ".2f") -> alt.Tooltip:
    return alt.Tooltip(f"{name}:Q", title=title or name, format=form)


TOLD = {"speedup": "speed-up", "speedup_low": "95 % from", "speedup_high": "95 % to", "tau_pooled": "tau",
        "tokens_per_second": "tokens/s", "nodes_per_step": "nodes a step"}  # fmt: skip
"""What a row of a sweep says of itself, beside its options."""


def _told(frame: pd.DataFrame) -> list[alt.Tooltip]:
    names = [alt.Tooltip("label:N", title="options"), alt.Tooltip("arm:N")]
    return names + [_number(name, title) for name, title in TOLD.items() if name in frame]


def _only_told(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["label", "arm", *(name for name in TOLD if name in frame)]]


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f}" if pd.isna(low) or pd.isna(high) else f"{mean:.2f}  [{low:.2f}, {high:.2f}]"


def _lookup(names: Sequence[str]) -> str:
    """A Vega expression: the name of the row whose number is the label."""
    return f"{json.dumps(list(names))}[datum.value]"
