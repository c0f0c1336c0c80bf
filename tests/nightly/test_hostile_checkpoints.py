"""Random damage to a tiny checkpoint: it loads and decodes, or an error names the place, within time and memory.

Each input is tried in a process of its own (a fork) with a limit on its memory and its time. ``SPEC_LAB_FUZZ`` is the
number of inputs; the seed of a failing one is in the test's name and its folder is kept by pytest.
"""

import json
import os
import resource
import shutil
import signal
import struct
import traceback
import zipfile
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.request import Request
from spec_lab.models.pickled import convert_pickled
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.draft_model import DraftModel
from spec_lab.propose.medusa import Medusa
from spec_lab.text.prompts import Prompt, encode
from spec_lab.verify import Token
from tests.checkpoints import zoo
from tests.propose.eagle_heads import written
from tests.propose.medusa_heads import authors, vllm

pytestmark = pytest.mark.nightly

INPUTS = int(os.environ.get("SPEC_LAB_FUZZ", "400"))
PER_TEST = 20
SECONDS = 60
MEMORY = 2 * 2**30  # beyond the process's size before

JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 7, 61, 62, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, 1e308,
    -0.0, float("nan"), float("inf"), "", "x", "32", "None", "\0", "é\u2028", "a" * 10_000, "../x", "/dev/zero",
    "someone/kernel", "flash_attention_2", "os.system", [], [1], [[]], ["a"] * 5000, {}, {"a": 1}, {"": None},
    {"model_type": "gpt2"}, {"rope_type": "yarn", "factor": 1e30}, {"__type": "AddedToken", "content": "x"},
]  # fmt: skip
FIELDS = [
    "attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config", "auto_map", "dtype",
    "torch_dtype", "tokenizer_class", "transformers_weights", "text_config", "per_layer_config", "layer_types",
    "rope_scaling", "rope_parameters", "sliding_window", "num_labels", "id2label", "tie_word_embeddings", "head_dim",
    "num_key_value_heads", "eos_token_id", "bos_token_id", "pad_token_id", "extra_special_tokens",
    "added_tokens_decoder", "chat_template",
    "init_inputs", "model_max_length", "attribute_map", "to_dict", "fusion_config", "pruned_heads",
    "chunk_size_feed_forward", "is_encoder_decoder", "backend", "vocab_file", "tokenizer_file", "use_cache",
    "is_decoder",
]  # fmt: skip
KINDS = [
    "llama",
    "gpt2",
    "opt",
    "phi",
    "gemma",
    "bloom",
    "mamba",
    "t5",
    "bert",
    "qwen3_moe",
    "deepseek_v3",
    "llava",
    "",
]


def places(value, path=()):
    """Every path to a part of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(items)[:200]:
        yield from places(one, (*path, key))


def changed(random: Random, value):
    """A JSON value with a part replaced, removed or added."""
    path = random.choice(list(places(value)))
    if not path:
        if isinstance(value, dict) and random.random() < 0.9:
            key = random.choice([*FIELDS, "model_type"])
            return value | {key: random.choice(KINDS if key == "model_type" else deepcopy(JUNK))}
        return deepcopy(random.choice(JUNK))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    how = random.random()
    if how < 0.2:
        del holder[path[-1]]
    elif how < 0.3:
        nested = deepcopy(random.choice(JUNK))
        for _ in range(random.choice([3, 40, 400])):
            nested = {"a": nested} if random.random() < 0.5 else [nested]
        holder[path[-1]] = nested
    else:
        holder[path[-1]] = deepcopy(random.choice(JUNK))
    return value


def scrambled(random: Random, content: bytes) -> bytes:
    """Bytes with a few of them changed, cut, doubled or inserted."""
    array = bytearray(content)
    for _ in range(random.choice([1, 1, 3, 20])):
        at, length = random.randrange(len(array) + 1), random.choice([1, 4, 100])
        how = random.randrange(4)
        if how == 0:
            array[at : at + 1] = bytes([random.randrange(256)])
        elif how == 1:
            del array[at : at + length]
        elif how == 2:
            array[at:at] = array[at : at + length]
        else:
            array[at:at] = random.choice([b"\xff", b"\0", b"{", b"[", b'"', b"-", b"1e999", b"\\ud800"])
    return bytes(array)


def damaged_tensors(random: Random, content: bytes) -> bytes:
    """A safetensors file with a changed header, a wrong length of it, or scrambled bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + length], content[8 + length :]
    how = random.random()
    if how < 0.6:
        value = json.loads(header)
        for _ in range(random.choice([1, 1, 3])):
            value = changed(random, value)
            if not isinstance(value, dict):
                break
        header = json.dumps(value).encode()
        return struct.pack("<Q", len(header)) + header + rest
    if how < 0.8:
        return struct.pack("<Q", random.choice([0, 1, length - 1, length + 1, 2**20, 2**32, 2**63, 2**64 - 1])) + header
    return scrambled(random, content[:4000]) + content[4000:]


def damage_archive(random: Random, file: Path) -> None:
    """Scramble the bytes of a file of torch.save, or one of its entries."""
    if random.random() < 0.4:
        file.write_bytes(scrambled(random, file.read_bytes()))
        return
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickle = next(name for name in entries if name.endswith("data.pkl"))
    spoilt = random.choice([*entries, *[pickle] * len(entries)])
    entries[spoilt] = scrambled(random, entries[spoilt])
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def damage(random: Random, folder: Path) -> str:
    """Damage one or two files of a checkpoint; returns their names."""
    names = sorted(file.name for file in folder.iterdir())
    spoilt = []
    for _ in range(random.choice([1, 1, 1, 2])):
        name = random.choice([*names, "config.json", "config.json", "config.json", "model.safetensors.index.json"])
        file = folder / name
        spoilt.append(name)
        if name == "model.safetensors.index.json":
            if (folder / "model.safetensors").exists():
                (folder / "model.safetensors").rename(folder / "part.safetensors")
            index = {"metadata": {}, "weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
            for _ in range(random.choice([0, 1, 2])):
                index = changed(random, index) if isinstance(index, dict) else index
            file.write_text(json.dumps(index))
        elif not file.exists():
            continue
        elif name.endswith(".safetensors"):
            file.write_bytes(damaged_tensors(random, file.read_bytes()))
        elif name.endswith(".pt"):
            damage_archive(random, file)
        elif random.random() < 0.15:
            file.write_bytes(scrambled(random, file.read_bytes()))
        else:
            try:
                value = json.loads(file.read_text())
            except ValueError:
                continue
            for _ in range(random.choice([1, 1, 2, 5])):
                value = changed(random, value) if isinstance(value, dict) else value
            file.write_text(json.dumps(value))
    return " and ".join(spoilt)


def guarded(action) -> str:
    """Run an action in a fork with limits: "" if it succeeds or is refused properly; otherwise the fault."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        report = "the child did not get so far"
        try:
            os.close(reading)
            signal.alarm(SECONDS)
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
            report = action()
        except BaseException:
            report = traceback.format_exc()
        finally:
            os.write(writing, report.encode("utf-8", "replace")[-4000:])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        report = stream.read().decode()
    status = os.waitpid(child, 0)[1]
    return report if status == 0 else f"ended by signal {status & 127} (time or memory)\n{report}"


def tried(load, folder: Path, fields: str) -> str:
    """Load and decode; "" for success or for an error that names the folder or a part of it."""
    try:
        load(folder)
    except (ValueError, OSError) as error:
        text = str(error)
        named = any(part in text for part in (str(folder), "model type", folder.name, "safetensors", *fields.split()))
        return "" if named and "\n" not in text.strip() else f"{type(error).__name__} does not say where: {text!r}"
    return ""


def decode(target: Target, proposer) -> None:
    """Decode a little."""
    (tokens,) = encode([Prompt("p", "the cat sat")], target.tokenizer, target.context)
    group = fixed_group(target, proposer, Token(), [Request(0, "p", tokens, max_new_tokens=3)], CounterDraws(0))
    assert list(group) and all(0 <= token < target.vocabulary for token in group.sequences[0].emitted)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Undamaged checkpoints of every kind, and their target."""
    folder = zoo(tmp_path_factory.mktemp("zoo"))
    target = Target.load(str(folder / "target"), dtype="float32")
    decode(target, Null())  # so that forks need not import anything
    DraftModel.load(target, str(folder / "draft"), depth=2)
    Medusa.load(target, str(folder / "medusa"), tree="likeliest")
    return folder, target


@pytest.mark.parametrize("first", range(0, INPUTS, PER_TEST))
def test_a_damaged_target_is_refused_or_decodes(sound, tmp_path, first):
    def load(folder: Path) -> None:
        target = Target.load(str(folder), dtype="float32")
        decode(target, Null())

    _all(sound[0] / "target", tmp_path, first, load)


@pytest.mark.parametrize("first", range(0, INPUTS // 4, PER_TEST))
def test_a_damaged_draft_is_refused_or_drafts(sound, tmp_path, first):
    def load(folder: Path) -> None:
        draft = DraftModel.load(sound[1], str(folder), depth=2)
        decode(sound[1], draft)

    _all(sound[0] / "draft", tmp_path, first, load)


@pytest.mark.parametrize("first", range(0, INPUTS // 4, PER_TEST))
def test_damaged_heads_are_refused_or_draft(sound, tmp_path, first):
    def load(folder: Path) -> None:
        heads = Medusa.load(sound[1], str(folder), tree="likeliest", max_nodes=4)
        decode(sound[1], heads)

    _all(sound[0] / "medusa", tmp_path, first, load)


@pytest.mark.parametrize("first", range(0, INPUTS // 4, PER_TEST))
@pytest.mark.parametrize("made", [authors, vllm])
def test_damaged_published_heads_are_refused_or_draft(sound, tmp_path, made, first):
    def load(folder: Path) -> None:
        decode(sound[1], Medusa.load(sound[1], str(folder), tree="2x1"))

    config, tensors = made(sound[1].services.hidden_size, sound[1].vocabulary)
    written(tmp_path / made.__name__, config, {name: one.clone() for name, one in tensors.items()})
    _all(tmp_path / made.__name__, tmp_path, first, load)


@pytest.mark.parametrize("first", range(0, INPUTS, PER_TEST))
def test_damaged_pickled_weights_are_refused_or_converted(sound, tmp_path, first):
    """Nothing is left behind when they are refused."""

    def load(folder: Path) -> None:
        try:
            convert_pickled([folder / "medusa_lm_head.pt"], folder / "out")
        except (OSError, ValueError):
            assert not (folder / "out").exists()
            raise
        assert load_file(folder / "out" / "model.safetensors")

    source = tmp_path / "pickled"
    config, tensors = authors(8, 11)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    torch.save(tensors, source / "medusa_lm_head.pt")
    _all(source, tmp_path, first, load)


def _all(source: Path, tmp_path: Path, first: int, load) -> None:
    failures = []
    for seed in range(first, first + PER_TEST):
        folder = Path(shutil.copytree(source, tmp_path / f"seed{seed}"))
        spoilt = damage(Random(f"{source.name} {seed}"), folder)
        if report := guarded(lambda folder=folder, spoilt=spoilt: tried(load, folder, spoilt)):
            failures.append(f"seed {seed}, {spoilt}: {report}")
        else:
            shutil.rmtree(folder)
    assert not failures, "\n\n".join(failures)
