"""The time of a draft's masks: ``Grammar.masks`` compared with bare calls of llguidance, and per row."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens
from transformers import AutoTokenizer

import spec_lab
from spec_lab.constrain.engines.grammar import Grammar, json_schema, regex
from spec_lab.constrain.engines.tree_masks import GrammarState
from spec_lab.constrain.protocol import unpack, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.results.manifest import machine

ZOO = Path(spec_lab.__file__).parent / "zoo"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
PATTERN = r"([A-Za-z]+ [a-z0-9]{2,5},?\s)*end"
TREE = tuple(
    path for depth in range(1, 5) for path in np.ndindex(*(4, 3, 2, 1)[:depth])
)  # 4 + 12 + 24 + 24 = 64 nodes, given as child ranks


# 1. Vocabularies: the bundled one, and larger ones whose further tokens are pairs of its tokens


class Spelled:
    """A longest-match tokenizer with the interface that llguidance's wrapper requires; token 0 ends a text."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id, self.special_token_ids = tokens, 0, None, [0]
        self.number = {data: number for number, data in reversed(list(enumerate(tokens))) if number}
        self.longest = max(map(len, tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        data, ids, at = text.encode() if isinstance(text, str) else bytes(text), [], 0
        while at < len(data):
            size = next(n for n in range(min(self.longest, len(data) - at), 0, -1) if data[at : at + n] in self.number)
            ids.append(self.number[data[at : at + size]])
            at += size
        return ids


def bundled() -> Vocabulary:
    tokenizer = AutoTokenizer.from_pretrained(ZOO / "target")
    size = json.loads((ZOO / "target" / "config.json").read_text())["vocab_size"]
    return Vocabulary(size, (0,), from_tokenizer(tokenizer, n_vocab=size, eos_token=[0]))


def larger(base: Vocabulary, size: int) -> Vocabulary:
    words = [data for data in base.bytes if data]
    tokens = dict.fromkeys([b"<end>", *words])
    for first in words:
        if len(tokens) >= size:
            break
        tokens.update(dict.fromkeys(first + second for second in words[:: max(1, len(words) ** 2 // (2 * size))]))
    tokens = list(tokens)[:size]
    assert len(tokens) == size
    engine = LLTokenizer(TokenizerWrapper(Spelled(tokens)), n_vocab=size, eos_token=[0])
    return Vocabulary(size, (0,), engine)


# 2. Drafts: all legal, after texts drawn uniformly from the masks


def step(state: GrammarState, rng: np.random.Generator) -> int | None:
    """Return an allowed token other than the end; None if there is none."""
    fork = state.fork()  # a copy, since the state would keep its mask
    allowed = np.flatnonzero(unpack(fork.mask(), fork.vocabulary))
    allowed = allowed[allowed != 0]
    return int(rng.choice(allowed)) if len(allowed) else None


def text(grammar: Grammar, length: int, rng: np.random.Generator) -> GrammarState:
    while True:
        state = grammar.start(Request(0, "text", (1,)))
        for _ in range(length):
            token = step(state, rng)
            if token is None:
                break
            state.advance(token)
        else:
            return state


def draft(grammar: Grammar, shape: Shape, rng: np.random.Generator) -> tuple[GrammarState, list[int]]:
    """Return a state, and tokens for a tree below it."""
    while True:
        state = text(grammar, int(rng.integers(5, 60)), rng)
        at, tokens = [state], []
        for parent in shape.parent:
            token = step(at[parent], rng)
            if token is None:
                break
            tokens.append(token)
            at.append(at[parent].fork())
            at[-1].advance(token)
        else:
            return state, tokens


# 3. Bare calls


def bare_chains(matchers: list[LLMatcher], drafts: list[list[int]], words: int, pool: LLExecutor) -> np.ndarray:
    rows = len(drafts[0]) + 1
    bits = np.zeros((rows * len(drafts), words), dtype=np.int32)
    jobs = [
        (matcher, number * rows, tokens) for number, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True))
    ]
    fill_next_token_bitmask_par_with_draft_tokens(pool, jobs, bits)
    return bits


def bare_trees(matchers: list[LLMatcher], drafts: list[list[int]], words: int, children: list[list[int]]) -> np.ndarray:
    """Walk depth first: fill the row; for each child in the mask consume it, recurse, roll back.

    This is the fastest walk, but not safe: a matcher that has rolled back may return wrong masks.
    """
    rows = len(children)
    bits = np.zeros((rows * len(drafts), words), dtype=np.int32)
    size, memory = words * 4, bits.data.cast("B")

    def visit(matcher: LLMatcher, row: int, node: int, tokens: list[int]) -> None:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data + (row + node) * size, size)
        for child in children[node]:
            token = tokens[child - 1]
            if memory[(row + node) * size + (token >> 3)] >> (token & 7) & 1:
                matcher.consume_token(token)
                visit(matcher, row, child, tokens)
                matcher.rollback(1)

    for number, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
        visit(matcher, number * rows, 0, tokens)
    return bits


# 4. Times


@dataclass
class Case:
    """Return a grammar, and drafts of one shape for a batch."""

    grammar: Grammar
    draft_shape: Shape
    batch: int
    pool: LLExecutor

    def __post_init__(self) -> None:
        self.shape = forest((self.draft_shape,) * self.batch)
        self.children = [rows.tolist() for rows in self.draft_shape.children]
        self.straight = self.draft_shape.nodes == int(self.draft_shape.depth.max())
        self.words = width(self.grammar.vocabulary)
        self.to_shape = np.concatenate(
            [np.arange(self.batch) * self.draft_shape.rows]
            + [head * self.draft_shape.rows + 1 + np.arange(self.draft_shape.nodes) for head in range(self.batch)]
        )

    def times(self, rng: np.random.Generator, again: int) -> list[tuple[float, float]]:
        """Return seconds of (ours, bare) for one new batch of drafts, ``again`` times, alternating."""
        states, drafts = zip(*(draft(self.grammar, self.draft_shape, rng) for _ in range(self.batch)), strict=True)
        token = np.concatenate([np.array(tokens, dtype=np.int64) for tokens in drafts])
        pairs = []
        for turn in range(again + 1):
            fresh = [state.fork() for state in states]  # new ones, since they keep their masks
            matchers = [state.fork().matcher for state in states]

            def ours(fresh: list[GrammarState] = fresh) -> np.ndarray:
                return self.grammar.masks(fresh, self.shape, token).bits

            def bare(matchers: list[LLMatcher] = matchers) -> np.ndarray:
                if self.straight:
                    return bare_chains(matchers, list(drafts), self.words, self.pool)
                return bare_trees(matchers, list(drafts), self.words, self.children)

            if turn == 0:  # warm up both, and check that they agree; after a rollback the bare walk may be wrong
                agree = np.array_equal(ours(), bare().view(np.uint32)[self.to_shape])
                assert agree or not self.straight
                continue
            if turn % 2:
                mine, its = seconds(ours), seconds(bare)
            else:
                its, mine = seconds(bare), seconds(ours)
            pairs.append((mine, its))
        return pairs


def seconds(call: Callable[[], np.ndarray]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(times: np.ndarray, rng: np.random.Generator) -> list[float]:  # [n, 2] -> middle, low, high
    """Return the median of ours over bare, and its 95 % bootstrap interval."""
    ratios = times[:, 0] / times[:, 1]
    again = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return [round(float(value), 3) for value in (np.median(ratios), *np.quantile(again, [0.025, 0.975]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 32_000, 128_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=1, help="of both sides; trees use one")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("masks.json"))
    given = parser.parse_args()
    rng, base, pool = np.random.default_rng(0), bundled(), LLExecutor(given.threads)
    shapes = {f"chain {k}": chain(k) for k in given.chains} | {"tree 64": tree(TREE)}
    cells = []
    for size in given.vocabularies:
        vocabulary = base if size == base.size else larger(base, size)
        grammars = {
            "json": json_schema(vocabulary, json.dumps(SCHEMA), threads=given.threads),
            "regex": regex(vocabulary, PATTERN, threads=given.threads),
        }
        for kind, grammar in grammars.items():
            for name, shape in shapes.items():
                for batch in given.batches:
                    case, times, start = Case(grammar, shape, batch, pool), [], time.perf_counter()
                    while len(times) < 8 or (time.perf_counter() - start < given.seconds and len(times) < 400):
                        times += case.times(rng, 4)
                    table = np.array(times)
                    rows = batch * shape.rows
                    cell = {
                        "vocabulary": size,
                        "grammar": kind,
                        "draft": name,
                        "batch": batch,
                        "us": round(float(np.median(table[:, 0])) * 1e6, 1),
                        "us_bare": round(float(np.median(table[:, 1])) * 1e6, 1),
                        "us_row": round(float(np.median(table[:, 0])) * 1e6 / rows, 2),
                        "ratio": ratio(table, rng),
                        "repeats": len(table),
                    }
                    cells.append(cell)
                    print(json.dumps(cell), flush=True)
    results = {"threads": given.threads, "machine": machine(), "cells": cells}
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
