"""Tables are read within bounds that their footers tell."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_lab.core import tables
from spec_lab.core.tables import check_rows, read_table


def test_columns_of_a_table(tmp_path):
    table = pa.table({"a": [1, 2, 3], "b": [["x"], [], None]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet") == table
    assert read_table(tmp_path / "a.parquet", ["b"]) == table.select(["b"])


def test_more_rows_than_bytes_are_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.repeat(pa.scalar(1, pa.int8()), 10_000_001)}), file)
    with pytest.raises(ValueError, match=rf"it has 10000001 rows in {file.stat().st_size} bytes"):
        read_table(file)


@pytest.mark.parametrize("groups", [[6_000_000, 6_000_000], [12_000_000, -12_000_000]])
def test_the_rows_of_its_groups_are_counted_whatever_the_footer_says(tmp_path, groups):
    (tmp_path / "a.parquet").write_bytes(bytes(100))
    made = [SimpleNamespace(num_rows=rows) for rows in groups]
    facts = SimpleNamespace(num_rows=1, num_row_groups=2, num_columns=0, row_group=made.__getitem__)
    with pytest.raises(ValueError, match=f"it has {sum(map(abs, groups))} rows in 100 bytes, and at most 100 are read"):
        check_rows(facts, tmp_path / "a.parquet")


def test_long_lists_of_few_rows_are_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"id": [1], "a": pa.ListArray.from_arrays([0, 10_000_001], pa.repeat(True, 10_000_001))}), file
    )
    with pytest.raises(ValueError, match=r"it has 10000001 values in \d+ bytes in its column a\.list\.element"):
        read_table(file)


def test_more_rows_than_any_table_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS", 2)
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="it has 3 rows in .* at most 2"):
        read_table(tmp_path / "a.parquet")
