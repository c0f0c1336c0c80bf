"""The target's forward on a device without numbers: ``run`` reads nothing back, so a CUDA graph could capture it.

The ``meta`` device has shapes and no numbers: uploads and indexing work there, while ``.cpu()``, ``.item()``, ``bool``,
``nonzero`` and boolean indexing raise.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import chain, forest, tree
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.feature_lm import FeatureLM
from tests.tiny import VOCABULARY, tiny_model

TREE = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SHAPES = {
    "nothing": forest((chain(0), chain(0))),
    "chains": forest((chain(3), chain(2))),
    "trees": forest((TREE, chain(0))),
}
PENDING = {"decoding": [[1], [4]], "prompts": [[1, 2, 3], [4, 5, 6, 7, 8, 9]], "both": [[3], [4, 5, 6, 7, 8, 9]]}
ATTENTION = pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])


def meta_lm(attention="per_sequence"):
    """A tiny Llama without numbers. Prompts of more than 4 tokens are computed in chunks."""
    with torch.device("meta"):
        model = tiny_model(dtype=torch.float32)
    lm = CausalLM(model, attention, chunk=4)
    assert lm.device.type == "meta" and all(parameter.is_meta for parameter in model.parameters())
    return lm


def without_numbers(shape):
    return Draft(shape, torch.empty(shape.nodes, dtype=torch.long, device="meta"))


def started(lm, lengths=(3, 5)):
    """Sequences that hold some tokens; the first has a hole where a rejected node was."""
    sequences = [lm.open() for _ in lengths]
    shape = forest((chain(2), chain(1)))
    lm.run(lm.prepare(sequences, [list(range(length)) for length in lengths], without_numbers(shape)))
    sequences[0].accept((1,))
    sequences[1].accept()
    return sequences


def test_reading_a_tensor_of_this_device_raises():
    """The other tests rely on this."""
    x = torch.ones(3, device="meta")
    for read in (x.cpu, x.sum().item, lambda: bool(x[0]), x.nonzero, lambda: x[x > 0], x.tolist):
        with pytest.raises((NotImplementedError, RuntimeError)):
            read()


@pytest.mark.each_value
@ATTENTION
@pytest.mark.parametrize("layers", [(), (-1,), (0, 1)], ids=str)
@pytest.mark.parametrize("pending", PENDING.values(), ids=PENDING)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_forward_reads_nothing_back(attention, layers, pending, shape):
    lm = meta_lm(attention)
    lm.capture(layers)
    sequences, third = started(lm), lm.open()
    prepared = lm.prepare(sequences, pending, without_numbers(shape), [(third, list(range(6)))])
    output = lm.run(prepared)
    assert output.logits.device.type == "meta" and output.logits.shape == (shape.rows, VOCABULARY)
    assert output.attended == prepared.attended > 0
    states = [*output.pending, *output.nodes]
    assert all(state.is_meta and state.shape[1] == 32 * len(layers) for state in states)
    if layers:
        assert [len(hidden) for hidden in output.pending] == [*map(len, pending), 6]
        assert [len(hidden) for hidden in output.nodes] == [len(rows) - 1 for rows in shape.trees]


@ATTENTION
def test_all_inputs_of_run_are_on_the_device(attention):
    """``run`` would otherwise wait for the host at each index that it uploads."""
    lm = meta_lm(attention)
    prepared = lm.prepare(started(lm), PENDING["prompts"], without_numbers(SHAPES["trees"]), [(lm.open(), [1, 2])])
    for part in (prepared, *(chunk for chunk, _ in prepared.early)):
        segments = [segment for every in part.pack.segments.values() for segment in every]
        masks, slots = [segment.mask for segment in segments], [segment.slots for segment in segments]
        for tensor in (part.ids, part.positions, part.keep, part.mask, *masks, *slots):
            assert not isinstance(tensor, torch.Tensor) or tensor.is_meta


class Uploads(TorchDispatchMode):
    """Counts copies from the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.is_meta:
            self.count += any(isinstance(each, torch.Tensor) and not each.is_meta and each.dim() for each in args)
        return output


@pytest.mark.parametrize("size", [1, 8])
def test_a_forward_is_uploaded_at_once(size):
    """Tokens, positions, masks, and cells with holes between them, in steps without drafts, of trees and of a level."""
    lm, counts = meta_lm(), []
    sequences = [lm.open() for _ in range(size)]
    for number, shape in enumerate((forest((chain(0),) * size), forest((TREE,) * size))):
        with Uploads() as uploads:
            lm.run(lm.prepare(sequences, [[1]] * size, without_numbers(shape)))
        counts.append(uploads.count)
        for sequence in sequences:
            sequence.accept((0, 2) if number else ())
    lm.run(lm.prepare(sequences, [[1]] * size, without_numbers(forest((chain(0),) * size))))
    shape = forest((TREE,) * size)
    rows = np.flatnonzero(shape.depth == 1)
    with Uploads() as uploads:
        lm.extend(sequences, shape, rows, np.zeros(len(rows), dtype=np.int64))
    assert [*counts, uploads.count] == [1, 1, 1]


def test_nodes_computed_by_levels_read_nothing_back():
    lm = meta_lm()
    sequences = started(lm)
    lm.run(lm.prepare(sequences, PENDING["decoding"], empty(2, torch.device("meta"))))
    shape = forest((TREE, chain(2)))
    for depth in range(1, 4):
        rows = np.concatenate([tree[shape.depth[tree] == depth] for tree in shape.trees])
        token = torch.empty(len(rows), dtype=torch.long, device="meta")
        outputs = lm.extend(sequences, shape, rows, token)
        assert outputs.logits.is_meta and outputs.logits.shape == (len(rows), VOCABULARY)


def test_layers_that_read_features_read_nothing_back():
    device, timed = torch.device("meta"), Clock().phase("propose_forward")

    def layers(x, positions, pack):
        pack.update(x[:, None], x[:, None], 0)
        return x

    lm = FeatureLM(layers, 1, device, torch.float64)
    sequences, shape = [lm.open(), lm.open()], forest((TREE, chain(2)))
    assert lm.forward(sequences, [2, 1], torch.empty(3, 32, device=device), timed).shape == (2, 32)
    for depth in range(1, 4):
        rows = np.concatenate([tree[shape.depth[tree] == depth] for tree in shape.trees])
        outputs = lm.extend(sequences, shape, rows, torch.empty(len(rows), 32, device=device), timed)
        assert outputs.is_meta and outputs.shape == (len(rows), 32)


def test_a_batch_may_only_prefill():
    lm = meta_lm()
    output = lm.run(
        lm.prepare([], [], empty(0, torch.device("meta")), [(lm.open(), [1, 2, 3, 4, 5]), (lm.open(), [6])])
    )
    assert output.logits.is_meta
