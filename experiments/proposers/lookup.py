"""How long does a lookup take? Measure the proposers that look text up, as a decoding step calls them.

    python -m experiments.proposers.lookup --out OUT

The text is Python source, in the bundled target's tokens: the standard library is the text of the request (``own``) and
what it decodes, installed packages are the store. A step decodes the draft's tokens as far as the text has them, and
one more; its lookup adds these tokens to the index of the request's text, searches this text, the responses of finished
requests (100,000 tokens, ``suffix`` only) and the store, and makes the draft. The figures are microseconds and, last,
tokens per step.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from tqdm import tqdm
from transformers import AutoTokenizer

from experiments.runs import ZOO
from spec_lab.cli.main import conf
from spec_lab.core.draft import Draft
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.suffix_build import build_tokens, encoded
from spec_lab.propose.suffix_store import vocabulary_hash

HERE = Path(__file__).parent


def sources(folder: Path) -> Iterator[str]:
    """Yield the Python files of a folder, in an order that is the same on every machine."""
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.py")}
    for name in sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest()):
        if folder.name == "site-packages" or "site-packages" not in files[name].parts:
            yield files[name].read_text(errors="replace")


def tokens_of(tokenizer: Any, folder: Path, count: int) -> list[list[int]]:
    """Return the first ``count`` tokens of a folder's sources, by file.

    Raises:
        ValueError: there are fewer.
    """
    texts: list[list[int]] = []
    missing = count
    for tokens in encoded(sources(folder), tokenizer):
        texts.append(tokens[:missing])
        missing -= len(texts[-1])
        if not missing:
            return texts
    raise ValueError(f"{folder} has {count - missing} tokens of Python source, fewer than {count}")


def accepted(draft: Draft, text: list[int], at: int) -> int:
    """Return the length of the longest path of a draft whose tokens equal those of the text from ``at`` on."""
    parents, tokens = draft.shape.parent.tolist(), draft.token.tolist()
    depth = {0: 0}  # of the nodes on the path
    for row, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
        if parent in depth and text[at + depth[parent]] == token:
            depth[row] = depth[parent] + 1
    return max(depth.values())


def measure(proposer: Suffix, text: list[int], start: int, steps: int, evict: np.ndarray) -> dict[str, float]:
    """Decode the text from ``start`` on, and time the lookups.

    Args:
        evict: what is read between lookups, to displace the index from the CPU's caches as a forward would.
    """
    sequence = SimpleNamespace(tokens=text[:start], state=proposer.init(None))
    batch: Any = SimpleNamespace(sequences=[sequence], device="cpu", room=lambda: [99], recorded=False)
    proposer.scores(batch)  # indexes the text so far
    seconds, at = [], start
    for _ in range(steps):
        evict.sum()
        new = text[at : at + 1 + accepted(proposer.propose(batch), text, at)]
        sequence.tokens += new
        at += len(new)
        began = time.perf_counter()
        proposer.scores(batch)
        seconds.append(time.perf_counter() - began)
    low, middle, high = np.percentile(np.array(seconds) * 1e6, [10, 50, 90])
    return {"p10": low, "median": middle, "p90": high, "tokens_per_step": (at - start) / steps}


def main(given: list[str] | None = None) -> pd.DataFrame:
    """Measure, print the table and write it as ``lookup.csv``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="tokens of the text")
    parser.add_argument("--store", type=int, nargs="*", default=[1_000_000, 10_000_000], help="tokens of the store")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--evict", type=int, default=0, help="MiB that are read between lookups (0)")
    parser.add_argument("--proposers", nargs="+", default=["suffix", "sam", "rest"])
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of the text")
    parser.add_argument("--packages", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="of the store")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of lookup.csv")
    chosen = parser.parse_args(given)

    tokenizer = AutoTokenizer.from_pretrained(ZOO / "target")
    target: Any = SimpleNamespace(name="zoo", tokenizer=tokenizer, vocabulary=len(tokenizer))
    most = max(chosen.own) + chosen.steps * 65 + 1
    text = [token for ids in tokens_of(tokenizer, chosen.text, most) for token in ids]
    evict = np.zeros(chosen.evict * 2**17)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[int, str | None] = {0: None}
        for size in chosen.store:
            stores[size] = str(Path(folder, str(size)))
            documents = tokens_of(tokenizer, chosen.packages, size)
            build_tokens(documents, len(tokenizer), vocabulary_hash(tokenizer), Path(folder, str(size)))
        cases = [
            (name, tokens, size)
            for name in chosen.proposers
            for tokens in (chosen.own if name != "rest" else chosen.own[:1])  # which rest does not look up
            for size in stores
            if size or name != "rest"
        ]
        for name, tokens, size in tqdm(cases):
            options = {**OmegaConf.to_container(OmegaConf.load(Path(conf(), "proposer", f"{name}.yaml")))}
            options.pop("_target_")
            proposer = Suffix.load(target, **(options | {"store": stores[size]}))
            if proposer.shared is not None:
                proposer.shared.learn(text[::-1][: proposer.shared.max_tokens][::-1])
            facts = {"proposer": name, "own": tokens if proposer.own else 0, "store": size}
            rows.append(facts | measure(proposer, text, tokens, chosen.steps, evict))
    table = pd.DataFrame(rows).round(2)
    print(table.to_string(index=False))
    table.to_csv(chosen.out / "lookup.csv", index=False)
    return table


if __name__ == "__main__":
    main()
