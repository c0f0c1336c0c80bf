"""What a kind of drafter must bring to be trained: the target's states that it reads, a network, a loss, and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.fit import Objective


@dataclass(frozen=True, eq=False)
class Beginning:
    """A drafter that is about to be trained.

    Args:
        module: its parameters are trained.
        objective: its loss.
        facts: what decides the result besides the settings, for checkpoints and the card.
    """

    module: nn.Module
    objective: Objective
    facts: Mapping[str, Any]


class Recipe(Protocol):
    """A kind of drafter, and how it is trained."""

    @property
    def name(self) -> str:
        """Of the drafter, as in configs and records."""
        ...

    @property
    def depth(self) -> int:
        """How many tokens it drafts in a chain at most."""
        ...

    def states(self, target: Target) -> tuple[int, ...]:
        """Numbers of the target's hidden states that texts must bring; the last is -1, after the final norm."""
        ...

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """A fresh network, in float32, and its loss.

        Args:
            target: to draft for.
            paths: files of the texts (``texts.Texts``).
            seed: of the initial weights.
        """
        ...

    def write(self, module: nn.Module, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """Write the drafter's files; return the SHA-256 of its weights."""
        ...

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """The written drafter as a proposer of chains, sampled as the request samples."""
        ...


@dataclass(frozen=True, eq=False)
class TargetHead:
    """The target's embedding and LM head as parts of a computation with gradients; their weights get none.

    (``TargetServices`` returns tensors of inference mode, which autograd cannot keep.)

    Args:
        model: a causal LM of transformers whose parameters require no gradient.
    """

    model: Any

    @staticmethod
    def of(target: Target) -> TargetHead:
        """Those of a target of transformers.

        Raises:
            Unsupported: it is a target of another kind.
        """
        return TargetHead(target.causal_lm.model.requires_grad_(False))

    def embed(self, tokens: Tensor) -> Tensor:
        """``[..]`` int64 -> ``[.., H]``."""
        found: Tensor = self.model.get_input_embeddings()(tokens)
        return found

    def lm_head(self, hidden: Tensor) -> Tensor:
        """``[.., H] -> [.., V]``."""
        found: Tensor = self.model.get_output_embeddings()(hidden)
        return found
