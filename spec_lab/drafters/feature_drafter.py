"""A drafter whose layers read features of the target and the tokens after them, and feed on their own outputs.

It is the common part of EAGLE (2401.15077, 2503.01840) and of multi-token prediction (2412.19437): life cycle, KV cache
and trees. What differs, the network, is passed in.

Input j combines the target's features at position j with the token at position j + 1. The *stable* part of the KV cache
holds one input for each computed position, so every committed position is read exactly once, when the token after it is
known. In each step the newly computed positions are appended; the output at the last of them gives the distribution
after the pending token. Below it, the network's own outputs stand in for the target's features: those inputs are the
*tentative* part, and are dropped at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.draft_layers import FeatureNetwork
from spec_lab.drafters.features import FeatureState, TapDrafter
from spec_lab.models.target import Target
from spec_lab.propose.device_levels import DeviceLevels
from spec_lab.propose.expansion import Computed
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import Forwards
from spec_lab.propose.trees import Choices
from spec_lab.runners.feature_lm import FeatureLM, last_rows
from spec_lab.runners.runner import DraftRunner, KVSequence


class ShiftedDrafter(TapDrafter):
    """A drafter whose input j combines the features at position j with the token at position j + 1.

    It drafts below every sequence with one pending token and features of all computed positions, new ones among them.
    So nothing is drafted in the first step of a request, whose prompt is not computed yet, nor where forced tokens are
    pending: the features of pending positions are not known.
    """

    def rewind(self, state: FeatureState, length: int) -> None:
        """Forget from ``length`` on, and the input before it, which read the token there."""
        state.rewind(length, max(length - 1, 0))

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        computed, state = len(sequence.kv), sequence.state
        drafts = len(state.kv) < computed == state.features.end and len(sequence.tokens) == computed + 1
        return room if drafts else 0


class FeatureDrafter(ShiftedDrafter):
    """Drafts level by level: below a node its network's own output stands in for the target's features.

    Args:
        network: its layers.
        target: whose hidden states it reads.
        plan: the trees, and how their tokens are drawn.
        name: as in records.
        sha256: of the network's weights.
        dtype: of the network; None: the target's.
        skip: as in ``FeatureCells``.
    """

    network: FeatureNetwork
    lm: FeatureLM

    def __init__(
        self,
        network: FeatureNetwork,
        target: Target,
        plan: TreePlan,
        name: str,
        sha256: str | None = "",
        dtype: torch.dtype | None = None,
        skip: int = 0,
    ) -> None:
        super().__init__(plan, name, Requires(hidden=network.hidden), sha256)
        self.network, self.context, self.reserve = network, target.context, plan.computed
        own_dtype = dtype or target.lm.dtype
        self.lm = FeatureLM(network, network.layers, target.lm.device, own_dtype, kinds=network.kinds, skip=skip)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> FeatureDrafter:
        """The same proposer with a random network in the toy's dtype, and another tree. See ``Proposer``."""
        toy = self.network.toy(target)
        return FeatureDrafter(toy, target, self.plan.toy(tree), self.name, None, skip=self.lm.skip)

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Append the newly computed positions."""
        timed, device = batch.clock.phase("propose_forward"), self.lm.device
        kvs, lengths, tokens, known = self._new(batch, depths)
        drafted = [tree for tree, depth in enumerate(depths) if depth]
        number = dict(zip(drafted, range(len(drafted)), strict=True))  # of each computed row among those of ``feature``
        (token,) = upload(device, tokens)
        x = self.network.inputs(token, known)
        active = [kv for kv in kvs if kv is not None]
        outputs = self.network.outputs
        feature, logits = self.lm.forward(active, lengths, x, timed, outputs)  # [n, F], to feed back

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
            nonlocal feature
            above = np.array([number[row] for row in shape.parent[rows - shape.roots].tolist()])
            drawn, above_rows = upload(device, token, above)
            x = self.network.inputs(drawn, feature.index_select(0, above_rows))
            features, logits = self.lm.extend(kvs, shape, rows, x, timed, outputs)
            number.update(zip(rows.tolist(), range(len(feature), len(feature) + len(rows)), strict=True))
            feature = torch.cat([feature, features])
            return self.network.computed(logits)

        return Forwards(self.network.computed(logits), expand)

    def draft_ahead(self, batch: Batch, depths: Sequence[int], levels: DeviceLevels) -> Draft | None:
        """See ``TreeProposer``."""
        timed = batch.clock.phase("propose_forward")
        kvs, lengths, tokens, known = self._new(batch, depths)
        planned = self.lm.levels_ahead(kvs, lengths, levels.shape, [tokens, *levels.arrays])
        if planned is None:
            return None
        token, *given = planned.given
        outputs = self.network.outputs
        feature, logits = self.lm.run_level(
            planned.first, self.network.inputs(token, known), timed, lambda y: outputs(last_rows(y, planned.first))
        )

        def compute(level: int, token: Tensor, above: Tensor) -> Tensor:
            nonlocal feature
            x = self.network.inputs(token, feature.index_select(0, above))
            feature, logits = self.lm.run_level(planned.levels[level - 1], x, timed, outputs)
            return self.network.computed(logits).logits

        return levels.grow(self.network.computed(logits).logits, compute, given, None)

    def _new(
        self, batch: Batch, depths: Sequence[int]
    ) -> tuple[list[KVSequence | None], list[int], np.ndarray, Tensor]:
        """The newly computed positions of the sequences that are drafted for.

        Returns:
            ``[B]`` KV caches, None where nothing is drafted; how many positions each of the others gets, the tokens
            after them ``[n]``, and their features ``[n, F]``.
        """
        kvs: list[KVSequence | None] = [None] * len(depths)
        lengths, tokens, known = list[int](), list[int](), list[Tensor]()
        for tree, (sequence, depth) in enumerate(zip(batch.sequences, depths, strict=True)):
            if depth:
                kv = kvs[tree] = sequence.state.kv
                lengths.append(len(sequence.kv) - len(kv))
                tokens += sequence.tokens[len(kv) + 1 :]
                known.append(sequence.state.features.since(len(kv)))
        return kvs, lengths, np.array(tokens, dtype=np.int64), known[0] if len(known) == 1 else torch.cat(known)
