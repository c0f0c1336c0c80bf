"""How much slower than a bare loop over the model is the engine's autoregressive decoding?

    python experiments/overhead/measure.py --prompts 16 --tokens 96

The bare loop is what one would write by hand: the same weights, a ``DynamicCache``, SDPA attention and arg max. Both
decode the same bundled prompts greedily in one process, one right after the other, in alternating order. Each prompt
gives one ratio of decode seconds (without the first forward, over the prompt), so a slow drift of the machine cancels.
The table shows the ratio of sums with its 95 % interval (bootstrap over prompts), and the ratio of the median steps,
which single disturbances do not move.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import DynamicCache

import spec_lab
from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.request import Request
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.peers import as_transformers_runs_it
from spec_lab.text.prompts import encode, jsonl
from spec_lab.verify import Token

ZOO = Path(spec_lab.__file__).parent / "zoo"


def engine_steps(target: Target, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Decode with the engine: the tokens, and the seconds of each step but the first."""
    request, seconds = Request(0, "prompt", prompt, Sampling(), count), []
    engine = fixed_group(target, Null(), Token(), [request], CounterDraws(0))
    start = time.perf_counter()
    for _ in engine:
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    return engine.sequences[0].emitted, seconds[1:]


@torch.inference_mode()
def bare_steps(model: torch.nn.Module, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Decode with a loop over the model: the tokens, and the seconds of each step but the first."""
    cache, ids, tokens, seconds = DynamicCache(), torch.tensor([prompt]), [], []
    start = time.perf_counter()
    for _ in range(count):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1)[None]
        tokens.append(int(ids))
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    return tokens, seconds[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="bundled code prompts (16)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (1)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (bfloat16)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    target = Target.load(str(ZOO / "target"), dtype=given.dtype)
    bare = as_transformers_runs_it(target)
    prompts = [
        tuple(tokens[:64])
        for tokens in encode(
            jsonl(str(ZOO / "prompts" / "code.jsonl"))[: given.prompts], target.tokenizer, target.context, None
        )
    ]
    decoders = {"engine": lambda prompt: engine_steps(target, prompt, given.tokens),
                "bare": lambda prompt: bare_steps(bare, prompt, given.tokens)}  # fmt: skip
    sums: dict[str, list[float]] = {name: [] for name in decoders}
    steps: dict[str, list[float]] = {name: [] for name in decoders}
    for decode in decoders.values():
        decode(prompts[0])
    for number, prompt in enumerate(prompts):
        outputs = {}
        for name in decoders if number % 2 else reversed(decoders):
            outputs[name], seconds = decoders[name](prompt)
            sums[name].append(sum(seconds))
            steps[name] += seconds
        if outputs["engine"] != outputs["bare"]:
            print(f"prompt {number}: the outputs differ (rounding in {given.dtype})")
    ratio, low, high = cluster_interval(sums["bare"], sums["engine"], np.arange(len(prompts)))
    print(f"{len(prompts)} prompts, {given.tokens} tokens each, {given.threads} threads, {given.dtype}")
    print(f"engine's speed over the bare loop's: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    engine, loop = (median(steps[name]) * 1e3 for name in ("engine", "bare"))
    print(f"median step: engine {engine:.3f} ms, bare loop {loop:.3f} ms, ratio {loop / engine:.3f}")


if __name__ == "__main__":
    main()
