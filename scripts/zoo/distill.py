"""Self-distillation: a draft model and Medusa heads learn the target's distributions, on plain and on generated text.

The bundled draft model and Medusa heads were trained by it; other drafters learn by the recipes and ``fit``.

Letters: B rows, T tokens per row, H hidden size, V vocabulary size, K heads, L residual layers of a head, W width of
the trunk. Sources: Medusa (2401.10774, self-distillation in section 3.3); DistillSpec (2310.08461) for the draft model;
Hydra (2402.05109) and DeepSeek-V3's multi-token prediction (2412.19437, section 2.2) for heads that read the embedding
of the pending token.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaForCausalLM

from spec_lab.core.options import whole
from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.train.fit import order_of
from spec_lab.train.trainer import Plan, Trainer, schedule

from .batches import Batches
from .generate import Generation, TextPart
from .soft_losses import soft_cross_entropy, unembedded_cross_entropy

log = logging.getLogger(__name__)


class HeadsInTraining(torch.nn.Module):
    """A trunk that adds the pending token to the target's hidden state, and K Medusa heads of L residual layers.

    The trunk is ``x = h + W2 silu(W1 [h; e] + b1) + b2`` with the pending token's embedding e, multiplied by ``scale``.
    Each layer of a head is ``x + silu(W x + b)``. The LM head is the target's. The initial weights make everything the
    identity on h.

    Args:
        heads: K.
        layers: L.
        hidden: H.
        width: W.
        scale: factor of the embeddings.
    """

    def __init__(self, heads: int, layers: int, hidden: int, width: int, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        linear, self.counts = torch.nn.Linear, (heads, layers)
        self.trunk_in, self.trunk_out = linear(2 * hidden, width), linear(width, hidden)
        self.heads = torch.nn.ModuleList(
            torch.nn.ModuleList(linear(hidden, hidden) for _ in range(layers)) for _ in range(heads)
        )
        for name, parameter in self.named_parameters():
            if name == "trunk_in.weight":
                torch.nn.init.normal_(parameter, std=(2 * hidden) ** -0.5)
            else:
                torch.nn.init.zeros_(parameter)

    def trunk(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the trunk's output ``[..., H]`` for hidden states and the embeddings of the tokens after them."""
        return hidden + self.trunk_out(silu(self.trunk_in(torch.cat([hidden, embedding * self.scale], -1))))

    def head(self, k: int, x: Tensor) -> Tensor:
        """Return head k's input to the LM head ``[..., H]``, from the trunk's output ``[..., H]``."""
        for layer in self.heads[k].children():
            x = x + silu(layer(x))
        return x


@dataclass(frozen=True)
class Distillation:
    """Training of draft model and heads: on plain text, then on generated parts, in a new order in each pass.

    Args:
        heads: K, the number of heads.
        layers: L, the residual layers of a head.
        width: W, the width of the trunk.
        rows: rows of a training step.
        part: rows that one thread computes.
        warmup: steps in which the learning rates rise.
        plain_steps: steps on plain text.
        passes: passes over the generated parts.
        decay: share of all steps in which the learning rates fall.
        plan: of the heads' optimisers.
    """

    heads: int = 4
    layers: int = 1
    width: int = 1536
    rows: int = 16
    part: int = 8
    warmup: int = 30
    plain_steps: int = 560
    passes: float = 1.5
    decay: float = 0.4
    plan: Plan = field(default_factory=lambda: Plan(muon_rate=4e-3, adamw_rate=2e-3, weight_decay=0.0, seed=2))

    def __post_init__(self) -> None:
        for name in ("heads", "width", "rows", "part"):
            whole(f"distillation.{name}", getattr(self, name))
        if self.rows % self.part:
            raise ValueError(f"distillation.rows must be a multiple of part {self.part}, not {self.rows}")


def target_probs(target: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """Return the target's probabilities p ``[B, T, V]`` at temperature 1, in the dtype of the hidden states."""
    with torch.no_grad():
        logits = target.lm_head(hidden)
        for row in logits:
            row.copy_(row.float().softmax(-1))
    return logits


def heads_loss(heads: HeadsInTraining, target: LlamaForCausalLM, text: TextPart, p: Tensor) -> list[Tensor]:
    """Return each head's cross-entropy to the target's distributions: state t and token t + 1 predict p at t + 1 + k.

    In text that continues a prefix, only predictions of the continuation count; in greedy continuations the target is
    the most probable token.

    Args:
        heads: the heads.
        target: the target.
        text: token ids and hidden states.
        p: the target's probabilities ``[B, T, V]`` on that text.
    """
    length = text.ids.shape[1]
    first = 0 if text.prefix == length else max(0, text.prefix - 2)
    truth, weight = p.argmax(-1) if text.temperature == 0 else p, target.get_output_embeddings().weight
    with torch.no_grad():
        embedding = target.get_input_embeddings()(text.ids[:, first + 1 :])
    mixed = heads.trunk(text.hidden[:, first:-1], embedding)
    losses = []
    for k in range(len(heads.heads)):
        states = heads.head(k, mixed[:, : length - 1 - k - first]).flatten(0, 1)
        losses.append(unembedded_cross_entropy(states, weight, truth[:, first + 1 + k :].flatten(0, 1)))
    return losses


def draft_loss(draft: torch.nn.Module, ids: Tensor, p: Tensor) -> Tensor:
    """Return the draft model's cross-entropy to the target's probabilities ``p [B, T, V]`` after ``ids [B, T]``."""
    logits = draft(input_ids=ids, use_cache=False).logits
    return soft_cross_entropy(logits.flatten(0, 1), p.flatten(0, 1))


def _texts(
    target: LlamaForCausalLM,
    streams: Path,
    paths: list[Path],
    order: list[tuple[int, int]],
    plan: Distillation,
    text: Generation,
    first: int,
) -> Iterator[list[TextPart]]:
    """Yield the text of every step from ``first`` on, in pieces of ``plan.part`` rows; plain text without states."""
    batches = Batches(streams, dict(text.mix), text.length, plan.plan.seed)
    for step in range(first, plan.plain_steps):
        ids = torch.from_numpy(batches.at(step * plan.rows, plan.rows))[:, : text.length]
        yield [TextPart(piece, torch.empty(0), text.length, 1.0) for piece in ids.split(plan.part)]
    at = -1
    for part, row in order[max(0, first - plan.plain_steps) :]:
        if part != at:
            read, at = TextPart.read(paths[part]), part
        rows = [slice(start, start + plan.part) for start in range(row, row + plan.rows, plan.part)]
        yield [TextPart(read.ids[chunk], read.hidden[chunk], read.prefix, read.temperature) for chunk in rows]


def distill(
    target: LlamaForCausalLM,
    draft: Trainer[LlamaForCausalLM],
    heads: Trainer[HeadsInTraining],
    streams: Path,
    generated: Path,
    out: Path,
    plan: Distillation,
    text: Generation,
    save_seconds: float = 120,
    stop_after: int | None = None,
) -> None:
    """Train ``draft`` and ``heads`` on the target's distributions, or resume from the checkpoint in ``out``.

    In greedy parts the heads learn the target's most probable tokens instead.

    Args:
        target: the target.
        draft: trainer of the draft model; its threads work in parallel on the pieces of a step.
        heads: trainer of the heads.
        streams: folder of the token streams (``tokens.Batches``).
        generated: folder of the generated parts (``generate.generate``).
        out: folder of the checkpoint.
        plan: of this training.
        text: how the parts were generated.
        save_seconds: seconds between two checkpoints.
        stop_after: step at which to stop early, as after a kill; None for the last one.

    Raises:
        ValueError: parts cannot be cut into steps; the checkpoint belongs to another training.
    """
    paths = sorted(generated.glob("part-*.safetensors"))
    if text.batch % plan.rows:
        raise ValueError(
            f"generation.batch must be a multiple of distillation.rows {plan.rows}, not {text.batch}: the rows of a "
            "part are cut into steps"
        )
    order = order_of(len(paths), plan.rows, text.batch, plan.passes)
    total = plan.plain_steps + len(order)
    stable = int(total * (1 - plan.decay))
    out.mkdir(exist_ok=True)
    facts = json.dumps({"parts": len(paths), "plan": asdict(plan)}, sort_keys=True)
    checkpoint, both = out / "checkpoint.safetensors", {"draft": draft, "heads": heads}
    if checkpoint.exists():
        _restore(both, checkpoint, facts)
        log.info("resumed at step %d", draft.step)
    target.requires_grad_(False)
    pool, share, recent, began = draft.pool, plan.part / plan.rows, [], time.monotonic()
    saved = began

    def known(piece: TextPart) -> tuple[TextPart, Tensor]:
        if not piece.hidden.numel():
            with torch.no_grad():
                hidden = target.model(input_ids=piece.ids, use_cache=False).last_hidden_state
            piece = TextPart(piece.ids, hidden, piece.prefix, piece.temperature)
        return piece, target_probs(target, piece.hidden)

    for pieces in _texts(target, streams, paths, order, plan, text, draft.step):
        if draft.step == stop_after:
            break
        factor = schedule(draft.step, plan.warmup, stable, total - stable)
        with_probs = list(pool.map(known, pieces))
        seen: list[list[float]] = []

        def of_heads(piece: TextPart, p: Tensor, seen: list[list[float]] = seen) -> Tensor:
            losses = torch.stack(heads_loss(heads.model, target, piece, p))
            seen.append(losses.tolist())
            return losses.sum() * share

        def of_draft(piece: TextPart, p: Tensor) -> Tensor:
            return draft_loss(draft.model, piece.ids, p) * share

        loss, _ = draft.update([partial(of_draft, *arguments) for arguments in with_probs], factor)
        heads.update([partial(of_heads, *arguments) for arguments in with_probs], factor)
        recent.append([loss, *np.mean(seen, 0)])
        if draft.step % 20 == 0:
            means, took = np.round(np.mean(recent, 0), 3).tolist(), time.monotonic() - began
            log.info("step %d of %d, losses %s, %.0f s", draft.step, total, means, took)
            recent.clear()
        if time.monotonic() - saved > save_seconds:
            _save(both, checkpoint, facts)
            saved = time.monotonic()
    _save(both, checkpoint, facts)


def _save(trainers: Mapping[str, Trainer], path: Path, facts: str) -> None:
    """Write all trainers to one file, replaced atomically; a resumed training must have the same ``facts``."""
    tensors = {f"{name}.{key}": t for name, trainer in trainers.items() for key, t in trainer.tensors().items()}
    save_tensors(tensors, path, {"step": str(next(iter(trainers.values())).step), "facts": facts})


def _restore(trainers: Mapping[str, Trainer], path: Path, facts: str) -> None:
    tensors, metadata = read_tensors(path)
    step, then = int(metadata["step"]), metadata.get("facts")
    if then != facts:
        raise ValueError(f"{path} belongs to a training with {then}, not {facts}: move it away to start a new one")
    for name, trainer in trainers.items():
        state = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        trainer.restore(state, step, trainer.sequences)


def shipped(heads: HeadsInTraining) -> dict[str, Tensor]:
    """Return the published tensors: ``weight [K, L, H, H]``, ``bias [K, L, H]``, a trunk for unscaled embeddings."""
    tensors = {name: p.detach().float().clone() for name, p in heads.named_parameters() if name.startswith("trunk")}
    tensors["trunk_in.weight"][:, tensors["trunk_out.bias"].numel() :] *= heads.scale
    named = dict(heads.named_parameters())
    for kind in ("weight", "bias"):
        every = [named[f"heads.{k}.{layer}.{kind}"].detach().float() for k, layer in np.ndindex(heads.counts)]
        tensors[kind] = torch.stack(every).unflatten(0, heads.counts)
    return tensors
