"""The network of P-EAGLE: that of EAGLE-3, which reads mask rows in place of its own outputs.

Source: P-EAGLE (2602.01469). Letters as in ``eagle.network``. After the inputs of the computed positions follow rows of
``[embed(mask token); fc(mask_hidden)]`` at the next positions, where ``mask_hidden`` passes ``fc`` and the norms before
it as taps do. All attention is causal. The last computed position drafts the first level, mask row i level i + 1; so
along a path the tokens are independent, with a product of distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.eagle.network import Eagle3, Eagle3Settings
from spec_lab.models.target import Target
from spec_lab.runners.attention import AttentionKind


@dataclass(frozen=True)
class PEagleSettings(Eagle3Settings):
    """The sizes and kind of a P-EAGLE head.

    Args:
        mask_token: its number.
    """

    mask_token: int = 0


class PEagle(Eagle3):
    """The network, without weights until ``draft_layers.load_weights``."""

    settings: PEagleSettings

    def __init__(self, settings: PEagleSettings) -> None:
        super().__init__(settings)
        assert self.fc is not None, "a P-EAGLE head reads taps"
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.fc.in_features, device="meta"))

    @property
    def kinds(self) -> dict[int, AttentionKind]:
        """Kinds of attention, by layer: rows attend to rows before them."""
        anchored = self.body.anchored
        return {
            layer: AttentionKind(window, causal=True, anchored=anchored and window is not None)
            for layer, window in enumerate(self.body.windows)
        }

    def masks(self, count: int) -> Tensor:
        """The inputs ``[count, 2H]`` of mask rows."""
        tokens = torch.full((count,), self.settings.mask_token, device=self.mask_hidden.device)
        return self.inputs(tokens, self.features(self.mask_hidden[0]).expand(count, -1))

    def rows(self, x: Tensor, positions: Tensor, cache: Any, rows: Tensor) -> Tensor:
        """See ``runners.block_lm.BlockLayers``."""
        outputs: Tensor = self(x, positions, cache)[0].index_select(0, rows)
        return outputs

    def toy(self, target: Target) -> PEagle:
        """As in ``Eagle3``; the last token is the mask token."""
        settings = super().toy(target).settings
        settings = replace(settings, mask_token=target.vocabulary - 1)
        return self.trimmed_like(random_network(PEagle(settings), target))
