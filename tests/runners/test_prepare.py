"""Steps of one token each are prepared as forests are, whatever the sequences' cells look like."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape, chain
from spec_lab.runners.attention import FULL, AttentionKind
from spec_lab.runners.dense import DensePacker
from spec_lab.runners.kv_cache import GRAIN, Cells
from spec_lab.runners.prepare import Packer

CHUNK = 64


def world(kinds=None, dense=False):
    """A packer over an empty store, and no sequences."""
    packer = (DensePacker if dense else Packer)(Cells(), kinds or {}, 2, torch.device("cpu"), torch.float32, CHUNK)
    return SimpleNamespace(packer=packer, sequences=[])


def prepared(world, tokens, whole):
    """One token for each sequence; ``whole`` through the preparation of forests."""
    pending, draft = [[token] for token in tokens], empty(len(tokens))
    if whole:
        return world.packer.finish(world.packer.plan(world.sequences, pending, draft, len(tokens)), draft)
    return world.packer.prepare(world.sequences, pending, draft)


def facts(batch):
    """All that a forward reads, as plain values."""
    segments = {
        kind: [segment._replace(mask=None if segment.mask is None else segment.mask.tolist()) for segment in segments]
        for kind, segments in batch.pack.segments.items()
    }
    keep = batch.keep.tolist() if isinstance(batch.keep, torch.Tensor) else batch.keep
    rows = [list(batch.pending), list(batch.nodes)]
    return batch.ids.tolist(), batch.positions.tolist(), segments, keep, batch.attended, rows, batch.mask is None


def cells(world):
    """The store and its sequences, as plain values."""
    of_sequences = [
        (sequence.slots.tolist(), sequence.extent, sequence.bias(sequence.extent).tolist(), len(sequence.held))
        for sequence in world.sequences
    ]
    return of_sequences, world.packer.cells.references.tolist()


NUMBERS = st.sampled_from([0, *range(1, 40)])
ACTIONS = ["step", "step", "open", "fork", "backtrack", "tree", "branches", "close"]


KINDS = {
    "full": {},
    "window": {0: AttentionKind(sliding_window=2)},
    "chunks": {0: AttentionKind(chunk=3)},
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=150)
@given(life=st.lists(st.tuples(st.sampled_from(ACTIONS), NUMBERS), max_size=12))
@example(life=[("branches", 1), ("step", 1), ("step", 2), ("branches", 5), ("step", 1), ("step", 2), ("step", 3)])
def test_one_token_each_is_prepared_as_a_forest_is(kinds, life):
    fast, general = world(kinds), world(kinds)
    for action, number in [("open", 3), *life, ("step", 5)]:
        for packing in (fast, general):
            happen(packing, action, number)
        if action == "step" and fast.sequences:
            tokens = [number + n for n in range(len(fast.sequences))]
            assert facts(prepared(fast, tokens, whole=False)) == facts(prepared(general, tokens, whole=True))
        assert cells(fast) == cells(general)


def happen(world, action, number):
    """Change the cells between steps of one token."""
    packer, sequences = world.packer, world.sequences
    index = number % len(sequences) if sequences else 0
    if action == "open" or (not sequences and action != "step"):
        sequences.append(packer.cells.open())
        if number:  # else nothing of it is computed
            packer.prepare(sequences[-1:], [[*range(number % 7 + 1)]], empty(1))
    elif action == "fork":
        sequences.append(sequences[index].fork())
    elif action == "backtrack":
        sequences[index].truncate(number % (len(sequences[index]) + 1))
    elif action == "tree":  # the accepted end of a chain whose beginning was rejected leaves a hole
        packer.prepare([sequences[index]], [[1]], chain_draft(3))
        sequences[index].accept([number % 3])
    elif action == "branches":  # later nodes kept after earlier ones; the hole below is filled by the next steps
        packer.prepare([sequences[index]], [[1]], Draft(Shape(1, np.array([0, 0, 1, 2])), torch.arange(4)))
        sequences[index].accept([[0, 2], [1, 3], [1], [0]][number % 4])
    elif action == "close":
        sequences.pop(index).close()


def chain_draft(depth):
    return Draft(chain(depth), torch.arange(depth))


@pytest.mark.parametrize("kinds", [{}, {0: AttentionKind(sliding_window=2)}], ids=["full", "window"])
def test_sequences_without_holes_take_the_short_way(monkeypatch, kinds):
    setup = world(kinds)
    happen(setup, "open", 3)
    happen(setup, "open", 4)
    monkeypatch.setattr(Packer, "finish", None)
    pack = prepared(setup, [7, 8], whole=False)
    assert pack.ids.tolist() == [[7, 8]] and pack.positions.tolist() == [[4, 5]]
    assert [len(sequence) for sequence in setup.sequences] == [5, 6]


@pytest.mark.parametrize("kinds", [{0: AttentionKind(sliding_window=2)}, {}], ids=["window", "dense"])
def test_windows_and_dense_masks_are_prepared_as_in_forests(kinds):
    both = []
    for whole in (False, True):
        setup = world(kinds, dense=not kinds)
        happen(setup, "open", 4)
        both.append(facts(prepared(setup, [9], whole)))
    assert both[0] == both[1]
    assert len(both[0][2]) == 1 + len(kinds)


def test_two_forks_never_get_one_cell():
    setup = world()
    happen(setup, "open", 4)
    setup.sequences.append(setup.sequences[0].fork())
    prepared(setup, [7, 8], whole=False)
    assert len({sequence.slots[-1] for sequence in setup.sequences}) == 2
    used = setup.packer.cells.references[0]
    assert used[:5].tolist() == [2] * 5 and np.count_nonzero(used) == 7


def test_a_sequence_with_a_hole_leaves_the_others_cells_as_they_are():
    """The short way is given up after the first sequence has got its cell."""
    setup = world()
    happen(setup, "open", 0)
    happen(setup, "open", 4)
    packer = setup.packer
    packer.prepare(setup.sequences[1:], [[1]], chain_draft(2))
    setup.sequences[1].accept([1])
    prepared(setup, [7, 8], whole=False)
    assert packer.cells.references[0].sum() == 1 and packer.cells.references.max() == 1


def test_a_full_span_grows():
    setup = world()
    setup.sequences.append(setup.packer.cells.open())
    for token in range(GRAIN + 2):
        pack = prepared(setup, [token], whole=False)
    assert setup.sequences[0].slots.tolist() == list(range(GRAIN + 2))
    assert pack.pack.segments[FULL][0].end == GRAIN + 2
