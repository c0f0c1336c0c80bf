"""The time of a forward by the rows of each sequence, t(n), eager and captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.gpu.check.part import Part, run
from experiments.gpu.random_models import SHAPES, both_ways, llama, roofline_of
from experiments.gpu.timing import Captures, forwards
from spec_lab.models.fused import fuse

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BATCHES = (1, 8)
CONTEXT = 512


def measure(part: Part) -> None:
    """Time forwards of each shape, batch and number of rows; the larger model first."""
    measured: list[dict[str, Any]] = []
    shapes = ("tiny",) if part.tiny else ("8B", "1B")
    nodes = [rows - 1 for rows in (ROWS[::4] if part.tiny else ROWS)]
    for number, shape in enumerate(shapes):
        with part.attempt(shape):
            measure_shape(part, shape, nodes, len(shapes) - number, measured)
    part.say("n: " + " ".join(str(count + 1) for count in nodes))


def measure_shape(part: Part, shape: str, nodes: Sequence[int], remaining: int, measured: list[dict[str, Any]]) -> None:
    """Time forwards of one shape; its model and what holds it are freed when the function returns.

    Args:
        part: that runs.
        shape: its name.
        nodes: sizes of the trees.
        remaining: number of shapes that share the time that is left, this one included.
        measured: the rows so far; those of this shape are added.
    """
    context = 16 if part.tiny else CONTEXT
    model = llama(SHAPES[shape], part.device, part.dtype, 2 * context + 2 * max(nodes) + 64)
    fuse(model)  # for both ways: they differ in the capture only
    roofline = roofline_of(model, part.dtype, part.device)
    for later, batch in enumerate(BATCHES):
        with part.attempt(f"{shape}, batch {batch}"):
            targets = both_ways(model, shape)
            captures = Captures.of(targets["captured"].lm)
            seconds = 0.1 if part.tiny else part.left / (remaining * len(BATCHES) - later) - 3.0
            of_batch = []
            for row in forwards(targets, roofline, shape, batch, context, nodes, 30, seconds):
                of_batch.append(row._asdict())
                part.keep("forwards", measured + of_batch)
            measured += of_batch
            for way in targets:
                first = next(row["seconds"] for row in of_batch if row["way"] == way)
                ratios = [f"{row['seconds'] / first:.2f}" for row in of_batch if row["way"] == way]
                part.say(f"{shape}, batch {batch}, {way}: t(1) {first * 1e3:.2f} ms; t(n)/t(1) " + " ".join(ratios))
            part.keep(f"captures of {shape}, batch {batch}", [captures.count, captures.seconds])


if __name__ == "__main__":
    run(measure)
