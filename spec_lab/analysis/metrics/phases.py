"""Where decode time is spent.

``forwards`` is a data frame with the columns of ``results.schema.FORWARDS``: one row for each forward of a batch. Times
are in seconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio

PHASES = {
    "target_forward": "target: module calls",
    "propose_forward": "draft: module calls",
    "target_rest": "target: packing, KV cache",
    "propose_rest": "draft: other work",
    "mask_wait": "waiting for token masks",
    "probabilities": "logits to probabilities",
    "verify": "verification",
    "commit": "commit",
    "between": "between steps",
}
"""Disjoint parts of decode time, with their labels. Keys are those of ``summary.json`` and of ``forwards``."""


def decode_seconds(forwards: pd.DataFrame, arm: str) -> float:
    """Return the seconds from the end of each group's prefill to the end of its last step, summed over groups, and over
    the turns of conversations.
    """
    forwards = forwards[forwards["arm"] == arm]
    group = forwards.groupby(together(forwards)).ngroup().to_numpy()
    end, prefill = (forwards["start"] + forwards["whole"]).to_numpy(), forwards["prefill"].to_numpy(dtype=bool)
    first, last = np.zeros((2, int(group.max(initial=-1)) + 1))
    np.maximum.at(last, group, end)
    np.maximum.at(first, group[prefill], end[prefill])
    return float((last - first).sum())


def together(forwards: pd.DataFrame) -> list[str]:
    """Return the columns that tell apart what was timed as one: the group and, of conversations, the turn."""
    return ["group", "turn"] if "turn" in forwards else ["group"]


def phases_of(forwards: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of each step of the batch by phase, without "between": columns ``PHASES`` but the last."""
    parts = {
        "target_rest": forwards["target"] - forwards["target_forward"],
        "propose_rest": forwards["propose"] - forwards["propose_forward"],
    }
    measured = [phase for phase in PHASES if phase != "between"]
    return pd.DataFrame({phase: parts[phase] if phase in parts else forwards[phase] for phase in measured})


def phase_seconds(forwards: pd.DataFrame, arm: str) -> dict[str, float]:
    """Return decode seconds by phase (``PHASES``); they add up to ``decode_seconds``."""
    phases = phases_of(forwards[(forwards["arm"] == arm) & ~forwards["prefill"]]).sum().to_dict()
    phases["between"] = decode_seconds(forwards, arm) - sum(phases.values())
    return {phase: float(phases[phase]) for phase in PHASES}


def phase_seconds_by_step(forwards: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of each step of the batch after the prefill, by phase; they add up to ``phase_seconds``.

    Args:
        forwards: one arm's rows of ``forwards``, prefill included, in the order decoded.
    """
    phases = phases_of(forwards)
    phases["between"] = since_last_step(forwards) - phases.sum(axis=1)
    return phases[~forwards["prefill"].astype(bool)].reset_index(drop=True)


def since_last_step(forwards: pd.DataFrame) -> pd.Series:
    """Return the seconds from the end of the step before, in the same group and turn, to the end of each step.

    Args:
        forwards: one arm's rows of ``forwards``, prefill included, in the order decoded.
    """
    end = forwards["start"] + forwards["whole"]
    return end - end.groupby([forwards[name] for name in together(forwards)]).shift(fill_value=0.0)


def mask_seconds(forwards: pd.DataFrame, arm: str) -> tuple[float, float]:
    """Return decode seconds spent on token masks on any thread, and of these the seconds that the loop waited."""
    decoding = forwards[(forwards["arm"] == arm) & ~forwards["prefill"]]
    return float(decoding["mask_busy"].sum()), float(decoding["mask_wait"].sum())


def overhead(forwards: pd.DataFrame, arm: str) -> float:
    """Return 1 - seconds inside the module calls of target, draft and heads / decode seconds."""
    phases, seconds = phase_seconds(forwards, arm), decode_seconds(forwards, arm)
    return 1.0 - ratio(phases["propose_forward"] + phases["target_forward"], seconds)
