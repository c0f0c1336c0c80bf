"""Targets that read weights: checkpoints of targets and drafters, conversions, GGUF headers, stores of text."""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo import propose as kangaroo
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.mtp import propose as mtp
from spec_lab.models import gguf_export
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.gguf_tokenizer import read_gguf_tokenizer
from spec_lab.models.target import Target as Model
from spec_lab.propose.suffix import Suffix
from tests import checkpoints
from tests.drafters.block_drafters import dflash, dflash2, domino, dspark
from tests.drafters.eagle_heads import eagle1, written
from tests.drafters.kangaroo_adapters import adapter
from tests.drafters.medusa_heads import authors, vllm
from tests.drafters.mtp_modules import modules
from tests.gguf_files import with_zoo_tokenizer
from tests.nightly.fuzzing.edits import edits
from tests.nightly.fuzzing.harness import Input, Target
from tests.nightly.fuzzing.shared import WORDS, decode, exit_code, inputs, refusing, sound

LOADED: dict[str, Callable[[Model, str], Any]] = {
    "draft": lambda target, path: DraftModel.load(target, path, depth=2),
    "medusa": lambda target, path: Medusa.load(target, path, tree="likeliest", max_nodes=4),
    "authors": lambda target, path: Medusa.load(target, path, tree="2x1"),
    "vllm": lambda target, path: Medusa.load(target, path, tree="2x1"),
    "eagle1": lambda target, path: eagle.load(target, path, tree="2x1"),
    "eagle3": lambda target, path: eagle.load(target, path, tree="2x1"),
    "hydra": lambda target, path: Hydra.load(target, path, tree="2x1"),
    "mtp": lambda target, path: mtp.load(target, path, tree="2x1"),
    "kangaroo": lambda target, path: kangaroo.load(target, path, exit_layer=1, depth=2),
    "dflash": lambda target, path: BlockDrafter.load(target, path, depth=2),
    "dspark": lambda target, path: BlockDrafter.load(target, path, depth=2),
    "dflash2": lambda target, path: BlockDrafter.load(target, path, depth=2),
    "domino": lambda target, path: BlockDrafter.load(target, path, depth=2),
}


def make_checkpoints(folder: Path) -> None:
    checkpoints.zoo(folder)
    width, vocabulary, depth = sound().services.hidden_size, sound().vocabulary, sound().services.num_layers
    for name, made in {
        "authors": authors(width, vocabulary), "vllm": vllm(width, vocabulary), "eagle1": eagle1(width, vocabulary),
        "mtp": modules(width, vocabulary, "deepseek", depth), "kangaroo": adapter(width),
        "dflash": dflash(width, (0, depth - 1), mask=vocabulary - 1),
        "dspark": dspark(width, vocabulary, (0, depth - 1), mask=vocabulary),
        "dflash2": dflash2(width, vocabulary, ids=(0, depth - 1), mask=vocabulary - 1),
        "domino": domino(width, vocabulary, ids=(0, depth - 1), mask=vocabulary - 1),
    }.items():  # fmt: skip
        config, tensors = made
        written(folder / name, config, {key: tensor.clone() for key, tensor in tensors.items()})
    for name, load in LOADED.items():
        decode(sound(), load(sound(), str(folder / name)))


def checkpoint_inputs(folder: Path) -> st.SearchStrategy[Input]:
    def of(name: str) -> st.SearchStrategy[Input]:
        files = f"{name}/config.json", f"{name}/*.json", f"{name}/*"
        return inputs(st.one_of([edits(folder, file, WORDS["config"]) for file in files]), st.just([name]))

    return st.sampled_from(["target"] * 6 + sorted(LOADED)).flatmap(of)


def load(name: str) -> None:
    """Load a checkpoint and decode."""
    if name == "target":
        decode(Model.load(name, dtype="float32"))
    else:
        decode(sound(), LOADED[name](sound(), name))


# Conversions, GGUF, stores -------------------------------------------------------------------------------------------


def make_conversions(folder: Path) -> None:
    config, tensors = authors(8, 11)
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pickled" / "medusa_lm_head.pt")
    with_zoo_tokenizer(folder / "model", "qwen2", num_hidden_layers=1)
    gguf_export.convert(str(folder / "model"), folder / "model.gguf", "q8_0")
    checkpoints.checkpoint(folder / "target")
    (folder / "corpus.jsonl").write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    sound()
    with chdir(folder):
        assert exit_code(["index", "corpus.jsonl", "store", "--tokenizer", "target"]) == 0


def conversion_inputs(folder: Path) -> st.SearchStrategy[Input]:
    def of(files: str, *arguments: Any) -> st.SearchStrategy[Input]:
        return inputs(edits(folder, files, WORDS["config"]), st.just(list(arguments)))

    return st.one_of(
        of("pickled/*", "convert", "pickled", "out"),
        of("pickled/*.pt", "convert", "pickled/medusa_lm_head.pt", "out"),
        of("model/*", "convert", "model", "out.gguf", "--dtype", "f16"),
        of("model.gguf", "gguf"),
        of("corpus.jsonl", "index", "corpus.jsonl", "out", "--tokenizer", "target"),
        of("target/*.json", "index", "corpus.jsonl", "out", "--tokenizer", "target"),
        of("store/*", "store"),
    )


def feed_conversions(arguments: list[Any]) -> int:
    """A command; or read a GGUF file's header and tokenizer; or draft with a store."""
    if arguments == ["gguf"]:
        return refusing(lambda: read_gguf_tokenizer(read_gguf(Path("model.gguf"))).encode("a b"))([])
    if arguments == ["store"]:
        return refusing(lambda: decode(sound(), Suffix.load(sound(), store="store", own=False, shared=0)))([])
    if (code := exit_code(arguments)) and any(Path(name).exists() for name in ("out", "out.gguf")):
        print("FAULT: files are left")
    return code


TARGETS = {
    "checkpoints": Target(make_checkpoints, checkpoint_inputs, refusing(load)),
    "conversions": Target(make_conversions, conversion_inputs, feed_conversions),
}
