"""Steps of one token each are prepared as forests are, whatever the sequences' cells look like."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, Shape, chain, empty
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


def facts(one):
    """All that a forward reads, as plain values."""
    segments = {
        kind: [one._replace(mask=None if one.mask is None else one.mask.tolist()) for one in found]
        for kind, found in one.pack.segments.items()
    }
    keep = one.keep.tolist() if isinstance(one.keep, torch.Tensor) else one.keep
    rows = [list(one.pending), list(one.nodes)]
    return one.ids.tolist(), one.positions.tolist(), segments, keep, one.attended, rows, one.mask is None


def cells(world):
    """The store and its sequences, as plain values."""
    own = [(one.slots.tolist(), one.extent, one.bias(one.extent).tolist(), len(one.held)) for one in world.sequences]
    return own, world.packer.cells.references.tolist()


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
        for one in (fast, general):
            happen(one, action, number)
        if action == "step" and fast.sequences:
            tokens = [number + place for place in range(len(fast.sequences))]
            assert facts(prepared(fast, tokens, whole=False)) == facts(prepared(general, tokens, whole=True))
        assert cells(fast) == cells(general)


def happen(world, action, number):
    """What changes the cells between steps of one token."""
    packer, sequences = world.packer, world.sequences
    place = number % len(sequences) if sequences else 0
    if action == "open" or (not sequences and action != "step"):
        sequences.append(packer.cells.open())
        if number:  # else nothing of it is computed
            packer.prepare(sequences[-1:], [[*range(number % 7 + 1)]], empty(1))
    elif action == "fork":
        sequences.append(sequences[place].fork())
    elif action == "backtrack":
        sequences[place].truncate(number % (len(sequences[place]) + 1))
    elif action == "tree":  # the accepted end of a chain whose beginning was rejected leaves a hole
        packer.prepare([sequences[place]], [[1]], chain_draft(3))
        sequences[place].accept([number % 3])
    elif action == "branches":  # later nodes kept after earlier ones; the hole below is filled by the next steps
        packer.prepare([sequences[place]], [[1]], Draft(Shape(1, np.array([0, 0, 1, 2])), torch.arange(4)))
        sequences[place].accept([[0, 2], [1, 3], [1], [0]][number % 4])
    elif action == "close":
        sequences.pop(place).close()


def chain_draft(depth):
    return Draft(chain(depth), torch.arange(depth))


@pytest.mark.parametrize("kinds", [{}, {0: AttentionKind(sliding_window=2)}], ids=["full", "window"])
def test_sequences_without_holes_take_the_short_way(monkeypatch, kinds):
    one = world(kinds)
    happen(one, "open", 3)
    happen(one, "open", 4)
    monkeypatch.setattr(Packer, "finish", None)
    found = prepared(one, [7, 8], whole=False)
    assert found.ids.tolist() == [[7, 8]] and found.positions.tolist() == [[4, 5]]
    assert [len(sequence) for sequence in one.sequences] == [5, 6]


@pytest.mark.parametrize("kinds", [{0: AttentionKind(sliding_window=2)}, {}], ids=["window", "dense"])
def test_windows_and_dense_masks_are_prepared_as_in_forests(kinds):
    found = []
    for whole in (False, True):
        one = world(kinds, dense=not kinds)
        happen(one, "open", 4)
        found.append(facts(prepared(one, [9], whole)))
    assert found[0] == found[1]
    assert len(found[0][2]) == 1 + len(kinds)


def test_two_forks_never_get_one_cell():
    one = world()
    happen(one, "open", 4)
    one.sequences.append(one.sequences[0].fork())
    prepared(one, [7, 8], whole=False)
    assert len({sequence.slots[-1] for sequence in one.sequences}) == 2
    used = one.packer.cells.references[0]
    assert used[:5].tolist() == [2] * 5 and np.count_nonzero(used) == 7


def test_a_sequence_with_a_hole_leaves_the_others_cells_as_they_are():
    """The short way is given up after the first sequence has got its cell."""
    one = world()
    happen(one, "open", 0)
    happen(one, "open", 4)
    packer = one.packer
    packer.prepare(one.sequences[1:], [[1]], chain_draft(2))
    one.sequences[1].accept([1])
    prepared(one, [7, 8], whole=False)
    assert packer.cells.references[0].sum() == 1 and packer.cells.references.max() == 1


def test_a_full_span_grows():
    one = world()
    one.sequences.append(one.packer.cells.open())
    for token in range(GRAIN + 2):
        found = prepared(one, [token], whole=False)
    assert one.sequences[0].slots.tolist() == list(range(GRAIN + 2))
    assert found.pack.segments[FULL][0].end == GRAIN + 2
