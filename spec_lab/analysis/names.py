"""The names of arms as readers see them.

Rows, ``summary.json`` and metric keys call the arm of ``proposer`` ``speculative``, so that runs with different
proposers pair by key. Tables, figures and pages show its proposer's name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from spec_lab.results.writer import Tables

MAIN = "speculative"
"""The key of the arm of ``proposer``."""

Value = TypeVar("Value")


def arm_names(proposers: Mapping[str, str | None]) -> dict[str, str]:
    """Return the name under which each arm is shown: its key; for ``speculative`` the name of its proposer.

    ``speculative`` keeps its key where another arm of the run has its proposer's name, or the name is not known.

    Args:
        proposers: the name of each arm's proposer, by arm; None where it has none.
    """
    main = proposers.get(MAIN)
    return {arm: main if arm == MAIN and main and main not in proposers else arm for arm in proposers}


def names_in_manifest(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return ``arm_names`` of a run, from its manifest."""
    known = {arm: facts.get("name") for arm, facts in manifest["proposers"].items()}
    return arm_names(dict.fromkeys(manifest["arms"]) | {arm: str(name) for arm, name in known.items() if name})


def renamed(values: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    """Return values by the name under which their arm is shown."""
    return {names.get(arm, arm): value for arm, value in values.items()}


def with_names(tables: Tables, names: Mapping[str, str]) -> Tables:
    """Return the rows with the names under which their arms are shown, for figures and tables."""
    frames = (tables.forwards, tables.steps, tables.requests)
    return Tables(*(frame.assign(arm=frame["arm"].replace(dict(names))) for frame in frames))
