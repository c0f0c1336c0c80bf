"""Where designs are projected to: named hardware with a model, or measured forwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from spec_lab.analysis.projection import catalogue
from spec_lab.analysis.projection.acceptance import RecordedDesign
from spec_lab.analysis.projection.catalogue import Hardware, Runtime
from spec_lab.analysis.projection.costs import MeasuredForward, RooflineForward
from spec_lab.analysis.projection.drafting import Drafting, by_roofline, by_table
from spec_lab.analysis.projection.model_shapes import ModelShape, Precision
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
    experts: float | None = None,
    apart: bool = False,
) -> list[Deployment]:
    """Return the named hardware on which the model fits.

    Args:
        hardware: names, or CSV files of devices.
        model: name of the target's size, or the folder of a checkpoint.
        context: tokens of each sequence, whose KV cache takes memory.
        draft: name of the draft model's size; None if no design needs one.
        dtype: of all weights.
        lookup: seconds of a lookup in each step.
        experts: effective number of experts of the target (``ExpertWork``), as a run counted it; None: all.
        apart: whether the draft model has a device of its own, and takes no memory of the target's.

    Raises:
        ValueError: an unknown name, a model that fits nowhere, or no design whose drafting is modelled.
        OSError: a file cannot be read.
    """
    precision, ran = catalogue.precision(dtype), catalogue.runtime(runtime)
    target = catalogue.model("--model", model)
    target = target if experts is None else target.choosing(experts)
    small = None if draft is None else catalogue.model("--draft", draft)
    models = [target] if small is None or apart else [target, small]
    devices = catalogue.hardware(hardware)
    batches = [largest_batch(device, models, precision, context) for device in devices]
    deployments = [
        _deployment(designs, device, target, small, precision, ran, room, lookup)
        for device, room in zip(devices, batches, strict=True)
    ]
    if not any(deployment.largest_batch for deployment in deployments):
        need = sum(model.memory(precision) for model in models) / 1e9
        memory = ", ".join(f"{device.name} has {device.memory / 1e9:.0f} GB" for device in devices)
        raise ValueError(
            f"--model {model} fits on no --hardware: {memory}, the weights in {dtype} take {need:.1f} GB and a context "
            f"of {context} tokens more; choose other hardware, a smaller --model or another --dtype"
        )
    check(deployments)
    return deployments


def largest_batch(device: Hardware, models: Sequence[ModelShape], precision: Precision, context: int) -> int:
    """Return how many sequences fit into memory beside the weights: their KV caches; activations are left out."""
    left = device.memory - sum(model.memory(precision) for model in models)
    each = sum(model.attention(model.layers)[0] for model in models) * precision.kv_bytes * context
    return max(math.floor(left / each), 0)


def measured_deployment(
    designs: Sequence[RecordedDesign], tables: Mapping[str, MeasuredForward], label: str, lookup: float = 0.0
) -> Deployment:
    """Return the deployment of which a table of forwards was measured.

    Args:
        tables: of ``measured_forwards``.
        lookup: seconds of a lookup in each step; 0 for those that were measured.

    Raises:
        ValueError: no design whose drafting it has.
    """
    drafting, left_out = _each(
        designs, lambda design: by_table(design.arm, design.proposer, tables, lookup, design.block_size)
    )
    batches = tables["target"].grid.axes["batch"]
    deployment = Deployment(label, tables["target"], drafting, max(batches), left_out, min(batches))
    check([deployment])
    return deployment


def check(deployments: Iterable[Deployment]) -> None:
    """Refuse deployments where no design can be projected to.

    Raises:
        ValueError: the drafting of every design is not known there; says why.
    """
    every = list(deployments)
    if not any(deployment.drafting for deployment in every):
        raise ValueError("; ".join(dict.fromkeys(why for deployment in every for why in deployment.left_out.values())))


def _deployment(
    designs: Sequence[RecordedDesign],
    device: Hardware,
    target: ModelShape,
    draft: ModelShape | None,
    precision: Precision,
    runtime: Runtime,
    room: int,
    lookup: float,
) -> Deployment:
    made = partial(RooflineForward, hardware=device, runtime=runtime, precision=precision)
    forward = made(target.work(precision), target.layers)
    drafting, left_out = _each(
        designs,
        lambda design: by_roofline(
            design.proposer,
            target,
            draft,
            made,
            precision,
            design.heads or design.depth,
            lookup,
            design.drafted_share,
            design.layers,
            design.block_size,
        ),
    )
    return Deployment(device.label, forward, drafting, room, left_out)


def _each(
    designs: Sequence[RecordedDesign], made: Callable[[RecordedDesign], Drafting]
) -> tuple[dict[str, Drafting], dict[str, str]]:
    """Return how each design drafts, and why each of the others is left out, by design."""
    drafting: dict[str, Drafting] = {}
    left_out: dict[str, str] = {}
    for design in designs:
        try:
            if design.left_out:
                raise ValueError(design.left_out)
            drafting[design.name] = made(design)
        except ValueError as error:
            left_out[design.name] = str(error)
    return drafting, left_out
