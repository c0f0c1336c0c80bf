"""The rows that a measurement of costs leaves behind, written part by part, so that a kill keeps what is finished."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from spec_lab.core.files import refuse_link
from spec_lab.results.writer import Rows, columns, write_whole

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


def write(file: Path, rows: Rows | pd.DataFrame) -> None:
    """Write rows as parquet, renamed into place once whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    write_whole(pa.Table.from_pandas(rows, schema=columns(COST), preserve_index=False), file)


def load(out: str | Path) -> pd.DataFrame:
    """The rows of what is finished, whether the measurement is done, running or was stopped.

    Raises:
        ValueError: a file that is not a table.
    """
    files = [Path(out) / "cost.parquet", *sorted((Path(out) / "parts").glob("cost-*.parquet"))]
    pieces = [columns(COST).empty_table()]
    for file in files:
        try:
            pieces += [pq.read_table(file)] if file.is_file() else []
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file} is not a readable table ({error}); remove it and measure again") from error
    return pa.concat_tables(pieces).to_pandas().drop_duplicates("id", keep="last", ignore_index=True)


def gather(out: Path) -> pd.DataFrame:
    """Put all parts together in ``cost.parquet``, and remove them."""
    refuse_link(out / "parts")
    frame, folder = load(out), out / "parts"
    write(out / "cost.parquet", frame)
    for part in [*folder.glob("cost-*.parquet"), *folder.glob(".*.tmp")]:
        part.unlink()
    if folder.is_dir():
        folder.rmdir()
    return frame
