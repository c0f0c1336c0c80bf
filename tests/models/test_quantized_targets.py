"""Targets quantized by torchao, bitsandbytes and compressed-tensors, on the CPU; skipped where a package is missing."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from experiments.exactness.greedy import decoded
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.verify import Token
from tests.checkpoints import checkpoint
from tests.models.quantized_checkpoints import GROUPED, SIZES, four_bits, int8

PACKAGE = {"torchao": "torchao", "bnb": "bitsandbytes"}
OPTIONS = ("torchao_int8", "torchao_int4", "bnb_int8", "bnb_int4")
TREE = "0 1 0.0 0.1 1.0 0.0.0"


def require(option: str) -> None:
    pytest.importorskip(PACKAGE[option.split("_")[0]], reason=f"{option} requires its package")
    pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("quantized") / "source", **SIZES)


def load(folder, option=None, dtype="float32", **more):
    group = 32 if option == "torchao_int4" else None
    return Target.load(str(folder), dtype=dtype, quantization=option, quantization_group_size=group, **more)


def requests(count=4, new=24):
    return [Request(n, str(n), tuple(range(n, n + 5)) * 3, Sampling(), new) for n in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_checkpoint_is_quantized_while_it_is_loaded(source, option, dtype):
    require(option)
    target, plain = load(source, option, dtype), load(source, None, dtype)
    facts = target.facts["quantization"]
    assert facts["method"] == option and facts["share"] == 1.0 and facts["versions"]
    assert target.lm.facts["quantization"] == facts and target.lm.facts["parameters"] == plain.lm.facts["parameters"]
    rounds = option.startswith("bnb")
    assert facts["rounds"] == rounds and (target.tolerance == 1e-3) == (dtype == "float32" and not rounds)
    assert target.self_check <= target.tolerance < 0.25
    work, before = target.lm.work, plain.lm.work
    assert work.row_flops == before.row_flops and work.attention == before.attention
    matrices = before.row_flops // 2
    narrow = 1 if option.endswith("8") else 0.5
    least = before.weight_bytes - matrices * (4 if dtype == "float32" else 2) + matrices * narrow
    assert least < work.weight_bytes < least + 0.3 * matrices, "and scales"
    difference = (target.plain_logits([1, 2, 3], 1) - plain.plain_logits([1, 2, 3], 1)).float().abs().max()
    assert 0 < difference < 20, "another distribution"


@pytest.mark.nightly
@pytest.mark.parametrize("proposer", ["ngram", "chain", "tree"])
@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_output_is_that_of_the_quantized_model(source, option, proposer):
    """All requests agree in float32, where products are computed in it; bitsandbytes rounds, and may tie."""
    require(option)
    target = load(source, option)
    made = {
        "ngram": lambda: Ngram.load(target, depth=4),
        "chain": lambda: DraftModel.load(target, str(source), depth=3),
        "tree": lambda: DraftModel.load(target, str(source), tree=TREE, drawn="deterministic"),
    }[proposer]()
    truth, _ = decoded(target, Null.load(target), Token(), requests(), 1)
    outputs, accepted = decoded(target, made, Token(), requests(), 4)
    plain, _ = decoded(load(source), Null.load(target), Token(), requests(), 1)
    equal = sum(output == other for output, other in zip(outputs, truth, strict=True))
    assert equal == len(truth) if option.startswith("torchao") else equal >= len(truth) - 1
    assert accepted > 0 and (truth != plain or option.endswith("8")), "4 bits change the output of a random model"


def test_merged_layers_and_dense_attention_work(source):
    require("torchao_int8")
    expected = load(source, "torchao_int8").plain_logits([1, 2, 3], 1)
    for more in ({"graphs": True}, {"attention": "dense_mask"}):
        loaded = load(source, "torchao_int8", **more)
        torch.testing.assert_close(loaded.plain_logits([1, 2, 3], 1), expected, rtol=1e-4, atol=1e-4)


# Checkpoints that are quantized already ------------------------------------------------------------------------------


def saved(source, folder, config):
    """A checkpoint as transformers saves a quantized model; returns the folder and the model."""
    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config).eval()
    model.save_pretrained(folder)
    return folder, model


def same(target, model):
    with torch.inference_mode():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(target.plain_logits([1, 2, 3], 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    ],
)
def test_a_checkpoint_of_bitsandbytes_loads(source, tmp_path, settings):
    require("bnb_int8")
    folder, model = saved(source, tmp_path / "target", BitsAndBytesConfig(**settings))
    target = load(folder)
    same(target, model)
    assert target.facts["quantization"]["method"] == "bitsandbytes" and target.facts["quantization"]["carried"]
    assert load(folder, dtype="bfloat16").lm.dtype == torch.bfloat16
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="up_proj|cannot be loaded with quantization bitsandbytes"):
        load(folder)


def torchao(name):
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)())


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_a_checkpoint_of_torchao_loads(source, tmp_path, name):
    require("torchao_int8")
    folder, model = saved(source, tmp_path / "target", torchao(name))
    target = load(folder)
    same(target, model)
    rounds = "Dynamic" in name
    assert target.facts["quantization"]["rounds"] == rounds and (target.tolerance == 1e-3) != rounds
    assert rounds or target.self_check < 1e-4
    with pytest.raises(ValueError, match="was quantized in float32: set target.dtype=float32"):
        load(folder, dtype="bfloat16")


@pytest.fixture
def header(source, tmp_path):
    """Change what the header of a checkpoint of torchao says of a tensor; returns the folder and the function."""
    require("torchao_int8")
    folder, _ = saved(source, tmp_path / "target", torchao("Int8WeightOnlyConfig"))
    file = folder / "model.safetensors"

    def rewrite(edit):
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            known = dict(opened.metadata())
        edit(tensors, known)
        save_file(tensors, file, known)
        return folder

    return rewrite


WEIGHT = "model.layers.1.mlp.up_proj.weight"


def described(**changes):
    def edit(_, known):
        known[WEIGHT] = json.dumps(json.loads(known[WEIGHT]) | changes)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda tensors, _: tensors.pop("model.layers.1.mlp.up_proj._weight_scale"),
            "_weight_scale, a part of .*missing",
        ),
        (lambda tensors, known: known.pop("tensor_names"), "header of model.safetensors does not describe"),
        (lambda tensors, known: known.pop(WEIGHT), "header of model.safetensors does not describe"),
        (described(_type="os.system"), "header of model.safetensors does not describe"),
        (described(_data={"dtype": {"_type": "torch.dtype", "_data": "load"}}), "'load' is no data type"),
        (described(_data={"dtype": {"_type": "torch.dtype", "_data": 3}}), "3 is no data type"),
        (described(_data={"x": {"_type": "os.system", "_data": {}}}), "cannot be put together"),
        (described(_data={}), "cannot be put together"),
        (described(_tensor_data_names="qdata"), "describes .*up_proj.weight' wrongly"),
        (described(_data=json.loads("[" * 40 + "]" * 40)), "nested more than 16"),
        (lambda tensors, _: tensors.update({"model.x.weight": torch.ones(3)}), "model.x.weight is in no layer"),
    ],
)
def test_a_wrong_header_is_named(header, edit, says):
    with pytest.raises(ValueError, match=says):
        load(header(edit))


@pytest.mark.parametrize("activations", [False, True])
def test_a_checkpoint_of_compressed_tensors_loads(source, tmp_path, activations):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("loguru")
    meant = int8(source, tmp_path / "target", activations)
    target = load(tmp_path / "target")
    facts = target.facts["quantization"]
    assert facts["method"] == "compressed-tensors" and facts["dequantized"] != activations
    assert target.self_check < target.tolerance and (target.tolerance == 1e-3) != activations
    read = target.model.state_dict()
    for name in meant:
        torch.testing.assert_close(read[name].to_dense(), meant[name])
    assert target.lm.facts["parameters"] == load(source).lm.facts["parameters"]


@pytest.mark.nightly  # gptqmodel compiles its kernels when it is first used
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_of_gptq_or_awq_loads(tmp_path, method):
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    source = checkpoint(tmp_path / "source", **GROUPED)
    meant = four_bits(source, tmp_path / "target", method)
    plain = shutil.copytree(source, tmp_path / "plain")
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    for dtype, allowed in (("float32", 0.02), ("bfloat16", 0.2)):
        target, same_weights = load(tmp_path / "target", dtype=dtype), load(plain, dtype=dtype)
        logits, expected = (loaded.plain_logits(list(range(9)), 1).float() for loaded in (target, same_weights))
        assert (logits - expected).abs().max() < allowed * expected.std()
        assert target.facts["quantization"]["method"] == method and target.facts["quantization"]["share"] == 1.0
        assert target.self_check <= target.tolerance < 0.25
        assert target.lm.facts["parameters"] == same_weights.lm.facts["parameters"]
        work, dense = target.lm.work, same_weights.lm.work
        matrices = dense.row_flops // 2
        assert work.row_flops == dense.row_flops
        assert work.weight_bytes < dense.weight_bytes - matrices * (4 if dtype == "float32" else 2) + 0.6 * matrices
