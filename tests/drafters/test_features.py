"""Observed features are found by position, however they arrived."""

from types import SimpleNamespace

import pytest
import torch

from spec_lab.decode.proposer import Observation
from spec_lab.drafters.features import Features, observe_features


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


@pytest.mark.parametrize("lengths", [(3,), (1, 400, 2)])
def test_a_sequence_keeps_the_features_of_its_own_positions_only(lengths):
    observed = [
        Observation(SimpleNamespace(state=SimpleNamespace(features=Features())), 5, [], torch.full((n, 4), float(n)))
        for n in lengths
    ]
    observe_features(observed, lambda hidden: hidden[:, :2] * 2)
    for observation, length in zip(observed, lengths, strict=True):
        (part,) = observation.sequence.state.features.parts
        assert torch.equal(part, torch.full((length, 2), 2.0 * length))
        assert part.untyped_storage().nbytes() <= length * 4 * 4, "no more than its own hidden states"
