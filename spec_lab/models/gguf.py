"""Load a GGUF file as a target that llama.cpp computes.

The file is checked before llama.cpp reads it. The self-check at load decodes forests of draft trees, or of chains for a
model with recurrent layers, and compares them with plain decoding by the same library.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from spec_lab.core.draft import empty
from spec_lab.core.files import file_hash
from spec_lab.core.options import Count, OneOf, Whole, WrongOption
from spec_lab.core.options import checked as check_arguments
from spec_lab.core.process_cache import ProcessCache
from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork
from spec_lab.models.forests import RATIO, Checked, decode_forests, largest_error, rounding_error
from spec_lab.models.gguf_file import GGUFFile, read_gguf
from spec_lab.models.gguf_tokenizer import PROBES, read_gguf_tokenizer, reads_as_llama_cpp
from spec_lab.models.plain_forwards import EXACT
from spec_lab.models.services import GGUFServices
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.runners.llama_context import KV_DTYPES, LlamaSettings
from spec_lab.runners.llama_cpp import LlamaCpp
from spec_lab.runners.llama_library import Library, Model, load_library
from spec_lab.runners.llama_recurrent import MAX_SNAPSHOTS, LlamaRecurrent

LOG = logging.getLogger(__name__)

FLOOR, CEILING = 0.01, 0.1
"""Root mean square of the error of the logits that the self-check always allows where numbers are rounded, and that it
allows at most while the model's own rounding is smaller, in standard deviations. Wrong masks and positions measured
0.095 to 2.4."""

SNAPSHOTS = 10
"""Number of recurrent states where the option is null: as many as ``proposer=ngram`` drafts tokens."""


@check_arguments
def load(
    path: str,
    tokenizer: str | None = None,
    context: Count | None = None,
    threads: Annotated[int, Whole(1, 1024)] | None = None,
    gpu_layers: Annotated[int, Whole(-1, 9999)] = 0,
    dtype: Literal["float32"] | None = None,
    kv_dtype: Annotated[str, OneOf(KV_DTYPES)] | None = None,
    chunk: Annotated[int, Whole(1, 2**15)] = 512,
    cells: Count | None = None,
    snapshots: Annotated[int, Whole(1, MAX_SNAPSHOTS)] | None = None,
    cache: ProcessCache | None = None,
    library: Library | None = None,
) -> Target:
    """Load a target from a GGUF file.

    Args:
        path: a GGUF file; spec-lab convert writes one.
        tokenizer: a folder with the tokenizer; None: from the file.
        context: maximum tokens of a sequence; None: the model's own limit.
        threads: CPU threads of llama.cpp; None: as many as torch.
        gpu_layers: layers on a GPU, where llama.cpp was built for one; -1: all. The target has no roofline then: which
            limits apply to which part of a forward is not known.
        dtype: float32: all in float32, if the weights are; None, or other weights: as llama.cpp does. It
            chooses the data types of its products by those of the weights, which a warning states.
        kv_dtype: of keys and values: f16, f32 (exact, without flash attention), bf16, q8_0; None: f16, or f32. None is
            f32 only for weights in float32 with ``dtype`` "float32". The float16 parts of flash attention cost 1e-3
            standard deviations of the logits.
        chunk: maximum rows computed at once.
        cells: maximum tokens of the KV cache, draft trees included; None: no limit. They are allocated as they are
            needed; ``max_kv_tokens`` lets requests wait for free cells.
        snapshots: of recurrent states, for models that have them: maximum draft tokens of a step; None: 10. It is less
            than ``chunk``; each takes the memory of one more state of each sequence.
        cache: facts that this process found before; None starts with none.
        library: llama.cpp; None imports it.

    Raises:
        OSError: there is no such file.
        ValueError: a wrong option; a file that is not readable or holds no language model; a tokenizer that is not the
            model's.
        Unsupported: llama-cpp-python is missing; the model has a recurrent state that llama.cpp cannot roll back, or
            fails the self-check.
    """
    file = read_gguf(Path(path))
    limit = file.context
    if context is not None and context > limit:
        raise WrongOption(f"context must be at most {limit}, the model's own limit, or null for it, not {context}")
    exact = all(tensor.type_name == "F32" for tensor in file.tensors.values())
    kv_dtype = kv_dtype or ("f16" if dtype is None or not exact else "f32")
    if dtype is not None and not exact:
        LOG.warning(
            "target.dtype=float32: the weights of %s are not all float32, so llama.cpp computes them as they are "
            "(keys and values in %s)",
            path, kv_dtype,
        )  # fmt: skip
    if "rope_factors_long.weight" in file.tensors:
        raise Unsupported(f"{path} is not supported: its longrope RoPE changes with the size of the KV cache")
    try:
        library = load_library() if library is None else library
    except ImportError as error:
        raise Unsupported(str(error)) from error
    model = Model(library, path, gpu_layers)
    if model.vocabulary != file.vocabulary:
        raise Unsupported(f"{path} has {model.vocabulary} tokens, but logits for {file.vocabulary}")
    if not model.recurrent and snapshots is not None:
        raise WrongOption(
            f"snapshots={snapshots} requires a model with recurrent layers, and {path} has none: set it to null"
        )
    kept = (snapshots or SNAPSHOTS) if model.recurrent else 0
    if kept >= chunk:
        raise WrongOption(
            f"chunk must be more than the {kept} recurrent states that can be taken back (snapshots), not {chunk}"
        )
    read = read_gguf_tokenizer(file, tokenizer)
    if reads_as_llama_cpp(file):
        check_tokenizer(model, read)
    settings = LlamaSettings(threads or torch.get_num_threads(), kv_dtype, chunk, cells, kept)
    sha256, cache = file_hash(Path(path)), ProcessCache() if cache is None else cache
    measured = checked(model, settings, sha256, cache, kv_dtype == "f32" and exact)
    lm: LlamaCpp | LlamaRecurrent
    if model.recurrent:
        lm = LlamaRecurrent(model, settings)
    else:
        lm = LlamaCpp(model, settings, work_of(file, kv_dtype) if gpu_layers == 0 else None)
    return Target(
        lm, read, path, context or limit, sha256, measured.error, cache, stops=model.ends | file.ends,
        parts=GGUFServices(file), source_sha256=file.source_sha256, gguf_file=path,
        tolerance=measured.allowed, checked_in_float32=measured.in_float32,
    )  # fmt: skip


def work_of(file: GGUFFile, kv_dtype: str) -> ForwardWork | None:
    """Return what a forward of a model of a GGUF file reads and computes, its weights as they are stored.

    Matrices of three dimensions are those of experts, of which a row uses some.

    Returns:
        None of a model with windows, since most files do not state which layers have one, or with other numbers for
        each layer.
    """
    fields = {
        name: file.metadata.get(f"{file.architecture}.{name}")
        for name in (
            "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
            "attention.sliding_window", "expert_count", "expert_used_count",
        )
    }  # fmt: skip
    if fields["attention.sliding_window"] or not all(isinstance(value, int | None) for value in fields.values()):
        return None
    heads = fields["attention.head_count"]
    if not heads:
        return None
    weights, flops, head = 0.0, 0.0, "token_embd.weight" if file.tied else "output.weight"
    experts, per_row = (int(fields[name] or 0) for name in ("expert_count", "expert_used_count"))
    stacked, blocks = 0, set[str]()
    for name, tensor in file.tensors.items():
        if name == "token_embd.weight" and not file.tied:
            continue
        share = 1.0
        if len(tensor.shape) > 2:
            if not experts or not per_row:
                return None
            share = per_row / experts
            stacked += tensor.nbytes
            blocks.add(name.rpartition(".ffn_")[0])
        weights += share * tensor.nbytes
        if name != head and len(tensor.shape) > 1:
            flops += share * 2 * tensor.parameters
    width = file.hidden_size // heads
    both = (fields["attention.key_length"] or width) + (fields["attention.value_length"] or width)
    kv_heads = fields["attention.head_count_kv"] or heads
    cached = file.num_layers * kv_heads * both * KV_BYTES[kv_dtype]
    attention = AttentionWork(round(cached), file.num_layers * 2 * heads * both)
    mixture = ExpertWork(len(blocks), experts, per_row, stacked / (len(blocks) * experts)) if blocks else None
    return ForwardWork(round(weights), round(flops), 2 * file.vocabulary * file.hidden_size, (attention,), mixture)


KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Bytes of a number of the KV cache."""


def load_draft(path: str, target: Target) -> Target:
    """Load the GGUF file of a draft model, to be computed as the target is.

    Raises:
        OSError, ValueError: as in ``load``.
        Unsupported: the draft model has recurrent layers.
    """
    settings, gpu_layers = LlamaSettings(torch.get_num_threads()), 0
    if isinstance(target.lm, LlamaCpp | LlamaRecurrent):
        settings, gpu_layers = target.lm.settings, target.lm.model.gpu_layers
    draft = load(
        path, threads=settings.threads, gpu_layers=gpu_layers, kv_dtype=settings.kv_dtype, chunk=settings.batch,
        cells=settings.cells, cache=target.cache,
    )  # fmt: skip
    if isinstance(draft.lm, LlamaRecurrent):
        raise Unsupported(
            f"proposer.path={path} has recurrent layers: llama.cpp cannot take back tokens that a draft model computes "
            "one after the other; choose a draft model without recurrent layers"
        )
    return draft


def require_llama_cpp(target: Target) -> LlamaCpp:
    """Return the runner of a target that llama.cpp computes.

    Raises:
        ValueError: it is of another kind.
    """
    if not isinstance(target.lm, LlamaCpp):
        raise ValueError(
            f"the peers of llama.cpp require a target in llama.cpp without recurrent layers, and {target.name} is "
            "none: set target=gguf and target.path to a GGUF file, or leave them out"
        )
    return target.lm


def llama_of(target: Target, tokens: int, path: str | None = None, **more: Any) -> Any:
    """Return llama-cpp-python's ``Llama`` of a target's file, or of another file, with the target's settings.

    Args:
        target: of a GGUF file.
        tokens: size of its KV cache, which is allocated at once.
        more: further options of ``Llama``.

    Raises:
        ValueError: llama.cpp does not compute the target.
    """
    lm = require_llama_cpp(target)
    from llama_cpp import Llama

    batch, threads, kv_dtype = lm.settings.batch, lm.settings.threads, lm.settings.kv_dtype
    return Llama(
        path or lm.model.path, n_ctx=tokens, n_batch=batch, n_ubatch=batch, n_threads=threads, n_threads_batch=threads,
        n_gpu_layers=lm.model.gpu_layers, type_k=KV_DTYPES[kv_dtype], type_v=KV_DTYPES[kv_dtype],
        flash_attn=kv_dtype != "f32", verbose=False, **more,
    )  # fmt: skip


def check_tokenizer(model: Model, tokenizer: Any) -> None:
    """Refuse a tokenizer that splits probe texts otherwise than llama.cpp does, special tokens included.

    Args:
        model: whose file llama.cpp can tokenize with (``reads_as_llama_cpp``).
        tokenizer: transformers'.

    Raises:
        Unsupported: it does; the message names a text.
        ValueError: llama.cpp cannot tokenize a text.
    """
    texts = [*PROBES, "".join(f"{token} a{token}" for token in tokenizer.all_special_tokens)]
    for text in texts:
        for special in (True, False):
            ours = tokenizer(text, add_special_tokens=special)["input_ids"]
            theirs = model.tokenize(text, special)
            if ours != theirs:
                where = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
                raise Unsupported(
                    f"the tokenizer splits text otherwise than llama.cpp does for {model.path}: {text[:40]!r} becomes "
                    f"{ours[where:][:6]} from token {where} on, llama.cpp's are {theirs[where:][:6]}; name the folder "
                    "of the model's own tokenizer with target.tokenizer"
                )


def checked(model: Model, settings: LlamaSettings, sha256: str, cache: ProcessCache, exact: bool) -> Checked:
    """Return the self-check's result, measured once for the same file in the same setting.

    There is no other data type to compare with. So the error of decoded forests, against decoding one token after the
    other, is compared with the rounding of plain decoding: with how much a text's logits change where it is decoded at
    once, in cells after those of another text. ``CEILING`` is exceeded only where the same text alone in the KV cache,
    in which no draft tree or other text can be attended to, already varies by more: of weights of few bits.

    Args:
        settings: how it is computed.
        sha256: of its file.
        cache: results that were measured before; a new one is added.
        exact: whether weights, keys and values are float32: then the largest difference of a logit decides.

    Raises:
        Unsupported: the error is larger than allowed, or llama.cpp raises an error.
    """
    numbers = (settings.threads, settings.batch, model.gpu_layers, settings.snapshots)
    setting = (sha256, model.description, "llama.cpp", settings.kv_dtype, *map(str, numbers))
    if setting in cache.self_checks:
        return Checked(*cache.self_checks[setting])
    LOG.info("Self-check: a forest of draft trees against plain decoding")
    runner: Any = LlamaRecurrent if model.recurrent else LlamaCpp
    forests, alone = runner(model, settings), runner(model, settings)

    def decode(sequence: Any, part: list[int]) -> Tensor:
        return alone.run(alone.prepare([sequence], [part], empty(1))).logits[0].clone()

    def one_by_one(tokens: list[int], rows: int) -> Tensor:
        sequence, first = alone.open(len(tokens)), len(tokens) - rows + 1
        logits = [decode(sequence, part) for part in (tokens[:first], *([token] for token in tokens[first:]))]
        sequence.close()
        return torch.stack(logits)

    def at_once(tokens: list[int], rows: int, other: int) -> Tensor:
        """Decode the text's beginnings after another text of some tokens."""
        logits = []
        for end in range(len(tokens) - rows + 1, len(tokens) + 1):
            before, sequence = alone.open(other), alone.open(end)
            if other:
                decode(before, tokens[:other])
            logits.append(decode(sequence, tokens[:end]))
            before.close()
            sequence.close()
        return torch.stack(logits)

    def noise(other: int) -> list[Tensor]:
        return [row.plain(partial(at_once, other=other)) for row in rows]

    try:
        rows = decode_forests(forests)
        expected = [row.plain(one_by_one) for row in rows]
        if not all(logits.isfinite().all() for logits in expected):
            raise ValueError("plain decoding returns logits that are NaN or infinite: are the weights damaged?")
        if exact:
            checked = Checked(largest_error(rows, expected), EXACT[torch.float32], True)
        else:
            checked = rounding_error(rows, expected, noise(7), FLOOR, robust=False, ceiling=CEILING)
            if not checked.passed:
                wider = rounding_error(rows, expected, noise(0), FLOOR, robust=False)
                checked = max(checked, wider, key=lambda check: check.allowed)
                if checked.passed:
                    LOG.warning(
                        "%s cannot be checked closely: plain decoding of this file varies by %.2g standard deviations, "
                        "so faults of draft trees that change its logits by less than %.2g are not found",
                        model.path, (checked.allowed - FLOOR) / RATIO, checked.allowed,
                    )  # fmt: skip
    except (RuntimeError, ValueError) as failure:
        raise Unsupported(
            f"{model.path} cannot decode forests in llama.cpp ({type(failure).__name__}: {failure})"
        ) from failure
    finally:
        forests.close()
        alone.close()
    if not checked.passed:
        raise Unsupported(
            f"{model.path} ({model.description}) decodes forests wrongly in llama.cpp: its logits differ from plain "
            f"decoding's by {checked.error:.2g} standard deviations, allowed are {checked.allowed:.2g}"
        )
    cache.self_checks[setting] = checked
    return checked
