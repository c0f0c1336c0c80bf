"""Tables are read within bounds that their footers tell."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_lab.core import tables
from spec_lab.core.tables import read_table


def test_columns_of_a_table(tmp_path):
    table = pa.table({"a": [1, 2, 3], "b": [["x"], [], None]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet") == table
    assert read_table(tmp_path / "a.parquet", ["b"]) == table.select(["b"])


def test_more_rows_than_bytes_are_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.repeat(1, 1_000_000)}), file)
    with pytest.raises(ValueError, match=rf"it has 1000000 rows in {file.stat().st_size} bytes"):
        read_table(file)


def test_long_lists_of_few_rows_are_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "a": pa.array([[7] * 1_000_000])}), file)
    with pytest.raises(ValueError, match=r"it has 1000000 values in \d+ bytes in its column a\.list\.element"):
        read_table(file)


def test_more_rows_than_any_table_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS", 2)
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="it has 3 rows in .* at most 2"):
        read_table(tmp_path / "a.parquet")


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is not readable \(it is no regular file"):
        read_table(tmp_path / "a.parquet")
