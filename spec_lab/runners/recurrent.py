"""Models of transformers with recurrent layers, run over chains of tokens.

Each token overwrites the states of a recurrent layer: that of its short convolution, and that of its recurrence (Mamba,
2312.00752; gated delta nets, 2412.06464). So each sequence has states of its own, and the *mixers*, the modules that
read and write them, run sequence by sequence. All other modules run packed over the rows of all sequences.

Rejected draft tokens must not stay in a state. Before a forward with draft tokens a snapshot of the states is taken,
and the inputs of the mixers are kept. After a rejection the next forward continues from the snapshot, over the kept
inputs of the tokens that were accepted: nothing but the mixers computes a row twice, and keys and values of attention
layers stay where they are. Where more must be forgotten than the kept inputs cover, the sequence is computed again from
its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape
from spec_lab.core.upload import rows_at
from spec_lab.runners.forward import Forward
from spec_lab.runners.kv_cache import CellSequence
from spec_lab.runners.memory_need import StateMemory
from spec_lab.runners.mixers import Mixer, find_mixers
from spec_lab.runners.prepare import Packer, Prepared
from spec_lab.runners.runner import accept_chain, refuse_branches

MAX_AGAIN = 16
"""Most rows that a mixer computes again together with new ones. More than these are first made part of the snapshot."""


class Recurrence:
    """Forwards of a model with recurrent layers, whose mixers read the states of the sequences of a ``Pack``.

    Args:
        model: a causal LM of transformers with recurrent layers.

    Attributes:
        mixers: of its layers.
        tokenwise: whether some of them are. They compute a prompt at once, whatever its length.
        hidden_states: whether the model numbers its hidden states as ``runner.Capabilities`` does.
        memory: of the states of a sequence.

    Raises:
        NotImplementedError: a recurrent layer does not keep its states in transformers' cache, or shares its mixer.
    """

    def __init__(self, model: Any, packer: Packer, run: Callable[[Forward], object]) -> None:
        self.config, self.run = model.config, run
        self.mixers, self.hidden_states, state_bytes, input_bytes = find_mixers(model)
        self.tokenwise = any(mixer.tokenwise for mixer in self.mixers)
        kept = 0 if self.tokenwise else MAX_AGAIN
        self.memory = StateMemory(state_bytes, input_bytes, kept)
        self.packer = replace(packer, chunk=sys.maxsize) if self.tokenwise else packer

    def states(self) -> RecurrentStates:
        """The states of an empty sequence."""
        return RecurrentStates(partial(DynamicCache, config=self.config), self.memory.kept)

    def prepare(
        self,
        sequences: Sequence[CellSequence],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[CellSequence, Sequence[int]]] = (),
    ) -> Prepared:
        """``CausalLM.prepare``. Sequences whose states are lost are computed again first."""
        refuse_branches(draft.shape)
        again = []
        for sequence in (*sequences, *(sequence for sequence, _ in prefill)):
            sequence.accept()
            if states_of(sequence).lost:
                self.packer.cells.backtrack(sequence, 0)
                again.append((sequence, states_of(sequence).take_tokens()))
        if again:
            self.run(self._chains([], [], empty(0, self.packer.device), again))
        return self._chains(sequences, pending, draft, prefill)

    def _chains(
        self,
        sequences: Sequence[CellSequence],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[CellSequence, Sequence[int]]],
    ) -> Prepared:
        """A forward that also advances the states of its sequences."""
        prepared = self.packer.prepare(sequences, pending, draft, prefill)
        every = [states_of(sequence) for sequence in (*sequences, *(sequence for sequence, _ in prefill))]
        for states, tokens in zip(every, (*pending, *(tokens for _, tokens in prefill)), strict=True):
            states.tokens += tokens
        early = [(_advancing(chunk, [every[tree] for tree in trees], ()), trees) for chunk, trees in prepared.early]
        trees = [rows[1:] - draft.shape.roots for rows in draft.shape.trees] if draft.shape.nodes else ()
        return replace(_advancing(prepared, every, [_tokens(draft, nodes) for nodes in trees]), early=early)

    def level(
        self, sequences: Sequence[CellSequence | None], shape: Shape, rows: np.ndarray, token: Tensor | np.ndarray
    ) -> Prepared:
        """``CausalLM.extend``."""
        refuse_branches(shape)
        prepared = self.packer.level(sequences, shape, rows, token)
        if any(sequence is not None and states_of(sequence).lost for sequence in sequences):
            raise RuntimeError("a sequence whose states were removed must be computed again by a forward first")
        on_device = isinstance(token, Tensor) and token.device.type != "cpu"
        drafted, advances = token.unbind() if isinstance(token, Tensor) and on_device else token.tolist(), []
        start = 0
        for tree, sequence in enumerate(sequences):
            nodes = [drafted[index] for index in np.flatnonzero(shape.root[rows] == tree).tolist()]
            if sequence is not None and nodes:
                advances.append(states_of(sequence).advance(start, 0, nodes))
                start += len(nodes)
        return replace(prepared, pack=replace(prepared.pack, advances=tuple(advances)))


def states_of(sequence: CellSequence) -> RecurrentStates:
    """The states of a sequence of a model with recurrent layers."""
    states = sequence.states
    assert isinstance(states, RecurrentStates), "a sequence of a runner with recurrent layers"
    return states


def _tokens(draft: Draft, nodes: np.ndarray) -> list[Any]:
    """Drafted tokens, on the host if they are there."""
    if draft.array is not None:
        return list(draft.array[nodes].tolist())
    return list(rows_at(draft.token, nodes.tolist()).unbind())


def _advancing(prepared: Prepared, states: Sequence[RecurrentStates], drafted: Sequence[list[Any]]) -> Prepared:
    advances = []
    for number, (sequence_states, rows) in enumerate(zip(states, prepared.pending, strict=True)):
        nodes = drafted[number] if number < len(drafted) else []
        advances.append(sequence_states.advance(rows.start, rows.stop - rows.start, nodes))
    return replace(prepared, pack=replace(prepared.pack, advances=tuple(advances)))


@dataclass(eq=False)
class RecurrentStates:
    """The states of one sequence's recurrent layers. They follow what its ``CellSequence`` does.

    Args:
        new: returns a cache of transformers with empty states.
        max_again: as ``MAX_AGAIN``.
        cache: of transformers, with the states after the last computed token.
        snapshots: by layer, the states after the first ``base`` tokens, if any.
        inputs: by layer, the mixers' inputs ``[1, n, H]`` of the tokens that follow those.
        base: see ``snapshots``.
        length: tokens of the sequence.
        live: whether ``cache`` has the states after its last token; if not, ``snapshots`` and ``inputs`` lead to them.
        tokens: all of the sequence, to compute it again.
        held: tokens of the chain that was computed last.
        lost: whether the sequence must be computed again from its tokens.
    """

    new: Callable[[], Any]
    max_again: int
    cache: Any = None
    snapshots: dict[int, Any] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    base: int = 0
    length: int = 0
    live: bool = True
    tokens: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    lost: bool = False

    def __post_init__(self) -> None:
        if self.cache is None:
            self.cache = self.new()

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Keep the first nodes of the held chain, and forget all others. Errors as in ``accept_chain``."""
        accepted = accept_chain(self.held, nodes)
        self.live = self.live and len(accepted) == len(self.held)
        self.length += len(accepted)
        self.tokens += accepted
        self.held = []

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on; no nodes are held."""
        del self.tokens[length:]
        if length == self.length and not self.lost:
            return
        self.length, self.live = length, False
        if length < self.base or not self.snapshots:
            self.forget()
            self.lost = length > 0

    def forget(self) -> None:
        """Become the states of an empty sequence, but for its tokens."""
        self.cache = self.new()
        self.snapshots, self.inputs, self.base, self.length, self.live, self.lost = {}, {}, 0, 0, True, False

    def take_tokens(self) -> list[int]:
        """Become the states of an empty sequence; return the tokens of this one."""
        tokens, self.tokens = [int(token) for token in self.tokens], []
        self.forget()
        return tokens

    def fork(self) -> RecurrentStates:
        """Return the same states for a second sequence."""
        cache = copy(self.cache)
        cache.layers = [_copied(state) for state in self.cache.layers]
        snapshots = {layer: _copied(state) for layer, state in self.snapshots.items()}
        twin = replace(self, cache=cache, snapshots=snapshots, inputs=dict(self.inputs), tokens=list(self.tokens))
        twin.accept()
        return twin

    def close(self) -> None:
        """Free everything."""
        self.forget()
        self.cache, self.tokens, self.held = None, [], []

    def advance(self, start: int, pending: int, nodes: list[Any]) -> Advance:
        """Take note of a forward over pending tokens and a chain, and return what its mixers do.

        Args:
            start: the first of the sequence's rows.
            pending: how many tokens become part of the sequence.
            nodes: the chain's tokens; without pending tokens they continue the chain that is held.
        """
        if self.held and not pending:
            self.held = [*self.held, *nodes]
            return Advance(self, start, start + len(nodes), 0, 0, False, False, more=True)
        again = 0 if self.live else self.length - self.base
        before = 0 if nodes and again + pending <= self.max_again else again + pending
        advance = Advance(self, start, start + pending + len(nodes), again, before, not self.live, bool(nodes))
        self.length += pending
        if before:
            self.base = self.length
        elif self.live:
            self.base = self.length - pending
        self.live, self.held = True, nodes
        return advance


@dataclass(frozen=True, eq=False)
class Advance:
    """Runs the mixers for one sequence in a forward.

    Args:
        start: the first of its rows among those of the forward.
        stop: the last one + 1.
        again: how many kept inputs come before them.
        before: how many of all of them are computed before the snapshot is taken.
        restore: whether they begin with the snapshot of an earlier forward.
        save: whether a snapshot is taken, and inputs are kept.
        more: whether inputs are kept with those of the nodes above them, before which the snapshot was taken.
    """

    states: RecurrentStates
    start: int
    stop: int
    again: int
    before: int
    restore: bool
    save: bool
    more: bool = False

    def __call__(self, mixer: Mixer, rows: Tensor) -> Tensor:
        """Compute the rows of all sequences ``[1, N, H]`` of this one; return its own, ``[1, n, H]``."""
        states, layer = self.states, mixer.layer
        rows = rows[:, self.start : self.stop]
        if self.again:
            rows = torch.cat([states.inputs[layer][:, : self.again], rows], 1)
        if self.restore:
            states.cache.layers[layer] = states.snapshots[layer]
        parts = []
        if self.before:
            parts.append(mixer.advance(rows[:, : self.before], states.cache))
            rows = rows[:, self.before :]
        if self.more:
            states.inputs[layer] = torch.cat([states.inputs[layer], rows], 1)
            parts.append(mixer.advance(rows, states.cache))
        elif self.save:
            rows = rows.clone()  # a view would keep the rows of all sequences
            states.snapshots[layer], states.inputs[layer] = _copied(states.cache.layers[layer]), rows
            parts.append(mixer.advance(rows, states.cache))
        else:
            states.snapshots.pop(layer, None)
            states.inputs.pop(layer, None)
        computed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return computed[:, self.again :]


def _copied(state: Any) -> Any:
    """A copy of one layer's state in transformers' cache."""
    twin = copy(state)
    for name, value in vars(state).items():
        if isinstance(value, dict):
            tensors = {key: entry.clone() if isinstance(entry, Tensor) else entry for key, entry in value.items()}
            setattr(twin, name, tensors)
    return twin
