"""Does greedy speculative decoding emit the tokens of a bare greedy loop over transformers' model, in float64?

Every proposer with every lossless verifier that supports its drafts, over the bundled prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

import spec_lab
from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Proposer
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.tasks.lab import requests_of
from spec_lab.text.prompts import Prompt, jsonl
from spec_lab.verify import Gumbel, KSeq, Lenient, Match, Token, Traversal, Verifier, check_pair

ZOO = Path(spec_lab.__file__).parent / "zoo"
WORKLOADS = ("code", "json", "prose")
GREEDY = Sampling()
TREE = "0 1 0.0 0.1 1.0 0.0.0 0.0.0.0"

VERIFIERS: tuple[Verifier, ...] = (Token(), Traversal(), Match(), KSeq(), Gumbel(), Lenient(1.0))
"""All that are lossless; lenience 1 is."""


def draft(target: Target, **options: Any) -> DraftModel:
    """The bundled draft."""
    return DraftModel.load(target, str(ZOO / "draft"), **options)


PROPOSERS: dict[str, Callable[[Target], Proposer]] = {
    "none": Null.load,
    "draft_chain": lambda target: draft(target, depth=6, confidence=0.6),
    "draft_chain gumbel": lambda target: draft(target, depth=4, drawn="gumbel"),
    "draft_chain warm": lambda target: draft(target, depth=4, temperature=1.0),
    "draft_tree": lambda target: draft(target, tree=TREE, drawn="deterministic"),
    "draft_tree iid warm": lambda target: draft(target, tree=TREE, drawn="iid", temperature=1.0),
    "draft_tree without warm": lambda target: draft(target, tree=TREE, drawn="without_replacement", temperature=1.0),
    "draft_tree gumbel warm": lambda target: draft(target, tree=TREE, drawn="gumbel", temperature=1.0),
    "medusa": lambda target: Medusa.load(target, str(ZOO / "medusa"), tree=TREE),
    "ngram": lambda target: Ngram.load(target, depth=10),
    "ngram_tree": lambda target: NgramTree.load(target, depth=6),
}
"""Warm: drafts sampled at temperature 1 for a greedy target. Siblings cannot be sampled from a greedy distribution."""


class Difference(NamedTuple):
    """Where one output first leaves the truth: the token there, and the one that should be (None: the end)."""

    prompt: str
    position: int
    token: int | None
    truth: int | None


def pairs(proposers: dict[str, Proposer]) -> list[tuple[str, Verifier]]:
    """Proposers and verifiers that fit; the others are refused where a run is composed."""
    fitting = []
    for name, proposer in proposers.items():
        for verifier in VERIFIERS:
            try:
                check_pair(proposer.name, proposer.drawn, verifier)
                getattr(proposer, "check", lambda _: None)(GREEDY)
            except ValueError:
                continue
            fitting.append((name, verifier))
    return fitting


def some_prompts(limit: int | None) -> list[Prompt]:
    """The bundled prompts, workloads alternating."""
    files = [jsonl(str(ZOO / "prompts" / f"{workload}.jsonl")) for workload in WORKLOADS]
    return [prompt for prompt in chain.from_iterable(zip_longest(*files)) if prompt is not None][:limit]


@torch.inference_mode()
def truth(model: Any, request: Request) -> tuple[list[int], float]:
    """The greedy output of a bare loop over the model, and the least distance of the two largest logits on the way.

    (transformers' ``generate`` decides the same, but rounds logits to float32 first.)
    """
    cache, given, tokens, distances = DynamicCache(config=model.config), list(request.tokens), [], []
    while len(tokens) < request.max_new_tokens and not (tokens and tokens[-1] in request.stop):
        logits = model(torch.tensor([given]), logits_to_keep=1, **{cache_argument(model): cache}).logits[0, -1]
        assert logits.dtype == torch.float64
        first, second = logits.topk(2).values.tolist()
        distances.append(first - second)
        given = [int(logits.argmax())]
        tokens += given
    return tokens, min(distances)


def decoded(
    target: Target, proposer: Proposer, verifier: Verifier, requests: Sequence[Request], batch: int
) -> tuple[list[list[int]], int]:
    """The output for every request, and the drafted tokens accepted in all."""
    outputs, accepted = [], 0
    for start in range(0, len(requests), batch):
        group = fixed_group(Arm(target, proposer, verifier, CounterDraws(0)), requests[start : start + batch])
        accepted += sum(got.count(accepted=True, kept=True) for step in group for got in step.committed)
        outputs += [sequence.emitted for sequence in group.sequences]
    return outputs, accepted


def differences(requests: Sequence[Request], outputs: list[list[int]], truths: list[list[int]]) -> list[Difference]:
    """The first difference of every output that differs."""
    differing = []
    for request, output, true in zip(requests, outputs, truths, strict=True):
        places = (position for position, (a, b) in enumerate(zip_longest(output, true)) if a != b)
        if (position := next(places, None)) is not None:
            token, right = (x[position] if position < len(x) else None for x in (output, true))
            differing.append(Difference(request.name, position, token, right))
    return differing


def main() -> None:
    """Compare, print, and write ``greedy.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompts", type=int, default=None, help="of the bundled ones, workloads alternating; default all"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "greedy.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target.load(str(ZOO / "target"), dtype="float64")
    requests = requests_of(target, some_prompts(arguments.prompts), GREEDY, arguments.new)
    model = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=torch.float64).eval()
    truths, gaps = zip(*(truth(model, request) for request in tqdm(requests, unit="prompt")), strict=True)
    proposers = {name: load(target) for name, load in PROPOSERS.items()}
    report: dict[str, Any] = {
        "prompts": len(requests), "tokens": sum(map(len, truths)), "new": arguments.new,
        "batch_size": arguments.batch_size, "least_distance_of_the_two_largest_logits": min(gaps), "pairs": [],
    }  # fmt: skip
    print(f"{report['prompts']} prompts, {report['tokens']} tokens, two largest logits {min(gaps):.2g} apart or more")
    for name, verifier in pairs(proposers):
        start = time.perf_counter()
        outputs, accepted = decoded(target, proposers[name], verifier, requests, arguments.batch_size)
        wrong = differences(requests, outputs, list(truths))
        row = {
            "proposer": name, "verifier": verifier.name, "equal": len(requests) - len(wrong), "accepted": accepted,
            "first_difference": wrong[0]._asdict() if wrong else None,
        }  # fmt: skip
        report["pairs"].append(row)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        seconds = time.perf_counter() - start
        print(
            f"{name:>24} {verifier.name:<10} {row['equal']:>4} / {len(requests)} equal, {accepted:>5} accepted, "
            f"{seconds:4.0f} s {wrong[0] if wrong else ''}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
