"""Compare policies with fixed depths: python -m experiments.policies.measure.

A draft model drafts chains of at most eight tokens. Every fixed depth and every policy is an arm of one run, and they
alternate; a sweep over texts, and one over batch sizes on all texts mixed. The same command resumes; ``figure.py``
reads the runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments import runs

DEPTH = 8
"""Most tokens of a chain."""

FIXED = (1, 2, 3, 4, 6, 8)

PUBLISHED = ("heuristic", "confidence", "draft_and_verify", "adaedl", "svip", "ucb", "thompson", "goodput", "gain")

POLICIES: dict[str, dict[str, object]] = {name: {"policy@policy": name} for name in PUBLISHED} | {
    "goodput_svip": {"policy@policy": "goodput", "policy.stop": "svip", "policy.threshold": 0.3}
}
"""Their options; others have their defaults."""


def arms() -> dict[str, runs.Arm]:
    """Return the arms by name: fixed depths, then policies."""
    plain: dict[str, object] = {"depth": DEPTH, "confidence": 0}
    fixed = {f"fixed_{n}": ("draft_chain", plain | {"policy@policy": "fixed", "policy.depth": n}) for n in FIXED}
    return fixed | {name: ("draft_chain", plain | policy) for name, policy in POLICIES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/policies", 16)
    parser.add_argument("--texts", nargs="*", default=["code", "json", "prose"], help="prompts at batch size 1")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 4, 16], help="batch sizes of all prompts mixed")
    parser.add_argument("--sampling", nargs="+", default=["greedy", "temperature_1"])
    parser.add_argument("--arms", nargs="+", default=[*arms()], choices=[*arms()], help="fixed depths and policies")
    parser.add_argument("--groups", type=int, default=4, help="groups of prompts of each batch size, at least (4)")
    chosen = parser.parse_args(arguments)
    compared = {name: arm for name, arm in arms().items() if name in chosen.arms}
    for sampling in chosen.sampling:
        sampled = f"sampling={sampling}"
        if chosen.texts:
            texts = f"prompts={','.join(chosen.texts)}"
            runs.sweep(chosen, chosen.out / f"{sampling}_texts", compared, sampled, texts, "batch_size=1")
        for size in chosen.sizes:
            more = argparse.Namespace(**vars(chosen) | {"limit": max(chosen.limit, chosen.groups * size)})
            folder = chosen.out / f"{sampling}_mixed_{size}"
            runs.sweep(more, folder, compared, sampled, "prompts=bundled", f"batch_size={size}")


if __name__ == "__main__":
    main()
