"""Mixtures of experts: the shapes that published configs describe, and their projection, by hand."""

import pytest

from spec_lab.analysis.projection import Deployment, catalogue
from spec_lab.analysis.projection.catalogue import precision
from spec_lab.analysis.projection.costs import RooflineForward
from spec_lab.analysis.projection.drafting import Drafting, by_roofline
from spec_lab.analysis.projection.model_shapes import Mixture, of_config
from spec_lab.analysis.projection.project import speedup
from spec_lab.core.roofline import ExpertWork
from tests.analysis.projection.test_project import BF16, PLAIN, device, of_chain

CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 100, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION, HEAD = 32 * 8 * (2 * 4 + 2 * 2), 100 * 32
ROUTED = {"num_local_experts": 8}


@pytest.mark.parametrize(
    ("fields", "mixture"),
    [
        (ROUTED, Mixture(8, 2, 48)),
        ({"num_experts": 8, "moe_intermediate_size": 16}, Mixture(8, 2, 16)),
        (ROUTED | {"num_experts_per_tok": None, "experts_per_token": 3}, Mixture(8, 3, 48)),
        ({"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 40}, Mixture(8, 2, 16, 40)),
        (
            {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1},
            Mixture(8, 2, 16, 32, 1),
        ),
        (ROUTED | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, Mixture(8, 2, 48, 0, 3)),
        (ROUTED | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, Mixture(8, 2, 48, 0, 1)),
        (ROUTED | {"norm_topk_prob": True, "router_aux_loss_coef": 0.1, "routed_scaling_factor": 2}, Mixture(8, 2, 48)),
        ({"num_local_experts": 0}, None),
        ({"moe_num_experts": 0, "num_moe_experts": None, "enable_moe_block": False, "top_k_experts": None}, None),
        ({"router_aux_loss_coef": 0.001, "output_router_logits": False, "mlp_bias": True, "mlp_only_layers": []}, None),
    ],
)
def test_the_fields_of_published_configs_describe_experts(fields, mixture):
    assert of_config("moe", CONFIG | fields).mixture == mixture


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (ROUTED | {"moe_topk": 2}, "moe_topk is not understood"),
        (ROUTED | {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is not understood"),
        (ROUTED | {"shared_intermediate_size": 24}, "shared_intermediate_size is not understood"),
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts is not understood"),
        ({"moe_num_experts": [64, 64]}, "moe_num_experts is not understood"),
        ({"num_moe_experts": 8}, "num_moe_experts is not understood"),
        (ROUTED | {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts, 8, not 9"),
        (ROUTED | {"num_experts_per_tok": None}, "has no 'num_experts_per_tok'"),
        (ROUTED | {"moe_layer_freq": [0, 1, 1, 1]}, "moe_layer_freq must be a whole number"),
        (ROUTED | {"mlp_only_layers": [4]}, "mlp_only_layers must list numbers of layers, from 0 to 3"),
        (ROUTED | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must state dense or sparse for each of 4 layers"),
        (ROUTED | {"kv_lora_rank": 512}, "kv_lora_rank describes multi-head latent attention"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
        ({"layer_types": 5}, "layer_types must be a list, not 5"),
        (ROUTED | {"mlp_layer_types": 5}, "mlp_layer_types must state dense or sparse"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"moe/config.json.* {message}|moe/config.json: {message}"):
        of_config("moe", CONFIG | fields)


def test_a_forward_reads_the_experts_of_all_its_rows_and_multiplies_each_row_with_its_own():
    """One dense layer, three with 8 experts of size 16, of which a row chooses 2, and one that all use."""
    fields = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
    shape = of_config("moe", CONFIG | fields)
    expert, dense = 3 * 32 * 16, ATTENTION + 3 * 32 * 48
    once = dense + 3 * (ATTENTION + 32 * 8 + expert) + HEAD
    assert shape.weights == once + 3 * 8 * expert + HEAD, "the embedding table too"
    work = shape.work(BF16)
    assert work.weight_bytes == 2 * (once + 3 * 2 * expert) and work.experts == ExpertWork(3, 8, 2, 2.0 * expert)
    assert work.row_flops + work.logits_flops == work.weight_bytes
    forward = RooflineForward(work, 4, device(peak=1e30), PLAIN, BF16)
    for rows, batch in ((1, 1), (5, 1), (1, 5), (3, 4)):
        weights = once + 3 * expert * 8 * (1 - 0.75 ** (rows * batch))
        cache = 4 * 2 * 2 * 8 * batch * (10 + rows)
        assert forward.seconds(rows, batch, 10) == pytest.approx(2 * (weights + cache) / 1e12)


def test_a_run_s_effective_number_of_experts_takes_the_place_of_all_in_what_rows_read():
    shape = of_config("moe", CONFIG | ROUTED)
    few, every = shape.choosing(4.0).work(BF16), shape.work(BF16)
    assert few.weight_bytes == every.weight_bytes and shape.choosing(4.0).weights == shape.weights
    beyond = 4 * 2 * 3 * 32 * 48 * (4 * (1 - 0.5**3) - 2)
    assert few.read(3) == pytest.approx(every.weight_bytes + beyond)
    for experts, message in ((1.0, "from 2,.* to 8"), (9.0, "from 2,.* to 8")):
        with pytest.raises(ValueError, match=f"--experts must be a number {message}"):
            shape.choosing(experts)
    with pytest.raises(ValueError, match="--experts 4 is of mixtures of experts"):
        of_config("dense", CONFIG).choosing(4.0)


def test_a_chain_gains_less_where_its_rows_read_more_experts_and_as_much_once_all_are_read():
    """Free drafts of 3 tokens, bound by reading: the gain is tau x read(B) / read(4 B)."""
    mixture, dense = (of_config("moe", CONFIG | fields) for fields in ({"num_experts": 64}, {}))
    chain = of_chain(0.8, 3)
    tau = chain.tau(3)[0]

    def gain(shape, batch):
        forward = RooflineForward(shape.work(BF16), 4, device(peak=1e30), PLAIN, BF16)
        return float(speedup(chain, 3, Deployment("any", forward, {}), Drafting(), batch, 0.0)[0])

    alone, together = gain(mixture, 1), gain(mixture, 100)
    assert 2 * alone < together < tau and alone < 0.5 * gain(dense, 1)
    read = [mixture.work(BF16).read(rows) + 2 * 4 * 2 * 2 * 8 * rows for rows in (1, 4)]
    assert alone == pytest.approx(tau * float(read[0] / read[1]))


def test_mtp_drafts_with_a_layer_of_experts_and_eagle_with_a_dense_one():
    shape, layers = catalogue.models()["qwen3-30b-a3b"], []

    def made(work, count):
        layers.append(work)
        return RooflineForward(work, count, device(), PLAIN, BF16)

    for proposer in ("mtp", "eagle"):
        by_roofline(proposer, shape, None, made, precision("bf16"), 1)
    mtp, eagle = layers
    assert mtp.experts == ExpertWork(1, 128, 8, 2.0 * 3 * 2048 * 768) and eagle.experts is None
    chosen = 8 * 3 * 2048 * 768 + 2048 * 128
    assert mtp.weight_bytes - eagle.weight_bytes == 2 * (chosen - 3 * 2048 * 6144)
    assert mtp.read(4) > mtp.read(1) == mtp.weight_bytes
