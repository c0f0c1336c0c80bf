"""The numbers of the verifier study, computed from its rows. Intervals are over prompts, 95 %.

Only pooled numbers are reported: on a single draft a better verifier need not accept more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spec_lab.analysis.figures.verifiers import OUTCOME
from spec_lab.analysis.metrics import Interval
from spec_lab.analysis.metrics.intervals import cluster_interval

MICRO = 1e6
EXACT = "exact"


def summarise(
    rows: pd.DataFrame, texts: pd.DataFrame, verifiers: Sequence[str], facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the numbers of a run.

    Args:
        rows: as in ``study.RECORDED``.
        texts: as in ``study.TEXTS``.
        verifiers: names, in the order shown.
        facts: of each proposer, in the order shown.
    """
    return {
        "requests": len(texts),
        "tokens": int((texts["tokens"].map(len) - texts["prompt_tokens"]).sum()),
        "positions": len(rows[["request", "position"]].drop_duplicates()),
        "proposers": {
            name: {**described, **of_proposer(rows[rows["proposer"] == name], verifiers)}
            for name, described in facts.items()
        },
        "errors": texts["error"][texts["error"] != ""].tolist(),
    }


def of_proposer(rows: pd.DataFrame, verifiers: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of one proposer's drafts, and of every verifier over them."""
    drafts = rows.drop_duplicates(["request", "position"])
    names = [name for name in verifiers if name in set(rows["verifier"])]
    base = "token" if "token" in names else next(iter(names), None)
    against = rows[rows["verifier"] == base]
    forward = drafts["target_forward"].median()
    return {
        "drafts": len(drafts),
        "drafted_per_draft": drafts["nodes"].mean(),
        "bound": ratio(drafts, drafts["bound"])._asdict(),
        "propose_us": MICRO * drafts["propose"].median(),
        "target_us": MICRO * drafts["target"].median(),
        "target_forward_us": MICRO * forward,
        "probabilities_us": MICRO * drafts["probabilities"].median(),
        "compared_with": base,
        "verifiers": {name: of_verifier(rows[rows["verifier"] == name], against, forward) for name in names},
    }


def of_verifier(rows: pd.DataFrame, base: pd.DataFrame, forward: float) -> dict[str, Any]:
    """Return the numbers of one verifier over one proposer's drafts.

    Args:
        rows: its verdicts.
        base: the verdicts of the verifier it is compared with, on the same drafts.
        forward: seconds of the target's forward.
    """
    keys = ["request", "position"]
    both = rows.merge(base[[*keys, "expected_accepted"]], on=keys, suffixes=("", "_base"))
    low, middle, high = rows["verify"].quantile([0.25, 0.5, 0.75])
    noise = set(rows["given"]) == {"noise"}
    return {
        "lossless": bool(rows["lossless"].all()),
        "kind": OUTCOME if noise else EXACT,
        "expected_accepted": ratio(rows, rows["expected_accepted"])._asdict(),
        "difference": ratio(both, both["expected_accepted"] - both["expected_accepted_base"])._asdict(),
        "first_level": ratio(rows, rows["first_level"])._asdict(),
        "share_of_bound": ratio(rows, rows["first_level"], rows["bound"])._asdict(),
        "verify_us": {"median": MICRO * middle, "low": MICRO * low, "high": MICRO * high},
        "share_of_forward": middle / forward,
    }


def ratio(rows: pd.DataFrame, part: pd.Series, whole: pd.Series | None = None) -> Interval:
    """Return the sum of ``part`` / the sum of ``whole`` (None: the number of rows), with its interval over prompts."""
    counted = pd.Series(1.0, index=rows.index) if whole is None else whole
    return cluster_interval(part, counted, rows["request"])
