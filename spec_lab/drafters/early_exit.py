"""The target's first layers draft (early exit), and the target's forward continues from what they computed.

Source: LayerSkip (2404.16710): after the first layers the final norm and the LM head give the draft's distribution; the
draft reads and writes the target's own KV cache, so that verification runs only the layers after them. It requires a
target that was trained to exit early. Kangaroo (2404.18911) trains a small adapter instead (``drafters.kangaroo``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from spec_lab.core.clock import Phase
from spec_lab.core.options import Count, checked
from spec_lab.core.shape import Shape
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.layer_checks import check_exit, layers_of, with_layer_ranges
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, RowLogits
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.propose.tree_proposer import Forwards, TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.draft_pass import Partial, Route
from spec_lab.runners.runner import DraftRunner, Runner


class FirstLayers(TreeProposer):
    """A drafter with the first layers of the target, whose forward continues from what they computed.

    A sequence with more pending tokens than the runner computes in one forward, such as a long prompt, gets no draft.
    An *exit state* is the output of the last of these layers.

    Args:
        layers: E, how many layers draft; the later ones are left to verification.
        plan: the trees, and how their tokens are drawn.
        name, sha256: see ``Proposer``.
        hidden: hidden states of committed positions that are observed; with ``(layers,)`` the exit states of every
            position, prompts included. Pending tokens and nodes are not observed yet when they are drafted.
    """

    own_logits = False  # whether the draft's logits are those of the final norm and the LM head

    def __init__(
        self,
        target_lm: Runner,
        layers: int,
        plan: TreePlan,
        name: str,
        hidden: tuple[int, ...] = (),
        sha256: str | None = None,
    ) -> None:
        super().__init__(plan, name, Requires(hidden=hidden, abilities=frozenset({"layer_ranges"})), sha256)
        self.target_lm, self.layers = target_lm, layers

    @property
    def target_cells(self) -> int:
        """See ``Proposer``."""
        return self.plan.computed

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return self.plan.facts | {"layers": self.layers, "of_layers": self.target_lm.layers}

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        return room if len(sequence.pending) <= self.target_lm.max_pending else 0

    @abstractmethod
    def root_logits(
        self, sequences: Sequence[SequenceState], pending: Sequence[int], part: Partial, timed: Phase
    ) -> Computed:
        """Return logits after the last pending token of each sequence, ``[B, V]``.

        Args:
            sequences: ``[B]``.
            pending: ``[B]`` how many pending tokens each has.
            part: what the layers computed, sequence by sequence.
        """

    @abstractmethod
    def node_logits(
        self, sequences: Sequence[SequenceState | None], shape: Shape, rows: np.ndarray, part: Partial, timed: Phase
    ) -> Computed:
        """Return logits after nodes whose ancestors are computed, ``[n, V]``.

        Args:
            sequences: ``[B]`` of each tree; None where nothing is drafted.
            shape: the forest; it may have grown since the last call.
            rows: ``[n]`` the nodes.
            part: what the layers computed of them.
        """

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Run the first layers on pending tokens; level by level on the nodes drafted below them."""
        timed = batch.clock.phase("propose_forward")
        active = [sequence if depth else None for sequence, depth in zip(batch.sequences, depths, strict=True)]
        kvs = [None if sequence is None else sequence.kv for sequence in active]
        early = self.target_lm.draft_pass(Route(0, self.layers), logits=self.own_logits)

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
            part = early.extend(kvs, shape, rows, token, timed)
            return self.node_logits(active, shape, rows, part, timed)

        drafting = [sequence for sequence in active if sequence is not None]
        pending = [sequence.pending for sequence in drafting]
        part = early.forward([sequence.kv for sequence in drafting], pending, timed)
        roots = self.root_logits(drafting, [len(tokens) for tokens in pending], part, timed)
        return Forwards(roots, expand, lambda grown: early.finish(grown.draft.token, grown.kept))


class EarlyExit(FirstLayers):
    """Drafts with the first layers of the target, its final norm and its LM head. Arguments as in ``FirstLayers``."""

    own_logits = True

    def __init__(self, target_lm: Runner, layers: int, plan: TreePlan) -> None:
        super().__init__(target_lm, layers, plan, "early_exit")

    @staticmethod
    @checked
    def load(target: Target, layers: Count | None = None, **options: Unpack[TreeOptions]) -> EarlyExit:
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

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> EarlyExit:
        """The same proposer after the toy's first layer. See ``Proposer``."""
        return EarlyExit(target.lm, 1, self.plan.toy(tree))

    def root_logits(
        self, sequences: Sequence[SequenceState], pending: Sequence[int], part: Partial, timed: Phase
    ) -> Computed:
        """See ``FirstLayers``."""
        return _logits(part)

    def node_logits(
        self, sequences: Sequence[SequenceState | None], shape: Shape, rows: np.ndarray, part: Partial, timed: Phase
    ) -> Computed:
        """See ``FirstLayers``."""
        return _logits(part)


def _logits(part: Partial) -> RowLogits:
    assert part.logits is not None
    return RowLogits.of(part.logits)
