"""Named hardware, models and runtimes, read from the tables beside this file; each row names its source."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spec_lab.analysis.projection.mixtures import Mixture, check_layers, mixture_of
from spec_lab.core.files import read_json, read_text
from spec_lab.core.options import whole
from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork

HERE = Path(__file__).parent

MAX_SIZE = 10**7
"""Maximum of any size of a model."""

MAX_NUMBER = 1e9
"""Maximum number in a table of hardware, in the unit of its column (GB, GB/s, TFLOP/s)."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Precision:
    """How the numbers of a model are stored and multiplied.

    Args:
        name: on the command line.
        weight_bytes: of a weight. Scales of quantized weights are left out.
        factors: dtype of the products, whose peak bounds computing.
        kv_bytes: of a number of the KV cache.
    """

    name: str
    weight_bytes: float
    factors: str
    kv_bytes: float = 2.0


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
        source: of these numbers.
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
class ModelShape:
    """A transformer with gated MLPs, as Llama and Qwen are, or with experts; biases and norms are left out.

    Args:
        name: on the command line.
        layers: number of layers.
        hidden, intermediate: sizes of the residual stream and of dense MLPs.
        heads, kv_heads, head_dim: of attention.
        vocabulary: V.
        tied: whether embedding and LM head share their weights.
        source: of these numbers.
        mixture: of its experts; None of a dense model.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    source: str = ""
    mixture: Mixture | None = None

    @property
    def layer_weights(self) -> int:
        """Weights of one dense layer."""
        return self._attention_weights + 3 * self.hidden * self.intermediate

    @property
    def _attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def layers_weights(self, every: bool = False) -> int:
        """Return the weights of all layers that a row is multiplied with, or all of them, with a router in each layer
        that has experts.

        Args:
            every: all experts, not only those of one row.
        """
        mixture = self.mixture
        if mixture is None:
            return self.layers * self.layer_weights
        sparse = self.layers - mixture.dense_layers
        return mixture.dense_layers * self.layer_weights + sparse * self.expert_layer_weights(every)

    def expert_layer_weights(self, every: bool = False) -> int:
        """Return the weights of a layer with experts, as ``layers_weights``."""
        assert self.mixture is not None, "of a mixture of experts"
        chosen = self.mixture.experts if every else self.mixture.per_row
        inner = chosen * self.mixture.intermediate + self.mixture.shared
        return self._attention_weights + self.hidden * (3 * inner + self.mixture.experts)

    def expert_work(self, layers: int, precision: Precision) -> ExpertWork | None:
        """Return the work of the experts of so many layers; None of a dense model."""
        if self.mixture is None:
            return None
        weights = 3 * self.hidden * self.mixture.intermediate
        return ExpertWork(layers, self.mixture.experts, self.mixture.per_row, weights * precision.weight_bytes)

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All weights, embeddings included."""
        return self.layers_weights(every=True) + self.head_weights * (1 if self.tied else 2)

    def work(self, precision: Precision, head_share: float = 1.0) -> ForwardWork:
        """Return what a forward reads and computes, with this share of the LM head's rows."""
        head = round(self.head_weights * head_share)
        sparse = 0 if self.mixture is None else self.layers - self.mixture.dense_layers
        experts = self.expert_work(sparse, precision)
        return work(self.layers_weights(), head, self.attention(self.layers), precision, experts)

    def attention(self, layers: int) -> tuple[int, int]:
        """Return keys and values of one position, and FLOPs of one row over one position, of so many layers."""
        return 2 * layers * self.kv_heads * self.head_dim, 4 * layers * self.heads * self.head_dim

    def memory(self, precision: Precision) -> float:
        """Return the bytes of all weights."""
        return self.weights * precision.weight_bytes


def work(
    matrices: int,
    head: int,
    attention: tuple[int, int],
    precision: Precision,
    experts: ExpertWork | None = None,
) -> ForwardWork:
    """Return the work of a forward.

    Args:
        matrices: weights that multiply every row, without the LM head's.
        head: weights of the LM head.
        attention: of ``ModelShape.attention``.
        precision: of weights and KV cache.
        experts: of which ``matrices`` counts those of one row; None for none.
    """
    kv, flops = attention
    return ForwardWork(
        weight_bytes=round((matrices + head) * precision.weight_bytes),
        row_flops=2 * matrices,
        logits_flops=2 * head,
        attention=(AttentionWork(round(kv * precision.kv_bytes), flops),) if kv else (),
        experts=experts,
    )


@dataclass(frozen=True)
class Runtime:
    """Share of the hardware's limits that a runtime attains, and the time that it adds.

    Args:
        name: on the command line.
        bandwidth_share, compute_share: of the nominal rates.
        layer_gap: seconds that the device spends on each layer of a forward besides matrices and the KV cache.
        layer_launch: seconds in which the host launches a layer's kernels while the device computes earlier ones.
        source: of these numbers.
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


def of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config of transformers describes.

    Raises:
        ValueError: layers that are not modelled, experts that are described by fields of another meaning, or a config
            without the sizes of a decoder; names file and field.
    """
    file = f"{name}/config.json"
    check_layers(file, config)

    def size(key: str, otherwise: int | None = None, minimum: int = 1) -> int:
        if config.get(key) is None:
            if otherwise is None:
                raise ValueError(f"{file} has no '{key}': it is not the config of a decoder")
            return otherwise
        return whole(f"{file}: {key}", config[key], minimum, maximum=MAX_SIZE)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    if hidden < heads and config.get("head_dim") is None:
        raise ValueError(f"{file}: hidden_size must be at least num_attention_heads, {heads}, not {hidden}")
    return ModelShape(
        name=name,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        source=file,
        mixture=mixture_of(file, config, size),
    )


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
        shared, dense = (int(row[name] or 0) for name in ("shared_size", "dense_layers"))
        mixture = Mixture(*(int(_positive(row, part, MAX_SIZE)) for part in parts), shared, dense)
    return ModelShape(
        name=row["name"], **values, tied=row["tied"] == "yes", source=row["source"], mixture=mixture
    )


def _runtime(row: Mapping[str, str]) -> Runtime:
    gap, launch = (1e-6 * float(row[name]) for name in ("layer_gap_us", "layer_launch_us"))
    bandwidth, compute = _positive(row, "bandwidth_share"), _positive(row, "compute_share")
    return Runtime(row["name"], bandwidth, compute, gap, launch, row["source"])


def _positive(row: Mapping[str, str], name: str, maximum: float = MAX_NUMBER) -> float:
    """Return the positive number in a column, at most ``maximum``.

    Raises:
        ValueError: it is none.
    """
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number (got {row[name][:40] or 'nothing'})")
    if not 1 / maximum <= value <= maximum:
        raise ValueError(f"{name} must be a number from {1 / maximum:g} to {maximum:g} (got {row[name][:40]})")
    return value
