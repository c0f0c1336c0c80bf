"""Multi-token prediction: modules that were trained with the target draft from its hidden states.

Source: DeepSeek-V3 (2412.19437, section 2.2). One module is usual, and drafts every level of a tree from its own output
one level above. The network is ``drafters.mtp.network``; life cycle and KV cache are those of every feature drafter.
"""

from __future__ import annotations

from typing import Annotated, Unpack

from spec_lab.core.options import DrafterPath, Filled, checked
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.drafters.layer_conventions import Positions, Taps
from spec_lab.drafters.mtp.files import in_target, read_mtp
from spec_lab.drafters.trimmed import Drafted, trimmed, with_tokens
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.hub import drafter_folder
from spec_lab.models.packed import pack
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreeOptions, TreePlan


@checked
def load(
    target: Target,
    path: Annotated[str, DrafterPath("MTP modules", ("hidden_size",), converts=False)] | None = None,
    revision: Filled | None = None,
    tokens: Drafted | None = None,
    taps: Taps | None = None,
    positions: Positions | None = None,
    **options: Unpack[TreeOptions],
) -> FeatureDrafter:
    """Read MTP modules and choose their trees.

    Args:
        target: whose hidden states they read.
        path: folder or hub name of MTP modules, in safetensors; None: those in the target's own checkpoint.
        revision: branch, tag or commit of a hub name; None: main.
        tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
            target's stop tokens; None: all.
        taps: the number of the hidden state that is read: -1 after the final norm, L (of L layers) before it; None: -1.
        positions: by how many rotary positions the first drafted row comes after the last computed one; None: 1.
        options: of the trees.

    Raises:
        ValueError: a wrong option; no module; modules for another target; a malformed file.
        OSError: a file is missing.
    """
    plan = TreePlan.read(**options)
    plan.check_width(target.vocabulary)
    if path is not None and not in_target(path, target):
        path = drafter_folder(path, revision)
    network = trimmed(read_mtp(path, target, {"taps": taps, "positions": positions}), tokens, target)
    plan.check_width(network.tokens)
    pack(network)
    sha256 = target.sha256 if in_target(path, target) else weights_hash(str(path))
    sha256 = with_tokens(sha256, network.kept)
    return FeatureDrafter(network, target, plan, "mtp", sha256, skip=network.skip)
