"""Compare drafters that learned from the same tokens: python -m experiments.drafters.measure --drafters DIR.

``DIR`` holds a folder for each, as ``scripts/train_zoo.py drafters`` writes them. Every drafter drafts chains of equal
length, on three kinds of text, greedily and at temperature 1. All are arms of one run, and alternate. The same command
resumes; ``figure.py`` reads the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import runs

DRAFTERS = {
    "eagle3": "eagle", "eagle1": "eagle", "mtp": "mtp", "hydra": "hydra", "medusa": "medusa", "pard": "pard",
    "draft": "draft_chain",
}  # fmt: skip
"""Arms, and the proposer of each."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/drafters", 12)
    parser.add_argument("--drafters", type=Path, required=True, help="folder of the trained drafters")
    parser.add_argument("--texts", nargs="+", default=["code", "json", "prose"], help="prompts that are decoded")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a chain (4)")
    chosen = parser.parse_args(arguments)
    folders = {name: chosen.drafters.absolute() / name for name in DRAFTERS if (chosen.drafters / name).is_dir()}
    facts = {name: runs.trained(folder) for name, folder in folders.items()}
    arms = {name: runs.chain(DRAFTERS[name], folder, chosen.depth) for name, folder in folders.items()}
    runs.sweep(chosen, chosen.out, arms, f"prompts={','.join(chosen.texts)}", "sampling=greedy,temperature_1")
    runs.write_training(chosen.out, facts)


if __name__ == "__main__":
    main()
