"""Where designs are projected to: named hardware with a model, or measured forwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from spec_lab.analysis.projection import catalogue
from spec_lab.analysis.projection.acceptance import RecordedDesign
from spec_lab.analysis.projection.catalogue import PRECISIONS, Hardware, ModelShape, Precision, Runtime
from spec_lab.analysis.projection.costs import measured, precision_of, rooflines
from spec_lab.analysis.projection.drafting import Drafting, by_roofline, by_table
from spec_lab.analysis.projection.project import Deployment


def deployments_of(
    designs: Sequence[RecordedDesign],
    hardware: Sequence[str],
    model: str,
    context: int,
    draft: str | None = None,
    dtype: str = "bf16",
    runtime: str = "graphs",
    lookup: float = 0.0,
) -> list[Deployment]:
    """Return the named hardware on which the model fits.

    Args:
        designs: what is projected.
        hardware: names, or CSV files of devices.
        model: name of the target's size, or the folder of a checkpoint.
        context: tokens of each sequence, whose KV cache takes memory.
        draft: name of the draft model's size; None if no design needs one.
        dtype: of all weights.
        runtime: its name.
        lookup: seconds of a lookup in each step.

    Raises:
        ValueError: an unknown name, a model that fits nowhere, or no design whose drafting is modelled.
        OSError: a file cannot be read.
    """
    precision, ran = precision_of(dtype), catalogue.runtime(runtime)
    target = catalogue.model("--model", model)
    small = None if draft is None else catalogue.model("--draft", draft)
    found, refused = [], []
    for device in catalogue.hardware(hardware):
        room = largest_batch(device, target, small, PRECISIONS[precision], context)
        if room < 1:
            need = (target.memory(PRECISIONS[precision]) + _memory(small, PRECISIONS[precision])) / 1e9
            refused.append(
                f"--hardware {device.name} has {device.memory / 1e9:.0f} GB, the weights in {dtype} take {need:.1f} GB "
                f"and a context of {context} tokens more"
            )
            continue
        found.append(_deployment(designs, device, target, small, precision, ran, room, lookup))
    if not found:
        raise ValueError(f"{'; '.join(refused)}: choose other hardware, a smaller --model or --dtype")
    check(found)
    return found


def largest_batch(
    device: Hardware, target: ModelShape, draft: ModelShape | None, precision: Precision, context: int
) -> float:
    """Return how many sequences fit into memory beside the weights: their KV caches; activations are left out."""
    left = device.memory - target.memory(precision) - _memory(draft, precision)
    models = [one for one in (target, draft) if one is not None]
    each = sum(one.attention(one.layers)[0] for one in models) * precision.kv_bytes * context
    return max(math.floor(left / each), 0) if left > 0 else 0


def measured_deployment(designs: Sequence[RecordedDesign], file: Path, label: str, lookup: float = 0.0) -> Deployment:
    """Return the deployment of which a table of forwards was measured.

    Args:
        designs: what is projected.
        file: a CSV file (``costs.COLUMNS``).
        label: of the hardware.
        lookup: seconds of a lookup in each step.

    Raises:
        ValueError: a malformed table, one without the target, or no design whose drafting it has.
        OSError: it cannot be read.
    """
    tables = measured(file)
    if "target" not in tables:
        raise ValueError(f"{file} has no rows whose model is target; the target's forwards are required")
    drafting, why = _each(designs, lambda one: by_table(one.proposer, tables, lookup))
    deployment = Deployment(label, tables["target"], drafting, max(tables["target"].grid.axes["batch"]), why)
    check([deployment])
    return deployment


def check(deployments: Iterable[Deployment]) -> None:
    """Refuse deployments where no design can be projected to.

    Raises:
        ValueError: the drafting of every design is not known there; says why.
    """
    every = list(deployments)
    if not any(one.drafting for one in every):
        raise ValueError("; ".join(dict.fromkeys(why for one in every for why in one.left_out.values())))


def _deployment(
    designs: Sequence[RecordedDesign],
    device: Hardware,
    target: ModelShape,
    draft: ModelShape | None,
    precision: str,
    runtime: Runtime,
    room: float,
    lookup: float,
) -> Deployment:
    made = rooflines(device, runtime, precision)
    own = PRECISIONS[precision]
    drafting, why = _each(
        designs,
        lambda one: by_roofline(one.proposer, target, draft, made, own, one.heads or one.depth, lookup),
    )
    return Deployment(device.label, made(target.work(own), target.layers), drafting, room, why)


def _each(
    designs: Sequence[RecordedDesign], made: Callable[[RecordedDesign], Drafting]
) -> tuple[dict[str, Drafting], dict[str, str]]:
    """Return how each proposer drafts, and why each of the others is left out."""
    found: dict[str, Drafting] = {}
    why: dict[str, str] = {}
    for design in designs:
        try:
            found.setdefault(design.proposer, made(design))
        except ValueError as error:
            why.setdefault(design.proposer, str(error))
    return found, why


def _memory(draft: ModelShape | None, precision: Precision) -> float:
    return 0.0 if draft is None else draft.memory(precision)
