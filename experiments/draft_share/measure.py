"""The time of a draft model's forward over the target's: bare greedy loops over both, alternating in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

import spec_lab
from spec_lab.analysis.metrics import interval
from spec_lab.core.probabilities import Sampling
from spec_lab.models.target import Target
from spec_lab.tasks.lab import requests_of
from spec_lab.tasks.peers import Bare
from spec_lab.text.prompts import jsonl

ZOO = Path(spec_lab.__file__).parent / "zoo"


def measure(target: Target, draft: Target, prompts: Path, limit: int, new: int) -> pd.DataFrame:
    """Return milliseconds per forward ``[prompts, 2]``, without prefill; the models alternate in going first."""
    models = {"target": target, "draft": draft}
    arms = {name: Bare(model, Sampling(), seed=0) for name, model in models.items()}
    texts = jsonl(str(prompts), limit)
    requests = {name: requests_of(model, texts, Sampling(), new) for name, model in models.items()}
    for name, arm in arms.items():
        arm.decode(requests[name][:1])
    rows = []
    for number in tqdm(range(len(texts)), unit="prompt"):
        row = {}
        for name in list(arms)[:: -1 if number % 2 else 1]:
            (outcome,) = arms[name].decode([requests[name][number]]).outcomes
            steps = len(outcome.tokens) - outcome.prefill_tokens
            if steps:
                row[name] = 1000 * outcome.decode_seconds / steps
        rows.append(row)
    return pd.DataFrame(rows)[list(models)].dropna()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ZOO / "target"))
    parser.add_argument("--draft", default=str(ZOO / "draft"))
    parser.add_argument("--prompts", type=Path, default=ZOO / "prompts" / "code.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="prompts used")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each")
    arguments = parser.parse_args()
    models = Target.load(arguments.target), Target.load(arguments.draft)
    steps = measure(*models, arguments.prompts, arguments.limit, arguments.new)
    share = interval(steps["draft"] / steps["target"])
    print(steps.describe().loc[["mean", "std"]].round(2).to_string())
    print(f"draft over target: {share.mean:.3f} [{share.low:.3f}, {share.high:.3f}]")
    print(f"{torch.get_num_threads()} threads, {len(steps)} prompts, 95 % interval over prompts")


if __name__ == "__main__":
    main()
