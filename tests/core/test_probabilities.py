"""Warps against hand-computed distributions and transformers' own processors; inversion; the counter's uniforms."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spec_lab.core import randomness
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, argmax, likeliest, logits_to_probs
from spec_lab.core.randomness import CounterDraws, Key, Purpose

ON = {"temperature": 1.0}
P = [0.4, 0.3, 0.15, 0.1, 0.05]


def _invert_on_device(weights, uniform):
    return randomness._invert_on_device(weights, torch.from_numpy(uniform))


def probabilities_of(p: list[float], **options) -> list[float]:
    """The probabilities of logits whose softmax is ``p``."""
    sampling = Sampling(**(ON | options))
    return logits_to_probs(torch.tensor([p], dtype=torch.float64).log(), [sampling])[0].tolist()


def about(values: list[float]):
    return pytest.approx([v / sum(values) for v in values], abs=1e-12)


# Each warp by hand


def test_without_options_p_is_the_softmax():
    assert probabilities_of(P) == about(P)


def test_temperature_raises_p_to_a_power():
    assert probabilities_of(P, temperature=0.5) == about([v**2 for v in P])
    assert probabilities_of(P, temperature=2.0) == about([v**0.5 for v in P])


def test_top_k_keeps_the_k_likeliest_and_ties_with_the_last():
    assert probabilities_of(P, top_k=2) == about([0.4, 0.3, 0, 0, 0])
    assert probabilities_of(P, top_k=9) == about(P)
    assert probabilities_of([0.4, 0.2, 0.2, 0.2], top_k=2) == about([0.4, 0.2, 0.2, 0.2])  # ties of the k-th stay


def test_top_p_keeps_the_fewest_likeliest_that_hold_its_mass():
    assert probabilities_of(P, top_p=0.65) == about([0.4, 0.3, 0, 0, 0])
    assert probabilities_of(P, top_p=0.72) == about([0.4, 0.3, 0.15, 0, 0])
    assert probabilities_of(P, top_p=1e-9) == about([1, 0, 0, 0, 0])
    assert probabilities_of(P, top_p=1.0) == about(P)
    assert probabilities_of([0.25] * 4, top_p=0.5) == about(
        [1, 1, 0, 0]
    )  # two tokens have it exactly; ties go to the first
    assert probabilities_of([2.0**-12] * 4096, top_p=0.5) == about([1] * 2048 + [0] * 2048)


def test_min_p_keeps_what_has_its_share_of_the_likeliest():
    assert probabilities_of(P, min_p=0.3) == about([0.4, 0.3, 0.15, 0, 0])
    assert probabilities_of(P, min_p=1.0) == about([1, 0, 0, 0, 0])


def test_a_repetition_penalty_lowers_tokens_of_the_history():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]], dtype=torch.float64)
    seen = torch.tensor([[True, True, False, True]])
    got = logits_to_probs(logits, [Sampling(temperature=1.0, repetition_penalty=2.0)], History(seen))
    torch.testing.assert_close(got, torch.tensor([[1.0, -2.0, 0.5, 0.0]], dtype=torch.float64).softmax(-1))


# Against transformers


class Generator(pytest.importorskip("transformers").GenerationMixin):
    config = SimpleNamespace(is_encoder_decoder=False)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 3, 10, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_equals_transformers_processors_in_its_order(seed, temperature, top_k, top_p, min_p, penalty):
    """The whole pipeline, assembled by transformers itself."""
    from transformers import GenerationConfig

    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 40, dtype=torch.float64, generator=generator)
    history = torch.randint(0, 40, (2, 6), generator=generator)
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    processors = Generator()._get_logits_processor(config, input_ids_seq_length=6, logits_processor=[], device="cpu")
    wanted = processors(history, logits.clone()).softmax(-1)
    seen = torch.zeros(2, 40, dtype=torch.bool).scatter_(1, history, True)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    torch.testing.assert_close(logits_to_probs(logits, [sampling], History(seen)), wanted, rtol=1e-9, atol=1e-12)


# Rows of all kinds together

KINDS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=3),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.0, top_k=2, top_p=0.5),
    Sampling(temperature=1e-300),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixed_rows_equal_rows_alone(dtype):
    logits = torch.randn(len(KINDS), 12).to(dtype)
    together = logits_to_probs(logits, KINDS)
    assert together.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, sampling in enumerate(KINDS):
        torch.testing.assert_close(together[row], logits_to_probs(logits[row : row + 1], [sampling])[0])
    torch.testing.assert_close(together.sum(-1), torch.ones(len(KINDS), dtype=together.dtype))


def test_one_sampling_is_applied_to_all_rows():
    logits = torch.randn(5, 9)
    assert torch.equal(logits_to_probs(logits, [KINDS[2]]), logits_to_probs(logits, [KINDS[2]] * 5))
    with pytest.raises(ValueError, match="2 rows .*5 rows"):
        logits_to_probs(logits, KINDS[:2])


def test_greedy_is_one_hot_of_the_first_arg_max():
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -3.0, -2.0]])
    assert logits_to_probs(logits, [Sampling()]).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert argmax(logits).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-38, 1e-45, 1e-200])
def test_tiny_temperatures_reach_greedy_without_overflow(temperature):
    logits = torch.tensor([[30.0, 50.0, -80.0], [1.0, 0.0, 0.9]])
    torch.testing.assert_close(logits_to_probs(logits, [Sampling(temperature)]), logits_to_probs(logits, [Sampling()]))


@pytest.mark.parametrize("sampling", KINDS)
def test_a_mask_renormalizes_over_allowed_tokens_and_a_dead_row_is_zero(sampling):
    logits = torch.randn(3, 8, dtype=torch.float64)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, 4:], mask[1] = False, False
    got = logits_to_probs(logits, [sampling], mask=mask)
    assert got[1].tolist() == [0.0] * 8
    torch.testing.assert_close(got[0, :4], logits_to_probs(logits[:1, :4], [sampling])[0])
    assert got[0, 4:].tolist() == [0.0] * 4
    torch.testing.assert_close(got[2], logits_to_probs(logits[2:], [sampling])[0])


@pytest.mark.parametrize("sampling", [s for s in KINDS if s.temperature > 0])
def test_a_nan_row_is_never_taken_for_a_dead_one(sampling):
    """NaN logits stay NaN, also next to dead rows: they end in a clear error, not in probabilities."""
    logits = torch.tensor([[1.0, torch.nan, 0.0], [0.0, 1.0, 2.0]])
    mask = torch.tensor([[True, True, True], [False, False, False]])
    got = logits_to_probs(logits, [sampling], mask=mask)
    assert got[0].isnan().all() and got[1].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="total mass"):
        invert(got[:1], np.array([0.5]))


def test_logits_are_not_changed_and_scratch_holds_the_probabilities():
    logits = torch.randn(3, 6)
    kept = logits.clone()
    scratch = torch.full((5, 6), torch.nan)
    for sampling in KINDS[:2]:
        wanted = logits_to_probs(logits, [sampling])
        got = logits_to_probs(logits, [sampling], scratch=scratch)
        assert torch.equal(got, wanted) and got.data_ptr() == scratch.data_ptr()
        assert torch.equal(logits, kept)
        scratch[:3] = logits  # it may have been allocated before
        assert torch.equal(logits_to_probs(scratch[:3], [sampling], scratch=scratch), wanted)


@pytest.mark.parametrize("top_p", [0.999, 1.0])
def test_probabilities_of_a_large_vocabulary_sum_to_one(top_p):
    logits = torch.stack([torch.randn(131072), torch.arange(131072) % 2.0])  # equal terms all round the same way
    got = logits_to_probs(logits, [Sampling(temperature=1.5, top_p=top_p)])
    torch.testing.assert_close(got.double().sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-4, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("kept", [{}, {"top_k": 2**31 - 1}, {"top_p": 5e-324}, {"min_p": 1e-300}, {"min_p": 1.0}])
@pytest.mark.each_value
def test_probabilities_of_plausible_logits_are_never_nan(dtype, temperature, penalty, kept):
    most = 1e30
    logits = torch.tensor([[most, -most, 0.0, 1.0], [-most, -most, -torch.inf, -most], [0.0, 1e-30, 1.0, -1.0]])
    seen, mask = torch.tensor([True, False, True, False]).expand(3, 4), torch.tensor([True, True, False, True])
    sampling = [Sampling(temperature, repetition_penalty=penalty, **kept)]
    got = logits_to_probs(logits.to(dtype), sampling, History(seen), mask.expand(3, 4))
    torch.testing.assert_close(got.sum(-1), torch.ones(3, dtype=dtype))
    assert (got >= 0).all() and (got[:, 2] == 0).all()


def test_a_penalty_without_history_is_refused():
    with pytest.raises(ValueError, match="repetition penalty"):
        logits_to_probs(torch.zeros(1, 3), [Sampling(repetition_penalty=1.1)])


# Inversion

UNIFORMS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53, 0.5]))


def invert(weights, uniform):
    """``randomness.invert`` of an array or a tensor."""
    return randomness.invert(torch.as_tensor(weights), uniform)


@pytest.mark.nightly
@settings(max_examples=200)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 0.0, 1e-30, 1e-9, 0.25, 1.0, 3.0]), min_size=1, max_size=200),
    u=UNIFORMS,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    how=st.sampled_from(["host", "device"]),
)
def test_invert_finds_the_interval_and_never_a_zero_weight(weights, u, dtype, how):
    tensor = torch.tensor([weights], dtype=dtype)
    rows = tensor.double()[0].tolist()
    pick = {"host": invert, "device": _invert_on_device}[how]
    if sum(rows) == 0:
        if how == "device":
            assert pick(tensor, np.array([u])).tolist() == [-1]
            return
        with pytest.raises(ValueError, match="total mass"):
            pick(tensor, np.array([u]))
        return
    (chosen,) = pick(tensor, np.array([u]))
    assert rows[chosen] > 0
    total, below = math.fsum(rows), math.fsum(rows[:chosen])
    assert below - 1e-12 * total <= u * total <= below + rows[chosen] + 1e-12 * total


@pytest.mark.parametrize("device", [False, True])
def test_invert_keeps_a_huge_tail(device):
    """Half the mass on one token, half spread over 131071: summed in float32 the tail would be lost or distorted."""
    v = 131072
    weights = torch.full((1, v), 0.5 / (v - 1))
    weights[0, 0] = 0.5
    tail = float(weights[0, 1])
    pick = _invert_on_device if device else invert
    for u in (0.4999, 0.5001, 0.625, 0.75, 0.9, 1 - 1e-9, 1 - 2.0**-53):
        wanted = 0 if u < 0.5 else (u * (0.5 + tail * (v - 1)) - 0.5) / tail + 1
        assert abs(int(pick(weights, np.array([u]))[0]) - wanted) <= 1.01


@pytest.mark.parametrize(("rows", "width"), [(1, 40), (40, 40), (1, 130), (2, 5000)])
@pytest.mark.parametrize("far", [False, True])
def test_invert_keeps_a_small_tail(rows, width, far):
    """In float32, 1 + 1e-9 is 1: next to the likely token, and at the other end."""
    weights = np.zeros((rows, width), dtype=np.float32)
    tail = np.arange(width - 20, width) if far else np.arange(1, 21)
    weights[:, 0], weights[:, tail] = 1.0, 1e-9
    total, before = float(weights[0].sum(dtype=np.float64)), 1.0 + 9 * float(weights[0, tail[0]])
    for pick in (invert, lambda w, u: _invert_on_device(torch.from_numpy(w), u)):
        assert pick(weights, np.full(rows, (before + 5e-10) / total)).tolist() == [tail[9]] * rows


@pytest.mark.parametrize("width", [8, 130, 1000])
@pytest.mark.parametrize("rows", [1, 40])
def test_invert_picks_no_zero_weight_where_a_product_rounds_up(rows, width):
    """Weights of the smallest double; zeros follow."""
    for pick in (invert, lambda w, u: _invert_on_device(torch.from_numpy(w), u)):
        for column in (0, width // 2, width - 1):
            weights = np.zeros((rows, width))
            weights[:, column] = 5e-324
            assert pick(weights, np.full(rows, 1 - 2.0**-53)).tolist() == [column] * rows


@pytest.mark.parametrize("width", [8, 100, 130, 640, 5000])
@pytest.mark.parametrize("rows", [1, 50])
def test_invert_assigns_every_unit_of_weight_to_its_index(rows, width):
    """Integer weights in every row; also where one token has all of the weight."""
    rng = np.random.default_rng(width)
    weights = rng.integers(0, 3, (rows, width)).astype(np.float32)
    weights[0] = 0
    weights[0, rng.choice([0, width - 1])] = 3
    unit = np.array([rng.integers(row.sum()) for row in weights])
    owner = [int(np.searchsorted(row.cumsum(), n, side="right")) for row, n in zip(weights, unit, strict=True)]
    uniform = (unit + 0.5) / weights.sum(-1, dtype=np.float64)
    for pick in (invert, lambda w, u: _invert_on_device(torch.from_numpy(w), u)):
        assert pick(weights, uniform).tolist() == owner


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_invert_refuses_weights_without_finite_mass(bad):
    weights = torch.tensor([[1.0, 1.0], bad])
    with pytest.raises(ValueError, match="finite and positive"):
        invert(weights, np.array([0.5, 0.5]))
    assert _invert_on_device(weights, np.array([0.5, 0.5])).tolist() == [1, -1]  # not read


def test_invert_of_uniforms_has_the_distribution():
    weights = torch.tensor([[0.1, 0.0, 0.2, 0.3, 0.4]]).expand(40000, 5)
    counts = np.bincount(invert(weights, np.random.default_rng(0).random(40000)), minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3, 4]], 40000 * np.array([0.1, 0.2, 0.3, 0.4])).pvalue > 1e-3


# The counter


def test_the_counter_is_a_pure_function_of_seed_and_key():
    """Frozen values: published runs resume to the same tokens."""
    assert CounterDraws(7).uniform(Key(1, 2, 3, Purpose.EMIT, 4)) == 0.38530369282067234
    assert CounterDraws(-1).uniform(Key(0, 0, 0, 0)) == 0.49511937163022623
    assert CounterDraws(7).uniform(Key(1, 2, 3, Purpose.DRAFT, -1)) == 0.05001396897343702


@pytest.mark.parametrize("field", range(5))
def test_the_counter_is_uniform_along_each_field(field):
    """Uniform, and independent for neighbouring keys."""
    draws = CounterDraws(3)
    values = np.array([draws.uniform(Key(*[n if i == field else 1 for i in range(5)])) for n in range(20000)])
    assert values.min() >= 0 and values.max() < 1
    assert stats.chisquare(np.histogram(values, 64, (0, 1))[0]).pvalue > 1e-4
    pairs = np.histogram2d(values[:-1], values[1:], 8, ((0, 1), (0, 1)))[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_batch_mates_do_not_matter():
    draws = CounterDraws(5)
    weights = torch.rand(6, 50)
    keys = [Key(r, 0, 2, Purpose.EMIT) for r in range(6)]
    together = draws.pick(weights, keys)
    alone = [draws.pick(weights[r : r + 1], keys[r : r + 1])[0] for r in range(6)]
    assert together.tolist() == alone and together.dtype == torch.int64


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_likeliest_are_different_tokens_also_where_one_has_no_mass(width):
    x = torch.full((2, 9), -torch.inf)
    x[:, : width - 1] = 1.0
    assert all(len(set(row)) == width for row in likeliest(x, width).tolist())


# Races


def test_the_noise_of_a_race_is_a_pure_function_of_seed_and_key():
    """Frozen values: published runs resume to the same tokens."""
    noise = CounterDraws(7).race(3, [Key(1, 2, 3, Purpose.RACE, 4), Key(1, 2, 3, Purpose.RACE, -1)])
    assert noise.dtype == np.float64 and noise.tolist() == [
        [-1.361048996528699, 0.27195175882295786, -0.010058336187607623],
        [-0.3026794722064876, -0.7826732587708946, 1.0229883834441371],
    ]
    assert CounterDraws(7).race(5, []).shape == (0, 5)


def test_the_noise_of_a_race_has_the_gumbel_distribution_also_along_the_keys():
    draws = CounterDraws(3)
    wide = draws.race(20000, [Key(1, 0, 2, Purpose.RACE, 3)])[0]
    tall = draws.race(3, [Key(1, 0, n, Purpose.RACE, 3) for n in range(10000)])
    for noise in (wide, tall[:, 0], tall[:, -1]):
        assert stats.kstest(noise, "gumbel_r").pvalue > 1e-4
        uniform = np.exp(-np.exp(-noise))
        pairs = np.histogram2d(uniform[:-1], uniform[1:], 8, ((0, 1), (0, 1)))[0]  # neighbouring keys are independent
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_different_keys_or_seeds_have_different_noise_and_batch_mates_do_not_matter():
    keys = [Key(*k) for k in itertools.product(range(3), range(2), range(3), range(3), range(-1, 3))]
    noise = {
        (seed, key): row for seed in (0, 1, -1) for key, row in zip(keys, CounterDraws(seed).race(4, keys), strict=True)
    }
    assert len({value for row in noise.values() for value in row.tolist()}) == 4 * 3 * len(keys)
    for (seed, key), row in list(noise.items())[::17]:
        assert CounterDraws(seed).race(4, [key])[0].tolist() == row.tolist()


def test_the_noise_of_a_race_is_finite_whatever_is_drawn(monkeypatch):
    """An exponential variate can round to zero; its logarithm may not be infinite."""
    drawn = np.array([0.0, 5e-324, 1.0, 800.0])
    monkeypatch.setattr(CounterDraws, "_generator", lambda *_: SimpleNamespace(standard_exponential=lambda _: drawn))
    noise = CounterDraws(0).race(4, [Key(0, 0, 0, Purpose.RACE)])
    assert np.isfinite(noise).all() and noise[0, 0] == noise.max() > 700
    monkeypatch.undo()
    assert np.isfinite(CounterDraws(0).race(1_000_000, [Key(0, 0, 0, Purpose.RACE)])).all()


def test_a_race_shares_nothing_with_a_choice_of_the_same_key():
    keys = [Key(n, 0, 0, Purpose.RACE) for n in range(5000)]
    uniform = np.array([CounterDraws(0).uniform(key) for key in keys])
    noise = CounterDraws(0).race(1, keys)[:, 0]
    assert abs(stats.spearmanr(uniform, noise).statistic) < 0.06  # 4 sigma
