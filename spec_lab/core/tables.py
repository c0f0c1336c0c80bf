"""Reading Parquet files as untrusted input: a small file can hold millions of equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spec_lab.core.files import open_regular

MAX_ROWS = 100_000_000
"""Maximum number of rows of a table."""

ALWAYS_READ = 10_000_000
"""Number of values, of all columns together, that a file of any size may have: it fits into memory, and honest tables
of equal rows, such as a prompt that is repeated, take less than a byte for each."""

MAX_VALUES = 100
"""Maximum number of values of a column, those in its lists included, for each byte of the file."""


def read_table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in a Parquet file.

    Args:
        file: the file, or a symlink to one.
        columns: those that are read; None reads all.

    Raises:
        OSError: it does not exist, or cannot be opened.
        ValueError: it is not a regular file, or as ``check_rows``.
        pa.ArrowException: it is no Parquet file, or damaged.
    """
    with open_regular(file) as stream, pq.ParquetFile(stream) as table:
        check_rows(table.metadata, file)
        return table.read(columns=None if columns is None else list(columns))


def check_rows(facts: pq.FileMetaData, file: Path, named: str = "it") -> None:
    """Refuse a table with more rows than can be meant, by its footer.

    Rows with a name or a time of their own take several bytes each, so more rows than bytes repeat a few: that many
    are read only if they are few (``ALWAYS_READ``).

    Args:
        facts: the footer.
        named: what messages call it.

    Raises:
        ValueError: it has more rows than ``MAX_ROWS``; or more than ``ALWAYS_READ`` rows or values, and more rows than
            bytes or a column of too many values.
    """
    size, groups = file.stat().st_size, [facts.row_group(number) for number in range(facts.num_row_groups)]
    rows = max(facts.num_rows, sum(abs(group.num_rows) for group in groups))  # that of the groups is what is read
    columns = [sum(abs(group.column(number).num_values) for group in groups) for number in range(facts.num_columns)]
    few = max(rows, sum(columns)) <= ALWAYS_READ
    if rows > (max_rows := min(MAX_ROWS, rows if few else size)):
        raise ValueError(f"{named} has {rows} rows in {size} bytes, and at most {max_rows} are read")
    for number, values in enumerate(columns):
        if not few and values > (max_values := MAX_VALUES * size):
            name = facts.schema.column(number).path
            raise ValueError(
                f"{named} has {values} values in {size} bytes in its column {name}, and at most {max_values} are read"
            )
