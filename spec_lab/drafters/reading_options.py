"""Options of drafters whose files leave open how they are read (``core.reading``), and of their trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from spec_lab.core.options import Number, Whole
from spec_lab.drafters.draft_layers import N
from spec_lab.drafters.eagle.network import NormOutput
from spec_lab.drafters.layer_conventions import Positions, Rope, Scaling, Taps, WeightSource, WindowFrom
from spec_lab.drafters.trimmed import trimmed, trimmed_hash
from spec_lab.models.hub import drafter_folder
from spec_lab.models.packed import pack
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreeOptions, TreePlan


class ReadingOptions(TreeOptions, total=False):
    """How a drafter's files are read; None: as they are read without the option.

    Args:
        taps: numbers of the hidden states that are read, in this order: i is the input of layer i, L (of L layers) is
            before the final norm, -1 after it; None: as the files are read, and so below.
        d2t: the table's numbers are added to those of draft tokens (offset), or are the target's tokens (absolute).
        window: positions that a query attends to, its own included, in layers that have a window (in all where none
            has); 0: all.
        window_from: windows of drafted rows end at each row itself (query), as vLLM serves them, or at the last
            computed position (anchor), as speculators trains them.
        positions: by how many rotary positions the first drafted row comes after the last computed one: 1; 2 leaves one
            out, 0 repeats the last.
        rope: rotated numbers of a query are i and i + d / 2 (neox), or neighbours (interleaved).
        rope_theta: base of the rotary embeddings.
        rope_scaling: of the rotary embeddings: own, as in the drafter's config; target, as in the target's; none.
    """

    taps: Taps | None
    d2t: Literal["offset", "absolute"] | None
    window: Annotated[int, Whole(0)] | None
    window_from: WindowFrom | None
    positions: Positions | None
    rope: Rope | None
    rope_theta: Annotated[float, Number(0, above=True)] | None
    rope_scaling: Scaling | None


class HydraOptions(TreeOptions, total=False):
    """How the files of Hydra heads are read; None: as they are read without the option.

    Args:
        taps: the number of the hidden state that is read: -1 after the final norm, L (of L layers) before it.
        lm_head: own or the target's.
    """

    taps: Taps | None
    lm_head: WeightSource | None


class EagleOptions(ReadingOptions, total=False):
    """How the files of an EAGLE head are read.

    Args:
        norm_before_residual: whether the residual connection starts from the normed features.
        norm_before_fc: whether the concatenated hidden states are normed.
        fc_norm: whether each of the hidden states is normed.
        norm_output: the LM head reads the normed state and the state before is fed back (plain), the normed one is
            (feedback), or there is no norm (raw).
        embedding: own or the target's.
        lm_head: own or the target's.
    """

    norm_before_residual: bool | None
    norm_before_fc: bool | None
    fc_norm: bool | None
    norm_output: NormOutput | None
    embedding: WeightSource | None
    lm_head: WeightSource | None


class BlockOptions(ReadingOptions, total=False):
    """How the files of a block drafter are read.

    Args:
        anchor: whether row i of a block predicts its "own" position (DFlash) or the "next" (DSpark).
        causal: layers in which rows of a block attend to rows before them only: all, windows or none.
    """

    anchor: Literal["own", "next"] | None
    causal: Literal["all", "windows", "none"] | None


def read_drafter(
    read: Callable[..., N],
    target: Target,
    path: str,
    revision: str | None,
    tokens: str | int | None,
    options: Mapping[str, Any],
    declared: Any,
) -> tuple[N, TreePlan, str]:
    """Return a drafter's network, ready to draft, its trees, and the hash of its weights.

    Args:
        read: reads the files in a folder: called with it and, as ``options``, by convention how they are read, None
            where that is left to them.
        path, revision, tokens: the options of these names.
        options: of the trees and how the files are read, as given.
        declared: the TypedDict of all such options that the drafter has.

    Raises:
        ValueError: a wrong option; a drafter for another target; a malformed file.
        OSError: a file is missing.
    """
    trees = TreeOptions.__optional_keys__
    plan = TreePlan.read(**{name: value for name, value in options.items() if name in trees})
    plan.check_width(target.vocabulary)
    reading = {name: options.get(name) for name in declared.__optional_keys__ - trees}
    folder = drafter_folder(path, revision)
    network = trimmed(read(folder, options=reading), tokens, target)
    plan.check_width(network.tokens)
    network.fuse()
    pack(network)
    return network, plan, trimmed_hash(folder, network.kept)
