"""Draft logits from exit states by an adapter with a KV cache of its own (Kangaroo, 2404.18911).

An *exit state* is the target's hidden state after its first layers. The adapter's input at position j is the exit
state at j, and its output predicts the token at j + 1. The *stable* part of the KV cache holds one input for each
computed and each pending position; inputs of drafted nodes are the *tentative* part, which the next call drops, since
accepted nodes are observed like every computed position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Shape
from spec_lab.core.inference import inference
from spec_lab.engine.feature_lm import FeatureLM
from spec_lab.engine.proposer import Observation
from spec_lab.propose.features import Features, FeatureState, observe_features


class AdapterNetwork(Protocol):
    """Attention layers between exit states and the target's LM head."""

    @property
    def layers(self) -> int:
        """The number of attention layers."""
        ...

    def __call__(self, x: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Exit states ``[1, N, H]`` at positions ``[1, N]`` -> normed states ``[1, N, H]``."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Normed states ``[n, H]`` -> logits ``[n, V]``."""
        ...


class ExitAdapter:
    """Runs an adapter over the exit states of several sequences and of the nodes drafted below them.

    Args:
        network: the adapter.
        device: of the adapter.
        dtype: of the adapter.
    """

    def __init__(self, network: AdapterNetwork, device: torch.device, dtype: torch.dtype) -> None:
        self.network = network
        self.lm = FeatureLM(network, network.layers, device, dtype)

    def open(self, positions: int) -> FeatureState:
        """An empty state with room for so many positions. ``FeatureState`` forks and closes it."""
        return FeatureState(self.lm.open(positions), Features())

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the exit states of computed positions (``Observation.hidden``) until ``follow`` reads them."""
        observe_features(observed, lambda hidden: hidden.to(self.lm.dtype))

    def rewind(self, state: FeatureState, length: int) -> None:
        """Forget from position ``length`` on."""
        state.features.rewind(length)
        state.kv.truncate(min(len(state.kv), length))

    @inference
    def follow(self, states: Sequence[FeatureState], pending: Sequence[Tensor], timed: Phase) -> Tensor:
        """Append what was observed since the last call, and the pending positions after it; drop tentative nodes.

        Args:
            states: ``[B]`` of sequences whose computed positions were all observed.
            pending: ``[B]`` the exit states ``[m, H]`` of each one's pending tokens, at least one.
            timed: records the calls of the adapter.

        Returns:
            The logits ``[B, V]`` at each sequence's last pending token.
        """
        inputs, lengths = list[Tensor](), list[int]()
        for state, exits in zip(states, pending, strict=True):
            begin, known = len(state.kv), state.features.end
            assert begin <= known, f"the KV cache of the adapter has {begin} positions, but only {known} are computed"
            if begin < known:
                inputs.append(state.features.since(begin))
            inputs.append(exits.to(self.lm.dtype))
            lengths.append(known - begin + len(exits))
            state.features.parts.clear()
        rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        return self.network.logits(self.lm.forward([state.kv for state in states], lengths, rows, timed))

    @inference
    def extend(
        self, states: Sequence[FeatureState | None], shape: Shape, rows: np.ndarray, exits: Tensor, timed: Phase
    ) -> Tensor:
        """Compute nodes whose ancestors are computed already.

        Args:
            states: of all trees, None for those in which nothing is drafted.
            shape: the forest so far.
            rows: ``[n]`` of the forest.
            exits: ``[n, H]`` their exit states.
            timed: records the calls of the adapter.

        Returns:
            Their logits ``[n, V]``.
        """
        kvs = [None if state is None else state.kv for state in states]
        return self.network.logits(self.lm.extend(kvs, shape, rows, exits.to(self.lm.dtype), timed))
