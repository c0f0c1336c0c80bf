"""Layers over features: long prompts are computed in parts, with the same outputs and a bounded attention mask."""

import math

import pytest
import torch

from spec_lab.core.clock import Clock
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.runners.softmax import Softmax

H = 6


def rows(length, seed):
    return torch.randn(length, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def last_of(known):
    return (known[-1] @ known.T / math.sqrt(H)).softmax(-1) @ known


@pytest.mark.parametrize("chunk", [512, 2])
def test_outputs_do_not_depend_on_the_parts_in_which_inputs_are_computed(chunk):
    sizes, starts = [], []

    def layers(x, positions, pack):
        """Attention of one head whose queries, keys and values are the inputs themselves."""
        sizes.append(x.shape[1])
        starts.append(positions[0].tolist())
        keys = x[:, None]  # [1, heads, N, H]
        read, _ = pack.update(keys, keys, 0)
        return read.attend(keys, Softmax())[:, :, 0]

    lm = FeatureLM(layers, 1, torch.device("cpu"), torch.float64, chunk)
    sequences, known = [lm.open(), lm.open()], [torch.empty(0, H, dtype=torch.float64)] * 2
    for step, lengths in enumerate([(5, 1), (1, 4), (2, 2)]):
        new = [rows(length, 10 * step + n) for n, length in enumerate(lengths)]
        timed = Clock(torch.device("cpu")).phase("propose_forward")
        output = lm.forward(sequences, lengths, torch.cat(new), timed)
        known = [torch.cat(both) for both in zip(known, new, strict=True)]
        torch.testing.assert_close(output, torch.stack([last_of(text) for text in known]))
        assert [len(sequence) for sequence in sequences] == [len(text) for text in known]
        assert starts[-1][-1] == len(known[1]) - 1, "positions continue"
    assert max(sizes) <= 2 * chunk and len(sizes) == (3 if chunk == 512 else 6)
