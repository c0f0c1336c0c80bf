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
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Shape
from spec_lab.core.inference import inference
from spec_lab.core.options import whole
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation
from spec_lab.decode.sequence import SequenceState
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.features import Features, FeatureState, observe_features
from spec_lab.drafters.kangaroo.files import read_kangaroo
from spec_lab.drafters.kangaroo.network import Kangaroo
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.layer_checks import check_exit, with_layer_ranges
from spec_lab.models.packed import pack
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.runners.feature_lm import FeatureLM


class KangarooHead:
    """Draft logits from exit states, by an adapter with a KV cache of its own. An ``early_exit.ExitHead``.

    Args:
        network: the adapter, bound to the target.
        target: whose exit states it reads.
        nodes: most nodes below one root that are computed.
        sha256: of the adapter's weights; None for random ones.
    """

    name = "kangaroo"

    def __init__(self, network: Kangaroo, target: Target, nodes: int, sha256: str | None = "") -> None:
        self.network, self.computed, self.context, self.sha256 = network, nodes, target.context, sha256
        self.hidden = (network.settings.exit_layer,)
        self.lm = FeatureLM(network, network.layers, target.lm.device, target.lm.dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        return {"adapter_layers": self.network.layers}

    def toy(self, target: Target) -> KangarooHead:
        """An adapter with random weights after the first layer of a toy."""
        return KangarooHead(self.network.toy(target), target, self.computed, None)

    def init(self, request: Request) -> FeatureState:
        """An empty state."""
        positions = min(len(request.tokens) + request.max_new_tokens, self.context)
        return FeatureState(self.lm.open(positions + self.computed), Features())

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the exit states of computed positions until ``roots`` reads them."""
        observe_features(observed, lambda hidden: hidden.to(self.lm.dtype))

    def fork(self, state: FeatureState) -> FeatureState:
        """Share the stable part, drop the tentative part."""
        return state.fork()

    def rewind(self, state: FeatureState, length: int) -> None:
        """Forget from position ``length`` on."""
        state.rewind(length, length)

    def close(self, state: FeatureState) -> None:
        """Free the KV cache."""
        state.close()

    def ready(self, sequence: SequenceState) -> bool:
        """Whether the exit states of all computed positions are known, as they are where none is computed."""
        return bool(sequence.state.features.end == len(sequence.kv))

    @inference
    def roots(
        self, sequences: Sequence[SequenceState], pending: Sequence[int], exits: Tensor, timed: Phase
    ) -> RowLogits:
        """Append what was observed since the last step, and the pending positions; drop tentative nodes."""
        inputs, lengths = list[Tensor](), list[int]()
        for one, own in zip(sequences, exits.to(self.lm.dtype).split(list(pending)), strict=True):
            state: FeatureState = one.state
            begin, known = len(state.kv), state.features.end
            if begin < known:
                inputs.append(state.features.since(begin))
            inputs.append(own)
            lengths.append(known - begin + len(own))
            state.features.parts.clear()  # the KV cache has them now
        rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        kvs = [one.state.kv for one in sequences]
        return RowLogits.of(self.network.logits(self.lm.forward(kvs, lengths, rows, timed)))

    @inference
    def nodes(
        self, sequences: Sequence[SequenceState | None], shape: Shape, rows: np.ndarray, exits: Tensor, timed: Phase
    ) -> RowLogits:
        """Compute nodes, which are held until the next step."""
        kvs = [None if one is None else one.state.kv for one in sequences]
        return RowLogits.of(self.network.logits(self.lm.extend(kvs, shape, rows, exits.to(self.lm.dtype), timed)))


def load(target: Target, path: str, exit_layer: int | None = None, **options: Unpack[TreeOptions]) -> EarlyExit:
    """Read an adapter and choose its trees.

    Args:
        target: whose first layers draft.
        path: folder of an adapter, in safetensors.
        exit_layer: how many of the target's layers draft; None: the adapter's config states it.
        options: of the trees.

    Raises:
        ValueError: a wrong option; an adapter for another target; a malformed file.
        Unsupported: a target that does not run ranges of layers, or whose logits are wrong when it does.
        OSError: a file is missing.
    """
    plan = TreePlan.read(**options)
    plan.check_width(target.vocabulary)
    given = None if exit_layer is None else whole("proposer.exit_layer", exit_layer)
    lm = with_layer_ranges(target, "kangaroo")
    network = read_kangaroo(path, target, given)
    layers = network.settings.exit_layer
    check_exit(lm, layers, target.name)
    pack(network)
    return EarlyExit(lm, layers, plan, KangarooHead(network, target, plan.computed, weights_hash(path)))
