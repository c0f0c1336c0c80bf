"""Observed features are found by position, however they arrived."""

import pytest
import torch

from spec_lab.propose.features import Features


@pytest.mark.parametrize("lengths", [(9,), (4, 1, 3, 1), (1,) * 9])
@pytest.mark.parametrize("begin", [0, 5])
def test_states_since_a_position_are_found(lengths, begin):
    features, whole = Features(), torch.arange(begin, begin + 9)[:, None]
    for part in whole.split(lengths):
        features.add(int(part[0]), part)
    assert (features.start, features.end) == (begin, begin + 9)
    for position in range(begin, begin + 10):
        assert torch.equal(features.since(position), whole[position - begin :])


def test_rewound_states_are_replaced():
    features = Features()
    features.add(0, torch.arange(5)[:, None])
    twin = features.copy()
    features.rewind(2)
    features.add(2, torch.tensor([[7]]))
    assert features.since(0)[:, 0].tolist() == [0, 1, 7]
    assert twin.since(1)[:, 0].tolist() == [1, 2, 3, 4]
