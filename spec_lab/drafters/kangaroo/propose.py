"""Kangaroo: the target's first layers and a small adapter after them draft (2404.18911).

An *exit state* is the target's hidden state after its first layers. The adapter's input at position j is the exit
state at j, and its output, which the target's LM head reads, predicts the token at j + 1. The *stable* part of the
adapter's KV cache holds one input for each computed and each pending position; inputs of drafted nodes are the
*tentative* part, which the next step drops, since accepted nodes are observed like every computed position.

``drafters.early_exit`` runs the first layers and lets the target's forward continue from them. Drafting stops where no
token has a draft probability of ``confidence`` (the paper's second early exit); the token that is drawn there stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.inference import inference
from spec_lab.core.options import Count, DrafterPath, Filled, checked
from spec_lab.core.reading import Reading
from spec_lab.core.shape import Shape
from spec_lab.decode.proposer import Observation
from spec_lab.decode.sequence import SequenceState
from spec_lab.drafters.early_exit import FirstLayers
from spec_lab.drafters.features import FeatureReader, FeatureState, observe_features
from spec_lab.drafters.kangaroo.files import read_kangaroo
from spec_lab.drafters.kangaroo.network import Kangaroo
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.hub import drafter_folder
from spec_lab.models.layer_checks import check_exit, with_layer_ranges
from spec_lab.models.packed import pack
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.propose.trees import Choices
from spec_lab.runners.draft_pass import Partial
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.runners.runner import DraftRunner


class KangarooDrafter(FeatureReader, FirstLayers):
    """Drafts with the target's first layers and an adapter, which has a KV cache of its own.

    Args:
        network: the adapter, bound to the target.
        plan: the trees, and how their tokens are drawn.
        sha256: of the adapter's weights; None for random ones.
    """

    def __init__(self, network: Kangaroo, target: Target, plan: TreePlan, sha256: str | None = "") -> None:
        layers = network.settings.exit_layer
        super().__init__(target.lm, layers, plan, "kangaroo", (layers,), sha256)
        self.network, self.context, self.reserve = network, target.context, plan.computed
        self.lm: FeatureLM = FeatureLM(network, network.layers, target.lm.device, target.lm.dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return super().facts | {"adapter_layers": self.network.layers, "reading": self.reading.facts}

    @property
    def reading(self) -> Reading:
        """See ``Proposer``."""
        return self.network.reading

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> KangarooDrafter:
        """The same with a random adapter after the first layer of a toy."""
        return KangarooDrafter(self.network.toy(target), target, self.plan.toy(tree), None)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the exit states of computed positions until ``root_logits`` reads them."""
        observe_features(observed, lambda hidden: hidden.to(self.lm.dtype))

    def levels(self, sequence: SequenceState, room: int) -> int:
        """None where exit states of computed positions are unknown; they are known where no position is computed."""
        return super().levels(sequence, room) if sequence.state.features.end == len(sequence.kv) else 0

    @inference
    def root_logits(
        self, sequences: Sequence[SequenceState], pending: Sequence[int], part: Partial, timed: Phase
    ) -> RowLogits:
        """Append what was observed since the last step, and the pending positions; drop tentative nodes."""
        assert part.exits is not None
        inputs, lengths = list[Tensor](), list[int]()
        for sequence, exits in zip(sequences, part.exits.to(self.lm.dtype).split(list(pending)), strict=True):
            state: FeatureState = sequence.state
            begin, known = len(state.kv), state.features.end
            if begin < known:
                inputs.append(state.features.since(begin))
            inputs.append(exits)
            lengths.append(known - begin + len(exits))
            state.features.parts.clear()  # the KV cache has them now
        rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        kvs = [sequence.state.kv for sequence in sequences]
        return RowLogits.of(self.network.logits(self.lm.forward(kvs, lengths, rows, timed)))

    @inference
    def node_logits(
        self, sequences: Sequence[SequenceState | None], shape: Shape, rows: np.ndarray, part: Partial, timed: Phase
    ) -> RowLogits:
        """Compute nodes, which are held until the next step."""
        assert part.exits is not None
        kvs = [None if sequence is None else sequence.state.kv for sequence in sequences]
        exits = part.exits.to(self.lm.dtype)
        return RowLogits.of(self.network.logits(self.lm.extend(kvs, shape, rows, exits, timed)))


@checked
def load(
    target: Target,
    path: Annotated[str, DrafterPath("an adapter of Kangaroo", ("hidden_size",), ("vocab_size",))],
    revision: Filled | None = None,
    exit_layer: Count | None = None,
    **options: Unpack[TreeOptions],
) -> KangarooDrafter:
    """Read an adapter and choose its trees.

    Args:
        target: whose first layers draft.
        path: folder or hub name of an adapter, in safetensors.
        revision: branch, tag or commit of a hub name; None: main.
        exit_layer: how many of the target's layers draft; None: the adapter's config states it.
        options: of the trees.

    Raises:
        ValueError: a wrong option; an adapter for another target; a malformed file.
        Unsupported: a target that does not run ranges of layers, or whose logits are wrong when it does.
        OSError: a file is missing.
    """
    plan = TreePlan.read(**options)
    plan.check_width(target.vocabulary)
    lm = with_layer_ranges(target, "kangaroo")
    path = drafter_folder(path, revision)
    network = read_kangaroo(path, target, exit_layer)
    check_exit(lm, network.settings.exit_layer, target.name)
    pack(network)
    return KangarooDrafter(network, target, plan, weights_hash(path))
