"""Every kind of drafter by its hub name is that of the folder with the same files."""

from io import BytesIO
from typing import Any, NamedTuple

import pytest
import torch

from spec_lab.cli.commands import command
from spec_lab.core.options import WrongOption
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo import propose as kangaroo
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.mtp import propose as mtp
from spec_lab.models.target import Target
from tests.checkpoints import zoo
from tests.drafters.block_drafters import dflash
from tests.drafters.eagle_heads import eagle3, written
from tests.drafters.kangaroo_adapters import adapter
from tests.drafters.medusa_heads import authors


class Kind(NamedTuple):
    load: Any
    folder: str
    options: dict[str, Any]


KINDS = {
    "eagle": Kind(eagle.load, "eagle3", {"depth": 2}),
    "hydra": Kind(Hydra.load, "hydra", {"depth": 2}),
    "medusa": Kind(Medusa.load, "medusa", {"tree": "likeliest", "max_nodes": 3}),  # reads calibration.json too
    "kangaroo": Kind(kangaroo.load, "kangaroo", {"depth": 2}),
    "block": Kind(BlockDrafter.load, "block", {"depth": 2}),
    "draft": Kind(DraftModel.load, "draft", {"depth": 2}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A target, and a folder of each kind of drafter for it."""
    folder = zoo(tmp_path_factory.mktemp("zoo"))
    written(folder / "kangaroo", *adapter(32, 1))
    written(folder / "block", *dflash(32, ids=(0, 1)))
    return folder


@pytest.fixture(scope="module")
def target(tiny):
    return Target.load(str(tiny / "target"), dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_read_by_its_hub_name(hub, tiny, target, kind):
    load, folder, options = KINDS[kind]
    hub.add("some/head", tiny / folder, **{"modeling.py": b"import os", "pytorch_model.bin": b"pickle"})
    local, named = load(target, str(tiny / folder), **options), load(target, "some/head", **options)
    assert named.sha256 == local.sha256 and named.facts == local.facts and named.nodes == local.nodes
    sent = hub.downloads()
    assert sent[0] == "config.json" and all(name.endswith((".json", ".safetensors")) for name in sent)


def test_a_revision_of_a_drafter_is_a_branch_or_commit(hub, tiny, target, tmp_path):
    hub.add("some/head", tiny / "eagle3")
    commit = hub.add("some/head", written(tmp_path / "other", *eagle3(32, 61, seed=5)), revision="v2")
    shas = [eagle.load(target, "some/head", revision=revision, depth=1).sha256 for revision in (None, "v2", commit)]
    assert shas[0] != shas[1] == shas[2]
    with pytest.raises(WrongOption, match=r"^revision must be .*has no 'v3'"):
        eagle.load(target, "some/head", revision="v3", depth=1)


def test_pickles_of_the_hub_name_the_command_that_converts_them(hub, tiny, target):
    files = dict.fromkeys(("medusa_lm_head.pt", "training_args.bin"), b"pickle")
    hub.files["some/pickles", "main"] = {"config.json": b"{}"} | files
    with pytest.raises(ValueError, match=r"some/pickles holds its weights in .*spec-lab convert some/pickles OUT"):
        Medusa.load(target, "some/pickles")
    with pytest.raises(ValueError, match=r"OUT writes them as safetensors if it knows the layout"):
        BlockDrafter.load(target, "some/pickles", depth=2)
    assert hub.downloads() == ["config.json"]


def test_pickles_of_the_hub_are_converted_by_their_name(hub, tiny, target, tmp_path):
    config, tensors = authors(32, 61)
    written(tmp_path / "head", config, tensors)
    pickle = BytesIO()
    torch.save(tensors, pickle)
    files = {"medusa_lm_head.pt": pickle.getvalue(), "training_args.bin": b"other", "modeling.py": b"import os"}
    hub.files["some/heads", "v1"] = {"config.json": (tmp_path / "head" / "config.json").read_bytes()} | files
    assert command(["convert", "some/heads", str(tmp_path / "out"), "--revision", "v1"]) == 0
    assert hub.downloads() == ["config.json", "medusa_lm_head.pt"]
    converted, local = (Medusa.load(target, str(tmp_path / name), tree="2") for name in ("out", "head"))
    assert torch.equal(converted.heads.weight, local.heads.weight)


def test_a_drafter_of_the_hub_in_safetensors_is_not_converted(hub, tiny, tmp_path, capsys):
    hub.add("some/head", tiny / "eagle3")
    assert command(["convert", "some/head", str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err
    assert "nothing to convert, set proposer.path=some/head; " in errors and errors.count("\n") == 1
    assert hub.downloads() == ["config.json"] and not (tmp_path / "out").exists()


def test_modules_in_the_targets_own_checkpoint_are_those_of_the_target(target):
    with pytest.raises(ValueError, match="holds no MTP module"):
        mtp.load(target, depth=1)
