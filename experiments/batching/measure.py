"""Speed of one request at a time, of a batch without a draft and of a batch with Medusa, alternating in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

import spec_lab
from spec_lab.analysis.metrics import Interval, interval
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.lab import Loop, requests_of
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Token

ZOO = Path(spec_lab.__file__).parent / "zoo"


ALL_LIVE = ", while all are live"


def tokens_per_second(target: Target, proposer: Proposer, groups: list[list[Request]]) -> tuple[float, float]:
    """Return decode tokens per second over all steps, and over the steps before a group's first sequence has ended.

    Prefill is left out.
    """
    tokens, seconds, early_tokens, early_seconds = 0, 0.0, 0, 0.0
    for group in groups:
        done = Loop(target, proposer, Token(), CounterDraws(0)).decode(group)
        tokens += sum(len(outcome.tokens) - outcome.prefill_tokens for outcome in done.outcomes)
        seconds += max(outcome.decode_seconds for outcome in done.outcomes)
        for step in done.steps[1:]:
            if len(step.sequences) == len(group):
                early_tokens += sum(committed.count(kept=True) for committed in step.committed)
                early_seconds += step.seconds()["whole"]
    return tokens / seconds, early_tokens / early_seconds


def measure(target: Target, heads: str, prompts: Path, batch: int, limit: int, new: int) -> pd.DataFrame:
    """Return tokens per second of every way of decoding ``[groups, 6]``, over all steps and while all are live.

    The ways alternate in going first.
    """
    requests = requests_of(target, jsonl(str(prompts), limit), Sampling(), new)
    groups = [requests[start : start + batch] for start in range(0, len(requests) - batch + 1, batch)]
    medusa = Medusa.load(target, heads, batch_size=batch)
    print(f"tree calibrated for batch {batch}: {medusa.facts['tree']}")
    ways = {
        "one at a time": lambda group: tokens_per_second(target, Null(), [[request] for request in group]),
        f"batch of {batch}": lambda group: tokens_per_second(target, Null(), [group]),
        f"batch of {batch}, Medusa": lambda group: tokens_per_second(target, medusa, [group]),
    }
    for way in ways.values():
        way(groups[0][:2])
    rows = []
    for number, group in enumerate(tqdm(groups, unit="group")):
        names = list(ways)
        order = names[number % 3 :] + names[: number % 3]
        speeds = {name: ways[name](group) for name in order}
        rows.append({name + kind: speeds[name][k] for name in ways for k, kind in enumerate(("", ALL_LIVE))})
    return pd.DataFrame(rows)


def show(ratio: Interval) -> str:
    """Return a ratio with its interval."""
    return f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ZOO / "target"))
    parser.add_argument("--heads", default=str(ZOO / "medusa"))
    parser.add_argument("--prompts", type=Path, default=ZOO / "prompts" / "code.jsonl")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=int, default=40, help="prompts used")
    parser.add_argument("--new", type=int, default=96, help="tokens emitted for each")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target)
    speeds = measure(target, arguments.heads, arguments.prompts, arguments.batch, arguments.limit, arguments.new)
    single, _, batched, batched_live, drafted, drafted_live = (speeds[name] for name in speeds)
    print(speeds.describe().loc[["mean", "std"]].round(1).T.to_string())
    print(f"batch over one at a time: {show(interval(batched / single))}")
    print(f"Medusa over batch: {show(interval(drafted / batched))}")
    print(f"Medusa over batch{ALL_LIVE}: {show(interval(drafted_live / batched_live))}")
    print(f"{torch.get_num_threads()} threads, {len(speeds)} groups, 95 % intervals over groups")


if __name__ == "__main__":
    main()
