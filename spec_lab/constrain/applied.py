"""Where a constraint applies (target, draft or both), and its masks in every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain.protocol import (
    Constraint,
    ConstraintError,
    ConstraintState,
    Masks,
    allows,
    calling,
    masks_by_forking,
    packed_mask,
    single_token,
    started,
    unpack,
)
from spec_lab.core.draft import Draft
from spec_lab.core.options import Form, Whole, WrongOption, check_fields
from spec_lab.core.readback import Readback
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload

Placement = Literal["target", "draft", "both", "none"]


@dataclass(frozen=True)
class AppliedConstraint:
    """A constraint, and where it applies.

    Masks on the target define the target distribution: the masked one, as in autoregressive decoding under the same
    constraint. Masks on the draft only help to draft what can be accepted; the output distribution stays the same.

    Args:
        constraint: the constraint.
        placement: masks apply to: target, draft, both, or none (violations are only counted).
        draft_budget: limit of draft masks per sequence and step: a number, or a time as 200us; None: no limit. Beyond
            it the draft is not masked. With a time runs cannot be reproduced.
        fast_forward: append forced tokens at once: true, false; None: if the target is masked.
        async_masks: compute masks in a thread, during the target's forward.
        distribution: local: masked token by token; global: the model's distribution given a valid output, not with
            controllers, which act on the output. See
            ``constrain.potential``.
        max_prefixes: of distribution=global: limit of the prefixes of a prompt's valid outputs.

    Raises:
        ValueError: an invalid option; a constraint that has actions, or ``fast_forward``, without the target;
            ``distribution="global"`` of a constraint that has actions or cannot be forked, or without the target.
    """

    constraint: Constraint
    placement: Placement = "both"
    draft_budget: Annotated[int, Whole(0)] | Annotated[str, Form("a time such as 200us", r"\d+ ?us")] | None = None
    fast_forward: bool | None = False
    async_masks: bool = False
    distribution: Literal["local", "global"] = "local"
    max_prefixes: Annotated[int, Whole(1, MAX_PREFIXES)] = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fast_forward is None:
            object.__setattr__(self, "fast_forward", self.on_target)
        if not self.on_target and self.constraint.has_actions:
            raise WrongOption(
                f"placement={self.placement} does not constrain the output, but '{self.constraint.name}' "
                "backtracks or forks it: set placement to target or both"
            )
        if not self.on_target and self.fast_forward:
            raise WrongOption(
                f"placement={self.placement} does not constrain the output, but fast_forward forces tokens: "
                "set placement to target or both, or fast_forward=false"
            )
        if self.async_masks and self.constraint.has_actions:
            raise WrongOption(
                f"async_masks=true is not possible: '{self.constraint.name}' backtracks, forks or ends the output, and "
                "its masks are computed before the forward: set async_masks=false"
            )
        if self.is_global:
            if not self.on_target:
                why = f"constraint.placement={self.placement} does not constrain the output: set it to target or both"
            elif self.constraint.has_actions:
                why = (
                    f"'{self.constraint.name}' backtracks, forks or ends the output itself, so that its outputs cannot "
                    "be enumerated: choose a grammar, or set constraint.distribution=local"
                )
            elif not self.constraint.supports_drafts:
                why = (
                    f"'{self.constraint.name}' cannot be forked, so that its outputs cannot be enumerated: set "
                    "constraint.distribution=local"
                )
            else:
                return
            raise WrongOption(f"distribution=global is not possible: {why}")

    @property
    def is_global(self) -> bool:
        """Whether whole outputs have the model's distribution given that they are valid."""
        return self.distribution == "global"

    @property
    def on_target(self) -> bool:
        """Whether the output is masked."""
        return self.placement in ("target", "both")

    @property
    def on_draft(self) -> bool:
        """Whether drafts are masked."""
        return self.placement in ("draft", "both")

    def budget(self) -> tuple[int, float]:
        """Return the maximum number of masks for a sequence and step, and the maximum seconds."""
        if self.draft_budget is None:
            return 2**62, float("inf")
        if isinstance(self.draft_budget, str):
            return 2**62, int(self.draft_budget.removesuffix("us")) * 1e-6
        return self.draft_budget, float("inf")

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {
            "name": self.constraint.name,
            "placement": self.placement,
            "draft_budget": self.draft_budget,
            "reproducible": not isinstance(self.draft_budget, str),
            "fast_forward": self.fast_forward,
            "async_masks": self.async_masks,
            "distribution": self.distribution,
            "max_prefixes": self.max_prefixes if self.is_global else None,
            **self.constraint.facts,
        }


@dataclass
class MaskBudget:
    """Seconds and masks that the draft of one step may still spend, and has spent.

    Args:
        left: ``[B]`` masks for each sequence.
        seconds_left: seconds in total.
        seconds: spent.
        used: whether any mask was asked for.
    """

    left: list[int]
    seconds_left: float
    seconds: float = 0.0
    used: bool = False


class DraftTreeMasks:
    """The token masks below the nodes of a forest that is still being drafted.

    Args:
        states: ``[B]`` at the roots; None allows every token.
        applied: the constraint, with its budget for drafts.
    """

    def __init__(self, states: Sequence[ConstraintState | None], applied: AppliedConstraint) -> None:
        self.applied, self.constraint, self.vocabulary = applied, applied.constraint, applied.constraint.vocabulary
        self.forces = bool(applied.fast_forward)
        most, seconds = applied.budget()
        self.budget = MaskBudget([most] * len(states), seconds)
        self.states = states
        self.numbers: Sequence[int] = range(len(states))  # of the roots, within the budget
        self.at: dict[int, ConstraintState | None] = {}  # by row; None where every token is allowed
        self.dead: set[int] = set()  # rows after which no token is allowed

    def view(self, roots: Sequence[int]) -> DraftTreeMasks:
        """See ``DraftMasks``."""
        view = DraftTreeMasks([self.states[root] for root in roots], self.applied)
        view.budget, view.numbers = self.budget, [self.numbers[root] for root in roots]
        return view

    @property
    def used(self) -> bool:
        """Whether any mask was asked for, of this forest or another view's."""
        return self.budget.used

    @property
    def seconds(self) -> float:
        """Seconds spent on masks, of all views."""
        return self.budget.seconds

    def __call__(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> np.ndarray:  # [n], [M] -> [n, V] bool
        """Return which tokens may be drawn below ``rows``, whose parents were asked about in earlier calls.

        All False where nothing can be drafted: the row is illegal, has an action, or no token is allowed after it.
        """
        start, self.budget.used = time.perf_counter(), True
        allowed = np.ones((len(rows), self.vocabulary), dtype=bool)
        with calling(self.constraint):
            for number, row in enumerate(rows.tolist()):
                try:
                    mask = self._mask(shape, row, token, self.seconds + time.perf_counter() - start)
                except ConstraintError:  # an error only if the verifier accepts the row
                    self.dead.add(row)
                if row in self.dead:
                    allowed[number] = False
                elif mask is not None:
                    allowed[number] = unpack(mask, self.vocabulary)
        self.budget.seconds += time.perf_counter() - start
        return allowed

    def _mask(self, shape: Shape, row: int, token: np.ndarray, spent: float) -> np.ndarray | None:
        """Return the mask ``[W]`` after ``row``; None allows every token. Adds the row to ``dead`` where it is."""
        root = int(shape.root[row])
        state = self.states[root]
        if row >= shape.roots:
            parent, drafted = int(shape.parent[row - shape.roots]), int(token[row - shape.roots])
            state = above = self.at.get(parent)
            mask = None if above is None or parent in self.dead else packed_mask(above, self.vocabulary)
            if parent in self.dead or (mask is not None and not allows(mask, drafted)):
                self.dead.add(row)
                return None
            if above is not None:
                state = above.fork()
                state.advance(drafted)
        left, number = self.budget.left, self.numbers[root]
        if state is None or left[number] == 0 or spent > self.budget.seconds_left:
            self.at[row] = None
            return None
        self.at[row] = state
        left[number] -= 1
        if state.action() is not None:
            self.dead.add(row)
            return None
        return packed_mask(state, self.vocabulary)


class StepMasks(NamedTuple):
    """The masks of one step.

    Args:
        masks: of the forest.
        failed: the error of each tree whose constraint failed at the root; its masks allow every token.
        seconds: the time that the masks took.
    """

    masks: Masks
    failed: dict[int, str]
    seconds: float


class StepConstraint:
    """Computes the masks of one engine's steps. Close it at the end.

    Args:
        applied: the constraint, and where it applies.

    Attributes:
        supports_drafts: whether anything can be drafted; without forks of states every token is decoded by itself.
    """

    def __init__(self, applied: AppliedConstraint) -> None:
        self.applied = applied
        self.constraint = applied.constraint
        self.supports_drafts = applied.constraint.supports_drafts
        self._thread: ThreadPoolExecutor | None = None

    def start(self, request: Request) -> ConstraintState:
        """See ``Constraint.start``."""
        with calling(self.constraint):
            return started(self.constraint, request)

    def draft_masks(self, states: Sequence[ConstraintState | None]) -> DraftTreeMasks | None:
        """Return the masks for a draft below these states; None where drafts are not masked."""
        if self.applied.on_draft and self.supports_drafts:
            return DraftTreeMasks(states, self.applied)
        return None

    def masks(
        self,
        states: Sequence[ConstraintState | None],
        draft: Draft,
        draft_masks: DraftTreeMasks | None,
        read: Readback,
    ) -> tuple[Draft, StepMasks | Future[StepMasks]]:
        """Return the draft without nodes that cannot be accepted, and its masks, perhaps still being computed.

        Nodes below a barrier are removed. So are the illegal nodes of deterministic drafts that were made without
        masks: that loses nothing, since no node was sampled.

        Args:
            states: ``[B]`` at the roots.
            draft_masks: the masks that the proposer was given; None where drafts are not masked.
            read: reads the drafted tokens on the host.
        """
        token = read(draft.token)[0] if draft.shape.nodes else NO_TOKENS
        unused = draft_masks is not None and not draft_masks.used
        prunes = unused and draft.ways == {"deterministic"} and draft.shape.nodes > 0
        if prunes and draft_masks is not None and self.applied.draft_budget is not None:
            draft, rows = draft.keep(_within_budget(draft.shape, token, draft_masks))
            token, prunes = token[rows[draft.shape.roots :] - draft.shape.roots], False
        if self.applied.async_masks and not prunes:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "masks")
            return draft, self._thread.submit(self._masks, states, draft.shape, token)
        tree_masks = self._masks(states, draft.shape, token)
        masks, shape = tree_masks.masks, draft.shape
        keep = np.ones(shape.rows, dtype=bool)
        if shape.nodes and masks.barrier.any():
            keep[shape.roots :] &= ~masks.barrier[shape.parent]
        if prunes:
            keep &= masks.legal
        if keep.all():
            return draft, tree_masks
        draft, rows = draft.keep(keep)
        return draft, tree_masks._replace(masks=masks.of(rows))

    def close(self) -> None:
        """Stop the thread that computes masks."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _masks(self, states: Sequence[ConstraintState | None], shape: Shape, token: np.ndarray) -> StepMasks:
        start = time.perf_counter()
        failed: dict[int, str] = {}
        with calling(self.constraint):
            try:
                masks = self.constraint.masks(states, shape, token)
            except ConstraintError:  # of one tree, perhaps at a node that is not accepted: compute each tree by itself
                each = [self._alone(tree, states, shape, token, failed) for tree in range(len(states))]
                rows = shape.root, np.arange(shape.rows)
                masks = Masks(*(np.stack([getattr(tree, part) for tree in each])[rows] for part in PARTS))
        return StepMasks(masks, failed, time.perf_counter() - start)

    def _alone(
        self,
        tree: int,
        states: Sequence[ConstraintState | None],
        shape: Shape,
        token: np.ndarray,
        failed: dict[int, str],
    ) -> Masks:
        """Return the masks of one tree; an error at its root is put into ``failed``, and nothing is masked."""
        vocabulary = self.constraint.vocabulary
        try:
            alone = [state if number == tree else None for number, state in enumerate(states)]
            return masks_by_forking(alone, shape, token, vocabulary)
        except ConstraintError as error:
            failed[tree] = str(error)
            return masks_by_forking([None] * len(states), shape, token, vocabulary)


def _within_budget(shape: Shape, token: np.ndarray, masks: DraftTreeMasks) -> np.ndarray:  # [R] bool
    """All rows but the illegal nodes that the masks find within their budget."""
    rows = np.unique(shape.parent)
    number = np.searchsorted(rows, shape.parent)
    keep = np.ones(shape.rows, dtype=bool)
    keep[shape.roots :] = masks(shape, rows, token)[number, token]
    return keep


MAX_PREFIXES = 2**20
"""Largest value of ``AppliedConstraint.max_prefixes``: each is a row of a forward."""

NO_TOKENS = np.empty(0, dtype=np.int64)
PARTS = ("bits", "legal", "barrier")


def open_mask(masks: Masks, vocabulary: int, device: torch.device) -> Tensor:  # [R, V]
    """Return the masks as ``logits_to_probs`` reads them."""
    return upload(device, unpack(masks.bits, vocabulary))[0]


def forced_token(state: ConstraintState) -> int | None:
    """Return the forced token; None where several tokens or none are allowed."""
    mask = state.mask()
    return None if mask is None else single_token(mask)
