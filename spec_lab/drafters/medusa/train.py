"""The recipe of Medusa heads by self-distillation (2401.10774, section 3.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from spec_lab.core.options import Count, Share, Whole, WrongOption
from spec_lab.drafters.drafter_files import write_drafter
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.measure import of_texts
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models.packed import dense_copy
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective
from spec_lab.train.objectives import ChainLoss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead
from spec_lab.train.texts import Texts, frequent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MedusaRecipe(Recipe):
    """Medusa heads.

    Args:
        heads: K.
        layers: L, residual layers of each head.
        trunk: W, the width of a trunk that adds the pending token to the state; 0 for none, as in the paper.
        decay: weight of a head's loss over that of the head before it.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
        layout: of the files. "own": the heads share the target's LM head; "medusa": that of Medusa's authors, in which
            each head has an LM head of its own, which is trained too. It has no trunk.
        draft_vocab_size: D, tokens that are drafted, the most frequent of the target's texts; None: all. Of the layout
            "own": the heads compute those rows of the target's LM head.
    """

    heads: Count = 4
    layers: Count = 1
    trunk: Annotated[int, Whole(0)] = 0
    decay: Share = 1.0
    loss: ChainLoss = "kl"
    layout: Literal["own", "medusa"] = "own"
    draft_vocab_size: Count | None = None
    name: ClassVar = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "medusa" and self.trunk:
            raise ValueError("task.recipe.layout=medusa has no trunk: set task.recipe.trunk=0 or layout=own")
        if self.layout == "medusa" and self.draft_vocab_size is not None:
            raise ValueError(
                "task.recipe.layout=medusa has rows for all tokens: set task.recipe.draft_vocab_size=null or layout=own"
            )

    @property
    def depth(self) -> int:
        """See ``Recipe``."""
        return self.heads

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``. The heads begin as the identity on the state, and LM heads of their own as the target's."""
        head, h = TargetHead.of(target), target.services.hidden_size
        network = MedusaNetwork(self.heads, self.layers, h, self.trunk, head, self.layout == "medusa")
        network.to(target.lm.device)
        if self.draft_vocab_size is not None and self.draft_vocab_size < target.vocabulary:
            network.draft(frequent(paths, target.vocabulary, self.draft_vocab_size), target)
        if network.trunk_in is not None:
            drawn = torch.randn(self.trunk, 2 * h, generator=torch.Generator().manual_seed(seed))
            network.trunk_in.weight.data.copy_(drawn * (2 * h) ** -0.5)
        weighting = self.decay, self.loss, head.embedding_scale
        objective = ChainObjective(network, network, head, target.lm.dtype, *weighting, True, network.ids)
        facts = {"trunk": self.trunk} | ({} if network.ids is None else {"draft_vocab_size": len(network.ids)})
        return Beginning(network.train(), objective, facts, partial(calibrate, target))

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: for embeddings that are not scaled."""
        v, h = target.vocabulary, target.services.hidden_size
        if self.layout == "medusa":
            config = {
                "medusa_num_heads": self.heads, "medusa_num_layers": self.layers, "hidden_size": h, "vocab_size": v,
                "base_model_name_or_path": target.name,
            }  # fmt: skip
            return export_heads(module.published(), config, folder, facts)
        tensors = module.tensors()
        if self.trunk:
            tensors["trunk_in.weight"][:, h:] *= TargetHead.of(target).embedding_scale
        if module.ids is not None:
            tensors["token_map"] = module.ids.cpu()
        return export_medusa(tensors, v, target.sha256, folder, facts)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``; the heads always draft their most probable tokens."""
        return Medusa.load(target, str(folder), tree="x".join(["1"] * depth))

    def resume(self, module: Any, target: Target, folder: Path) -> str:
        """See ``Recipe``: of heads that share the target's LM head."""
        options = ("layout", self.layout, "own"), ("draft_vocab_size", self.draft_vocab_size, None)
        for option, value, wanted in options:
            if value != wanted:
                raise WrongOption(
                    f"start={folder}: only heads that share all rows of the target's LM head can be begun with, not "
                    f"with task.recipe.{option}={value}: set task.recipe.{option}={wanted or 'null'}, or start=null"
                )
        written, h = read_medusa(str(folder), target), target.services.hidden_size
        trunk = 0 if written.trunk is None else len(written.trunk.inner[1])
        if written.own_lm_heads is not None:
            raise WrongOption(
                f"start={folder} holds LM heads of its own, and only heads that share the target's can be begun with: "
                "name heads of layout=own, or set start=null"
            )
        if (sizes := (*written.weight.shape[:2], trunk)) != (self.heads, self.layers, self.trunk):
            heads, layers, trunk = sizes
            raise WrongOption(
                f"start={folder} holds {heads} heads of {layers} layers with a trunk of {trunk}: set "
                f"task.recipe.heads={heads}, task.recipe.layers={layers} and task.recipe.trunk={trunk}"
            )
        with torch.no_grad():
            for head, layer in np.ndindex(module.counts):
                module.heads[head][layer].weight.copy_(written.weight[head, layer])
                module.heads[head][layer].bias.copy_(written.bias[head, layer])
            if written.trunk is not None:
                for projection, (weight, bias) in (
                    (module.trunk_in, written.trunk.inner),
                    (module.trunk_out, written.trunk.outer),
                ):
                    projection.weight.copy_(weight)
                    projection.bias.copy_(bias)
                module.trunk_in.weight[:, h:] /= TargetHead.of(target).embedding_scale
        return written.sha256


def calibrate(target: Target, folder: Path, paths: Sequence[Path], temperature: float) -> None:
    """Write how often written heads are right on held-out answers, for trees that are calibrated. See ``Beginning``."""
    heads, lm = read_medusa(str(folder), target), target.lm
    lengths = [len(tokens) for path in paths for _, tokens in Texts.read(path).answers()]
    answers = (  # read again, file by file: the hidden states of all texts may not fit into memory
        (hidden.to(lm.device, lm.dtype), tokens.to(lm.device))
        for path in paths
        for hidden, tokens in Texts.read(path).answers()
    )
    if max(lengths, default=0) <= len(heads):
        log.warning(
            "none of the %d held-out answers has more tokens than there are heads, so the heads have no calibration: "
            "proposer.tree=calibrated, the default, needs one (set max_new_tokens to more than %d)",
            len(lengths), len(heads),
        )  # fmt: skip
        return
    accuracy = of_texts(heads, answers, temperature=temperature)
    accuracy.write(
        folder, text=f"{len(lengths)} answers that were held out of the training", target_sha256=target.sha256
    )


class MedusaNetwork(nn.Module):
    """Medusa heads in training, and what they draft (``chain.Drafts``).

    Args:
        heads: K.
        layers: L.
        hidden: H.
        width: W of the trunk; 0 for none.
        target: its LM head is shared, or
        own_lm_heads: each head begins with a copy of it.
    """

    def __init__(
        self, heads: int, layers: int, hidden: int, width: int, target: TargetHead, own_lm_heads: bool
    ) -> None:
        super().__init__()
        self.trunk_in = nn.Linear(2 * hidden, width) if width else None
        self.trunk_out = nn.Linear(width, hidden) if width else None
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.counts, self.target, self.lm_heads = (heads, layers), target, nn.ModuleList()
        self.ids: Tensor | None = None
        self.rows: Callable[[Tensor], Tensor] = target.lm_head
        if own_lm_heads:
            rows = cast(nn.Linear, dense_copy(target.model.get_output_embeddings())).weight
            for _ in range(heads):
                lm_head = nn.Linear(hidden, len(rows), bias=False)
                lm_head.weight.data.copy_(rows)
                self.lm_heads.append(lm_head)

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """The state, or the trunk's output, for each head: ``[B, T - 1, H]``, and all columns."""
        x = hidden[:, :-1]
        if self.trunk_in is not None and self.trunk_out is not None:
            x = x + self.trunk_out(silu(self.trunk_in(torch.cat([x, embedded[:, 1:]], -1))))
        columns = torch.arange(x.shape[1], device=text.first.device).expand(len(x), -1)
        for _ in range(len(self.heads)):
            yield x, columns

    def logits(self, position: int, states: Tensor) -> Tensor:
        """``[n, H] -> [n, V]``."""
        for layer in self.heads[position].children():
            states = states + silu(layer(states))
        logits: Tensor = self.lm_heads[position](states) if len(self.lm_heads) else self.rows(states)
        return logits

    def draft(self, ids: Tensor, target: Target) -> None:
        """Draft the tokens ``ids`` ``[D]`` only, by those rows of the target's LM head."""
        rows = target.services.lm_head_rows(ids)
        with torch.inference_mode(False):  # tensors of inference mode could not be kept for gradients
            weight = rows.weight.detach().float().clone()
            bias = None if rows.bias is None else rows.bias.detach().float().clone()

        def logits(states: Tensor) -> Tensor:
            return linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))

        self.ids, self.rows = ids.to(target.lm.device), logits

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this package's layout in ``drafters.medusa.files``, in float32."""
        named = {name: parameter.detach().float().clone() for name, parameter in self.named_parameters()}
        tensors = {name: tensor for name, tensor in named.items() if name.startswith("trunk")}
        for kind in ("weight", "bias"):
            every = [named[f"heads.{head}.{layer}.{kind}"] for head, layer in np.ndindex(self.counts)]
            tensors[kind] = torch.stack(every).unflatten(0, self.counts)
        return tensors

    def published(self) -> dict[str, Tensor]:
        """Return the tensors of the layout of Medusa's authors."""
        tensors = dict[str, Tensor]()
        for name, parameter in self.named_parameters():
            kind, head, *rest = name.split(".")
            if kind == "heads":
                tensors[f"{head}.{rest[0]}.linear.{rest[1]}"] = parameter
            else:
                tensors[f"{head}.{self.counts[1]}.weight"] = parameter
        return tensors


def export_medusa(
    tensors: dict[str, torch.Tensor], vocab_size: int, target_sha256: str, folder: Path, facts: Mapping[str, str] = {}
) -> str:
    """Write heads in this package's layout (``drafters.medusa.files``); return the SHA-256 of the weights file.

    Args:
        vocab_size: of the target.
    """
    heads, layers, hidden, _ = tensors["weight"].shape
    config = {
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "num_heads": heads,
        "num_layers": layers,
        "trunk_size": len(tensors.get("trunk_in.bias", ())),
        "shared_lm_head": True,
        "target_sha256": target_sha256,
    } | ({"draft_vocab_size": len(tensors["token_map"])} if "token_map" in tensors else {})
    return export_heads(tensors, config, folder, facts)


def export_heads(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], folder: Path, facts: Mapping[str, str]
) -> str:
    """Write tensors in bfloat16, and a config; return the SHA-256 of the weights file."""
    rounded = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return write_drafter(folder, config, rounded, facts)
