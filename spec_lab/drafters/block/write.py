"""Write trained block drafters in the layout of z-lab and SpecForge (``block.layout``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spec_lab.drafters.block.layout import ARCHITECTURES, BLOCK, INNER, Kind
from spec_lab.drafters.block.network import BlockNetwork
from spec_lab.drafters.drafter_files import draft_tables, write_drafter
from spec_lab.drafters.layer_conventions import window_fields


def write_block(network: BlockNetwork, kind: Kind, folder: Path, facts: Mapping[str, str], dtype: torch.dtype) -> str:
    """Write a block drafter that reads the target's embedding; return the SHA-256 of its weights."""
    settings, head = network.settings, network.settings.head
    inner = {
        "projector_type": kind, "mask_token_id": settings.mask_token,
        "target_layer_ids": [tap - 1 for tap in settings.taps], "sample_from_anchor": settings.predicts_next,
    }  # fmt: skip
    if settings.windows or any(settings.causal):
        inner |= {"causal": any(settings.causal)}
    if kind == "dspark":
        inner |= {"markov_rank": head.rank if head else 0, "enable_confidence_head": bool(settings.confidence)}
        inner |= {"markov_head_type": head.kind} if head else {}
    elif head is not None and kind == "domino":
        inner |= {"gru_hidden_dim": head.state_size, "emb_dim": head.rank, "pure_draft_prefix_len": head.uncorrected}
    elif head is not None:
        inner |= {
            "conv_kernel_size": settings.conv_taps, "conv_group_size": settings.conv_group,
            "selector_rank": head.rank, "selector_top_k": head.candidates,
        }  # fmt: skip
    config = dict(settings.layer) | {
        "architectures": [next(name for name, known in ARCHITECTURES.items() if known == kind)],
        "num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size, "block_size": settings.block_size,
        **window_fields(settings.windows), INNER: inner,
    }  # fmt: skip
    tensors = BLOCK.named(network)
    if network.lm_head is not None:
        config |= {"draft_vocab_size": len(network.ids)}
        tensors |= draft_tables(network.ids, settings.vocab_size)
    return write_drafter(folder, config, tensors, facts, dtype)
