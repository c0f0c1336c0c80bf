"""KV cells: random operations compared with plain lists, then cases that random operations seldom meet."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from spec_lab.runners.kv_cache import GRAIN, Cells, allocated, as_index

CPU = torch.device("cpu")


class CellsAgainstLists(RuleBasedStateMachine):
    """Each sequence is mirrored by a list of labels; a cell holds the label of the token written there."""

    sequences = Bundle("sequences")
    uniform = False

    def __init__(self):
        super().__init__()
        self.cells = Cells(uniform=self.uniform)
        first = self.cells.open(1)
        self.write(torch.zeros(0), [(first.stream, 0, 0, slice(0, 0))])  # the stores are there from the start
        self.cells.close(first)
        self.lists = {}
        self.label = 0

    def write(self, labels, places):
        self.cells.write(0, labels.reshape(1, 1, -1, 1), -labels.reshape(1, 1, -1, 1), places)

    @rule(target=sequences, reserve=st.sampled_from([1, 4, GRAIN, GRAIN + 1]))
    def open(self, reserve):
        sequence = self.cells.open(reserve)
        assert self.cells.capacity >= reserve
        self.lists[sequence] = []
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 40), kept=st.lists(st.integers(0, 39), unique=True, max_size=6))
    def step(self, sequence, count, kept):
        """Write ``count`` tokens, keep some in any order, drop the others."""
        slots = self.cells.take(sequence, count)
        labels = np.arange(self.label + 1, self.label + count + 1)
        self.label += count
        self.write(torch.from_numpy(labels).float(), [(sequence.stream, 0, count, as_index(slots, CPU))])
        kept = [index for index in kept if index < count]
        self.cells.keep(sequence, slots[kept].tolist())
        self.cells.drop(sequence, np.delete(slots, kept))
        self.lists[sequence] += labels[kept].tolist()

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        twin = self.cells.fork(sequence)
        self.lists[twin] = list(self.lists[sequence])
        return twin

    @rule(
        target=sequences,
        sequence=sequences,
        share=st.floats(0, 1),
        reserve=st.sampled_from([1, GRAIN + 1]),
        exact=st.booleans(),
    )
    def copy(self, sequence, share, reserve, exact):
        length = int(share * len(sequence))
        made = self.cells.copy(sequence, length, reserve, exact=exact)
        if exact and not self.uniform:
            assert self.cells.capacities[made.stream] == allocated([max(length, reserve)])
        assert made.slots.tolist() == list(range(length))
        self.lists[made] = self.lists[sequence][:length]
        return made

    @rule(sequence=sequences, back=st.integers(0, 4))
    def backtrack(self, sequence, back):
        length = max(0, len(self.lists[sequence]) - back)
        self.cells.backtrack(sequence, length)
        del self.lists[sequence][length:]

    @rule(sequence=consumes(sequences))
    def close(self, sequence):
        self.cells.close(sequence)
        del self.lists[sequence]

    @invariant()
    def sequences_hold_what_the_lists_say(self):
        for sequence, labels in self.lists.items():
            held = torch.tensor(labels, dtype=torch.float32)
            keys, values = (store[sequence.stream] for store in self.cells.views[0])
            assert torch.equal(keys[0, 0, sequence.slots, 0], held)
            assert torch.equal(values[0, 0, sequence.slots, 0], -held)

    @invariant()
    def bias_shows_exactly_the_own_cells(self):
        for sequence in self.lists:
            assert set(np.flatnonzero(sequence.bias(self.cells.capacity) == 0)) == set(sequence.slots.tolist())
            assert sequence.extent == (int(sequence.slots.max()) + 1 if len(sequence) else 0)

    @invariant()
    def references_count_the_sequences(self):
        counted = np.zeros_like(self.cells.references)
        for sequence in self.lists:
            np.add.at(counted, (sequence.stream, sequence.slots), 1)
        assert (counted == self.cells.references).all()


TestCellsAgainstLists = CellsAgainstLists.TestCase
TestCellsAgainstLists.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class UniformCellsAgainstLists(CellsAgainstLists):
    uniform = True

    @invariant()
    def the_spans_lie_in_one_tensor(self):
        assert self.cells.keys[0].shape[0] == self.cells.streams
        assert {*self.cells.capacities} == {self.cells.keys[0].shape[2]}


TestUniformCellsAgainstLists = UniformCellsAgainstLists.TestCase
TestUniformCellsAgainstLists.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def filled(cells, count=3):
    """A sequence of ``count`` cells in a stream of its own."""
    sequence = cells.open(8)
    cells.keep(sequence, cells.take(sequence, count).tolist())
    return sequence


def test_each_span_has_the_cells_that_its_request_needs():
    cells = Cells()
    sequences = [cells.open(reserve) for reserve in (100, 5000, 300)]
    assert cells.capacities == [GRAIN, 20 * GRAIN, 2 * GRAIN] and sum(cells.capacities) == allocated([100, 5000, 300])
    for sequence in sequences:
        cells.close(sequence)
    assert [cells.open(reserve).stream for reserve in (300, 200, 300)] == [2, 0, 1], "the smallest with room"
    cells.open(600)
    assert cells.capacities == [GRAIN, 20 * GRAIN, 2 * GRAIN, 3 * GRAIN]


def test_an_exact_span_is_freed_with_its_sequence():
    cells = Cells()
    long = filled(cells, 700)
    cells.write(0, torch.ones(1, 1, 700, 1), torch.ones(1, 1, 700, 1), [(0, 0, 700, slice(0, 700))])
    for length in (600, 3, 300):
        copy = cells.copy(long, length, length, exact=True)
        assert (copy.stream, cells.capacities) == (1, [3 * GRAIN, *allocated_each(length)])
        assert [view.shape[2] for view in cells.views[0][0]] == cells.capacities
        cells.close(copy)
        assert cells.capacities == [3 * GRAIN, 0] and cells.views[0][1][1].numel() == 0
    cells.close(long)
    assert cells.copy(long, 0, 1, exact=True).stream == 1 and cells.open(5).stream == 0, "no copy in a larger stream"


def allocated_each(length):
    return [allocated([length])]


def test_the_largest_unused_span_grows_where_none_has_room():
    cells = Cells()
    sequences = [cells.open(100), cells.open(700)]
    cells.write(0, torch.zeros(1, 1, 0, 1), torch.zeros(1, 1, 0, 1), [])
    for sequence in [*sequences, cells.open(300)]:
        cells.close(sequence)
    assert cells.open(1000).stream == 1 and cells.capacities == [GRAIN, 4 * GRAIN, 2 * GRAIN]
    assert [store.shape[2] for store in cells.views[0][0]] == cells.capacities


@pytest.mark.parametrize("reserves", [[100], [100] * 8, [100, 600, 30, 30, 30]])
def test_a_uniform_store_has_the_spans_that_are_estimated(reserves):
    cells = Cells(uniform=True)
    for reserve in sorted(reserves, reverse=True):
        cells.open(reserve)
    assert sum(cells.capacities) == allocated(reserves, uniform=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("cells", [slice(0, 3), torch.tensor([4, 0, 2])])
def test_keys_and_values_are_rounded_to_the_dtype_of_the_store(dtype, cells):
    """Those beyond the largest 8-bit float become that one; in this format they would become NaN."""
    store, key = Cells(dtype=dtype), torch.tensor([1.2345678, -3000.0, 1e-3]).reshape(1, 1, 3, 1)
    store.open(8)
    store.write(0, key, -key, [(0, 0, 3, cells)])
    keys, values = (streams[0][0, 0, cells, 0] for streams in store.views[0])
    most = torch.finfo(dtype).max
    assert keys.dtype == dtype and torch.equal(keys, key.flatten().clamp(-most, most).to(dtype))
    assert torch.equal(values, (-keys.float()).to(dtype))


def test_cells_are_handed_out_lowest_first_and_only_while_nobody_uses_them():
    """Neither those held by a forward, nor those a sequence or its fork has kept; dropped ones come first."""
    cells = Cells()
    sequence = cells.open(8)
    slots = cells.take(sequence, 5)
    assert slots.tolist() == [0, 1, 2, 3, 4]
    cells.keep(sequence, slots[[0, 2]].tolist())
    cells.drop(sequence, slots[[1]])
    assert cells.take(sequence, 2).tolist() == [1, 5], "3 and 4 are still held"
    twin = cells.fork(sequence)
    cells.close(sequence)
    assert cells.take(twin, 1).tolist() == [6], "the fork still has 0 and 2"


def test_a_span_is_free_once_every_fork_is_closed():
    cells = Cells()
    sequence = filled(cells)
    twin = cells.fork(sequence)
    cells.close(sequence)
    assert cells.open(8).stream != twin.stream
    cells.close(twin)
    assert cells.open(8).stream == twin.stream


def test_closing_twice_closes_once():
    """Else the second time would free the stream under a living fork."""
    cells = Cells()
    sequence = filled(cells)
    twin = cells.fork(sequence)
    cells.close(sequence)
    cells.close(sequence)
    assert cells.open(8).stream != twin.stream
    assert cells.references[twin.stream, :4].tolist() == [1, 1, 1, 0]


def test_cells_held_by_a_failed_forward_come_back_with_the_span():
    cells = Cells()
    sequence = cells.open(8)
    cells.take(sequence, 3)
    cells.close(sequence)
    again = cells.open(8)
    assert again.stream == sequence.stream
    assert cells.take(again, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", [-1, 4])
def test_backtracking_to_no_length_of_the_sequence_is_an_error(length):
    cells = Cells()
    sequence = filled(cells)
    with pytest.raises(ValueError, match=f"of 3 positions to {length}"):
        cells.backtrack(sequence, length)


def holding(cells, computed=2, held=(2, 3, -1, 4)):
    """A sequence with computed tokens, and the nodes of a draft tree held after them."""
    sequence = filled(cells, computed)
    taken = cells.take(sequence, sum(cell >= 0 for cell in held))
    sequence.held = np.array(held)
    assert taken.tolist() == [cell for cell in held if cell >= 0]
    return sequence


@pytest.mark.parametrize("nodes", [(), (0,), (1, 3), (3, 0), (0, 1, 3)])
def test_accepted_nodes_join_the_sequence_in_order_and_all_others_are_freed(nodes):
    """Also nodes that were never computed (-1)."""
    cells = Cells()
    sequence = holding(cells)
    held = sequence.held.copy()
    sequence.accept(nodes)
    assert sequence.slots.tolist() == [0, 1, *held[list(nodes)]]
    assert sorted(np.flatnonzero(cells.references[sequence.stream])) == sorted(sequence.slots)
    before = sequence.slots.copy()
    sequence.accept()
    assert (sequence.slots == before).all(), "nothing is held any more"


def test_truncating_and_closing_free_the_held_nodes_as_well():
    cells = Cells()
    sequence = holding(cells)
    sequence.truncate(1)
    assert np.flatnonzero(cells.references[sequence.stream]).tolist() == sequence.slots.tolist() == [0]
    sequence.close()
    other = holding(cells)
    other.close()
    assert not cells.references.any() and not other.open


def test_a_fork_holds_no_nodes_and_leaves_those_of_the_original():
    cells = Cells()
    sequence = holding(cells)
    twin = sequence.fork()
    twin.accept()
    assert len(twin) == 2 and len(sequence.held) == 4
    sequence.accept([0])
    assert sequence.slots.tolist() == [0, 1, 2] and twin.slots.tolist() == [0, 1]


@pytest.mark.parametrize("slots", [[3], [3, 4, 5], [0, 1], [3, 5], [0, 2, 3]])
def test_an_index_picks_the_slots_and_is_a_slice_where_they_are_consecutive(slots):
    index = as_index(np.array(slots), CPU)
    assert torch.arange(9)[index].tolist() == slots
    assert isinstance(index, slice) == (slots == list(range(slots[0], slots[0] + len(slots))))
