"""Held-out prompts: cut from held-out documents at natural points, and kept if training text shares no long run."""

import ast
import json
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from spec_lab.analysis.metrics import repeated_8gram_share
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.lab import requests_of
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Match

from .corpus import WINDOWS, WORKLOADS, Document, shared_windows

MIN_TOKENS, MAX_TOKENS = 64, 200


def _code_cuts(text: str) -> Iterator[str]:
    """From a function's first line to the end of a statement's line about halfway through its body."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 4 or node.end_lineno is None:
            continue
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        for share in (0.5, 0.65, 0.35):
            cut = start + max(5, int((node.end_lineno - start) * share))
            while cut < node.end_lineno - 3 and not (
                lines[cut].strip()
                and lines[cut - 1].strip().endswith((")", "]", ":", "0", "1", "e", "s", "d", "t", "r"))
            ):
                cut += 1
            if cut < node.end_lineno - 2 and lines[cut].strip():
                yield "".join(lines[start:cut])


def _json_cuts(text: str, rng: random.Random) -> Iterator[str]:
    """Up to the end of a line or, in compact records, a comma."""
    mark = ",\n" if "\n  " in text else ", "
    places = [i for i in range(len(text)) if text.startswith(mark, i)]
    rng.shuffle(places)
    for i in places:
        yield text[: i + len(mark)].rstrip(" ")


def _prose_cuts(text: str, rng: random.Random) -> Iterator[str]:
    """A paragraph, up to a word in the middle of one of its later sentences."""
    for paragraph in text.split("\n\n"):
        words = paragraph.split(" ")
        if len(words) > 60:
            cut = int(len(words) * rng.uniform(0.45, 0.8))
            while cut > 30 and words[cut - 1][-1:] in ".,;:!?)\n":
                cut -= 1
            yield " ".join(words[:cut])


def candidates(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, per_document: int
) -> list[dict[str, str]]:
    """Prompts of ``MIN_TOKENS`` to ``MAX_TOKENS`` tokens, at most ``per_document`` of each document, in order."""
    records = []
    for document in documents:
        rng = random.Random(document.source)
        cuts = {"code": lambda t, _: _code_cuts(t), "json": _json_cuts, "prose": _prose_cuts}[document.workload](
            document.text, rng
        )
        fitting = (
            c for c in cuts if len(c) < 8 * MAX_TOKENS and MIN_TOKENS <= len(tokenizer(c).input_ids) <= MAX_TOKENS
        )
        texts = list(islice(fitting, 1 if document.workload == "json" else None))  # records' cuts are shuffled
        for text in rng.sample(texts, min(per_document, len(texts))):
            records.append({"prompt": text, "workload": document.workload, "source": document.source})
    return records


def choose(
    records: list[dict[str, str]], training: Iterable[Document], counts: dict[str, int]
) -> dict[str, list[dict[str, str]]]:
    """Return the first ``counts`` prompts of each workload that share no window with training text and are distinct."""
    kinds = {
        "text": [f for f in records if f["workload"] != "json"],
        "json": [f for f in records if f["workload"] == "json"],
    }
    shared = {kind: shared_windows([f["prompt"] for f in rows], WINDOWS[kind]) for kind, rows in kinds.items()}
    seen: dict[str, set[int]] = {kind: set() for kind in kinds}
    for document in training:
        kind = "json" if document.workload == "json" else "text"
        seen[kind] |= shared[kind](document.text)
    clean = [row for kind, rows in kinds.items() for i, row in enumerate(rows) if i not in seen[kind]]
    chosen: dict[str, list[dict[str, str]]] = {}
    for workload in WORKLOADS:
        rows = [row for row in clean if row["workload"] == workload]
        random.Random(0).shuffle(rows)
        kept: list[dict[str, str]] = []
        for row in rows:
            if len(kept) < counts[workload] and not any(row["prompt"][:48] in k["prompt"] for k in kept):
                kept.append(row)
        chosen[workload] = numbered(workload, kept)
    return chosen


def numbered(workload: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows with ids in their order."""
    return [{**row, "id": f"{workload}-{number:03d}"} for number, row in enumerate(rows)]


def repeated_8grams(target: Target, texts: Sequence[str], tokens: int, batch_size: int = 16) -> list[float]:
    """Return the share of repeated 8-grams in the target's greedy continuation of each text by ``tokens`` tokens."""
    requests = requests_of(target, [Prompt(str(i), text) for i, text in enumerate(texts)], Sampling(), tokens)
    shares = []
    for start in range(0, len(requests), batch_size):
        group = fixed_group(Arm(target, Null(), Match(), CounterDraws(0)), requests[start : start + batch_size])
        deque(group, maxlen=0)
        shares += [repeated_8gram_share([sequence.emitted]) for sequence in group.sequences]
    return shares


def least(
    rows: list[dict[str, str]], shares: Sequence[float], counts: dict[str, int]
) -> dict[str, list[dict[str, str]]]:
    """Return each workload's ``counts`` rows with the smallest shares, in their order; NaN is last."""
    chosen = {}
    for workload in WORKLOADS:
        numbers = [i for i, row in enumerate(rows) if row["workload"] == workload]
        best = sorted(numbers, key=lambda i: (math.isnan(shares[i]), shares[i], i))[: counts[workload]]
        chosen[workload] = numbered(workload, [rows[i] for i in sorted(best)])
    return chosen


def write(chosen: dict[str, list[dict[str, str]]], folder: Path) -> None:
    """Write one JSON Lines file per workload."""
    folder.mkdir(parents=True, exist_ok=True)
    for workload, rows in chosen.items():
        (folder / f"{workload}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(folder: Path) -> list[dict[str, str]]:
    """Return all prompts of the folder; none if it does not exist."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
