"""Hostile checkpoints: no code in them runs, only safetensors are loaded, and each is refused by name."""

import json
import os
import pickle
import shutil
from pathlib import Path

import httpx
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from safetensors.torch import load_file, save_file

from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models import checkpoint as files
from spec_lab.models import hub as hub_files
from spec_lab.models import loading
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.target import Target
from spec_lab.runners.attention import SPANS
from spec_lab.tasks.peers import Generate
from tests.checkpoints import checkpoint

REFUSALS = (ValueError, OSError)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A tiny checkpoint that loads."""
    return checkpoint(tmp_path_factory.mktemp("sound") / "target")


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "hostile"))


def load(folder: Path | str) -> Target:
    return Target.load(str(folder), dtype="float32")


def logits(target: Target) -> torch.Tensor:
    paths = [target.lm.open()]
    return target.lm.forward(paths, [[1, 2, 3]], empty(1, target.lm.device)).logits


def change(folder: Path, name: str = "config.json", **fields) -> None:
    """Set fields of a JSON file of a checkpoint."""
    file = folder / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | fields))


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def bomb(tmp_path):
    """Plants a pickle; after each test the file that unpickling would create must not exist."""
    mark = tmp_path / "unpickled"

    def plant(file: Path) -> Path:
        file.write_bytes(pickle.dumps(Bomb(mark)))
        return file

    yield plant
    assert not mark.exists()


# Weights ---------------------------------------------------------------------------------------------------------


def shard(folder: Path, name: str = "part.safetensors") -> dict:
    """Turn the single weight file into a shard with an index; returns the index."""
    (folder / "model.safetensors").rename(folder / name)
    names = load_file(folder / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_shards_load_and_are_hashed(folder):
    (folder / "spare.safetensors").write_bytes(b"not named by the index, so neither loaded nor hashed")
    whole = load(folder).lm.model.state_dict()
    index = shard(folder)
    tensors = load_file(folder / "part.safetensors")
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors", {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / "part.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = load(folder)
    read = target.lm.model.state_dict()
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name].to_dense(), whole[name].to_dense()) for name in whole)
    assert len(target.sha256) == 64
    assert [file.name for file in files.weight_files(folder)] == ["0.safetensors", "1.safetensors"]
    before = target.sha256
    (folder / "spare.safetensors").write_bytes(b"other")
    assert weights_hash(str(folder)) == before
    (folder / "1.safetensors").write_bytes((folder / "0.safetensors").read_bytes())
    assert weights_hash(str(folder)) != before


@pytest.mark.parametrize(
    "name",
    ["weights.bin", "../outside.safetensors", "/etc/passwd", "sub/part.safetensors", "..", "", ".safetensors",
     ".hidden.safetensors", "a\\b.safetensors", "a\0.safetensors", 7, None, ["part.safetensors"]],
)  # fmt: skip
def test_an_index_names_safetensors_files_of_its_own_folder_only(folder, bomb, name):
    index = shard(folder)
    bomb(folder / "weights.bin")
    (folder / "sub").mkdir()
    for copy in ("../outside.safetensors", "sub/part.safetensors"):
        shutil.copy(folder / "part.safetensors", folder / copy)
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.*model\.norm\.weight"):
        load(folder)
    with pytest.raises(ValueError, match=r"index\.json"):
        weights_hash(str(folder))


def test_a_shard_that_is_missing_is_named(folder):
    shard(folder)
    (folder / "part.safetensors").unlink()
    with pytest.raises(OSError, match=r"part\.safetensors .*missing"):
        load(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
    index = shard(folder)
    shutil.copy(folder / "part.safetensors", folder / "twin.safetensors")
    index["weight_map"]["model.norm.weight"] = "twin.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"part\.safetensors .*twin\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.bin", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("alone", [True, False])
def test_pickles_are_never_opened(folder, bomb, name, alone):
    bomb(folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    (folder / "model.safetensors.index.default.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    if not alone:
        load(folder)
        return
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(folder)


def test_a_pickle_called_safetensors_is_refused(folder, bomb):
    bomb(folder / "model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors .*corrupt"):
        load(folder)


def test_an_adapter_is_refused(folder, bomb):
    """transformers would load it through peft, or leave it out where there is no peft."""
    bomb(folder / "adapter_model.bin")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load(folder)


def test_weights_may_be_regular_files_or_links_to_them_only(folder, tmp_path):
    expected = logits(load(folder))
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert torch.equal(logits(load(folder)), expected) and len(weights_hash(str(folder))) == 64
    for kind in (os.mkfifo, Path.mkdir, lambda link: link.symlink_to("/dev/zero")):
        (folder / "model.safetensors").unlink()
        kind(folder / "model.safetensors")
        with pytest.raises(REFUSALS, match=r"model\.safetensors"):
            load(folder)
        if (folder / "model.safetensors").is_dir():
            (folder / "model.safetensors").rmdir()
            (folder / "model.safetensors").touch()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_pipe_or_a_device_is_refused_without_blocking(folder, name):
    for make in (os.mkfifo, lambda link: link.symlink_to("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(ValueError, match=f"{name} .*regular file"):
            load(folder)


def hole(file: Path) -> None:
    """Make a file of 1 TiB that takes no space."""
    file.parent.mkdir(exist_ok=True)
    with file.open("ab") as stream:
        stream.truncate(2**40)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.json",
        "added_tokens.json",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_a_huge_file_is_not_read(folder, monkeypatch, name):
    hole(folder / name)
    monkeypatch.setattr(files, "read_json", lambda *_, **__: pytest.fail("a file was read"))
    monkeypatch.setattr(loading, "read_tokenizer", lambda *_: pytest.fail("the tokenizer was read"))
    with pytest.raises(ValueError, match=f"{name} .*1099511627776 bytes"):
        load(folder)


def test_layers_that_the_config_does_not_name_are_refused(folder):
    change(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"config\.json.*model\.layers\.1\."):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_tables_of_old_checkpoints_are_not_taken_for_layers(tmp_path, family):
    names = {"llama": "model.layers.0.self_attn.rotary_emb.inv_freq", "gpt2": "transformer.h.0.attn.bias",
             "gpt_neox": "gpt_neox.layers.0.attention.masked_bias"}  # fmt: skip
    folder = checkpoint(tmp_path / family, family=family)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {names[family]: torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    load(folder)


def test_drafts_and_peers_have_the_same_checks(sound, folder, bomb):
    target = load(sound)
    index = shard(folder)
    bomb(folder / "weights.bin")
    index["weight_map"]["lm_head.weight"] = "weights.bin"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for use in (
        lambda: DraftModel.load(target, str(folder), depth=2),
        lambda: Generate.assisted(target, Sampling(), 0, str(folder)),
    ):
        with pytest.raises(ValueError, match=r"weights\.bin"):
            use()


# The hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(sound, tmp_path, monkeypatch):
    """The checkpoint as the hub's cache keeps it, under the name some/one: links to blobs."""
    cache = tmp_path / "hub"
    repository = cache / "models--some--one"
    snapshot = repository / "snapshots" / ("0" * 40)
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(sound.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_hub_name_loads_from_the_cache(cached, sound):
    assert torch.equal(logits(load("some/one")), logits(load(sound)))
    assert torch.equal(logits(load(cached)), logits(load(sound)))


@pytest.fixture
def online(monkeypatch):
    """Replace the hub by one that can be reached, or not; returns the requested files."""
    asked: list[str] = []

    def hub(error, *names):
        def download(path, name, revision=None):
            asked.append(name)
            if name in names:
                raise error
            raise RemoteEntryNotFoundError("no such file", response=httpx.Response(404, request=REQUEST))

        monkeypatch.setattr(hub_files, "hf_hub_download", download)
        return asked

    monkeypatch.setattr(hub_files, "is_offline_mode", lambda: False)
    return hub


REQUEST = httpx.Request("HEAD", "https://hub.invalid")
DOWN = [LocalEntryNotFoundError("no connection"), httpx.ReadTimeout("too slow"), OSError("no space left")]


@pytest.mark.parametrize("error", DOWN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["generation_config.json", "adapter_config.json", "vocab.json", "model.safetensors"])
def test_a_file_that_cannot_be_fetched_is_not_taken_for_absent(cached, online, name, error):
    (cached / name).unlink(missing_ok=True)
    online(error, name)
    with pytest.raises(OSError, match=f"{name} of some/one .*{error}"):
        load("some/one")


def test_a_file_that_the_hub_does_not_have_is_absent(cached, online, sound):
    asked = online(None)
    assert torch.equal(logits(load("some/one")), logits(load(sound)))
    assert "vocab.json" in asked and "config.json" not in asked


def test_files_of_a_tokenizer_are_fetched_before_they_are_checked(cached, monkeypatch):
    blobs = {name: (cached / name).read_bytes() for name in ("tokenizer_config.json", "tokenizer.json")}
    settings = json.dumps(json.loads(blobs["tokenizer_config.json"]) | {"init_inputs": ["/etc/passwd"]})

    def hub(spoilt):
        for name in blobs:
            (cached / name).unlink(missing_ok=True)

        def download(path, name, revision=None):
            if name not in blobs:
                raise LocalEntryNotFoundError(name)
            (cached / name).write_bytes(blobs[name])
            spoilt(cached / name)

        monkeypatch.setattr(hub_files, "hf_hub_download", download)

    hub(lambda file: None)
    load("some/one")
    hub(lambda file: file.write_text(settings) if file.name == "tokenizer_config.json" else None)
    with pytest.raises(ValueError, match="init_inputs"):
        load("some/one")
    hub(lambda file: hole(file) if file.name == "tokenizer.json" else None)
    monkeypatch.setattr(loading, "read_tokenizer", lambda *_: pytest.fail("the tokenizer was read"))
    with pytest.raises(ValueError, match=r"tokenizer\.json .*\d+ bytes"):
        load("some/one")


@pytest.mark.parametrize("name", ["no/such/folder", "./none", "gpt2"])
def test_a_path_that_is_neither_a_folder_nor_a_hub_name_is_refused(name):
    with pytest.raises(OSError, match=f"{name}.*hub name"):
        load(name)


# Fields that would choose code --------------------------------------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch):
    """Requests for a kernel of the hub, or for remote code, fail the test."""

    def asked(*arguments, **_):
        pytest.fail(f"code was asked for: {arguments}")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", asked)
    monkeypatch.setattr("transformers.models.auto.auto_factory.get_class_from_dynamic_module", asked)
    monkeypatch.setattr("transformers.models.auto.tokenization_auto.get_class_from_dynamic_module", asked)


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel"},
        {"_attn_implementation_internal": "someone/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "someone/kernel"}},
        {"experts_implementation": "someone/kernel"},
        {"_experts_implementation": "someone/kernel"},
        {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "someone/repo--code.Model"}},
        {"dtype": "bogus"},
        {"torch_dtype": "load"},
        {"num_labels": 10**9},
        {"return_dict": False},
        {"use_return_dict": False},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"get_text_config": "x"},
        {"base_model_tp_plan": {"x": "y"}},
        {"attribute_map": {"vocab_size": "eos_token_id"}},
        {"_name_or_path": "someone/else", "_commit_hash": "1", "_auto_class": "x"},
        {"architectures": ["os.system"]},
        {"custom_generate": "someone/else"},
    ],
)
@pytest.mark.one_in(9)
def test_fields_that_choose_how_a_model_runs_are_ignored(folder, no_kernels, fields):
    expected = logits(load(folder))
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    change(folder, **fields)
    target = load(folder)
    assert torch.equal(logits(target), expected)
    assert target.lm.model.config._attn_implementation == SPANS


@pytest.mark.parametrize(
    "field",
    [
        "quantization_config",
        "compression_config",
        "fusion_config",
        "kernel_config",
        "use_kernels",
        "distributed_config",
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_fields_that_need_another_loader_are_refused_by_name(folder, no_kernels, field, nested):
    if field == "quantization_config" and not nested:
        pytest.skip("test_quantization.py has what is accepted there")
    value = {field: {"quant_method": "fp8", "patch_embeddings": True}}
    change(folder, **({"text_config": value} if nested else value))
    with pytest.raises(ValueError, match=rf"config\.json: {field} "):
        load(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "AutoModel"},
        {"tokenizer_class": "RagRetriever"},
        {"tokenizer_class": "LlamaForCausalLMFast"},
        {"tokenizer_class": "pipeline"},
        {"tokenizer_class": 5},
        {"init_inputs": ["/etc/passwd"]},
    ],
)
def test_a_tokenizer_class_is_a_tokenizer(folder, bomb, fields):
    bomb(folder / "pytorch_model.bin")
    change(folder, "tokenizer_config.json", **fields)
    with pytest.raises(ValueError, match=f"the tokenizer of .*{next(iter(fields))}"):
        load(folder)


def test_a_tokenizer_brings_no_code(folder, no_kernels):
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Slow", "code.Fast"]})
    assert load(folder).tokenizer.encode("ab") == [0, 1]


# Invalid values
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 10**9}, r"config\.json"),
        ({"intermediate_size": 10**12}, r"config\.json"),
        ({"vocab_size": 10**9}, r"config\.json"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers .*0 and 1024"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers .*1000.* 21 tensors"),
        ({"num_hidden_layers": -3}, "num_hidden_layers .*between"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "config.json"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_attention_heads": 10**9}, "config.json"),
        ({"head_dim": 10**12}, "config.json"),
        ({"head_dim": -8}, "config.json"),
        ({"hidden_size": -32}, "config.json"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"hidden_size": 10**400}, "config.json"),
        ({"hidden_size": 10**30}, "hidden_size .*1000000.*too large"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .*finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps .*finite"),
        ({"time_step_limit": [0.0, float("nan")]}, "time_step_limit .*finite"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta .*finite"),
        ({"rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}}, "bogus"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 7}, "model_type"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "vit"}, "causal LM"),
        ({"hidden_act": "no_such_function"}, "no_such_function"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"pad_token_id": 10**6}, "config.json"),
    ],
)
@pytest.mark.one_in(3)
def test_junk_in_a_config_is_named(folder, monkeypatch, fields, says):
    change(folder, **fields)
    if says != "max_position_embeddings":
        monkeypatch.setattr(loading, "_fill", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=says):
        load(folder)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "content", ["", "null", "[]", "3", "{", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "\ud800"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_not_json_is_named(folder, name, content):
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load(folder)


# Tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("generation_config.json", 61, "eos_token_id 61 .*61"),
        ("generation_config.json", [61, 10**6], "eos_token_id 61 "),
        ("generation_config.json", -1, "eos_token_id .*token id"),
        ("generation_config.json", "end", "eos_token_id .*token id"),
        ("generation_config.json", True, "eos_token_id .*token id"),
        ("config.json", 99, "eos_token_id 99"),
        ("config.json", "end", "eos_token_id"),
    ],
)
def test_a_stop_token_that_is_no_token_is_named(folder, name, value, says):
    (folder / "generation_config.json").unlink()
    change(folder, name, eos_token_id=value)
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_stop_tokens_are_those_of_the_generation_config(folder):
    change(folder, "generation_config.json", eos_token_id=[5, 7], max_length="junk", temperature=-3)
    assert load(folder).ends == {5, 7}
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=9)
    assert load(folder).ends == {9}


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder):
    known = json.loads((folder / "tokenizer.json").read_text())
    known["model"]["vocab"]["é"] = 61
    (folder / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="'é' .*id 61.* 61 tokens"):
        load(folder)


def added(folder: Path, *tokens: str, **special: str) -> None:
    """Fill the tokenizer's vocabulary to the model's 61 tokens, and add tokens from id 61 on."""
    known = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    vocabulary |= {f"filler{number}": number for number in range(len(vocabulary), 61)}
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known["added_tokens"] += [{"id": 61 + number, "content": token, **more} for number, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(known))
    change(folder, "tokenizer_config.json", **special)


def test_added_tokens_that_the_model_does_not_have_are_ignored_with_a_warning(folder, caplog):
    added(folder, "<pad>", "<end>", pad_token="<pad>", eos_token="<end>")
    change(folder, "generation_config.json", eos_token_id=[5])
    target = load(folder)
    assert target.tokenizer.convert_tokens_to_ids("<pad>") == 61 and target.tokenizer.eos_token_id == 62
    assert target.ends == {5}
    (line,) = [record.message for record in caplog.records]
    assert "'<end>' with the id 62 (and 1 more), but the model has 61 tokens" in line
    request = Request(0, "p", tuple(target.tokenizer.encode("a<pad>")))
    with pytest.raises(ValueError, match="token id 61"):
        request.check_fits(target.context, target.vocabulary)


def test_a_stop_token_that_the_model_does_not_have_is_ignored_if_there_is_another(folder, caplog):
    change(folder, "generation_config.json", eos_token_id=[3, 10**6])
    assert load(folder).ends == {3}
    (line,) = [record.message for record in caplog.records]
    assert "eos_token_id 1000000 is ignored" in line
