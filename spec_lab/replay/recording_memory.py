"""The memory that recorded distributions need: a table that does not fit is refused before it is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spec_lab.core.device_memory import available, readable

FACTOR = 20
"""Bytes of memory for each byte of the table: float64 in place of float32, and the arrays of a verifier or a bound.
(Measured: 30 kB for each row of 128 tokens.)
"""
ROW = 4096
"""Further bytes of each row: texts, and arrays that do not depend on the recorded tokens."""


def check_memory(folder: Path) -> None:
    """Refuse a recording of which the rows do not fit into memory, since all are held at once.

    Args:
        folder: the run's directory, with ``replay.parquet`` or its parts.

    Raises:
        ValueError: they need more memory than there is; names what to do.
    """
    whole = folder / "replay.parquet"
    rows = size = 0
    for file in [whole] if whole.is_file() else sorted((folder / "parts").glob("replay-*.parquet")):
        try:
            facts = pq.read_metadata(file)
        except (pa.ArrowException, OSError):  # whoever reads it says what is wrong
            return
        rows += facts.num_rows
        size += sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
    need, room = FACTOR * size + ROW * rows, available(torch.device("cpu"))
    if room is not None and need > room:
        raise ValueError(
            f"{folder} has recorded {rows} rows, which need {readable(need)} of memory at a rough estimate, and "
            f"{readable(room)} are available: record fewer steps (record_share) or tokens (record_top), or use a "
            "machine with more memory"
        )
