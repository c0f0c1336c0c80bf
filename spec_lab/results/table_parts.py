"""Tables that are written in parts, so that a killed run keeps the rows of every finished unit of work.

Each unit (a group of prompts, for example) leaves one parquet file per table in ``parts/``, renamed into place when it
is complete. At the end ``gather`` joins the parts into one file per table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spec_lab.core.files import Unreadable, own_folder, refuse_link, replacing
from spec_lab.core.tables import read_table
from spec_lab.results.old_names import TABLES, table_names, with_columns

Rows = list[dict[str, Any]]

Columns = Mapping[str, tuple[pa.DataType, str]]
"""The type and the meaning of every column."""


class TableParts:
    """The tables of one run, in its directory.

    Args:
        tables: the columns of each table, including ``id``.
        unit: the column with the unit of work of each row. A unit is finished when its rows of the last table are on
            disk: these are written last and read first. None: there is only one table.
        optional: further columns of some tables; files may lack them, and their values may be null.
        written: names of the optional columns that this run writes.
    """

    def __init__(
        self,
        out: Path,
        tables: Mapping[str, Columns],
        unit: str | None = None,
        optional: Mapping[str, Columns] | None = None,
        written: Collection[str] = (),
    ) -> None:
        self.out, self.unit = out, unit
        self.optional = {name: schema((optional or {}).get(name, {})) for name in tables}
        self.required = {name: schema(columns) for name, columns in tables.items()}
        self.schemas = {name: self._schema(name, written) for name in tables}

    def _schema(self, name: str, present: Collection[str]) -> pa.Schema:
        """The required columns of a table, and those of the optional ones that are present."""
        return pa.schema([*self.required[name], *(field for field in self.optional[name] if field.name in present)])

    def write(self, part: str, rows: Mapping[str, Rows]) -> None:
        """Write the rows of a finished unit, one file for each table with rows.

        Args:
            part: names the unit in file names.
            rows: of each table.

        Raises:
            OSError: a file cannot be written; no incomplete file remains.
            Unreadable: ``parts`` is a symlink.
        """
        folder = own_folder(self.out / "parts")
        for name, schema in self.schemas.items():
            if rows[name]:
                table = pa.Table.from_pylist(rows[name], schema=schema)
                _write(table, folder / f"{name}-{part}.parquet", tidy=False)  # listing many parts takes time

    def discard(self, number: int, part: str) -> None:
        """Remove the rows of a finished unit; one that is killed meanwhile leaves the unit unfinished.

        Args:
            part: its name in file names.

        Raises:
            OSError: a file cannot be written.
            Unreadable: see ``load``.
        """
        assert self.unit is not None
        for name in reversed(self.schemas):
            for file in table_names(name):
                (self.out / "parts" / f"{file}-{part}.parquet").unlink(missing_ok=True)
            for whole in self._gathered(name):
                table = self._read(whole)
                kept = table.filter(pc.not_equal(table[self.unit], number))
                if len(kept) < len(table):
                    _write(kept, whole)

    def load(self) -> dict[str, pd.DataFrame]:
        """Return the rows of the finished units of a run that is running, was killed or is done.

        Of rows with the same id the last one is kept.

        Raises:
            Unreadable: a file is not a table or has other columns; ``parts`` is a symlink.
        """
        refuse_link(self.out / "parts")
        frames = {}
        for name in reversed(self.schemas):  # units in the last table have their other rows on disk
            frame = pa.concat_tables(self._pieces(name), promote_options="default").to_pandas()
            frames[name] = frame.drop_duplicates("id", keep="last", ignore_index=True)
        if self.unit is not None:
            *others, last = self.schemas
            for name in others:
                kept = frames[name][self.unit].isin(frames[last][self.unit])
                frames[name] = frames[name][kept].reset_index(drop=True)
        return {name: frames[name] for name in self.schemas}

    def gather(self) -> dict[str, pd.DataFrame]:
        """Join all parts into one file per table, remove them, and return the tables."""
        frames = self.load()
        for name, frame in frames.items():
            table = pa.Table.from_pandas(frame, schema=self._schema(name, frame.columns), preserve_index=False)
            _write(table, self.out / f"{name}.parquet")
        for name in self.schemas:
            for file in [*self._files(name), *self._gathered(name)]:
                if file != self.out / f"{name}.parquet":
                    file.unlink()
        for file in self.out.glob("parts/.*.tmp"):  # of a write that was killed
            file.unlink()
        if (self.out / "parts").is_dir():
            (self.out / "parts").rmdir()
        return frames

    def _files(self, name: str) -> list[Path]:
        """Return the parts of a table, those under its older names first."""
        return [file for old in table_names(name) for file in sorted((self.out / "parts").glob(f"{old}-*.parquet"))]

    def _gathered(self, name: str) -> list[Path]:
        """Return the files of the gathered parts, such as ``forwards.parquet``; older names first."""
        return [file for old in table_names(name) if (file := self.out / f"{old}.parquet").exists()]

    def _pieces(self, name: str) -> list[pa.Table]:
        """Read all files of a table, the oldest first, while the run may write and gather parts."""
        parts = []
        for file in self._files(name):
            with suppress(FileNotFoundError):  # gathered meanwhile
                parts.append(self._read(file))
        # Read after the parts: it holds those that were gathered meanwhile.
        return [self._read(file) for file in self._gathered(name)] + parts or [self.schemas[name].empty_table()]

    def _read(self, file: Path) -> pa.Table:
        stem, _, part = file.stem.partition("-")
        name = TABLES.get(stem, stem)
        try:
            table = with_columns(read_table(file), self.out)
            return _fitted(table, self._schema(name, table.column_names), self.optional[name].names)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            known = f"all parts of {self.unit} {int(part)} (parts/*-{part}.parquet)" if part.isdecimal() else "it"
            what = known if part else "the run's directory"
            why = " ".join(str(error).split())
            raise Unreadable(f"{file} is not a readable table ({why}); remove {what} and run again") from error


def schema(columns: Columns) -> pa.Schema:
    """Return the columns as an arrow schema, with their meanings as metadata."""
    return pa.schema([pa.field(column, kind, metadata={"is": what}) for column, (kind, what) in columns.items()])


def _fitted(table: pa.Table, wanted: pa.Schema, nullable: Collection[str]) -> pa.Table:
    """Return the wanted columns of the table, cast to their types.

    Raises:
        pa.ArrowException, ValueError: a column is missing, has other types of values, or has nulls and is not
            ``nullable``.
    """
    if missing := [name for name in wanted.names if name not in table.column_names]:
        raise ValueError(f"it has no column {', '.join(missing)}")
    table = table.select(wanted.names).cast(wanted)
    for field in wanted:
        pieces = table[field.name].chunks
        if pa.types.is_list(field.type):
            pieces = [*pieces, *(piece.flatten() for piece in pieces)]
        complete = field.name not in nullable and not pa.types.is_floating(field.type)
        if complete and any(piece.null_count for piece in pieces):
            raise ValueError(f"column {field.name} has rows without a value")
    table.validate(full=True)
    return table


def _write(table: pa.Table, file: Path, tidy: bool = True) -> None:
    with replacing(file, tidy) as stream:
        pq.write_table(table, stream)
