"""Loading targets, and refusals by name."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from spec_lab.models import loading
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.support import Unsupported, refuse_by_name, self_check
from spec_lab.models.target import Target
from tests.tiny import CONTEXT, VOCABULARY, tiny_model


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


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["spans", "dense"])
def test_a_local_checkpoint_loads_and_passes_its_self_check(folder, dtype, attention):
    target = Target.load(str(folder), dtype=dtype, attention=attention)
    assert target.lm.dtype == getattr(torch, dtype)
    assert target.vocabulary == VOCABULARY and target.context == CONTEXT
    assert len(target.tokenizer("abc")["input_ids"]) == 3
    assert target.sha256 == weights_hash(str(folder)) and len(target.sha256) == 64
    assert 0 <= target.self_check < {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.25}[dtype]


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float8"}, "'float8'.* bfloat16"),
        ({"device": "gpu"}, "'gpu'.* cpu, cuda"),
        ({"device": "meta"}, "'meta'.* cpu, cuda"),
        ({"chunk": "abc"}, "target.chunk .*1 or more.*'abc'"),
        ({"chunk": 0}, "target.chunk .*1 or more.* 0"),
        ({"attention": "foo"}, "target.attention .*spans or dense.*'foo'"),
        ({"graphs": 1}, "target.graphs .*true or false.* 1"),
        ({"graphs": True, "attention": "dense"}, "target.graphs .*target.attention=dense"),
        ({"graphs": True, "device_map": "auto"}, "target.graphs .*target.device_map"),
        ({"context": True}, "True"),
        ({"path": 5}, "path .*folder"),
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
    monkeypatch.setattr(loading.memory, "available", lambda _: 150_000)
    with pytest.raises(
        ValueError, match=r"need \d+ KiB in float64, and 146 KiB of memory .* on cpu: target.dtype=bfloat16 needs"
    ):
        Target.load(str(folder), dtype="float64")
    monkeypatch.setattr(loading.memory, "available", lambda _: 1000)
    with pytest.raises(ValueError, match="no smaller target.dtype fits"):
        Target.load(str(folder), dtype="float32")


def test_a_missing_gpu_is_named(folder):
    with pytest.raises(ValueError, match="device=cpu"):
        Target.load(str(folder), device="cuda")


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        Target.load(str(tmp_path))


def test_weights_that_are_not_safetensors_are_refused(folder, tmp_path):
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(tiny_model(dtype=torch.float32).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        Target.load(str(tmp_path), dtype="float32")


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
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic RoPE"),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
                    "original_max_position_embeddings": 4096,
                },
                "sliding_window": None,
            },
            "longrope RoPE",
        ),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mistral", {"sliding_window": 64}, "sliding"),
        ("gemma2", {}, "sliding_attention"),
        ("mamba", {}, "does not attend"),
        ("gpt_neo", {}, "does not attend"),
        ("xglm", {}, "attention"),
        ("t5", {}, "encoder-decoder"),
    ],
)  # fmt: skip
def test_known_bad_kinds_are_refused_by_name_before_any_weight_is_read(family, settings, says):
    config = AutoConfig.for_model(family, **settings)
    with pytest.raises(Unsupported, match=f"'{family}' .*{says}"):
        refuse_by_name(config)


def test_a_refusal_comes_through_load(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="dynamic RoPE"):
        Target.load(str(tmp_path), dtype="float32")


def test_the_self_check_measures_a_wrong_model():
    """A layer that mixes neighbours of the packed batch does not work with trees."""
    model = tiny_model()
    layer = model.model.layers[1].mlp
    right = layer.forward
    layer.forward = lambda x: right(x + 0.1 * x.roll(1, dims=1))
    with pytest.raises(Unsupported, match=r"by 0\.\d+ standard deviations"):
        self_check(model, "spans")


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
        self_check(model, "spans")


@pytest.mark.parametrize("asked", ["softcap", "sliding_window", "s_aux"])
def test_attention_other_than_softmax_is_refused(asked):
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    right = attention.forward
    attention.forward = lambda *args, **more: right(*args, **more, **{asked: 8.0})
    with pytest.raises(Unsupported, match=f"attention .*{asked}"):
        self_check(model, "spans")


def test_a_model_with_custom_attention_is_refused_at_load_too(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny_model("falcon", dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="target.attention=dense"):
        Target.load(str(tmp_path), dtype="float32")
    assert Target.load(str(tmp_path), dtype="float32", attention="dense").self_check < 1e-3


def test_the_error_for_a_model_with_custom_attention_names_the_dense_mask():
    with pytest.raises(Unsupported, match="target.attention=dense"):
        self_check(tiny_model("falcon"), "spans")
    assert self_check(tiny_model("falcon"), "dense") < 1e-6


def fill_with_nan(model):
    model.model.norm.weight.fill_(float("nan"))


def make_every_logit_zero(model):
    model.lm_head.weight.zero_()


@pytest.mark.parametrize("spoil", [fill_with_nan, make_every_logit_zero])
def test_logits_that_cannot_be_compared_are_refused(spoil):
    model = tiny_model()
    with torch.no_grad():
        spoil(model)
    with pytest.raises(Unsupported, match="by inf standard deviations"):
        self_check(model, "spans")


@pytest.mark.parametrize("failure", [ValueError, ImportError, TypeError])
def test_the_advice_to_use_the_dense_mask_comes_once(failure):
    model = tiny_model()

    def fails(*_, **__):
        raise failure("no way")

    model.model.layers[0].forward = fails
    with pytest.raises(Unsupported, match=r"no way.*target\.attention=dense"):
        self_check(model, "spans")
    with pytest.raises(Unsupported, match=r"no way\)$"):
        self_check(model, "dense")
