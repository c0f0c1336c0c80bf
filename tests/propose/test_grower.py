"""Likeliest tokens drawn on the host are those that the device draws, for any logits, masks and stop rule."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.expansion import DraftedLogits, RowLogits
from spec_lab.propose.grower import likeliest_on_host
from spec_lab.propose.levels import LevelByLevel
from spec_lab.propose.stop_rules import AdaEdl, Confidence, Gain, Stop, Svip
from spec_lab.propose.trees import parse
from tests.propose.lab import bare_batch

V = 6
COLD = Sampling()
TREE = tree(tuple(parse("0 1 2 0.0 0.1 1.0 0.0.0")))


class Table:
    """A draft model whose logits follow from the row alone, with broken rows and equal numbers."""

    def __init__(self, rows, seed, broken):
        random = np.random.default_rng(seed)
        logits = random.integers(-3, 4, (rows, V)).astype(float)
        for row in np.flatnonzero(random.random(rows) < broken):
            logits[row] = random.choice([np.nan, np.inf, -np.inf])
        logits[random.random((rows, V)) < 0.2] = -np.inf
        self.logits = torch.from_numpy(logits)
        self.computed = []

    def expand(self, shape, rows, token):
        assert token.shape == rows.shape
        self.computed += rows.tolist()
        return RowLogits(self.logits[torch.from_numpy(rows)])


RULES = {"none": None, "confidence": Confidence(), "adaedl": AdaEdl(), "svip": Svip(), "gain": Gain()}


def grown(shape: Shape, drawn, seed, broken, masked, stop, on_host, recorded=False):
    """A draft, the rows that were computed, and the copies to the host."""
    allowed = np.random.default_rng(seed + 1).random((shape.rows, V)) < 0.5
    masks = (lambda _, rows, token: allowed[rows]) if masked else None
    batch = bare_batch([(0, 0, 0)] * shape.roots, V, masks=masks, recorded=recorded)
    lm = Table(shape.rows, seed, broken)
    grower = LevelByLevel(drawn, batch, shape, [COLD] * shape.roots, stop)
    with patch.object(LevelByLevel, "_on_host", on_host):
        return grower.grow(RowLogits(lm.logits[: shape.roots]), lm.expand), lm.computed, batch.read.copies


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("shape", "drawn"),
    [(forest((TREE, chain(3))), "deterministic"), (forest((chain(3), chain(1))), "iid"), (chain(4), "deterministic")],
)
@given(
    seed=st.integers(0, 2**20),
    broken=st.sampled_from([0.0, 0.3]),
    masked=st.booleans(),
    rule=st.sampled_from(list(RULES)),
    threshold=st.sampled_from([0.1, 0.35, 0.6]),
)
def test_the_host_draws_what_the_device_draws(shape, drawn, seed, broken, masked, rule, threshold):
    stop = None if RULES[rule] is None else Stop(RULES[rule], np.full(shape.roots, threshold))
    (host, rows, copies), (device, expected, read) = (
        grown(shape, drawn, seed, broken, masked, stop, on_host) for on_host in (True, False)
    )
    np.testing.assert_array_equal(host.shape.parent, device.shape.parent)
    assert host.token.tolist() == device.token.tolist()
    np.testing.assert_array_equal(rows, expected)
    assert (host.broken, host.drawn, host.one_hot) == (device.broken, device.drawn, device.one_hot)
    assert copies == read
    if drawn == "iid":
        assert host.one_hot
        parents = np.unique(host.shape.parent)
        torch.testing.assert_close(host.q[host.q_row[parents]], device.q[device.q_row[parents]], rtol=0, atol=0)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("shape", "drawn"), [(forest((TREE, chain(3))), "deterministic"), (chain(4), "iid")])
def test_likeliest_tokens_state_their_probability_where_they_are_recorded(shape, drawn, on_host):
    draft, *_ = grown(shape, drawn, 5, 0.0, False, None, on_host, recorded=True)
    q = Table(shape.rows, 5, 0.0).logits.softmax(-1)[torch.from_numpy(shape.parent)]
    torch.testing.assert_close(draft.greedy_q, q.gather(1, draft.token[:, None])[:, 0])
    kept, rows = draft.keep(draft.shape.depth < 2)
    assert torch.equal(kept.greedy_q, draft.greedy_q[torch.from_numpy(rows[shape.roots :] - shape.roots)])
    assert grown(shape, drawn, 5, 0.0, False, None, on_host)[0].greedy_q is None


@pytest.mark.parametrize("rule", list(RULES))
def test_under_masks_and_rules_the_host_states_what_the_device_states(rule):
    shape = forest((TREE, chain(3)))
    stop = None if RULES[rule] is None else Stop(RULES[rule], np.full(shape.roots, 0.35))
    host, device = (grown(shape, "deterministic", 7, 0.0, True, stop, on_host, True)[0] for on_host in (True, False))
    assert (host.shape.nodes or stop) and host.token.tolist() == device.token.tolist()
    torch.testing.assert_close(host.greedy_q, device.greedy_q)


DRAFTED = [0, 2, 3, 5]


def grown_best_first(rerank, seed, broken, masked, drafted, on_host):
    """A draft that grows best first, on the host from logits of the drafted tokens alone."""
    random = np.random.default_rng(seed)
    logits, allowed = random.normal(0, 2, (100, V)), random.random((100, V)) < 0.6
    logits[:, [token for token in range(V) if drafted and token not in DRAFTED]] = -np.inf
    for row in np.flatnonzero(random.random(100) < broken):
        logits[row] = random.choice([np.nan, np.inf, -np.inf])

    def computed(rows):
        x = torch.from_numpy(logits[rows])
        return DraftedLogits(x[:, DRAFTED], torch.tensor(DRAFTED), V) if drafted and on_host else RowLogits(x)

    batch = bare_batch([(0, 0, 0)], V, masks=(lambda _, rows, token: allowed[rows]) if masked else None)
    grower = BestFirst(Budget(9, 3, 4, 3, rerank), "deterministic", batch, [4], [COLD])
    with patch.object(BestFirst, "_on_host", on_host):
        return grower.grow(computed(np.zeros(1, dtype=np.int64)), lambda shape, rows, token: computed(rows))


@pytest.mark.each_value
@pytest.mark.parametrize("rerank", [False, True])
@given(
    seed=st.integers(0, 2**20),
    broken=st.sampled_from([0.0, 0.1]),
    masked=st.booleans(),
    drafted=st.booleans(),
)
def test_the_host_grows_the_best_first_tree_that_the_device_grows(rerank, seed, broken, masked, drafted):
    host, device = (grown_best_first(rerank, seed, broken, masked, drafted, on_host) for on_host in (True, False))
    assert host.broken == device.broken
    if not host.broken:
        np.testing.assert_array_equal(host.shape.parent, device.shape.parent)
        assert host.token.tolist() == device.token.tolist()


def test_logits_are_not_written_to():
    x = np.random.default_rng(0).normal(size=(3, V))
    x[1] = np.nan
    before = x.copy()
    likeliest_on_host(x, 2, np.arange(V)[None] > np.array([[1], [2], [V]]), lambda x: x[:, 0] > 0)
    np.testing.assert_array_equal(x, before)
