"""Measures a step's cost outside the calls of modules: python experiments/overhead/host.py --nodes 16

Greedy, batch 1: the engine's baseline, and Medusa's heads with their likeliest tree. Printed are medians over steps, in
milliseconds, after the first step of each prompt: the time of each phase without the calls of target and heads, the
time between two steps, and their sum. Everything runs after real forwards, which leave the CPU's caches cold.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import pandas as pd
import torch

import spec_lab
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.step_info import StepInfo
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models import gguf
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.text.prompts import encode, jsonl
from spec_lab.verify import Token

ZOO = Path(spec_lab.__file__).parent / "zoo"


def host_seconds(info: StepInfo, following: StepInfo) -> dict[str, float]:
    """Return the seconds of a step outside module calls by phase, and those between it and the following one."""
    seconds = info.seconds()
    seconds["propose"] -= seconds.pop("propose_forward")
    seconds["target"] -= seconds.pop("target_forward")
    phases = {name: seconds[name] for name in ("propose", "target", "probabilities", "verify", "commit")}
    between = info.clock.seconds(info.ended, following.began)
    return phases | {"between": between, "whole": sum(phases.values()) + between}


def measure(
    target: Target, proposers: Mapping[str, Proposer], prompts: Sequence[tuple[int, ...]], new: int
) -> pd.DataFrame:
    """Return medians in milliseconds: a row for each proposer, a column for each phase. The proposers alternate."""
    infos_of: dict[str, list[dict[str, float]]] = {name: [] for name in proposers}
    for number, prompt in enumerate([prompts[0], *prompts], -1):  # the first time to warm up
        for name, proposer in proposers.items():
            request = Request(0, "prompt", prompt, Sampling(), new)
            with torch.inference_mode():
                infos = [
                    info.slim() for info in fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), [request])
                ]
            if number >= 0:
                infos_of[name] += [host_seconds(*pair) for pair in pairwise(infos[1:])]
    table = {name: {key: 1e3 * median(row[key] for row in rows) for key in rows[0]} for name, rows in infos_of.items()}
    return pd.DataFrame(table).T


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", help="a GGUF file of the target; default: the bundled target in transformers")
    parser.add_argument("--nodes", type=int, default=16, help="of Medusa's tree (16)")
    parser.add_argument("--prompts", type=int, default=8, help="bundled code prompts (8)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each (64)")
    parser.add_argument("--threads", type=int, default=1, help="(1)")
    parser.add_argument("--dtype", default="bfloat16", help="of transformers' weights (bfloat16)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.gguf:
        target = gguf.load(given.gguf, threads=given.threads)
    else:
        target = Target.load(str(ZOO / "target"), dtype=given.dtype)
    heads = Medusa.load(target, str(ZOO / "medusa"), tree="likeliest", max_nodes=given.nodes)
    texts = jsonl(str(ZOO / "prompts" / "code.jsonl"))[: given.prompts]
    prompts = [tuple(tokens[:64]) for tokens in encode(texts, target.tokenizer, target.context, None)]
    proposers: dict[str, Proposer] = {"baseline": Null(), f"Medusa, {given.nodes} nodes": heads}
    print(measure(target, proposers, prompts, given.tokens).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
