"""Sequences: keys of random choices, sampling parameters of their own, and which tokens are pending."""

import numpy as np
import pytest

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Null
from spec_lab.verify import Token
from tests.decode.foretold import Foretold
from tests.propose.lab import PROMPTS, WARM, decode, emitted, requests


def test_seeds_and_requests_get_streams_of_their_own(target):
    first, _ = decode(target, Null(), requests(WARM))
    again, _ = decode(target, Null(), requests(WARM))
    other, _ = decode(target, Null(), requests(WARM), seed=1)
    twins, _ = decode(target, Null(), requests(WARM, prompts=(PROMPTS[0], PROMPTS[0])))
    assert emitted(first) == emitted(again) != emitted(other)
    assert emitted(twins)[0] != emitted(twins)[1]


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=5), Sampling(1.0, repetition_penalty=1.5)])
def test_requests_with_their_own_sampling_share_a_batch(target, truth, sampling):
    cold, hot = requests()[0], requests(sampling)[1]
    mixed, _ = decode(target, Foretold(truth), [cold, hot])
    alone, _ = decode(target, Foretold(truth), [hot])
    assert emitted(mixed) == [truth[0], *emitted(alone)]


def test_between_steps_a_sequence_has_cells_for_all_but_its_last_token(target, truth):
    """Accepted nodes are not computed again, and cells of rejected ones are freed at once."""
    cells = target.lm.cells
    group = fixed_group(Arm(target, Foretold(truth, 0.5), Token(), CounterDraws(0)), requests(new=12))
    for done in group:
        for sequence in (s for s in done.sequences if s.finish is None):
            assert len(sequence.kv) == len(sequence.tokens) - 1
            assert sorted(np.flatnonzero(cells.references[sequence.kv.stream])) == sorted(sequence.kv.slots)
            assert sequence.tokens == [*sequence.request.tokens, *truth[sequence.request.id][: len(sequence.emitted)]]
