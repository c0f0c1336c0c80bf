"""EAGLE: a small network drafts from the target's hidden states, level by level.

Sources: EAGLE-1 (2401.15077), EAGLE-2 (2406.16858: trees that grow by draft probabilities, ``rerank``), EAGLE-3
(2503.01840). The life cycle and the KV cache are those of every feature drafter (``drafters.feature_drafter``).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Unpack

from spec_lab.core.options import DrafterPath, Filled, OneOf, checked
from spec_lab.drafters.eagle.files import read_eagle
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.drafters.reading_options import EagleOptions, read_drafter
from spec_lab.drafters.trimmed import Drafted
from spec_lab.models.placement import DTYPES
from spec_lab.models.target import Target


@checked
def load(
    target: Target,
    path: Annotated[str, DrafterPath("an EAGLE head", ("target_hidden_size", "hidden_size"), ("vocab_size",))],
    revision: Filled | None = None,
    dtype: Annotated[str, OneOf(DTYPES)] | None = None,
    tokens: Drafted | None = None,
    **options: Unpack[EagleOptions],
) -> FeatureDrafter:
    """Read an EAGLE head and choose its trees.

    Args:
        target: whose hidden states the head reads.
        path: folder or hub name of an EAGLE-1, EAGLE-2 or EAGLE-3 head, in safetensors.
        revision: branch, tag or commit of a hub name; None: main.
        dtype: of the head: bfloat16, float16, float32, float64; None: the target's.
        tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
            target's stop tokens; None: all.
        options: of the trees, and how the files are read.

    Raises:
        ValueError: a wrong option; a head for another target; a malformed file.
        OSError: a file is missing.
    """
    own_dtype = None if dtype is None else DTYPES[dtype]
    read = partial(read_eagle, target=target, dtype=own_dtype)
    network, plan, sha256 = read_drafter(read, target, path, revision, tokens, options, EagleOptions)
    return FeatureDrafter(network, target, plan, network.name, sha256, own_dtype, network.skip)
