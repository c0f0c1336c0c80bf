"""Commit: texts end at stop tokens and limits, inside an accepted path as well."""

import numpy as np
import pytest

from spec_lab.propose import Null
from tests.decode.foretold import Foretold
from tests.propose.lab import decode, emitted, plain_greedy, requests
from tests.tiny import CONTEXT, VOCABULARY, tiny_target


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_ends_the_text_wherever_it_falls(target, truth, index):
    """Inside an accepted path, as the bonus, as the residual: the cut is at its first occurrence."""
    stop = truth[0][index]
    expected = truth[0][: truth[0].index(stop) + 1]
    for spoil in (0.0, 0.5, 1.0):
        group, steps = decode(target, Foretold(truth, spoil), requests(stop=frozenset({stop}))[:1])
        assert group.sequences[0].emitted == expected
        assert group.sequences[0].finish == "stop"
        committed = [c for r in steps for c in r.committed]
        assert sum(c.count(kept=True) for c in committed) == len(expected)
        kept = [(c.count(accepted=True, kept=True), c.count(kept=True)) for c in committed]
        assert all(path == min(len(c.path), every) for c, (path, every) in zip(committed, kept, strict=True))
        assert all(c.count() == c.count(kept=True) == len(c.path) + 1 for c in committed[:-1]), "only the last is cut"


def test_a_stop_token_beyond_the_limit_is_ignored(target, truth):
    """Both in one accepted path: the limit comes first, so it is the finish reason."""
    new = next(n for n in (1, 2, 3) if truth[0][n] not in truth[0][:n])
    group, _ = decode(target, Foretold(truth, 0.0), requests(new=new, stop=frozenset({truth[0][new]}))[:1])
    assert (group.sequences[0].finish, emitted(group)) == ("length", [truth[0][:new]])


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_the_length_limit_cuts_inside_an_accepted_path(target, truth, new):
    group, steps = decode(target, Foretold(truth, 0.0), requests(new=new))
    assert emitted(group) == [tokens[:new] for tokens in truth]
    assert {s.finish for s in group.sequences} == {"length"}
    assert [c.count() for c in steps[-1].committed] == [4] * 3, "what verification emitted is recorded whole"
    left = (new - 1) % 4 + 1
    assert [(c.count(accepted=True, kept=True), c.count(kept=True)) for c in steps[-1].committed] == [
        (min(3, left), left)
    ] * 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_full_context_is_a_named_finish(family):
    """GPT-2 has no embedding beyond its context, so a longer draft would fail."""
    target = tiny_target(family)
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, VOCABULARY, CONTEXT - 6))
    told = [plain_greedy(target.lm.model, prompt, 6)]
    for proposer in (Null(), Foretold(told, 0.0), Foretold(told, 0.6)):
        group, steps = decode(target, proposer, requests(new=50, prompts=(prompt,)))
        assert group.sequences[0].finish == "context"
        assert emitted(group) == told
        if proposer.nodes:  # as many nodes as there are positions left
            depths = [int(r.draft.shape.depth.max()) for r in steps]
            assert depths == [min(3, CONTEXT - r.context[0]) for r in steps]
