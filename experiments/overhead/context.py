"""Seconds of a step by context length, beside plain forwards of transformers with its own cache, in one process.

A small random model, one sequence. At every length the ways of decoding take turns with a forward of transformers of as
many rows, causal, over a ``DynamicCache`` that is cropped afterwards. The growth of a way is its median step at the
longest context over that at the shortest, relative to the growth of the forwards of transformers with as many rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.draft import Draft
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.decode.step import step
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.packed import pack
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token

Now = Callable[[], float]
"""A clock."""

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32000)
CONTEXT = 32768
TREE = tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)))


class RandomTokens(Proposer):
    """Drafts random tokens in a fixed shape."""

    name, drawn = "random", "deterministic"
    nodes: int

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        self.shape, self.vocabulary = shape, vocabulary
        self.nodes = shape.nodes
        self.random = np.random.default_rng(0)

    def propose(self, batch: Batch) -> Draft:
        """See ``Proposer``."""
        shape = forest((self.shape,) * len(batch.sequences))
        return Draft(shape, torch.from_numpy(self.random.integers(0, self.vocabulary, shape.nodes)).to(batch.device))


def random_model(layers: int, arguments: argparse.Namespace) -> torch.nn.Module:
    """Return a random Llama."""
    torch.manual_seed(0)
    hidden = arguments.hidden
    config = AutoConfig.for_model(
        "llama", vocab_size=arguments.vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config).to(getattr(torch, arguments.dtype)).eval()
    return model


class Plain:
    """The same model by transformers alone."""

    def __init__(self, model: torch.nn.Module, tokens: Sequence[int], now: Now) -> None:
        self.model, self.tokens, self.now, self.cache, self.done = model, tokens, now, DynamicCache(), 0

    @torch.inference_mode()
    def forward(self, rows: int) -> None:
        """Compute the next rows, with logits of all of them."""
        ids = torch.tensor([self.tokens[self.done : self.done + rows]])
        self.model(input_ids=ids, use_cache=True, **{cache_argument(self.model): self.cache})

    def extend(self, length: int) -> None:
        """Compute the text up to a length."""
        while self.done < length:
            count = min(512, length - self.done)
            self.forward(count)
            self.done += count

    def timed(self, rows: int) -> float:
        """Return the seconds of a forward, which is taken back."""
        began = self.now()
        self.forward(rows)
        seconds = self.now() - began
        self.cache.crop(-rows)
        return seconds


class Ours:
    """One way of decoding of this package."""

    def __init__(self, target: Target, proposer: Proposer, tokens: Sequence[int], now: Now) -> None:
        self.tokens, self.now = tokens, now
        self.parts = Arm(target, proposer, Token(), CounterDraws(0))
        request = Request(0, "text", tuple(tokens[:2]), max_new_tokens=CONTEXT)
        self.sequence = SequenceState(request, target.lm.open(CONTEXT), list(tokens[:2]), state=proposer.init(request))

    def extend(self, length: int) -> None:
        """Compute the text up to a length, in place of what was decoded."""
        known = len(self.sequence.request.tokens)  # of the text before
        self.sequence.kv.truncate(min(len(self.sequence.kv), known))
        self.parts.proposer.rewind(self.sequence.state, len(self.sequence.kv))
        self.sequence.tokens[known:] = self.tokens[known:length]
        self.sequence.request = Request(0, "text", tuple(self.tokens[:length]), max_new_tokens=CONTEXT)
        step([self.sequence], self.parts)

    def timed(self) -> float:
        """Return the seconds of a step."""
        began = self.now()
        step([self.sequence], self.parts)
        return self.now() - began


def ways_of(target: Target, arguments: argparse.Namespace) -> dict[str, tuple[Proposer, int]]:
    """Return the ways of decoding by name: a proposer, and the rows of its steps."""
    draft = random_model(1, arguments)
    pack(draft)
    plan = TreePlan.read(depth=4, tree=None, nodes=None, drawn="deterministic")
    return {
        "autoregressive": (Null(), 1),
        "chain of 4": (RandomTokens(chain(4), arguments.vocabulary), 5),
        f"tree of {TREE.nodes}": (RandomTokens(TREE, arguments.vocabulary), 1 + TREE.nodes),
        "n-grams, 4": (Ngram(4, 3, 1), 5),
        "draft model, 4": (DraftModel(CausalLM(draft), CONTEXT, plan), 5),
    }


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """Return a row for each way and length: median milliseconds of a step and of a plain forward of as many rows."""
    model, other = random_model(arguments.layers, arguments), random_model(arguments.layers, arguments)
    pack(model)
    pack(other)
    target = Target(CausalLM(model), None, "random", CONTEXT, "", 0.0)
    lengths = [length for length in LENGTHS if length <= arguments.longest]
    period = np.random.default_rng(1).integers(0, arguments.vocabulary, 700)
    tokens = np.resize(period, CONTEXT).tolist()  # it repeats itself, so that n-grams are found
    now = time.process_time if arguments.cpu else time.perf_counter
    plain = Plain(other, tokens, now)
    made = ways_of(target, arguments)
    ours = {name: Ours(target, proposer, tokens, now) for name, (proposer, _) in made.items() if name in arguments.ways}
    rows = []
    for length in lengths:
        plain.extend(length)
        for way in ours.values():
            way.extend(length)
        for name, way in ours.items():
            count = made[name][1]
            timings: list[list[float]] = [[], []]
            calls: list[Callable[[], float]] = [way.timed, lambda count=count: plain.timed(count)]
            for _ in range(arguments.steps):
                for call, seconds in zip(calls, timings, strict=True):
                    seconds.append(call())
            mine, theirs = (1e3 * median(seconds[2:]) for seconds in timings)
            rows.append({"way": name, "length": length, "rows": count, "step": mine, "forward": theirs})
            print(f"{name}, {length} tokens: {mine:.2f} ms, transformers {theirs:.2f} ms", flush=True)
    return pd.DataFrame(rows)


def growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how much steps and forwards grow from the shortest to the longest context, and the ratio of both."""
    ratios = {}
    for name, rows in frame.groupby("way", sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        grown = {kind: last[kind] / first[kind] for kind in ("step", "forward")}
        ratios[name] = {**grown, "ratio": grown["step"] / grown["forward"]}
    return pd.DataFrame(ratios).T


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=30, help="timed steps at each length, the first two left out")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest context")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor, for a busy machine")
    parser.add_argument("--output", help="a CSV file for the rows")
    names = ("autoregressive", "chain of 4", f"tree of {TREE.nodes}", "n-grams, 4", "draft model, 4")
    parser.add_argument("--ways", nargs="+", default=names, choices=names)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    frame = measure(arguments)
    if arguments.output:
        frame.round(4).to_csv(arguments.output, index=False)
    print(frame.pivot(index="length", columns="way", values="step").round(2).to_string())
    print("growth of steps, of plain forwards with as many rows, and the ratio:")
    print(growth(frame).round(2).to_string())


if __name__ == "__main__":
    main()
