"""The interface of whatever computes a target or a draft: a runner, and the KV cache of one sequence.

Nothing here says how keys and values are stored, so that engines other than transformers can implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Clock, Phase
from spec_lab.core.draft import Draft, empty
from spec_lab.core.roofline import ForwardWork
from spec_lab.core.shape import Shape
from spec_lab.core.upload import rows_at
from spec_lab.runners.attention import Attention
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.experts import ChosenExperts

if TYPE_CHECKING:
    from spec_lab.runners.causal_draft_pass import CausalDraftPass
    from spec_lab.runners.memory_need import ModelMemory
    from spec_lab.runners.sparse_kv import Selection, SparseLM


class KVSequence(Protocol):
    """The KV cache of one sequence: its computed tokens, and the nodes of the last draft tree until ``accept``."""

    def __len__(self) -> int:
        """Computed positions, held nodes not counted."""
        ...

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Append the tokens of held ``nodes``, numbered within their tree, and forget all others."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, and held nodes."""
        ...

    def fork(self) -> KVSequence:
        """A second sequence with the same past; of another request only with the ability ``shared_prefix``."""
        ...

    def close(self) -> None:
        """Free everything. Harmless when repeated."""
        ...


Ability = Literal["layer_ranges", "state_snapshots", "shared_prefix", "copied_prefix", "sparse_kv"]

ABILITIES: Mapping[Ability, str] = {
    "layer_ranges": "running a range of layers from given hidden states, on the KV cache of a sequence",
    "state_snapshots": "saving and restoring the states of recurrent layers",
    "shared_prefix": "sharing the KV cache of a common prefix among requests",
    "copied_prefix": "copying the KV cache of a common prefix to another request",
    "sparse_kv": "decoding on a smaller KV cache with some of a sequence's positions",
}
"""Abilities of some runners that some proposers require; drafting by early exit (2404.16710) requires layer ranges."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a runner beyond logits.

    Args:
        hidden_layers: number L of layers whose hidden states it can return; 0 for none. Number i is the input of layer
            i, which is the output of layer i - 1, and L the output of the last layer, before the final norm; -1 is the
            state after that norm, and -i is L + 1 - i. (The last of transformers' ``hidden_states`` is that after the
            norm. Published drafters read either.)
        sequences: most sequences in one forward; None for no limit.
        leaves: most leaves of all draft trees of one forward, where a tree without nodes has one; None for no limit.
        abilities: those that it has of ``ABILITIES``.
        rollback: most draft tokens of a step that it can take back without computing the sequence again; drafts must be
            chains then. None: it takes back any part of any draft tree.
    """

    hidden_layers: int = 0
    sequences: int | None = None
    leaves: int | None = None
    abilities: frozenset[Ability] = frozenset()
    rollback: int | None = None


def numbered(states: Sequence[int], last: int) -> tuple[int, ...]:
    """Return the numbers of hidden states without negative ones; the state after the final norm is ``last`` + 1.

    Args:
        states: numbers as in ``Capabilities``.
        last: the number of layers.

    Raises:
        ValueError: a state that the model does not have.
    """
    if wrong := [state for state in states if not -last - 1 <= state <= last]:
        raise ValueError(
            f"hidden state {wrong[0]} does not exist: the model has states 0 to {last}, and -1 after its final norm"
        )
    return tuple(last + 1 if state == -1 else state % (last + 1) for state in states)


Rows = slice | np.ndarray
"""Consecutive rows of a tensor, or the numbers of some."""


@dataclass(frozen=True, eq=False)
class Output:
    """The results of one forward over a forest.

    Args:
        logits: ``[R, V]``, roots first, then nodes.
        attended: positions attended to in a layer with full attention, in total.
        hidden: ``[N, layers * H]`` the captured hidden states of all rows; None where nothing is captured.
        pending_rows: for each sequence, those that only prefill last, the rows of its pending tokens in ``hidden``.
        node_rows: for each tree the rows of its nodes.
        early: for sequences with long prompts the hidden states of the pending tokens before those rows.
        experts: that the rows chose, numbered as those of ``hidden``; None where they are not counted.
        array: the same memory as ``logits``, of a runner whose logits are in the host's memory. After a forward the
            CPU's caches are cold, so that a call of torch costs some ten microseconds; NumPy's cost two.
    """

    logits: Tensor
    attended: int
    hidden: Tensor | None = None
    pending_rows: Sequence[Rows] = ()
    node_rows: Sequence[Rows] = ()
    early: Mapping[int, Tensor] = field(default_factory=dict)
    experts: ChosenExperts | None = None
    array: np.ndarray | None = None

    def observed(self, sequence: int, nodes: Sequence[int] = ()) -> Tensor | None:  # [n, layers * H]
        """The hidden states of a sequence's pending tokens, then of these nodes of its tree; None where not captured.

        They have memory of their own: whoever keeps them keeps no other rows.
        """
        if self.hidden is None:
            return None
        rows = self.pending_rows[sequence]
        if nodes or not isinstance(rows, slice):
            node_rows = _numbers(self.node_rows[sequence]) if nodes else []
            states = rows_at(self.hidden, [*_numbers(rows), *(node_rows[node] for node in nodes)])
        else:
            states = self.hidden[rows].clone()
        return torch.cat([self.early[sequence], states]) if sequence in self.early else states

    @property
    def pending(self) -> list[Tensor]:
        """For each sequence the hidden states of its pending tokens; empty where nothing is captured."""
        observed = (self.observed(sequence) for sequence in range(len(self.pending_rows)))
        return [states for states in observed if states is not None]

    @property
    def nodes(self) -> list[Tensor]:
        """For each tree the hidden states of its nodes; empty where nothing is captured."""
        return [] if self.hidden is None else [self.hidden[rows] for rows in self.node_rows]


def _numbers(rows: Rows) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()


class Extended(NamedTuple):
    """The results of ``DraftRunner.extend``.

    Args:
        logits: ``[n, V]``.
        hidden: ``[n, layers * H]`` the captured hidden states; None where nothing is captured.
        array: as in ``Output``.
    """

    logits: Tensor
    hidden: Tensor | None
    array: np.ndarray | None = None


def refuse_branches(shape: Shape) -> None:
    """Refuse forests other than chains, for a runner with ``Capabilities.rollback``.

    Raises:
        ValueError: a row has several children.
    """
    if shape.branches:
        raise ValueError(
            "the model has recurrent layers, whose runner can take back rejected tokens of a chain only, but the draft "
            "branches: choose a proposer that drafts chains"
        )


def accept_chain(held: list[Any], nodes: Sequence[int] | np.ndarray) -> list[Any]:
    """Return the tokens of ``nodes``, the first ones of the held chain.

    Raises:
        ValueError: the nodes are no such path.
    """
    count = len(nodes)
    if count > len(held) or any(node != number for number, node in enumerate(nodes)):
        raise ValueError(f"nodes {[*map(int, nodes)]} are no path of the held chain of {len(held)} from its root down")
    return held[:count]


class ModelSettings(NamedTuple):
    """How a model of transformers is computed: the arguments of ``CausalLM`` after the model."""

    attention: Attention = "per_sequence"
    chunk: int = 512
    fixed: bool = False
    kv_dtype: torch.dtype | None = None


class Runner(ABC):
    """Computes pending tokens and draft trees of several sequences in one forward. A base class with defaults.

    ``prepare`` builds tensors on the host; ``run`` touches tensors only, so that a CUDA graph may capture it.

    Attributes:
        clock: records the seconds of forwards.
        device: where logits are, and where draft tokens belong.
        dtype: of logits and hidden states.
        vocabulary: V, the width of the logits.
        forwards: how many forwards of the model have been computed so far.
        layers: L, the number of the model's layers, where it runs ranges of them.
        model_settings: how it computes a model of transformers, and so does a draft model for it.
    """

    clock: Clock
    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    forwards: int = 0
    layers: int
    model_settings: ModelSettings = ModelSettings()

    @property
    def capabilities(self) -> Capabilities:
        """Its abilities beyond logits."""
        return Capabilities()

    @property
    def work(self) -> ForwardWork | None:
        """The bytes and operations of a forward, for the roofline of a run; None if they are not known."""
        return None

    @property
    def memory(self) -> ModelMemory | None:
        """The sizes from which the memory of decoding follows; None if they are not known."""
        return None

    @property
    def threads(self) -> int | None:
        """The CPU threads of its forwards; None: torch's."""
        return None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Everything that the seconds of a forward depend on, for records."""
        return {}

    @property
    def hf_model(self) -> Any:
        """The model of transformers that it runs; None where it runs another one."""
        return None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How that model is quantized; None if it is not."""
        return None

    @abstractmethod
    def open(self, reserve: int = ...) -> KVSequence:
        """An empty sequence with room for ``reserve`` positions; it grows on demand."""

    def open_copy(self, source: Any, length: int, reserve: int, exact: bool = False) -> KVSequence:
        """A sequence with copies of the first ``length`` positions of another one, and room for ``reserve``.

        Only of a runner with the ability ``copied_prefix``. Neither sequence changes what the other holds. If
        ``exact``, it takes no more memory than that, frees it when it is closed, and is only copied from; the runner
        may give it up when it needs the memory, and its length is 0 from then on.
        """
        raise NotImplementedError

    @abstractmethod
    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return the hidden states with these numbers from now on (``Capabilities.hidden_layers``)."""

    @abstractmethod
    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> Any:
        """Everything that ``run`` reads, on the device.

        Args:
            sequences: ``[B]`` what is computed already.
            pending: ``[B]`` tokens that follow, at least one each; the last one is the root of its tree.
            draft: the forest below the last pending tokens.
            prefill: further sequences and the tokens to compute for each, without logits.
        """

    @abstractmethod
    def run(self, prepared: Any, timed: Phase | None = None) -> Output:
        """The forward: pending tokens become part of their sequences, nodes are held (``KVSequence.accept``).

        Args:
            prepared: by ``prepare``.
            timed: records the model's calls; None for the phase "target_forward" of the runner's own clock.
        """

    def forward(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
        timed: Phase | None = None,
    ) -> Output:
        """``prepare`` and ``run``."""
        return self.run(self.prepare(sequences, pending, draft, prefill), timed)

    def plain_logits(self, tokens: Sequence[int], rows: int) -> Tensor:  # [rows, V]
        """Return the logits after each of the last ``rows`` tokens of a text, decoded one after the other."""
        logits, kv, nothing = [], self.open(len(tokens)), empty(1, self.device)
        first = len(tokens) - rows + 1
        try:
            for pending in (tokens[:first], *([token] for token in tokens[first:])):
                logits.append(self.run(self.prepare([kv], [pending], nothing)).logits[0].clone())
        finally:
            kv.close()
        return torch.stack(logits)

    # Mixtures of experts (``experts``) -------------------------------------------------------------------------------

    @property
    def why_no_expert_counts(self) -> str:
        """Why it cannot count the experts that rows read; empty where it can."""
        return f"it is computed by {type(self).__name__}, whose routers are not read"

    def count_experts(self, on: bool) -> None:
        """Return the experts that rows chose (``Output.experts``) from now on, or no longer.

        Raises:
            ValueError: it cannot; says why.
        """
        if on:
            raise ValueError(self.why_no_expert_counts)

    # The ability ``sparse_kv`` ----------------------------------------------------------------------------------------

    @property
    def why_no_sparse_kv(self) -> str:
        """Why it lacks the ability; empty where it has it."""
        return f"it is computed by {type(self).__name__}, whose KV cache is not read by others"

    def sparse(self, selection: Selection) -> SparseLM:
        """Return a runner of the same model whose KV caches hold some positions of this one's."""
        raise NotImplementedError(self.why_no_sparse_kv)

    # The ability ``layer_ranges`` (``draft_pass``) --------------------------------------------------------------------

    @property
    def why_no_layer_ranges(self) -> str:
        """Why it lacks the ability; empty where it has it."""
        return f"it is computed by {type(self).__name__}, which does not run ranges of layers"

    @property
    def max_pending(self) -> int:
        """Most pending tokens of a sequence in a draft pass."""
        raise NotImplementedError(self.why_no_layer_ranges)

    @property
    def sublayers(self) -> frozenset[Sublayer]:
        """The sublayers that a route may skip; empty of a model whose attention and MLP are no modules of a layer."""
        raise NotImplementedError(self.why_no_layer_ranges)

    def draft_pass(self, route: Route, logits: bool = True) -> CausalDraftPass:
        """Return a new draft pass.

        Args:
            route: from layer 0 to some layer, or all layers without some sublayers.
            logits: whether it computes logits.

        Raises:
            ValueError: a route that does not begin with layer 0, or ends beyond the last; a sublayer that cannot be
                skipped.
        """
        raise NotImplementedError(self.why_no_layer_ranges)


class DraftRunner(Runner):
    """Computes a draft model, which grows a forest level by level below the roots that one forward computes."""

    @abstractmethod
    def extend(
        self,
        sequences: Sequence[Any],
        shape: Shape,
        rows: np.ndarray,
        token: np.ndarray | Tensor,
        timed: Phase | None = None,
    ) -> Extended:
        """Compute nodes whose root and ancestors are computed already.

        Args:
            sequences: ``[B]``, each ending with its tree's root; None for a tree without ``rows``. The nodes are held.
            shape: the forest; it may hold nodes that are never computed, and may have grown since the last call.
            rows: ``[n]`` the nodes to compute, tree by tree, parents first.
            token: ``[n]`` their tokens.
            timed: records the calls of the model.
        """

    @property
    def plans_levels(self) -> bool:
        """Whether it has ``levels_ahead``."""
        return False

    def levels_ahead(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        shape: Shape,
        arrays: Sequence[np.ndarray],
    ) -> Any:
        """Prepare pending tokens and all levels of a forest below, with one upload, before any token of it is drawn.

        Args:
            sequences: ``[B]``; None for a tree without nodes.
            pending: tokens that follow, of the other sequences.
            arrays: what else is uploaded.

        Returns:
            ``prepare.LevelsAhead``, whose forwards ``run_level`` computes; None where there are too many tokens.
        """
        raise NotImplementedError

    def run_level(self, prepared: Any, token: Tensor | None, timed: Phase | None = None) -> Tensor:
        """Return the logits ``[n, V]`` of a forward of ``levels_ahead``.

        Args:
            prepared: the forward.
            token: ``[n]`` the nodes' tokens on the device; None: it is that of the pending tokens.
            timed: records the calls of the model.
        """
        raise NotImplementedError
