"""The target's first layers draft (early exit), and the target's forward continues from what they computed.

Source: LayerSkip (2404.16710): after the first layers the final norm and the LM head give the draft's distribution; the
draft reads and writes the target's own KV cache, so that verification runs only the layers after them. It requires a
target that was trained to exit early. Kangaroo (2404.18911) trains a small adapter instead (``ExitHead``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

import numpy as np
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Draft, Shape
from spec_lab.core.inference import inference
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.layer_checks import check_exit, layers_of, with_layer_ranges
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, RowLogits
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.propose.tree_proposer import TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.draft_pass import Partial, Route
from spec_lab.runners.runner import DraftRunner, Runner


class ExitHead(Protocol):
    """Turns exit states, the output of the last layer of the draft, into logits, with a state for each sequence.

    The state of a sequence is ``SequenceState.state``. Committed positions are observed with the hidden states that
    ``hidden`` names: with ``(layers,)`` the exit states of every position, prompts included. Pending tokens and nodes
    are not observed yet when they are drafted: their exit states are given here.
    """

    @property
    def name(self) -> str:
        """Of the proposer with this head, as in records."""
        ...

    @property
    def hidden(self) -> tuple[int, ...]:
        """Hidden states of committed positions to observe, as of ``Requires.hidden``."""
        ...

    @property
    def sha256(self) -> str | None:
        """Of its weights, as of ``Proposer``."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        ...

    def toy(self, target: Target) -> ExitHead:
        """The same kind of head for a toy target, after its first layer."""
        ...

    def init(self, request: Request) -> Any:
        """The state of a new sequence."""
        ...

    def observe(self, observed: Sequence[Observation]) -> None:
        """As of ``Proposer.observe``."""
        ...

    def fork(self, state: Any) -> Any:
        """As of ``Proposer.fork``."""
        ...

    def rewind(self, state: Any, length: int) -> None:
        """As of ``Proposer.rewind``."""
        ...

    def close(self, state: Any) -> None:
        """As of ``Proposer.close``."""
        ...

    def ready(self, sequence: SequenceState) -> bool:
        """Whether it can draft for a sequence in this step."""
        ...

    def roots(
        self, sequences: Sequence[SequenceState], pending: Sequence[int], exits: Tensor, timed: Phase
    ) -> Computed:
        """Return logits after the last pending token of each sequence, ``[B, V]``.

        Args:
            sequences: ``[B]``.
            pending: ``[B]`` how many pending tokens each has.
            exits: ``[N, H]`` their exit states, sequence by sequence.
            timed: records the calls of modules.
        """
        ...

    def nodes(
        self, sequences: Sequence[SequenceState | None], shape: Shape, rows: np.ndarray, exits: Tensor, timed: Phase
    ) -> Computed:
        """Return logits after nodes whose ancestors are computed, ``[n, V]``.

        Args:
            sequences: ``[B]`` of each tree; None where nothing is drafted.
            shape: the forest; it may have grown since the last call.
            rows: ``[n]`` the nodes.
            exits: ``[n, H]`` their exit states.
            timed: records the calls of modules.
        """
        ...


class EarlyExit(TreeProposer):
    """Drafts with the first layers of the target.

    A sequence with more pending tokens than the runner computes in one forward, such as a long prompt, gets no draft.

    Args:
        lm: the target's runner.
        layers: E, how many layers draft; the later ones are left to verification.
        plan: the trees, and how their tokens are drawn.
        head: turns exit states into logits; None: the target's final norm and LM head.
    """

    def __init__(self, lm: Runner, layers: int, plan: TreePlan, head: ExitHead | None = None) -> None:
        name, hidden, sha256 = ("early_exit", (), None) if head is None else (head.name, head.hidden, head.sha256)
        super().__init__(plan, name, Requires(hidden=hidden, abilities=frozenset({"layer_ranges"})), sha256)
        self.lm, self.layers, self.head = lm, layers, head

    @staticmethod
    def load(target: Target, layers: int | None = None, **options: Unpack[TreeOptions]) -> EarlyExit:
        """Check that the target can continue after its first layers.

        Args:
            target: drafts and verifies.
            layers: how many of the target's first layers draft; None: a quarter of them.
            options: of the trees.

        Raises:
            ValueError: a wrong option; a tree wider than the vocabulary.
            Unsupported: a target that does not run ranges of layers, or whose logits are wrong when it does.
        """
        plan = TreePlan.read(**options)
        lm = with_layer_ranges(target, "early_exit")
        end = layers_of(lm, layers)
        plan.check_width(target.vocabulary)
        check_exit(lm, end, target.name)
        return EarlyExit(lm, end, plan)

    @property
    def target_cells(self) -> int:
        """See ``Proposer``."""
        return self.plan.computed

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> EarlyExit:
        """The same proposer after the toy's first layer. See ``Proposer``."""
        head = None if self.head is None else self.head.toy(target)
        return EarlyExit(target.lm, 1, self.plan.toy(tree), head)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        own = {"layers": self.layers, "of_layers": self.lm.layers}
        return self.plan.facts | own | ({} if self.head is None else self.head.facts)

    def init(self, request: Request) -> Any:
        """The head's state."""
        return None if self.head is None else self.head.init(request)

    def observe(self, observed: Sequence[Observation]) -> None:
        """See ``ExitHead.observe``."""
        if self.head is not None:
            self.head.observe(observed)

    def fork(self, state: Any) -> Any:
        """See ``ExitHead.fork``."""
        return None if self.head is None else self.head.fork(state)

    def rewind(self, state: Any, length: int) -> None:
        """See ``ExitHead.rewind``."""
        if self.head is not None:
            self.head.rewind(state, length)

    def close(self, state: Any) -> None:
        """See ``ExitHead.close``."""
        if self.head is not None:
            self.head.close(state)

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Run the first layers on pending tokens, and level by level on the nodes drafted below them."""
        timed, head = batch.clock.phase("propose_forward"), self.head
        pending = [one.pending for one in batch.sequences]
        depths = [
            max(0, min(room, self.plan.depth))
            if len(own) <= self.lm.max_pending and (head is None or head.ready(one)) else 0
            for room, own, one in zip(batch.room(), pending, batch.sequences, strict=True)
        ]  # fmt: skip
        active = [one if depth else None for one, depth in zip(batch.sequences, depths, strict=True)]
        kvs = [None if one is None else one.kv for one in active]
        early = self.lm.draft_pass(Route(0, self.layers), logits=head is None)

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
            part = early.extend(kvs, shape, rows, token[rows - shape.roots], timed)
            if head is None:
                return _logits(part)
            assert part.exits is not None
            return head.nodes(active, shape, rows, part.exits, timed)

        roots: Computed | None = None
        drafting = [one for one in active if one is not None]
        if drafting:
            own = [tokens for tokens, depth in zip(pending, depths, strict=True) if depth]
            part = early.forward([one.kv for one in drafting], own, timed)
            if head is None:
                roots = _logits(part)
            else:
                assert part.exits is not None
                roots = head.roots(drafting, [len(tokens) for tokens in own], part.exits, timed)
        grown = self.plan.draft(batch, depths, roots, expand)
        early.finish(grown.draft.token, grown.kept)
        return grown.draft


def _logits(part: Partial) -> RowLogits:
    assert part.logits is not None
    return RowLogits.of(part.logits)
