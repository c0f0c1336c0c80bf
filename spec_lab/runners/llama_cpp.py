"""A model in llama.cpp, run over forests of tokens (``llama_sequence``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Draft
from spec_lab.core.roofline import ForwardWork
from spec_lab.core.shape import Shape
from spec_lab.runners.llama_context import MAX_IDS, LlamaSettings, Logits, OutOfCells
from spec_lab.runners.llama_library import Model
from spec_lab.runners.llama_runner import LlamaRunner, on_host
from spec_lab.runners.llama_sequence import ForestIds, LlamaSequence, Paths
from spec_lab.runners.runner import Ability, Capabilities, DraftRunner, Extended, Output, numbered

PLAIN_EMBEDDINGS = ("llama", "qwen2", "qwen3")
"""Architectures whose first layer is known to read the rows of the embedding as they are."""

MAX_SHAPES = 64
"""Most shapes of forests whose ids a runner remembers."""


class PreparedRows(NamedTuple):
    """A forward whose rows are in the context's arrays; it is run before the next one is prepared.

    Args:
        rows: N, all rows.
        outputs: R, the last ones, roots first, then nodes: those whose logits are returned.
        attended: positions attended to.
        pending: of each sequence the rows of its pending tokens.
        nodes: of each tree the rows of its nodes.
    """

    rows: int
    outputs: int
    attended: int
    pending: Sequence[np.ndarray] = ()
    nodes: Sequence[np.ndarray] = ()


class LlamaCpp(LlamaRunner, DraftRunner):
    """A GGUF model without recurrent layers.

    Long prompts are computed in parts of ``LlamaSettings.batch`` rows. A copy of a prefix shares its cells; exact
    copies are given up, those that were not used for the longest time first, where ids, cells or memory run short.
    """

    def __init__(self, model: Model, settings: LlamaSettings | None = None, work: ForwardWork | None = None) -> None:
        super().__init__(model, settings, work)
        self.sequences: set[LlamaSequence] = set()
        self._min_ids = 2 if model.window else 1  # ids of a sequence
        self._plans: dict[Shape, ForestIds] = {}
        self._asked: tuple[int, ...] = ()
        self._layers: tuple[int, ...] = ()
        self._computed: set[str] = set()  # tensors that llama.cpp was seen to compute
        self._uses = 0  # of kept copies

    @property
    def capabilities(self) -> Capabilities:
        """See ``runner.Runner``. Hidden states but the last one are read while a forward is computed, which costs."""
        abilities: frozenset[Ability] = frozenset({"shared_prefix", "copied_prefix"})
        return Capabilities(self.model.layers, MAX_IDS // self._min_ids, MAX_IDS, abilities)

    def open(self, reserve: int = 0) -> LlamaSequence:
        """An empty sequence that will have about ``reserve`` tokens.

        Raises:
            ValueError: too many sequences are open.
        """
        sequence = LlamaSequence(self, [self._take(())], reserve)
        self.sequences.add(sequence)
        try:
            while len(sequence.ids) < self._min_ids:
                sequence.ids.append(self._take([sequence], [1]))
                sequence.shared.append(0)
        except ValueError:
            sequence.close()
            raise
        return sequence

    def open_copy(self, source: LlamaSequence, length: int, reserve: int, exact: bool = False) -> LlamaSequence:
        """See ``runner.Runner``. The cells are those of the other sequence, under further ids.

        Raises:
            ValueError: too many sequences are open.
            OutOfCells: there is not enough memory.
        """
        kept, source.kept = source.kept, 0  # it must not be given up meanwhile
        self._uses += 1
        made = None
        try:
            made = self.open()
            self._make_room(0)
        except ValueError:
            if made is not None:
                made.close()
            if exact:
                return LlamaSequence(self, [], 0)  # given up at once
            if not kept:
                raise
            source.close()
            return self.open(reserve)
        finally:
            source.kept = self._uses if kept else 0
        made.prefix = (source, length) if kept else source.prefix and (source.prefix[0], min(source.prefix[1], length))
        self.context.share(source.ids[0], made.ids[0], 0, length)
        made.length = length
        made.attach(len(made.ids))
        made.reserve = made.cells if exact else max(0, reserve - length + made.cells)
        made.kept = self._uses if exact else 0
        return made

    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return these hidden states from now on. Numbers as in ``runner.Capabilities``.

        Which tensors llama.cpp computes depends on the architecture: the first time that some are asked for, one row of
        a sequence of its own shows whether it computes them.

        Raises:
            ValueError: a layer that the model does not have, or whose tensor llama.cpp does not compute.
            OutOfCells: there is not enough memory.
        """
        if layers == self._asked:
            return
        last = self.model.layers
        states = numbered(layers, last)
        architecture = self.model.description.partition(" ")[0]
        if 0 in states and architecture not in PLAIN_EMBEDDINGS:
            raise ValueError(
                f"hidden state 0 of a {architecture} model is not known: other architectures than "
                f"{', '.join(PLAIN_EMBEDDINGS)} may scale the embeddings, or add positions to them"
            )
        names = {_tensor(layer) for layer in states if layer <= last}
        self.context.require(0, 0, names)
        if names - self._computed and self.context.has_ids:
            self._probe(names)
        # The last layer computes all rows only where all of them are outputs.
        self.context.set_embeddings(max(states, default=0) >= last)
        self._asked, self._layers = layers, states

    def _probe(self, names: set[str]) -> None:
        """Compute one row with these watched tensors. If one is missing, capture nothing; error as in ``capture``."""
        self.context.set_embeddings(False)
        sequence = self.open()
        try:
            self._make_room(1)
            self.context.single_ids([0], [0], sequence.ids[:1], 1)
            self.context.decode(1, 1)
        except RuntimeError as error:
            self._asked = self._layers = ()
            self.context.require(0, 0, ())
            raise ValueError(str(error)) from error
        finally:
            sequence.close()
        self._computed |= names

    # Forwards --------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> PreparedRows:
        """See ``runner.Runner``. Rows are all pending tokens but the roots, then the roots, then the nodes.

        Raises:
            ValueError: the trees have more leaves together than there are sequence ids.
            OutOfCells: there is not enough memory for the KV cache.
        """
        shape = draft.shape
        plan = self._plan(shape) if shape.nodes else None
        every = [*sequences, *(sequence for sequence, _ in prefill)]
        tokens = [*pending, *(more for _, more in prefill)]
        paths = [self._min_ids] * len(every) if plan is None else plan.widths + [self._min_ids] * len(prefill)
        rows = sum(map(len, tokens)) + shape.nodes
        self._reserve(every, paths, rows)
        for sequence, count in zip(every, paths, strict=True):
            sequence.accept()
            sequence.attach(count)
        if not self._layers and all(count == 1 for count in paths):
            attended = sum(map(len, every)) + self._single_ids(every, tokens, draft, len(sequences))
            prepared = PreparedRows(rows, shape.rows, attended)
        else:
            prepared = self._arrange(every, tokens, draft, plan, len(sequences), rows)
        for sequence, new, count in zip(every, tokens, paths, strict=True):
            sequence.append(len(new), count)
        if plan is not None:
            for sequence, tree in zip(sequences, plan.trees, strict=True):
                sequence.held = tree
        self._ready = prepared
        return prepared

    def run(self, prepared: PreparedRows, timed: Phase | None = None) -> Output:
        """See ``runner.Runner``. After an error its sequences lack keys and values, and must be closed.

        Raises:
            OutOfCells: there are not enough free cells.
            RuntimeError: the library fails, or another forward was prepared since.
        """
        self._require_ready(prepared)
        logits, hidden = self._decode(prepared.rows, prepared.outputs, timed)
        return Output(logits.tensor, prepared.attended, hidden, prepared.pending, prepared.nodes, array=logits.array)

    def extend(
        self,
        sequences: Sequence[Any],
        shape: Shape,
        rows: np.ndarray,
        token: np.ndarray | Tensor,
        timed: Phase | None = None,
    ) -> Extended:
        """See ``runner.DraftRunner``.

        Raises:
            ValueError, OutOfCells: as in ``prepare``.
        """
        count = len(rows)
        trees, nodes = shape.root[rows].tolist(), shape.places[rows].tolist()
        parents = shape.places[shape.parent[rows - shape.roots]].tolist()
        every, counts, new = [], [], []  # sequences, how many ids each requires, its new nodes and paths
        for tree, tree_nodes in groupby(zip(trees, nodes, parents, strict=True), key=itemgetter(0)):
            sequence = sequences[tree]
            if sequence.held is None or sequence.held.fixed:
                sequence.held = Paths() if sequence.held is None else sequence.held.copy()
            new.append(sequence.held.add((node, parent) for _, node, parent in tree_nodes))
            every.append(sequence)
            counts.append(max(self._min_ids, len(sequence.held.paths)))
        self._reserve(every, counts, count)
        context, begins, ids = self.context, {}, []
        for tree, sequence, width, (paths, begun) in zip(dict.fromkeys(trees), every, counts, new, strict=True):
            sequence.attach(width)
            end = begins[tree] = len(sequence)
            for path, source, common in begun:
                context.share(sequence.ids[source], sequence.ids[path], end, end + common)
            ids += [[sequence.ids[path] for path in numbers] for numbers in paths]
        depths, tokens = shape.depth[rows].tolist(), token.tolist()
        positions = [begins[tree] - 1 + depth for tree, depth in zip(trees, depths, strict=True)]
        if all(len(numbers) == 1 for numbers in ids):
            context.single_ids(tokens, positions, [number for (number,) in ids], count)
        else:
            context.reserve_rows(count)
            context.token[:count], context.position[:count], context.flags[:count] = tokens, positions, 1
            sizes, flat = np.array([len(numbers) for numbers in ids]), [number for numbers in ids for number in numbers]
            context.set_ids(sizes, 4 * (np.cumsum(sizes) - sizes), np.array(flat))
        self._ready = None
        logits, hidden = self._decode(count, count, timed)
        return Extended(logits.tensor, hidden, logits.array)

    def _decode(self, rows: int, outputs: int, timed: Phase | None) -> tuple[Logits, Tensor | None]:
        """Logits ``[outputs, V]`` of the last rows, and hidden states ``[rows, layers * H]``."""
        logits, final, watched = self._compute(rows, outputs, timed)
        if not self._layers:
            return logits, None
        last = self.model.layers
        states: list[Any] = [final if layer > last else watched[_tensor(layer)] for layer in self._layers]
        return logits, torch.from_numpy(states[0] if len(states) == 1 else np.concatenate(states, axis=1))

    def _plan(self, shape: Shape) -> ForestIds:
        if shape not in self._plans:
            if len(self._plans) >= MAX_SHAPES:
                self._plans.clear()
            self._plans[shape] = ForestIds.of(shape, self._min_ids)
        return self._plans[shape]

    def _arrange(
        self,
        every: Sequence[LlamaSequence],
        tokens: Sequence[Sequence[int]],
        draft: Draft,
        plan: ForestIds | None,
        trees: int,
        rows: int,
    ) -> PreparedRows:
        """Write the rows of a forward into the context's arrays."""
        context, shape = self.context, draft.shape
        context.reserve_rows(rows)
        token, position, flags = context.token, context.position, context.flags
        starts = [len(sequence) for sequence in every]
        attended = sum(starts) + rows
        plan = self._plan(shape) if plan is None else plan
        first = rows - shape.rows  # the row of the first root
        flags[:first] = context.embeddings
        flags[first:rows] = 1
        before = [len(new) - (number < trees) for number, new in enumerate(tokens)]
        roots = [sequence.ids[:width] for sequence, width in zip(every, plan.widths, strict=False)]
        ids = np.array([number for numbers in roots for number in numbers], dtype=np.int32)[plan.paths]
        counts, begins = plan.counts, plan.starts
        if first:
            carried = [*roots, *(sequence.ids[: self._min_ids] for sequence in every[trees:])]
            more = np.repeat([len(numbers) for numbers in carried], before)
            ids = np.concatenate([*(np.tile(numbers, n) for numbers, n in zip(carried, before, strict=True)), ids])
            counts = np.concatenate([more, counts])
            begins = 4 * (np.cumsum(counts) - counts)
            token[:first] = [value for new, n in zip(tokens, before, strict=True) for value in new[:n]]
            position[:first] = np.concatenate([
                np.arange(start, start + n) for start, n in zip(starts, before, strict=True)
            ])  # fmt: skip
        context.set_ids(counts, begins, ids)
        if trees == 1:
            token[first], position[first:rows] = tokens[0][-1], shape.depth + (starts[0] + before[0])
        elif trees:
            token[first : first + trees] = [new[-1] for new in tokens[:trees]]
            ends = np.array([start + n for start, n in zip(starts[:trees], before, strict=False)])
            position[first:rows] = shape.depth + ends[shape.root]
        token[first + trees : rows] = on_host(draft)
        if not self._layers:
            return PreparedRows(rows, shape.rows, attended)
        ends = np.cumsum(before)
        pending_rows = [np.arange(end - n, end) for end, n in zip(ends, before, strict=True)]
        pending_rows[:trees] = [np.append(numbers, first + root) for root, numbers in enumerate(pending_rows[:trees])]
        return PreparedRows(rows, shape.rows, attended, pending_rows, [first + trees + nodes for nodes in plan.nodes])

    # Ids and cells ---------------------------------------------------------------------------------------------------

    def _reserve(self, every: Sequence[LlamaSequence], paths: Sequence[int], rows: int) -> None:
        """Take the ids that a forward requires, and grow the KV cache."""
        for sequence, count in zip(every, paths, strict=True):
            while len(sequence.ids) < count:
                sequence.ids.append(self._take(every, paths))
                sequence.shared.append(0)
        limit = self.context.limit
        while limit is not None and (kept := self._oldest_kept()) is not None:
            if rows + sum(sequence.cells for sequence in self.sequences) <= limit:
                break
            kept.close()
        self._make_room(rows)

    def _make_room(self, rows: int) -> None:
        """Grow the KV cache for some rows and all ids that were taken; kept copies give up theirs if it cannot grow.

        Raises:
            OutOfCells: there is not enough memory, and no kept copy.
        """
        while True:
            try:
                return self.context.reserve(rows, self.sequences)
            except OutOfCells:
                if (kept := self._oldest_kept()) is None:
                    raise
                kept.close()
                for sequence in self.sequences:
                    sequence.ids = [self.context.existing_id(number) for number in sequence.ids]

    def _oldest_kept(self) -> LlamaSequence | None:
        """The kept copy that was not used for the longest time; None if there is none."""
        kept = (sequence for sequence in self.sequences if sequence.kept)
        return min(kept, key=lambda sequence: sequence.kept, default=None)

    def _take(self, every: Sequence[LlamaSequence], paths: Sequence[int] = ()) -> int:
        """A free id. If there is none, sequences give back those that they do not need now, and kept copies all."""
        if not self.context.has_ids:
            needed = dict(zip(every, paths, strict=True))
            for sequence in self.sequences:
                if sequence.held is None or sequence in needed:
                    sequence.release(max(self._min_ids, needed.get(sequence, 1)))
        while not self.context.has_ids and (kept := self._oldest_kept()) is not None:
            kept.close()
        number = self.context.take_id()
        if number is None:
            leaves = f" with trees of {max(paths)} leaves" if paths and max(paths) > 1 else ""
            raise ValueError(
                f"{len(self.sequences)} sequences{leaves} require more than llama.cpp's {MAX_IDS} sequence ids, one "
                "for each leaf of a draft tree: draft trees with fewer leaves (a chain has one), or decode fewer "
                "requests at once (batch_size, max_batch_size)"
            )
        return number


def _tensor(layer: int) -> str:
    """llama.cpp's name of the tensor with a hidden state: the embeddings, or the output of the layer before."""
    return f"l_out-{layer - 1}" if layer else "embd"
