"""Draw the pictures of docs/concepts from the files of two small runs, and the speed-ups of docs/index.md.

    spec-lab proposer=draft_tree proposer.tree=2x2x1 proposer.drawn=without_replacement sampling=temperature_1 \\
        record=replay target.dtype=float32 threads=1 warmup=0 baseline=false prompts.limit=6 max_new_tokens=40 \\
        output_dir=runs/tree
    spec-lab proposer=draft_chain prompts.limit=4 max_new_tokens=32 target.dtype=float32 threads=1 output_dir=runs/first
    python scripts/docs_pictures.py runs/tree runs/first

Without runs, only the speed-ups are drawn; they are those of experiments/proposers/results.csv.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from spec_lab.analysis.figures import BASELINE, COLOURS, GREY, STYLE
from spec_lab.analysis.figures.palette import DARK_PAGE, GRID, PROPOSERS, on_dark
from spec_lab.core.terminal import visible
from spec_lab.decode.recording import unpack_ids

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 5.3  # inches: at 390 pixels letters are still as large as in the text
INK, ACCEPTED, REJECTED, UNUSED = "#222222", "#2f8f57", "#b03a5b", "#c9ccd1"
P, Q = COLOURS[0], COLOURS[1]
DARK = {
    "#000000": "#e8e8e8", INK: "#e8e8e8", "#ffffff": DARK_PAGE, GRID: "#3a3f46", "#555555": "#a4abb3",
    "#eef0f2": "#2a2f36", UNUSED: "#5a616a", "#d5dae0": "#3f454d", "#9aa3ad": "#626a74",
}  # fmt: skip
"""Greys in the dark scheme, the background's included; any other colour is that of ``palette.on_dark``."""


@dataclass(frozen=True)
class Row:
    """A row of a draft tree: the root, or a node.

    Args:
        parent: the row above; -1 of the root.
        token: its token.
        tokens: recorded tokens of the distributions below it.
        p, q: their target and draft probabilities; q is empty below a leaf.
    """

    parent: int
    token: int
    tokens: np.ndarray  # [N]
    p: np.ndarray  # [N]
    q: np.ndarray  # [N], or [0]

    def of(self, token: int) -> tuple[float, float]:
        """Return p and q of a token below this row."""
        index = int(np.flatnonzero(self.tokens == token)[0])
        return float(self.p[index]), float(self.q[index])


@dataclass(frozen=True)
class Step:
    """A recorded step: its rows, the rows of the accepted path without the root, and the emitted tokens.

    Args:
        rows: the root and the nodes.
        path: accepted rows, from the top.
        before: tokens before the root, the last ones first needed for the picture.
        emitted: accepted tokens, and the bonus or recovered one.
    """

    rows: Sequence[Row]
    path: Sequence[int]
    before: Sequence[int]
    emitted: Sequence[int]

    def children(self, row: int) -> list[int]:
        """Return the rows below a row, in the order in which they were drawn."""
        return [number for number, drafted in enumerate(self.rows) if drafted.parent == row]


def tree_mask(parents: Sequence[int]) -> np.ndarray:  # [R, R]
    """Return which rows each row of a draft tree attends to: its ancestors and itself."""
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the distribution of the recovered token: norm(max(p - q, 0))."""
    left = np.maximum(p - q, 0.0)
    return left / left.sum()


def read_step(run: Path, request: int, number: int, prompt: Sequence[int]) -> Step:
    """Return a step of a run with record=replay; ``prompt`` are the tokens of its prompt."""
    chosen = [("request", "==", request), ("forward", "==", number)]
    recorded = pd.read_parquet(run / "replay.parquet", filters=chosen).sort_values("row")
    step = pd.read_parquet(run / "steps.parquet", filters=chosen).iloc[0]
    output = pd.read_parquet(run / "requests.parquet", filters=chosen[:1]).iloc[0]
    rows = []
    for recorded_row in recorded.itertuples():
        p, q = (np.frombuffer(column, dtype=np.float32) for column in (recorded_row.p, recorded_row.q))
        rows.append(Row(recorded_row.parent, recorded_row.token, unpack_ids(recorded_row.ids), p, q))
    path, row = [], 0
    for rank in step["path"]:
        row = [index for index, drafted in enumerate(rows) if drafted.parent == row][rank]
        path.append(row)
    done = int(recorded["position"].iloc[0]) - int(output["prompt_tokens"])
    emitted = [int(token) for token in output["tokens"][done : done + step["emitted"]]]
    return Step(rows, path, [*prompt, *map(int, output["tokens"][:done])][:-1], emitted)


# Pictures ------------------------------------------------------------------------------------------------------------


def blank(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the pages' width whose axes are measured in inches."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, text: str, colour: str, width: float, height: float = 0.34, **font: Any
) -> None:
    """Draw a rounded box with its centre at (x, y); that of a rejected token is dashed."""
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.07", lw=1.4,
            edgecolor=colour, facecolor="white", linestyle="--" if colour == REJECTED else "-",
        )
    )  # fmt: skip
    axes.text(x, y, text, ha="center", va="center", **{"family": "monospace", "size": 10, "color": INK, **font})


def draw_tree(step: Step, words: Sequence[str]) -> Figure:
    """Draw a draft tree, and below it the tree attention mask of its rows."""
    parents = [row.parent for row in step.rows]
    count, cell = len(parents), 0.27
    figure, axes = blank(3.4 + count * cell + 0.95)
    top = 3.4 + count * cell + 0.55
    leaves = [row for row in range(count) if not step.children(row)]
    x = {row: 0.75 + number * 1.27 for number, row in enumerate(leaves)}
    for row in reversed(range(count)):
        if row not in x:
            x[row] = float(np.mean([x[child] for child in step.children(row)]))
    depth = [0] * count
    for row in range(1, count):
        depth[row] = depth[parents[row]] + 1
    y = {row: top - 0.85 * depth[row] for row in range(count)}
    for row in range(1, count):
        colour = ACCEPTED if row in step.path else UNUSED
        axes.plot([x[parents[row]], x[row]], [y[parents[row]] - 0.17, y[row] + 0.17], color=colour, lw=1.6, zorder=0)
    end = step.path[-1] if step.path else 0
    for row in range(count):
        parent = parents[row]
        colour = INK if row == 0 else ACCEPTED if row in step.path else REJECTED if parent == end else UNUSED
        box(axes, x[row], y[row], words[row], colour, max(0.5, 0.11 * len(words[row]) + 0.16))
        if row:
            p, q = step.rows[parent].of(step.rows[row].token)
            behind = {"fc": "white", "lw": 0, "pad": 0.5}
            chances = f"p {p:.2f}  q {q:.2f}"
            axes.text(x[row], y[row] - 0.28, chances, ha="center", va="center", size=8.5, color="#555555", bbox=behind)
    axes.text(0.1, top + 0.02, "root:\npending token", size=9, color=INK, va="center")
    for number, (colour, text) in enumerate(((ACCEPTED, "accepted"), (REJECTED, "rejected"), (UNUSED, "not reached"))):
        axes.text(3.75, top + 0.2 - 0.2 * number, f"■ {text}", color=colour if number < 2 else GREY, size=9.5)

    left, base = 1.55, 0.2
    axes.text(0.1, base + count * cell + 0.42, "Tree attention mask: what each row attends to", size=10.5, color=INK)
    mask = tree_mask(parents)
    for row in range(count):
        high = base + (count - 1 - row) * cell
        axes.text(
            left - 0.12, high + cell / 2, words[row], ha="right", va="center", family="monospace", size=9, color=INK
        )
        axes.add_patch(
            FancyBboxPatch((left, high + 0.02), 0.75, cell - 0.04, boxstyle="square,pad=0", lw=0, fc=BASELINE)
        )
        for column in range(count):
            shown = mask[row, column]
            colour = (ACCEPTED if row in (0, *step.path) else P) if shown else "#eef0f2"
            corner = left + 0.82 + column * cell, high + 0.02
            axes.add_patch(FancyBboxPatch(corner, cell - 0.04, cell - 0.04, boxstyle="square,pad=0", lw=0, fc=colour))
    axes.text(left + 0.37, base + count * cell + 0.1, "KV cache", ha="center", size=9, color=INK)
    axes.text(
        left + 0.82 + count * cell / 2, base + count * cell + 0.1, "rows of this step", ha="center", size=9, color=INK
    )
    return figure


def draw_step(step: Step, words: Sequence[str], emitted: Sequence[str], before: str) -> Figure:
    """Draw what a step does, from its text to the committed tokens."""
    stages = [
        ("1  sequence", f"{before}", "its last token is pending: its keys and values\nare not computed yet"),
        ("2  propose", "", f"the proposer drafts a tree of {len(step.rows) - 1} tokens, with q"),
        ("3  forward", "", f"the target computes all {len(step.rows)} rows at once:\np after every one"),
        ("4  verify", "", "p and q decide how far the path is accepted"),
        ("5  commit", "", "accepted tokens and one more from the target;\nthe KV cells of all other rows are freed"),
    ]
    figure, axes = blank(5.9)
    high = 5.55
    tree = [words[row] for row in range(1, len(words))]
    for stage, (name, text, why) in enumerate(stages):
        y = high - 1.14 * stage
        axes.text(0.12, y, name, size=11, weight="bold", color=INK, va="center")
        axes.text(1.3, y - 0.26, why, size=9.5, color="#555555", va="top", linespacing=1.25)
        if stage == 0:
            box(axes, 3.2, y, text, INK, 3.8)
        elif stage in (1, 2):
            shown = tree[:5] if stage == 1 else [words[0], *tree[:4]]
            for number, word in enumerate([*shown, "..."]):
                colour = Q if stage == 1 else P
                box(axes, 1.57 + 0.68 * number, y, word, colour, 0.62, size=8.5)
        elif stage == 3:
            path = [(words[row], ACCEPTED) for row in step.path]
            refused = [(words[row], REJECTED) for row in step.children(step.path[-1] if step.path else 0)]
            for number, (word, colour) in enumerate([*path, *refused][:5]):
                box(axes, 1.7 + 0.92 * number, y, word, colour, 0.8)
        else:
            for number, word in enumerate(emitted[:5]):
                last = number == len(emitted) - 1
                box(axes, 1.7 + 0.92 * number, y, word, P if last else ACCEPTED, 0.8)
            what = "recovered" if step.children(step.path[-1] if step.path else 0) else "bonus"
            axes.text(1.7 + 0.92 * len(emitted) - 0.38, y, f"{what} token", size=9.5, color=P, va="center")
        if stage < 4:
            axes.annotate("", (0.45, y - 0.93), (0.45, y - 0.22), arrowprops={"arrowstyle": "-|>", "color": GREY})
    return figure


def draw_acceptance(step: Step, decode: Any, which: Sequence[tuple[int, int, str]]) -> Figure:
    """Draw p and q below some rows, the drafted token's acceptance, and the residual distribution.

    Args:
        step: the step.
        decode: returns the text of a token.
        which: row, drafted row below it, and what happened.
    """
    shown = 5
    figure = Figure(figsize=(WIDTH, 3.1 * len(which)), layout="constrained")
    for axes, (row, child, what) in zip(np.atleast_1d(figure.subplots(len(which))), which, strict=True):
        parent, drafted = step.rows[row], step.rows[child].token
        left = residual(parent.p, parent.q)
        order = np.argsort(-np.maximum(parent.p, parent.q))[:shown]
        order = (
            order
            if drafted in parent.tokens[order]
            else np.append(order[:-1], np.flatnonzero(parent.tokens == drafted))
        )
        ticks = np.arange(len(order))
        for offset, values, colour, label in (
            (-0.26, parent.q[order], Q, "q: draft"),
            (0.0, parent.p[order], P, "p: target"),
            (0.26, left[order], "#9fc1e0", "residual: max(p - q, 0), normalised"),
        ):
            axes.barh(ticks + offset, values, 0.25, color=colour, label=label)
            for where, value in zip(ticks + offset, values, strict=True):
                if value >= 0.005:
                    axes.text(value + 0.008, where, f"{value:.2f}", va="center", size=8.5, color="#555555")
        names = [decode(int(parent.tokens[k])) for k in order]
        axes.set_yticks(ticks, names, family="monospace", size=10)
        for label, k in zip(axes.get_yticklabels(), order, strict=True):
            if parent.tokens[k] == drafted:
                label.set_weight("bold")
                label.set_color(ACCEPTED if child in step.path else REJECTED)
        p, q = parent.of(drafted)
        axes.set_title(
            f"drafted {decode(drafted)}: accepted with min(1, {p:.2f} / {q:.2f}) = {min(1, p / q):.2f}\n{what}"
        )
        axes.set(xlim=(0, 1), ylim=(len(order) - 0.45, -0.6))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("probability of the next token")
    figure.axes[-1].legend(loc="lower right", fontsize=9)
    return figure


def draw_measuring(run: Path) -> Figure:
    """Draw the groups of a run with its arms in their order, and what became of the baseline's decode time."""
    requests = pd.read_parquet(run / "requests.parquet")
    summary = json.loads((run / "summary.json").read_text())
    groups = sorted(requests["group"].unique())
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes, below = figure.subplots(2, height_ratios=(len(groups), 1.6))
    for group in groups:
        start = 0.0
        for request in requests[requests["group"] == group].sort_values("order").itertuples():
            label, colour = ("baseline", BASELINE) if request.arm == "baseline" else ("proposer", COLOURS[1])
            seen = label in axes.get_legend_handles_labels()[1]
            axes.barh(group, request.decode_seconds, 0.62, left=start, color=colour, label=None if seen else label)
            speed = f"{request.decode_tokens / request.decode_seconds:.0f} tokens/s"
            axes.text(start + request.decode_seconds / 2, group, speed,
                      ha="center", va="center", color="white", size=9)  # fmt: skip
            start += request.decode_seconds
    axes.set_yticks(groups, [f"group {group + 1}" for group in groups])
    axes.set(ylim=(len(groups) - 0.4, -0.6), xlabel="seconds of decoding")
    axes.set_title("Both arms decode each group; they take turns in going first")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=9)
    end_to_end = summary["arms"]["baseline"]["roofline_share_end_to_end"]["mean"]
    forwards = end_to_end / summary["arms"]["baseline"]["roofline_share"]["mean"]
    for width, colour, text in (
        (1.0, "#d5dae0", f"all decode time: the share end to end is {end_to_end:.0%}"),
        (forwards, "#9aa3ad", f"the target's forwards: the roofline share is {end_to_end / forwards:.0%}"),
        (end_to_end, BASELINE, "least seconds: max(bytes / bandwidth, FLOPs / peak)"),
    ):
        below.barh(0, width, 0.6, color=colour, label=text)
    below.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.75), fontsize=9)
    below.set_yticks([])
    below.set(xlim=(0, 1), ylim=(-0.45, 0.5), xlabel="share of the baseline's decode time")
    below.set_title("Roofline share of the baseline")
    below.grid(visible=False)
    return figure


def draw_speedups(results: Path) -> Figure:
    """Draw the speed-up of each proposer on each text, greedy and sampled."""
    table = pd.read_csv(results)
    names = {"medusa": "Medusa tree", "draft_chain": "draft chain", "draft_tree": "draft tree", "ngram_chain": "n-gram",
             "ngram_tree": "n-gram tree"}  # fmt: skip
    texts = ["code", "json", "prose"]
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, temperature in zip(panels, (0, 1), strict=True):
        for panel, text in enumerate(texts):
            for number, (arm, name) in enumerate(names.items()):
                rows = table[(table["prompts"] == text) & (table["temperature"] == temperature) & (table["arm"] == arm)]
                row = rows.iloc[0]
                low, high = row["speedup"] - row["speedup_low"], row["speedup_high"] - row["speedup"]
                y = panel * 6 + number
                axes.errorbar(row["speedup"], y, xerr=[[low], [high]], fmt="o", ms=5, lw=1.6, capsize=0,
                              color=PROPOSERS[arm], label=name if panel == 0 else None)  # fmt: skip
        axes.axvline(1, color=GREY, ls="--", lw=1)
        axes.set_title("greedy" if temperature == 0 else "temperature 1")
        axes.set_xlabel("speed-up [95 %]")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks([2, 8, 14], ["code", "JSON", "prose"], size=11)
    panels[0].set_ylim(17, -1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9.5)
    return figure


# Command -------------------------------------------------------------------------------------------------------------


def written(figure: Figure, file: Path) -> None:
    """Save a figure as SVG on white, and on a dark background where the page is dark; letters are drawn as paths."""
    stream = StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    file.write_text(with_dark_scheme(stream.getvalue()), encoding="utf-8")
    print(file)


def with_dark_scheme(svg: str) -> str:
    """Return an SVG of matplotlib with a style that changes its colours in the dark colour scheme of a browser.

    An image follows the scheme of the page that shows it, on the site and on a forge. Its background is its own, so
    that it stays legible in readers that know no scheme.
    """
    colours = sorted(set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)))
    dark = {colour: DARK.get(colour) or on_dark(colour) for colour in colours}
    rules = [f'[style*="{what}: {colour}"]{{{what}:{dark[colour]}!important}}' for what in ("fill", "stroke")
             for colour in colours if dark[colour] != colour and f"{what}: {colour}" in svg]  # fmt: skip
    style = f"@media (prefers-color-scheme: dark){{svg{{fill:{DARK['#000000']}}}{''.join(rules)}}}"
    return svg.replace("</style>", f"{style}</style>", 1)


def word(text: str) -> str:
    """Return a token's text as it is drawn: spaces and line breaks made visible, long runs of spaces counted."""
    if len(text) > 3 and not text.strip(" "):
        return f"{len(text)} spaces"
    return visible(text.replace("\n", "\u23ce").replace(" ", "\u2423"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", help="the first run")
    parser.add_argument("first", type=Path, nargs="?", help="the second run")
    parser.add_argument("--request", type=int, default=0, help="of the first run, the request that is drawn (0)")
    parser.add_argument("--forward", type=int, default=9, help="of this request, the step (9)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures (docs/images)"
    )
    given = parser.parse_args()
    mpl.rcParams.update(STYLE | {"svg.hashsalt": "docs", "axes.titlesize": 10.5})
    written(draw_speedups(ROOT / "experiments" / "proposers" / "results.csv"), given.out / "speedups.svg")
    if given.tree is None:
        return
    if given.first is None:
        parser.error("both runs are needed, or none")
    from spec_lab.models.target import Target

    tokenizer = Target.load(str(ROOT / "spec_lab" / "zoo" / "target")).tokenizer
    prompts = (ROOT / "spec_lab" / "zoo" / "prompts" / "code.jsonl").read_text().splitlines()
    prompt = tokenizer.encode(json.loads(prompts[given.request])["prompt"])
    step = read_step(given.tree, given.request, given.forward, prompt)
    decode = lambda token: word(tokenizer.decode([token]))  # noqa: E731
    words = [decode(row.token) for row in step.rows]
    before = word(tokenizer.decode([*step.before[-5:], step.rows[0].token]).lstrip())
    end = step.path[-1]
    which = [
        (0 if len(step.path) == 1 else step.path[-2], end, "it was accepted"),
        (end, step.children(end)[0], f"it was rejected; {decode(step.emitted[-1])} was drawn from the residual"),
    ]
    written(draw_tree(step, words), given.out / "draft_tree.svg")
    written(draw_step(step, words, [decode(token) for token in step.emitted], before), given.out / "one_step.svg")
    written(draw_acceptance(step, decode, which), given.out / "acceptance.svg")
    written(draw_measuring(given.first), given.out / "measuring.svg")


if __name__ == "__main__":
    main()
