"""The self-check of ranges of layers, for proposers that draft with the target's own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.options import WrongOption
from spec_lab.core.shape import chain, forest, tree
from spec_lab.models.forests import Checked, Rows, largest_error, rows_of
from spec_lab.models.plain_forwards import EXACT, Mismatch, PlainForwards
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.runner import Runner

FOREST = forest((tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))), chain(2)))
FIRST = forest((tree(((0,), (1,))), chain(1)))
"""Its roots and their children."""
PENDING = (5, 3)


def with_layer_ranges(target: Target, proposer: str) -> Runner:
    """Return the target's runner, which runs ranges of layers.

    Args:
        proposer: which requires them, for messages.

    Raises:
        Unsupported: it does not.
    """
    with _supported(f"target '{target.name}' cannot run some of its layers"):
        why = target.lm.why_no_layer_ranges
    if why:
        raise Unsupported(
            f"proposer '{proposer}' runs some of the target's layers, which target '{target.name}' cannot: {why}"
        )
    return target.lm


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


def sublayers_of(lm: Runner, name: str) -> frozenset[Sublayer]:
    """Return which sublayers the target can skip.

    Args:
        name: of the target, for messages.

    Raises:
        Unsupported: its modules cannot be replaced.
    """
    with _supported(f"target '{name}' cannot skip sublayers"):
        return lm.sublayers


def layers_of(lm: Runner, layers: int | None) -> int:
    """Return after how many layers to exit, from 1 to one less than there are; None: after a quarter of them.

    Raises:
        ValueError: another value.
        Unsupported: there is one layer only.
    """
    if lm.layers < 2:
        raise Unsupported("the target has a single layer, so that no layer is left to verify an early exit")
    if layers is None:
        return max(1, lm.layers // 4)
    if layers >= lm.layers:
        raise WrongOption(f"layers must be at most {lm.layers - 1}, of the target's {lm.layers}, not {layers}")
    return layers


@torch.inference_mode()
def check_exit(lm: Runner, end: int, name: str) -> Checked:
    """Compare forwards that continue from a draft pass with forwards that compute everything.

    Args:
        lm: computes both.
        end: the layer after which the draft pass exits.
        name: of the target, for messages.

    Returns:
        The error of the logits, and the largest that is allowed (``PlainForwards.check``).

    Raises:
        Unsupported: it is larger, or the model raises an error.
    """
    with _supported(f"target '{name}' cannot continue after {end} layers"):
        try:
            return _compared(lm, partial(_continued, end=end))
        except Mismatch as wrong:
            what = "cannot be checked" if wrong.plain else f"continues wrongly after {end} layers"
            raise Unsupported(f"target '{name}' {what}{wrong}") from None


def _compared(lm: Runner, decode: Callable[[Runner], list[Rows]]) -> Checked:
    """Compare decoded rows with plain forwards; those of a toy model with its own whole forwards.

    Raises:
        Mismatch: they differ by more than is allowed.
    """
    if lm.hf_model is not None:
        settings = lm.model_settings

        def runner(model: Any, kv_dtype: torch.dtype | None) -> Runner:
            if model is lm.hf_model and kv_dtype == settings.kv_dtype:
                return lm
            return CausalLM(model, *settings._replace(kv_dtype=kv_dtype))

        return PlainForwards.of(lm.hf_model, whole=True).check(runner, decode, settings.kv_dtype)
    known = {tuple(row.text): row.logits for rows in _whole(lm) for row in rows.split()}
    rows = [row for rows in decode(lm) for row in rows.split()]
    checked = Checked(largest_error(rows, [known[tuple(row.text)] for row in rows]), EXACT[lm.dtype])
    if not checked.passed:
        raise Mismatch(f": its logits differ from those of a whole forward by {checked.error:.2g} standard deviations")
    return checked


def _whole(lm: Runner) -> list[Rows]:
    """The rows of ``FOREST`` by a forward that computes everything."""
    with _example(lm) as (sequences, pending, _, draft):
        return rows_of(pending, draft, lm.run(lm.prepare(sequences, pending, draft)).logits.clone())


def _continued(lm: Runner, end: int) -> list[Rows]:
    """The rows of ``FOREST`` by a forward that continues from a draft pass."""
    timed, rows = lm.clock.phase("propose_forward"), np.flatnonzero(FOREST.depth == 1)
    with _example(lm) as (sequences, pending, token, draft):
        early = lm.draft_pass(Route(0, end))
        early.forward(sequences, pending, timed)
        early.extend(sequences, FOREST, rows, token[rows - FOREST.roots], timed)
        early.finish(draft.token, token)
        return rows_of(pending, draft, lm.run(lm.prepare(sequences, pending, draft)).logits.clone())


@contextmanager
def _example(lm: Runner) -> Iterator[tuple[list[Any], list[list[int]], np.ndarray, Draft]]:
    """Open two sequences; yield them, random pending tokens of each, and the tokens ``[M]`` and draft below them."""
    generator = np.random.default_rng(0)
    pending = [generator.integers(0, lm.vocabulary, count).tolist() for count in PENDING]
    token = generator.integers(0, lm.vocabulary, FOREST.nodes)
    sequences = [lm.open() for _ in pending]
    try:
        yield sequences, pending, token, Draft(FOREST, torch.from_numpy(token).to(lm.device))
    finally:
        for sequence in sequences:
            sequence.close()
        lm.clock.take()


@torch.inference_mode()
def check_skipping(lm: Runner, sublayers: frozenset[Sublayer], name: str) -> None:
    """Check that a draft pass without any skipped sublayer has the logits of a forward, and that others run.

    Those are without one attention sublayer, without one MLP, without a whole layer, and without all of ``sublayers``.

    Args:
        lm: computes both.
        sublayers: those that a draft may skip.
        name: of the target, for messages.

    Raises:
        Unsupported: the logits differ by more than ``PlainForwards.check`` allows, or the model raises an error.
    """
    with _supported(f"target '{name}' cannot skip sublayers"):
        try:
            _compared(lm, partial(_drafted, left_out=frozenset()))
        except Mismatch as wrong:
            what = (
                "cannot be checked" if wrong.plain else "drafts wrongly on its own KV cache without skipped sublayers"
            )
            raise Unsupported(f"target '{name}' {what}{wrong}") from None
        for left_out in skipped_to_check(sublayers):
            _drafted(lm, left_out)


def skipped_to_check(sublayers: frozenset[Sublayer]) -> list[frozenset[Sublayer]]:
    """Return sets of sublayers that are skipped in different ways; see ``check_skipping``."""
    layers = {kind: {sublayer.layer for sublayer in sublayers if sublayer.kind == kind} for kind in ("attn", "mlp")}
    sets = [frozenset({Sublayer(kind, min(numbers))}) for kind, numbers in layers.items() if numbers]  # type: ignore[arg-type]
    if both := layers["attn"] & layers["mlp"]:
        sets.append(frozenset({Sublayer("attn", min(both)), Sublayer("mlp", min(both))}))
    return [*dict.fromkeys([*sets, sublayers])]


def _drafted(lm: Runner, left_out: frozenset[Sublayer]) -> list[Rows]:
    """The roots and first nodes of ``FOREST`` by a draft pass, after a forward over the whole forest."""
    timed, nodes = lm.clock.phase("propose_forward"), np.flatnonzero(FOREST.depth == 1)
    with _example(lm) as (sequences, pending, token, draft):
        drafts = lm.draft_pass(Route(skipped=left_out))
        roots = drafts.forward(sequences, pending, timed).logits
        first = drafts.extend(sequences, FOREST, nodes, token[nodes - FOREST.roots], timed).logits
        drafts.drop()
        assert roots is not None and first is not None
        return rows_of(pending, Draft(FIRST, draft.token[nodes - FOREST.roots]), torch.cat([roots, first]))
