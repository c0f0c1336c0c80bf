"""EAGLE: a small network drafts from the target's hidden states, level by level.

Sources: EAGLE-1 (2401.15077), EAGLE-2 (2406.16858: trees that grow by draft probabilities, ``rerank``), EAGLE-3
(2503.01840). The life cycle and the KV cache are those of every feature drafter (``drafters.feature_drafter``).
"""

from __future__ import annotations

from typing import Annotated, Unpack

from spec_lab.core.options import DrafterPath, Filled, OneOf, checked
from spec_lab.drafters.drafter_files import Taps
from spec_lab.drafters.eagle.files import read_eagle
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.hub import drafter_folder
from spec_lab.models.packed import pack
from spec_lab.models.placement import DTYPES
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreeOptions, TreePlan


@checked
def load(
    target: Target,
    path: Annotated[str, DrafterPath("an EAGLE head", ("target_hidden_size", "hidden_size"), ("vocab_size",))],
    revision: Filled | None = None,
    dtype: Annotated[str, OneOf(DTYPES)] | None = None,
    taps: Taps | None = None,
    **options: Unpack[TreeOptions],
) -> FeatureDrafter:
    """Read an EAGLE head and choose its trees.

    Args:
        target: whose hidden states the head reads.
        path: folder or hub name of an EAGLE-1, EAGLE-2 or EAGLE-3 head, in safetensors.
        revision: branch, tag or commit of a hub name; None: main.
        dtype: of the head: bfloat16, float16, float32, float64; None: the target's.
        taps: numbers of the hidden states that are read, in this order: i is the input of layer i, L (of L layers) is
            before the final norm, -1 after it; None: as the files are read.
        options: of the trees.

    Raises:
        ValueError: a wrong option; a head for another target; a malformed file.
        OSError: a file is missing.
    """
    plan = TreePlan.read(**options)
    own_dtype = None if dtype is None else DTYPES[dtype]
    path = drafter_folder(path, revision)
    network = read_eagle(path, target, own_dtype, {"taps": taps})
    plan.check_width(network.tokens)
    pack(network)
    return FeatureDrafter(network, target, plan, network.name, weights_hash(path), own_dtype)
