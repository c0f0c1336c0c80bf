"""Compare proposers that need no training: python -m experiments.proposers.training_free.

First a store of text for REST is built, of the standard library's sources, their documentation strings and generated
records, without the held-out ones. All proposers are arms of one run, and alternate; Medusa heads are beside them. The
same command resumes; ``training_free_figure.py`` reads the runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import runs
from scripts.zoo import corpus, prompts

ARMS: dict[str, runs.Arm] = {
    "ngram": ("ngram", {}),
    "pld_plus": ("pld_plus", {}),
    "suffix": ("suffix", {}),
    "sam": ("sam", {}),
    "recycling": ("recycling", {}),
    "lookahead": ("lookahead", {}),
    "jacobi": ("jacobi", {}),
    "early_exit": ("early_exit", {}),
    "skip": ("skip", {}),
    "medusa": ("medusa", {}),
}
"""By name; REST is added with its store."""

MAX_BYTES, RECORDS = 12_000_000, 6_000
"""Size of the store's text: bytes of code and of prose, and number of records."""


def store(out: Path, most: int = MAX_BYTES, records: int = RECORDS) -> Path:
    """Build REST's store in a folder where there is none, and return the store's folder.

    Raises:
        CalledProcessError: ``spec-lab index`` failed; its message is on the terminal.
    """
    built = out / "store"
    if not built.is_dir():
        out.mkdir(parents=True, exist_ok=True)
        held_out = corpus.load_holdout(runs.ZOO / "holdout.json"), prompts.read(runs.ZOO / "prompts")
        with (out / "corpus.jsonl").open("w") as file:
            for document in corpus.training(*held_out, {"stdlib": most}, record_count=records):
                if document.text.strip():  # some modules are empty
                    file.write(json.dumps({"text": document.text}) + "\n")
        command = [sys.executable, "-m", "spec_lab", "index", str(out / "corpus.jsonl"), str(built)]
        subprocess.run([*command, "--tokenizer", str(runs.ZOO / "target")], check=True)
    return built


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a command failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/training_free", 12)
    parser.add_argument("--texts", nargs="+", default=["code", "json", "prose", "repetitive"], help="prompts")
    parser.add_argument("--store", type=Path, help="folder of a store for REST (built in outputs/training_free_store)")
    chosen = parser.parse_args(arguments)
    store_folder = chosen.store or store(chosen.out.with_name(f"{chosen.out.name}_store"))
    arms = ARMS | {"rest": ("rest", {"store": store_folder.absolute()})}
    runs.sweep(chosen, chosen.out, arms, f"prompts={','.join(chosen.texts)}", "sampling=greedy,temperature_1")


if __name__ == "__main__":
    main()
