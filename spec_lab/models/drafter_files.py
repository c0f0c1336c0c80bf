"""What the readers of drafters' files share: checks of fields of a config, of names and shapes, and of weights.

All of it is untrusted input (``models.checkpoint``). Every message names the file or folder, and the field or tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.files import write_json
from spec_lab.core.options import brief
from spec_lab.core.tensors import save_tensors
from spec_lab.models.checkpoint import SINGLE, weights_hash
from spec_lab.models.drafter_layouts import Shapes

MOST_TAPS = 64
"""Most hidden states of the target that a drafter reads."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Data types of weights, as safetensors names them."""


@contextmanager
def named_by(folder: Path) -> Iterator[None]:
    """Name the folder of the config in errors about layers, which do not know it.

    Raises:
        ValueError: of the same type as the one that was raised inside; names the folder.
    """
    try:
        yield
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise type(error)(f"{folder / 'config.json'}: {error}") from error


def whole(
    file: Path, config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
) -> int:
    """A whole number in a config.

    Raises:
        ValueError: it is none from ``least`` to ``most``, or is missing (or null) and has no default.
    """
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{file}: {name} must be a whole number from {least} to {most}, not {brief(value)}")
    return value


def flag(file: Path, config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A flag in a config; null is the default.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {name} must be true or false, not {brief(value)}")
    return value


def refuse_windows(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that names layers without full attention.

    Raises:
        ValueError: ``layer_types`` does.
    """
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(one != "full_attention" for one in types)):
        raise ValueError(f"{file}: layer_types must be full_attention in every layer, not {brief(types)}")


def taps(file: Path, where: str, named: Any, shift: int, last: int, target: str) -> tuple[int, ...]:
    """The numbers of the hidden states that a drafter reads, as in ``runner.Capabilities``.

    Args:
        file: the config.
        where: the field.
        named: its value, a list of layers.
        shift: what is added to each: 0 for numbers of hidden states, 1 for numbers of layers whose outputs are read.
        last: the target's last hidden state, which is its number of layers.
        target: its name.

    Raises:
        ValueError: no list of layers, or a layer that the target does not have.
    """
    plain = isinstance(named, list) and 0 < len(named) <= MOST_TAPS
    if not plain or any(isinstance(one, bool) or not isinstance(one, int) for one in named):
        raise ValueError(f"{file}: {where} must be a list of layers, not {brief(named)}")
    if wrong := [one for one in named if not 0 <= one + shift <= last]:
        raise ValueError(
            f"{file}: {where} names layer {wrong[0]}, but the target {target} has {last} layers, of which {-shift} to "
            f"{last - shift} can be named here: the drafter is for another target"
        )
    return tuple(one + shift for one in named)


def misfits(wanted: Shapes, held: Shapes) -> list[str]:
    """Name each tensor of the files that is missing, surplus or misshapen.

    Args:
        wanted: the shapes of a network's tensors, by the names that the files should hold.
        held: those in the files.
    """
    found = [f"{name} is missing" for name in wanted if name not in held]
    for name, shape in held.items():
        if name not in wanted:
            found.append(f"{brief(name)} is in no layer of the network")
        elif wanted[name] != shape:
            found.append(f"{name} is {list(shape)}, not {list(wanted[name])}")
    return found


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Refuse weights that do not fit.

    Raises:
        ValueError: there are ``problems``; names three of them.
    """
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights of {folder} do not fit its config.json: {'; '.join(sorted(problems)[:3])}{more}")


def read_weight(folder: Path, held: Mapping[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """Read a tensor of finite numbers, in this data type.

    Raises:
        ValueError: a quantized tensor; a number that is NaN or infinite, or becomes infinite in ``dtype``.
    """
    if (kind := held[name].get_dtype()) not in FLOATS:
        raise ValueError(
            f"{folder}: '{name}' has data type {kind}; quantized weights are not supported: save them as "
            f"{', '.join(sorted(FLOATS))}"
        )
    read: Tensor = held[name][:].to(dtype)
    if not torch.isfinite(read).all():
        raise ValueError(f"{folder}: '{name}' holds NaN or infinite values")
    return read


def write_drafter(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: Mapping[str, str]
) -> str:
    """Write the weights of a drafter and then its config; return the SHA-256 of the weights.

    Args:
        folder: is made.
        config: for config.json.
        tensors: the weights, by their published names.
        facts: for the metadata of the weights.

    Raises:
        OSError: a file cannot be written; names it. None is left incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / SINGLE, {"format": "pt", **facts})
    write_json(folder / "config.json", config)
    return weights_hash(str(folder))
