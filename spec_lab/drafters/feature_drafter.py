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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Shape
from spec_lab.core.inference import inference
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.drafters.features import Features, FeatureState, observe_features
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.runners.runner import DraftRunner, KVSequence


class FeatureNetwork(Protocol):
    """Layers that read features. F is the width of a feature, X of an input, Y of an output."""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Numbers of the target's hidden states that ``features`` reads, as in ``runner.Capabilities``."""
        ...

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        ...

    def features(self, hidden: Tensor) -> Tensor:
        """Hidden states of the target ``[n, k * H]`` -> features ``[n, F]``."""
        ...

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        """Tokens ``[n]`` and the features one position before them ``[n, F]`` -> inputs ``[n, X]``."""
        ...

    def __call__(self, x: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Inputs ``[1, N, X]`` at positions ``[1, N]`` -> outputs ``[1, N, Y]``."""
        ...

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, Y]`` -> the features ``[n, F]`` to feed back, and logits ``[n, V]``."""
        ...

    def toy(self, target: Target) -> FeatureNetwork:
        """The same kind of network with random weights, for another target."""
        ...


class FeatureDrafter(TreeProposer):
    """Drafts below every sequence with one pending token and computed positions before it; nothing elsewhere.

    So nothing is drafted in the first step of a request, whose prompt is not computed yet, nor where forced tokens are
    pending: the features of pending positions are not known.

    Args:
        network: its layers.
        target: whose hidden states it reads.
        plan: the trees, and how their tokens are drawn.
        name: as in records.
        sha256: of the network's weights.
        dtype: of the network; None: the target's.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        target: Target,
        plan: TreePlan,
        name: str,
        sha256: str | None = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(plan, name, Requires(hidden=network.hidden), sha256)
        self.network, self.context = network, target.context
        self.lm = FeatureLM(network, network.layers, target.lm.device, dtype or target.lm.dtype)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> FeatureDrafter:
        """The same proposer with a random network in the toy's dtype, and another tree. See ``Proposer``."""
        return FeatureDrafter(self.network.toy(target), target, self.plan.toy(tree), self.name, None)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        own = {"hidden_states": list(self.network.hidden), "dtype": str(self.lm.dtype).removeprefix("torch.")}
        return self.plan.facts | own

    def init(self, request: Request) -> FeatureState:
        """An empty state."""
        positions = min(len(request.tokens) + request.max_new_tokens, self.context)
        return FeatureState(self.lm.open(positions + self.plan.computed), Features())

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the features of every computed position."""
        observe_features(observed, lambda hidden: self.network.features(hidden.to(self.lm.dtype)))

    def fork(self, state: FeatureState) -> FeatureState:
        """Share the stable part, drop the tentative part."""
        return state.fork()

    def rewind(self, state: FeatureState, length: int) -> None:
        """Forget from ``length`` on, and the input before it, which read the token there."""
        state.rewind(length, max(length - 1, 0))

    def close(self, state: FeatureState) -> None:
        """Free the KV cache."""
        state.close()

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Append the newly computed positions, and draft below the pending token."""
        timed = batch.clock.phase("propose_forward")
        depths, kvs, lengths = [], list[KVSequence | None](), []
        tokens, known = list[int](), list[Tensor]()
        for room, one in zip(batch.room(), batch.sequences, strict=True):
            state, computed = one.state, len(one.kv)
            begin = len(state.kv)
            ready = begin < computed == state.features.end and len(one.tokens) == computed + 1
            depths.append(max(0, min(room, self.plan.depth)) if ready else 0)
            kvs.append(state.kv if depths[-1] else None)
            if depths[-1]:
                lengths.append(computed - begin)
                tokens += one.tokens[begin + 1 :]
                known.append(state.features.since(begin))
        active = [kv for kv in kvs if kv is not None]
        feature = torch.empty(0)  # [n, F] fed back by the rows computed so far, which ``place`` finds
        place: dict[int, int] = {}

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            nonlocal feature
            nodes = rows - shape.roots
            above = torch.tensor([place[row] for row in shape.parent[nodes].tolist()], device=self.lm.device)
            given = torch.from_numpy(token[nodes]).to(self.lm.device)
            x = self.network.inputs(given, feature.index_select(0, above))
            found, logits = self.network.outputs(self.lm.extend(kvs, shape, rows, x, timed))
            place.update(zip(rows.tolist(), range(len(feature), len(feature) + len(rows)), strict=True))
            feature = torch.cat([feature, found])
            return RowLogits.of(logits)

        roots: RowLogits | None = None
        if active:
            given = known[0] if len(known) == 1 else torch.cat(known)
            x = self.network.inputs(torch.tensor(tokens, device=self.lm.device), given)
            feature, logits = self.network.outputs(self.lm.forward(active, lengths, x, timed))
            place = {tree: number for number, tree in enumerate(t for t, depth in enumerate(depths) if depth)}
            roots = RowLogits.of(logits)
        return self.plan.draft(batch, depths, roots, expand).draft
