"""Blocks: rows that attend to everything before them and to each other, and leave no trace in their sequences."""

import math
from dataclasses import replace

import pytest
import torch

from spec_lab.core.clock import Clock
from spec_lab.runners.attention import AttentionKind
from spec_lab.runners.block_lm import BlockLM
from spec_lab.runners.softmax import Softmax

H, SIZE = 6, 3


def one_layer(seen):
    """Attention of one head whose queries, keys and values are the rows themselves."""

    def layers(x, positions, pack, block_rows):
        seen.append(positions[0].index_select(0, block_rows).tolist())
        keys = x[:, None]  # [1, heads, N, H]
        read, _ = pack.update(keys, keys, 0)
        return read.attend(keys, Softmax())[0, :, 0].index_select(0, block_rows)

    return layers


def dense(before, block, hidden=()):
    rows, scores = torch.cat([before, block]), block @ torch.cat([before, block]).T / math.sqrt(H)
    for query, key in hidden:
        scores[query, key] = -math.inf
    return scores.softmax(-1) @ rows


def rows(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def lm():
    seen = []
    made = BlockLM(one_layer(seen), 1, torch.device("cpu"), torch.float64)
    made.seen = seen
    return made


def computed(lm, sequences, features, block):
    return lm.forward(sequences, features, block, Clock(torch.device("cpu")).phase("propose_forward"))


@pytest.mark.parametrize("chunk", [512, 2])
def test_blocks_attend_to_all_features_and_to_themselves(lm, chunk):
    lm._packer = replace(lm._packer, chunk=chunk)
    sequences, known = [lm.open(), lm.open()], [torch.empty(0, H, dtype=torch.float64)] * 2
    for step, lengths in enumerate([(5, 1), (1, 4), (0, 2), (3, 0)]):
        new = [rows(length, H, seed=10 * step + n) for n, length in enumerate(lengths)]
        block = rows(2, SIZE, H, seed=100 + step)
        outputs = computed(lm, sequences, new, block)
        known = [torch.cat(both) for both in zip(known, new, strict=True)]
        for n in range(2):
            torch.testing.assert_close(outputs[n], dense(known[n], block[n]))
        assert [len(sequence) for sequence in sequences] == [len(text) for text in known]
        assert lm.seen[-1] == [len(text) + row for text in known for row in range(SIZE)]


@pytest.mark.parametrize("chunk", [512, 2])
@pytest.mark.parametrize("kind", [AttentionKind(causal=True), AttentionKind(3), AttentionKind(2, causal=True)])
def test_blocks_attend_as_the_kind_of_their_layer_has_it(lm, kind, chunk):
    lm._packer = replace(lm._packer, kinds={0: kind}, chunk=chunk)
    sequences, known = [lm.open(), lm.open()], [torch.empty(0, H, dtype=torch.float64)] * 2
    for step, lengths in enumerate([(5, 1), (1, 4)]):
        new = [rows(length, H, seed=10 * step + n) for n, length in enumerate(lengths)]
        block = rows(2, SIZE, H, seed=100 + step)
        outputs = computed(lm, sequences, new, block)
        known = [torch.cat(both) for both in zip(known, new, strict=True)]
        for text, output, block_rows in zip(known, outputs, block, strict=True):
            every = [(query, key) for query in range(SIZE) for key in range(len(text) + SIZE)]
            away = {pair: len(text) + pair[0] - pair[1] for pair in every}  # how many positions a key is before
            far = {pair for pair in every if kind.sliding_window and abs(away[pair]) >= kind.sliding_window}
            later = {pair for pair in every if kind.causal and away[pair] < 0}
            torch.testing.assert_close(output, dense(text, block_rows, far | later))


def test_outputs_of_the_rows_before_a_block_are_returned_as_well(lm):
    lm._packer = replace(lm._packer, kinds={0: AttentionKind(causal=True)})
    text, block = rows(4, H, seed=1), rows(1, SIZE, H, seed=2)
    timed = Clock(torch.device("cpu")).phase("propose_forward")
    outputs = lm.forward([lm.open()], [text], block, timed, before=1)
    both = torch.cat([text[-1:], block[0]])
    later = [(query, key) for query in range(SIZE + 1) for key in range(4 + SIZE) if key > query + 3]
    torch.testing.assert_close(outputs[0], dense(text[:-1], both, later))


def test_a_block_of_a_fork_reads_the_common_part_and_its_own(lm):
    first, block = rows(4, H, seed=1), rows(1, SIZE, H, seed=2)
    kv = lm.open()
    computed(lm, [kv], [first], block)
    twin = kv.fork()
    kv.truncate(2)
    more = [rows(2, H, seed=3), rows(1, H, seed=4)]
    outputs = computed(lm, [kv, twin], more, torch.cat([block, block]))
    torch.testing.assert_close(outputs[0], dense(torch.cat([first[:2], more[0]]), block[0]))
    torch.testing.assert_close(outputs[1], dense(torch.cat([first, more[1]]), block[0]))
    kv.close()
    twin.close()
    assert not lm.cells.references.any()
