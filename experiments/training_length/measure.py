"""Accepted length against training tokens: python -m experiments.training_length.measure --heads DIR.

``DIR`` holds a folder for each EAGLE-3 head, as ``scripts/train_zoo.py lengths`` writes them. Acceptance by position is
estimated on the target's own continuations of the prompts, without decoding; then every head drafts chains for the same
prompts, as an arm of one run. The same command resumes; ``figure.py`` reads the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import spec_lab
from experiments.drafters.measure import TRAINING, trained
from scripts.zoo import drafters
from spec_lab.models.target import Target

ZOO = Path(spec_lab.__file__).parent / "zoo"


def heads(folder: Path) -> dict[str, Path]:
    """Return the folder of each head, the one with the least training first."""
    found = sorted((one for one in folder.iterdir() if one.is_dir()), key=lambda one: float(one.name))
    return {f"head_{number}": one for number, one in enumerate(found)}


def estimated(folder: Path, text: str, limit: int, new: int) -> dict[str, Any]:
    """Return a head's acceptance by position on continuations of ``limit`` prompts (``drafters.acceptance``)."""
    target = Target.load(str(ZOO / "target"), dtype="float32")
    writer = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=torch.float32).eval()
    assert target.tokenizer is not None
    rows = (ZOO / "prompts" / f"{text}.jsonl").read_text().splitlines()[:limit]
    ids = [target.tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]
    return drafters.acceptance(writer, *drafters.eagle3(target, folder), ids, new)


def options(chosen: argparse.Namespace) -> list[str]:
    """Return the options of the command line: a sweep over sampling."""
    own = {
        f"arms.{name}.{option}": value
        for name, folder in heads(chosen.heads).items()
        for option, value in {
            "path": folder, "depth": drafters.POSITIONS, "nodes": "null", "rerank": "false", "drawn": "iid",
        }.items()
    }  # fmt: skip
    short = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"warmup={min(16, chosen.new)}"]
    usual = ["proposer=none", f"prompts={chosen.text}", f"threads={chosen.threads}", "name=training_length"]
    place = ["--multirun", "sampling=greedy,temperature_1", f"output_dir={chosen.out}"]
    arms = [f"+proposer@arms.{name}=eagle" for name in heads(chosen.heads)]
    return [*place, *usual, *short, *arms, *(f"{name}={value}" for name, value in own.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True, help="folder of the trained heads")
    parser.add_argument("--out", type=Path, default=Path("outputs/training_length"), help="where runs go")
    parser.add_argument("--text", default="code", help="prompts that are decoded (code)")
    parser.add_argument("--limit", type=int, default=24, help="prompts (24)")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each (64)")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    chosen.heads, chosen.out = chosen.heads.absolute(), chosen.out.absolute()
    chosen.out.mkdir(parents=True, exist_ok=True)
    facts = {
        name: trained(folder) | estimated(folder, chosen.text, chosen.limit, chosen.new)
        for name, folder in heads(chosen.heads).items()
    }
    (chosen.out / TRAINING).write_text(json.dumps(facts, indent=1) + "\n")
    subprocess.run([sys.executable, "-m", "spec_lab", *options(chosen)], check=True)


if __name__ == "__main__":
    main()
