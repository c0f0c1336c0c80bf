"""Loading targets, and refusals by name."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from spec_lab.models import loading
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.quantization import Quantization, check_quantized_fit, quantized_bytes
from spec_lab.models.self_check import self_check
from spec_lab.models.support import Unsupported, refuse_by_name
from spec_lab.models.target import Target
from spec_lab.runners.attention import layer_kinds
from spec_lab.runners.graphs import FixedPack
from tests.models.families import tiny_family
from tests.tiny import COMMON, CONTEXT, VOCABULARY, WINDOWED, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint on disk: a tiny Llama and a tokenizer of single letters."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    words = {chr(33 + number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="!").save_pretrained(path)
    return path


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
def test_a_local_checkpoint_loads_and_passes_its_self_check(folder, dtype, attention):
    target = Target.load(str(folder), dtype=dtype, attention=attention)
    assert target.lm.dtype == getattr(torch, dtype)
    assert target.vocabulary == VOCABULARY and target.context == CONTEXT
    assert len(target.tokenizer("abc")["input_ids"]) == 3
    assert target.sha256 == weights_hash(str(folder)) and len(target.sha256) == 64
    assert 0 <= target.self_check < {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.02}[dtype]


def test_decoding_in_fixed_shapes_passes_the_self_check_with_merged_layers(folder):
    target = Target.load(str(folder), dtype="float64", graphs=True)
    assert target.lm.fixed and target.lm.facts["graphs"] and 0 <= target.self_check < 1e-12  # 0 where both round alike
    assert target.lm.facts["parameters"] == Target.load(str(folder), dtype="float64").lm.facts["parameters"]
    draft = target.draft_runner(tiny_model(), "")
    assert draft.fixed


def test_the_context_can_be_shortened_not_lengthened(folder):
    assert Target.load(str(folder), dtype="float32", context=32).context == 32
    with pytest.raises(ValueError, match=f"{CONTEXT}, not 1000"):
        Target.load(str(folder), dtype="float32", context=1000)


@pytest.mark.parametrize("device", ["auto", None])
def test_the_gpu_is_taken_where_there_is_one_and_this_is_said(folder, monkeypatch, caplog, device):
    assert str(Target.load(str(folder), device=device).lm.device) == "cpu" and not caplog.messages
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    with pytest.raises(ValueError, match="device 'cuda'"):  # this torch has none
        Target.load(str(folder), device=device)
    assert "H100" in caplog.text and "target.device=cpu" in caplog.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float8"}, "'float8'.* bfloat16"),
        ({"device": "gpu"}, "'gpu'.* cpu, cuda"),
        ({"device": "meta"}, "'meta'.* cpu, cuda"),
        ({"chunk": "abc"}, "chunk .*1 or more.*'abc'"),
        ({"chunk": 0}, "chunk .*1 or more.* 0"),
        ({"attention": "foo"}, "attention .*per_sequence, dense_mask.*'foo'"),
        ({"graphs": 1}, "graphs .*true or false.* 1"),
        ({"graphs": True, "attention": "dense_mask"}, "target.graphs .*target.attention=dense_mask"),
        ({"graphs": True, "device_map": "auto"}, "target.graphs .*target.device_map"),
        ({"context": True}, "true"),
        ({"path": 5}, "path .*a text"),
        ({"path": "no/such/place/at/all"}, "folder no/such/place/at/all"),
        ({"path": "gpt2"}, "owner/name, .*openai-community/gpt2"),
        ({"path": "./nowhere"}, "folder ./nowhere"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named(folder, change, says):
    with pytest.raises((ValueError, OSError), match=says):
        Target.load(**({"path": str(folder), "dtype": "float32"} | change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder, monkeypatch):
    """With the dtypes that fit; on the CPU a tied LM head is copied, and the largest weight is held twice."""
    monkeypatch.setattr(loading, "_fill", Mock(side_effect=AssertionError("read")))
    monkeypatch.setattr(loading.device_memory, "available", lambda _: 150_000)
    with pytest.raises(
        ValueError, match=r"need \d+ KiB in float64, and 146 KiB of memory .* on cpu: target.dtype=bfloat16 needs"
    ):
        Target.load(str(folder), dtype="float64")
    monkeypatch.setattr(loading.device_memory, "available", lambda _: 1000)
    with pytest.raises(ValueError, match="no smaller target.dtype fits"):
        Target.load(str(folder), dtype="float32")


@pytest.mark.parametrize("accelerate", [True, False])
def test_weights_are_read_to_a_gpu_whose_host_has_less_memory(folder, monkeypatch, accelerate):
    device, given = torch.device("cuda:0"), {}

    class Read(Exception):
        pass

    def from_pretrained(*_, device_map=None, **__):
        given["device_map"] = device_map
        raise Read

    monkeypatch.setattr(loading, "device_of", lambda _: device)
    monkeypatch.setattr(loading, "find_spec", lambda name: True if accelerate else None)
    monkeypatch.setattr(loading.device_memory, "available", lambda where: 10**9 if where == device else 1000)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", from_pretrained)
    if not accelerate:
        with pytest.raises(ValueError, match="on cpu, through which they are read without the package accelerate"):
            Target.load(str(folder), dtype="float32")
        return
    with pytest.raises(Read):
        Target.load(str(folder), dtype="float32")
    assert given == {"device_map": {"": device}}


def test_quantized_weights_take_at_least_the_bytes_of_their_files_or_layers(folder):
    model, files = loading.describe(str(folder)).model, sorted(folder.glob("*.safetensors"))
    head, float32 = model.get_output_embeddings(), torch.float32
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    rest = 4 * (sum(parameter.numel() for parameter in model.parameters()) - linear)
    assert linear > 0
    for how, expected in (
        (Quantization("torchao_int8", "torchao"), rest + linear),
        (Quantization("torchao_int4", "torchao", group_size=32), rest + linear // 2),
        (Quantization("gptq", "gptq"), sum(file.stat().st_size for file in files)),
        (Quantization("fp8", "fp8", dequantized=True), rest + 4 * linear),
    ):
        assert quantized_bytes(model, how, float32, files) == expected
        check_quantized_fit("p", model, how, float32, files, torch.device("cpu"), expected)
        with pytest.raises(ValueError, match=rf"quantized with {how.method}, need at least .* available on cpu"):
            check_quantized_fit("p", model, how, float32, files, torch.device("cpu"), expected - 1)


def test_a_missing_gpu_is_named(folder):
    with pytest.raises(ValueError, match="device=cpu"):
        Target.load(str(folder), device="cuda")


def cut(file):
    file.write_bytes(file.read_bytes()[:5000])


def rename_a_tensor(file):
    tensors = load_file(file)
    tensors["elsewhere"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})


def halve_a_tensor(file):
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:24].clone()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "damage", "error", "says"),
    [
        ("model.safetensors", cut, OSError, "model.safetensors .*corrupt"),
        ("model.safetensors", lambda file: file.write_text(""), OSError, "model.safetensors .*corrupt"),
        ("model.safetensors", rename_a_tensor, ValueError, "layers.1.mlp.up_proj.weight .*missing"),
        ("model.safetensors", halve_a_tensor, ValueError, r"layers.1.mlp.up_proj.weight .*\[24, 32\].* \[48, 32\]"),
        ("tokenizer.json", lambda file: file.write_text("{}"), ValueError, "tokenizer .*read"),
        ("tokenizer.json", lambda file: file.unlink(), ValueError, "tokenizer.json "),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_file(folder, tmp_path, name, damage, error, says):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy / name)
    with pytest.raises(error, match=says) as caught:
        Target.load(str(copy), dtype="float32")
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("rwkv", {}, "does not attend"),
        ("recurrent_gemma", {}, "does not attend"),
        ("gpt_neo", {}, "does not attend"),
        ("minimax", {}, "cache of its own"),
        ("kimi_linear", {}, "what the KV cache returns"),
        ("t5", {}, "encoder-decoder"),
        ("mistral", {"sliding_window": -1}, "sliding_attention must reach .* not -1"),
        ("gemma2", {"sliding_window": 0}, "sliding_attention must reach .* not 0"),
        ("llama4_text", {"attention_chunk_size": 0}, "chunked_attention must reach .* not 0"),
        ("gemma3", {}, "text models, here 'gemma3_text'"),
    ],
)  # fmt: skip
def test_known_bad_kinds_are_refused_by_name_before_any_weight_is_read(family, settings, says):
    config = AutoConfig.for_model(family, **settings)
    with pytest.raises(Unsupported, match=f"'{family}' .*{says}"):
        refuse_by_name(config)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64, "factor": 4.0,
}  # fmt: skip


def with_rope(folder, copy, rope):
    """A copy of a checkpoint with other RoPE, and its path."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    return str(copy)


def test_longrope_limits_the_context_to_the_length_with_one_rotation(folder, tmp_path, caplog):
    path = with_rope(folder, tmp_path / "copy", LONGROPE)
    with caplog.at_level("WARNING", "spec_lab.models.support"):
        assert Target.load(path, dtype="float32").context == 64
    assert "target.context is 64, original_max_position_embeddings" in caplog.text
    assert Target.load(path, dtype="float32", context=50).context == 50
    with pytest.raises(ValueError, match=r"target\.context .* 64, not 65, beyond which .*long_factor in place"):
        Target.load(path, dtype="float32", context=65)


def test_longrope_with_the_same_factors_at_every_length_and_dynamic_rope_have_the_whole_context(folder, tmp_path):
    same = LONGROPE | {"short_factor": LONGROPE["long_factor"]}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for name, rope in (("same", same), ("dynamic", dynamic)):
        target = Target.load(with_rope(folder, tmp_path / name, rope), dtype="float32")
        assert target.context == CONTEXT and target.self_check < 1e-5


def test_the_self_check_measures_a_wrong_model():
    """A layer that mixes neighbours of the packed batch does not work with trees."""
    model = tiny_model()
    layer = model.model.layers[1].mlp
    right = layer.forward
    layer.forward = lambda x: right(x + 0.1 * x.roll(1, dims=1))
    with pytest.raises(Unsupported, match=r"by 0\.\d+ standard deviations"):
        self_check(model, "per_sequence")


def test_the_self_check_detects_a_rotation_that_depends_on_the_pack():
    model = tiny_model()
    rotary = model.model.rotary_emb

    class Switching(torch.nn.Module):
        inv_freq = rotary.inv_freq

        def forward(self, x, position_ids):
            far = position_ids.max() > 100
            return rotary(x, position_ids * 2 if far else position_ids)

    model.model.rotary_emb = Switching()
    with pytest.raises(Unsupported, match="forests"):
        self_check(model, "per_sequence")


@pytest.mark.parametrize("asked", ["sliding_window", "head_mask"])
def test_attention_that_the_engine_does_not_compute_is_refused(asked):
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    right = attention.forward
    attention.forward = lambda *args, **more: right(*args, **more, **{asked: 8.0})
    with pytest.raises(Unsupported, match=f"attention .*{asked}"):
        self_check(model, "per_sequence")


def test_a_dtype_in_which_the_model_s_own_code_fails_is_named_with_one_that_works():
    sizes = COMMON | dict(num_key_value_heads=2, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes))
    with pytest.raises(Unsupported, match=r"'mixtral' is not supported in float64: .*set target\.dtype=float32"):
        self_check(model.double().eval(), "per_sequence")
    assert self_check(model.float(), "per_sequence").error < 1e-3


def test_complex_rotations_are_checked():
    model = tiny_model("llama4_text")
    rotary = model.model.rotary_emb
    right = rotary.forward
    assert right(torch.zeros(1), position_ids=torch.arange(2)[None]).is_complex()
    rotary.forward = lambda x, position_ids: right(x, position_ids) * (1 + (position_ids.max() > 100))
    with pytest.raises(Unsupported, match="forests"):
        self_check(model, "per_sequence")


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_the_rotations_of_each_kind_of_layer_are_checked(kind):
    model = tiny_family("gemma3_text")
    rotary = model.model.rotary_emb
    right = rotary.forward

    def switching(x, position_ids, layer_type):
        return right(x, position_ids * (1 + (layer_type == kind and position_ids.max() > 100)), layer_type)

    self_check(model, "per_sequence")
    rotary.forward = switching
    with pytest.raises(Unsupported, match="forests"):
        self_check(model, "per_sequence")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_forwards_that_return_nan_are_named(dtype):
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    shown = torch.float64 if dtype == torch.float64 else torch.float32
    with pytest.raises(
        Unsupported, match=f"'llama' cannot be checked in {shown}: a plain forward returns .* NaN or inf"
    ):
        self_check(model, "per_sequence")


def test_logits_that_overflow_in_half_precision_are_named_with_the_dtype_that_works():
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5e5)
    assert self_check(model, "per_sequence").error < 1e-3
    with pytest.raises(
        Unsupported, match=r"in torch\.float16: .*NaN or infinite; set target\.dtype=float32, which works$"
    ):
        self_check(model.half(), "per_sequence")


def test_the_setting_that_works_is_advised():
    """Layers that read their mask work with a dense one only; others only without fixed shapes."""
    model = tiny_model()
    original = model.model.layers[0].forward

    def reads_mask(*args, **more):
        assert more["attention_mask"] is not None or model.config._attn_implementation == "sdpa"
        return original(*args, **more)

    model.model.layers[0].forward = reads_mask
    for fixed, more in ((False, ", which works$"), (True, " and target.graphs=false, which works$")):
        with pytest.raises(Unsupported, match=rf"; set target\.attention=dense_mask{more}"):
            self_check(model, "per_sequence", fixed)

    def reads_cache(x, *args, **more):
        return original(x + any(isinstance(argument, FixedPack) for argument in more.values()), *args, **more)

    model.model.layers[0].forward = reads_cache
    with pytest.raises(Unsupported, match=r"decodes forests wrongly.*; set target\.graphs=false, which works$"):
        self_check(model, "per_sequence", True)


# Windows and chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.each_value
def test_the_self_check_reaches_beyond_windows_of_any_size(monkeypatch, family, size):
    """The engine reads a wrong window from the config here: with long windows no text of the check would show it."""
    name = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    model = tiny_model(family, **{name: size})
    assert self_check(model, "per_sequence").error < 1e-5 and getattr(model.config, name) == size
    if name == "sliding_window":
        assert {module.sliding_window for module in model.modules() if hasattr(module, name)} <= {size, None}
        assert {kind.sliding_window for kind in layer_kinds(model.config).values()} == {size}
    for attention in ("per_sequence", "dense_mask"):
        with monkeypatch.context() as patch:
            patch.setattr("spec_lab.runners.causal_lm.layer_kinds", lambda config: {})
            with pytest.raises(Unsupported, match=r"sliding_window=|by \d"):
                self_check(model, attention)


def test_a_layer_whose_window_is_not_that_of_the_config_is_refused():
    """Shortened windows would hide it."""
    model = tiny_model("mistral-windows", sliding_window=100)
    attention = model.model.layers[0].self_attn
    right = attention.forward
    attention.forward = lambda *args, **more: right(*args, **more | {"sliding_window": 50})
    with pytest.raises(Unsupported, match="sliding_window"):
        self_check(model, "per_sequence")


def test_the_self_check_detects_queries_scaled_by_their_row(monkeypatch):
    """Llama 4 scales queries at positions beyond ``floor_scale``, here far beyond the text of the check."""
    model = tiny_model("llama4_text", floor_scale=64)
    assert self_check(model, "per_sequence").error < 1e-5
    monkeypatch.setattr("spec_lab.runners.causal_lm.counting_layers", lambda model: {})
    with pytest.raises(Unsupported, match="by 0"):
        self_check(model, "per_sequence")
