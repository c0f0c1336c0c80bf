"""Measures the cost of a KV cache that all sequences share: python -m experiments.engines.unified

Draft trees require llama.cpp's unified KV cache, in which a token's attention reads the cells of all sequences of a
batch and masks those of others; autoregressive decoding could give each sequence cells of its own. For each batch size
and context, two contexts of llama.cpp compute the same decoding steps, in alternating blocks. Printed are the
milliseconds of a step (the mean over blocks of each block's median), and their ratio with a 95 % interval (bootstrap
over blocks).
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import spec_lab
from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.models.gguf_export import convert
from spec_lab.runners.llama_library import Model, load_library

ZOO = Path(spec_lab.__file__).parent / "zoo"

CHUNK = 256
"""Tokens of a prompt that are computed at once."""

STEPS = 10
"""Steps of a block; two more come first and are not timed."""


class Batched:
    """Sequences of equal length in one context of llama.cpp.

    Args:
        model: computes them.
        batch: how many.
        context: tokens of each.
        unified: whether they share one KV cache.
        threads: of the CPU.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, model: Model, batch: int, context: int, unified: bool, threads: int) -> None:
        self.lib: Any = model.library
        self.batch, self.context = batch, context
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * -(-(context + 1) // CHUNK) * CHUNK, batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.no_perf = unified, True
        self.handle = self.lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise MemoryError(f"llama.cpp cannot make a KV cache for {batch} sequences of {context} tokens")
        rows = max(batch, CHUNK)
        self.token, self.position, self.count, self.id = ((ctypes.c_int32 * rows)() for _ in range(4))
        self.flag = (ctypes.c_int8 * rows)()
        self.ids = (ctypes.POINTER(ctypes.c_int32) * rows)(
            *(ctypes.cast(ctypes.byref(self.id, 4 * row), ctypes.POINTER(ctypes.c_int32)) for row in range(rows))
        )
        for number in range(batch):
            for start in range(0, context, CHUNK):
                self.decode([(number, position) for position in range(start, min(start + CHUNK, context))])

    def decode(self, rows: Sequence[tuple[int, int]]) -> None:
        """Compute one token for each (sequence, position)."""
        for row, (number, position) in enumerate(rows):
            self.token[row] = 10 + (7 * position + number) % 1000
            self.position[row], self.id[row], self.count[row], self.flag[row] = (
                position,
                number,
                1,
                row == len(rows) - 1,
            )
        if len(rows) == self.batch:  # a decoding step: logits of all rows
            self.flag[: self.batch] = [1] * self.batch
        batch = self.lib.llama_batch(
            n_tokens=len(rows), token=self.token, pos=self.position, n_seq_id=self.count, seq_id=self.ids,
            logits=self.flag,
        )  # fmt: skip
        if code := self.lib.llama_decode(self.handle, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")

    def block(self) -> float:
        """Median seconds of ``STEPS`` equal steps."""
        memory, seconds = self.lib.llama_get_memory(self.handle), []
        for _ in range(STEPS + 2):
            start = time.perf_counter()
            self.decode([(number, self.context) for number in range(self.batch)])
            seconds.append(time.perf_counter() - start)
            for number in range(self.batch):
                self.lib.llama_memory_seq_rm(memory, number, self.context, -1)
        return float(np.median(seconds[2:]))

    def close(self) -> None:
        """Free the KV cache."""
        self.lib.llama_free(self.handle)


def measure(model: Model, batches: Sequence[int], contexts: Sequence[int], blocks: int, threads: int) -> Iterator[str]:
    """Yield the rows of a Markdown table."""
    yield "| batch | context | own cells, ms | unified, ms | unified / own |"
    yield "|---|---|---|---|---|"
    for batch in batches:
        for context in contexts:
            both = [Batched(model, batch, context, unified, threads) for unified in (False, True)]
            seconds = np.empty((blocks, 2))
            for turn in range(blocks):
                for cache in (0, 1) if turn % 2 else (1, 0):
                    seconds[turn, cache] = both[cache].block()
            for each in both:
                each.close()
            separate, unified = 1e3 * seconds.mean(0)
            ratio, low, high = cluster_interval(seconds[:, 1], seconds[:, 0], range(blocks))
            yield f"| {batch} | {context} | {separate:.2f} | {unified:.2f} | {ratio:.2f} [{low:.2f}, {high:.2f}] |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", help="of the bundled target's weights (bf16)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1000])
    parser.add_argument("--blocks", type=int, default=16, help="of steps for each, in turn (16)")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "target.gguf"
        convert(str(ZOO / "target"), file, chosen.dtype)
        model = Model(load_library(), str(file))
        for line in measure(model, chosen.batches, chosen.contexts, chosen.blocks, chosen.threads):
            print(line, flush=True)


if __name__ == "__main__":
    main()
