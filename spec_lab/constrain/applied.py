"""Where a constraint binds, and what each round of the decode loop asks of it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain.protocol import (
    Constraint,
    ConstraintError,
    ConstraintState,
    Masks,
    allows,
    masks_by_forking,
    single_token,
    unpack,
)
from spec_lab.core.draft import Draft, Shape
from spec_lab.core.options import one_of, whole
from spec_lab.engine.batch import Batch, Request

PLACES = ("target", "draft", "both", "none")


@dataclass(frozen=True)
class AppliedConstraint:
    """A constraint, and where it binds.

    On the target its masks define the law that is decoded: the masked law, which autoregressive decoding under the same
    constraint has as well. On the draft they only help to draft what can be accepted; the output's law does not notice.

    Args:
        constraint: what binds.
        placement: "target", "draft", "both" or "none". Without the target the output is unconstrained, and what it
            violates is counted.
        draft_budget: masks that the draft may use for each sequence in each step; after them it drafts unmasked. Or a
            time for it, such as "200us", with which runs cannot be reproduced. None: no limit.
        fast_forward: tokens that the masks leave no choice for are appended at once, as certain as they are, and
            computed with the next draft. None: where the target is bound.
        beside: the masks are computed beside the target's forward, in a thread, where nothing waits for them earlier.

    Raises:
        ValueError: an option of the wrong kind; a constraint that acts without binding the target; ``fast_forward``
            without binding the target.
    """

    constraint: Constraint
    placement: str = "both"
    draft_budget: int | str | None = None
    fast_forward: bool | None = False
    beside: bool = False

    def __post_init__(self) -> None:
        one_of("constraint.placement", self.placement, PLACES)
        self.budget()
        if self.fast_forward is None:
            object.__setattr__(self, "fast_forward", self.on_target)
        for name in ("fast_forward", "beside"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"constraint.{name} must be true or false, not {getattr(self, name)!r}")
        if not self.on_target and self.constraint.has_actions:
            raise ValueError(
                f"constraint.placement={self.placement} leaves the output alone, but '{self.constraint.name}' acts on "
                "the output: set constraint.placement to target or both"
            )
        if not self.on_target and self.fast_forward:
            raise ValueError(
                f"constraint.placement={self.placement} leaves the output alone, but fast_forward forces tokens: set "
                "constraint.placement to target or both, or constraint.fast_forward=false"
            )

    @property
    def on_target(self) -> bool:
        """Whether the output is bound."""
        return self.placement in ("target", "both")

    @property
    def on_draft(self) -> bool:
        """Whether drafts are bound."""
        return self.placement in ("draft", "both")

    def budget(self) -> tuple[int, float]:
        """Most masks for a sequence and step, and most seconds."""
        if self.draft_budget is None:
            return 2**62, float("inf")
        if isinstance(self.draft_budget, str):
            found = re.fullmatch(r"(\d+) ?us", self.draft_budget)
            if not found:
                raise ValueError(
                    f"constraint.draft_budget must be a number of masks, a time such as '200us', or null, "
                    f"not {self.draft_budget!r}"
                )
            return 2**62, int(found[1]) * 1e-6
        return whole("constraint.draft_budget", self.draft_budget, 0, ", a time such as '200us', or null"), float("inf")

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        return {
            "name": self.constraint.name,
            "placement": self.placement,
            "draft_budget": self.draft_budget,
            "reproducible": not isinstance(self.draft_budget, str),
            "fast_forward": self.fast_forward,
            "beside": self.beside,
            **getattr(self.constraint, "facts", {}),
        }


class Guide:
    """What a constraint allows below the nodes of drafts that are still growing.

    Args:
        states: ``[B]`` at the heads; None binds nothing.
        binding: with the budget.
    """

    def __init__(self, states: Sequence[ConstraintState | None], binding: AppliedConstraint) -> None:
        self.vocabulary = binding.constraint.vocabulary
        self.forces = bool(binding.fast_forward)
        most, self.seconds_left = binding.budget()
        self.left = [most] * len(states)
        self.states = states
        self.at: dict[int, ConstraintState | None] = {}  # by row; None where nothing binds any more
        self.dead: set[int] = set()  # rows after which nothing may come
        self.used = False
        self.seconds = 0.0

    def __call__(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> np.ndarray:  # [n], [M] -> [n, V] bool
        """What may be drawn below ``rows`` of a forest with these tokens; their parents were asked about before.

        All False where nothing can be drafted: the row is illegal itself, an action is wanted or nothing may come.
        """
        start, self.used = time.perf_counter(), True
        allowed = np.ones((len(rows), self.vocabulary), dtype=bool)
        for place, row in enumerate(rows.tolist()):
            try:
                mask = self._mask(shape, row, token, self.seconds + time.perf_counter() - start)
            except ConstraintError:  # whether anything comes to it is not decided yet
                self.dead.add(row)
            if row in self.dead:
                allowed[place] = False
            elif mask is not None:
                allowed[place] = unpack(mask, self.vocabulary)
        self.seconds += time.perf_counter() - start
        return allowed

    def _mask(self, shape: Shape, row: int, token: np.ndarray, spent: float) -> np.ndarray | None:
        """What may come after ``row`` ``[W]``; None for everything. Finds out whether the row is dead."""
        head = int(shape.root[row])
        state = self.states[head]
        if row >= shape.roots:
            parent, drafted = int(shape.parent[row - shape.roots]), int(token[row - shape.roots])
            state = above = self.at.get(parent)
            mask = None if above is None or parent in self.dead else above.mask()
            if parent in self.dead or (mask is not None and not allows(mask, drafted)):
                self.dead.add(row)
                return None
            if above is not None:
                state = above.fork()
                state.advance(drafted)
        if state is None or self.left[head] == 0 or spent > self.seconds_left:
            self.at[row] = None
            return None
        self.at[row] = state
        self.left[head] -= 1
        if state.action() is not None:
            self.dead.add(row)
            return None
        return state.mask()


class StepConstraint:
    """A group of requests under a binding: one round after the other."""

    def __init__(self, binding: AppliedConstraint) -> None:
        self.binding = binding
        self.constraint = binding.constraint
        self.guide: Guide | None = None
        self.busy = self.guided = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[Masks] | None = None

    @property
    def supports_drafts(self) -> bool:
        """Whether anything can be drafted: states that cannot be forked are decoded token by token."""
        return bool(getattr(self.constraint, "supports_drafts", True))

    def start(self, request: Request) -> ConstraintState:
        """See ``Constraint.start``."""
        return self.constraint.start(request)

    def begin(self, batch: Batch) -> None:
        """A round begins: proposers that can draft under masks find a guide."""
        self.busy = self.guided = 0.0
        self.guide = batch.guide = None
        if self.binding.on_draft and self.supports_drafts:
            self.guide = batch.guide = Guide([s.constraint for s in batch.sequences], self.binding)

    def narrow(self, batch: Batch, draft: Draft) -> tuple[Draft, Masks | None]:
        """The draft without what cannot be reached, and its masks; None while they are still computed.

        Below a barrier nothing is drafted. From deterministic drafts that were made without the guide, illegal nodes
        go: whether a node is legal follows from the text, not from a drawn value.
        """
        prunes = self.guide is not None and not self.guide.used and draft.drawn == "point" and draft.shape.nodes > 0
        if prunes and self.binding.draft_budget is not None:
            draft, prunes = self._pruned(draft), False
        if self.guide is not None:
            self.busy = self.guided = self.guide.seconds
        if self.binding.beside and not prunes and not self.constraint.has_actions:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "masks")
            self._coming = self._thread.submit(self._masks, batch, draft)
            return draft, None
        masks = self._masks(batch, draft)
        shape = draft.shape
        keep = np.ones(shape.rows, dtype=bool)
        if shape.nodes and masks.barrier.any():
            keep[shape.roots :] &= ~masks.barrier[shape.parent]
        if prunes:
            keep &= masks.legal
        if keep.all():
            return draft, masks
        draft, rows = draft.keep(keep)
        return draft, Masks(masks.bits[rows], masks.legal[rows], masks.barrier[rows])

    def masks(self) -> Masks:
        """The masks that were still computed."""
        if self._coming is None:
            raise RuntimeError("no masks are being computed")
        coming, self._coming = self._coming, None
        return coming.result()

    def close(self) -> None:
        """The group is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _masks(self, batch: Batch, draft: Draft) -> Masks:
        start = time.perf_counter()
        states: list[ConstraintState | None] = [sequence.constraint for sequence in batch.sequences]
        shape, token = draft.shape, draft.token.cpu().numpy()
        try:
            masks = self._of(states, shape, token)
        except ConstraintError:  # one of them, perhaps at a node that nothing comes to: the slow way tells
            each = [self._alone(batch, head, states, shape, token) for head in range(len(states))]
            own = shape.root, np.arange(shape.rows)
            masks = Masks(*(np.stack([getattr(one, part) for one in each])[own] for part in PARTS))
        self.busy += time.perf_counter() - start
        return masks

    def _alone(
        self, batch: Batch, head: int, states: Sequence[ConstraintState | None], shape: Shape, token: np.ndarray
    ) -> Masks:
        """The masks of one tree; where its head itself is stuck, the sequence ends with this round."""
        vocabulary = self.constraint.vocabulary
        try:
            one = [state if number == head else None for number, state in enumerate(states)]
            return masks_by_forking(one, shape, token, vocabulary)
        except ConstraintError as error:
            if self.binding.on_target:
                batch.broken[head], batch.sequences[head].finish = str(error), "stuck"
            else:
                batch.sequences[head].unwatch(str(error))
            return masks_by_forking([None] * len(states), shape, token, vocabulary)

    def _of(self, states: Sequence[ConstraintState | None], shape: Shape, token: np.ndarray) -> Masks:
        fast = getattr(self.constraint, "masks", None)
        if fast is None:
            return masks_by_forking(states, shape, token, self.constraint.vocabulary)
        masks: Masks = fast(states, shape, token)
        return masks

    def _pruned(self, draft: Draft) -> Draft:
        """The draft without the illegal nodes that the guide finds within its budget."""
        shape, token = draft.shape, draft.token.cpu().numpy()
        rows = np.unique(shape.parent)
        number = np.searchsorted(rows, shape.parent)
        assert self.guide is not None
        keep = np.ones(shape.rows, dtype=bool)
        keep[shape.roots :] = self.guide(shape, rows, token)[number, token]
        return draft.keep(keep)[0]


PARTS = ("bits", "legal", "barrier")


def open_mask(masks: Masks, vocabulary: int, device: torch.device) -> Tensor:  # [R, V]
    """The masks for ``law``."""
    return torch.from_numpy(unpack(masks.bits, vocabulary)).to(device)


def forced_token(state: ConstraintState) -> int | None:
    """The one token that may come next; None where there is a choice, or nothing may come."""
    mask = state.mask()
    return None if mask is None else single_token(mask)
