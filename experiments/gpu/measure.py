"""How close to a GPU's limits are eager steps, and steps captured as CUDA graphs?

    python experiments/gpu/measure.py --shapes 1B 7B 14B

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.core.draft import Draft, Shape, empty, forest
from spec_lab.core.machine_limits import measure
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.roofline import Roofline
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.model_work import work_of
from spec_lab.engine.request import Request
from spec_lab.engine.step_info import StepInfo
from spec_lab.models.merged import merge
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.results.manifest import machine
from spec_lab.verify import Token

SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512),
    "1B": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, vocab_size=128256
    ),
    "7B": dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    ),
    "14B": dict(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, vocab_size=152064
    ),
}
"""Sizes of Llama 3.2 1B, Llama 2 7B and Qwen 2.5 14B; eight key-value heads, four of the smallest."""

WAYS = ("eager", "captured")
PROMPT = 128
"""Tokens of each prompt of autoregressive decoding."""

WARM_UP = 8
"""Steps before the timed ones: kernels are chosen, graphs are captured."""


class Row(NamedTuple):
    """One measurement.

    Args:
        shape: of the model.
        way: how steps run.
        batch: sequences.
        context: tokens of each before the step.
        nodes: of each sequence's tree.
        seconds: median of a forward.
        spread: quartiles of a forward.
        share: of the roofline.
    """

    shape: str
    way: str
    batch: int
    context: int
    nodes: int
    seconds: float
    spread: tuple[float, float]
    share: float


def model_of(name: str, device: str, dtype: torch.dtype, context: int) -> Any:
    """A Llama with random weights, made on the device."""
    sizes = SHAPES[name]
    config = LlamaConfig(
        **sizes, num_key_value_heads=2 if name == "tiny" else 8, max_position_embeddings=context,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def ways(model: Any, name: str) -> dict[str, Target]:
    """Both ways of running the model, with empty KV caches: they are as large as the largest batch and context."""
    lms = {way: CausalLM(model, fixed=way == "captured") for way in WAYS}
    return {way: Target(lm, None, name, model.config.max_position_embeddings, "", 0.0) for way, lm in lms.items()}


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


def balanced(nodes: int) -> Shape:
    """A tree in which every row has two children, as long as there are nodes."""
    return Shape(1, np.arange(nodes, dtype=np.int64) // 2)


def decoding(target: Target, batch: int, prompt: int, steps: int) -> list[StepInfo]:
    """Steps of greedy autoregressive decoding, those over the prompt and the warm-up left out."""
    generator = np.random.default_rng(0)
    requests = [
        Request(
            n, f"r{n}", tuple(generator.integers(0, target.vocabulary, prompt).tolist()), Sampling(), steps + WARM_UP
        )
        for n in range(batch)
    ]
    return list(fixed_group(target, Null(), Token(), requests, CounterDraws(0)))[WARM_UP:]


def rows_of(infos: Sequence[StepInfo], nodes: int = 0) -> dict[str, list[int]]:
    """What ``Roofline.seconds`` reads of decoding steps."""
    rows = [
        (n, context, pending)
        for n, one in enumerate(infos)
        for context, pending in zip(one.context, one.pending, strict=True)
    ]
    step, context, pending = zip(*rows, strict=True)
    return {"step": list(step), "context": list(context), "pending": list(pending), "nodes": [nodes] * len(rows)}


def autoregressive(
    targets: Mapping[str, Target], roofline: Roofline, shape: str, batch: int, prompt: int, steps: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Decode with each way in turn, and in alternating order."""
    spent: dict[str, list[tuple[float, float, float]]] = {way: [] for way in targets}  # whole, forward, bound
    order = list(targets)
    for _ in range(repeats):
        for way in order:
            infos = decoding(targets[way], batch, prompt, steps)
            seconds = [one.seconds() for one in infos]
            read, computed = roofline.seconds(**rows_of(infos))
            bound = float(np.maximum(read, computed).sum())
            spent[way].append((sum(s["whole"] for s in seconds), sum(s["target_forward"] for s in seconds), bound))
        order.reverse()
    for way, found in spent.items():
        whole, forward, bound = (sum(part) for part in zip(*found, strict=True))
        tokens = batch * steps * repeats
        each = [b / f for _, f, b in found]
        yield {
            "shape": shape, "way": way, "batch": batch, "prompt": prompt, "tokens_per_second": tokens / whole,
            "roofline_share": bound / forward, "of_repeats": [min(each), max(each)], "overhead": 1 - forward / whole,
        }  # fmt: skip


def forwards(
    targets: Mapping[str, Target],
    roofline: Roofline,
    shape: str,
    batch: int,
    context: int,
    nodes: Sequence[int],
    repeats: int,
) -> Iterator[Row]:
    """Time forwards over trees, below sequences that are rewound after each."""
    states = {}
    for way, target in targets.items():
        sequences = [target.lm.open(context + max(nodes) + 2) for _ in range(batch)]
        target.causal_lm.forward(sequences, [[1] * context] * batch, empty(batch, target.lm.device))
        for one in sequences:
            one.accept()
        states[way] = sequences
    for count in nodes:
        tree = forest((balanced(count),) * batch)
        seconds: dict[str, list[float]] = {way: [] for way in targets}
        for repeat in range(-3, repeats):
            for way in list(targets)[:: 1 if repeat % 2 else -1]:
                lm, sequences = targets[way].lm, states[way]
                draft = Draft(tree, torch.ones(tree.nodes, dtype=torch.long, device=lm.device))
                lm.clock.take()
                with torch.inference_mode():
                    lm.run(lm.prepare(sequences, [[2]] * batch, draft))
                lm.clock.synchronise()
                spans = [
                    lm.clock.seconds(start, end) for name, start, end in lm.clock.take() if name == "target_forward"
                ]
                for one in sequences:
                    one.accept()
                    one.truncate(context)
                if repeat >= 0:
                    seconds[way].append(sum(spans))
        read, computed = roofline.seconds([0] * batch, [context + 1] * batch, [1] * batch, [count] * batch)
        bound = float(np.maximum(read, computed).sum())
        for way, found in seconds.items():
            low, high = np.quantile(found, [0.25, 0.75]).tolist()
            yield Row(shape, way, batch, context, count, median(found), (low, high), bound / median(found))
    for sequences in states.values():
        for one in sequences:
            one.close()


def figure(rows: Sequence[Row], file: Path) -> None:
    """Draw t(n) / t(0) by nodes: a panel for each shape and context, a line for each batch, dashed where eager."""
    panels = sorted({(row.shape, row.context) for row in rows}, key=lambda one: (list(SHAPES).index(one[0]), one[1]))
    whole = Figure(figsize=(4 * len(panels), 3.5), layout="constrained")
    for place, (shape, context) in enumerate(panels, start=1):
        axes = whole.add_subplot(1, len(panels), place)
        batches = sorted({row.batch for row in rows if (row.shape, row.context) == (shape, context)})
        for number, batch in enumerate(batches):
            for way in WAYS:
                own = [r for r in rows if (r.shape, r.context, r.batch, r.way) == (shape, context, batch, way)]
                first = {r.nodes: r.seconds for r in own}.get(0)
                if first:
                    x, y = [r.nodes + 1 for r in own], [r.seconds / first for r in own]
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
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    limits = {}
    for shape in given.shapes:
        longest = max(*given.contexts, PROMPT) + 2 * max(given.nodes) + given.steps + 64
        model = model_of(shape, given.device, dtype, longest)
        merge(model)  # for both ways: they differ in the capture only
        work = work_of(model, {})
        assert work is not None
        roofline = Roofline(work, measure(work.weight_bytes, dtype, device))
        limits[shape] = roofline.facts()
        for batch in tqdm(given.batches, desc=f"{shape}: decoding"):
            with or_left_out(f"{shape}, batch {batch}, decoding", left_out):
                repeats = max(2, given.repeats // 3)
                found += autoregressive(ways(model, shape), roofline, shape, batch, PROMPT, given.steps, repeats)
        for context in given.contexts:
            for batch in tqdm(given.batches, desc=f"{shape}: forwards at context {context}"):
                with or_left_out(f"{shape}, batch {batch}, context {context}", left_out):
                    rows += forwards(ways(model, shape), roofline, shape, batch, context, given.nodes, given.repeats)
        del model
    table = Table("shape", "way", "batch", "tokens/s", "roofline share", "overhead", title="Autoregressive decoding")
    for one in found:
        table.add_row(
            one["shape"], one["way"], str(one["batch"]), f"{one['tokens_per_second']:.1f}",
            f"{one['roofline_share']:.0%}", f"{one['overhead']:.1%}",
        )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    whole = {
        "machine": machine(), "limits": limits, "decoding": found, "forwards": [row._asdict() for row in rows],
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
