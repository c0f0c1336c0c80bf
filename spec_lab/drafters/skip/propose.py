"""The target drafts without some of its attention and MLP sublayers.

Sources: Draft&Verify (2309.08168) and SWIFT (2410.06916). The draft reads the target's keys and values of committed
tokens. Those of pending tokens and of nodes are the draft's own, and are dropped at the end of each draft. Which
sublayers are skipped is given, or found while requests are decoded (``skip.search``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.options import Count, Share, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain
from spec_lab.core.upload import upload
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.skip.search import (
    MAX_TRIES,
    MAX_WINDOW,
    SkipSearch,
    Try,
    parse_sublayers,
    write_sublayers,
)
from spec_lab.models.layer_checks import check_skipping, sublayers_of, with_layer_ranges
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, RowLogits
from spec_lab.propose.tree_plan import Grown, TreeOptions, TreePlan
from spec_lab.propose.tree_proposer import Forwards, TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.causal_draft_pass import CausalDraftPass
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.runner import DraftRunner, Runner


@dataclass(eq=False)
class Tried:
    """The sets that were scored for a sequence, or with scope "run" for all.

    Args:
        tries: in order.
        last: the length of the sequence's text at the last try.
    """

    tries: list[Try] = field(default_factory=list)
    last: int = 0


class Skip(TreeProposer):
    """Drafts with all layers of the target but some sublayers.

    A sequence with more pending tokens than the runner computes in one forward, such as a long prompt, gets no draft.

    Args:
        lm: the target's runner.
        plan: the trees, and how their tokens are drawn.
        skipped: the sublayers, or how they are searched.
        scope: of a search: "run": all requests share what was found, as published; "request": each searches alone, and
            all tries that are due are made in one step, many of them after a preemption.
    """

    lenient = True  # the target's own logits may be finite where those of a draft are not

    def __init__(
        self, lm: Runner, plan: TreePlan, skipped: frozenset[Sublayer] | SkipSearch, scope: str = "run"
    ) -> None:
        super().__init__(plan, "skip", Requires(abilities=frozenset({"layer_ranges"})), None)
        self.lm, self.skipped, self.scope = lm, skipped, scope
        self._shared = Tried()

    @staticmethod
    @checked
    def load(
        target: Target,
        skipped: str | None = None,
        ratio: Share = 0.45,
        tries: Annotated[int, Whole(1, MAX_TRIES)] = 64,
        enough: Share = 0.93,
        every: Count = 8,
        window: Annotated[int, Whole(1, MAX_WINDOW)] = 50,
        scope: Literal["run", "request"] = "run",
        **options: Unpack[TreeOptions],
    ) -> Skip:
        """Choose the sublayers, or how they are searched, and check that the target runs without them.

        Args:
            target: drafts and verifies.
            skipped: sublayers that the draft skips, such as 'attn 2 3 mlp 4'; None: searched (SWIFT).
            ratio: of the search: share of the attention and of the MLP sublayers that are skipped.
            tries: of the search: maximum number of sets that are scored, each once.
            enough: of the search: agreement with the text that ends it.
            every: of the search: tokens from one try to the next.
            window: of the search: tokens that a set is scored on.
            scope: run: all requests share what was found, as published; request: each searches alone.
            options: of the trees.

        Raises:
            ValueError: a wrong option; a tree wider than the vocabulary.
            Unsupported: a target that cannot run without these sublayers.
        """
        plan = TreePlan.read(**options)
        search = {"tries": tries, "every": every, "window": window, "enough": enough}
        lm = with_layer_ranges(target, "skip")
        plan.check_width(target.vocabulary)
        sublayers = sublayers_of(lm, target.name)
        inner = tuple(sorted((sublayer for sublayer in sublayers if 0 < sublayer.layer < lm.layers - 1), key=_order))
        if skipped is None:
            if not 0 < ratio < 1:
                raise WrongOption(f"ratio must lie between 0 and 1, both excluded (got {ratio})")
            if not inner:
                raise ValueError(
                    f"proposer 'skip' finds no sublayer that it may skip in target '{target.name}' of {lm.layers} "
                    "layers, of which the first and the last are kept: choose another proposer"
                )
            chosen: frozenset[Sublayer] | SkipSearch = SkipSearch(inner, ratio, **search)  # type: ignore[arg-type]
        else:
            chosen = parse_sublayers(skipped)
            if wrong := chosen - sublayers:
                raise WrongOption(
                    f"skipped: the target cannot skip {write_sublayers(wrong)}; it can skip "
                    f"{write_sublayers(sublayers) or 'nothing'}"
                )
            if chosen == sublayers:
                raise WrongOption("skipped must leave some sublayers (got all of the target's)")
        check_skipping(lm, frozenset(inner) if isinstance(chosen, SkipSearch) else chosen, target.name)
        return Skip(lm, plan, chosen, scope)

    @property
    def shared_store(self) -> str:
        """See ``Proposer``."""
        shared = isinstance(self.skipped, SkipSearch) and self.scope == "run"
        return "which sublayers the draft skips, found with the texts of all requests" if shared else ""

    @property
    def target_cells(self) -> int:
        """See ``Proposer``."""
        return max(self.plan.computed, self.skipped.window if isinstance(self.skipped, SkipSearch) else 0)

    def forget(self) -> None:
        """Begin the shared search anew."""
        self._shared = Tried()

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Skip:
        """The same proposer without the MLP of the toy's last layer, or with a short search of its own for each text.

        Outcomes are enumerated side by side, so they share no search. See ``Proposer``.
        """
        lm, plan = target.lm, self.plan.toy(tree)
        if not isinstance(self.skipped, SkipSearch):
            return Skip(lm, plan, frozenset({Sublayer("mlp", lm.layers - 1)}))
        search = replace(
            self.skipped, sublayers=tuple(sorted(lm.sublayers, key=_order)), ratio=0.5, tries=2, every=1, window=2
        )
        return Skip(lm, plan, search, "request")

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        if not isinstance(self.skipped, SkipSearch):
            return self.plan.facts | {"skipped": write_sublayers(self.skipped)}
        search = self.skipped
        return self.plan.facts | {
            "skipped": "searched", "ratio": search.ratio, "tries": search.tries, "enough": search.enough,
            "every": search.every, "window": search.window, "scope": self.scope,
        }  # fmt: skip

    def init(self, request: Request) -> Tried:
        """Nothing is tried yet."""
        return Tried()

    def fork(self, state: Tried) -> Tried:
        """The same tries."""
        return Tried(list(state.tries), state.last)

    def rewind(self, state: Tried, length: int) -> None:
        """Forget the tries on text that was removed."""
        state.tries = [attempt for attempt in state.tries if attempt.end <= length]
        state.last = min(state.last, length)

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        return room if len(sequence.pending) <= self.lm.max_pending else 0

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Search on, then draft without the sublayers found so far."""
        timed = batch.clock.phase("propose_forward")
        groups: dict[frozenset[Sublayer], list[int]] = {}
        for tree, (sequence, depth) in enumerate(zip(batch.sequences, depths, strict=True)):
            if depth:
                groups.setdefault(self._choose(sequence, batch), []).append(tree)
        passes = {skipped: self.lm.draft_pass(Route(skipped=skipped)) for skipped in groups}
        broken = set[int]()

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
            parts, order = [], []
            for skipped, trees in groups.items():
                computed = np.flatnonzero(np.isin(shape.root[rows], trees))
                if len(computed):
                    kvs = [batch.sequences[tree].kv if tree in trees else None for tree in range(len(depths))]
                    parts.append(passes[skipped].extend(kvs, shape, rows[computed], token[computed], timed).logits)
                    order.append(computed)
            return _ordered(parts, order)

        def finish(grown: Grown) -> None:
            broken.update(grown.draft.broken)

        def drop() -> None:
            for skipped, draft_pass in passes.items():
                draft_pass.drop(clear=not broken.isdisjoint(groups[skipped]))

        try:
            logits, order = [], []
            number = np.cumsum(np.array(depths) > 0) - 1  # of each tree among those that are drafted
            for skipped, trees in groups.items():
                kvs, pending = [batch.sequences[n].kv for n in trees], [batch.sequences[n].pending for n in trees]
                logits.append(passes[skipped].forward(kvs, pending, timed).logits)
                order.append(number[trees])
            return Forwards(_ordered(logits, order), expand, finish, drop)
        except BaseException:
            drop()
            raise

    def _choose(self, sequence: SequenceState, batch: Batch) -> frozenset[Sublayer]:
        """Make the tries that are due for a sequence; return what its draft skips."""
        search = self.skipped
        if not isinstance(search, SkipSearch):
            return search
        state: Tried = sequence.state
        if self.scope == "request":
            for end in search.ends(len(sequence.request.tokens), len(sequence.kv) + 1, state.tries):
                state.tries.append(self._try(sequence, search.candidate(state.tries), end, batch))
                if search.over(state.tries):
                    break
            return search.best(state.tries)
        length, shared = len(sequence.kv) + 1, self._shared.tries
        if search.due(length, state.last) and not search.over(shared):
            state.last = length
            shared.append(self._try(sequence, search.candidate(shared), length, batch))
        return search.best(shared)

    def _try(self, sequence: SequenceState, skipped: frozenset[Sublayer], end: int, batch: Batch) -> Try:
        """Score a set on the last tokens of the text's first ``end``, all but the last of which are computed.

        A set without finite logits scores 0.
        """
        assert isinstance(self.skipped, SkipSearch)
        start = max(0, end - 1 - self.skipped.window)
        tokens = sequence.tokens[start:end]
        draft_pass, twin, fine = self.lm.draft_pass(Route(skipped=skipped)), sequence.kv.fork(), True
        try:
            twin.truncate(start)
            logits = self._logits(draft_pass, twin, tokens[:-1], batch.clock.phase("propose_forward"))
            likeliest, finite = batch.read(logits.argmax(-1), torch.isfinite(logits.amax(-1)))
            fine = bool(finite.all())
        finally:
            draft_pass.drop(clear=not fine)
            twin.close()
        return Try(skipped, float((likeliest == np.array(tokens[1:])).mean()) if fine else 0.0, end)

    def _logits(self, draft_pass: CausalDraftPass, kv: Any, tokens: Sequence[int], timed: Phase) -> Tensor:  # [n, V]
        """Logits after each of the tokens that follow a sequence: pending ones, and nodes of a chain beyond a chunk."""
        most, rest = self.lm.max_pending, np.array(tokens[self.lm.max_pending :], dtype=np.int64)
        logits, shape = [draft_pass.forward([kv], [tokens[:most]], timed, every=True).logits], chain(len(rest))
        for begin in range(0, len(rest), most):
            part = rest[begin : begin + most]
            rows = np.arange(begin, begin + len(part)) + shape.roots
            logits.append(draft_pass.extend([kv], shape, rows, part, timed).logits)
        return torch.cat([part_logits for part_logits in logits if part_logits is not None])


def _order(sublayer: Sublayer) -> tuple[int, str]:
    return sublayer.layer, sublayer.kind


def _ordered(parts: Sequence[Tensor | None], order: Sequence[np.ndarray]) -> RowLogits:
    """The logits of groups of rows, in the order of the rows' numbers."""
    every = [part for part in parts if part is not None]
    if len(every) == 1:
        return RowLogits.of(every[0])
    back = np.argsort(np.concatenate(order))
    logits = torch.cat(every)
    return RowLogits.of(logits.index_select(0, upload(logits.device, back)[0]))
