"""Common parts of the scripts that measure drafters: their options, arms, and sweeps of spec_lab's command line."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import safe_open

import spec_lab
from scripts.zoo.generate import Generation

ZOO = Path(spec_lab.__file__).parent / "zoo"
"""The folder of the bundled models."""

TRAINING = "training.json"
"""The file beside the runs that states what each drafter learned from."""

Arm = tuple[str, Mapping[str, object]]
"""A proposer of ``conf/proposer``, and its options; "group@place" chooses a config of a group, as "policy@policy"."""


def parser(description: str | None, out: str, limit: int) -> argparse.ArgumentParser:
    """Return a parser of the options that every script has.

    Args:
        description: the script's docstring.
        out: default folder of the runs.
        limit: default number of prompts of each text.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=_absolute, default=_absolute(out), help=f"where runs go ({out})")
    made.add_argument("--limit", type=int, default=limit, help=f"prompts of each text ({limit})")
    made.add_argument("--new", type=int, default=64, help="tokens emitted for each (64)")
    made.add_argument("--threads", type=int, default=2)
    return made


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def sweep(chosen: argparse.Namespace, out: Path, arms: Mapping[str, Arm], *options: str) -> None:
    """Run a sweep with these arms beside the baseline.

    Args:
        chosen: by a ``parser``.
        out: folder of the sweep, whose name is the sweep's.
        arms: by name.
        options: further ones; those with commas are swept over.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    short = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"warmup={min(16, chosen.new)}"]
    usual = ["proposer=none", f"threads={chosen.threads}", f"name={out.name}", f"output_dir={out}"]
    named = [f"+proposer@arms.{name}={proposer}" for name, (proposer, _) in arms.items()]
    of_arms = [option(name, key, value) for name, (_, more) in arms.items() for key, value in more.items()]
    command = [sys.executable, "-m", "spec_lab", "--multirun", *options, *usual, *short, *named, *of_arms]
    subprocess.run(command, check=True)


def option(arm: str, key: str, value: object) -> str:
    """Return the override of an arm's option."""
    group, chosen, slot = key.partition("@")
    if not chosen:
        return f"arms.{arm}.{key}={value}"
    return f"{'+' if group == 'policy' else ''}{group}@arms.{arm}.{slot}={value}"


def chain(proposer: str, folder: Path, depth: int) -> Arm:
    """Return an arm that drafts chains of so many tokens; they are sampled, but Medusa's are its likeliest."""
    if proposer == "medusa":
        paths = " ".join(".".join("0" * level) for level in range(1, depth + 1))
        return proposer, {"path": folder, "tree": f"'{paths}'"}
    more = {"confidence": 0} if proposer == "draft_chain" else {"nodes": "null", "rerank": "false"}
    return proposer, {"path": folder, "depth": depth, "drawn": "iid", **more}


def trained(folder: Path) -> dict[str, Any]:
    """Return the parameters of a drafter of ``scripts/train_zoo.py``, and the last line of its learning curve.

    ``seconds`` are those of all steps at the pace of the fastest between two lines: training may have been paused.
    """
    with safe_open(folder / "model.safetensors", "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    lines = (folder / "training" / "0" / "learning.jsonl").read_text().splitlines()
    curve = [json.loads(line) for line in lines]
    paces = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(curve)]
    seconds = min(paces) * curve[-1]["step"] if paces else curve[-1]["seconds"]
    facts = {"parameters": parameters, "tokens_of_a_text": Generation.length}
    return facts | curve[-1] | {"seconds": seconds}


def write_training(out: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what each drafter learned from into the folder of its sweep, which must be empty when that begins."""
    (out / TRAINING).write_text(json.dumps(facts, indent=1) + "\n")
