"""Requirements of quantized targets, and fields of a checkpoint's config that are passed on; without packages."""

import shutil
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.models import loading, quantization
from spec_lab.models.quantization import CARRIED, carried, chosen, own_config
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from tests.checkpoints import checkpoint
from tests.models.quantized_checkpoints import FP8, SIZES, change, compressed, fp8

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """Replace what is installed: by name its version; everything in a new version unless stated."""
    versions: dict[str, str | None] = {}

    def version(name):
        known = versions.get(name, "99")
        if known is None:
            raise metadata.PackageNotFoundError(name)
        return known

    monkeypatch.setattr(quantization.metadata, "version", version)
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    return versions


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("quantized") / "source", **SIZES)


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "target")


def load(folder, **options):
    return Target.load(str(folder), **({"dtype": "float32"} | options))


# Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "group", "says"),
    [
        ("int8", None, "target.quantization must be one of torchao_int8, .*'int8'"),
        (8, None, "target.quantization must be one of"),
        (True, None, "target.quantization must be one of"),
        (None, 32, "quantization_group_size .*torchao_int4 only .*None"),
        ("torchao_int8", 32, "quantization_group_size .*torchao_int4 only .*'torchao_int8'"),
        ("torchao_int4", 48, "quantization_group_size must be null or one of 32, 64, 128, not"),
        ("torchao_int4", True, "quantization_group_size must be null or one of"),
        ("torchao_int4", "32", "quantization_group_size must be null or one of"),
    ],
)
def test_an_invalid_option_is_named(installed, option, group, says):
    with pytest.raises(ValueError, match=says):
        chosen(option, group, CPU, "float32")


@pytest.mark.parametrize(
    ("option", "where", "dtype", "says"),
    [
        ("torchao_int8", CPU, "float64", "torchao_int8 requires target.dtype=float16 or bfloat16 or float32 on cpu"),
        ("torchao_int4", GPU, "float32", "torchao_int4 requires target.dtype=bfloat16 on cuda, not float32"),
        ("bnb_int4", CPU, "float64", "bnb_int4 requires .*not float64"),
    ],
)
def test_a_data_type_without_kernels_is_named(installed, option, where, dtype, says):
    with pytest.raises(ValueError, match=says):
        chosen(option, None, where, dtype)


@pytest.mark.parametrize(
    ("option", "package", "version", "says"),
    [
        ("torchao_int8", "torchao", None, r"requires torchao 0\.16.* newer: pip install 'spec-lab\[torchao\]'"),
        ("torchao_int4", "torchao", "0.9", "torchao_int4 requires torchao .* newer"),
        ("bnb_int8", "bitsandbytes", None, r"bnb_int8 requires bitsandbytes .*pip install 'spec-lab\[bitsandbytes\]'"),
        ("bnb_int4", "accelerate", None, "bnb_int4 requires accelerate"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_before_weights_are_read(
    folder, installed, monkeypatch, option, package, version, says
):
    installed[package] = version
    monkeypatch.setattr(loading, "_fill", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(Unsupported, match=says):
        load(folder, quantization=option)


def test_a_quantized_checkpoint_is_not_quantized_again(folder, installed):
    change(folder, quantization_config=FP8)
    with pytest.raises(ValueError, match=r"target.quantization=bnb_int8 .*unquantized .*target.quantization=null"):
        load(folder, quantization="bnb_int8")


# Checkpoints -----------------------------------------------------------------------------------------------------

CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "fp8": FP8,
    "compressed-tensors": compressed(False),
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "os.system", "_data": {}}}},
}


@pytest.mark.parametrize("method", CARRIED)
def test_only_fields_that_say_how_weights_are_stored_are_passed_on(tmp_path, installed, method):
    junk = {
        "backend": "someone/kernel", "dataset": "c4", "tokenizer": "a/b", "dequantize": False, "use_exllama": True,
        "bnb_4bit_compute_dtype": "load", "run_compressed": True, "modules": ["x"], "weights_path": "w.bin", "meta": {},
        "use_optimized_inference": True, "llm_int8_enable_fp32_cpu_offload": True,
    }  # fmt: skip
    fields = carried(tmp_path, CONFIGS[method] | junk, CPU, "float16")
    assert not fields.fields.keys() & junk.keys() and fields.method == method and fields.carried
    passed = own_config(fields, torch.float16)
    if method == "torchao":
        assert passed is None, "its config names classes; tensors are put together from the header"
    else:
        assert passed["quant_method"] == method
        assert {**junk, **passed}["bnb_4bit_compute_dtype"] == (torch.float16 if method == "bitsandbytes" else "load")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm', which is not supported; supported are gptq, awq, fp8"),
        ({"quant_method": ["fp8"]}, "quant_method .*not supported"),
        ({"bits": 4}, "quant_method null"),
        (CONFIGS["gptq"] | {"lm_head": True}, "quantization_config.lm_head is not supported: its LM head"),
        (CONFIGS["gptq"] | {"dynamic": {"-:x": {}}}, "quantization_config.dynamic is not supported"),
        (compressed(False, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported: its KV cache"),
        (compressed(False, sparsity_config={"format": "sparse-24"}), "sparsity_config is not supported"),
        (compressed(False, transform_config={"config_groups": {"a": {}}}), "transform_config is not supported"),
        (compressed(False, config_groups=[]), "config_groups must map"),
        (compressed(False, ignore="lm_head"), "ignore must be a list of names"),
        (compressed(False, ignore=["x" * 1000]), "ignore must be a list of names of at most 200"),
        (compressed(False, ignore=[r"re:(a|a)*b"]), "ignore has the pattern .*slowly"),
        (compressed(False, ignore=["re:" + ".*x" * 9]), "ignore has the pattern .*slowly"),
        (FP8 | {"modules_to_not_convert": [".*x" * 9]}, "modules_to_not_convert has the pattern .*slowly"),
        (FP8 | {"modules_to_convert": 5}, "modules_to_convert must be a list of names"),
        (FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert must be a list of names"),
        (CONFIGS["torchao"] | {"include_input_output_embeddings": True}, "its embedding and LM head are quantized"),
    ],
)
def test_a_config_that_is_not_supported_is_named(folder, installed, monkeypatch, config, says):
    change(folder, quantization_config=config)
    monkeypatch.setattr(loading, "_fill", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises((Unsupported, ValueError), match=rf"config\.json: .*{says}"):
        load(folder)


def test_weights_without_activations_are_dequantized(tmp_path, installed):
    assert carried(tmp_path, compressed(False), CPU, "float32").dequantized
    assert not carried(tmp_path, compressed(True), CPU, "float32").dequantized
    both = compressed(False)["config_groups"]["group_0"]
    assert not carried(tmp_path, compressed(False, config_groups={"a": both, "b": both}), CPU, "float32").dequantized


# fp8 -------------------------------------------------------------------------------------------------------------


def test_an_fp8_checkpoint_is_dequantized(source, tmp_path):
    pytest.importorskip("accelerate")
    meant = fp8(source, tmp_path / "target")
    target = load(tmp_path / "target")
    read = {name: tensor.to_dense() for name, tensor in target.model.state_dict().items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in meant.items())
    assert target.self_check < 1e-3 and target.tolerance == 1e-3
    assert target.facts["quantization"]["method"] == "fp8" and target.facts["quantization"]["dequantized"]
    plain = load(source)
    assert target.lm.work == plain.lm.work and plain.facts["quantization"] is None
    assert target.lm.facts == plain.lm.facts | {"quantization": target.facts["quantization"]}


def test_a_misshapen_scale_is_named(source, tmp_path):
    pytest.importorskip("accelerate")
    fp8(source, tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 5)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{tmp_path}/target cannot be loaded with quantization fp8"):
        load(tmp_path / "target")
