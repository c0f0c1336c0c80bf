"""A GGUF file holds the tensors of its checkpoint in llama.cpp's names and order, and what describes the model."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spec_lab.cli.commands import command
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.gguf_checkpoint import PARTS, permuted
from spec_lab.models.gguf_export import convert
from spec_lab.models.gguf_file import GGUFFile, read_gguf
from spec_lab.models.support import Unsupported
from tests.checkpoints import checkpoint
from tests.gguf_files import LLAMA3, MODELS, YARN, tiny, with_zoo_tokenizer


def unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo ``permuted``, as transformers' own reader of GGUF files does it."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(2, 1).reshape(rows.shape)


def source_of(name: str) -> str:
    """transformers' name of a tensor of a GGUF file."""
    modules = {new: old for old, new in PARTS.items()}
    *layer, part, what = name.removeprefix("blk.").split(".")
    return f"{'model.layers.' if layer else ''}{'.'.join([*layer, modules[part], what])}"


def heads_of(file: GGUFFile, name: str) -> int:
    """The number of heads over which a tensor's rows are permuted; 0: they are not."""
    part = name.split(".")[-2]
    count = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(part)
    return file.count(count, 64) if count and file.architecture == "llama" else 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_the_checkpoint_s_and_a_tied_head_is_left_out(tmp_path, name):
    folder = tiny(tmp_path / "checkpoint", name)
    made = convert(str(folder), tmp_path / "model.gguf")
    file, weights = read_gguf(tmp_path / "model.gguf"), load_file(folder / "model.safetensors")
    assert made.dtype == "f32" and made.size == (tmp_path / "model.gguf").stat().st_size
    held = {tensor: file.tensor(tensor) for tensor in file.tensors if tensor != "rope_freqs.weight"}
    assert {source_of(key) for key in held} == weights.keys()
    for key, numbers in held.items():
        heads = heads_of(file, key)
        assert torch.equal(unpermuted(numbers, heads) if heads else numbers, weights[source_of(key)]), key
    assert file.source_sha256 == weights_hash(str(folder))
    assert file.tied == (name == "tied") == ("output.weight" not in file.tensors)
    assert made.parameters == sum(weight.numel() for weight in weights.values())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_the_metadata_describes_the_model(tmp_path, name):
    folder = tiny(tmp_path / "checkpoint", name)
    convert(str(folder), tmp_path / "model.gguf")
    file, config = read_gguf(tmp_path / "model.gguf"), AutoConfig.from_pretrained(folder)
    assert file.architecture == {"mistral": "llama"}.get(config.model_type, config.model_type)
    assert (file.context, file.hidden_size, file.num_layers, file.vocabulary) == (256, 32, 2, 61)
    width = getattr(config, "head_dim", None) or 8
    for key, value in {
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 61,
        "attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_rms_epsilon": pytest.approx(config.rms_norm_eps),
        "rope.scaling.type": {"linear-rope": "linear", "yarn-rope": "yarn", "yarn-rope-qwen2": "yarn"}.get(name),
        "rope.scaling.factor": 4.0 if name.startswith(("linear", "yarn")) else None,
        "rope.scaling.original_context_length": 64 if name.startswith("yarn") else None,
    }.items():  # fmt: skip
        assert file.metadata.get(f"{file.architecture}.{key}") == value, key
    assert ("rope_freqs.weight" in file.tensors) == (name == "llama3-rope")


@pytest.mark.parametrize("low_and_high", [(1.0, 4.0), (1.0, 1.0), (2.0, 16.0)])
def test_llama_3_s_rope_divides_frequencies_as_transformers_does(tmp_path, low_and_high):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    low, high = low_and_high
    rope = LLAMA3 | {"low_freq_factor": low, "high_freq_factor": high}
    folder = checkpoint(tmp_path / "checkpoint", rope_parameters=rope, head_dim=64)
    convert(str(folder), tmp_path / "model.gguf")
    factors = read_gguf(tmp_path / "model.gguf").tensor("rope_freqs.weight")
    config = AutoConfig.from_pretrained(folder)
    plain = rope["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    if low < high:
        assert len({*factors.tolist()}) > 4, "some frequencies are interpolated"


def test_permuted_rows_rotate_in_pairs_as_the_halves_did():
    turned = permuted(torch.arange(16).reshape(16, 1), 2).flatten().tolist()
    assert turned == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    rows = torch.randn(24, 5)
    assert torch.equal(unpermuted(permuted(rows, 3), 3), rows)


@pytest.mark.parametrize("held", ["float64", "float32", "float16", "bfloat16"])
def test_without_a_dtype_the_checkpoint_s_own_is_kept(tmp_path, held):
    folder = checkpoint(tmp_path / "checkpoint", getattr(torch, held))
    made = convert(str(folder), tmp_path / "model.gguf")
    assert made.dtype == {"float16": "f16", "bfloat16": "bf16"}.get(held, "f32")
    if held != "float64":
        weights = load_file(folder / "model.safetensors")
        assert torch.equal(
            read_gguf(tmp_path / "model.gguf").tensor("token_embd.weight"), weights["model.embed_tokens.weight"].float()
        )


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("f16", 2**-10), ("q8_0", 0.01), ("q4_0", 0.15)])
def test_matrices_have_the_dtype_and_vectors_stay_in_float32(tmp_path, dtype, error):
    import gguf

    folder = tiny(tmp_path / "checkpoint")
    convert(str(folder), tmp_path / "model.gguf", dtype)
    file, weights = read_gguf(tmp_path / "model.gguf"), load_file(folder / "model.safetensors")
    for name, info in file.tensors.items():
        numbers, heads = file.tensor(name), heads_of(file, name)
        weight = weights[source_of(name)]
        numbers = unpermuted(numbers, heads) if heads else numbers
        kind = info.type_name.lower()
        if weight.dim() == 1:
            assert kind == "f32" and torch.equal(numbers, weight)
            continue
        outer = name in ("token_embd.weight", "output.weight")
        short = weight.shape[1] % 32 and dtype.startswith("q")
        assert kind == ("f16" if short else "q8_0" if outer and dtype == "q4_0" else dtype), name
        assert (numbers - weight).abs().max() <= error * weight.abs().max()
    assert file.metadata["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]


def test_a_number_that_a_dtype_cannot_hold_is_refused_by_the_tensor_s_name(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight.*f16.*--dtype"):
        convert(str(folder), tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))
    assert convert(str(folder), tmp_path / "model.gguf", "bf16").dtype == "bf16"


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_nothing(tmp_path):
    folder, limits = tiny(tmp_path / "checkpoint"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 2**10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"free some space.*model\.gguf"):
            convert(str(folder), tmp_path / "model.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(("changes", "named"), [
    ({"family": "gpt2"}, "model_type 'gpt2'"), ({"family": "gemma"}, "model_type 'gemma'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"family": "qwen3", "attention_bias": True}, "attention_bias"),
    ({"rope_parameters": YARN | {"beta_fast": 16.0}}, "rope_parameters.beta_fast"),
    ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"family": "mistral", "sliding_window": 16}, "sliding"),
])  # fmt: skip
def test_a_model_that_llama_cpp_does_not_describe_is_refused_by_name(tmp_path, changes, named):
    folder = checkpoint(tmp_path / "checkpoint", **changes)
    with pytest.raises(Unsupported, match=named.replace(".", r"\.")):
        convert(str(folder), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_the_tokenizer_s_description_is_in_the_file(tmp_path):
    made = convert(str(with_zoo_tokenizer(tmp_path / "checkpoint", "qwen2")), tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    data = json.loads((tmp_path / "checkpoint/tokenizer.json").read_text())
    metadata = {name.removeprefix("tokenizer."): value for name, value in file.metadata.items()}
    assert json.loads(metadata["huggingface.json"])["model"] == data["model"]
    assert (metadata["ggml.model"], metadata["ggml.pre"]) == ("gpt2", "qwen2") and "qwen2" in made.tokenizer
    assert dict(zip(file.tokens, range(4096), strict=True)) == data["model"]["vocab"]
    assert metadata["ggml.merges"] == [" ".join(merge) for merge in data["model"]["merges"]]
    assert metadata["ggml.token_type"].tolist() == [3] + [1] * 4095, "the end-of-text token is a control token"
    assert (metadata["ggml.eos_token_id"], metadata.get("ggml.bos_token_id")) == (0, None)
    assert (metadata["ggml.add_bos_token"], metadata["ggml.add_eos_token"]) == (False, False)
    assert file.ends == {0}


def test_qwen_s_normalizer_which_llama_cpp_leaves_out_is_kept_in_the_json(tmp_path):
    folder = with_zoo_tokenizer(tmp_path / "checkpoint", "qwen2")
    whole = json.loads((folder / "tokenizer.json").read_text()) | {"normalizer": {"type": "NFC"}}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    convert(str(folder), tmp_path / "model.gguf")
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert json.loads(metadata["tokenizer.huggingface.json"])["normalizer"] == {"type": "NFC"}


def run(*arguments: object) -> int:
    return command(["convert", *map(str, arguments)])


def test_the_command_writes_a_file_and_prints_its_sizes(tmp_path, capsys):
    folder = tiny(tmp_path / "checkpoint")
    assert run(folder, tmp_path / "model.gguf", "--dtype", "bf16") == 0
    line = capsys.readouterr().out
    assert str(tmp_path / "model.gguf") in line and " 21 tensors" in line and "bf16" in line and line.count("\n") == 1
    assert f"{(tmp_path / 'model.gguf').stat().st_size / 2**20:.1f} MiB" in line


def test_the_command_overwrites_a_file_with_force_only(tmp_path, capsys):
    folder, out = tiny(tmp_path / "checkpoint"), tmp_path / "model.gguf"
    out.write_text("mine")
    assert run(folder, out) == 1 and "--force" in capsys.readouterr().err and out.read_text() == "mine"
    assert run(folder, out, "--force") == 0 and read_gguf(out).num_layers == 2
