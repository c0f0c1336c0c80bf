"""The conventions of EAGLE heads that their files leave open (``core.reading``): how each is read, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from spec_lab.core.reading import Source
from spec_lab.core.tensors import readable
from spec_lab.drafters.drafter_files import DrafterFiles
from spec_lab.drafters.eagle.network import NormOutput
from spec_lab.drafters.layer_conventions import (
    choose_anchored,
    choose_rope,
    choose_window,
    layer_fields,
    layer_windows,
    ordered_taps,
    settle_taps,
)
from spec_lab.models.checkpoint import weight_files

TAPS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("d2t", "t2d")


def draft_tokens(files: DrafterFiles, v: int, w: int | None) -> Tensor:  # [W]
    """The target's number of each draft token, from ``d2t`` and ``t2d``.

    Args:
        v: V, the target's vocabulary.
        w: W, that of the drafter's own LM head; None: it has none.

    Raises:
        ValueError: a smaller vocabulary without ``d2t``; tables of other shapes; a ``d2t`` that names no tokens.
    """
    tables = {name: files.held[name][:] for name in TABLES if name in files.held}
    if w is None or w == v:
        return torch.arange(w or 0)
    if "d2t" not in tables:
        raise ValueError(
            f"{files.folder} drafts {w} of the target's {v} tokens, but holds no d2t that states which: the head was "
            "saved without it and would draft wrong tokens; export it again"
        )
    d2t, t2d = tables["d2t"], tables.get("t2d")
    if d2t.shape != (w,) or d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{files.folder}: d2t must hold {w} whole numbers, not {list(d2t.shape)} of {d2t.dtype}")
    readings = {"offset": torch.arange(w) + d2t, "absolute": d2t.long()}
    fits = {name: ids for name, ids in readings.items() if _is_choice(ids, v, t2d)}
    if not fits:
        raise ValueError(
            f"{files.folder}: d2t names no tokens: draft token i is the target's token i + d2t[i], which must be {w} "
            f"different numbers below {v}, and those that t2d marks"
        )
    others = {f"as {name} numbers": name for name in fits}
    if "offset" in fits:
        chosen = files.choose("d2t", "offset", "default", "numbers of d2t are added to those of draft tokens", others)
    else:
        why = "added to the numbers of draft tokens they would name no tokens, as they are they do"
        chosen = files.choose("d2t", "absolute", "guess", why, others)
    if chosen not in fits:
        raise ValueError(f"{files.folder}: d2t names no tokens as {chosen} numbers: choose another d2t")
    return fits[chosen]


def _is_choice(ids: Tensor, vocabulary: int, marked: Tensor | None) -> bool:
    """Return whether ids are different tokens, and those that are marked."""
    ascending = ids.sort().values
    if int(ascending[0]) < 0 or int(ascending[-1]) >= vocabulary or not bool((ascending[1:] > ascending[:-1]).all()):
        return False
    if marked is None:
        return True
    return marked.shape == (vocabulary,) and torch.equal(marked.bool().nonzero()[:, 0], ascending)


class ChosenLayers(NamedTuple):
    """How a head's layers are read.

    Args:
        fields: of their config, of the family that has the biases and norms of the files.
        windows, anchored: as in ``EagleSettings``.
        interleaved: whether their rotary embedding turns neighbours.
    """

    fields: dict[str, Any]
    windows: tuple[int | None, ...]
    anchored: bool
    interleaved: bool


def choose_layer(files: DrafterFiles, layer: Mapping[str, Any]) -> ChosenLayers:
    """Settle how the head's layers are read, which ``layer`` describes."""
    kind, shapes = layer.get("model_type", "llama"), files.shapes
    norms, biases, last_bias, mlp_biases = (
        any(name.endswith(end) for name in shapes)
        for end in ("self_attn.q_norm.weight", "self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.up_proj.bias")
    )
    if layer is files.config and is_llama(files):
        layer, kind = {**layer, "attention_bias": biases, "mlp_bias": mlp_biases}, "llama"
        types = layer.get("layer_types")
        if isinstance(types, list) and len(types) != layer.get("num_hidden_layers", 1):
            del layer["layer_types"]  # those of the target
    if kind == "llama" and (norms or (biases and not last_bias)):
        kind = "qwen3" if norms else "qwen2"  # Llama's layers with norms, or with biases of queries, keys, values alone
    fields = layer_fields(files, {**layer, "model_type": kind}, windows=True) | {"model_type": kind}
    why = "layer_types and use_sliding_window tell which layers have it"
    stated = layer_windows(files, layer)
    windows = choose_window(files, layer, stated, why)
    trained = files.config.get("speculators_model_type") == "eagle3"
    anchored = choose_anchored(files, (*windows, *stated), trained)
    return ChosenLayers(fields, windows, anchored, choose_rope(files, layer))


def is_llama(files: DrafterFiles) -> bool:
    """Return whether a head's architecture has Llama's layers whatever its ``model_type`` is."""
    return any("LlamaForCausalLMEagle" in name for name in files.architectures)


def choose_ends(files: DrafterFiles, w: int | None, h: int) -> tuple[int | None, bool]:
    """Return the draft vocabulary of the head's own LM head, None for the target's; and whether it embeds itself.

    Args:
        w: the draft vocabulary that is stated.
        h: its hidden size.

    Raises:
        ValueError: the head has neither, and a hidden size that the target's do not have.
    """
    wide, has_own, shapes = files.target.services.hidden_size, dict[str, bool](), files.shapes
    if w == files.target.vocabulary and "lm_head.weight" not in shapes:
        w = None
    has_end = {"lm_head": w is not None, "embedding": ENDS["embedding"] in shapes}
    for convention, has in has_end.items():
        name = ENDS[convention]
        others = {"the target's": "target"} if has and h == wide else {}
        why = f"the files hold {'a' if has else 'no'} {name}"
        has_own[convention] = files.choose(convention, "own" if has else "target", "file", why, others) == "own"
        if not has_own[convention] and h != wide:
            raise ValueError(f"{files.folder} holds no {name}, and the target's has hidden size {wide}, not {h}")
        if has_own[convention] and not has:
            raise ValueError(f"{files.folder} holds no {name} of its own: set {convention}=target")
    return (w if has_own["lm_head"] else None), has_own["embedding"]


ENDS = {"lm_head": "lm_head.weight", "embedding": "embed_tokens.weight"}


def unused(files: DrafterFiles) -> set[str]:
    """Return the head's tensors that an option leaves out: in the place of some the target's are used."""
    chosen = {name: files.conventions[name].value for name in files.conventions if files.options.get(name) is not None}
    ends = {tensor for name, tensor in ENDS.items() if chosen.get(name) == "target"}
    norms = {tensor.partition(".")[0] for name, tensor in NORMS.items() if chosen.get(name) is False}
    return ends | {name for name in files.held if name.partition(".")[0] in norms}


def choose_norm_output(files: DrafterFiles, prefixed: bool) -> NormOutput:
    """Return what the final norm is for, by the tool that wrote the files.

    Args:
        prefixed: whether its tensors begin with "model.".
    """
    config = stating(files, "norm_output")
    stated, flag = config.get("norm_output"), files.flag("norm_output", config=config)
    others = {"the normed state fed back": "feedback", "the state before the norm fed back": "plain"}
    value: NormOutput = "feedback" if flag else "plain"
    source: Source
    if stated is None:
        why, source = "the state before the norm is fed back (EAGLE-3)", "default"
    elif "speculators_model_type" in files.config or prefixed:
        why, source = f"norm_output is {str(flag).lower()}, by a tool that means feeding back by it", "file"
    else:
        others["no norm before the LM head"] = "raw"
        why, source = f"norm_output is {str(flag).lower()}, which SpecForge has meant in two ways", "guess"
        value = "plain"
    chosen: NormOutput = files.choose("norm_output", value, source, why, others)
    return chosen


NORMS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
"""Norms of the taps, and the name of a tensor that the files hold where there is one."""


def choose_norm(files: DrafterFiles, name: str) -> bool:
    """Return whether there is one of ``NORMS``; the files leave it open where they hold its weights."""
    config = stating(files, name)
    value = files.flag(name, config=config)
    source: Source = "default" if config.get(name) is None else "file"
    others = {"the other way": not value} if NORMS[name] in files.shapes else {}
    return bool(files.choose(name, value, source, f"the taps are {'' if value else 'not '}normed so", others))


def choose_residual(files: DrafterFiles) -> bool:
    """Return whether the residual connection starts from the normed features."""
    config = stating(files, "norm_before_residual")
    value = files.flag("norm_before_residual", config=config)
    why = f"the residual connection starts from the {'normed ' if value else ''}features"
    source: Source = "default" if config.get("norm_before_residual") is None else "file"
    return bool(files.choose("norm_before_residual", value, source, why, {"the other way": not value}))


def stating(files: DrafterFiles, name: str) -> Mapping[str, Any]:
    """Return the mapping that states a field: the config, or its ``eagle_config`` (NVIDIA's exporter)."""
    inner: Mapping[str, Any] = files.config.get("eagle_config") or {}
    return inner if files.config.get(name) is None else files.config


def reads_taps(files: DrafterFiles) -> bool:
    """Return whether the head reads taps, and not the last state alone."""
    return files.flag("use_aux_hidden_state", True, config=stating(files, "use_aux_hidden_state"))


def usual_taps(layers: int) -> tuple[int, int, int]:
    """Return the numbers of the hidden states that EAGLE-3's authors read, of a target with so many layers."""
    return 2, layers // 2, layers - 3


def choose_taps(files: DrafterFiles) -> tuple[int, ...]:
    """Return the numbers of the hidden states that an EAGLE-3 head reads.

    Raises:
        ValueError: the files name what are no states of the target.
    """
    config, last = files.config, files.target.lm.capabilities.hidden_layers
    if not reads_taps(files):
        why = "use_aux_hidden_state is false, and engines hand over the state after the final norm"
        return settle_taps(files, [-1], "guess", why)
    wide = files.target.services.hidden_size
    count = max(1, (files.shapes.get("fc.weight") or [3 * wide])[-1] // wide)  # how many ``fc`` reads
    named, shift, where = config.get(TAPS), 0, TAPS
    if not named and config.get("eagle_config"):
        named, shift, where = config["eagle_config"].get(TAPS), 1, f"eagle_config.{TAPS}"
    if not named:
        usual = usual_taps(last)
        spread = [round(1 + i * (last - 4) / max(1, count - 1)) + 1 for i in range(count)]
        taps = sorted(max(0, min(tap, last)) for tap in (usual if count == len(usual) else spread))
        why = f"{where} names none" + "; these are EAGLE-3's own" * (count == len(usual))
        return settle_taps(files, taps, "guess", why, {"spread over the layers": spread})
    source: Source = "guess" if shift else "file"
    why = order = ""
    if shift and isinstance(named, list) and last in named:
        source, shift, why = "file", 0, f"where {last} can only be the number of a state"
    if _is_of_training(files.folder):
        order = "in the order in which this package trained the head"
    return ordered_taps(files, where, named, shift, source, why, order)


def _is_of_training(folder: Path) -> bool:
    """Return whether ``task=train`` wrote a head: its facts are the metadata of the weights (``write_eagle3``)."""
    file = weight_files(folder)[0]
    with readable([file]), safe_open(file, framework="pt") as opened:
        return {"target_sha256", "method", "seed"} <= (opened.metadata() or {}).keys()
