"""Projected speed-ups against closed forms, enumeration, and limits of the roofline."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.analysis.projection import Acceptance, Deployment, Prefill, RecordedDesign, break_even, project, speedup
from spec_lab.analysis.projection.catalogue import Hardware, Runtime, models, precision
from spec_lab.analysis.projection.costs import ConstantForward, RooflineForward, mean_seconds
from spec_lab.analysis.projection.drafting import Drafting, by_roofline
from spec_lab.analysis.projection.model_shapes import work
from spec_lab.analysis.projection.project import crossing
from spec_lab.core.roofline import MachineLimits, Roofline

BF16 = precision("bf16")
PLAIN = Runtime("plain", 1.0, 1.0, 0.0, 0.0, "")
FREE = Drafting()


@dataclass(frozen=True)
class Constant:
    """A forward that always takes as long."""

    value: float

    def seconds(self, rows, batch, context):
        return np.full(np.broadcast(rows, batch, context).shape, self.value)


@dataclass(frozen=True)
class Linear:
    """A forward whose seconds grow with all its rows."""

    fixed: float
    each: float

    def seconds(self, rows, batch, context):
        return self.fixed + self.each * np.asarray(rows) * np.asarray(batch) + 0.0 * np.asarray(context)


def device(bandwidth=1e12, peak=1e14) -> Hardware:
    return Hardware("d", "D", bandwidth, {"bf16": peak, "fp32": peak}, 1e12, "")


def roofline(hardware: Hardware, runtime: Runtime = PLAIN, name: str = "llama-3.1-8b") -> RooflineForward:
    shape = models()[name]
    return RooflineForward(shape.work(BF16), shape.layers, hardware, runtime, BF16)


def design(accepted: np.ndarray, name: str = "chain", proposer: str = "draft_chain") -> RecordedDesign:
    """Full chains: ``[G, K]`` steps that accepted k tokens or more, of ten steps of each request."""
    steps = np.full(len(accepted), 10.0)
    return RecordedDesign(name, proposer, steps, np.ones((1, accepted.shape[1])), steps[:, None], accepted)


def of_chain(rate: float, length: int) -> Acceptance:
    """Full chains whose tokens are accepted with one rate, independently."""
    return Acceptance(np.ones((1, length)), np.ones((1, 1)), rate ** np.arange(1.0, length + 1)[None])


@pytest.mark.parametrize(("rate", "length", "cost"), [(0.8, 5, 0.1), (0.6, 1, 0.5), (0.9, 12, 0.02), (0.0, 3, 0.2)])
def test_a_chain_of_constant_acceptance_has_leviathan_s_speed_up(rate, length, cost):
    """Theorem 3.8 of 2211.17192: (1 - a^(g + 1)) / ((1 - a) (g c + 1))."""
    deployment = Deployment("any", Constant(2.0), {})
    draft = Drafting(Constant(2.0 * cost))
    factor = speedup(of_chain(rate, length), length, deployment, draft, 1, 100.0)
    assert factor == pytest.approx((1 - rate ** (length + 1)) / ((1 - rate) * (length * cost + 1)))


def test_sequoia_s_formula_divides_by_the_seconds_of_a_forward_over_all_nodes():
    """Section 4.3 of 2402.12374: tau / (t(n) + d c)."""
    tree = Acceptance(np.array([[3.0, 6.0]]), np.ones((1, 1)), np.array([[0.7, 0.4]]))
    deployment, draft = Deployment("any", Linear(1.0, 0.05), {}), Drafting(Constant(0.1))
    assert speedup(tree, 2, deployment, draft, 1, 0.0) == pytest.approx(2.1 * 1.05 / (1.5 + 2 * 0.1))
    assert speedup(tree, 1, deployment, draft, 1, 0.0) == pytest.approx(1.7 * 1.05 / (1.2 + 0.1))


@dataclass(frozen=True)
class Staircase:
    """A forward whose seconds rise at the end of each tile of four rows, less and less: not convex."""

    def seconds(self, rows, batch, context):
        return np.sqrt(np.ceil(np.asarray(rows) / 4)) + 0.0 * np.asarray(batch) + 0.0 * np.asarray(context)


def test_each_step_costs_what_its_own_nodes_cost():
    """Half of the steps draft nothing, the others ten nodes: the mean of two forwards, not that of five nodes."""
    acceptance = Acceptance(np.stack([np.zeros(10), np.ones(10)]), np.full((1, 2), 0.5), np.full((1, 10), 0.08))
    deployment, draft = Deployment("any", Staircase(), {}), Drafting(Constant(0.1))
    expected = 1.8 * 1.0 / (0.5 * (1.0 + np.sqrt(3)) + 0.5 * 10 * 0.1)
    assert speedup(acceptance, 10, deployment, draft, 1, 0.0) == pytest.approx(expected)
    cut = 1.32 * 1.0 / (0.5 * (1.0 + np.sqrt(2)) + 0.5 * 4 * 0.1)
    assert speedup(acceptance, 4, deployment, draft, 1, 0.0) == pytest.approx(cut)


def test_each_step_drafts_with_its_own_rows():
    """Trees of one level with 2 or 8 nodes, and of two levels: a pass computes the nodes above it, of its own step."""
    acceptance = Acceptance(
        np.array([[2.0, 3.0], [8.0, 8.0], [5.0, 0.0]]), np.array([[0.5, 0.3, 0.2]]), np.array([[0.6, 0.25]])
    )
    cost = {rows: float(Staircase().seconds(rows, 1, 0)) for rows in range(1, 18)}
    second = 0.5 * cost[2] + 0.3 * cost[8]
    committed = 0.4 * cost[1] + 0.35 * cost[2] + 0.25 * cost[3]
    seconds = {
        first: Drafting(Staircase(), True, first).seconds(acceptance, 2, 1, 0.0) for first in ("committed", "last")
    }
    assert seconds["committed"] == pytest.approx(committed + second)
    assert seconds["last"] == pytest.approx(0.75 * cost[1] + 0.25 * cost[2] + second)
    assert Drafting(Staircase(), False, "masks").seconds(acceptance, 2, 1, 0.0) == pytest.approx(
        cost[2] * 0.75 + cost[3] * 0.25
    )
    look_up = Drafting(step=Staircase()).seconds(acceptance, 2, 1, 0.0)
    assert look_up == pytest.approx(0.5 * cost[6] + 0.3 * cost[17] + 0.2 * cost[6])


def test_a_batch_computes_the_rows_of_independent_steps():
    """Mean and variance of their mean are those of an enumeration; seconds that are linear in rows are exact."""
    rows, share, batch = np.array([1.0, 3.0, 11.0]), np.array([[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]), 3

    @dataclass(frozen=True)
    class Square:
        def seconds(self, rows, batch, context):
            return np.asarray(rows) ** 2 + 0.0 * np.asarray(batch)

    every = list(product(range(3), repeat=batch))
    chance = np.array([share[0][list(each)].prod() for each in every])
    means = np.array([rows[list(each)].mean() for each in every])
    count = np.full(2, float(batch))
    assert mean_seconds(Linear(2.0, 0.1), rows, share, count, 0.0) == pytest.approx([2 + 0.3 * chance @ means, 0])
    assert mean_seconds(Square(), rows, share, count, 0.0) == pytest.approx([chance @ means**2, 0])
    assert mean_seconds(Square(), rows, share, np.ones(2), 0.0) == pytest.approx([share[0] @ rows**2, 0])


def test_where_reading_weights_bounds_a_step_a_free_draft_gains_tau():
    shape = models()["llama-3.1-8b"]
    weights = work(shape.layer_weights, shape.head_weights, (0, 0), BF16)
    target = RooflineForward(weights, 1, device(peak=1e30), PLAIN, BF16)
    chain = of_chain(0.7, 8)
    assert speedup(chain, 8, Deployment("any", target, {}), FREE, 64, 0.0) == pytest.approx(chain.tau(8))


def test_where_computing_bounds_a_step_a_free_draft_gains_tau_over_its_rows():
    shape = models()["llama-3.1-8b"]
    weights = work(shape.layer_weights, shape.head_weights, (0, 0), BF16)
    target = RooflineForward(weights, 1, device(bandwidth=1e30), PLAIN, BF16)
    chain = of_chain(0.7, 8)
    assert speedup(chain, 8, Deployment("any", target, {}), FREE, 64, 0.0) == pytest.approx(chain.tau(8) / 9)


def test_a_memory_bound_forward_is_that_of_the_machine_s_roofline():
    limits = MachineLimits(1e12, 1e12, 1, 1e30, 1e30, "bfloat16", None, None, 1, 1, None, 1.0)
    forward, batch, context, rows = roofline(device(peak=1e30)), 3, 500, 5
    memory, _ = Roofline(forward.work, limits).seconds(
        [0] * batch, [context + 1] * batch, [1] * batch, [rows - 1] * batch
    )
    assert forward.seconds(rows, batch, context) == pytest.approx(memory[0])


def test_layers_add_their_gap_and_launching_hides_behind_computing():
    plain = roofline(device()).seconds(1, 1, 0)
    gap = roofline(device(), Runtime("gap", 1.0, 1.0, 1e-3, 0.0, "")).seconds(1, 1, 0)
    assert gap == pytest.approx(plain + 32e-3)
    launched = Runtime("launch", 1.0, 1.0, 0.0, 1e-3, "")
    assert roofline(device(), launched).seconds(1, 1, 0) == pytest.approx(32e-3)  # reading takes 15 ms
    assert roofline(device(bandwidth=1e11), launched).seconds(1, 1, 0) == pytest.approx(10 * plain)


def test_a_batch_takes_a_pass_while_any_sequence_drafts_on():
    """By enumeration of the lengths of three sequences."""
    lengths = np.array([0.2, 0.3, 0.1, 0.4])  # of 0, 1, 2, 3 tokens
    drafted = np.array([[lengths[k:].sum() for k in (1, 2, 3)]])
    chain = Acceptance(np.tri(4, 3, -1), lengths[None], drafted / 2)
    expected = sum(lengths[list(each)].prod() * max(each) for each in product(range(4), repeat=3))
    draft = Drafting(Constant(1.0))
    assert draft.seconds(chain, 3, 3, 0.0) == pytest.approx(expected)
    assert draft.seconds(chain, 3, 1, 0.0) == pytest.approx(drafted.sum())


def test_rows_of_a_pass():
    """The first pass computes what the draft has not seen, each later one the nodes of the level above."""
    tree = Acceptance(np.array([[2.0, 4.0, 5.0]]), np.ones((1, 1)), np.array([[0.8, 0.5, 0.2]]))
    rows = {
        "last": 1.2 + 2 + 4,
        "committed": 2.5 + 2 + 4,
    }
    for first, expected in rows.items():
        assert Drafting(Linear(0.0, 1.0), True, first).seconds(tree, 3, 1, 0.0) == pytest.approx(expected)
    assert Drafting(Linear(0.0, 1.0), False, "masks").seconds(tree, 3, 1, 0.0) == pytest.approx(1.2 + 2)
    assert Drafting(Linear(0.0, 1.0), False, "one").seconds(tree, 3, 1, 0.0) == pytest.approx(1.0)


def test_the_prefill_dilutes_the_speed_up():
    deployment, chain = Deployment("any", Linear(1.0, 0.01), {}), of_chain(0.7, 4)
    without = speedup(chain, 4, deployment, FREE, 1, 10.0)
    step, first = 1.05, 1.0 + 0.01 * 200
    factor = speedup(chain, 4, deployment, FREE, 1, 10.0, Prefill(200, 101))
    assert factor == pytest.approx((first + 100 * 1.01) / (first + 100 / chain.tau(4) * step))
    assert factor < without
    long = speedup(chain, 4, deployment, FREE, 1, 10.0, Prefill(200, 10**9))
    assert long == pytest.approx(without)


hardware = st.builds(device, bandwidth=st.floats(1e10, 1e13), peak=st.floats(1e12, 1e16))
runtimes = st.builds(
    lambda gap, launch: Runtime("r", 0.8, 0.7, gap, launch, ""), st.floats(0, 1e-3), st.floats(0, 1e-3)
)
batches = st.floats(1, 4096)


@pytest.mark.nightly
@given(
    hardware, runtimes, st.floats(0, 0.99), st.integers(1, 12), batches, st.sampled_from(["eagle3", "medusa", "ngram"])
)
def test_no_speed_up_exceeds_the_tokens_of_a_step(hardware, runtime, rate, length, batch, proposer):
    chain, shape = of_chain(rate, length), models()["llama-3.1-8b"]
    deployment = Deployment("any", roofline(hardware, runtime), {})
    draft = by_roofline(
        proposer, shape, None, lambda of_target, layers: RooflineForward(of_target, layers, hardware, runtime, BF16),
        BF16, length,
    )  # fmt: skip
    factor = speedup(chain, length, deployment, draft, batch, 1000.0)
    assert 0 < factor <= chain.tau(length) * (1 + 1e-12)


@pytest.mark.nightly
@given(hardware, runtimes, st.floats(0.1, 0.95), st.integers(1, 8))
def test_break_even_is_where_one_is_crossed(hardware, runtime, rate, length):
    chain, deployment = of_chain(rate, length), Deployment("any", roofline(hardware, runtime), {})
    draft = Drafting(roofline(hardware, runtime, "llama-3.2-1b"))

    def at(batch):
        return speedup(chain, length, deployment, draft, batch, 500.0)

    (crossed,) = crossing(at, 1, 4096)
    if crossed == 0:
        assert at(1.0) < 1
    elif np.isinf(crossed):
        assert at(4096.0) >= 1
    else:
        assert 1 <= crossed <= 4096 and at(crossed) == pytest.approx(1, abs=1e-6)
        assert at(crossed * 1.0001) <= 1 + 1e-9 and at(1.0) >= 1


def test_break_even_of_a_closed_form():
    """tau (1 + e B) / (1 + e (1 + n) B) = 1 at B = (tau - 1) / (e (n + 1 - tau))."""
    ngram_design = design(np.tile([[7.0, 4.0]], (8, 1)), proposer="ngram")
    deployment = Deployment("any", Linear(1.0, 0.01), {"chain": FREE})
    (row,) = break_even([ngram_design], [deployment], 1000, 0.0, [2]).to_dict("records")
    assert row["break_even"] == pytest.approx(1.1 / (0.01 * 0.9), rel=1e-9)
    assert row["break_even_low"] == row["break_even_high"] == pytest.approx(row["break_even"])
    (row,) = break_even([ngram_design], [deployment], 100, 0.0, [2]).to_dict("records")
    assert row["break_even"] == np.inf
    never = Deployment("any", Constant(1.0), {"chain": Drafting(step=ConstantForward(5.0))})
    assert break_even([ngram_design], [never], 100, 0.0)["break_even"].tolist() == [0.0, 0.0]


def test_intervals_are_those_of_the_bootstrap_over_requests():
    """With a free draft and constant seconds the speed-up is tau, whose bootstrap is that of a ratio of sums."""
    from spec_lab.analysis.metrics.intervals import quantiles, resampled_sums

    generator = np.random.default_rng(3)
    accepted = np.sort(generator.integers(0, 11, (12, 3)).astype(float), axis=1)[:, ::-1]
    ngram_design = design(accepted, proposer="ngram")
    deployment = Deployment("any", Constant(1.0), {"chain": FREE})
    (row,) = project([ngram_design], [deployment], [1], 0.0, [3], resamples=999).to_dict("records")
    tau = 1.0 + accepted.sum(1, keepdims=True) / 10
    expected = tau.mean(), *quantiles(resampled_sums(tau, 999) / 12, 0.95)[:, 0]
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(expected)


def test_the_fastest_design_of_each_cell_and_how_often_resamples_agree():
    good, bad = np.tile([[8.0, 6.0]], (8, 1)), np.tile([[3.0, 1.0]], (8, 1))
    mixed = good.copy()
    mixed[0] = 0.0  # a resample has at least as many such requests as the recording in two of three draws
    designs = [design(good, "good", "ngram"), design(bad, "bad", "ngram"), design(mixed, "mixed", "ngram")]
    deployment = Deployment("any", Constant(1.0), dict.fromkeys(("good", "bad", "mixed"), FREE), largest_batch=4)
    cells = project(designs, [deployment], [1, 8], 0.0, [2])
    small, large = cells[cells["batch"] == 1].set_index("design"), cells[cells["batch"] == 8]
    assert small["best"].to_dict() == {"good": True, "bad": False, "mixed": False}
    assert small["best_share"].sum() == pytest.approx(1) and small.loc["bad", "best_share"] == 0
    assert not large["fits"].any() and large["speedup"].isna().all() and not large["best"].any()


def test_shares_of_resamples_are_left_out_where_designs_have_other_requests():
    designs = [design(np.ones((9, 2)), "nine", "ngram"), design(np.ones((8, 2)), "eight", "ngram")]
    cells = project(designs, [Deployment("any", Constant(1.0), {"nine": FREE, "eight": FREE})], [1], 0.0)
    assert cells["best_share"].isna().all() and cells["best"].sum() == 1


def test_a_length_that_was_not_recorded_is_refused():
    deployment = Deployment("any", Constant(1.0), {"chain": FREE}, largest_batch=4)
    with pytest.raises(ValueError, match="recorded at a draft length of 5; recorded are 1, 2"):
        project([design(np.ones((2, 2)), proposer="ngram")], [deployment], [1], 0.0, [2, 5])
    with pytest.raises(ValueError, match="batches of 8 are too large: at most 4 sequences of 100 tokens fit"):
        project([design(np.ones((2, 2)), proposer="ngram")], [deployment], [8, 16], 100.0)
