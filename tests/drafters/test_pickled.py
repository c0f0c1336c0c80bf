"""Pickled weights of published drafters become safetensors; anything else in a file is refused, and never executed."""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

from spec_lab.cli.commands import command
from spec_lab.drafters import pickled
from spec_lab.drafters.eagle.files import read_eagle
from spec_lab.drafters.kangaroo.files import read_kangaroo
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.pickled import convert_pickled, pickled_files
from tests.drafters.eagle_heads import eagle1, eagle3
from tests.drafters.kangaroo_adapters import adapter
from tests.drafters.medusa_heads import VICUNA, authors
from tests.full_disk import full_disk
from tests.tiny import VOCABULARY, tiny_target

H, HEADS, LAYERS = 32, 3, 4
IDS = [3, 5, 8, 13, 21, 34, 55]


class ResBlock(nn.Module):
    """As Medusa's and Hydra's authors define it."""

    def __init__(self, hidden_size, conditions=0):
        super().__init__()
        self.linear = nn.Linear(hidden_size * (conditions + 1), hidden_size)
        self.act = nn.SiLU()
        self.res_connection = nn.Linear(hidden_size * (conditions + 1), hidden_size) if conditions else nn.Identity()


def medusa(layers=1):
    """The state of Medusa's ModuleList; the layers of a head are one module, repeated."""
    torch.manual_seed(0)
    heads = [nn.Sequential(*([ResBlock(H)] * layers), nn.Linear(H, VOCABULARY, bias=False)) for _ in range(HEADS)]
    return VICUNA | {"medusa_num_layers": layers}, nn.ModuleList(heads).state_dict()


def hydra(prefix, grounded=True):
    """The state of Hydra's heads of the kinds "prefix-mlp" and "mlp"."""
    torch.manual_seed(0)
    drop = [nn.Dropout(0.1)] if prefix else []
    module = nn.Module()
    if prefix:
        sizes = {"hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        module.prefix_embeding_layer = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))
    module.hydra_mlp = nn.ModuleList(
        nn.Sequential(*drop, ResBlock(H, head + 1 if grounded else 0), *([*drop, ResBlock(H)] * (LAYERS - 1)))
        for head in range(HEADS)
    )
    last = [nn.Linear(H, VOCABULARY) for _ in range(HEADS)]
    module.hydra_lm_head = nn.ModuleList([nn.Sequential(*drop, layer) for layer in last] if prefix else last)
    config = {
        "hydra_num_heads": HEADS, "hydra_num_layers": LAYERS, "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": grounded,
    }  # fmt: skip
    return config, module.state_dict()


def halved(head):
    config, tensors = head
    return config, {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


FILES = {
    "EAGLE": ("pytorch_model.bin", halved(eagle1(H, VOCABULARY))),
    "EAGLE without a bias": ("pytorch_model.bin", eagle1(H, VOCABULARY, layers=2, bias=False)),
    "EAGLE-3": ("pytorch_model.bin", eagle3(H, VOCABULARY, IDS)),
    "EAGLE-3 with everything": (
        "pytorch_model.bin",
        eagle3(
            H, VOCABULARY, IDS, taps=5, layers=2, flags=("norm_before_fc", "fc_norm"), embedding=True, norms=True,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 0, 1, 2, 3]},
        ),
    ),
    "Medusa": ("medusa_lm_head.pt", halved(medusa())),
    "Medusa of two layers": ("medusa_lm_head.pt", medusa(2)),
    "Kangaroo": ("pytorch_model.bin", halved(adapter(H, 2))),
    "Kangaroo of two layers": ("pytorch_model.bin", adapter(H, None, layers=2)),
    "Hydra": ("hydra_lm_head.pt", hydra(prefix=True)),
    "Hydra mlp": ("hydra_lm_head.pt", hydra(prefix=False)),
    "Hydra not grounded": ("hydra_lm_head.pt", hydra(prefix=False, grounded=False)),
    "Hydra prefix not grounded": ("hydra_lm_head.pt", hydra(prefix=True, grounded=False)),
}  # fmt: skip


def saved(folder, name, config, value, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(value, folder / name, **options)
    return folder / name


@pytest.mark.each_value
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("whole", [False, True])
def test_the_tensors_and_the_config_of_published_files_are_kept(tmp_path, capsys, name, whole):
    file, (config, tensors) = FILES[name]
    source = saved(tmp_path / "source", file, config, tensors)
    out = tmp_path / "out"
    assert command(["convert", str(source.parent if whole else source), str(out)]) == 0
    said, digest = capsys.readouterr().out, hashlib.sha256(source.read_bytes()).hexdigest()
    assert name.split()[0] in said and digest in said
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text()) == config
    read = load_file(out / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(read[key].dtype == tensor.dtype and torch.equal(read[key], tensor) for key, tensor in tensors.items())
    with safe_open(out / "model.safetensors", "pt") as opened:
        facts = opened.metadata()
    assert facts == {"format": "pt", "layout": name.split()[0], "source": file, "source_sha256": digest}


def test_converted_heads_are_read(tmp_path):
    target = tiny_target(num_hidden_layers=4)
    for name, (file, (config, tensors)) in FILES.items():
        if not name.startswith("Hydra"):
            out = tmp_path / f"{name} out"
            convert_pickled([saved(tmp_path / name, file, config, tensors)], out)
            if name.startswith("Kangaroo"):
                assert read_kangaroo(str(out), target, 2).layers
            else:
                assert (read_medusa if name.startswith("Medusa") else read_eagle)(str(out), target)


def test_shards_are_joined(tmp_path):
    config, tensors = eagle1(H, VOCABULARY)
    first = dict(list(tensors.items())[:4])
    parts = {"pytorch_model-00001-of-00002.bin": first, "pytorch_model-00002-of-00002.bin": tensors.keys() - first}
    for name, part in parts.items():
        file = saved(tmp_path / "source", name, config, {key: tensors[key] for key in part})
    index = file.with_name("pytorch_model.bin.index.json")
    index.write_text(json.dumps({"weight_map": {key: name for name, part in parts.items() for key in part}}))
    converted = convert_pickled(pickled_files(file.parent), tmp_path / "out")
    assert (converted.layout, converted.tensors) == ("EAGLE", len(tensors))
    both = b"".join((file.parent / name).read_bytes() for name in parts)
    assert converted.sha256 == hashlib.sha256(both).hexdigest()
    file.unlink()
    with pytest.raises(OSError, match="00002-of-00002.bin is missing"):
        convert_pickled(pickled_files(index.parent), tmp_path / "again")
    saved(tmp_path / "source", "pytorch_model-00002-of-00002.bin", config, first)
    with pytest.raises(ValueError, match="in another file"):
        convert_pickled(pickled_files(index.parent), tmp_path / "again")
    for name in ("../other.bin", "model.safetensors", ".bin", 3):
        index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        with pytest.raises(ValueError, match="weight_map"):
            pickled_files(index.parent)


def test_a_folder_with_safetensors_is_not_one_of_pickled_weights(tmp_path, capsys):
    file = saved(tmp_path / "source", "pytorch_model.bin", *eagle1(H, VOCABULARY))
    assert pickled_files(file.parent) == [file]
    saved(file.parent, "training_args.bin", {}, {})
    assert pickled_files(file.parent) == [file]
    (file.parent / "medusa_lm_head.pt").touch()
    with pytest.raises(ValueError, match="several pickled files"):
        pickled_files(file.parent)
    (file.parent / "model.safetensors").touch()
    assert pickled_files(file.parent) == []
    refused(capsys, file.parent, tmp_path / "out", f"nothing to convert ... proposer.path={file.parent}")
    assert pickled_files(file) == [file]
    assert pickled_files(tmp_path / "some" / "name") == []


# What is refused -----------------------------------------------------------------------------------------------------


class Touches:
    """An object whose unpickling creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def refused(capsys, source, out, message):
    """Convert; the error is one line with ``message``, and nothing is left behind."""
    before = sorted(source.parent.rglob("*"))
    assert command(["convert", str(source), str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("spec_lab: ") and said.count("\n") == 1 and "Traceback" not in said
    assert all(fact in said for fact in message.split(" ... ")), said
    assert not out.exists() and sorted(source.parent.rglob("*")) == before


def test_a_pickle_that_would_execute_code_is_not_loaded(tmp_path, capsys):
    config, tensors = authors(H, VOCABULARY)
    harm = tmp_path / "harm"
    for value in (Touches(harm), tensors | {"0.0.linear.weight": Touches(harm)}, tensors | {"extra": Touches(harm)}):
        source = saved(tmp_path / "source", "medusa_lm_head.pt", config, value)
        refused(capsys, source, tmp_path / "out", "refers to ... could execute code")
        assert not harm.exists()
    torch.load(source, weights_only=False)
    assert harm.exists(), "the file does what this test fears"


def test_without_the_scan_nothing_is_executed_either(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pickled, "_check_archive", lambda file: None)
    source = saved(tmp_path / "source", "medusa_lm_head.pt", {}, {"0.0.linear.weight": Touches(tmp_path / "harm")})
    refused(capsys, source, tmp_path / "out", "cannot be loaded as tensors alone")
    assert not (tmp_path / "harm").exists()
    for change in (torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")):
        saved(tmp_path / "source", source.name, {}, changed(W, change))
        refused(capsys, source, tmp_path / "out", f"'{W}' is no dense tensor")


@pytest.mark.parametrize("kept", [0, 1, 100, 0.3, 0.9, -1, -30])
def test_a_truncated_file_is_refused(tmp_path, capsys, kept):
    source = saved(tmp_path / "source", "medusa_lm_head.pt", *authors(H, VOCABULARY))
    data = source.read_bytes()
    source.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    refused(capsys, source, tmp_path / "out", "truncated ... download it again")


def changed(name, change):
    tensors = authors(H, VOCABULARY)[1]
    return tensors | {name: change(tensors[name])}


W, LM = "1.0.linear.weight", "0.1.weight"
VALUES = {
    "a list": (lambda: [torch.ones(2)], "holds list"),
    "a tensor": (lambda: torch.ones(2), "holds Tensor"),
    "nothing": (dict, "no drafter of EAGLE, EAGLE-3, Medusa, Hydra or Kangaroo ... none"),
    "nested": (lambda: {"state_dict": authors(H, VOCABULARY)[1]}, "'state_dict' is dict"),
    "other values": (lambda: authors(H, VOCABULARY)[1] | {"epoch": 3}, "'epoch' is int"),
    "other keys": (lambda: {3: torch.ones(2)}, "is Tensor, not a tensor"),
    "sparse": (lambda: changed(W, torch.Tensor.to_sparse), "refers to ... no file of dense tensors"),
    "without numbers": (lambda: changed(W, lambda t: t.to("meta")), "refers to ... no file of dense tensors"),
    "nan": (lambda: changed(W, lambda t: t.clone().fill_(torch.nan)), f"'{W}' holds NaN"),
    "infinite": (lambda: changed(LM, lambda t: t.clone().fill_(-torch.inf)), f"'{LM}' holds NaN or infinite"),
    "numbers of another kind": (lambda: changed(W, torch.Tensor.long), f"'{W}' has the data type torch.int64"),
    "complex": (lambda: changed(W, lambda t: t.to(torch.complex128)), "torch.complex128"),
    "more than it holds": (lambda: changed(W, lambda t: t[:1, :1].clone().expand(H, H)), f"'{W}' has 1024 numbers"),
    "misshapen": (lambda: changed(W, lambda t: t[:3].clone()), f"tensors of Medusa ... {W} is [3, 32]"),
    "missing": (lambda: {k: t for k, t in authors(H, VOCABULARY)[1].items() if k != W}, f"{W} is missing"),
    "surplus": (lambda: authors(H, VOCABULARY)[1] | {"extra": torch.ones(1)}, "'extra' is in no layer"),
    "without an LM head": (lambda: {k: t for k, t in authors(H, VOCABULARY)[1].items() if k != LM}, f"{LM} is missing"),
    "a whole model": (lambda: tiny_target().lm.model.state_dict(), "no drafter of ... save_pretrained"),
    "EAGLE without a layer": (lambda: {"fc.weight": torch.ones(H, 2 * H)}, "tensors of EAGLE ... q_proj.weight"),
    "EAGLE-3 without a layer": (
        lambda: {k: t for k, t in eagle3(H, VOCABULARY, IDS)[1].items() if "mlp" not in k}, "EAGLE-3 ... gate_proj",
    ),
    "EAGLE-3 with offsets in floats": (
        lambda: eagle3(H, VOCABULARY, IDS)[1] | {"d2t": torch.ones(len(IDS))}, "'d2t' has the data type torch.float32",
    ),
    "Kangaroo without a norm": (
        lambda: {k: t for k, t in adapter(H)[1].items() if k != "norm.weight"}, "Kangaroo ... norm.weight is missing",
    ),
    "Hydra without a block": (
        lambda: {k: t for k, t in hydra(False)[1].items() if "1.2.linear.weight" not in k}, "Hydra ... is missing",
    ),
    "Hydra of another kind": (
        lambda: hydra(True)[1] | {"prefix_embeding_layer.cross.weight": torch.ones(H)}, "Hydra ... is in no layer",
    ),
    "one storage for too much": (
        lambda: {f"{k}.{n}.linear.weight": SHARED for k in range(8) for n in range(8)}
        | {f"{k}.{n}.linear.bias": SHARED[0] for k in range(8) for n in range(8)}
        | {f"{k}.8.weight": SHARED for k in range(8)},
        "share their storage",
    ),
}  # fmt: skip
SHARED = torch.ones(128, 128)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", VALUES)
def test_anything_but_a_drafter_s_tensors_is_refused_by_name(tmp_path, capsys, case):
    made, message = VALUES[case]
    source = saved(tmp_path / "source", "medusa_lm_head.pt", VICUNA, made())
    refused(capsys, source, tmp_path / "out", message)


def test_an_archive_that_would_grow_is_refused(tmp_path, capsys):
    source = saved(tmp_path / "source", "medusa_lm_head.pt", *authors(H, VOCABULARY))
    small = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    source.write_bytes(small.getvalue())
    refused(capsys, source, tmp_path / "out", "compressed")
    saved(tmp_path / "source", source.name, *authors(H, VOCABULARY))
    with zipfile.ZipFile(source, "a") as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        archive.writestr("archive/more", b"")
        archive.filelist += [largest] * 9  # all at the same place
    refused(capsys, source, tmp_path / "out", "larger than the file")


def test_what_is_beside_the_weights_is_checked(tmp_path, capsys):
    source = saved(tmp_path / "source", "medusa_lm_head.pt", *authors(H, VOCABULARY))
    config = source.with_name("config.json")
    for text, message in (
        ("{", "config.json"),
        ("[]", "not a mapping"),
        ('{"a": NaN}', "NaN"),
        ("[" * 99999, "nested"),
    ):
        config.write_text(text)
        refused(capsys, source, tmp_path / "out", f"config.json is not readable ... {message}")
    config.unlink()
    refused(capsys, source, tmp_path / "out", "config.json is missing")
    source.unlink()
    refused(capsys, source, tmp_path / "out", "medusa_lm_head.pt is missing")
    os.mkfifo(source)
    config.write_text("{}")
    refused(capsys, source, tmp_path / "out", "no regular file")


def test_nothing_is_overwritten(tmp_path):
    source = saved(tmp_path / "source", "medusa_lm_head.pt", *authors(H, VOCABULARY))
    out = tmp_path / "out"
    out.mkdir()
    convert_pickled([source], out)
    written = (out / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder, what in ((out, "not empty"), (source, "is a file"), (tmp_path / "link", "is a link")):
        with pytest.raises(FileExistsError, match=what):
            convert_pickled([source], folder)
    assert (out / "model.safetensors").read_bytes() == written
    with pytest.raises(FileNotFoundError):
        convert_pickled([source], tmp_path / "no" / "parent")


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, existed, full):
    source = saved(tmp_path / "source", "medusa_lm_head.pt", *authors(H, VOCABULARY))
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def fails(file, config):
        raise KeyboardInterrupt

    if full:
        with full_disk(4096), pytest.raises(OSError, match="space") as caught:
            convert_pickled([source], out)
        assert caught.value.filename == str(out)
    else:
        monkeypatch.setattr(pickled, "write_json", fails)
        with pytest.raises(KeyboardInterrupt):
            convert_pickled([source], out)
    assert not list(out.iterdir()) if existed else not out.exists()
