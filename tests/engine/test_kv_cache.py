"""Cells: driven at random against plain lists, then what a random life seldom meets."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from spec_lab.engine.kv_cache import GRAIN, Cells, SpanFull, as_index

CPU = torch.device("cpu")


class CellsAgainstLists(RuleBasedStateMachine):
    """Each path is mirrored by a list of labels; each cell's contents are the label of the token written there."""

    paths = Bundle("paths")

    def __init__(self):
        super().__init__()
        self.cells = Cells()
        first = self.cells.open(1)
        self.write(torch.zeros(0), [(first.span, 0, 0, slice(0, 0))])  # the stores are there from the start
        self.cells.close(first)
        self.lists = {}
        self.label = 0

    def write(self, labels, places):
        self.cells.write(0, labels.reshape(1, 1, -1, 1), -labels.reshape(1, 1, -1, 1), places)
        self.cells.write_hidden(2 * labels.reshape(-1, 1), places)

    @rule(target=paths, reserve=st.sampled_from([1, 4, GRAIN, GRAIN + 1]))
    def open(self, reserve):
        path = self.cells.open(reserve)
        assert self.cells.capacity >= reserve
        self.lists[path] = []
        return path

    @rule(path=paths, count=st.integers(1, 40), kept=st.lists(st.integers(0, 39), unique=True, max_size=6))
    def step(self, path, count, kept):
        """Write ``count`` tokens, keep some in any order, drop the others."""
        slots = self.cells.take(path, count)
        labels = np.arange(self.label + 1, self.label + count + 1)
        self.label += count
        self.write(torch.from_numpy(labels).float(), [(path.span, 0, count, as_index(slots, CPU))])
        kept = [place for place in kept if place < count]
        self.cells.keep(path, slots[kept])
        self.cells.drop(path, np.delete(slots, kept))
        self.lists[path] += labels[kept].tolist()

    @rule(target=paths, path=paths)
    def fork(self, path):
        twin = self.cells.fork(path)
        self.lists[twin] = list(self.lists[path])
        return twin

    @rule(path=paths, back=st.integers(0, 4))
    def backtrack(self, path, back):
        length = max(0, len(self.lists[path]) - back)
        self.cells.backtrack(path, length)
        del self.lists[path][length:]

    @rule(path=consumes(paths))
    def close(self, path):
        self.cells.close(path)
        del self.lists[path]

    @invariant()
    def paths_hold_what_the_lists_say(self):
        for path, labels in self.lists.items():
            held = torch.tensor(labels, dtype=torch.float32)
            assert torch.equal(self.cells.keys[0][path.span][0, 0, path.slots, 0], held)
            assert torch.equal(self.cells.values[0][path.span][0, 0, path.slots, 0], -held)
            assert torch.equal(self.cells.hidden[path.span, path.slots, 0], 2 * held)
            assert not labels or self.cells.last_hidden(path) == 2 * labels[-1]

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


def filled(cells, count=3):
    """A path of ``count`` cells in a span of its own."""
    path = cells.open(8)
    cells.keep(path, cells.take(path, count))
    return path


def test_cells_are_handed_out_lowest_first_and_only_while_nobody_uses_them():
    """Neither those held by a forward, nor those a path or its fork has kept; dropped ones come again before new."""
    cells = Cells()
    path = cells.open(8)
    slots = cells.take(path, 5)
    assert slots.tolist() == [0, 1, 2, 3, 4]
    cells.keep(path, slots[[0, 2]])
    cells.drop(path, slots[[1]])
    assert cells.take(path, 2).tolist() == [1, 5], "3 and 4 are still held"
    twin = cells.fork(path)
    cells.close(path)
    assert cells.take(twin, 1).tolist() == [6], "the fork still has 0 and 2"


def test_a_span_is_free_once_every_fork_is_closed():
    cells = Cells()
    path = filled(cells)
    twin = cells.fork(path)
    cells.close(path)
    assert cells.open(8).span != twin.span
    cells.close(twin)
    assert cells.open(8).span == twin.span


def test_closing_twice_closes_once():
    """Else the second time would free the span under a living fork."""
    cells = Cells()
    path = filled(cells)
    twin = cells.fork(path)
    cells.close(path)
    cells.close(path)
    assert cells.open(8).span != twin.span
    assert cells.references[twin.span, :4].tolist() == [1, 1, 1, 0]


def test_cells_held_by_a_failed_forward_come_back_with_the_span():
    cells = Cells()
    path = cells.open(8)
    cells.take(path, 3)
    cells.close(path)
    again = cells.open(8)
    assert again.span == path.span
    assert cells.take(again, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("limit", [16, GRAIN, GRAIN + 10])
def test_a_span_holds_its_limit_and_not_a_cell_more(limit):
    cells = Cells(limit=limit)
    path = cells.open(8)
    held = cells.take(path, limit)
    with pytest.raises(SpanFull, match=f"needs {limit + 1} cells, its span is limited to {limit}"):
        cells.take(path, 1)
    assert (cells.references[path.span, held] == 1).all(), "what it held it still holds"
    with pytest.raises(SpanFull):
        cells.open(limit + 1)
    cells.close(path)
    with pytest.raises(SpanFull):  # in a span that is free as well
        cells.open(limit + 1)


@pytest.mark.parametrize("length", [-1, 4])
def test_backtracking_to_no_length_of_the_path_is_an_error(length):
    cells = Cells()
    path = filled(cells)
    with pytest.raises(ValueError, match=f"path of 3 cells to {length}"):
        cells.backtrack(path, length)


def test_a_path_without_hidden_states_says_so():
    cells = Cells()
    path = filled(cells)
    with pytest.raises(ValueError, match="no hidden state"):
        cells.last_hidden(path)
    cells.write_hidden(torch.ones(3, 2), [(path.span, 0, 3, as_index(path.slots, CPU))])
    assert cells.last_hidden(path).tolist() == [1, 1]
    with pytest.raises(ValueError, match="no hidden state"):
        cells.last_hidden(cells.open())


@pytest.mark.parametrize("slots", [[3], [3, 4, 5], [0, 1], [3, 5], [0, 2, 3]])
def test_an_index_picks_the_slots_and_is_a_slice_where_they_are_consecutive(slots):
    index = as_index(np.array(slots), CPU)
    assert torch.arange(9)[index].tolist() == slots
    assert isinstance(index, slice) == (slots == list(range(slots[0], slots[0] + len(slots))))
