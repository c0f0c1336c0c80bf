"""The drafter ``my_drafter``, which reads the target's last hidden state, and how it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.options import Count, Whole
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Observation
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.features import Features
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.target import Target
from spec_lab.propose import Requires
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.tree_proposer import Forwards, TreeProposer
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner
from spec_lab.train.chain import ChainObjective, Unrolled
from spec_lab.train.recipe import Beginning, Recipe, TargetHead


class NextState(nn.Module):
    """A state ``[.., H]``, and the embedding ``[.., H]`` of the token after it -> the state after that token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the next state."""
        added: Tensor = nn.functional.silu(self.mix(torch.cat([state, embedded], -1)))
        return state + added


class MyDrafter(TreeProposer):
    """Applies one small layer for each drafted token.

    Args:
        network: the layer.
        target: that it drafts for.
        plan: of its trees.
        sha256: of its weights; None where they are random.
    """

    def __init__(self, network: NextState, target: Target, plan: TreePlan, sha256: str | None) -> None:
        super().__init__(plan, "my_drafter", Requires(hidden=(-1,)), sha256)
        self.network, self.services = network.to(target.lm.device, target.lm.dtype), target.services

    @staticmethod
    def load(target: Target, path: str, depth: Annotated[int, Whole(1, 64)] = 4) -> MyDrafter:
        """Load it.

        Args:
            target: that it drafts for.
            path: folder of the weights.
            depth: most tokens drafted in a step.
        """
        network = NextState(target.services.hidden_size)
        network.load_state_dict(read_tensors(Path(path, "model.safetensors"))[0])
        return MyDrafter(network, target, TreePlan.read(depth=depth), weights_hash(path))

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> MyDrafter:
        """Return it with random weights for a toy target, which ``spec-lab check`` enumerates."""
        return MyDrafter(NextState(target.services.hidden_size), target, self.plan.toy(tree), None)

    def init(self, request: Request) -> Features:
        """Return the state of a new sequence: the target's hidden states."""
        return Features()

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the hidden states ``[n, H]`` of the positions that the target computed."""
        for observation in observed:
            if observation.hidden is not None:
                observation.sequence.state.add(observation.start, observation.hidden)

    def fork(self, state: Features) -> Features:
        """Return an independent copy."""
        return state.copy()

    def rewind(self, state: Features, length: int) -> None:
        """Forget the positions from ``length`` on."""
        state.rewind(length)

    def levels(self, sequence: SequenceState, room: int) -> int:
        """Return the most levels: none where the last position was not observed, or several tokens are pending."""
        known = sequence.state.last(len(sequence.kv)) is not None and len(sequence.pending) == 1
        return room if known else 0

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Compute the roots, from the hidden state of the last position and the token after it."""
        trees, timed = np.flatnonzero(depths).tolist(), batch.clock.phase("propose_forward")
        active = [batch.sequences[tree] for tree in trees]
        number_of = {tree: number for number, tree in enumerate(trees)}  # of each row among the states
        states = torch.cat([sequence.state.last(len(sequence.kv)) for sequence in active])  # [A, H]
        with timed:
            states = self.step(states, np.array([sequence.tokens[-1] for sequence in active]))
            roots = self.services.lm_head(states)

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            nonlocal states
            above = [number_of[row] for row in shape.parent[rows - shape.roots].tolist()]
            number_of.update({row: len(states) + number for number, row in enumerate(rows.tolist())})
            with timed:
                new = self.step(states[above], token)
                states = torch.cat([states, new])
                return RowLogits.of(self.services.lm_head(new))

        return Forwards(RowLogits.of(roots), expand)

    def step(self, states: Tensor, token: np.ndarray) -> Tensor:
        """Return the states ``[n, H]`` after these tokens ``[n]``."""
        after: Tensor = self.network(states, self.services.embed(upload_tokens(states.device, token)))
        return after


@dataclass(frozen=True)
class MyDrafterRecipe(Recipe):
    """How it is trained: its own outputs stand in for the target's states.

    Args:
        depth: tokens drafted in training.
    """

    depth: Count = 4
    name: ClassVar = "my_drafter"

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """Return a new network and its loss."""
        torch.manual_seed(seed)
        network, head = NextState(target.services.hidden_size).to(target.lm.device), TargetHead.of(target)
        drafts = Unrolled(
            network=lambda state, positions, cache: state,
            mix=lambda embedded, state: network(state, embedded),
            lm_head=head.lm_head,
            unrolls=self.depth,
        )
        return Beginning(network, ChainObjective(network, drafts, head, target.lm.dtype), facts={})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """Write the weights; return their hash."""
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(module.state_dict(), folder / "model.safetensors", facts)
        return weights_hash(folder)

    def load(self, target: Target, folder: Path, depth: int) -> MyDrafter:
        """Return the written drafter."""
        return MyDrafter.load(target, str(folder), depth)
