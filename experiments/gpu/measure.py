"""How close to a GPU's limits are eager steps, and steps captured as CUDA graphs?

    python -m experiments.gpu.measure --shapes 1B 7B 14B

Models have random weights in the shapes of Llama models, so no checkpoint is needed; the text does not matter for the
time. For each shape, the two ways of running a step alternate on the same weights:

1. Autoregressive decoding in the engine: tokens/s, the share of the roofline that the target's forwards reach, and the
   share of a step that is not the target's forward (overhead).
2. t(n): seconds of a forward over a tree of n nodes for each of B sequences of C tokens.

Rows that do not fit the memory are left out by name. Written are ``results.json``, and ``forward.png`` beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.gpu.random_models import SHAPES, WAYS, both_ways, llama, roofline_of
from experiments.gpu.timing import Row, autoregressive, forwards
from spec_lab.models.fused import fuse
from spec_lab.results.manifest import machine

PROMPT = 128
"""Tokens of each prompt of autoregressive decoding."""


@contextmanager
def or_left_out(what: str, left_out: list[str]) -> Iterator[None]:
    """Note what does not fit the memory, and go on."""
    try:
        yield
    except torch.OutOfMemoryError:
        left_out.append(f"{what}: out of memory")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def figure(rows: Sequence[Row], file: Path) -> None:
    """Draw t(n) / t(0) by nodes: a panel for each shape and context, a line for each batch, dashed where eager."""
    panels = sorted({(row.shape, row.context) for row in rows}, key=lambda pair: (list(SHAPES).index(pair[0]), pair[1]))
    whole = Figure(figsize=(4 * len(panels), 3.5), layout="constrained")
    for panel, (shape, context) in enumerate(panels, start=1):
        axes = whole.add_subplot(1, len(panels), panel)
        batches = sorted({row.batch for row in rows if (row.shape, row.context) == (shape, context)})
        for number, batch in enumerate(batches):
            for way in WAYS:
                cells = [r for r in rows if (r.shape, r.context, r.batch, r.way) == (shape, context, batch, way)]
                first = {r.nodes: r.seconds for r in cells}.get(0)
                if first:
                    x, y = [r.nodes + 1 for r in cells], [r.seconds / first for r in cells]
                    label = f"batch {batch}" if way == "captured" else None
                    axes.plot(x, y, "-" if way == "captured" else "--", color=f"C{number}", label=label)
        axes.set(title=f"{shape}, context {context}", xlabel="rows per sequence", ylabel="t(n) / t(0)", xscale="log")
        axes.legend(frameon=False, title="dashed: eager")
    whole.savefig(file, dpi=120)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "7B", "14B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 32768])
    parser.add_argument("--nodes", nargs="+", type=int, default=[0, 1, 3, 7, 15, 31, 63, 127, 255])
    parser.add_argument("--steps", type=int, default=64, help="timed steps of decoding (64)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this torch sees no GPU: give --device cpu --shapes tiny to try the script")
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    rows: list[Row] = []
    measured: list[dict[str, Any]] = []
    left_out: list[str] = []
    limits = {}
    for shape in given.shapes:
        longest = max(*given.contexts, PROMPT) + 2 * max(given.nodes) + given.steps + 64
        model = llama(SHAPES[shape], device, dtype, longest)
        fuse(model)  # for both ways: they differ in the capture only
        roofline = roofline_of(model, dtype, device)
        limits[shape] = roofline.facts()
        for batch in tqdm(given.batches, desc=f"{shape}: decoding"):
            with or_left_out(f"{shape}, batch {batch}, decoding", left_out):
                repeats = max(2, given.repeats // 3)
                measured += autoregressive(
                    both_ways(model, shape), roofline, shape, batch, PROMPT, given.steps, repeats
                )
        for context in given.contexts:
            for batch in tqdm(given.batches, desc=f"{shape}: forwards at context {context}"):
                with or_left_out(f"{shape}, batch {batch}, context {context}", left_out):
                    rows += forwards(
                        both_ways(model, shape), roofline, shape, batch, context, given.nodes, given.repeats
                    )
        del model
    table = Table("shape", "way", "batch", "tokens/s", "roofline share", "overhead", title="Autoregressive decoding")
    for row in measured:
        table.add_row(
            row["shape"], row["way"], str(row["batch"]), f"{row['tokens_per_second']:.1f}",
            f"{row['roofline_share']:.0%}", f"{row['overhead']:.1%}",
        )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    whole = {
        "machine": machine(), "limits": limits, "decoding": measured, "forwards": [row._asdict() for row in rows],
        "left_out": left_out,
    }  # fmt: skip
    (given.out / "results.json").write_text(json.dumps(whole, indent=1, default=str))
    if rows:
        figure(rows, given.out / "forward.png")
    Console().print(table)
    for line in left_out:
        Console().print(line)


if __name__ == "__main__":
    main()
