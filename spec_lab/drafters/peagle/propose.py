"""P-EAGLE: an EAGLE-3 head that drafts several levels by one forward, by reading mask rows (2602.01469).

The network is ``peagle.network``. Every row of a tree states the q of its level, so sampled drafts are verified
exactly; a static tree's children are the likeliest or sampled tokens of each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, Unpack

import numpy as np
import torch

from spec_lab.core.options import DrafterPath, Filled, OneOf, checked
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch
from spec_lab.drafters.feature_drafter import ShiftedDrafter
from spec_lab.drafters.peagle.files import read_peagle
from spec_lab.drafters.peagle.network import PEagle
from spec_lab.drafters.reading_options import EagleOptions, read_drafter
from spec_lab.drafters.trimmed import Drafted
from spec_lab.models.placement import DTYPES
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import Forwards
from spec_lab.propose.trees import Choices
from spec_lab.runners.block_lm import BlockLM
from spec_lab.runners.runner import DraftRunner


class PEagleDrafter(ShiftedDrafter):
    """Drafts all levels by one forward.

    Its KV cache holds the inputs of all computed positions; the mask rows are dropped in the next step.

    Args:
        network: its layers.
        target: whose hidden states it reads.
        plan: the trees, and how their tokens are drawn.
        sha256: of the network's weights.
        dtype: of the network; None: the target's.
    """

    network: PEagle
    lm: BlockLM

    def __init__(
        self,
        network: PEagle,
        target: Target,
        plan: TreePlan,
        sha256: str | None = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(plan, "peagle", Requires(hidden=network.hidden), sha256)
        self.network, self.context, self.reserve = network, target.context, plan.depth
        device, dtype = target.lm.device, dtype or target.lm.dtype
        self.lm = BlockLM(network.rows, network.layers, device, dtype, kinds=network.kinds, skip=network.skip)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return super().facts | {"layers": self.network.layers}

    @staticmethod
    @checked
    def load(
        target: Target,
        path: Annotated[str, DrafterPath("a P-EAGLE head", ("target_hidden_size", "hidden_size"), converts=False)],
        revision: Filled | None = None,
        dtype: Annotated[str, OneOf(DTYPES)] | None = None,
        tokens: Drafted | None = None,
        **options: Unpack[EagleOptions],
    ) -> PEagleDrafter:
        """Read a P-EAGLE head and choose its trees.

        Args:
            target: whose hidden states the head reads.
            path: folder or hub name of a P-EAGLE head, in safetensors.
            revision: branch, tag or commit of a hub name; None: main.
            dtype: of the head: bfloat16, float16, float32, float64; None: the target's.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            options: of the trees, and how the files are read.

        Raises:
            ValueError: a wrong option; a head for another target; a malformed file.
            OSError: a file is missing.
        """
        own_dtype = None if dtype is None else DTYPES[dtype]
        read = partial(read_peagle, target=target, dtype=own_dtype)
        network, plan, sha256 = read_drafter(read, target, path, revision, tokens, options, EagleOptions)
        return PEagleDrafter(network, target, plan, sha256, own_dtype)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> PEagleDrafter:
        """The same proposer with a random network and another tree. See ``Proposer``."""
        return PEagleDrafter(self.network.toy(target), target, self.plan.toy(tree), None)

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Append the newly computed positions, and compute all levels by one forward."""
        active = [sequence for sequence, depth in zip(batch.sequences, depths, strict=True) if depth]
        number = np.cumsum(np.array(depths) > 0) - 1  # of each tree among the active ones
        device, levels, kvs = self.lm.device, max(depths), [sequence.state.kv for sequence in active]
        tokens = [sequence.tokens[len(kv) + 1 :] for sequence, kv in zip(active, kvs, strict=True)]
        known = [sequence.state.features.since(len(kv)) for sequence, kv in zip(active, kvs, strict=True)]
        x = self.network.inputs(upload_tokens(device, list(chain.from_iterable(tokens))), torch.cat(known))
        masks = self.network.masks(max(1, levels - 1)).expand(len(active), -1, -1)
        timed = batch.clock.phase("propose_forward")
        outputs = self.lm.forward(kvs, x.split([len(new) for new in tokens]), masks, timed, before=1)
        _, drafted = self.network.outputs(outputs[:, :levels].flatten(0, 1))
        logits = self.network.token_logits(drafted)  # [A * levels, V]

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            (level_row,) = upload(device, number[shape.root[rows]] * levels + shape.depth[rows])
            return RowLogits.of(logits.index_select(0, level_row))

        return Forwards(RowLogits.of(logits[::levels]), expand)
