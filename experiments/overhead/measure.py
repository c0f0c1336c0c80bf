"""How much slower than a bare loop over the model is the engine's autoregressive decoding?

    python experiments/overhead/measure.py --prompts 16 --tokens 96

The bare loop is what one would write by hand: the same weights, a ``DynamicCache``, SDPA attention and arg max. Both
decode the same bundled prompts greedily in one process, one step of each in turn and in alternating order, so that the
machine's drift cancels. Steps over the prompt are left out. Printed are the ratio of summed seconds with its 95 %
interval (bootstrap over prompts), and the ratio of the median steps, which single disturbances do not move.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import DynamicCache

import spec_lab
from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.peers import as_transformers_runs_it
from spec_lab.text.prompts import encode, jsonl
from spec_lab.verify import Token

ZOO = Path(spec_lab.__file__).parent / "zoo"


def engine_tokens(target: Target, prompt: tuple[int, ...], count: int) -> Iterator[int]:
    """Decode with the engine, one token for each step."""
    request = Request(0, "prompt", prompt, Sampling(), count)
    for info in fixed_group(Arm(target, Null(), Token(), CounterDraws(0)), [request]):
        yield info.committed[0].tokens[0].token


def bare_tokens(model: torch.nn.Module, prompt: tuple[int, ...], count: int) -> Iterator[int]:
    """Decode with a loop over the model, one token for each step."""
    cache, ids = DynamicCache(), torch.tensor([prompt])
    read = {cache_argument(model): cache}
    for _ in range(count):
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **read).logits
            ids = logits[:, -1].argmax(-1)[None]
        yield int(ids)


def side_by_side(decoders: dict[str, Iterator[int]]) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Tokens of both decoders, and the seconds of each step but the first."""
    tokens: dict[str, list[int]] = {name: [] for name in decoders}
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    order = list(decoders)
    with suppress(StopIteration):
        while True:
            for name in order:
                start = time.perf_counter()
                token = next(decoders[name])
                seconds[name].append(time.perf_counter() - start)
                tokens[name].append(token)
            order.reverse()
    return tokens, {name: spent[1:] for name, spent in seconds.items()}


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
    sums: dict[str, list[float]] = {"engine": [], "bare": []}
    steps: dict[str, list[float]] = {"engine": [], "bare": []}
    for number, prompt in enumerate([prompts[0], *prompts], -1):  # the first time to warm up
        engine, loop = engine_tokens(target, prompt, given.tokens), bare_tokens(bare, prompt, given.tokens)
        outputs, seconds = side_by_side({"engine": engine, "bare": loop})
        if number < 0:
            continue
        for name, spent in seconds.items():
            sums[name].append(sum(spent))
            steps[name] += spent
        if outputs["engine"] != outputs["bare"]:
            print(f"prompt {number}: the outputs differ (rounding in {given.dtype})")
    ratio, low, high = cluster_interval(sums["bare"], sums["engine"], np.arange(len(prompts)))
    print(f"{len(prompts)} prompts, {given.tokens} tokens each, {given.threads} threads, {given.dtype}")
    print(f"engine's speed over the bare loop's: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    engine, loop = (median(steps[name]) * 1e3 for name in ("engine", "bare"))
    print(f"median step: engine {engine:.3f} ms, bare loop {loop:.3f} ms, ratio {loop / engine:.3f}")


if __name__ == "__main__":
    main()
