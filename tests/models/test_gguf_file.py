"""GGUF files are read within bounds: what breaks the format is refused with the file's name, never by a traceback."""

import os
import random
import re
import struct

import pytest
import torch

from spec_lab.models import gguf_file
from spec_lab.models.gguf_export import convert
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.services import GGUFServices
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from tests.gguf_files import FATAL, field, header, tensor, text, tiny, typed, with_zoo_tokenizer

U32, STRING, ARRAY = 4, 8, 9
ARCHITECTURE = field("general.architecture", STRING, text("llama"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    convert(str(with_zoo_tokenizer(folder / "checkpoint", "qwen2", num_hidden_layers=1)), folder / "model.gguf", "q8_0")
    return folder / "model.gguf"


HOSTILE = {
    "empty": (b"", "does not begin with GGUF"),
    "wrong magic": (header(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "ends after the magic": (b"GGUF", "ends within its header"),
    "huge number of tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors"),
    "huge number of fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "metadata fields"),
    "huge name": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "bytes of a string"),
    "long string": (header([text("a") + struct.pack("<IQ", STRING, 2**20)]), "ends within"),
    "huge array": (header([field("a", ARRAY, struct.pack("<IQ", U32, 2**60))]), "elements of an array"),
    "long array": (header([field("a", ARRAY, struct.pack("<IQ", U32, 2**24))]), "ends within"),
    "long array of strings": (header([field("a", ARRAY, struct.pack("<IQ", STRING, 2**24))]), "ends within"),
    "nested array": (header([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "unknown type 9"),
    "unknown type": (header([field("a", 77, b"")]), "unknown type 77"),
    "a field twice": (header([ARCHITECTURE, ARCHITECTURE]), "occurs twice"),
    "a tensor twice": (header([ARCHITECTURE], [tensor("a", (1,))] * 2), "occurs twice"),
    "five dimensions": (header([], [tensor("a", (1,) * 5)]), "dimensions"),
    "unknown data type": (header([], [tensor("a", (4,), kind=999)]), "data type 999"),
    "rows of half a block": (header([], [tensor("a", (2, 33), kind=8)]), "whole blocks of 32"),
    "an empty tensor": (header([], [tensor("a", (2, 0))]), "shape"),
    "an offset beyond the end": (header([], [tensor("a", (4,), offset=2**62)]), "lies outside"),
    "an odd offset": (header([], [tensor("a", (1,), offset=4)]) + bytes(64), "lies outside"),
    "a tensor beyond the end": (header([], [tensor("a", (2**40, 2**20))]), "lies outside"),
    "alignment 0": (header([field("general.alignment", U32, struct.pack("<I", 0))]), "general.alignment"),
    "no architecture": (header(), "general.architecture"),
    "no tensors": (header([ARCHITECTURE]), "token_embd.weight"),
    "a part": (header([ARCHITECTURE, field("split.count", 2, struct.pack("<H", 3))]), "one of 3 parts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path, name):
    data, why = HOSTILE[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=why) as refused:
        read_gguf(file)
    assert str(file) in str(refused.value)


def test_a_truncated_file_is_refused_at_any_length(written, tmp_path):
    data, random_ = written.read_bytes(), random.Random(0)
    for length in [random_.randrange(len(data)) for _ in range(60)] + [len(data) - 1]:
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut.gguf"):
            read_gguf(tmp_path / "cut.gguf")


def refusal(file) -> str | None:
    """Why a file is not read; None if it is."""
    try:
        read_gguf(file)
    except ValueError as error:
        return str(error)
    return None


def test_flipped_bytes_give_a_file_or_an_error_that_names_it(written, tmp_path):
    data, random_, refused = written.read_bytes(), random.Random(0), 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(4):
            changed[random_.randrange(2000)] = random_.randrange(256)
        (tmp_path / "flipped.gguf").write_bytes(changed)
        error = refusal(tmp_path / "flipped.gguf")
        refused += error is not None
        assert error is None or "flipped.gguf" in error
    assert refused > 10


@pytest.mark.parametrize(("old", "new", "named"), [
    (b"llama.embedding_length", b"llama.embedding_lengtH", "embedding_length"),
    (b"llama.block_count", b"llama.block_counT", "block_count"),
    (b"llama.context_length", b"llama.context_lengtH", "context_length"),
    (text("!") + text('"'), text("!") + text("!"), "token twice"),
])  # fmt: skip
def test_metadata_that_every_model_has_is_checked(written, tmp_path, old, new, named):
    data = written.read_bytes()
    assert data.count(old) >= 1
    (tmp_path / "model.gguf").write_bytes(data.replace(old, new, 1))
    with pytest.raises(ValueError, match=named):
        read_gguf(tmp_path / "model.gguf")


def inserted(data: bytes, name: str, number: int) -> bytes:
    """The file with a further number in its metadata; what follows moves by whole blocks of 32 bytes."""
    more = field(name, U32, struct.pack("<I", number))
    more += field("x" * (-(len(more) + 16) % 32 or 32), U32, struct.pack("<I", 0))
    return data[:16] + struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 2) + more + data[24:]


@pytest.mark.parametrize(("fields", "named"), [
    ({"expert_count": 1025, "expert_used_count": 2}, "expert_count must be .* 0 to 1024, not 1025"),
    ({"expert_used_count": 2}, "expert_used_count"), ({"expert_count": 4, "expert_used_count": 5}, "expert_used_count"),
    ({"expert_count": 4}, "expert_used_count"), ({"expert_count": 4, "expert_used_count": 4}, None),
    ({"expert_count": 0, "expert_used_count": 0}, None),
])  # fmt: skip
def test_numbers_of_experts_that_abort_llama_cpp_are_refused(written, tmp_path, fields, named):
    data = written.read_bytes()
    for name, number in fields.items():
        data = inserted(data, f"llama.{name}", number)
    (tmp_path / "model.gguf").write_bytes(data)
    error = refusal(tmp_path / "model.gguf")
    assert error is None if named is None else re.search(named, error)


def test_more_layers_than_llama_cpp_has_room_for_are_refused(written, tmp_path):
    name, data = text("llama.block_count"), written.read_bytes()
    for layers, refused in ((512, False), (513, True)):
        changed = data.replace(name + struct.pack("<II", U32, 1), name + struct.pack("<II", U32, layers))
        assert changed != data
        (tmp_path / "model.gguf").write_bytes(changed)
        assert ("block_count" in (refusal(tmp_path / "model.gguf") or "")) == refused


@pytest.mark.parametrize(("name", "kind"), FATAL)
def test_data_types_that_llama_cpp_does_not_compute_are_refused_by_tensor_type_and_file(tmp_path, name, kind):
    file = typed(tmp_path / "model.gguf", name, kind)
    with pytest.raises(Unsupported, match=rf"model\.gguf .*'{name}' is {kind}, .*F32.* convert"):
        read_gguf(file)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q6_K", "IQ4_XS", "MXFP4"])
def test_data_types_that_llama_cpp_computes_are_read(tmp_path, kind):
    file = read_gguf(typed(tmp_path / "model.gguf", "blk.0.ffn_up.weight", kind))
    assert file.tensors["blk.0.ffn_up.weight"].parameters == 256 * 256


def test_a_file_that_shrinks_while_it_is_used_is_an_error_that_names_it(written, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(written.read_bytes())
    file = read_gguf(copy)
    os.truncate(copy, 4096)
    with pytest.raises(OSError, match=str(copy)):
        file.tensor("blk.0.ffn_up.weight")


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2"])
def test_embedding_final_norm_and_head_compute_what_the_checkpoint_s_do(tmp_path, name):
    folder = tiny(tmp_path / "checkpoint", name)
    convert(str(folder), tmp_path / "model.gguf")
    target = Target.load(str(folder), dtype="float32")
    ours, target_services = GGUFServices(read_gguf(tmp_path / "model.gguf")), target.services
    assert (ours.hidden_size, ours.num_layers) == (target_services.hidden_size, target_services.num_layers)
    tokens, hidden = torch.tensor([[3, 1, 4], [1, 5, 60]]), torch.randn(2, 3, 32)
    assert torch.equal(ours.embed(tokens), target_services.embed(tokens))
    assert torch.allclose(ours.lm_head(hidden), target_services.lm_head(hidden), rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.final_norm(hidden), target_services.final_norm(hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "q8_0", "q4_0"])
def test_embedding_and_head_of_other_files_are_held_in_bfloat16(tmp_path, dtype):
    convert(str(tiny(tmp_path / "checkpoint", "tied")), tmp_path / "model.gguf", dtype)
    file = read_gguf(tmp_path / "model.gguf")
    services, weight = GGUFServices(file), file.tensor("token_embd.weight")
    hidden, tokens = torch.randn(5, 32), torch.tensor([3, 60])
    logits, exact = services.lm_head(hidden), hidden @ weight.T
    held = services._head[0]
    assert held is services._embedding and held.nbytes == 61 * 32 * 2, "shared where the file shares it"
    assert logits.dtype == services.embed(tokens).dtype == torch.float32
    assert (logits - exact).abs().max() < 0.02 * exact.abs().max()
    assert torch.equal(services.embed(tokens), weight[tokens].bfloat16().float())


def test_a_tensor_that_is_read_in_parts_is_that_of_the_file(tmp_path, monkeypatch):
    convert(str(tiny(tmp_path / "checkpoint")), tmp_path / "model.gguf", "q8_0")
    file = read_gguf(tmp_path / "model.gguf")
    whole = {name: file.tensor(name) for name in file.tensors}
    monkeypatch.setattr(gguf_file, "PART", 100)
    assert all(torch.equal(file.tensor(name), whole[name]) for name in file.tensors)
    assert whole["token_embd.weight"].shape == (61, 32) and whole["output_norm.weight"].shape == (32,)
