"""Compare the bundled EAGLE-3 head's trees at equal numbers of nodes: python -m experiments.eagle_trees.measure.

All trees of a size are arms of one run, and alternate; a sweep over verifiers and sampling for each size. The same
command resumes; ``figure.py`` reads the runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STATIC = {4: "2x1", 8: "2x1x1x1", 16: "4x1x1x1", 32: "2x3x1x1x1x1", 64: "4x3x1x1x1x1"}
"""A static tree of each number of nodes, at most six levels deep."""

MOST_CHAIN = 16
"""Nodes of the longest chain: later positions are hardly ever reached, and each costs a forward of the head."""


def arms(nodes: int, greedy: bool) -> dict[str, dict[str, object]]:
    """Return the options of each arm.

    Args:
        nodes: of every tree.
        greedy: the target's temperature is 0; then sampled siblings are drawn at temperature 1.
    """
    grown = {"nodes": nodes, "children": min(4, nodes), "max_depth": 6, "width": 4, "rerank": "false"}
    without = {"drawn": "without", "temperature": 1 if greedy else "null"}
    found: dict[str, dict[str, object]] = {
        "chain": {"nodes": "null", "rerank": "false", "depth": nodes, "drawn": "iid"},
        "static": {"nodes": "null", "rerank": "false", "tree": STATIC[nodes], **without},
        "static_point": {"nodes": "null", "rerank": "false", "tree": STATIC[nodes], "drawn": "point"},
        "best_first": grown | without,
        "best_first_point": grown | {"drawn": "point"},
        "eagle2": grown | {"rerank": "true", "drawn": "point"},
    }
    return found if nodes <= MOST_CHAIN else {name: own for name, own in found.items() if name != "chain"}


def options(nodes: int, sampling: str, chosen: argparse.Namespace) -> list[str]:
    """Return the options of the command line: a sweep over verifiers."""
    short = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"warmup={min(16, chosen.new)}"]
    place = [f"name=eagle_trees_{nodes}", f"output_dir={chosen.out / f'{sampling}_{nodes}'}"]
    usual = ["proposer=none", f"prompts={chosen.text}", f"sampling={sampling}", f"threads={chosen.threads}"]
    own = arms(nodes, sampling == "greedy")
    given = [f"arms.{arm}.{name}={value}" for arm, one in own.items() for name, value in one.items()]
    swept = ["--multirun", "verifier=token,traversal"]
    return [*swept, *usual, *place, *short, *(f"+proposer@arms.{arm}=eagle" for arm in own), *given]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/eagle_trees"), help="where runs go")
    parser.add_argument("--text", default="code", help="prompts that are decoded (code)")
    parser.add_argument("--nodes", type=int, nargs="+", choices=list(STATIC), default=list(STATIC))
    parser.add_argument("--limit", type=int, default=12, help="prompts (12)")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each (64)")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    chosen.out = chosen.out.absolute()
    for sampling in ("greedy", "temperature_1"):
        for nodes in chosen.nodes:
            subprocess.run([sys.executable, "-m", "spec_lab", *options(nodes, sampling, chosen)], check=True)


if __name__ == "__main__":
    main()
