"""Named hardware, models and runtimes, read from the tables beside this file; each row names its source."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spec_lab.analysis.projection.model_shapes import MAX_SIZE, Mixture, ModelShape, Precision, of_config
from spec_lab.core.files import read_json, read_text

HERE = Path(__file__).parent

MAX_NUMBER = 1e9
"""Maximum number in a table of hardware, in the unit of its column (GB, GB/s, TFLOP/s)."""

Row = TypeVar("Row")


PRECISIONS = (
    Precision("bf16", 2.0, "bf16"),
    Precision("fp16", 2.0, "bf16"),  # their peaks are the same
    Precision("fp32", 4.0, "fp32", 4.0),
    Precision("fp8", 1.0, "fp8"),
    Precision("int8", 1.0, "bf16"),
    Precision("int4", 0.5, "bf16"),
)
"""``int8`` and ``int4`` quantize weights only."""


@dataclass(frozen=True)
class Hardware:
    """A device, by its nominal limits.

    Args:
        name: on the command line.
        label: in tables and figures.
        bandwidth: bytes per second of its memory.
        peaks: FLOP/s of dense products, by dtype of their factors.
        memory: bytes.
    """

    name: str
    label: str
    bandwidth: float
    peaks: Mapping[str, float]
    memory: float
    source: str

    def peak(self, precision: Precision) -> float:
        """Return the FLOP/s of products at a precision.

        Raises:
            ValueError: the device has no such products.
        """
        if precision.factors not in self.peaks:
            raise ValueError(
                f"--hardware {self.name} has no peak of {precision.factors} products, which --dtype {precision.name} "
                "requires; choose another --dtype, or leave the device out"
            )
        return self.peaks[precision.factors]


@dataclass(frozen=True)
class Runtime:
    """Share of the hardware's limits that a runtime attains, and the time that it adds.

    Args:
        name: on the command line.
        bandwidth_share, compute_share: of the nominal rates.
        layer_gap: seconds that the device spends on each layer of a forward besides matrices and the KV cache.
        layer_launch: seconds in which the host launches a layer's kernels while the device computes earlier ones.
    """

    name: str
    bandwidth_share: float
    compute_share: float
    layer_gap: float
    layer_launch: float
    source: str


def hardware(names: Sequence[str]) -> tuple[Hardware, ...]:
    """Return devices by name; a name that ends in .csv stands for all rows of that file.

    Raises:
        ValueError: an unknown name or none, or a file that is no table of devices.
        OSError: a file cannot be read.
    """
    known, devices = {device.name: device for device in read(HERE / "hardware.csv", _hardware)}, []
    if not names:
        raise ValueError(f"--hardware names no device; known are {', '.join(known)}")
    for name in names:
        devices += read(Path(name), _hardware) if name.endswith(".csv") else [chosen("--hardware", name, known)]
    return tuple({device.name: device for device in devices}.values())


def models() -> dict[str, ModelShape]:
    """Return all models by name."""
    return {model.name: model for model in read(HERE / "models.csv", _model)}


def model(option: str, name: str) -> ModelShape:
    """Return a model by name, or of the ``config.json`` of a checkpoint's folder.

    Raises:
        ValueError: an unknown name, or a config of another architecture; names the option or the file.
        OSError: the config cannot be read.
    """
    config = read_json(Path(name) / "config.json", any_number=True)
    return of_config(name, config) if config is not None else chosen(option, name, models())


def precision(name: str) -> Precision:
    """Return a precision by name.

    Raises:
        ValueError: an unknown name.
    """
    return chosen("--dtype", name, {precision.name: precision for precision in PRECISIONS})


def runtime(name: str) -> Runtime:
    """Return a runtime by name.

    Raises:
        ValueError: an unknown name.
    """
    return chosen("--runtime", name, {runtime.name: runtime for runtime in read(HERE / "runtimes.csv", _runtime)})


def chosen(option: str, name: str, known: Mapping[str, Row]) -> Row:
    """Return the named row.

    Raises:
        ValueError: it is not known; names the option and what is.
    """
    if name not in known:
        raise ValueError(f"{option} {name} is not known; known are {', '.join(known)}")
    return known[name]


def read(file: Path, made: Callable[[Mapping[str, str]], Row]) -> list[Row]:
    """Return the rows of a table of devices, models or runtimes.

    Raises:
        OSError: it cannot be read.
        ValueError: a column is missing or a value is not what it must be; names the file and the line.
    """
    typed = []
    for number, row in enumerate(rows(file), 2):
        try:
            typed.append(made(row))
        except KeyError as error:
            raise ValueError(f"{file} has no column {error.args[0]}") from error
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    return typed


def rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by column; a row that is too short is filled with empty values.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not text, has no rows, or one with more cells than columns; names the file and the line.
    """
    reader = csv.DictReader(read_text(file).splitlines(), restval="")
    rows: list[dict[str, str]] = []
    try:
        for number, row in enumerate(reader, 2):
            if (more := row.pop(None, None)) is not None:
                raise ValueError(
                    f"{file}, line {number}: it has {len(row) + len(more)} cells, but the table {len(row)} columns; "
                    "quote values that contain commas"
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{file} has no rows; a table has a line of column names, and a line for each row")
    return rows


def _hardware(row: Mapping[str, str]) -> Hardware:
    peaks = {name: 1e12 * _positive(row, name) for name in ("fp32", "bf16", "fp8") if row[name].strip()}
    memory, bandwidth = 1e9 * _positive(row, "memory_gb"), 1e9 * _positive(row, "bandwidth_gb_s")
    return Hardware(row["name"], row["label"], bandwidth, peaks, memory, row["source"])


def _model(row: Mapping[str, str]) -> ModelShape:
    sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary")
    values: dict[str, Any] = {size: int(_positive(row, size, MAX_SIZE)) for size in sizes}
    mixture = None
    if row["experts"]:
        parts = ("experts", "experts_per_row", "expert_size")
        count, per_row, size = (int(_positive(row, part, MAX_SIZE)) for part in parts)
        mixture = Mixture(count, per_row, size, int(row["shared_size"] or 0), int(row["dense_layers"] or 0))
    return ModelShape(name=row["name"], **values, tied=row["tied"] == "yes", source=row["source"], mixture=mixture)


def _runtime(row: Mapping[str, str]) -> Runtime:
    gap, launch = (1e-6 * float(row[name]) for name in ("layer_gap_us", "layer_launch_us"))
    bandwidth, compute = _positive(row, "bandwidth_share"), _positive(row, "compute_share")
    return Runtime(row["name"], bandwidth, compute, gap, launch, row["source"])


def _positive(row: Mapping[str, str], name: str, maximum: float = MAX_NUMBER) -> float:
    """Return the positive number in a column, at most ``maximum``."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number (got {row[name][:40] or 'nothing'})")
    if not 1 / maximum <= value <= maximum:
        raise ValueError(f"{name} must be a number from {1 / maximum:g} to {maximum:g} (got {row[name][:40]})")
    return value
