"""Decoding steps in fixed shapes: the logits of plain forwards, whatever was captured before and is replayed."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.draft import empty
from spec_lab.core.shape import chain, forest
from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.graphs import MAX_PENDING, MAX_ROWS, Buffers, padded, uncaptured
from spec_lab.runners.kv_cache import GRAIN
from tests.propose.lab import COLD, WARM, decode, draft_model, emitted, requests
from tests.runners.replays import replayed
from tests.runners.test_causal_lm import TREE, World, assert_levels_match, assert_rows_match, life, random_draft
from tests.tiny import CONTEXT, FAMILIES, VOCABULARY, WINDOWED, tiny_model


def fixed(model, capture=uncaptured):
    """A runner whose decoding steps have fixed shapes."""
    lm = CausalLM(model, fixed=True)
    lm.graphs.capture = capture
    return lm


CAPTURES = pytest.mark.parametrize("capture", [pytest.param(uncaptured, marks=pytest.mark.nightly), replayed])


@CAPTURES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(27)
def test_every_family_decodes_scattered_forests_exactly(family, capture):
    lm = fixed(tiny_model(family), capture)
    life(lm)
    assert lm.graphs.captured


@pytest.mark.one_in(4)
@CAPTURES
@pytest.mark.parametrize("family", WINDOWED)
def test_layers_with_windows_and_chunks_decode_scattered_forests_exactly(family, capture):
    oracle = tiny_model(family)
    oracle.set_attn_implementation("sdpa")
    life(fixed(tiny_model(family), capture), oracle)


def started(lm, lengths, seed=0):
    world = World(lm, np.random.default_rng(seed))
    for length in lengths:
        world.add(length)
    world.step([chain(0)] * len(lengths), [()] * len(lengths))
    return world


def test_a_shape_is_captured_once_and_replayed_for_other_tokens_cells_and_trees():
    """Trees of 3 to 7 nodes with a root are padded to 8 rows."""
    captures = Mock(side_effect=replayed)
    world = started(fixed(tiny_model(), captures), [9])
    world.step([TREE], [(0, 1)])
    before = captures.call_count
    for accept in ([(1, 0)], [()], [(2,)], [(0, 0, 0)]):
        world.step([TREE], accept)
    world.step([chain(5)], [(0, 0)])
    assert captures.call_count == before


def test_cells_that_are_allocated_anew_are_captured_anew():
    captures = Mock(side_effect=replayed)
    lm = fixed(tiny_model(), captures)
    world = started(lm, [9])
    world.step([TREE], [()])
    before = captures.call_count
    lm.cells.reserve([lm.cells.capacity + 1])
    world.step([TREE], [()])
    assert captures.call_count == before + 1
    world.add(4)  # a second stream
    world.step([TREE, TREE], [(), ()])


@pytest.mark.parametrize("layers", [(-1,), (0, 2)], ids=str)
def test_hidden_states_and_logits_are_those_of_a_forward_without_fixed_shapes(layers):
    model, outputs = tiny_model(), []
    draft = random_draft(forest((TREE, chain(3))), np.random.default_rng(5))
    for capture in (None, replayed):
        lm = CausalLM(model) if capture is None else fixed(model, capture)
        sequences = [lm.open(), lm.open()]
        lm.forward(sequences, [[1, 2, 3], [5, 6, 7, 8]], empty(2))
        for _ in range(2):  # the second is a replay
            for sequence in sequences:
                sequence.accept()
                sequence.truncate(3)
            lm.capture(layers)
            outputs.append(lm.forward(sequences, [[9], [4, 2]], draft))
    for output in outputs[1:]:
        torch.testing.assert_close(output.logits, outputs[0].logits, rtol=0, atol=1e-10)
        assert output.attended == outputs[0].attended
        for tree, nodes in enumerate(([1, 4], [0])):
            expected = outputs[0].observed(tree, nodes)
            torch.testing.assert_close(output.observed(tree, nodes), expected, rtol=0, atol=1e-10)


def test_outputs_of_all_shapes_lie_in_one_memory():
    outputs = []

    def capture(forward):
        outputs.append(forward())
        return lambda: forward()

    lm = fixed(tiny_model(), capture)
    lm.capture((0, 2))
    world = started(lm, [9])
    for shape in (chain(7), chain(3), TREE, chain(1)):
        world.step([shape], [()])
    for number, output in enumerate(zip(*outputs, strict=True)):
        assert len({tensor.untyped_storage().data_ptr() for tensor in output[1:]}) == 1, number
    assert len({logits.shape for logits, _ in outputs}) > 2


def test_what_one_forward_returned_is_not_overwritten_by_the_next():
    lm = fixed(tiny_model(), replayed)
    lm.capture((-1,))
    sequence = lm.open()
    lm.forward([sequence], [[1, 2, 3]], empty(1))
    first = lm.forward([sequence], [[4]], empty(1))
    logits, hidden = first.logits.clone(), first.hidden.clone()
    lm.forward([sequence], [[5]], empty(1))
    assert torch.equal(first.logits, logits) and torch.equal(first.hidden, hidden)


@CAPTURES
def test_nodes_computed_level_by_level_have_the_logits_of_one_forward(capture):
    lm = fixed(tiny_model(), capture)
    for _ in range(2):
        assert_levels_match(lm)


@pytest.mark.parametrize("others", [GRAIN - 3, GRAIN - 1, GRAIN, 2 * GRAIN])
def test_padding_rows_leave_the_cells_of_sequences_that_wait_as_they_are(others):
    """A sequence in another stream is not part of the forward, and may hold the cells up to the end of the bucket."""
    lm = fixed(tiny_model(max_position_embeddings=1024), replayed)
    waiting, sequence = lm.open(), lm.open()
    text = np.random.default_rng(2).integers(0, VOCABULARY, others).tolist()
    lm.forward([waiting], [text], empty(1))
    lm.forward([sequence], [[1, 2, 3]], empty(1))
    held = [store[waiting.stream, :, :others].clone() for store in (*lm.cells.keys, *lm.cells.values)]
    draft = random_draft(TREE, np.random.default_rng(3))
    output = lm.forward([sequence], [[4]], draft)
    assert_rows_match(lm.model, [[1, 2, 3, 4]], draft, output.logits)
    stores = (*lm.cells.keys, *lm.cells.values)
    assert all(torch.equal(store[waiting.stream, :, :others], old) for store, old in zip(stores, held, strict=True))


@torch.inference_mode()
def spoil(lm, sequence):
    for store in lm.cells.values:
        store[sequence.stream, :, : len(sequence)] = torch.nan


def test_what_an_earlier_sequence_left_cannot_make_a_later_one_nan():
    lm = fixed(tiny_model())
    first = lm.open()
    lm.forward([first], [[1, 2, 3, 4, 5, 6]], empty(1))
    spoil(lm, first)
    first.close()
    again = lm.open()
    output = lm.forward([again], [[7, 8]], empty(1))
    assert again.stream == first.stream and bool(torch.isfinite(output.logits).all())


def test_one_sequence_with_nan_leaves_its_batch_mates_alone():
    lm = fixed(tiny_model())
    world = started(lm, [5, 4])
    spoil(lm, world.caches[0])
    output = lm.forward(world.caches, [[7], [8]], empty(2))
    assert bool(torch.isnan(output.logits[0]).any()) and bool(torch.isfinite(output.logits[1]).all())


@pytest.mark.nightly
def test_prompts_and_steps_with_too_many_rows_run_in_shapes_as_they_come():
    lm = fixed(tiny_model(max_position_embeddings=1024))
    world = started(lm, [MAX_PENDING + 1])
    assert not lm.graphs.captured
    world.step([chain(MAX_ROWS)], [(0, 0)])
    assert not lm.graphs.captured
    draft = random_draft(TREE, np.random.default_rng(3))
    output = lm.forward(world.caches, [world.tokens[0][len(world.caches[0]) :]], draft, [(lm.open(), [1, 2])])
    assert not lm.graphs.captured
    assert_rows_match(lm.model, world.tokens, draft, output.logits)
    assert int(lm.cells.references.sum()) == len(world.tokens[0]) + TREE.nodes + 2, "no cell was taken twice"


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_a_draft_model_and_a_target_in_fixed_shapes_emit_the_same_tokens(drawn, sampling):
    """Grown level by level, verified as trees, in a batch whose sequences end at different times."""
    texts = []
    for fixed_shapes in (False, True):
        target = Target(CausalLM(tiny_model(), fixed=fixed_shapes), None, "tiny", CONTEXT, "", 0.0)
        small = CausalLM(tiny_model(seed=1, num_hidden_layers=1), fixed=fixed_shapes)
        for lm in (target.lm, small):
            lm.graphs.capture = replayed
        wanted = requests(sampling, stop=frozenset({7, 11}))
        group, _ = decode(target, draft_model("2x2x1", drawn, 1.0, lm=small), wanted)
        texts.append(emitted(group))
        assert all(bool(lm.graphs.captured) == fixed_shapes for lm in (target.lm, small))
    assert texts[0] == texts[1]


@given(st.integers(1, 4096))
def test_padded_sizes_are_enough_and_at_most_twice_as_many(count):
    size = padded(count)
    assert count <= size < 2 * count or size == count == 1
    assert padded(size) == size and padded(count + 1) >= size


def test_a_padding_row_attends_to_its_own_cell_only():
    """So its numbers are finite, and no other row reads them."""
    lm = fixed(tiny_model())
    world = started(lm, [5])
    lm.graphs.captured.clear()
    world.step([chain(2)], [()])
    ((buffers, _),) = lm.graphs.captured.values()
    assert isinstance(buffers, Buffers)
    padding = buffers.owner == len(buffers.committed) - 1
    assert int(padding.sum()) == 1 and set(buffers.cell[padding].tolist()) == {buffers.committed.shape[1] - 1}
    assert bool(buffers.sees[padding].all()) and not bool(buffers.committed[:, -1].any())
