"""A tiny checkpoint on disk with a tokenizer of one token per letter, and prompts for it."""

import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.drafters.eagle_heads import eagle3, written
from tests.drafters.hydra_heads import hydra
from tests.tiny import tiny_model

LETTERS = string.ascii_letters + " .,:\n"
TEXTS = [
    "the cat sat on the mat. the cat ",
    "def f of x: return x. def g of x: ",
    "one two three one two ",
    "a b a b a ",
]


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Save a random model and its tokenizer; returns the folder."""
    return saved(folder, tiny_model(dtype=dtype, **changes))


def saved(folder: Path, model) -> Path:
    """Save a model and a tokenizer for it; returns the folder."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=":"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=":").save_pretrained(folder)
    return folder


def zoo(folder: Path | str) -> Path:
    """Everything that the bundled models' configs name: target, draft, heads (Medusa's with accuracies), prompts."""
    folder = Path(folder)
    checkpoint(folder / "target")
    checkpoint(folder / "draft", seed=1, num_hidden_layers=1)
    (folder / "medusa").mkdir()
    sizes = {"hidden_size": 32, "vocab_size": 61, "num_heads": 3, "num_layers": 1}
    (folder / "medusa" / "config.json").write_text(json.dumps(sizes))
    weights = {"weight": torch.randn(3, 1, 32, 32), "bias": torch.zeros(3, 1, 32)}
    save_file(weights, folder / "medusa" / "model.safetensors")
    accuracy = {"accuracy": [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]}
    (folder / "medusa" / "calibration.json").write_text(json.dumps(accuracy))
    written(folder / "eagle3", *eagle3(32, 61))
    written(folder / "hydra", *hydra(32, 61, layers=1, shared=True, identity=True))
    (folder / "prompts").mkdir()
    for workload in ("code", "json", "prose"):
        prompts(folder / "prompts" / f"{workload}.jsonl")
    return folder


def short_runs(folder: Path, texts: list[str] = TEXTS) -> list[str]:
    """Overrides that name a tiny checkpoint and its prompts, made in the folder, and keep runs short."""
    checkpoint(folder / "target")
    file = prompts(folder / "prompts.jsonl", texts)
    return [
        f"target.path={folder / 'target'}", "target.dtype=float32", "prompts=jsonl", f"prompts.path={file}",
        "proposer=ngram", "max_new_tokens=4", "warmup=0", "baseline=false", "output_dir=swept",
    ]  # fmt: skip


def prompts(file: Path, texts: list[str] = TEXTS) -> Path:
    """Write texts as a JSONL file of prompts; returns the file."""
    lines = [json.dumps({"id": f"p{number}", "prompt": text, "workload": "toy"}) for number, text in enumerate(texts)]
    file.write_text("\n".join(lines) + "\n")
    return file
