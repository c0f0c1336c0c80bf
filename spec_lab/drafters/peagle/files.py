"""Files of P-EAGLE heads: those of its authors, SpecForge and Automodel, and the format of vLLM's speculators.

They are those of an EAGLE-3 head (``eagle.files``), with a tensor ``mask_hidden`` ``[1, 1, k * H_t]`` and the number of
the mask token in ``mask_token_id``, ``ptd_token_id`` or ``pard_token``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from spec_lab.core.options import brief
from spec_lab.drafters.draft_layers import read_interleaved
from spec_lab.drafters.drafter_files import DrafterFiles
from spec_lab.drafters.eagle.files import EAGLE3, eagle_settings, read_eagle3, unprefixed
from spec_lab.drafters.eagle.network import Eagle3Settings
from spec_lab.drafters.layouts import Entry, Layout
from spec_lab.drafters.peagle.network import PEagle, PEagleSettings
from spec_lab.models.target import Target

PEAGLE = Layout("P-EAGLE", (*EAGLE3.rows, Entry("mask_hidden", "mask_hidden")))
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Fields that number the mask token; the names of speculators, its authors and vLLM."""
READ = (*MASK_TOKENS, "parallel_drafting")
"""Fields that are read beside those of EAGLE-3."""


def read_peagle(
    path: str, target: Target, dtype: torch.dtype | None = None, options: Mapping[str, Any] | None = None
) -> PEagle:
    """Read a head for a target, onto its device. Arguments and errors as in ``eagle.files.read_eagle``."""
    with DrafterFiles.open(path, "a P-EAGLE head", target, options=options) as opened:
        files, prefixed = unprefixed(opened)
        files.expect("mask_hidden" in files.shapes, "mask_hidden")
        head_settings, interleaved = eagle_settings(files, prefixed, READ)
        assert isinstance(head_settings, Eagle3Settings)
        stated = {field.name: getattr(head_settings, field.name) for field in fields(Eagle3Settings)}
        settings = PEagleSettings(**stated, mask_token=_mask_token(files))
        network = read_eagle3(files, PEAGLE, lambda: PEagle(settings), dtype)
        if interleaved:
            read_interleaved(network.body)
        return network


def _mask_token(files: DrafterFiles) -> int:
    """The number of the mask token."""
    stated = {name: files.config[name] for name in MASK_TOKENS if files.config.get(name) is not None}
    if len({*map(str, stated.values())}) > 1:
        raise ValueError(f"{files.file} states several mask tokens: {brief(stated)}")
    if not stated:
        raise ValueError(
            f"{files.file} has none of {', '.join(MASK_TOKENS)}, which number the mask token of a P-EAGLE head: add "
            "the one it was trained with"
        )
    return files.whole(next(iter(stated)), minimum=0, maximum=files.target.vocabulary - 1)
