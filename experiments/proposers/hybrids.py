"""Compare hybrids with their parts and with transformers: python -m experiments.proposers.hybrids.

All are arms of one run, and alternate; a sweep over texts and sampling. The same command resumes; ``hybrids_figure.py``
reads the runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import runs

PARTS = ("ngram", "suffix", "medusa", "eagle")
"""Proposers that the hybrids combine."""

ARMS: dict[str, runs.Arm] = {
    **{name: (name, {}) for name in PARTS},
    "union": ("union", {}),
    "union_ngram": ("union", {"proposer@parts.suffix": "ngram"}),
    "union_eagle": ("union", {"proposer@parts.heads": "eagle"}),
    "best_of": ("best_of", {}),
    "best_of_eagle": ("best_of", {"proposer@parts.heads": "eagle"}),
    "cascade": ("cascade", {}),
}
"""By name. The parts of a hybrid are the suffix proposer and Medusa heads unless its options name others."""

OF = {
    "union": ("suffix", "medusa"),
    "union_ngram": ("ngram", "medusa"),
    "union_eagle": ("suffix", "eagle"),
    "best_of": ("suffix", "medusa"),
    "best_of_eagle": ("suffix", "eagle"),
}
"""The parts of each hybrid that are arms too."""

PEERS = ("lookup", "assisted")
"""transformers' speculative modes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/hybrids", 16)
    parser.add_argument("--texts", nargs="+", default=["code", "json", "prose", "repetitive"], help="prompts")
    parser.add_argument("--sampling", nargs="+", default=["greedy", "temperature_1"])
    chosen = parser.parse_args(arguments)
    peers = [f"+peers.{name}._target_=spec_lab.tasks.peers.Generate.{name}" for name in PEERS]
    peers.append(f"+peers.assisted.path={runs.ZOO / 'draft'}")
    swept = f"prompts={','.join(chosen.texts)}", f"sampling={','.join(chosen.sampling)}"
    runs.sweep(chosen, chosen.out, ARMS, *swept, *peers)


if __name__ == "__main__":
    main()
