"""Autoregressive decoding of random weights, eager and captured: tokens/s, roofline share, captures, their seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.gpu.check.part import Part, run
from experiments.gpu.random_models import SHAPES, both_ways, llama, roofline_of
from experiments.gpu.timing import Captures, autoregressive
from spec_lab.models.fused import fuse

PROMPT = 128
STEPS = 96
"""Most timed steps: with the prompt they stay within the first 256 cells, so that a batch size is one shape."""

BATCHES = (1, 8)
SECONDS = 8.0
"""Time of decoding, for each shape and batch."""


def measure(part: Part) -> None:
    """Decode with each shape, batch and way."""
    decoded: list[Mapping[str, Any]] = []
    captured: list[Mapping[str, Any]] = []
    for shape in ("tiny",) if part.tiny else ("1B", "8B"):
        with part.attempt(shape):
            model = llama(SHAPES[shape], part.device, part.dtype, 1024)
            fuse(model)  # for both ways: they differ in the capture only
            roofline = roofline_of(model, part.dtype, part.device)
            part.keep(f"limits of {shape}", roofline.facts())
            for batch in BATCHES:
                with part.attempt(f"{shape}, batch {batch}"):
                    targets = both_ways(model, shape)
                    captures = Captures.of(targets["captured"].lm)
                    seconds, repeats = (0.2, 1) if part.tiny else (min(SECONDS, part.left / 2), 6)
                    steps = 4 if part.tiny else STEPS
                    for row in autoregressive(targets, roofline, shape, batch, PROMPT, steps, repeats, seconds):
                        decoded.append(row)
                        part.keep("decoding", decoded)
                        part.say(
                            f"{shape}, batch {batch}, {row['way']}: {row['tokens_per_second']:.1f} tokens/s, roofline "
                            f"share {row['roofline_share']:.1%}, {row['overhead']:.1%} outside the forward"
                        )
                    captured.append(
                        {"shape": shape, "batch": batch, "captures": captures.count, "seconds": captures.seconds}
                    )
                    part.keep("captures", captured)
                    part.say(f"{shape}, batch {batch}: {captures.count} {part.captures}, in {captures.seconds:.2f} s")
            del model


if __name__ == "__main__":
    run(measure)
