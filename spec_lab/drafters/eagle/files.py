"""Files of EAGLE heads: the official format, SpecForge's and SGLang's, and that of vLLM's speculators.

A folder holds ``config.json`` and weights in safetensors; both are untrusted input (``models.checkpoint``). The format
is detected: ``speculators_model_type`` in the config is speculators'; tensors of a ``midlayer`` or a draft vocabulary
are EAGLE-3 as its authors, SpecForge and SGLang write it; ``fc.weight`` and ``layers.0`` alone are EAGLE-1 or EAGLE-2.

Names and conventions that differ, and what they become here:

- ``midlayer.*`` is layer 0; so is ``transformer.*`` of speculators' EAGLE-1, where ``fc`` is ``fusion_fc``.
- ``d2t`` is an offset: draft token i is the target's token i + d2t[i]. ``t2d`` marks these tokens.
- Taps: ``eagle_aux_hidden_state_layer_ids`` at the top level are numbers of hidden states (number i is the input of
  layer i); inside ``eagle_config`` they are numbers of layers whose outputs are read, which is one less, unless L, the
  number of the target's layers, is among them. Without either they are hidden states 2, L // 2 and L - 3. They are read
  in the order of the layers, whatever the order of the list: so do engines, which collect them as the layers run.
  ``proposer.taps`` sets them.
- Fields that may change what is computed, and are not read, are refused by name (``FIRST``, ``THIRD``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spec_lab.core.options import brief
from spec_lab.core.reading import Source
from spec_lab.core.tensors import readable
from spec_lab.drafters.drafter_files import LAYER, DrafterFiles, Fields, Meanings, write_drafter
from spec_lab.drafters.eagle.network import Eagle, Eagle3, Eagle3Settings, EagleSettings, Network
from spec_lab.drafters.layouts import Entry, Layout, decoder_layer
from spec_lab.models.checkpoint import weight_files
from spec_lab.models.target import Target

TAPS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("d2t", "t2d")
FORMAT_VERSION = "0.3.0"

EAGLE = Layout("EAGLE", (
    Entry("fc.weight|fusion_fc.weight", "fc.weight", "H 2H"),
    Entry("fc.bias|fusion_fc.bias", "fc.bias", "?H"),
    Entry("embed_tokens.weight", "", "?V H"),
    Entry("layers.0.*|transformer.*", "body.layers.0.*", decoder_layer(norms=("post_attention_layernorm",))),
    Entry("layers.{l+1}.*", "body.layers.{l+1}.*", decoder_layer()),
))  # fmt: skip
"""The layout of EAGLE-1 and EAGLE-2, and of EAGLE-1 in the format of speculators."""
FIRST_LAYER = "layers.0.{0}|midlayer.{0}|transformer.{0}"
EAGLE3 = Layout("EAGLE-3", (
    Entry("fc.weight", "fc.weight", "H R"),
    Entry(FIRST_LAYER.format("hidden_norm.weight"), "hidden_norm.weight", "H"),
    Entry(FIRST_LAYER.format("*"), "body.layers.0.*", decoder_layer("2H")),
    Entry("layers.{l+1}.*", "body.layers.{l+1}.*", decoder_layer()),
    Entry("norm.weight", "norm.weight", "H"),
    Entry("input_norm.weight", "input_norm.weight", "?R"),
    Entry("fc_norm.{t}.weight", "fc_norm.{t}.weight", "?F"),
    Entry("lm_head.weight", "lm_head.weight", "?W H"),
    Entry("embed_tokens.weight", "embed_tokens.weight", "?V H"),
    Entry("d2t", "", "?"),
    Entry("t2d", "", "?"),
))  # fmt: skip
"""The layout of EAGLE-3 of its authors, SpecForge and SGLang (midlayer), and of speculators (layers.0)."""

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
WINDOWS = ("sliding_window", "use_sliding_window")
"""Fields of families whose layers have windows unless they are null: those layers are refused (``DraftLayers``)."""
OF_THIRD = (False,), "it is a part of EAGLE-3, but the files hold an EAGLE-1 or EAGLE-2 head"
HEADS: Meanings = {
    "use_mtp_layernorm": ((False,), "norms of the inputs are not supported"),
    "parallel_draft_step": ((1,), "further heads of the same step are not supported"),
    "parallel_drafting": ((False,), "it is a P-EAGLE head: choose proposer=peagle"),
}
NOT_READ = {
    "has_lm_head": "the tensors of the files tell",
    "parallel_draft_heads_num_layers": "concerns further heads, which are refused",
}
FIRST = Fields(
    "an EAGLE head",
    {*LAYER.read, "bias"},
    {
        **HEADS, **dict.fromkeys((*FLAGS, "use_aux_hidden_state"), OF_THIRD),
        "use_input_layernorm_in_first_layer": ((False,), "a norm before the first layer is not supported"),
        "use_last_layernorm": ((False,), "a norm after the last layer is not supported"),
    },
    NOT_READ | dict.fromkeys((TAPS, "draft_vocab_size", "target_hidden_size", "next_layer_regular"), OF_THIRD[1]),
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-2, in the config and in its ``eagle_config``."""
THIRD = Fields(
    "an EAGLE-3 head",
    {*LAYER.read, *FLAGS, TAPS, "draft_vocab_size", "target_hidden_size"},
    {
        **HEADS, "bias": ((False,), "a bias of fc is not supported"),
        "use_aux_hidden_state": ((True,), "heads that read the last hidden state in place of taps are not supported"),
        "use_input_layernorm_in_first_layer": ((True,), "a first layer without a norm is not supported"),
        "use_last_layernorm": ((True,), "an LM head without a norm before it is not supported"),
        "next_layer_regular": ((True,), "further layers that read the embedding are not supported"),
    },
    NOT_READ,
)  # fmt: skip
"""Fields of EAGLE-3, in the config and in its ``eagle_config``."""
SPECULATORS = Fields(
    "a head in the format of speculators",
    {
        "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size", TAPS, *FLAGS,
        "fusion_bias", "layernorms",
    },
    {
        **HEADS, "eagle31": ((False,), "state norm_before_fc, fc_norm and norm_output instead"),
        "transformer_layer_architecture": (("LlamaDecoderLayer", "auto"), "layers of other classes are not supported"),
    },
    {"model_type": "speculators_model_type tells"},
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-3 in the format of speculators, beside the layers."""


def read_eagle(
    path: str, target: Target, dtype: torch.dtype | None = None, options: Mapping[str, Any] | None = None
) -> Network:
    """Read a head for a target, onto its device.

    Args:
        path: folder of the head.
        target: the target.
        dtype: of the head; None: the target's.
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no EAGLE head; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; ``d2t`` is no offset; the head is for another hidden size, another
            vocabulary or hidden states that the target does not have.
    """
    with DrafterFiles.open(path, "an EAGLE head", target, options=options) as files:
        settings = eagle_settings(files)
        if isinstance(settings, EagleSettings):
            return files.read(EAGLE, lambda: Eagle(settings), dtype)
        network = files.read(EAGLE3, lambda: Eagle3(settings), dtype)
        network.ids = draft_tokens(files, settings.vocab_size, settings.draft_vocab_size).to(target.lm.device)
        return network


def draft_tokens(files: DrafterFiles, v: int, w: int | None) -> Tensor:  # [W]
    """The target's number of each draft token, from ``d2t`` and ``t2d``.

    Args:
        files: of the drafter.
        v: V, the target's vocabulary.
        w: W, that of the drafter's own LM head; None: it has none.

    Raises:
        ValueError: a smaller vocabulary without ``d2t``; tables of other shapes; a ``d2t`` that is no offset.
    """
    tables = {name: files.held[name][:] for name in TABLES if name in files.held}
    if w is None:
        return torch.arange(0)
    if "d2t" not in tables:
        if w == v:
            return torch.arange(w)
        raise ValueError(
            f"{files.folder} drafts {w} of the target's {v} tokens, but holds no d2t that states which: the head was "
            "saved without it and would draft wrong tokens; export it again"
        )
    d2t, t2d = tables["d2t"], tables.get("t2d")
    if d2t.shape != (w,) or d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{files.folder}: d2t must hold {w} whole numbers, not {list(d2t.shape)} of {d2t.dtype}")
    ids = torch.arange(w) + d2t
    fine = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < v
    if fine and t2d is not None:
        fine = t2d.shape == (v,) and bool(torch.equal(t2d.bool().nonzero()[:, 0], ids))
    if not fine:
        raise ValueError(
            f"{files.folder}: d2t is no offset: draft token i is the target's token i + d2t[i], which must ascend, lie "
            f"below {v} and be the tokens that t2d marks"
        )
    return ids


def eagle_settings(files: DrafterFiles, parallel: Collection[str] = ()) -> EagleSettings | Eagle3Settings:
    """Return the settings of the head. Errors as of ``read_eagle``.

    Args:
        files: of the head.
        parallel: of a P-EAGLE head, the names of further fields that are read.
    """
    config, shapes, target = files.config, files.shapes, files.target
    kind = config.get("speculators_model_type")
    layer = config.get("transformer_layer_config") if kind is not None else config
    kinds = ("peagle",) if parallel else ("eagle", "eagle3")
    if kind not in (None, *kinds):
        known = " or ".join(kinds)
        raise ValueError(f"{files.file}: speculators_model_type {brief(kind)} is not supported: choose {known}")
    if not isinstance(layer, dict):
        raise ValueError(f"{files.file}: transformer_layer_config must be a mapping, not {brief(layer)}")
    third = bool(parallel) or kind == "eagle3" or any(name.startswith("midlayer.") or name in TABLES for name in shapes)
    files.expect(third or bool({"fc.weight", "fusion_fc.weight"} & shapes.keys()), "fc.weight")
    fields = files.layer_fields(layer, windows=bool(parallel))
    if not parallel:
        fields |= {name: layer[name] for name in WINDOWS if name in layer}
    if layer is config:
        (THIRD if third else FIRST).reading(parallel).check(files.file, config, "eagle_config")
    else:
        SPECULATORS.reading(parallel).check(files.file, config)
        LAYER.reading(parallel).check(files.file, layer)
    h, layers = layer["hidden_size"], files.whole("num_hidden_layers", 1, config=layer)
    v, wide = target.vocabulary, target.services.hidden_size
    files.check_target(vocabulary=layer.get("vocab_size"))
    fields["model_type"] = layer.get("model_type", "llama")
    if fields["model_type"] == "llama" and any(name.endswith("self_attn.q_norm.weight") for name in shapes):
        fields["model_type"] = "qwen3"  # Llama's layers with norms of queries and keys, as DeepSpec writes them
    if not third:
        files.check_target(h)
        if kind == "eagle" and files.flag("layernorms"):
            raise ValueError(f"{files.file}: layernorms=true is not supported: choose a head without further norms")
        bias = files.flag("fusion_bias") if kind == "eagle" else files.flag("bias", True)
        return EagleSettings(fields, h, v, layers, bias)
    files.check_target(files.whole("target_hidden_size", h))
    w = config.get("draft_vocab_size")
    if w is None and shapes.get("lm_head.weight"):
        w = shapes["lm_head.weight"][0]
    if w is not None and (isinstance(w, bool) or not isinstance(w, int) or not 0 < w <= v):
        raise ValueError(
            f"{files.file}: draft_vocab_size must lie between 1 and the target's {v} tokens, not {brief(w)}"
        )
    own_embedding = "embed_tokens.weight" in shapes
    for name, lacks in (("lm_head.weight", w is None), ("embed_tokens.weight", not own_embedding)):
        if lacks and h != wide:
            raise ValueError(f"{files.folder} holds no {name}, and the target's has hidden size {wide}, not {h}")
    inner = config.get("eagle_config") or {}  # where NVIDIA's exporter writes flags
    flags = {name: files.flag(name, config=inner if config.get(name) is None else config) for name in FLAGS}
    taps = _taps(files, max(1, (shapes.get("fc.weight") or [3 * wide])[-1] // wide))
    return Eagle3Settings(fields, h, wide, v, taps, w, layers, **flags, own_embedding=own_embedding)


def _taps(files: DrafterFiles, count: int) -> tuple[int, ...]:
    """The numbers of the hidden states that the head reads.

    Args:
        files: of the head.
        count: how many ``fc`` reads.
    """
    config, last = files.config, files.target.lm.capabilities.hidden_layers
    named, shift, where = config.get(TAPS), 0, TAPS
    if not named and config.get("eagle_config"):
        named, shift, where = config["eagle_config"].get(TAPS), 1, f"eagle_config.{TAPS}"
    if not named:
        usual = (2, last // 2, last - 3)
        spread = [round(1 + i * (last - 4) / max(1, count - 1)) + 1 for i in range(count)]
        taps = sorted(max(0, min(tap, last)) for tap in (usual if count == len(usual) else spread))
        why = f"{where} names none" + "; these are EAGLE-3's own" * (count == len(usual))
        return files.choose_taps(taps, "guess", why, {"spread over the layers": spread})
    source: Source = "guess" if shift else "file"
    why = f"{where} is {brief(named)}, numbers of {'layers whose outputs are read' if shift else 'hidden states'}"
    if shift and isinstance(named, list) and last in named:
        source, shift, why = "file", 0, f"{where} is {brief(named)}, where {last} can only be the number of a state"
    listed = files.taps(where, named, shift)
    taps = sorted(listed)
    if taps == listed:
        return files.choose_taps(taps, source, why)
    if _is_of_training(files.folder):
        why += ", in the order in which this package trained the head"
        return files.choose_taps(listed, "guess", why, {"in the order of the layers": taps})
    why += ", and engines read taps in the order of the layers"
    return files.choose_taps(taps, "guess", why, {"in the order of the list": listed})


def _is_of_training(folder: Path) -> bool:
    """Return whether ``task=train`` wrote a head: its facts are the metadata of the weights (``write_eagle3``)."""
    file = weight_files(folder)[0]
    with readable([file]), safe_open(file, framework="pt") as opened:
        return {"target_sha256", "method", "seed"} <= (opened.metadata() or {}).keys()


def write_eagle3(
    network: Any, folder: Path, target: str, architecture: str, facts: Mapping[str, str], dtype: torch.dtype
) -> str:
    """Write an EAGLE-3 head in the format of speculators, which vLLM serves; return the SHA-256 of its weights.

    Args:
        network: ``drafters.eagle.network.Eagle3``.
        folder: is made.
        target: name or path of the target.
        architecture: of the target, as transformers names it.
        facts: for the file's metadata.
        dtype: of the weights in the file.
    """
    settings: Eagle3Settings = network.settings
    tensors = EAGLE3.named(network)
    if settings.draft_vocab_size is not None:
        ids = network.ids.cpu()
        kept = torch.zeros(settings.vocab_size, dtype=torch.bool)
        kept[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "transformer_layer_config": dict(settings.layer)
        | {"num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size},
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        TAPS: list(settings.taps),
        **{name: getattr(settings, name) for name in FLAGS},
    }
    return write_drafter(folder, config, tensors, facts, dtype)


def write_eagle(
    settings: EagleSettings,
    weights: Mapping[str, Tensor],
    folder: Path,
    embedding: Tensor,
    facts: Mapping[str, str],
    dtype: torch.dtype,
) -> str:
    """Write an EAGLE-1 or EAGLE-2 head in the official format; return the SHA-256 of its weights.

    Args:
        settings: what the head is.
        weights: by the network's own names.
        folder: is made.
        embedding: ``[V, H]`` of the target, which the official loader reads from the head's file.
        facts: for the file's metadata.
        dtype: of the weights in the file.
    """
    tensors = {EAGLE.published(name)[0]: weight for name, weight in weights.items()}
    tensors["embed_tokens.weight"] = embedding[: settings.vocab_size]
    config = dict(settings.layer) | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size,
        "bias": settings.bias,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts, dtype)
