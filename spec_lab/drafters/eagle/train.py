"""The recipe of EAGLE-3 heads.

Source: EAGLE-3 (2503.01840, section 3.2: unrolled steps, soft cross-entropy on the draft vocabulary, no feature loss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from spec_lab.core.options import Count, Share, Whole
from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.eagle.conventions import usual_taps
from spec_lab.drafters.eagle.files import write_eagle3
from spec_lab.drafters.eagle.network import Eagle3, Eagle3Settings
from spec_lab.models.merged import plain_weights
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective, Unrolled
from spec_lab.train.objectives import ChainLoss, Weights
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of
from spec_lab.train.texts import Texts, frequent
from spec_lab.train.unroll import drawn_columns


@dataclass(frozen=True)
class Eagle3Recipe(Recipe):
    """An EAGLE-3 head of Llama layers, trained by training-time test (2503.01840).

    Args:
        unrolls: tokens that are drafted in training; each one's loss has ``decay`` times the weight of the one before.
        decay: see there.
        weights: of the losses of unrolls: "decay", or "dpace", which follow from the draft's own probabilities.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
        draft_vocab_size: tokens that the head can draft, the most frequent of the target's texts; None for all.
        taps: numbers of the hidden states that are read; None: 2, L // 2 and L - 3 as in the paper, or, where these
            are not different, spread over the layers.
        layers: decoder layers.
        intermediate_size: of the MLP; None: as in the target.
        heads: attention heads; None: as in the target, of which the head has the hidden size.
        from_target: begin as the target's last layer and final norm (``begin_as_target``), not with random weights.
        window: W, the sliding window of all layers, which ends at the column of an unroll (``AttentionKind.anchored``);
            None: full attention.
        retention: unroll k is learned in a share ``max(retention ** k, min_retention)`` of the columns, drawn at
            random; 1 for all, as in the paper. A text has the same ones whenever it is seen.
        min_retention: see there.
    """

    unrolls: Annotated[int, Whole(1, 64)] = 7
    decay: Share = 0.8
    weights: Weights = "decay"
    loss: ChainLoss = "kl"
    draft_vocab_size: Count | None = 32000
    taps: tuple[Annotated[int, Whole(0)], ...] | None = None
    layers: Annotated[int, Whole(1, 64)] = 1
    intermediate_size: Count | None = None
    heads: Count | None = None
    from_target: bool = False
    window: Count | None = None
    retention: Share = 1.0
    min_retention: Share = 0.2
    name: ClassVar = "eagle3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and not self.taps:
            raise ValueError("task.recipe.taps must be null or a list of hidden states' numbers, not an empty one")
        if self.retention < 1 and (self.loss == "tau" or self.weights != "decay"):
            chosen = "loss=tau" if self.loss == "tau" else f"weights={self.weights}"
            raise ValueError(
                f"task.recipe.retention must be 1 for task.recipe.{chosen} (got {self.retention:g}), which is of whole "
                "chains: a smaller retention leaves tokens of chains out"
            )

    @property
    def depth(self) -> int:
        """See ``Recipe``."""
        return self.unrolls

    def _taps(self, target: Target) -> tuple[int, ...]:
        last = target.services.num_layers
        if self.taps is not None:
            if max(self.taps) > last:
                raise ValueError(
                    f"task.recipe.taps names hidden state {max(self.taps)}, but {target.name} has states 0 to {last}"
                )
            return tuple(sorted(self.taps))  # as they are read (``drafters.eagle.files``)
        usual = usual_taps(last)
        return usual if 0 < usual[0] < usual[1] < usual[2] else (1, max(1, last // 2), max(1, last - 1))

    def states(self, target: Target) -> tuple[int, ...]:
        """See ``Recipe``."""
        return (*self._taps(target), -1)

    def _settings(self, target: Target) -> Eagle3Settings:
        h, v = target.services.hidden_size, target.vocabulary
        layer = layer_of(target, self.heads, self.intermediate_size)
        width = min(self.draft_vocab_size or v, v)
        windows = (self.window,) * self.layers if self.window else ()
        return Eagle3Settings(
            layer, h, h, v, self._taps(target), width, self.layers, windows=windows, anchored=bool(windows)
        )

    def _network(self, target: Target) -> Eagle3:
        return Eagle3(self._settings(target))

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``. The LM head begins as the target's rows."""
        network = random_network(self._network(target), target, torch.float32, seed)
        settings, device, h = network.settings, target.lm.device, target.services.hidden_size
        width = settings.draft_vocab_size
        assert network.lm_head is not None and width is not None
        network.ids = frequent(paths, settings.vocab_size, width).to(device)
        with torch.no_grad():
            # The rows of a linear LM head are its logits of the unit vectors.
            rows = target.services.lm_head(torch.eye(h, device=device, dtype=target.lm.dtype))
            network.lm_head.weight.copy_(rows.T[network.ids])
            if self.from_target:
                begin_as_target(network, target.model.model)
        network.requires_grad_(True).train()
        head = TargetHead.of(target)
        objective = self._objective(network, head, target.lm.dtype, seed)
        return Beginning(network, objective, {"taps": list(settings.taps), "draft_vocab_size": width})

    def _objective(self, network: Any, head: TargetHead, dtype: torch.dtype, seed: int) -> ChainObjective:
        kept = partial(self._kept, network, seed)
        return eagle3_objective(network, head, dtype, self.unrolls, self.decay, self.loss, self.weights, kept)

    def _kept(self, network: Any, seed: int, text: Texts) -> Sequence[Tensor]:
        if not network.training or self.retention == 1:
            return ()
        return drawn_columns(text, self.unrolls, self.retention, self.min_retention, seed)

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: in the format of speculators."""
        kinds = target.model.config.architectures or [type(target.model).__name__]
        return write_eagle3(module, folder, target.name, kinds[0], facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return eagle.load(target, str(folder), depth=depth)


def eagle3_objective(
    network: Eagle3,
    target: TargetHead,
    dtype: torch.dtype,
    unrolls: int = 7,
    decay: float = 0.8,
    kind: ChainLoss = "kl",
    weights: Weights = "decay",
    kept: Callable[[Texts], Sequence[Tensor]] = lambda text: (),
) -> ChainObjective:
    """Return the loss of an EAGLE-3 head: the sum over unrolls, each ``decay`` times the one before it.

    Args:
        target: its embedding and LM head.
        dtype: of the target.
        unrolls: how many tokens are drafted.
        decay: weight of an unroll over that of the one before it.
        weights: of the unrolls.
        kept: to which columns of texts each unroll is limited (``train.unroll.columns_of``).
    """
    final, normed = network.settings.target_hidden_size, network.settings.norm_output == "feedback"

    def run(x: Tensor, positions: Tensor, cache: Any) -> Tensor:
        out: Tensor = network(x, positions, cache)
        return network.norm(out) if normed else out

    def lm_head(states: Tensor) -> Tensor:
        assert network.lm_head is not None
        logits: Tensor = network.lm_head(states if normed else network.norm(states))
        return logits

    drafts = Unrolled(
        run, lambda embedded, feature: torch.cat([embedded, feature], -1), lm_head, unrolls,
        lambda hidden: network.features(hidden[..., :-final]), network.kinds, kept,
    )  # fmt: skip
    return ChainObjective(network, drafts, target, dtype, decay, kind, ids=network.ids, final=final, weights=weights)


@torch.no_grad()
def begin_as_target(network: Eagle3, target: Any) -> None:
    """Copy the target's last decoder layer into the head's first, and its final norm.

    Queries, keys and values read the features as the target's layer reads its input, and the embedding with half their
    random weights. The features are the last tap and a tenth of their random weights of all taps.

    Args:
        network: with random weights.
        target: the decoder of a model of transformers.

    Raises:
        ValueError: its last layer has other tensors, or other shapes.
    """
    h, parameters = network.settings.hidden_size, dict(network.body.layers[0].named_parameters())
    given = plain_weights(target.layers[-1])
    halves = {f"self_attn.{name}_proj.weight" for name in "qkv"}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    shapes |= {name: (shapes[name][0], h) for name in halves & shapes.keys()}
    if shapes != {name: tuple(weight.shape) for name, weight in given.items()}:
        raise ValueError(
            "task.recipe.from_target=true needs a target with Llama layers, and a head with as many attention heads "
            "and as wide an MLP"
        )
    for name, parameter in parameters.items():
        if name in halves:
            parameter[:, :h] *= 0.5
        (parameter[:, h:] if name in halves else parameter).copy_(given[name])
    network.hidden_norm.weight.copy_(parameters["input_layernorm.weight"])
    network.norm.weight.copy_(target.norm.weight)
    assert network.fc is not None
    network.fc.weight *= 0.1
    network.fc.weight[:, -h:] += torch.eye(h, device=network.fc.weight.device)
