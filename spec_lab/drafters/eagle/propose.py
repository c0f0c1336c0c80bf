"""EAGLE: a small network drafts from the target's hidden states, level by level.

Sources: EAGLE-1 (2401.15077), EAGLE-2 (2406.16858: trees that grow by draft probabilities, ``rerank``), EAGLE-3
(2503.01840). The life cycle and the KV cache are those of every feature drafter (``drafters.feature_drafter``).
"""

from __future__ import annotations

from typing import Annotated, Literal, Unpack

from spec_lab.core.options import DrafterPath, Filled, Number, OneOf, Whole, checked
from spec_lab.drafters.eagle.files import read_eagle
from spec_lab.drafters.eagle.network import NormOutput
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.drafters.layer_conventions import Ends, Rope, Taps
from spec_lab.drafters.trimmed import Drafted, trimmed, trimmed_hash
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
    tokens: Drafted | None = None,
    taps: Taps | None = None,
    d2t: Literal["offset", "absolute"] | None = None,
    window: Annotated[int, Whole(0)] | None = None,
    rope: Rope | None = None,
    rope_theta: Annotated[float, Number(0, above=True)] | None = None,
    rope_scaling: Literal["own", "target", "none"] | None = None,
    norm_before_residual: bool | None = None,
    norm_output: NormOutput | None = None,
    embedding: Ends | None = None,
    lm_head: Ends | None = None,
    **options: Unpack[TreeOptions],
) -> FeatureDrafter:
    """Read an EAGLE head and choose its trees.

    Args:
        target: whose hidden states the head reads.
        path: folder or hub name of an EAGLE-1, EAGLE-2 or EAGLE-3 head, in safetensors.
        revision: branch, tag or commit of a hub name; None: main.
        dtype: of the head: bfloat16, float16, float32, float64; None: the target's.
        tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
            target's stop tokens; None: all.
        taps: numbers of the hidden states that are read, in this order: i is the input of layer i, L (of L layers) is
            before the final norm, -1 after it; None: as the files are read, and so below.
        d2t: the table's numbers are added to those of draft tokens (offset), or are the target's tokens (absolute).
        window: positions that a query attends to, its own included; 0: all.
        rope: rotated numbers of a query are i and i + d / 2 (neox), or neighbours (interleaved).
        rope_theta: base of the rotary embeddings.
        rope_scaling: of the rotary embeddings: own, as in the head's config; target, as in the target's; none.
        norm_before_residual: whether the residual connection starts from the normed features.
        norm_output: the LM head reads the normed state and the state before is fed back (plain), the normed one is
            (feedback), or there is no norm (raw).
        embedding: own or the target's.
        lm_head: own or the target's.
        options: of the trees.

    Raises:
        ValueError: a wrong option; a head for another target; a malformed file.
        OSError: a file is missing.
    """
    plan = TreePlan.read(**options)
    own_dtype = None if dtype is None else DTYPES[dtype]
    path = drafter_folder(path, revision)
    reading = {
        "taps": taps, "d2t": d2t, "window": window, "rope": rope, "rope_theta": rope_theta,
        "rope_scaling": rope_scaling, "norm_before_residual": norm_before_residual, "norm_output": norm_output,
        "embedding": embedding, "lm_head": lm_head,
    }  # fmt: skip
    network = trimmed(read_eagle(path, target, own_dtype, reading), tokens, target)
    plan.check_width(network.tokens)
    pack(network)
    return FeatureDrafter(network, target, plan, network.name, trimmed_hash(path, network.kept), own_dtype)
