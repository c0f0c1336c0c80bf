"""The text part of multimodal checkpoints: the logits of the whole model for text, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.models.text_part import KINDS
from tests.checkpoints import checkpoint
from tests.tiny import COMMON

TEXT = COMMON | dict(num_key_value_heads=2)
TOWER = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
    vision_feature_layer=-1,
)  # fmt: skip
CLIP = TOWER | dict(model_type="clip_vision_model", projection_dim=16, num_hidden_layers=2)
SIGLIP = TOWER | dict(model_type="siglip_vision_model")
QWEN_TOWER = dict(depth=1, hidden_size=16, out_hidden_size=32, num_heads=2, patch_size=4, intermediate_size=16)
AXES = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)

TINY = {
    "llava": dict(text_config=TEXT | dict(model_type="llama"), vision_config=CLIP, image_token_index=60),
    "llava qwen2": dict(
        text_config=TEXT | dict(model_type="qwen2", tie_word_embeddings=True), vision_config=CLIP, image_token_index=60
    ),
    "llava_next": dict(
        text_config=TEXT | dict(model_type="mistral", sliding_window=None), vision_config=CLIP, image_token_index=60
    ),
    "llava_onevision": dict(text_config=TEXT | dict(model_type="qwen2"), vision_config=SIGLIP, image_token_index=60),
    "vipllava": dict(text_config=TEXT | dict(model_type="llama"), vision_config=CLIP, image_token_index=60),
    "mistral3": dict(
        text_config=TEXT | dict(model_type="mistral", sliding_window=None, head_dim=8), image_token_index=60,
        vision_config=TOWER | dict(model_type="pixtral", head_dim=8), tie_word_embeddings=False,
    ),
    "qwen2_vl": dict(
        text_config=TEXT | dict(model_type="qwen2_vl_text", rope_parameters=AXES),
        vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4),
    ),
    "qwen2_5_vl": dict(text_config=TEXT | dict(rope_parameters=AXES), vision_config=QWEN_TOWER),
    "qwen3_vl": dict(
        text_config=TEXT | dict(head_dim=8, rope_parameters=AXES | dict(mrope_interleaved=True)),
        vision_config=QWEN_TOWER | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
    ),
    "internvl": dict(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=TOWER | dict(model_type="internvl_vision", image_size=[8, 8], patch_size=[4, 4]),
    ),
    "idefics3": dict(text_config=TEXT | dict(model_type="llama"), vision_config=TOWER),
    "smolvlm": dict(text_config=TEXT | dict(model_type="llama"), vision_config=TOWER),
    "gemma3": dict(
        text_config=TEXT | dict(head_dim=8, layer_types=["full_attention"] * 2), vision_config=SIGLIP,
        mm_tokens_per_image=4,
    ),
    "llama4": dict(
        text_config=TEXT | dict(
            head_dim=8, intermediate_size_mlp=48, num_local_experts=2, layer_types=["full_attention"] * 2,
            attention_chunk_size=None,
        ),
        vision_config=TOWER | dict(
            intermediate_size=64, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a tokenizer."""
    folder = checkpoint(tmp_path_factory.mktemp("texts") / "target")
    (folder / "model.safetensors").unlink()
    return folder


def whole(name: str):
    """A whole random model; its logits are spread so that the largest is unambiguous."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **TINY[name])
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def saved(model, texts, folder):
    """Save it beside a tokenizer, under the names of tensors that the hub's checkpoints have."""
    shutil.copytree(texts, folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava(texts, tmp_path_factory):
    return saved(whole("llava"), texts, tmp_path_factory.mktemp("llava") / "target")


@pytest.fixture
def folder(llava, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(llava, tmp_path / "target")


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rename(folder, old, new):
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def test_every_supported_kind_is_tested():
    assert {name.split()[0] for name in TINY} == set(KINDS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("llava qwen2", "qwen2_vl", "qwen3_vl", "mistral3") else pytest.mark.nightly
        )
        for name in TINY
    ],
)
def test_the_text_part_has_the_logits_of_the_whole_model(name, texts, tmp_path):
    model = whole(name)
    target = Target.load(str(saved(model, texts, tmp_path / "target")), dtype="float32")
    tokens = torch.randint(0, 59, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if name == "llama4":  # its whole model fails for text in transformers 5.24
            expected = model.language_model(tokens).logits[0]
        else:
            expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    torch.testing.assert_close(target.plain_logits(tokens[0].tolist(), 1), expected, rtol=1e-4, atol=1e-4)
    assert target.self_check < 1e-3 and target.context == 256
    names = [part for part, _ in target.model.named_modules()]
    assert not [label for label in names if "vision" in label or "visual" in label or "projector" in label]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.language_model.model."])
def test_old_and_new_names_of_tensors_load(folder, prefix):
    expected = Target.load(str(folder), dtype="float32").plain_logits([1, 2, 3], 1)
    rename(folder, "language_model.model.", prefix)
    assert torch.equal(Target.load(str(folder), dtype="float32").plain_logits([1, 2, 3], 1), expected)


def test_a_flat_config_of_qwen2_vl_loads(texts, tmp_path):
    """As the hub's checkpoints have it: the fields of the text model at the top level, M-RoPE as a type."""
    folder = saved(whole("qwen2_vl"), texts, tmp_path / "target")
    expected = Target.load(str(folder), dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    flat = {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters", "layer_types")}
    flat |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (folder / "config.json").write_text(json.dumps(flat | config))
    target = Target.load(str(folder), dtype="float32")
    assert torch.equal(target.plain_logits([1, 2, 3], 1), expected.plain_logits([1, 2, 3], 1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.upper", "up_proj.weight is missing"),
        ("language_model.model.layers.1", "language_model.model.layers.7", r"layers\.1\..* is missing"),
        ("vision_tower.", "strange_tower.", "strange_tower.* is in no layer"),
        ("language_model.lm_head", "language_model.head", "lm_head.weight is missing"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_surplus_are_named(folder, old, new, says):
    rename(folder, old, new)
    with pytest.raises(ValueError, match=says) as caught:
        Target.load(str(folder), dtype="float32")
    assert str(folder) in str(caught.value)


def test_other_kinds_of_multimodal_models_are_refused_by_name(folder):
    for kind in ("aya_vision", "cohere2_vision"):
        change(folder, model_type=kind)
        with pytest.raises(Unsupported, match=rf"'{kind}' .*text part .*llava"):
            Target.load(str(folder), dtype="float32")


def test_what_the_text_model_cannot_do_is_refused(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    layers = ["sliding_attention"] * text["num_hidden_layers"]
    change(folder, text_config=text | {"layer_types": layers, "sliding_window": 0})
    with pytest.raises(Unsupported, match="sliding_attention must reach"):
        Target.load(str(folder), dtype="float32")


def test_end_of_text_tokens_of_the_whole_config_are_used(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder, eos_token_id=7)
    assert Target.load(str(folder), dtype="float32").ends == {7}


def test_weights_that_are_stored_apart_are_not_tied(texts, tmp_path):
    folder = saved(whole("mistral3"), texts, tmp_path / "target")
    expected = Target.load(str(folder), dtype="float32")
    change(folder, tie_word_embeddings=True)
    target = Target.load(str(folder), dtype="float32")
    assert torch.equal(target.plain_logits([1, 2, 3], 1), expected.plain_logits([1, 2, 3], 1))
    assert target.lm.facts == expected.lm.facts
