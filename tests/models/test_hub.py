"""Models by their hub names, from a stand-in for the hub: which files are asked for, revisions, caches and errors."""

import json
import logging

import huggingface_hub.constants as constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.core.options import WrongOption
from spec_lab.models.hub import CheckpointFiles
from spec_lab.models.target import Target
from tests.checkpoints import checkpoint
from tests.hub_server import use_hub

NEVER = {"modeling.py": b"import os", "pytorch_model.bin": b"pickle", "README.md": b"# One", "model.onnx": b"x"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A tiny checkpoint that loads."""
    return checkpoint(tmp_path_factory.mktemp("sound") / "target")


@pytest.fixture
def hub(hub, sound):
    """A hub with the checkpoint as some/one."""
    hub.add("some/one", sound, **NEVER)
    return hub


def load(path="some/one", **options) -> Target:
    return Target.load(str(path), dtype="float32", **options)


def weights(target: Target) -> torch.Tensor:
    return target.model.get_input_embeddings().weight


def test_a_target_is_downloaded_once_config_first_and_nothing_executable(hub, sound):
    target, local = load(), load(sound)
    assert torch.equal(weights(target), weights(local)) and target.sha256 == local.sha256
    sent = hub.downloads()
    assert sent[0] == "config.json" and sent[-1] == "model.safetensors"
    assert set(sent) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                         "model.safetensors"}  # fmt: skip
    hub.requests.clear()
    assert load().sha256 == local.sha256 and hub.downloads() == [] and len(hub.requests) == 2


def test_shards_are_those_of_the_index(hub, sound, tmp_path):
    tensors = load_file(sound / "model.safetensors")
    names, sharded = sorted(tensors), tmp_path / "sharded"
    checkpoint(sharded)
    (sharded / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for shard in sorted({*places.values()}):
        save_file({name: tensors[name] for name in names if places[name] == shard}, sharded / shard, {"format": "pt"})
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    hub.add("some/shards", sharded, **{"spare.safetensors": b"other"})
    assert torch.equal(weights(load("some/shards")), weights(load(sound)))
    assert hub.downloads()[-3:] == ["model.safetensors.index.json", "part-0.safetensors", "part-1.safetensors"]


def test_a_revision_is_a_branch_or_a_commit_of_a_hub_name(hub, sound, tmp_path):
    commit = hub.add("some/one", checkpoint(tmp_path / "other", seed=3), revision="pr/1")
    for revision in ("pr/1", commit):
        assert not torch.equal(weights(load(revision=revision)), weights(load()))
    assert load(revision=commit).folder.name == commit
    with pytest.raises(WrongOption, match=r"^revision must be a branch, tag or commit of some/one, which has no 'v2'"):
        load(revision="v2")
    with pytest.raises(WrongOption, match=r"^revision .*local folder"):
        load(sound, revision="main")


def test_what_the_hub_does_not_have_or_denies_is_refused_with_a_reason(hub, sound, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    hub.gated.add("some/one")
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(OSError, match=r"some/one is gated .*HF_TOKEN") as gated:
        load()
    assert "Bearer hf_of_another" in hub.tokens
    with pytest.raises(OSError, match="there is no folder no/such, and the hub has no such model"):
        load("no/such")
    hub.files["some/empty", "main"] = {"README.md": b""}
    with pytest.raises(OSError, match=r"some/empty holds no config\.json: .* model or drafter whose files"):
        load("some/empty")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert load().sha256 == load(sound).sha256
    assert not any(token in caplog.text + str(gated.value) for token in ("hf_of_another", hub.token))


def test_without_a_network_the_cache_is_used_with_a_warning_or_the_hub_is_named(hub, sound, monkeypatch, caplog):
    filled = load().sha256
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"no folder some/other here, and config\.json of .* cannot be fetched .*OFFLINE"):
        load("some/other")
    assert load().sha256 == filled and "its files in the cache are used" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    caplog.clear()
    assert load().sha256 == filled and not caplog.text
    with pytest.raises(OSError, match=r"no folder some/other here, and config\.json of .* is not in the hub's cache"):
        load("some/other")


def test_a_partial_download_is_refused_and_resumed(hub, sound, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.cut.add("model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors of some/one cannot be fetched from the hub"):
        load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"neither model\.safetensors nor"):
        load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.cut.clear()
    assert load().sha256 == load(sound).sha256


@pytest.mark.parametrize(
    ("file", "size", "error", "message"),
    [
        ("config.json", 2**27, ValueError, r"config\.json of some/one has 134217728 bytes"),
        ("tokenizer.json", 2**29, ValueError, r"tokenizer\.json of some/one has 536870912 bytes"),
        ("model.safetensors", 2**60, OSError, r"some/one have 1073741824\.0 GiB, but the disk .*HF_HOME"),
    ],
)
def test_sizes_are_checked_before_a_download(hub, file, size, error, message):
    hub.sizes[file] = size
    with pytest.raises(error, match=message):
        load()
    assert file not in hub.downloads()


def test_files_of_a_folder_are_those_that_are_there(sound):
    files = CheckpointFiles.open(str(sound))
    assert files.fetch("config.json") and not files.fetch("vocab.json") and files.commit is None
