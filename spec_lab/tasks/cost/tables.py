"""The table of measured costs, written part by part, so that a killed run keeps what was finished."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from spec_lab.results.table_parts import TableParts

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

PARTS = ("propose", "target", "probabilities", "verify", "commit", "between")
"""Columns of seconds that add up to those of a whole step."""

COST = {
    "id": (_TEXT, "batch/context/arm/repeat"),
    "batch": (_WHOLE, "sequences decoded together"),
    "context": (_WHOLE, "computed tokens of each sequence when the arm's first step began"),
    "arm": (_TEXT, "an arm of the lab, or 'nodes N' for a fixed tree of N nodes"),
    "fixed": (_FLAG, "whether it was a fixed tree"),
    "turn": (_WHOLE, "number of the repeat, from 0; each repeat times every arm at every batch size and context"),
    "nodes": (_REAL, "draft nodes of each sequence, mean over the timed steps"),
    "propose": (_REAL, "seconds of drafting; like all seconds here, the median over the timed steps"),
    "target": (_REAL, "seconds of the target's forward, packing and KV bookkeeping included"),
    "target_forward": (_REAL, "of these, seconds inside its module calls"),
    "probabilities": (_REAL, "seconds of turning logits into target probabilities"),
    "verify": (_REAL, "seconds of verification and of sampling the outcome"),
    "commit": (_REAL, "seconds of the commit"),
    "between": (_REAL, "seconds from a step's end to the start of the next"),
    "whole": (_REAL, "seconds from a step's start to the start of the next"),
}
"""One row for each repeat, batch size, context and arm."""

NEWER = {
    "other_cores": (_REAL, "cores that other processes used meanwhile, of all arms' steps together; null if not known"),
    "depth": (_REAL, "depth of the deepest draft, mean over the timed steps"),
    "experts": (_REAL, "different experts that a forward read in a layer, a mean; null where they are not counted"),
}
"""The optional columns that every run writes; older ones lack them."""


def parts(out: str | Path) -> TableParts:
    """Return the table of a measurement in its directory."""
    return TableParts(Path(out), {"cost": COST}, optional={"cost": NEWER}, written=list(NEWER))


def load(out: str | Path) -> pd.DataFrame:
    """Return the rows on disk, whether the measurement is done, running or was stopped.

    Raises:
        ValueError: a file is not a table.
    """
    return parts(out).load()["cost"]
