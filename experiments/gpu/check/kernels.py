"""Kernels of one decoding step, captured and eager: their time beside that of the step; and attention by backend."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from experiments.gpu.check.part import Part, run
from experiments.gpu.random_models import SHAPES, WAYS, llama, roofline_of, target_of
from experiments.gpu.timing import balanced
from spec_lab.core.draft import Draft, empty
from spec_lab.core.roofline import Roofline
from spec_lab.core.shape import forest
from spec_lab.models.fused import fuse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.graphs import CudaGraphs, uncaptured

NODES = (0, 7)
CONTEXT = 512
REPEATS = 20
"""Timed steps."""

TOP = 25
"""Kernels that are kept by name, those of the most time."""

CELLS = (256, 1024, 8192)
CALLS = 20
"""Calls of attention that are captured together."""


def kernels_of(call: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and seconds of each kernel and copy that a call runs; on a CPU of each operator without those in it."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if device.type != "cuda":
        return [(event.name, event.self_cpu_time_total / 1e6) for event in profiled.events()]
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    return [(event.name, event.time_range.elapsed_us() / 1e6) for event in events]


def by_name(kernels: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Count and seconds of the kernels that take the most time."""
    seconds, count = Counter[str](), Counter(name for name, _ in kernels)
    for name, spent in kernels:
        seconds[name] += spent
    return [{"name": name, "count": count[name], "seconds": spent} for name, spent in seconds.most_common(TOP)]


class Steps:
    """Forwards over one sequence and a tree of so many nodes, from the preparation on the host to the end.

    Args:
        lm: the model.
        nodes: of the tree.
        context: tokens of the sequence before the first step.
    """

    def __init__(self, lm: CausalLM, nodes: int, context: int) -> None:
        self.lm, self.context, tree = lm, context, forest((balanced(nodes),))
        self.draft = Draft(tree, torch.ones(tree.nodes, dtype=torch.long, device=lm.device))
        self.sequence = lm.open(context + 2 * REPEATS + nodes + 2)
        lm.forward([self.sequence], [[1] * context], empty(1, lm.device))
        self.sequence.accept()

    def step(self) -> None:
        """Compute a pending token and the tree; the token stays."""
        self.lm.run(self.lm.prepare([self.sequence], [[2]], self.draft))
        self.sequence.accept()

    def again(self) -> None:
        """Forget the tokens of all steps: the next ones have the lengths that these had."""
        self.sequence.truncate(self.context)

    def timed(self) -> tuple[float, float]:
        """Median seconds of some steps, and of their forwards."""
        clock, wholes, forwards = self.lm.clock, [], []
        clock.take()
        for _ in range(REPEATS):
            clock.synchronise()
            began = time.perf_counter()
            self.step()
            clock.synchronise()
            wholes.append(time.perf_counter() - began)
            forwards.append(
                sum(clock.seconds(start, end) for name, start, end in clock.take() if name == "target_forward")
            )
        return median(wholes), median(forwards)


@torch.inference_mode()
def measure_steps(lm: CausalLM, roofline: Roofline, nodes: int, context: int) -> dict[str, Any]:
    """Time steps of new lengths, then of the same lengths, and then list the kernels of one."""
    steps = Steps(lm, nodes, context)
    for _ in range(2):  # warm up; captured steps have one shape
        steps.step()
    new_lengths, _ = steps.timed()
    steps.again()
    for _ in range(2):
        steps.step()
    whole, forward = steps.timed()
    kernels = kernels_of(steps.step, lm.device)
    read, computed = roofline.seconds([0], [context + 3], [1], [nodes])
    steps.sequence.close()
    return {
        "rows": nodes + 1, "new_lengths_s": new_lengths, "whole_s": whole, "forward_s": forward,
        "kernels": len(kernels), "kernels_s": sum(seconds for _, seconds in kernels),
        "roofline_s": float(max(read[0], computed[0])), "by_name": by_name(kernels),
    }  # fmt: skip


# Attention ------------------------------------------------------------------------------------------------------------


def products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention in three kernels: two products and a softmax."""
    q, k, v = (tensor.flatten(0, 1) for tensor in (query, keys, values))
    scores = torch.baddbmm(mask.flatten(0, 1), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return (scores.softmax(-1) @ v).view(query.shape)


def wide_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same with scores and softmax in float32, as torch's implementations have them."""
    q, k, v = (tensor.flatten(0, 1) for tensor in (query, keys, values))
    if query.is_cuda:
        scores = torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    else:
        scores = q.float() @ k.float().transpose(1, 2)
    shares = torch.add(mask.flatten(0, 1), scores, alpha=q.shape[-1] ** -0.5).softmax(-1)
    return (shares.to(v.dtype) @ v).view(query.shape)


def by_backend(backend: SDPBackend) -> Callable[..., Tensor]:
    """Attention by one of torch's implementations."""

    def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    return attention


BACKENDS: Mapping[str, Callable[..., Tensor]] = {
    "efficient": by_backend(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": by_backend(SDPBackend.CUDNN_ATTENTION),
    "math": by_backend(SDPBackend.MATH),
    "products": products,
    "products in float32": wide_products,
}
"""Ways of attention with a mask. Flash attention has none."""


@torch.inference_mode()
def attention(part: Part) -> Iterator[dict[str, Any]]:
    """Seconds of attention of one layer by the cells, and by the rows that share keys: heads of the 8B shape."""
    capture = uncaptured if part.tiny else CudaGraphs(part.device)
    for cells in CELLS[:1] if part.tiny else CELLS:
        for rows in (4, 32):
            query = torch.randn(1, 8, rows, 128, device=part.device, dtype=part.dtype)
            keys, values = (torch.randn(1, 8, cells, 128, device=part.device, dtype=part.dtype) for _ in range(2))
            mask = torch.zeros(1, 8, rows, cells, device=part.device, dtype=part.dtype)
            for name in ("math", "products", "products in float32") if part.tiny else BACKENDS:
                with part.attempt(f"attention by {name}, {cells} cells, {rows} rows"):

                    def calls(name: str = name, given: tuple[Tensor, ...] = (query, keys, values, mask)) -> None:
                        for _ in range(CALLS):
                            BACKENDS[name](*given)

                    seconds = timed(part, capture(calls)) / CALLS
                    yield {"cells": cells, "rows": rows, "by": name, "seconds": seconds}


def timed(part: Part, call: Callable[[], Any]) -> float:
    """Median seconds of a call on the device."""
    spent = []
    for _ in range(8):
        if not part.tiny:
            torch.cuda.synchronize(part.device)
        began = time.perf_counter()
        call()
        if not part.tiny:
            torch.cuda.synchronize(part.device)
        spent.append(time.perf_counter() - began)
    return median(spent[2:])


def measure(part: Part) -> None:
    """List the kernels of steps of each shape, captured and eager, of one row and of a tree; then time attention."""
    measured: list[dict[str, Any]] = []
    context = 16 if part.tiny else CONTEXT
    for shape in ("tiny",) if part.tiny else ("1B", "8B"):
        with part.attempt(shape):
            model = llama(SHAPES[shape], part.device, part.dtype, 2 * context + 64)
            layers = model.config.num_hidden_layers
            part.say(f"{shape}: {fuse(model)} modules in fewer kernels, of {5 * layers + 1}")
            roofline = roofline_of(model, part.dtype, part.device)
            for way in reversed(WAYS):  # captured first: what matters most
                lm = target_of(model, shape, way == "captured").lm
                for nodes in NODES:
                    with part.attempt(f"{shape}, {way}, {nodes} nodes"):
                        row = {"shape": shape, "way": way, **measure_steps(lm, roofline, nodes, context)}
                        measured.append(row)
                        part.keep("steps", measured)
                        say(part, row)
            del model, lm
    timings = []
    for row in attention(part):
        timings.append(row)
        part.keep("attention", timings)
    for cells, rows in dict.fromkeys((row["cells"], row["rows"]) for row in timings):
        of_these = [row for row in timings if (row["cells"], row["rows"]) == (cells, rows)]
        times = ", ".join(f"{row['by']} {row['seconds'] * 1e6:.1f}" for row in of_these)
        part.say(f"attention over {cells} cells, {rows} rows of 8 heads: {times} us")


def say(part: Part, row: Mapping[str, Any]) -> None:
    """Report a step."""
    what = "operators" if part.tiny else "kernels"
    part.say(
        f"{row['shape']}, {row['rows']} rows, {row['way']}: {row['whole_s'] * 1e3:.2f} ms (new lengths "
        f"{row['new_lengths_s'] * 1e3:.2f}), forward {row['forward_s'] * 1e3:.2f} ms, {row['kernels']} {what} of "
        f"{row['kernels_s'] * 1e3:.2f} ms, roofline {row['roofline_s'] * 1e3:.2f} ms"
    )
    for kernel in row["by_name"][:5]:
        name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", kernel["name"])
        part.say(f"  {kernel['seconds'] * 1e6:.0f} us in {kernel['count']}: {name[:80]}")


if __name__ == "__main__":
    run(measure)
