"""A model with recurrent layers in llama.cpp, run over chains of tokens.

Each token overwrites the state of a recurrent layer. llama.cpp keeps snapshots of it (``n_rs_seq``): a call of
llama_decode stores those after the last tokens of each of its sequences, and removing tokens from the end of a sequence
selects one of them. Read in llama-memory-recurrent.cpp, this is right only

- once: until the next call computes the sequence, a second removal is refused;
- for fewer tokens than the last call computed of the sequence: older snapshots are stale, but are not refused;
- before another call computes several sequences, which may move the state of one that it does not compute, without its
  snapshots. A call whose sequences have different numbers of tokens is split into such calls by llama.cpp itself.

So what is rejected or truncated is gathered, and removed once before the next forward (``RecurrentSequence.settle``),
and the rows of a forward are computed in calls that leave each other's snapshots alone (``calls_of``). A sequence from
which more must be removed is emptied, and computed again from its tokens with the next forward of it. So are forks, and
all sequences when the KV cache grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Draft
from spec_lab.runners.llama_context import MAX_IDS, LlamaSettings, Logits
from spec_lab.runners.llama_library import Model
from spec_lab.runners.llama_runner import LlamaRunner, on_host
from spec_lab.runners.runner import Capabilities, Output, accept_chain, refuse_branches

MAX_SNAPSHOTS = 64
"""Most snapshots of a sequence. (llama.cpp aborts the process if a batch cannot hold one token more.)"""


class RecurrentSequence:
    """The tokens of one sequence, of which the library has computed all or none. A ``runner.KVSequence``.

    Args:
        ids: its sequence id, alone.
        reserve: about how many tokens it will have.

    Attributes:
        tokens: all, whether the library has them or they must be computed again.
        nodes: the tokens of the held chain.
        computed: positions that the library has, with those that were rejected or truncated since.
        back: most positions that the library can take back, once.
        made: number of the library's context that has computed them (``Context.made``).
    """

    def __init__(self, runner: LlamaRecurrent, ids: list[int], reserve: int) -> None:
        self.runner, self.ids, self.reserve = runner, ids, reserve
        self.tokens: list[int] = []
        self.nodes: list[int] = []
        self.computed = self.back = self.made = 0
        self.open = True

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lost(self) -> bool:
        """Whether its tokens must be computed again."""
        return bool(self.tokens) and (not self.computed or self.made != self.runner.context.made)

    @property
    def cells(self) -> int:
        """Cells that it uses at most."""
        return max(self.computed, len(self.tokens) + len(self.nodes))

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Append the tokens of held ``nodes``, and forget all others. Errors as in ``accept_chain``."""
        self.tokens += accept_chain(self.nodes, nodes)
        self.nodes = []

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, and held nodes.

        Raises:
            ValueError: it is longer than the sequence.
        """
        self.accept()
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot shorten a sequence of {len(self.tokens)} tokens to {length}")
        del self.tokens[length:]

    def fork(self) -> RecurrentSequence:
        """A second sequence with the same past, which is computed again."""
        twin = self.runner.open(self.reserve)
        twin.tokens = list(self.tokens)
        return twin

    def close(self) -> None:
        """Free everything. Harmless when repeated."""
        if self.open:
            self.tokens, self.nodes, self.computed, self.open = [], [], 0, False
            self.runner.give(self)

    def settle(self) -> None:
        """Remove from the library what was rejected or truncated, before it computes anything."""
        context, length = self.runner.context, len(self.tokens)
        if self.made != context.made:
            self.computed = 0
        elif not self.nodes and self.computed > length:
            left = length if self.computed - length <= self.back else 0
            context.remove(self.ids[0], left)
            self.computed = left
        self.back = 0

    def append(self, new: Sequence[int], nodes: list[int], back: int) -> None:
        """Take note of tokens and nodes that are computed, of which the library can take back so many."""
        self.tokens += new
        self.nodes, self.back, self.made = nodes, back, self.runner.context.made
        self.computed = len(self.tokens) + len(nodes)


class PreparedChains(NamedTuple):
    """A prepared forward. Its rows are in the context's arrays, so it must be run before the next one is prepared.

    Args:
        rows: N, the number of rows.
        outputs: R, the number of rows that return logits: the last R of the N.
        attended: number of attended positions, over all rows.
        cuts: rows at which a further call of llama.cpp begins.
        order: ``[R]`` the output of each root and node, in the order of the forest; None where both orders are equal.
    """

    rows: int
    outputs: int
    attended: int
    cuts: Sequence[int]
    order: np.ndarray | None


class LlamaRecurrent(LlamaRunner):
    """A GGUF model with recurrent layers: a runner for chains, without hidden states.

    It cannot run a draft model, which computes a chain token by token: then nothing of it could be taken back.
    ``settings`` have at least one snapshot.
    """

    def __init__(self, model: Model, settings: LlamaSettings) -> None:
        super().__init__(model, settings)
        self.sequences: set[RecurrentSequence] = set()

    @property
    def capabilities(self) -> Capabilities:
        """See ``runner.Runner``."""
        return Capabilities(sequences=MAX_IDS, rollback=self.settings.snapshots)

    def open(self, reserve: int = 0) -> RecurrentSequence:
        """An empty sequence that will have about ``reserve`` tokens.

        Raises:
            ValueError: too many sequences are open.
        """
        number = self.context.take_id()
        if number is None:
            raise ValueError(
                f"{len(self.sequences) + 1} sequences require more than llama.cpp's {MAX_IDS} sequence ids: decode "
                "fewer requests at once (batch_size, max_batch_size)"
            )
        sequence = RecurrentSequence(self, [number], reserve)
        self.sequences.add(sequence)
        return sequence

    def give(self, sequence: RecurrentSequence) -> None:
        """Take back the cells and the id of a sequence."""
        if sequence.made == self.context.made:
            self.context.remove(sequence.ids[0], 0)
        self.context.release_id(sequence.ids[0])
        self.sequences.discard(sequence)

    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return no hidden states.

        Raises:
            ValueError: some are asked for.
        """
        if layers:
            raise ValueError(f"hidden states {layers} of a model with recurrent layers cannot be read in llama.cpp")

    # Forwards --------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> PreparedChains:
        """See ``runner.Runner``. Sequences that must be computed again are computed here.

        Rows are all pending tokens but the roots, then the roots and nodes call by call.

        Raises:
            ValueError: the draft branches.
            OutOfCells: there is not enough memory for the KV cache.
        """
        shape, trees = draft.shape, len(sequences)
        refuse_branches(shape)
        every = [*sequences, *(sequence for sequence, _ in prefill)]
        tokens = [*pending, *(more for _, more in prefill)]
        rows = sum(map(len, tokens)) + shape.nodes
        self._recover(every, rows)
        attended, max_rows = sum(map(len, every)) + rows, min(self.settings.batch, self.context.cells)
        counts, order = (shape.sizes - 1).tolist(), np.empty(0, dtype=np.int64)
        cuts: list[int] = []
        if shape.nodes and (len(every) > 1 or rows > max_rows):
            calls = calls_of(counts, max_rows)
            starts = (
                rows - shape.rows + np.cumsum([0, *(sum(counts[tree] + 1 for tree in call) for call in calls[:-1])])
            )
            cuts = starts[starts > 0].tolist()
            if len(calls) > 1:
                order = np.concatenate([np.flatnonzero(np.isin(shape.root, call)) for call in calls])
        self._single_ids(every, tokens, draft, trees, order.tolist())
        for number, (sequence, new) in enumerate(zip(every, tokens, strict=True)):
            count = counts[number] if number < trees else 0
            nodes = on_host(draft)[shape.trees[number][1:] - shape.roots].tolist() if count else []
            sequence.append(new, nodes, min(count, self.settings.snapshots) if count < max_rows else 0)
        where = np.argsort(order) if len(order) else None
        self._ready = prepared = PreparedChains(rows, shape.rows, attended, cuts, where)
        return prepared

    def run(self, prepared: PreparedChains, timed: Phase | None = None) -> Output:
        """See ``runner.Runner``. After an error its sequences lack keys and values, and must be closed.

        Raises:
            OutOfCells: there are not enough free cells.
            RuntimeError: the library fails, or another forward was prepared since.
        """
        self._require_ready(prepared)
        logits = self._compute(prepared.rows, prepared.outputs, timed, prepared.cuts)[0]
        if prepared.order is not None:
            logits = Logits.of(logits.tensor[torch.from_numpy(prepared.order)])
        return Output(logits.tensor, prepared.attended, array=logits.array)

    def _recover(self, every: Sequence[RecurrentSequence], rows: int) -> None:
        """Bring the library's states to the ends of these sequences, with room for ``rows`` more.

        The tokens of those whose states cannot be rolled back are computed again. Errors as in ``prepare``.
        """
        for sequence in every:
            sequence.accept()
        for sequence in self.sequences:
            sequence.settle()
        self.context.reserve(rows + sum(len(sequence) for sequence in every if sequence.lost), self.sequences)
        lost = [sequence for sequence in every if sequence.lost]
        if not lost:
            return
        token = [token for sequence in lost for token in sequence.tokens]
        position = [index for sequence in lost for index in range(len(sequence))]
        self.context.single_ids(token, position, [sequence.ids[0] for sequence in lost for _ in sequence.tokens], 0)
        self._compute(len(token), 0, None)
        for sequence in lost:
            sequence.append((), [], 0)


def calls_of(counts: Sequence[int], max_rows: int) -> list[list[int]]:
    """Return the chains that the library computes together, so that the snapshots of all of them stay right.

    Only a call of several sequences can move the snapshots of others. So chains without nodes, which need none, come
    first, then as many as possible of those with the same number of nodes, then each of the others by itself.

    Args:
        counts: how many nodes each chain has.
        max_rows: rows of one call.
    """
    alike: dict[int, list[int]] = {}
    for tree, count in enumerate(counts):
        alike.setdefault(count, []).append(tree)
    empty = alike.pop(0, [])
    together = max((trees[: max_rows // (count + 1)] for count, trees in alike.items()), key=len, default=[])
    others = [[tree] for trees in alike.values() for tree in trees if tree not in together]
    return [call for call in (empty, together, *others) if call]
