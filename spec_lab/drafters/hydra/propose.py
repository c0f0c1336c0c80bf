"""Hydra: sequentially dependent heads draft level by level from one hidden state and the tokens after it.

Source: Hydra (2402.05109). The network is ``drafters.hydra.network``: head i reads a state and i + 1 tokens after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.options import DrafterPath, Filled
from spec_lab.core.reading import Reading
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.core.upload import rows_at, upload
from spec_lab.decode.proposer import Observation, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.features import Features
from spec_lab.drafters.hydra.files import read_hydra
from spec_lab.drafters.hydra.network import HydraHeads
from spec_lab.drafters.reading_options import HydraOptions, read_drafter
from spec_lab.drafters.trimmed import Drafted
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import Forwards, TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.runners.runner import DraftRunner, KVSequence


@dataclass
class HydraState:
    """The state of one sequence.

    Args:
        features: the target's hidden states that are read, at all computed positions.
        kv: of the prefix layer; None without one.
    """

    features: Features
    kv: KVSequence | None = None


class Hydra(TreeProposer):
    """Drafts below every sequence with computed positions; nothing in the first step, when there are none.

    Below m pending tokens the first head is number m - 1: it reads the state of the last computed position and the m
    tokens after it. So the tree has at most K - m + 1 levels, and none below more than K pending tokens.

    Args:
        network: K heads.
        target: whose hidden states they read.
        plan: the trees, and how their tokens are drawn.
        sha256: of the network's weights.

    Raises:
        ValueError: the plan has more levels than there are heads.
    """

    def __init__(self, network: HydraHeads, target: Target, plan: TreePlan, sha256: str | None = "") -> None:
        if plan.depth > len(network):
            option = "proposer.depth or proposer.tree" if plan.budget is None else "proposer.max_depth"
            raise ValueError(
                f"{option} asks for {plan.depth} levels, but each is drafted by a head of its own, and there are only "
                f"{len(network)} Hydra heads: choose at most {len(network)} levels"
            )
        requires = Requires(hidden=network.settings.taps, every_position=network.prefix is not None)
        super().__init__(plan, "hydra", requires, sha256)
        self.network, self.context = network, target.context
        self.lm: FeatureLM | None = None
        if network.prefix is not None:
            self.lm = FeatureLM(network.prefix, 1, target.lm.device, target.lm.dtype)

    @staticmethod
    def load(
        target: Target,
        path: Annotated[str, DrafterPath("Hydra heads")],
        revision: Filled | None = None,
        tokens: Drafted | None = None,
        **options: Unpack[HydraOptions],
    ) -> Hydra:
        """Read heads and choose their trees.

        Args:
            target: whose hidden states the heads read.
            path: folder or hub name of Hydra heads, in safetensors.
            revision: branch, tag or commit of a hub name; None: main.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            options: of the trees, and how the files are read.

        Raises:
            ValueError: a wrong option; heads for another target; a malformed file.
            OSError: a file is missing.
        """
        read = partial(read_hydra, target=target)
        heads, plan, sha256 = read_drafter(read, target, path, revision, tokens, options, HydraOptions)
        return Hydra(heads, target, plan, sha256)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Hydra:
        """The same proposer with random heads, one more than levels, and another tree. See ``Proposer``."""
        plan = self.plan.toy(tree)
        return Hydra(self.network.toy(target, plan.depth + 1), target, plan, None)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        settings = self.network.settings
        return (
            self.plan.facts
            | self.network.facts
            | {
                "heads": settings.heads,
                "head_arch": settings.arch,
                "shared_lm_head": settings.shared_lm_head,
                "reading": self.reading.facts,
            }
        )

    @property
    def reading(self) -> Reading:
        """See ``Proposer``."""
        return self.network.reading

    def init(self, request: Request) -> HydraState:
        """An empty state."""
        most = min(len(request.tokens) + request.max_new_tokens, self.context)
        return HydraState(Features(), None if self.lm is None else self.lm.open(most))

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the hidden states of all computed positions: after a rewind an earlier one is the last."""
        for observation in observed:
            if observation.hidden is not None:
                state: HydraState = observation.sequence.state
                state.features.add(observation.start, observation.hidden)

    def fork(self, state: HydraState) -> HydraState:
        """A copy that shares what is computed."""
        return HydraState(state.features.copy(), None if state.kv is None else state.kv.fork())

    def rewind(self, state: HydraState, length: int) -> None:
        """Forget the positions from ``length`` on."""
        state.features.rewind(length)
        if state.kv is not None:
            state.kv.truncate(min(len(state.kv), length))

    def close(self, state: HydraState) -> None:
        """Free the KV cache."""
        if state.kv is not None:
            state.kv.close()

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        pending = len(sequence.pending)
        known = pending and sequence.state.features.last(len(sequence.kv)) is not None
        return min(room, len(self.network) + 1 - pending) if known else 0

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Compute the first head of each tree; one call of a head per level follows."""
        timed = batch.clock.phase("propose_forward")
        active, read = list[SequenceState](), dict[int, HeadInput]()
        for tree, (sequence, depth) in enumerate(zip(batch.sequences, depths, strict=True)):
            if depth:
                read[tree] = HeadInput(len(active), sequence.pending)
                active.append(sequence)
        paths = HeadRows(self.network, self._states(active, timed), read, timed)
        return Forwards(paths.compute(list(read)), paths.expand)

    def _states(self, sequences: Sequence[SequenceState], timed: Phase) -> Tensor:  # [A, H]
        """The state of each sequence's last computed position, which all heads read."""
        if self.lm is None:
            return torch.cat([sequence.state.features.parts[-1][-1:] for sequence in sequences])
        kvs = [sequence.state.kv for sequence in sequences]
        for sequence, kv in zip(sequences, kvs, strict=True):  # after a rewind, the last position is read again
            kv.truncate(min(len(kv), sequence.state.features.end - 1))
        new = [sequence.state.features.since(len(kv)) for sequence, kv in zip(sequences, kvs, strict=True)]
        last: Tensor = self.lm.forward(kvs, [len(states) for states in new], torch.cat(new), timed)
        return last


class HeadInput(NamedTuple):
    """Inputs of a head at one row of a forest: a state, and the tokens after it.

    Args:
        state: the state's number.
        tokens: the pending tokens, and those of the nodes from the root to the row.
    """

    state: int
    tokens: list[int]


class HeadRows:
    """Computes rows of a growing forest.

    Args:
        states: ``[A, H]`` of the trees with nodes.
        read: what heads read at the roots of these trees; rows that are computed are added.
    """

    def __init__(self, network: HydraHeads, states: Tensor, read: dict[int, HeadInput], timed: Phase) -> None:
        self.network, self.states, self.read, self.timed = network, states, read, timed

    def expand(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
        """Compute nodes. See ``expansion.Expand``."""
        for row, parent, drawn in zip(
            rows.tolist(), shape.parent[rows - shape.roots].tolist(), token.tolist(), strict=True
        ):
            above = self.read[parent]
            self.read[row] = HeadInput(above.state, [*above.tokens, drawn])
        return self.compute(rows.tolist())

    def compute(self, rows: Sequence[int]) -> RowLogits:
        """Compute rows, all that the same head reads together."""
        paths = [self.read[row] for row in rows]
        parts, order = [], list[int]()
        with self.timed:
            for length in sorted({len(path.tokens) for path in paths}):
                some = [number for number, path in enumerate(paths) if len(path.tokens) == length]
                token, which = upload(
                    self.states.device,
                    np.array([paths[number].tokens for number in some], dtype=np.int64),
                    np.array([paths[number].state for number in some], dtype=np.int64),
                )
                parts.append(self.network(self.network.inputs(self.states.index_select(0, which), token)))
                order += some
            if len(parts) == 1:
                return RowLogits.of(parts[0])
            return RowLogits.of(rows_at(torch.cat(parts), np.argsort(order).tolist()))
