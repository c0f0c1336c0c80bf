"""Convert the pickled weights of a published drafter to safetensors, which runs read.

Files of ``torch.save`` are pickles: loading them may execute code, so no run reads them. Here they are untrusted input:

1. The file is a zip archive of uncompressed entries which together are no larger than the file.
2. Its pickle refers to nothing but dictionaries, tensors and their storages. It is scanned, not yet loaded.
3. ``torch.load(weights_only=True)`` loads it, memory-mapped.
4. It is a flat dictionary of dense, finite tensors, whose names and shapes are those of a known layout
   (``layouts``), and each of which is no larger than its storage.

Written are ``model.safetensors``, with the layout's name and the SHA-256 of the source in its metadata (blocks that a
file repeats share their storage, and are written each), and the ``config.json`` beside the source.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spec_lab.core.files import MAX_BYTES, file_hash, filling, open_regular, read_json, refuse_filled, write_json
from spec_lab.core.options import brief
from spec_lab.core.tensors import save_tensors
from spec_lab.drafters.eagle.files import EAGLE, EAGLE3
from spec_lab.drafters.hydra.files import PREFIX, hydra_layout
from spec_lab.drafters.kangaroo.files import KANGAROO
from spec_lab.drafters.layouts import Layout, misfits
from spec_lab.drafters.medusa.files import MEDUSA
from spec_lab.models.checkpoint import INDEX, PICKLES, SINGLE, one_line
from spec_lab.models.hub import CheckpointFiles

PUBLISHED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Names of published files, in the order in which they are looked for."""
SHARDS = "pytorch_model.bin.index.json"
BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Tensors that follow from the config, which old files hold; they are left out."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_SHARED = 16
"""Largest size of the tensors, as a multiple of the source's, since a repeated block is stored once."""
TABLES = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool, torch.uint8)}
"""Data types of tensors that are no weights."""
NAMES = re.compile(
    r"collections OrderedDict|torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)|torch \w+Storage|"
    r"torch\.storage UntypedStorage"
)
"""Names that a pickle of tensors refers to, each a module and a name in it."""


class Converted(NamedTuple):
    """Facts about weights that were written."""

    layout: str
    tensors: int
    size: int
    """Size of the weights, in bytes."""
    sha256: str
    """Hash of the source."""


def pickled_files(source: Path) -> list[Path]:
    """The pickled weight files that ``source`` names, in order of name; none if it holds safetensors or no weights.

    Args:
        source: a file, or a folder with one weight file or an index of shards.

    Raises:
        OSError, ValueError: an index that cannot be read.
        ValueError: several files, none of which has a published name.
    """
    if source.suffix in PICKLES and not source.is_dir():
        return [source]
    if not source.is_dir() or (source / SINGLE).exists() or (source / INDEX).exists():
        return []
    return [source / name for name in _chosen(source, [file.name for file in source.iterdir()])]


def fetched_pickles(name: str, revision: str | None = None) -> Path:
    """Return the folder of a drafter of the hub, whose pickled weights and config.json are downloaded into its cache.

    Nothing but config.json is downloaded where there are safetensors.

    Args:
        name: its hub name.
        revision: branch, tag or commit; None: main.

    Raises:
        OSError, WrongOption: as for ``CheckpointFiles.open``; the files do not fit on the disk.
        ValueError: as for ``pickled_files``.
    """
    files = CheckpointFiles.open(name, revision)
    if not files.at_top("*.safetensors"):
        files.fetch(SHARDS)
        files.fetch_all(_chosen(files.folder, files.at_top(*(f"*{suffix}" for suffix in PICKLES))))
    return files.folder


def _chosen(source: Path, names: Sequence[str]) -> list[str]:
    """Return the names of the files of one drafter in a folder that holds ``names``. Errors as in ``pickled_files``."""
    index = read_json(source / SHARDS)
    if index is not None:
        shards = index.get("weight_map")
        files = set(shards.values()) if isinstance(shards, dict) and all(map(_plain, shards.values())) else set()
        if not files:
            raise ValueError(f"{source / SHARDS}: weight_map must map each tensor's name to a .bin file of the folder")
        return sorted(files)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    published = [name for name in PUBLISHED if name in pickles]
    if len(pickles) > 1 and len(published) != 1:
        raise ValueError(f"{source} holds several pickled files, {', '.join(pickles)[:200]}: name one")
    return published or pickles


def _plain(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0.][^/\\\0]*\.bin", name) is not None


def convert_pickled(files: Sequence[Path], out: Path) -> Converted:
    """Write a drafter's pickled weights as safetensors, with its config.json.

    Args:
        files: of one drafter (``pickled_files``).
        out: a folder that does not exist, or is empty. On errors nothing is left in it.

    Raises:
        OSError: a file is missing, or cannot be read or written; ``out`` is not empty.
        ValueError: a file that is not what the module describes, with the reason.
    """
    refuse_filled(out)
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing: copy or download it again")
    beside = files[0].with_name("config.json")
    config = read_json(beside)
    if config is None:
        raise FileNotFoundError(f"{beside} is missing: copy it from where {files[0].name} is published")
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = load_tensors(file)
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise ValueError(f"{file}: the tensor {brief(twice[0])} is in another file of {file.parent} as well")
        tensors |= loaded
    layout = _check_layout(files[0].parent, tensors)
    size, max_size = (
        sum(tensor.nbytes for tensor in tensors.values()),
        MAX_SHARED * sum(f.stat().st_size for f in files),
    )
    if size > max_size:
        raise ValueError(
            f"{files[0].parent}: its tensors share their storage and have {size} bytes, more than {max_size}"
        )
    digest = file_hash(*files)
    facts = {
        "format": "pt",
        "layout": layout,
        "source": ", ".join(file.name for file in files),
        "source_sha256": digest,
    }
    with filling(out) as part:
        save_tensors(tensors, part / SINGLE, facts)
        write_json(part / "config.json", config)
    return Converted(layout, len(tensors), size, digest)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of ``torch.save``, without buffers; they may be mapped from the file.

    Raises:
        OSError: there is no such file.
        ValueError: it holds anything but a flat dictionary of dense, finite tensors, or could execute code.
    """
    _check_archive(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a crafted pickle provokes in torch
        reason = one_line(error).split(". ")[0]
        raise ValueError(f"{file} cannot be loaded as tensors alone ({reason}): download it again") from error
    if type(loaded) not in (dict, OrderedDict):
        raise ValueError(f"{file} holds {type(loaded).__name__}, not a dictionary of tensors")
    size = file.stat().st_size
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{file}: {brief(name)} is {type(tensor).__name__}, not a tensor: save a flat dictionary")
        _check_tensor(f"{file}: {brief(name)}", name, tensor, size)
    return {name: tensor for name, tensor in loaded.items() if not BUFFERS.search(name)}


def _check_archive(file: Path) -> None:
    """Refuse what is no archive of plain tensors, before anything is loaded."""
    with open_regular(file) as stream:
        try:
            archive = zipfile.ZipFile(stream)
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ValueError("its entries are compressed or encrypted, which torch.save does not do")
            if sum(entry.file_size for entry in entries) > file.stat().st_size:
                raise ValueError("its entries are larger than the file")
            pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_BYTES:
                raise ValueError("it has no data.pkl, as files of torch.save have")
            names = _names(archive.read(pickles[0]))
        except Exception as error:  # whatever a crafted file provokes in these parsers
            raise ValueError(
                f"{file} is not a file of tensors as torch.save writes them since 1.6, or is truncated "
                f"({one_line(error)}): download it again"
            ) from error
    if other := sorted(name for name in names if not NAMES.fullmatch(name)):
        raise ValueError(
            f"{file} refers to {brief(other[0].replace(' ', '.'))}, which no file of dense tensors does: it is not "
            "loaded, since that could execute code"
        )


def _names(pickle: bytes) -> set[str]:
    """Return the names that a pickle refers to, as "module name"; it is not executed."""
    names = set()
    for opcode, argument, _ in pickletools.genops(io.BytesIO(pickle)):
        if opcode.name == "GLOBAL":
            names.add(str(argument))
        elif opcode.proto > 2 or opcode.name in ("INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"opcode {opcode.name} in its pickle")
    return names


def _check_tensor(where: str, name: str, tensor: Tensor, size: int) -> None:
    """Refuse what is no dense tensor of finite numbers that the file, of ``size`` bytes, can hold."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError(f"{where} is no dense tensor, but sparse, quantized or without numbers")
    kinds = TABLES.get(name, DTYPES)
    if tensor.dtype not in kinds:
        raise ValueError(f"{where} has the data type {tensor.dtype}: {' or '.join(map(str, kinds))} is expected")
    if tensor.numel() * tensor.element_size() > min(size, tensor.untyped_storage().nbytes()):
        raise ValueError(f"{where} has {tensor.numel()} numbers, more than the file holds of it")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{where} holds NaN or infinite values: the file is damaged")


def layout_of(held: Collection[str]) -> Layout | None:
    """The layout of tensors of these names; None of another than those that are converted."""
    if any(name.startswith(("hydra_mlp.", "hydra_lm_head.")) for name in held):
        grounded = any(".res_connection." in name for name in held)
        return hydra_layout(any(name.startswith(PREFIX) for name in held), grounded)
    if any(MEDUSA.network_name(name) for name in held):
        return MEDUSA
    if any(name.startswith(("midlayer.", "d2t", "t2d")) or name.endswith("hidden_norm.weight") for name in held):
        return EAGLE3
    if "fc.weight" in held:
        return EAGLE
    known = "layers.0.self_attn.q_proj.weight" in held and not any(".mlp." in name for name in held)
    return KANGAROO if known else None


def _check_layout(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """The name of the layout."""
    held = {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = layout_of(held) if len(held) == len(tensors) else None
    if layout is None:
        examples = brief(", ".join(sorted(held)[:5]) or "none")
        raise ValueError(
            f"{folder} holds no drafter of EAGLE, EAGLE-3, Medusa, Hydra or Kangaroo, as its tensors are {examples}: "
            "others are not converted; save a whole model with save_pretrained of transformers"
        )
    if problems := misfits(layout.of_file(held).shapes, held):
        raise ValueError(f"{folder} does not hold the tensors of {layout.name}: {'; '.join(problems[:3])}")
    return layout.name
