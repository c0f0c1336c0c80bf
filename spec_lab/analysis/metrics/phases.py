"""Where decode time goes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio

PHASES = {
    "target_forward": "target, inside the model",
    "propose_forward": "draft, inside its model",
    "target_rest": "target, packing and cells",
    "propose_rest": "draft, around its model",
    "mask_wait": "waiting for masks",
    "probabilities": "probabilities",
    "verify": "verifying",
    "commit": "committing",
    "between": "between rounds",
}
"""Disjoint parts of decode time, and what they are."""


def decode_seconds(rounds: pd.DataFrame, arm: str) -> float:
    """Seconds from the end of each group's prefill to the end of its last round, summed."""
    own = rounds[rounds["arm"] == arm]
    group = np.unique(own["group"].to_numpy(), return_inverse=True)[1]
    end, prefill = (own["start"] + own["whole"]).to_numpy(), own["prefill"].to_numpy(dtype=bool)
    first, last = np.zeros((2, int(group.max(initial=-1)) + 1))
    np.maximum.at(last, group, end)
    np.maximum.at(first, group[prefill], end[prefill])
    return float((last - first).sum())


def phase_seconds(rounds: pd.DataFrame, arm: str) -> dict[str, float]:
    """Decode seconds by phase (``PHASES``); they add up to ``decode_seconds``."""
    own = rounds[(rounds["arm"] == arm) & ~rounds["prefill"]]
    total = own[
        ["propose", "propose_forward", "mask_wait", "target", "target_forward", "probabilities", "verify", "commit"]
    ].sum()
    parts = {
        "propose_forward": total["propose_forward"],
        "propose_rest": total["propose"] - total["propose_forward"],
        "mask_wait": total["mask_wait"],
        "target_forward": total["target_forward"],
        "target_rest": total["target"] - total["target_forward"],
        "law": total["probabilities"],
        "verify": total["verify"],
        "commit": total["commit"],
    }
    parts["between"] = decode_seconds(rounds, arm) - sum(parts.values())
    return {phase: float(parts[phase]) for phase in PHASES}


def mask_seconds(rounds: pd.DataFrame, arm: str) -> tuple[float, float]:
    """Decode seconds spent on masks, wherever they ran, and of them those that the loop waited for."""
    own = rounds[(rounds["arm"] == arm) & ~rounds["prefill"]]
    return float(own["mask_busy"].sum()), float(own["mask_wait"].sum())


def overhead(rounds: pd.DataFrame, arm: str) -> float:
    """1 - seconds inside the module calls of target, draft and heads / decode seconds."""
    phases, whole = phase_seconds(rounds, arm), decode_seconds(rounds, arm)
    return 1.0 - ratio(phases["propose_forward"] + phases["target_forward"], whole)
