"""Compute masks before the target's forward, or during it in a thread: which is faster, and how long does a step wait?

    python experiments/overhead/async_masks.py

Both ways decode the same prompts, alternating in one process; a figure is the ratio of their decode seconds by prompt.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from spec_lab.analysis import metrics
from spec_lab.cli.main import zoo
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.engines.grammar import json_schema
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.results import writer
from spec_lab.tasks.lab import Loop, requests_of
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Token

HERE = Path(__file__).parent
WHITE = {"whitespace_pattern": r"(\n( {2}){0,9})?", "item_separator": r",( |\n( {2}){0,9})", "key_separator": ": "}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--prompts", type=int, default=16)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    if given.new < 8:
        options.error("--new must be at least 8: shorter outputs may have no step after the prompt's")
    torch.set_num_threads(given.threads)

    target = Target.load(zoo("target"))
    vocabulary = Vocabulary.of(target)
    schema = json_schema(vocabulary, path=zoo("prompts/records.schema.json"), prompt=True, **WHITE)
    proposers = {
        "draft_chain": DraftModel.load(target, zoo("draft"), depth=4),
        "ngram": Ngram.load(target, depth=10),
        "ngram_tree": NgramTree.load(target, depth=6),
    }
    requests = requests_of(target, jsonl(zoo("prompts/json.jsonl"), given.prompts), Sampling(), given.new)
    rows = []
    with tqdm(total=len(proposers) * len(given.batch) * given.prompts) as bar:
        for name, proposer in proposers.items():
            for size in given.batch:
                rows.append(measure(target, proposer, AppliedConstraint(schema, "target"), requests, size, bar))
                print(json.dumps({"proposer": name} | rows[-1]))
                rows[-1]["proposer"] = name
    facts = {"threads": given.threads, "cores": os.cpu_count(), "torch": torch.__version__, "new": given.new}
    (HERE / "async_masks.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


def measure(target, proposer, applied, requests, size, bar) -> dict:
    """Measure serial and asynchronous masks, alternating group by group."""
    ways = {
        way: Loop(target, proposer, Token(), CounterDraws(0), replace(applied, async_masks=way == "async"))
        for way in ("serial", "async")
    }
    for loop in ways.values():
        loop.decode([replace(request, max_new_tokens=16) for request in requests[:size]])
    seconds = {way: [] for way in ways}
    forwards = {way: [] for way in ways}
    for number, start in enumerate(range(0, len(requests), size)):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            done = ways[way].decode(requests[start : start + size])
            rows, _ = writer.rows_of(done.steps, number, way)
            forwards[way] += [row for row in rows if not row["prefill"]]
            seconds[way].append(sum(row["whole"] for row in rows if not row["prefill"]))
        bar.update(size)
    ratio = metrics.interval([b / s for s, b in zip(seconds["serial"], seconds["async"], strict=True) if s])
    share = {
        way: {
            what: sum(row[what] for row in forwards[way]) / sum(row["whole"] for row in forwards[way])
            for what in ("mask_busy", "mask_wait")
        }
        for way in ways
    }
    return {"batch": size, "async_over_serial": ratio._asdict(), "share_of_step": share}


if __name__ == "__main__":
    main()
