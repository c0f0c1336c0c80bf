"""Loading a causal LM from a local path or the hub, and refusing what cannot be right.

At load the model decodes a scattered two-tree forest and compares it with plain forwards over every path; a model whose
logits differ is refused with the measured error. Kinds known to be wrong are refused by name before any weight is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from spec_lab.attention import SPANS, Attention
from spec_lab.draft import Draft, Shape
from spec_lab.model import CausalLM
from spec_lab.options import whole

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest error of a logit allowed by the self-check, in standard deviations of the plain forward's logits."""

CHANGING_ROPE = {"dynamic", "longrope"}
ALIBI = {"bloom", "mpt"}
NOT_FULL_ATTENTION = {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "gpt_neo", "zamba"}


class Unsupported(ValueError):
    """A model that cannot be decoded correctly here."""


@dataclass(frozen=True, eq=False)
class Target:
    """A causal LM with its tokenizer.

    Args:
        lm: the model with its cells.
        tokenizer: transformers' tokenizer; None where only token ids are used.
        name: the path or hub name as given.
        context: most tokens a sequence may have.
        sha256: of the weight files in order of name; empty for a model that was not read from files.
        self_check: the largest error that the check at load measured, in standard deviations of the logits.
    """

    lm: CausalLM
    tokenizer: Any
    name: str
    context: int
    sha256: str
    self_check: float

    @property
    def vocabulary(self) -> int:
        """V, the width of the logits."""
        return int(self.lm.model.get_output_embeddings().weight.shape[0])

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that the model's generation config and the tokenizer call the end."""
        config = getattr(self.lm.model, "generation_config", None)
        named = [getattr(config, "eos_token_id", None), getattr(self.tokenizer, "eos_token_id", None)]
        flat = [token for one in named for token in (one if isinstance(one, list) else [one])]
        return frozenset(token for token in flat if token is not None)

    @staticmethod
    def load(
        path: str,
        device: str = "cpu",
        dtype: str = "bfloat16",
        attention: Attention = "spans",
        context: int | None = None,
        chunk: int = 512,
    ) -> Target:
        """Load from a local folder or by hub name; safetensors only, no remote code.

        Args:
            path: folder of a checkpoint, or a hub name.
            device: "cpu", "cuda" or "cuda:N".
            dtype: "bfloat16", "float16", "float32" or "float64".
            attention: "spans", or "dense" for models that do not use transformers' ``AttentionInterface``: slower, and
                a request whose logits are NaN then ends its whole batch.
            context: most tokens of a sequence; default the model's own limit, which it may not exceed.
            chunk: longest part of a prompt computed in one forward.

        Raises:
            ValueError: an unknown device or dtype, no GPU, a bad context; weights for another config, or not all of
                them; an unreadable tokenizer.
            OSError: no checkpoint there, or not as safetensors; a truncated or corrupt file, by its name.
            Unsupported: the model fails the self-check, or is of a kind known to fail.
        """
        if attention not in ("spans", "dense"):
            raise ValueError(f"target.attention must be spans or dense, not {attention!r}")
        whole("target.chunk", chunk)
        model, tokenizer = load_model(path, device, dtype)
        own = model_context(model.config)
        if context is not None and (
            isinstance(context, bool) or not isinstance(context, int) or not 0 < context <= own
        ):
            raise ValueError(f"target.context must lie between 1 and the model's own {own}, not {context!r}")
        sha256 = weights_hash(path)
        error = checked(model, attention, sha256)
        lm = CausalLM(model, attention, chunk=chunk)
        return Target(lm, tokenizer, path, context or own, sha256, error)


def load_model(path: str, device: str, dtype: str) -> tuple[Any, Any]:
    """The model in eval mode and its tokenizer. Errors as in ``Target.load``."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"path must name a folder of a checkpoint or a model of the hub, not {path!r}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; choose cpu, cuda or cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; choose cpu, cuda or cuda:N")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise ValueError(f"device {device!r} asked for, but this torch sees {seen or 'no'} GPU; use device=cpu")
    if not File(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        hint = "" if "/" in path else "; give a model of the hub as owner/name, e.g. openai-community/gpt2"
        raise OSError(f"there is no folder {path}, and it is no name of the hub (owner/name){hint}")
    if File(path).exists() and not File(path, "config.json").exists():
        raise OSError(f"{path} holds no config.json: give a folder written by save_pretrained, or a hub name")
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    refuse_by_name(config)
    model, tokenizer = _read_weights(path, config, DTYPES[dtype]), _read_tokenizer(path)
    return model.to(where).eval(), tokenizer


def _read_weights(path: str, config: Any, dtype: torch.dtype) -> Any:
    """The model with every tensor from the checkpoint. (transformers would fill gaps with random numbers.)"""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except SafetensorError as error:
        raise OSError(f"{_unreadable(path)} is truncated or corrupt ({error}): copy or download it again") from error
    wrong = {f"{name} is missing" for name in report["missing_keys"]}
    wrong |= {f"{name} is {list(has)}, not {list(wants)}" for name, has, wants in report["mismatched_keys"]}
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the weights of {path} do not fit its config.json: {'; '.join(sorted(wrong)[:3])}{more}")
    return model


def _read_tokenizer(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions, transformers whatever it trips over
        raise ValueError(
            f"the tokenizer of {path} cannot be read ({type(error).__name__}: {error}): its tokenizer.json is missing "
            "or corrupt; copy or download it again"
        ) from error


def _unreadable(path: str) -> str:
    """The first weight file of a folder that does not open; of a model of the hub, words for it."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return str(file)
    return f"a weight file of {path}"


def model_context(config: Any) -> int:
    """The most tokens a model's positions allow."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    raise Unsupported(f"{config.model_type}: the config names no longest context; set max_position_embeddings in it")


def refuse_by_name(config: Any) -> None:
    """Refuse kinds whose positions or attention look at the whole pack.

    Raises:
        Unsupported: dynamic or longrope RoPE, ALiBi, sliding windows, linear attention, encoder-decoders.
    """
    kind = config.model_type

    def refuse(why: str) -> None:
        raise Unsupported(f"model type '{kind}' is not supported: {why}")

    rope = getattr(config, "rope_parameters", None) or {}
    parts = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for part in parts:
        if isinstance(part, dict) and part.get("rope_type", part.get("type")) in CHANGING_ROPE:
            refuse(f"its {part.get('rope_type', part.get('type'))} RoPE changes with the longest position in the pack")
    if kind in ALIBI or getattr(config, "alibi", False):
        refuse("ALiBi biases depend on places in the pack, not on positions")
    if kind == "xglm":
        refuse("its code of transformers runs through neither attention path, spans or dense")
    if kind in NOT_FULL_ATTENTION:
        refuse("it does not attend to all earlier tokens in every layer")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    layers = set(getattr(config, "layer_types", None) or [])
    if layers - {"full_attention"}:
        refuse(
            f"it has layers of type {', '.join(sorted(layers - {'full_attention'}))}; only full attention keeps trees"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) and not layers:
        refuse(f"it has a sliding window of {config.sliding_window} tokens; set sliding_window to null if it may go")


def self_check(model: nn.Module, attention: Attention) -> float:
    """Decode a scattered two-tree forest and compare with plain forwards over every path.

    Also ask every rotary embedding whether a token's rotation changes when a far position joins the pack.

    Returns:
        The largest error of a logit, in standard deviations of the plain logits.

    Raises:
        Unsupported: the error exceeds the tolerance of the model's dtype, or the model cannot run so at all.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    try:
        error = max(_forest_error(model, attention), _rotation_error(model))
    except Unsupported:
        raise
    except (TypeError, AttributeError, ImportError, IndexError, RuntimeError, ValueError) as failure:
        advice = "; try target.attention=dense" if attention == "spans" else ""
        raise Unsupported(
            f"model type '{kind}' cannot decode forests with attention='{attention}' "
            f"({type(failure).__name__}: {failure}){advice}"
        ) from failure
    allowed = TOLERANCE[model.dtype]  # type: ignore[index]
    if not error <= allowed:
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with attention='{attention}': its logits differ from a plain "
            f"forward's by {error:.2g} standard deviations, allowed are {allowed:g} in {model.dtype}"
        )
    return error


_CHECKED: dict[tuple[str, ...], float] = {}
"""What ``self_check`` found of checkpoints in this process, so that a sweep's next job need not check them again."""


def checked(model: Any, attention: Attention, sha256: str) -> float:
    """``self_check``, once in a process for the same weights (by their ``weights_hash``) in the same setting."""
    setting = (sha256, model.config.to_json_string(), str(model.dtype), str(model.device), attention)
    if not sha256 or setting not in _CHECKED:
        _CHECKED[setting] = self_check(model, attention)
    return _CHECKED[setting]


def _forest_error(model: Any, attention: Attention) -> float:
    lm = CausalLM(model, attention)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    generator = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return generator.integers(0, vocabulary, count).tolist()

    prompts = [some(7), some(4)]
    paths = [lm.cells.open() for _ in prompts]
    # A first forest whose nodes are partly rejected leaves holes, so the second one lies scattered.
    first = Draft(Shape(2, np.array([0, 0, 3, 1, 5])), torch.tensor(some(5), device=lm.device))
    output = lm.forward(paths, prompts, first)
    worst = _compare(model, prompts, first, output.logits)
    for path, slots, accepted in zip(paths, output.slots, ([1, 2], []), strict=True):
        lm.cells.keep(path, slots[accepted])
        lm.cells.drop(path, np.delete(slots, accepted))
    tokens = [prompts[0] + first.token[[1, 2]].tolist(), prompts[1]]
    pending = [some(1), some(2)]
    second = Draft(Shape(2, np.array([0, 0, 2, 1, 1, 6])), torch.tensor(some(6), device=lm.device))
    output = lm.forward(paths, pending, second)
    tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
    return max(worst, _compare(model, tokens, second, output.logits))


@torch.inference_mode()
def _rotation_error(model: Any) -> float:
    """How much near positions' rotations move when the longest position joins the pack."""
    errors = [0.0]
    near = torch.arange(4, device=model.device)[None]
    both = torch.cat([near, torch.tensor([[model_context(model.config) - 1]], device=model.device)], dim=1)
    for module in model.modules():
        if hasattr(module, "inv_freq") and "position_ids" in module.forward.__code__.co_varnames:
            like = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
            alone, joined = module(like, position_ids=near), module(like, position_ids=both)
            for a, b in zip(alone, joined, strict=True):
                errors.append(float((a - b[:, :4]).abs().max()))
    return _largest(errors)


@torch.inference_mode()
def _compare(model: Any, tokens: Sequence[list[int]], draft: Draft, logits: Tensor) -> float:
    """Largest error of any row against a plain forward over a path to a leaf, with transformers' own attention."""
    errors, ours = [], model.config._attn_implementation
    if ours == SPANS:
        model.set_attn_implementation("sdpa")
    for leaf in (row for row in range(draft.shape.rows) if not len(draft.shape.children[row])):
        nodes = [int(node) for node in draft.shape.path(leaf)]
        path = [int(draft.token[node - draft.shape.heads]) for node in nodes]
        root = int(draft.shape.root[leaf])
        ids = torch.tensor([tokens[root] + path], device=logits.device)
        plain = model(input_ids=ids, use_cache=False).logits[0, -len(path) - 1 :].double()
        for row, expected in zip([root, *nodes], plain, strict=True):
            errors.append(float((logits[row].double() - expected).abs().max() / expected.std()))
    if ours == SPANS:
        model.set_attn_implementation(SPANS)
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """The largest; infinity where one of them is NaN, which ``max`` would overlook."""
    largest = float(np.max(errors))
    return largest if np.isfinite(largest) else float("inf")


def weight_files(path: str) -> list[File]:
    """A local checkpoint's weight files in order of name; none for a hub name."""
    return sorted(File(path).glob("*.safetensors")) if File(path).is_dir() else []


def weights_hash(path: str) -> str:
    """SHA-256 over a local checkpoint's weight files in order of name; empty for a hub name."""
    digest = hashlib.sha256()
    files = weight_files(path)
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if files else ""
