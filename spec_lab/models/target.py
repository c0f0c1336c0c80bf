"""The target: the model whose distribution the output follows, with its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.options import Count, Filled
from spec_lab.core.options import checked as check_arguments
from spec_lab.core.process_cache import ProcessCache
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.forests import Checked
from spec_lab.models.fused import fuse, on_one_gpu, unfuse
from spec_lab.models.gguf_checkpoint import source_sha256
from spec_lab.models.loading import load_model
from spec_lab.models.packed import pack, unpack
from spec_lab.models.placement import chosen, kv_dtype_of
from spec_lab.models.self_check import MaybePacking, checked
from spec_lab.models.services import ModelServices, TargetServices
from spec_lab.models.support import Unsupported, context_of, refuse_options, refuse_pairs
from spec_lab.runners.attention import Attention
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.runner import Runner

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Target:
    """A causal LM with its tokenizer.

    Args:
        lm: computes it.
        tokenizer: transformers' tokenizer; None where only token ids are used.
        name: the path or hub name as given.
        context: maximum number of tokens of a sequence.
        sha256: of the weight files in order of name; empty for a model that was not read from files.
        self_check: error that the self-check at load measured, in standard deviations of the logits.
        cache: facts that this process found before; draft models that are loaded for this target use it too.
        stops: end-of-text tokens that are known otherwise than from a model of transformers or the tokenizer.
        parts: embedding, final norm and LM head for proposers that call them; None: those of ``model``.
        source_sha256: ``sha256`` of the checkpoint that the weights were converted from; empty if they were not.
        folder: of the files of a checkpoint of transformers; None for another target.
        gguf_file: path of the GGUF file that the weights are from; empty if they are from none.
        tolerance: largest error that the self-check allows; None of a model that was not checked.
        checked_in_float32: whether it checked masks and positions in float32 or float64; None of a model that was not
            checked.
    """

    lm: Runner
    tokenizer: Any
    name: str
    context: int
    sha256: str
    self_check: float
    cache: ProcessCache = field(default_factory=ProcessCache, repr=False)
    stops: frozenset[int] = frozenset()
    parts: TargetServices | None = None
    source_sha256: str = ""
    folder: Path | None = None
    gguf_file: str = ""
    tolerance: float | None = None
    checked_in_float32: bool | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Name, self-check, data type, how the model is quantized (``weights``: of llama.cpp), and what its weights
        were converted from.
        """
        model = self.lm.facts.get("model")  # of llama.cpp, such as "llama 256M Q4_1"
        more = {"weights": model.split(" ", 2)[-1]} if model else {}
        more |= {"source_sha256": self.source_sha256} if self.source_sha256 else {}
        return {
            "name": self.name, "self_check": self.self_check, "tolerance": self.tolerance,
            "self_check_in_float32": self.checked_in_float32, "quantization": self.lm.quantization,
            "dtype": str(self.lm.dtype).removeprefix("torch."), **more,
        }  # fmt: skip

    @cached_property
    def vocabulary(self) -> int:
        """V, the width of the logits."""
        return self.lm.vocabulary

    @property
    def ends(self) -> frozenset[int]:
        """The end-of-text tokens of the model's generation config, of the tokenizer and of ``stops`` below V."""
        return end_tokens(self.vocabulary, self.tokenizer, self.lm.hf_model, self.stops)

    @property
    def model(self) -> Any:
        """The model of transformers that the runner runs.

        Raises:
            Unsupported: it runs another one.
        """
        if self.lm.hf_model is None:
            raise Unsupported(
                f"target '{self.name}' is computed by {type(self.lm).__name__}, which has no model of transformers: "
                "choose a proposer, peer or check that requires none, or another target"
            )
        return self.lm.hf_model

    @cached_property
    def services(self) -> TargetServices:
        """The target's embedding, final norm and LM head, for proposers that call them.

        Raises:
            Unsupported: as in ``model``, without ``parts``.
        """
        return ModelServices(self.model) if self.parts is None else self.parts

    def draft_runner(self, model: Any, sha256: str, rows: Tensor | None = None) -> CausalLM:
        """Return what computes a draft model for this target, with the target's attention and chunks if it has any.

        Args:
            model: a causal LM of transformers.
            sha256: of its weights.
            rows: ``[W]`` of its LM head, which are left: its logits are ``[.., W]``; None: all.

        Raises:
            Unsupported: it fails the self-check, or the rows of its LM head cannot be selected.
        """
        settings = self.lm.model_settings._replace(kv_dtype=None)
        if settings.fixed or on_one_gpu(model):
            fuse(model)
        _fuse_checked(model, partial(_pack_checked, model, settings.attention, sha256, self.cache, settings.fixed))
        if rows is not None:
            model.set_output_embeddings(ModelServices(model).lm_head_rows(rows))
            pack(model)
        return CausalLM(model, *settings)

    @torch.inference_mode()
    def plain_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """Return the logits after the tokens from position ``first`` - 1 on, computed without drafts, ``[n, V]``."""
        return self.lm.plain_logits(tokens, len(tokens) - first + 1)

    @staticmethod
    @check_arguments
    def load(
        path: str,
        revision: Filled | None = None,
        device: str | None = "auto",
        dtype: str = "auto",
        attention: Attention = "per_sequence",
        context: Count | None = None,
        chunk: Count = 512,
        device_map: str | Mapping[str, str | int] | None = None,
        tensor_parallel: bool = False,
        graphs: bool = False,
        quantization: str | None = None,
        quantization_group_size: int | None = None,
        kv_dtype: str | None = None,
        cache: ProcessCache | None = None,
    ) -> Target:
        """Load a target from a local folder, by hub name or from a GGUF file; no pickles, no remote code.

        A checkpoint is untrusted input: ``spec_lab.models.checkpoint`` says which of its files are read, and within
        which bounds.

        Args:
            path: a folder of a transformers checkpoint, a hub name or a GGUF file. A GGUF file is dequantised once,
                into the user's cache (``gguf_checkpoint``).
            revision: branch, tag or commit of a hub name; None: main.
            device: auto, cpu, cuda, cuda:N. auto: a GPU where there is one, unless device_map or tensor_parallel is
                set. None: as auto.
            dtype: auto, bfloat16, float16, float32, float64. auto: bfloat16, but float32 on a CPU that is faster in it.
            attention: per_sequence: each sequence over its own cells of the KV cache; dense_mask: one mask over all
                cells, slower, for models without AttentionInterface.
            context: maximum tokens of a sequence; None: the model's own limit.
            chunk: maximum prompt tokens computed in one forward.
            device_map: auto, balanced, {module: device, ...}: layers on several devices. With "auto" or "balanced"
                accelerate spreads them over the GPUs, or uses the CPU where there is none. Layers run one device after
                the other. (Tested with every layer on the CPU, and for mixed devices without numbers; not yet tested
                on several GPUs.)
            tensor_parallel: true: each layer split over the ranks that torchrun started. It is split by transformers'
                plan for this kind of model. Each rank uses the GPU of its number, or the CPU with a CPU build of torch.
                Call it on rank 0 while the other ranks run ``loading.follow``. (Tested with gloo on the CPU; not yet
                tested on several GPUs.)
            graphs: true: decoding steps in fixed shapes, captured as CUDA graphs on a GPU. Layers have fewer kernels
                (``runners.graphs``, ``models.fused``). On a CPU nothing is captured, and padding makes steps slower.
                (All but the capture itself is tested on the CPU; ``experiments/gpu`` has runs on a GPU.)
            quantization: torchao_int8, torchao_int4, bnb_int8, bnb_int4: quantizes linear layers while they are
                loaded. The target is the quantized model. Checkpoints that are quantized already are recognised by
                their config.json.
            quantization_group_size: 32, 64, 128: inputs of a layer with one scale, of torchao_int4; None: 128.
            kv_dtype: of keys and values, lossy: float32, bfloat16, float16, float8_e4m3fn; None: dtype. The target
                distribution is that of the model with such a KV cache, which is the same for all ways of decoding.
                Attention converts what it reads, which takes time in every step.
            cache: facts that this process found before; None starts with none.

        Raises:
            ValueError: an unknown device or dtype, no GPU, an invalid context; a config that describes no model;
                weights of another config, or more or fewer tensors than it has; an unreadable tokenizer, or one whose
                own vocabulary (without added tokens) exceeds the model's; end-of-text tokens that all lie beyond the
                vocabulary; a device map that omits a module, names an unknown one, or uses no real device; no torchrun,
                or a number of ranks that does not divide the attention heads; an invalid quantization, or one that the
                checkpoint has already.
            OSError: no checkpoint, or none in safetensors; a truncated or corrupt file; a file of the hub that cannot
                be fetched; a GGUF file that cannot be dequantised into the cache. The message names the file.
            Unsupported: the model fails the self-check, or is of a kind that is known to fail; a package is missing
                that the quantization requires; a quantization that is not supported; the model has recurrent layers,
                and ``attention`` is "dense_mask", or ``tensor_parallel``, ``graphs`` or ``kv_dtype`` is set; it has
                ALiBi biases, and ``kv_dtype`` is set.
        """
        device = "auto" if device is None else device
        options = {
            "attention=dense_mask": attention == "dense_mask", "device_map": device_map is not None, "graphs": graphs,
            "tensor_parallel": tensor_parallel, "kv_dtype": kv_dtype not in (None, dtype), "device": device != "auto",
        }  # fmt: skip
        refuse_pairs(options)
        device, dtype = chosen(device, dtype, device_map is not None or tensor_parallel, quantization is not None)
        stored = kv_dtype_of(kv_dtype, dtype)
        model, tokenizer, folder = load_model(
            path, device, dtype, device_map, tensor_parallel, quantization,
            quantization_group_size, revision,
        )  # fmt: skip
        refuse_options(model, options)
        limit = context_of(path, model.config, context)
        sha256 = weights_hash(folder)
        source = source_sha256(folder, sha256)
        cache = ProcessCache() if cache is None else cache
        if graphs or on_one_gpu(model):
            fuse(model)
        if tensor_parallel:  # other ranks would compute replicated layers otherwise
            check = _fuse_checked(model, partial(checked, model, attention, sha256, cache, graphs))
        else:
            check = _fuse_checked(model, partial(_pack_checked, model, attention, sha256, cache, graphs, stored))
        lm = CausalLM(model, attention, chunk, graphs, stored)
        return Target(
            lm, tokenizer, path, limit, sha256, check.error, cache, source_sha256=source, folder=folder,
            gguf_file=path if path.endswith(".gguf") else "", tolerance=check.allowed,
            checked_in_float32=check.in_float32,
        )  # fmt: skip


def _fuse_checked(model: Any, check: Callable[[], Checked]) -> Checked:
    """Return a model's check; of its modules as transformers computes them if it passes so only (``models.fused``)."""
    try:
        return check()
    except Unsupported as refusal:
        if not unfuse(model):
            raise
        LOG.info("Self-check: again without fused norms and attention (%s)", refusal)
        unfused = check()
        LOG.warning(
            "The model runs without fused norms and attention, which is slower: with them the self-check fails (%s)",
            refusal,
        )
        return unfused


def _pack_checked(
    model: Any,
    attention: Attention,
    sha256: str,
    cache: ProcessCache,
    fixed: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Checked:
    """Pack a model's linear layers, and return its ``checked``; unpacked if it passes so only.

    Code of a model may read the weights itself, and kernels of packed layers may be wrong.
    """
    pack(model)
    try:
        return checked(model, attention, sha256, cache, fixed, kv_dtype)
    except MaybePacking as refusal:
        if not unpack(model):
            raise
        LOG.info("Self-check: again without packed linear layers (%s)", refusal)
        unpacked = checked(model, attention, sha256, cache, fixed, kv_dtype)
        LOG.warning(
            "The model runs without packed linear layers, which is slower: with them the self-check fails (%s)", refusal
        )
        return unpacked


def end_tokens(vocabulary: int, tokenizer: Any, model: Any, stops: Iterable[int] = ()) -> frozenset[int]:
    """Return the end-of-text tokens: those of a model's generation config and of its tokenizer, and ``stops``.

    Tokens beyond the vocabulary are left out.
    """
    config = getattr(model, "generation_config", None)
    named = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    flat = [*stops, *(token for tokens in named for token in (tokens if isinstance(tokens, list) else [tokens]))]
    return frozenset(token for token in flat if token is not None and token < vocabulary)
