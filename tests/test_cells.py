"""Bookkeeping of cells, driven at random against plain lists."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from spec_lab.cells import GRAIN, Cells, SpanFull, as_index


class CellsAgainstLists(RuleBasedStateMachine):
    """Each path is mirrored by a list of labels; each cell's key holds the label of the token written there."""

    paths = Bundle("paths")

    def __init__(self):
        super().__init__()
        self.cells = Cells()
        self.cells.write(0, torch.zeros(1, 0, 1), torch.zeros(1, 0, 1), [])
        self.lists = {}
        self.label = 0

    @rule(target=paths)
    def open(self):
        path = self.cells.open(4)
        self.lists[path] = []
        return path

    @rule(path=paths, count=st.integers(1, 40), kept=st.lists(st.integers(0, 39), unique=True, max_size=6))
    def step(self, path, count, kept):
        """Write ``count`` tokens, keep some in any order, drop the others."""
        slots = self.cells.take(path, count)
        labels = np.arange(self.label + 1, self.label + count + 1)
        self.label += count
        key = torch.from_numpy(labels).float().reshape(1, -1, 1)
        self.cells.write(0, key, key, [(path.span, 0, count, as_index(slots, torch.device("cpu")))])
        kept = [place for place in kept if place < count]
        self.cells.keep(path, slots[kept])
        self.cells.drop(path, np.delete(slots, kept))
        self.lists[path] += labels[kept].tolist()

    @rule(target=paths, path=paths)
    def fork(self, path):
        twin = self.cells.fork(path)
        self.lists[twin] = list(self.lists[path])
        return twin

    @rule(path=paths, share=st.floats(0, 1))
    def backtrack(self, path, share):
        length = int(share * len(self.lists[path]))
        self.cells.backtrack(path, length)
        del self.lists[path][length:]

    @rule(path=consumes(paths))
    def close(self, path):
        self.cells.close(path)
        del self.lists[path]

    @invariant()
    def paths_hold_what_the_lists_say(self):
        for path, labels in self.lists.items():
            found = self.cells.keys[0][path.span, 0, path.slots, 0].tolist() if labels else []
            assert found == labels

    @invariant()
    def bias_shows_exactly_the_own_cells(self):
        for path in self.lists:
            assert set(np.flatnonzero(path.bias(self.cells.capacity) == 0)) == set(path.slots.tolist())
            assert path.extent == (int(path.slots.max()) + 1 if len(path) else 0)

    @invariant()
    def references_count_the_paths(self):
        counted = np.zeros_like(self.cells.references)
        for path in self.lists:
            np.add.at(counted, (path.span, path.slots), 1)
        assert (counted == self.cells.references).all()


TestCellsAgainstLists = CellsAgainstLists.TestCase
TestCellsAgainstLists.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_cell_in_use_is_never_handed_out():
    cells = Cells()
    path = cells.open(8)
    first = cells.take(path, 5)
    assert not set(first) & set(cells.take(path, 5))


def test_rejected_cells_are_used_again_before_new_ones():
    cells = Cells()
    path = cells.open(8)
    slots = cells.take(path, 4)
    cells.keep(path, slots[[0, 2]])
    cells.drop(path, slots[[1, 3]])
    assert cells.take(path, 3).tolist() == [1, 3, 4]


def test_a_span_is_free_once_every_fork_is_closed():
    cells = Cells()
    path = cells.open(8)
    cells.keep(path, cells.take(path, 3))
    twin = cells.fork(path)
    cells.close(path)
    assert cells.open(8).span != twin.span
    cells.close(twin)
    assert cells.open(8).span == twin.span


def test_cells_held_by_a_failed_forward_come_back_with_the_span():
    cells = Cells()
    path = cells.open(8)
    cells.take(path, 3)
    cells.close(path)
    assert cells.take(cells.open(8), 3).tolist() == [0, 1, 2]


def test_a_span_refuses_to_outgrow_its_limit():
    cells = Cells(limit=GRAIN)
    path = cells.open(8)
    cells.take(path, GRAIN)
    with pytest.raises(SpanFull, match=f"needs {GRAIN + 1} cells, its span is limited to {GRAIN}"):
        cells.take(path, 1)
    with pytest.raises(SpanFull):
        cells.open(GRAIN + 1)


def test_backtracking_beyond_the_path_is_an_error():
    cells = Cells()
    with pytest.raises(ValueError, match="path of 0 cells to 3"):
        cells.backtrack(cells.open(8), 3)
