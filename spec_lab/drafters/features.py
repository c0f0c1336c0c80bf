"""The target's hidden states and the drafter's own KV cache, as a proposer keeps them for one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.inference import inference
from spec_lab.core.reading import Reading
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation
from spec_lab.drafters.draft_layers import TapNetwork
from spec_lab.propose.tree_proposer import TreeProposer
from spec_lab.runners.block_lm import BlockLM
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.runners.runner import KVSequence


@inference
def observe_features(observed: Sequence[Observation], read: Callable[[Tensor], Tensor]) -> None:
    """Add what was observed to the ``features`` of each sequence's state.

    Args:
        observed: by the proposer's ``observe``.
        read: hidden states ``[n, k * H]`` of the target -> features ``[n, F]``.
    """
    some = [
        (observation, observation.hidden)
        for observation in observed
        if observation.hidden is not None and len(observation.hidden)
    ]
    if not some:
        return
    if len(some) == 1:
        parts = [read(some[0][1])]
    else:  # memory of its own for each part: a view would keep the features of the whole batch alive
        together = read(torch.cat([hidden for _, hidden in some]))
        parts = [part.clone() for part in together.split([len(hidden) for _, hidden in some])]
    for (observation, _), part in zip(some, parts, strict=True):
        features: Features = observation.sequence.state.features
        features.add(observation.start, part)


@dataclass(eq=False)
class Features:
    """Hidden states of consecutive computed positions, up to ``end``.

    Args:
        parts: one after another, each ``[n, H]``; never written to.
        end: the position after the last of them.
    """

    parts: list[Tensor] = field(default_factory=list)
    end: int = 0

    @property
    def start(self) -> int:
        """The first position that is known."""
        return self.end - sum(map(len, self.parts))

    def add(self, start: int, hidden: Tensor) -> None:
        """Add the states ``[n, H]`` of the positions from ``start`` on, which are kept as they are.

        Earlier ones that do not join are dropped.
        """
        self.rewind(start)
        if self.end < start:
            self.parts.clear()
        if count := hidden.shape[0]:
            self.parts.append(hidden)
            self.end = start + count

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        while self.end > length and self.parts:
            last = self.parts.pop()
            self.end -= len(last)
            if self.end < length:
                self.parts.append(last[: length - self.end])
                self.end = length
        self.end = min(self.end, length)

    def last(self, length: int) -> Tensor | None:
        """The state ``[1, H]`` of the last of ``length`` computed positions; None where it was not observed."""
        return self.parts[-1][-1:] if self.parts and self.end == length else None

    def since(self, position: int) -> Tensor:
        """The states ``[n, H]`` of all positions from ``position`` on, which must be known."""
        first, start = len(self.parts) - 1, self.end - len(self.parts[-1])
        while start > position:
            assert first > 0, f"the states from position {position} on are known from {start} on only"
            first -= 1
            start -= len(self.parts[first])
        part = self.parts[first] if first == len(self.parts) - 1 else torch.cat(self.parts[first:])
        return part[position - start :]

    def copy(self) -> Features:
        """An independent copy."""
        return Features(list(self.parts), self.end)


@dataclass
class FeatureState:
    """The state of one sequence for a drafter with layers that read features.

    Args:
        kv: of the drafter's layers.
        features: of all computed positions.
    """

    kv: KVSequence
    features: Features

    def fork(self) -> FeatureState:
        """An independent copy that shares the computed part of the KV cache."""
        return FeatureState(self.kv.fork(), self.features.copy())

    def rewind(self, length: int, inputs: int) -> None:
        """Forget the features from position ``length`` on, and what the KV cache holds after ``inputs`` positions."""
        self.features.rewind(length)
        self.kv.truncate(min(len(self.kv), inputs))

    def close(self) -> None:
        """Free the KV cache."""
        self.kv.close()


class FeatureReader(TreeProposer):
    """A drafter with layers of its own that read features of the target: the life cycle of their states.

    Subclasses set ``lm``, which runs the layers; ``context``, most positions of a sequence; and ``reserve``, how many
    more of a sequence's positions the KV cache holds while it drafts.
    """

    lm: FeatureLM | BlockLM
    context: int
    reserve: int

    def init(self, request: Request) -> FeatureState:
        """An empty state."""
        positions = min(len(request.tokens) + request.max_new_tokens, self.context)
        return FeatureState(self.lm.open(positions + self.reserve), Features())

    def fork(self, state: FeatureState) -> FeatureState:
        """Share the stable part, drop the tentative part."""
        return state.fork()

    def rewind(self, state: FeatureState, length: int) -> None:
        """Forget the positions from ``length`` on."""
        state.rewind(length, length)

    def close(self, state: FeatureState) -> None:
        """Free the KV cache."""
        state.close()


class TapDrafter(FeatureReader):
    """A drafter whose network computes its features from hidden states of the target. Subclasses set ``network``."""

    network: TapNetwork

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        read = {"hidden_states": list(self.network.hidden), "dtype": str(self.lm.dtype).removeprefix("torch.")}
        return self.plan.facts | read | self.network.facts | {"reading": self.reading.facts}

    @property
    def reading(self) -> Reading:
        """See ``Proposer``."""
        return self.network.reading

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the features of every computed position."""
        observe_features(observed, lambda hidden: self.network.features(hidden.to(self.lm.dtype)))
