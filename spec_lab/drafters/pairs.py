"""Whether a drafter is one for a target, as far as the ``config.json`` of both tell: before any weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spec_lab.core.options import DrafterPath, brief
from spec_lab.models.configs import ModelSizes

INSIDE = ("transformer_layer_config", "eagle_config", "dflash_config")
"""Mappings in a drafter's config that describe its layers, or what it reads of the target."""

LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids", "exit_layer")
"""Fields that name layers, or hidden states between layers, of the target: in every convention at most L."""

FAMILIES = {
    "hydra_num_heads": ("Hydra heads", "hydra"),
    "medusa_num_heads": ("Medusa heads", "medusa"),
    "medusa_num_layers": ("Medusa heads", "medusa"),
    "trunk_size": ("Medusa heads", "medusa"),
}
"""Fields that the configs of one kind of drafter alone have: its ``DrafterPath.what``, and the name of its proposer."""


def check_kind(kind: DrafterPath, config: Mapping[str, Any]) -> None:
    """Refuse a drafter of another kind, as far as its config tells.

    Raises:
        ValueError: names the field, and the proposer of this kind.
    """
    for field, (what, proposer) in FAMILIES.items():
        if field in config and what != kind.what:
            raise ValueError(f"its config.json has {field}: these are {what}, not {kind.what}: set proposer={proposer}")


def check_pair(kind: DrafterPath, config: Mapping[str, Any], target: ModelSizes) -> None:
    """Refuse a drafter for a target of other sizes.

    Args:
        kind: names the fields that hold the target's sizes.
        config: of the drafter.
        target: the target's sizes.

    Raises:
        ValueError: names the field, and both sizes.
    """
    for fields, size, what in (
        (kind.hidden, target.hidden_size, "hidden size"), (kind.vocabulary, target.vocabulary, "number of tokens"),
    ):  # fmt: skip
        name, stated = next(((field, value) for field in fields for value in _values(config, field)), ("", None))
        if stated is not None and size is not None and stated != size:
            raise ValueError(
                f"its config.json has {name} {brief(stated)}, but the {what} of the target {target.path} is {size}: "
                f"it is {kind.what} for another target; choose another, or a proposer without files, such as ngram"
            )
    for field in LAYERS:
        for value in _values(config, field):
            numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
            if target.layers is not None and max(numbers, default=0) > target.layers:
                raise ValueError(
                    f"its config.json has {field} {brief(value)}, but the target {target.path} has {target.layers} "
                    f"layers: it is {kind.what} for another target; choose another"
                )


def _values(config: Mapping[str, Any], field: str) -> Iterator[Any]:
    """Yield the values of a field at the top level and in the mappings inside."""
    for fields in (config, *(config.get(name) for name in INSIDE)):
        if isinstance(fields, Mapping) and fields.get(field) is not None:
            yield fields[field]
