"""A lab small enough for a test: a tiny random target over letters, and a proposer that guesses."""

from dataclasses import replace
from pathlib import Path

import torch

from spec_lab.analysis.tracking import Files
from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.process_cache import ProcessCache
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Token
from tests.tiny import VOCABULARY, tiny_target

CERTIFICATES: dict = {}
"""Shared by all labs, as in one process of a sweep: the same pairs are not enumerated again in every test."""

TEXTS = ("the cat sat", "def f of x", "one two three", "a b", "z")


class Letters:
    """A tokenizer with one token per letter."""

    eos_token_id = None

    def encode(self, words: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in words]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Repeat(Proposer):
    """Drafts the last token again, ``depth`` times."""

    name = "repeat"
    drawn = "deterministic"

    def __init__(self, depth: int = 2) -> None:
        self.nodes = self.depth = depth

    def propose(self, batch: Batch) -> Draft:
        tokens = [s.tokens[-1] for s in batch.sequences for _ in range(self.depth)]
        return Draft(forest((chain(self.depth),) * len(batch.sequences)), torch.tensor(tokens))


def lab(texts=TEXTS, temperature: float = 0.0, **parts) -> Lab:
    prompts = [Prompt(f"p{number}", text, "toy") for number, text in enumerate(texts)]
    target = replace(tiny_target(), tokenizer=Letters(), cache=ProcessCache(certificates=CERTIFICATES))
    usual = dict(proposer=Repeat(), verifier=Token(), sampling=Sampling(temperature), prompts=prompts, tracker=Files())
    return Lab(target, **(usual | parts))


def settings(out: Path, **changes) -> Settings:
    usual = dict(
        name="toy", batch_size=2, max_new_tokens=12, warmup=0, seed=0, threads=None, baseline=True
    )  # fmt: skip
    return Settings(output_dir=out, **(usual | changes))
