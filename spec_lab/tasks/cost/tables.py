"""The rows that a measurement of costs leaves behind, written part by part, so that a kill keeps what is finished."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from spec_lab.results.parts import TableParts

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

PARTS = ("propose", "target", "probabilities", "verify", "commit", "between")
"""Columns of seconds that add up to a round's."""

COST = {
    "id": (_TEXT, "batch/context/arm/turn"),
    "batch": (_WHOLE, "sequences decoded together"),
    "context": (_WHOLE, "tokens of each sequence that were computed when the arm began"),
    "arm": (_TEXT, "who drafted: an arm of the lab, or 'nodes N' for a fixed tree"),
    "fixed": (_FLAG, "whether it was a fixed tree"),
    "turn": (_WHOLE, "number of the turn, from 0; in each turn every arm decodes some rounds at every place"),
    "nodes": (_REAL, "nodes drafted below each sequence, the mean of the timed rounds"),
    "propose": (_REAL, "seconds of drafting, the median of the timed rounds, as all seconds here"),
    "target": (_REAL, "seconds of the target, packing and bookkeeping of cells included"),
    "target_forward": (_REAL, "of these, seconds inside its module calls"),
    "probabilities": (_REAL, "seconds of turning logits into target probabilities"),
    "verify": (_REAL, "seconds of verification and choice"),
    "commit": (_REAL, "seconds of committing"),
    "between": (_REAL, "seconds from this round's end to the start of the next"),
    "whole": (_REAL, "seconds from this round's start to the start of the next"),
}
"""One row for each turn of each arm at each place, a batch size with a context."""


def parts(out: str | Path) -> TableParts:
    """The table of a measurement in its directory."""
    return TableParts(Path(out), {"cost": COST})


def load(out: str | Path) -> pd.DataFrame:
    """The rows of what is finished, whether the measurement is done, running or was stopped.

    Raises:
        ValueError: a file that is not a table.
    """
    return parts(out).load()["cost"]
