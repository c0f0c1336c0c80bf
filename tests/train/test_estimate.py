"""Memory of a training, counted, and how many texts are computed together."""

from types import SimpleNamespace

import pytest
import torch

from spec_lab.drafters.eagle.network import Eagle3, Eagle3Settings
from spec_lab.drafters.eagle.train import Eagle3Recipe, eagle3_objective
from spec_lab.train.estimate import TrainingNeed, estimate, kept_bytes, trial_text
from spec_lab.train.objectives import Truth, compare_states, mean_losses

H, V, W, C = 4096, 128256, 32000, 2048
"""Sizes of Llama-3.1-8B and of its published EAGLE-3 heads."""
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
TARGET_BYTES = 2 * 8_030_261_248
"""Its weights in bfloat16."""
META = torch.device("meta")


def test_kept_bytes_are_those_of_storages_that_are_no_weights():
    weight, x = torch.randn(8, 3, requires_grad=True), torch.randn(5, 3)
    size, loss = kept_bytes(lambda: (x @ weight.T).exp().sum(), [weight])
    assert size == 4 * (5 * 3 + 5 * 8)  # x, and what exp returns
    assert loss.requires_grad


def test_logits_are_not_kept_but_the_target_s_probabilities_are():
    weight, hidden = torch.randn(6, 500, requires_grad=True), torch.randn(20, 6)
    truth = Truth.of(hidden, lambda x: x @ weight.detach(), torch.zeros(20).long())
    states, rows = torch.randn(20, 6, requires_grad=True), torch.arange(20)
    size, _ = kept_bytes(
        lambda: compare_states(states * 2, lambda x: x @ weight, truth, rows).loss.sum(), [weight, states]
    )
    assert 20 * 500 * 4 < size < 1.2 * 20 * 500 * 4


def test_losses_with_a_vocabulary_of_128k_keep_gradients_of_states_only():
    """No chunk of a vocabulary would keep less: logits of some rows at a time are dropped with their gradients."""
    weight = torch.empty(V, H, device=META, requires_grad=True)
    states, rows = torch.empty(C, H, device=META, requires_grad=True), torch.arange(C, device=META)
    best = torch.empty(C, dtype=torch.long, device=META)
    truth = Truth(torch.empty(C, V, device=META), best, best)
    size, _ = kept_bytes(
        lambda: mean_losses([states], [lambda x: x @ weight.T], [weight], truth, [rows], [1.0])[0], [weight, states]
    )
    assert size == 4 * C * H


def test_an_eagle3_head_of_8b_trains_in_less_than_40_gb():
    """At the defaults of the recipe, in float32, with the target's weights; sizes are real and tensors have no data."""
    network = Eagle3(Eagle3Settings(LAYER, H, H, V, (2, 16, 29), W)).requires_grad_(True)
    network.ids = torch.empty(W, dtype=torch.long, device=META)
    head = torch.empty(V, H, dtype=torch.bfloat16, device=META)
    target = SimpleNamespace(
        embed=lambda ids: torch.empty(*ids.shape, H, dtype=torch.bfloat16, device=META), lm_head=lambda x: x @ head.T
    )
    recipe = Eagle3Recipe()
    objective = eagle3_objective(network, target, torch.bfloat16, recipe.unrolls, recipe.decay, recipe.loss)
    weights = list(network.parameters())
    counted = estimate(lambda text: objective(text)[0], weights, [head], trial_text(C, 4 * H, META))
    trained = sum(weight.numel() for weight in weights)
    assert 420e6 < trained < 430e6
    assert counted.text == pytest.approx(6.36e9, rel=0.01)
    before = 7 * 32 * C * C * 4 * 2 + 7 * 3 * C * W * 4  # scores and shares of all unrolls, and logits: not kept
    assert before > 10e9
    room = int(40e9) - TARGET_BYTES - 4 * trained
    part = counted.part(16, room)
    assert part >= 2
    assert TARGET_BYTES + 4 * trained + counted.bytes(part) < 40e9


@pytest.mark.parametrize(
    ("room", "threads", "part"), [(None, 2, 8), (10**9, 1, 8), (500, 1, 4), (500, 2, 2), (260, 1, 1)]
)
def test_the_most_texts_that_fit_are_computed_together(room, threads, part):
    assert TrainingNeed(fixed=100, text=100, tokens=9, seconds=1).part(16, room, threads) == part


def test_a_text_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"one text of 9 tokens needs 300 bytes .* 250 bytes are available: set max_new"
    ):
        TrainingNeed(fixed=100, text=100, tokens=9, seconds=1).part(16, 250, 2)
