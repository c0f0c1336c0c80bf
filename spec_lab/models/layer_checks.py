"""The self-check of ranges of layers, for proposers that draft with the target's own layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, chain, forest, tree
from spec_lab.core.options import whole
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.draft_pass import Route, RunsLayerRanges, Sublayer
from spec_lab.engine.runner import Runner
from spec_lab.models.support import TOLERANCE, Unsupported, tolerance
from spec_lab.models.target import Target

FOREST = forest((tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))), chain(2)))
PENDING = (5, 3)


class LayeredRunner(Runner, RunsLayerRanges, Protocol):
    """A runner with the ability ``layer_ranges``."""


def with_layer_ranges(target: Target, proposer: str) -> LayeredRunner:
    """Return the target's runner, which runs ranges of layers.

    Args:
        target: the target.
        proposer: which requires them, for messages.

    Raises:
        Unsupported: it does not.
    """
    lm = target.lm
    if isinstance(lm, CausalLM) and lm.why_no_layer_ranges:
        raise Unsupported(
            f"proposer '{proposer}' runs some of the target's layers, which target '{target.name}' cannot: "
            f"{lm.why_no_layer_ranges}"
        )
    with _supported(f"target '{target.name}' cannot run some of its layers"):
        if isinstance(lm, RunsLayerRanges) and "layer_ranges" in lm.capabilities.abilities:
            return lm
    raise Unsupported(
        f"proposer '{proposer}' runs some of the target's layers, but target '{target.name}' is computed by "
        f"{type(lm).__name__}, which does not run ranges of layers"
    )


@contextmanager
def _supported(what: str) -> Iterator[None]:
    """Turn errors of a model's code into ``Unsupported``: what it cannot do."""
    try:
        yield
    except torch.OutOfMemoryError:  # the model may well be supported
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
    ) as failure:  # fmt: skip
        raise Unsupported(f"{what} ({type(failure).__name__}: {failure})") from failure


def sublayers_of(lm: RunsLayerRanges, name: str) -> frozenset[Sublayer]:
    """Return which sublayers the target can skip.

    Args:
        lm: the target's runner.
        name: of the target, for messages.

    Raises:
        Unsupported: its modules cannot be replaced.
    """
    with _supported(f"target '{name}' cannot skip sublayers"):
        return lm.sublayers


def layers_of(lm: RunsLayerRanges, layers: int | None) -> int:
    """Return after how many layers to exit, from 1 to one less than there are; None: after a quarter of them.

    Raises:
        ValueError: another value.
        Unsupported: there is one layer only.
    """
    if lm.layers < 2:
        raise Unsupported("the target has a single layer, so that no layer is left to verify an early exit")
    if layers is None:
        return max(1, lm.layers // 4)
    return whole("proposer.layers", layers, most=lm.layers - 1)


@torch.inference_mode()
def check_exit(lm: LayeredRunner, end: int, name: str) -> float:
    """Compare forwards that continue from a draft pass with forwards that compute everything.

    Args:
        lm: computes both.
        end: the layer after which the draft pass exits.
        name: of the target, for messages.

    Returns:
        The largest difference of a logit, in standard deviations.

    Raises:
        Unsupported: it exceeds the tolerance of the model's dtype, or the model raises an error.
    """
    with _supported(f"target '{name}' cannot continue after {end} layers"):
        error = _exit_error(lm, end)
    allowed = _tolerance(lm)
    if not error <= allowed:
        raise Unsupported(
            f"target '{name}' continues wrongly after {end} layers: its logits differ from those of a whole "
            f"forward by {error:.2g} standard deviations, allowed are {allowed:g} in {lm.dtype}"
        )
    return error


def _tolerance(lm: LayeredRunner) -> float:
    return tolerance(lm.model, lm.kv_dtype) if isinstance(lm, CausalLM) else TOLERANCE[lm.dtype]


def _exit_error(lm: LayeredRunner, end: int) -> float:
    pending, token, draft = _example(lm)
    timed, rows = lm.clock.phase("propose_forward"), np.flatnonzero(FOREST.depth == 1)
    whole_ones, parts = [lm.open() for _ in pending], [lm.open() for _ in pending]
    try:
        wanted = lm.run(lm.prepare(whole_ones, pending, draft)).logits.clone()
        early = lm.draft_pass(Route(0, end))
        early.forward(parts, pending, timed)
        early.extend(parts, FOREST, rows, token[rows - FOREST.roots], timed)
        early.finish(draft.token, token)
        return _difference(lm.run(lm.prepare(parts, pending, draft)).logits, wanted)
    finally:
        for one in (*whole_ones, *parts):
            one.close()
        lm.clock.take()


def _example(lm: LayeredRunner) -> tuple[list[list[int]], np.ndarray, Draft]:
    """Return random pending tokens of two sequences, and the tokens ``[M]`` of a draft below them."""
    generator = np.random.default_rng(0)
    pending = [generator.integers(0, lm.vocabulary, count).tolist() for count in PENDING]
    token = generator.integers(0, lm.vocabulary, FOREST.nodes)
    return pending, token, Draft(FOREST, torch.from_numpy(token).to(lm.device))


def _difference(found: Tensor, wanted: Tensor) -> float:
    error = float(((found.double() - wanted.double()).abs().amax(-1) / wanted.double().std(-1)).max())
    return error if np.isfinite(error) else float("inf")


@torch.inference_mode()
def check_skipping(lm: LayeredRunner, sublayers: frozenset[Sublayer], name: str) -> None:
    """Check that a draft pass without any skipped sublayer has the logits of a forward, and that others run.

    Those are without one attention sublayer, without one MLP, without a whole layer, and without all of ``sublayers``.

    Args:
        lm: computes both.
        sublayers: those that a draft may skip.
        name: of the target, for messages.

    Raises:
        Unsupported: the logits differ by more than the tolerance of the model's dtype, or the model raises an error.
    """
    with _supported(f"target '{name}' cannot skip sublayers"):
        error = _skip_error(lm, skipped_to_check(sublayers))
    allowed = _tolerance(lm)
    if not error <= allowed:
        raise Unsupported(
            f"target '{name}' drafts wrongly on its own KV cache: without skipped sublayers its logits differ from "
            f"those of a forward by {error:.2g} standard deviations, allowed are {allowed:g} in {lm.dtype}"
        )


def skipped_to_check(sublayers: frozenset[Sublayer]) -> list[frozenset[Sublayer]]:
    """Return sets of sublayers that are skipped in different ways; see ``check_skipping``."""
    layers = {kind: {one.layer for one in sublayers if one.kind == kind} for kind in ("attn", "mlp")}
    sets = [frozenset({Sublayer(kind, min(own))}) for kind, own in layers.items() if own]  # type: ignore[arg-type]
    if both := layers["attn"] & layers["mlp"]:
        sets.append(frozenset({Sublayer("attn", min(both)), Sublayer("mlp", min(both))}))
    return [*dict.fromkeys([*sets, sublayers])]


def _skip_error(lm: LayeredRunner, sets: Sequence[frozenset[Sublayer]]) -> float:
    pending, token, draft = _example(lm)
    timed, rows = lm.clock.phase("propose_forward"), np.flatnonzero(FOREST.depth == 1)
    wholes, parts = [lm.open() for _ in pending], [lm.open() for _ in pending]
    error = 0.0
    try:
        wanted = lm.run(lm.prepare(wholes, pending, draft)).logits.clone()
        for left_out in (frozenset[Sublayer](), *sets):
            one = lm.draft_pass(Route(skipped=left_out))
            roots = one.forward(parts, pending, timed).logits
            nodes = one.extend(parts, FOREST, rows, token[rows - FOREST.roots], timed).logits
            one.drop()
            if not left_out and roots is not None and nodes is not None:
                index = torch.from_numpy(np.concatenate([np.arange(FOREST.roots), rows])).to(lm.device)
                error = _difference(torch.cat([roots, nodes]), wanted.index_select(0, index))
        return error
    finally:
        for kv in (*wholes, *parts):
            kv.close()
        lm.clock.take()
