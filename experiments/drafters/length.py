"""Accepted length against training tokens: python -m experiments.drafters.length --heads DIR.

``DIR`` holds a folder for each EAGLE-3 head, as ``scripts/train_zoo.py lengths`` writes them. Acceptance by position is
estimated on the target's own continuations of the prompts, without decoding; then every head drafts chains for the same
prompts, as an arm of one run. The same command resumes; ``length_figure.py`` reads the runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from experiments import runs
from experiments.runs import ZOO
from scripts.zoo import acceptance
from spec_lab.models.target import Target


def heads(folder: Path) -> dict[str, Path]:
    """Return the folder of each head, the one with the least training first."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: float(path.name))
    return {f"head_{number}": head for number, head in enumerate(folders)}


def estimated(folder: Path, text: str, limit: int, new: int) -> dict[str, Any]:
    """Return a head's acceptance by position on continuations of ``limit`` prompts (``acceptance.by_position``)."""
    target = Target.load(str(ZOO / "target"), dtype="float32")
    writer = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=torch.float32).eval()
    assert target.tokenizer is not None
    rows = (ZOO / "prompts" / f"{text}.jsonl").read_text().splitlines()[:limit]
    ids = [target.tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]
    return acceptance.by_position(writer, *acceptance.eagle3(target, folder), ids, new)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/training_length", 24)
    parser.add_argument("--heads", type=Path, required=True, help="folder of the trained heads")
    parser.add_argument("--text", default="code", help="prompts that are decoded (code)")
    chosen = parser.parse_args(arguments)
    folders = heads(chosen.heads.absolute())
    facts = {
        name: runs.trained(folder) | estimated(folder, chosen.text, chosen.limit, chosen.new)
        for name, folder in folders.items()
    }
    arms = {name: runs.chain("eagle", folder, acceptance.POSITIONS) for name, folder in folders.items()}
    runs.sweep(chosen, chosen.out, arms, f"prompts={chosen.text}", "sampling=greedy,temperature_1")
    runs.write_training(chosen.out, facts)


if __name__ == "__main__":
    main()
