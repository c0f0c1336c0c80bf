"""Compare drafters that learned from the same tokens: python -m experiments.drafters.measure --drafters DIR.

``DIR`` holds a folder for each, as ``scripts/train_zoo.py drafters`` writes them. Every drafter drafts chains of equal
length, on three kinds of text, greedily and at temperature 1. All are arms of one run, and alternate. The same command
resumes; ``figure.py`` reads the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from spec_lab.train.generate import Generation

DRAFTERS = {
    "eagle3": "eagle", "eagle1": "eagle", "mtp": "mtp", "hydra": "hydra", "medusa": "medusa", "pard": "pard",
    "draft": "draft_chain",
}  # fmt: skip
"""Arms, and the proposer of each."""

TRAINING = "training.json"
"""The file beside the runs that states what each drafter learned from."""


def arm(name: str, folder: Path, depth: int) -> list[str]:
    """Return the options of an arm.

    Args:
        name: one of ``DRAFTERS``.
        folder: of the trained drafter.
        depth: tokens of its chains. They are sampled, but Medusa's are its likeliest.
    """
    proposer = DRAFTERS[name]
    own: dict[str, object] = {"path": folder}
    if proposer == "medusa":
        own["tree"] = "'" + " ".join(".".join("0" * level) for level in range(1, depth + 1)) + "'"
    else:
        own |= {"depth": depth, "drawn": "iid"}
        own |= {"confidence": 0} if proposer == "draft_chain" else {"nodes": "null", "rerank": "false"}
    return [f"+proposer@arms.{name}={proposer}", *(f"arms.{name}.{key}={value}" for key, value in own.items())]


def options(chosen: argparse.Namespace) -> list[str]:
    """Return the options of the command line: a sweep over texts and sampling."""
    names = [name for name in DRAFTERS if (chosen.drafters / name).is_dir()]
    arms = [one for name in names for one in arm(name, chosen.drafters / name, chosen.depth)]
    swept = [f"prompts={','.join(chosen.texts)}", "sampling=greedy,temperature_1"]
    short = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"warmup={min(16, chosen.new)}"]
    usual = ["proposer=none", f"threads={chosen.threads}", "name=drafters", f"output_dir={chosen.out}"]
    return ["--multirun", *swept, *short, *usual, *arms]


def trained(folder: Path) -> dict[str, Any]:
    """Return the parameters of a trained drafter, and the last line of its learning curve."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    lines = (folder / "training" / "0" / "learning.jsonl").read_text().splitlines()
    return {"parameters": parameters, "tokens_of_a_text": Generation.length, **json.loads(lines[-1])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=Path, required=True, help="folder of the trained drafters")
    parser.add_argument("--out", type=Path, default=Path("outputs/drafters"), help="where runs go")
    parser.add_argument("--texts", nargs="+", default=["code", "json", "prose"], help="prompts that are decoded")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a chain (4)")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each text (12)")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each (64)")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    chosen.drafters, chosen.out = chosen.drafters.absolute(), chosen.out.absolute()
    chosen.out.mkdir(parents=True, exist_ok=True)
    facts = {name: trained(chosen.drafters / name) for name in DRAFTERS if (chosen.drafters / name).is_dir()}
    (chosen.out / TRAINING).write_text(json.dumps(facts, indent=1) + "\n")
    subprocess.run([sys.executable, "-m", "spec_lab", *options(chosen)], check=True)


if __name__ == "__main__":
    main()
