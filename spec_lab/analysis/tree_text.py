"""Draft trees that were chosen by measured costs, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.results.manifest import with_parts


def chosen_trees(now: Mapping[str, Mapping[str, Any]], begun: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each arm, and each part of a hybrid, whose draft tree was chosen by measured costs, with the
    option that repeats it.

    Args:
        now: the proposers' facts, by arm, the main arm first.
        begun: the same in the manifest; of a resumed run, from when it began.
    """
    lines, first = [], dict[tuple[str, str], str]()
    main, now = next(iter(begun), ""), with_parts(now)
    for name, facts in with_parts(begun).items():
        if "costs_measured" not in facts:
            continue
        arm, dot, part = name.partition(".")
        tree, option = facts["tree"], f"{'proposer' if arm == main else f'arms.{arm}'}{dot}{part}.tree"
        depth = 0 if tree == "none" else max(path.count(".") + 1 for path in tree.split())
        busy = "" if facts.get("costs_steady", True) else ", on a busy machine"
        if "costs_measured" not in now.get(name, {}):
            origin = f"chosen when this run began{busy}"
        elif facts["costs"] == "cached":
            origin = f"step costs from the cache, measured {facts['costs_measured']}"
        else:
            origin = f"step costs measured now{busy}{' and not cached' if busy else ''}"
        what = (
            f"calibrated tree of {facts['nodes']} nodes, depth {depth}, expected tau {facts['expected_tokens']:.2f} "
            f"({origin})"
        )
        shown, same = f"{arm}{dot}{part}", first.get((what, tree))
        first.setdefault((what, tree), shown)
        lines.append(
            f"{shown}: the same tree as {same}." if same else f"{shown}: {what}; repeat it with {option}='{tree}'"
        )
    return lines
