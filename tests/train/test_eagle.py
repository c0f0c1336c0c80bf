"""EAGLE's training sees what its drafter computes: each unroll, in each column, is a draft after that position."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.eagle.files import EAGLE, EAGLE3
from spec_lab.drafters.eagle.network import Eagle, Eagle3, Eagle3Settings, EagleSettings
from spec_lab.drafters.eagle.train import Eagle3Recipe, begin_as_target, eagle3_objective
from spec_lab.drafters.eagle.train_eagle1 import eagle1_losses
from spec_lab.train.chain import truth_after
from spec_lab.train.texts import Texts
from tests.oracles import eagle as oracle
from tests.tiny import tiny_model, tiny_target

H, V, W, T, B = 16, 11, 7, 9, 2
SIZES = 4, 2, 4
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
IDS = torch.tensor([0, 2, 3, 5, 7, 8, 10])
FLOAT = torch.float64


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


EMBEDDING, HEAD = random(V, H, seed=1), random(V, H, seed=2)
SERVICES = SimpleNamespace(embed=lambda ids: EMBEDDING[ids], lm_head=lambda x: x @ HEAD.T)

TARGET = SimpleNamespace(services=SERVICES, lm=SimpleNamespace(device=torch.device("cpu"), dtype=FLOAT))


def text(states=3):
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3))
    return Texts(ids, torch.tensor([0, 4]), torch.tensor([T, T - 2]), random(B, T, states * H, seed=4))


def eagle3(**changes):
    settings = Eagle3Settings(LAYER, H, H, V, (1, 2, 3), W, **changes)
    network = random_network(Eagle3(settings), TARGET)
    network.ids = IDS
    return network


def published(network):
    names = {name: EAGLE3.published(name)[0] for name, _ in network.named_parameters()}
    return {
        names[name].replace("layers.0.", "midlayer."): parameter.detach()
        for name, parameter in network.named_parameters()
    }


def outputs(network, batch, unrolls):
    """For each unroll what it feeds back ``[B, C, H]`` and its logits ``[B, C, W]``, as the objective computes them."""
    drafts = eagle3_objective(network, SERVICES, FLOAT, unrolls).drafts
    hidden = torch.cat([batch.hidden, torch.zeros(B, T, H)], -1)
    whole = Texts(batch.ids, torch.zeros(B, dtype=torch.long), torch.full((B,), T))  # all columns are needed
    every = drafts.states(whole, hidden, EMBEDDING[batch.ids])
    return [(states, drafts.logits(0, states)) for states, _ in every]


@pytest.mark.parametrize(
    "changes", [{}, {"norm_before_residual": True, "norm_output": "feedback"}, {"layers": 2}], ids=str
)
def test_each_unroll_is_a_draft_after_its_column(changes):
    network, batch, unrolls = eagle3(**changes), text(), 4
    w, flags = published(network), [name for name, value in changes.items() if value in (True, "feedback")]
    drafted = outputs(network, batch, unrolls)
    for row in range(B):
        every = oracle.eagle3_features(w, list(batch.hidden[row].split(H, -1)), flags)
        for column in range(T - 1 - unrolls):
            known = every[: column + 1]
            for unroll in range(unrolls):
                tokens = batch.ids[row, 1 : column + 2 + unroll]
                feature, logits = oracle.eagle3(w, EMBEDDING, tokens, known, SIZES, flags)
                torch.testing.assert_close(drafted[unroll][0][row, column], feature[-1], rtol=0, atol=1e-5)
                torch.testing.assert_close(drafted[unroll][1][row, column], logits[-1], rtol=0, atol=1e-5)
                known = torch.cat([known, feature[-1:]])


def test_each_unroll_is_compared_with_the_target_s_distribution_after_its_last_token():
    """A target that is certain of the text's own next token, seen through a network that copies the truth."""
    network, batch = eagle3(), text()
    batch = Texts(IDS[batch.ids % W], batch.first, batch.length, batch.hidden)  # tokens of the draft vocabulary only
    after = torch.nn.functional.one_hot(torch.cat([batch.ids[:, 1:], batch.ids[:, :1]], 1), V)  # the token after each
    certain = SimpleNamespace(embed=SERVICES.embed, lm_head=lambda hidden: 1e4 * hidden[..., :V])
    padded = torch.nn.functional.pad(after.to(FLOAT), (0, H - V))
    _, measured = eagle3_objective(network, certain, FLOAT, 3)(
        replace(batch, hidden=torch.cat([batch.hidden, padded], -1))
    )
    for unroll, achieved in enumerate(measured):
        logits = outputs(network, batch, 3)[unroll][1]
        expected, rows = 0.0, 0
        for row in range(B):
            for column in range(T - 2 - unroll):
                token = column + 2 + unroll
                if batch.first[row] <= token < batch.length[row]:
                    log_q = logits[row, column].log_softmax(-1)
                    expected -= float(log_q[torch.searchsorted(IDS, batch.ids[row, token])])
                    rows += 1
        assert float(achieved.loss) == pytest.approx(expected / rows, abs=1e-5)


def test_the_sum_over_unrolls_decays_and_reaches_every_weight():
    network = eagle3().requires_grad_(True)
    batch = text(4)
    loss, measured = eagle3_objective(network, SERVICES, FLOAT, unrolls=3, decay=0.5)(batch)
    each = sum(0.5**n * float(unroll.loss.detach()) for n, unroll in enumerate(measured))
    assert float(loss.detach()) == pytest.approx(each)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    assert all(bool((gradient != 0).any()) for gradient in gradients)


@torch.no_grad()
def test_a_head_that_begins_as_the_target_computes_its_last_layer_from_the_last_tap():
    sizes = {name: LAYER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
    model, network = tiny_model(**sizes, num_key_value_heads=2, num_hidden_layers=3, vocab_size=V), eagle3()
    drawn = [weight.clone() for weight in (network.fc.weight, network.body.layers[0].self_attn.q_proj.weight)]
    begin_as_target(network, model.model)
    torch.testing.assert_close(network.fc.weight[:, : 2 * H], drawn[0][:, : 2 * H] / 10)
    torch.testing.assert_close(network.body.layers[0].self_attn.q_proj.weight[:, :H], drawn[1][:, :H] / 2)
    ids = torch.arange(T)[None] % V
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    network.fc.weight.copy_(torch.cat([torch.zeros(H, 2 * H), torch.eye(H)], 1))
    for name in "qkv":  # without the embedding, which the target's layer does not read
        getattr(network.body.layers[0].self_attn, f"{name}_proj").weight[:, :H] = 0
    w = published(network)
    hidden, _ = oracle.eagle3(
        w, EMBEDDING, ids[0], oracle.eagle3_features(w, [state[0] for state in states[:3]], []), SIZES, []
    )
    torch.testing.assert_close(network.norm(hidden), states[-1][0], rtol=0, atol=1e-5)


def test_taps_beyond_the_target_are_refused():
    with pytest.raises(ValueError, match=r"task\.recipe\.taps names hidden state 3"):
        Eagle3Recipe(taps=(1, 3)).states(tiny_target())


def test_eagle1_learns_features_and_distributions_one_position_ahead():
    network = random_network(Eagle(EagleSettings(LAYER, H, V)), TARGET)
    w = {EAGLE.published(name)[0]: parameter for name, parameter in network.named_parameters()}
    batch = text(1)
    truth = truth_after(batch, SERVICES, FLOAT)
    features, _, first = eagle1_losses(network, batch, truth, EMBEDDING[batch.ids], SERVICES.lm_head)
    distance, loss, rows = 0.0, 0.0, 0
    for row in range(B):
        predicted = oracle.eagle1(w, EMBEDDING, batch.ids[row, 1:], batch.hidden[row, :-1], SIZES)
        for column in range(T - 2):
            if batch.first[row] <= column + 2 < batch.length[row]:
                distance += float(torch.nn.functional.smooth_l1_loss(predicted[column], batch.hidden[row, column + 1]))
                p = (batch.hidden[row, column + 1] @ HEAD.T).softmax(-1)
                loss -= float((p * (predicted[column] @ HEAD.T).log_softmax(-1)).sum())
                rows += 1
    assert float(features) == pytest.approx(distance / rows, rel=1e-4)
    assert float(first.loss) == pytest.approx(loss / rows, rel=1e-4)
