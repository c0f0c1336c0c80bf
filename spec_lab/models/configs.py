"""A checkpoint's config as transformers' object, of a multimodal checkpoint that of its text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from spec_lab.models import checkpoint
from spec_lab.models.support import Unsupported, refuse_by_name
from spec_lab.models.text_part import KINDS, has_text_part, text_config


class Config(NamedTuple):
    """The config of a checkpoint."""

    loaded: Any
    """Config of the causal LM that is loaded."""
    whole: Any
    """Config of the checkpoint: another one where it is multimodal. transformers chooses the tokenizer by it."""

    @property
    def multimodal(self) -> bool:
        """Whether only a part of the checkpoint is loaded."""
        return self.loaded is not self.whole


class ModelSizes(NamedTuple):
    """Sizes in the config of a causal LM; None: not stated."""

    path: str
    """The folder or hub name as given."""
    hidden_size: int | None
    vocabulary: int | None
    """Number of tokens."""
    layers: int | None


def model_sizes(path: str, folder: Path) -> ModelSizes:
    """Return the sizes of a checkpoint's model. Arguments and errors as in ``read_model_config``."""
    config, names = read_model_config(path, folder).loaded, ("hidden_size", "vocab_size", "num_hidden_layers")
    return ModelSizes(path, *(getattr(config, name, None) for name in names))


def read_model_config(path: str, folder: Path) -> Config:
    """Return the config of a checkpoint.

    Args:
        path: the folder or hub name as given.

    Raises:
        OSError: there is none.
        ValueError: it is not one that transformers can read.
        Unsupported: a kind of model that is known to fail.
    """
    fields = checkpoint.read_config(folder)
    if fields["model_type"] in KINDS:
        fields = {name: value for name, value in fields.items() if name not in OTHER_CONFIGS}
    try:
        kind = CONFIG_MAPPING[fields["model_type"]]
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} does not support model_type "
            f"{fields['model_type']!r}; install a newer version, or choose another model"
        ) from error
    try:
        whole = kind.from_dict(_with_infinities(_fields_of(kind, fields)) | {"name_or_path": path})
        if getattr(whole, "is_encoder_decoder", False):
            refuse_by_name(whole)
        loaded = text_config(whole) if has_text_part(whole) else whole
        refuse_by_name(loaded)
        return Config(loaded, whole)
    except Unsupported:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(f"{folder / 'config.json'} holds an invalid value ({checkpoint.one_line(error)})") from error


OTHER_CONFIGS = ("vision_config", "audio_config")
"""Configs of the parts of a multimodal model that are not loaded; they are not read."""


def _fields_of(kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's fields without those that would replace a method or a plan of its class, at every level."""
    known = {field.name for field in dataclass_fields(kind)} if is_dataclass(kind) else {*signature(kind).parameters}
    return {
        name: _fields_of(_kind_of(value), value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in fields.items()
        if name in known | {"model_type"} or not hasattr(kind, name) or isinstance(getattr(kind, name), property)
    }


def _with_infinities(value: Any) -> Any:
    """Return a value of a config.json with infinite numbers where transformers has written ``{"__float__": ..}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
            return float(value["__float__"])
        return {name: _with_infinities(item) for name, item in value.items()}
    return [_with_infinities(item) for item in value] if isinstance(value, list) else value


def _kind_of(fields: Mapping[str, Any]) -> type[PreTrainedConfig]:
    """Return the class of a config inside another one; the common one where it is not known."""
    name = fields.get("model_type")
    known = isinstance(name, str) and name in CONFIG_MAPPING
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[name] if known else PreTrainedConfig
    return kind
