"""A block drafter: a few layers fill in a block of mask tokens, and read the target's features in every layer.

Sources: DFlash (2602.06036) and, with heads, DFlash2, DSpark (2607.05147) and Domino (2605.29707). The network is
``block.network``. Without a head (``block.heads``) a level's distribution does not depend on what is drafted above it,
and along a path the tokens are independent; with one it depends on the tokens above. Either way every row states the q
its children are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import DrafterPath, Filled, checked
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.block.files import read_block
from spec_lab.drafters.block.network import BlockNetwork
from spec_lab.drafters.features import TapDrafter
from spec_lab.drafters.reading_options import BlockOptions, read_drafter
from spec_lab.drafters.trimmed import Drafted
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import Forwards
from spec_lab.propose.trees import Choices
from spec_lab.runners.block_lm import BlockLM
from spec_lab.runners.runner import DraftRunner


class BlockDrafter(TapDrafter):
    """Drafts below every sequence with one pending token and computed positions before it; nothing elsewhere.

    So nothing is drafted in the first step of a request, whose prompt is not computed yet, nor where forced tokens are
    pending: a block begins with one token whose predecessors have features.

    Args:
        network: its layers.
        target: whose hidden states it reads.
        plan: the trees, and how their tokens are drawn.
        sha256: of the network's weights.

    Raises:
        ValueError: trees deeper than a block.
    """

    network: BlockNetwork
    lm: BlockLM

    def __init__(self, network: BlockNetwork, target: Target, plan: TreePlan, sha256: str | None = "") -> None:
        if plan.depth > network.levels:
            raise ValueError(
                f"the block drafter drafts {network.levels} tokens at a time, not {plan.depth}: set a smaller "
                "proposer.depth or proposer.max_depth, or a tree that is not as deep"
            )
        super().__init__(plan, "block", Requires(hidden=network.hidden), sha256)
        self.network, self.context, self.reserve = network, target.context, network.settings.block_size
        lm = target.lm
        self.lm = BlockLM(network, network.layers, lm.device, lm.dtype, kinds=network.kinds, skip=network.skip)

    @staticmethod
    @checked
    def load(
        target: Target,
        path: Annotated[str, DrafterPath("a block drafter", ("target_hidden_size", "hidden_size"), converts=False)],
        revision: Filled | None = None,
        tokens: Drafted | None = None,
        **options: Unpack[BlockOptions],
    ) -> BlockDrafter:
        """Read a block drafter and choose its trees.

        Args:
            target: whose hidden states it reads.
            path: folder or hub name of a DFlash, DFlash2, DSpark or Domino drafter, in safetensors.
            revision: branch, tag or commit of a hub name; None: main.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            options: of the trees, and how the files are read.

        Raises:
            ValueError: a wrong option; trees deeper than a block; a drafter for another target; a malformed file.
            OSError: a file is missing.
        """
        read = partial(read_block, target=target)
        network, plan, sha256 = read_drafter(read, target, path, revision, tokens, options, BlockOptions)
        return BlockDrafter(network, target, plan, sha256)

    @property
    def predicts(self) -> bool:
        """Whether it has a confidence head."""
        return self.network.confidence_head is not None

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> BlockDrafter:
        """The same proposer with a random network and another tree. See ``Proposer``."""
        plan = self.plan.toy(tree)
        return BlockDrafter(self.network.toy(target, plan.depth), target, plan, None)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        settings = self.network.settings
        head = None if settings.head is None else settings.head.kind
        return super().facts | {"layers": settings.layers, "block_size": settings.block_size, "head": head}

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        computed = len(sequence.kv)
        ready = 0 < computed == sequence.state.features.end and len(sequence.tokens) == computed + 1
        return room if ready else 0

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Append the features of newly computed positions, and compute all levels by one forward."""
        active = [sequence for sequence, depth in zip(batch.sequences, depths, strict=True) if depth]
        number = np.cumsum(np.array(depths) > 0) - 1  # of each tree among the active ones
        network, device, levels = self.network, self.lm.device, max(depths)
        kvs = [sequence.state.kv for sequence in active]
        features = [sequence.state.features.since(len(kv)) for sequence, kv in zip(active, kvs, strict=True)]
        pending = upload_tokens(batch.device, [sequence.tokens[-1] for sequence in active])
        outputs = self.lm.forward(kvs, features, network.block(pending), batch.clock.phase("propose_forward"))
        block = network.rows(outputs, pending, levels)
        first = torch.arange(0, levels * len(active), levels, device=device)
        logits, states = network.drafted(block, first, pending, torch.zeros_like(pending), block.state)
        carries = bool(states.shape[1])  # the head's states, from parent to child
        known = dict(zip(np.flatnonzero(depths).tolist(), range(len(active)), strict=True))  # rows among ``states``

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            nonlocal states
            nodes, level = rows - shape.roots, shape.depth[rows]
            parents = np.array([known[row] for row in shape.parent[nodes].tolist()] if carries else [], dtype=np.int64)
            block_row, above, depth, parent = upload(
                device, number[shape.root[rows]] * levels + level, token, level, parents
            )
            state = states.index_select(0, parent) if carries else states
            row_logits, below = network.drafted(block, block_row, above, depth, state)
            if carries:
                known.update(zip(rows.tolist(), range(len(states), len(states) + len(rows)), strict=True))
                states = torch.cat([states, below])
            return RowLogits.of(row_logits)

        def predict(draft: Draft) -> Tensor:
            shape, roots = draft.shape, torch.zeros(draft.shape.roots, dtype=torch.long, device=device)
            parent = shape.parent
            block_row, above, drafted = upload(
                device, number[shape.root[parent]] * levels + shape.depth[parent], parent, np.flatnonzero(depths)
            )
            token = torch.cat([roots.index_copy_(0, drafted, pending), draft.token]).index_select(0, above)
            return network.confidence(block.hidden.index_select(0, block_row), token)

        return Forwards(RowLogits.of(logits), expand, predict=predict if self.predicts else None)
