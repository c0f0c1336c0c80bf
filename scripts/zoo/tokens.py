"""The byte-level BPE tokenizer and the token streams on disk."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import WORKLOADS, Document, sha256

EOS = "<|endoftext|>"
# Words with their leading space or sign, short digit groups, operators that swallow a line end, indentation as runs.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a fast tokenizer of transformers with one special token (``EOS``, id 0), which it never adds by itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, model_max_length=max_length, clean_up_tokenization_spaces=False
    )


def sample_texts(documents: Iterable[Document], most: dict[str, int] | None = None) -> Iterator[str]:
    """Yield texts for training the tokenizer: the standard library, and about ``most`` characters of each workload."""
    left = dict(most or {"code": 6_000_000, "prose": 3_000_000, "json": 1_500_000})
    for document in sorted(documents, key=lambda d: sha256(d.text)):
        if left[document.workload] > 0:
            left[document.workload] -= len(document.text)
            yield document.text[:30_000]
        if document.workload == "code" and document.source.startswith("stdlib"):
            yield document.text


def write_streams(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, folder: Path, repeats: int = 1
) -> dict[str, dict[str, int]]:
    """Write one ``<workload>.bin`` of uint16 ids per workload, with EOS after each document; return the sizes of each.

    Documents from ``stdlib`` are written ``repeats`` times, since the code prompts resemble them most.
    """
    folder.mkdir(parents=True, exist_ok=True)
    core, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    by_workload: dict[str, list[Document]] = {w: [] for w in WORKLOADS}
    for document in documents:
        by_workload[document.workload].append(document)
    sizes = {}
    for workload, chosen in by_workload.items():
        pieces = []
        for document, encoding in zip(chosen, core.encode_batch([d.text for d in chosen]), strict=True):
            ids = np.array([*encoding.ids, eos], dtype=np.uint16)
            pieces += [ids] * (repeats if document.source.startswith("stdlib") else 1)
        stream = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
        stream.tofile(folder / f"{workload}.bin")
        sizes[workload] = {
            "documents": len(chosen),
            "tokens": len(stream),
            "bytes": sum(len(d.text.encode()) for d in chosen),
        }
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=1))
    return sizes
