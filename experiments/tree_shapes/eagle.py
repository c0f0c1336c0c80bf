"""Compare an EAGLE-3 head's trees at equal numbers of nodes: python -m experiments.tree_shapes.eagle.

All trees of a size are arms of one run, and alternate; a sweep over verifiers and sampling for each size. The same
command resumes; ``eagle_figure.py`` reads the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import runs

STATIC = {4: "2x1", 8: "2x1x1x1", 16: "4x1x1x1", 32: "2x3x1x1x1x1", 64: "4x3x1x1x1x1"}
"""A static tree of each number of nodes, at most six levels deep."""

MAX_CHAIN = 16
"""Nodes of the longest chain: later positions are hardly ever reached, and each costs a forward of the head."""


def arms(nodes: int, greedy: bool) -> dict[str, dict[str, object]]:
    """Return the options of each arm.

    Args:
        nodes: of every tree.
        greedy: the target's temperature is 0; then sampled siblings are drawn at temperature 1.
    """
    grown = {"nodes": nodes, "children": min(4, nodes), "max_depth": 6, "width": 4, "rerank": "false"}
    without = {"drawn": "without_replacement", "temperature": 1 if greedy else "null"}
    arms_of: dict[str, dict[str, object]] = {
        "chain": {"nodes": "null", "rerank": "false", "depth": nodes, "drawn": "iid"},
        "static": {"nodes": "null", "rerank": "false", "tree": STATIC[nodes], **without},
        "static_point": {"nodes": "null", "rerank": "false", "tree": STATIC[nodes], "drawn": "deterministic"},
        "best_first": grown | without,
        "best_first_point": grown | {"drawn": "deterministic"},
        "eagle2": grown | {"rerank": "true", "drawn": "deterministic"},
    }
    return arms_of if nodes <= MAX_CHAIN else {name: arm for name, arm in arms_of.items() if name != "chain"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/eagle_trees", 12)
    parser.add_argument(
        "--head", type=Path, default=runs.ZOO / "eagle3", help="folder of an EAGLE-3 head (the bundled one)"
    )
    parser.add_argument("--text", default="code", help="prompts that are decoded (code)")
    parser.add_argument("--nodes", type=int, nargs="+", choices=list(STATIC), default=list(STATIC))
    chosen = parser.parse_args(arguments)
    for sampling in ("greedy", "temperature_1"):
        for nodes in chosen.nodes:
            path = {"path": chosen.head.absolute()}
            drawn = {name: ("eagle", path | options) for name, options in arms(nodes, sampling == "greedy").items()}
            folder = chosen.out / f"{sampling}_{nodes}"
            runs.sweep(
                chosen, folder, drawn, f"prompts={chosen.text}", f"sampling={sampling}", "verifier=token,traversal"
            )


if __name__ == "__main__":
    main()
