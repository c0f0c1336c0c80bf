"""Self-distillation: the target continues training text; draft and Medusa heads learn its laws on what it wrote.

Letters: B rows, T tokens a row, H hidden size, V vocabulary, K heads, L residual layers a head.
Sources: Medusa (2401.10774, self-distillation in section 3.3), DistillSpec (2310.08461) for the draft.
"""

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import LlamaForCausalLM, StaticCache

from spec_lab.train.fast import soft_cross_entropy
from spec_lab.train.pretrain import Trainer, schedule
from spec_lab.train.tokens import Batches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """How text is continued. Part i of the data depends on this and on i alone.

    Args:
        batch: rows a part. length: tokens a row, prefix included.
        prefixes: prefix lengths, taken in turn. The whole ``length`` among them means a part of plain text.
        temperatures: taken in turn; 0 is greedy.
    """

    batch: int = 64
    length: int = 256
    prefixes: tuple[int, ...] = (32, 96, 64, 128)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    plain_every: int = 5
    seed: int = 1
    mix: tuple[tuple[str, float], ...] = (("code", 0.7), ("json", 0.12), ("prose", 0.18))


@torch.inference_mode()
def continue_text(
    target: LlamaForCausalLM, prefix: torch.Tensor, length: int, temperature: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B, T]`` and last hidden states ``[B, T-1, H]`` of ``prefix [B, P]`` continued to ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    cache = StaticCache(config=target.config, max_cache_len=length)
    ids, hidden = [prefix], []
    step = prefix
    while True:
        states = target.model(input_ids=step, past_key_values=cache, use_cache=True).last_hidden_state
        hidden.append(states)
        if sum(s.shape[1] for s in ids) == length:
            break
        logits = target.lm_head(states[:, -1]).float()
        if temperature == 0:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids.append(step)
    return torch.cat(ids, 1), torch.cat(hidden, 1)


def generate(
    target: LlamaForCausalLM, streams: Path, folder: Path, plan: Generation, parts: int, seconds: float = float("inf")
) -> int:
    """Write parts of ids ``[B, T]`` and hidden states ``[B, T, H]`` until there are ``parts`` or time is up; existing
    ones stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches = Batches(streams, dict(plan.mix), plan.length, plan.seed)
    began = time.monotonic()
    for part in range(parts):
        path = folder / f"part-{part:04d}.safetensors"
        if path.exists():
            continue
        if time.monotonic() - began > seconds:
            return part
        text = torch.from_numpy(batches.at(part * plan.batch, plan.batch))[:, : plan.length]
        temperature = plan.temperatures[part % len(plan.temperatures)]
        plain = part % plan.plain_every == plan.plain_every - 1
        prefix = plan.length if plain else plan.prefixes[part // len(plan.temperatures) % len(plan.prefixes)]
        ids, hidden = continue_text(target, text[:, :prefix], plan.length, temperature, part)
        unfinished = path.with_suffix(".partial")
        facts = {"prefix": str(prefix), "temperature": str(1.0 if plain else temperature)}
        save_file({"ids": ids.to(torch.int32), "hidden": hidden.contiguous()}, unfinished, metadata=facts)
        unfinished.rename(path)
        log.info("part %d: prefix %d, temperature %s, %.0f s", part, prefix, temperature, time.monotonic() - began)
    return parts


class Heads(torch.nn.Module):
    """K Medusa heads of L residual layers ``x + silu(W x + b)`` that start as the identity; the unembedding is the
    target's.
    """

    def __init__(self, heads: int, layers: int, hidden: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(heads, layers, hidden, hidden))
        self.bias = torch.nn.Parameter(torch.zeros(heads, layers, hidden))

    def forward(self, head: int, x: torch.Tensor) -> torch.Tensor:
        """States ``[..., H]`` that head ``head`` hands to the unembedding, computed in ``x``'s type."""
        for weight, bias in zip(self.weight[head].to(x.dtype), self.bias[head].to(x.dtype), strict=True):
            x = x + silu(torch.nn.functional.linear(x, weight, bias))
        return x


@dataclass(frozen=True)
class Distillation:
    """Training of draft and heads on generated parts; each pass over them takes the parts in a new order."""

    heads: int = 5
    layers: int = 2
    rows: int = 16
    heads_rate: float = 1e-3
    warmup: int = 30
    passes: float = 1.75
    decay: float = 0.5


def laws(target: LlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """The target's laws at temperature 1, in the states' type, ``[B, T, V]``."""
    with torch.no_grad():
        logits = target.lm_head(hidden)
        for row in logits:
            row.copy_(row.float().softmax(-1))
    return logits


def heads_loss(
    heads: Heads, target: LlamaForCausalLM, hidden: torch.Tensor, law: torch.Tensor, first: int
) -> list[torch.Tensor]:
    """Each head's cross-entropy to the laws it foretells: the state at t against the law at t + 1 + k, for t >=
    ``first``.
    """
    losses = []
    for k in range(len(heads.weight)):
        states = heads(k, hidden[:, first : hidden.shape[1] - 1 - k])
        losses.append(soft_cross_entropy(target.lm_head(states).flatten(0, 1), law[:, first + 1 + k :].flatten(0, 1)))
    return losses


def draft_loss(draft: torch.nn.Module, ids: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """The draft's cross-entropy to the laws ``[B, T, V]`` after ids ``[B, T]``."""
    logits = draft(input_ids=ids, use_cache=False).logits
    return soft_cross_entropy(logits.flatten(0, 1), law.flatten(0, 1))


def order_of(parts: int, rows: int, batch: int, passes: float) -> list[tuple[int, int]]:
    """(part, first row) of every step: rows of a part are used together, parts in a new order each pass."""
    steps = [
        (part, row)
        for epoch in range(int(np.ceil(passes)))
        for part in np.random.default_rng(epoch).permutation(parts)
        for row in range(0, batch, rows)
    ]
    return steps[: int(passes * parts * (batch // rows))]


def distill(target: LlamaForCausalLM, draft: Trainer, heads: Heads, folder: Path, plan: Distillation) -> None:
    """Train ``draft`` on the target's laws, and ``heads`` on its laws or, in greedy parts, its choices."""
    paths = sorted(folder.glob("part-*.safetensors"))
    steps = order_of(len(paths), plan.rows, len(load_file(paths[0])["ids"]), plan.passes)
    target.requires_grad_(False)
    optimiser = torch.optim.AdamW(heads.parameters(), lr=plan.heads_rate, betas=(0.9, 0.98), weight_decay=0.0)
    stable, at, recent, began = int(len(steps) * (1 - plan.decay)), None, [], time.monotonic()
    for step, (part, row) in enumerate(steps):
        if part != at:
            tensors, (prefix, temperature), at = load_file(paths[part]), _facts(paths[part]), part
        ids, hidden = tensors["ids"][row : row + plan.rows].long(), tensors["hidden"][row : row + plan.rows]
        law = laws(target, hidden)
        factor = schedule(step, plan.warmup, stable, len(steps) - stable)
        loss, _ = draft.update([partial(draft_loss, draft.model, ids, law)], factor)
        if temperature == 0:
            law = torch.zeros_like(law).scatter_(-1, law.argmax(-1, keepdim=True), 1.0)
        first = 0 if prefix == ids.shape[1] else max(0, prefix - 2)  # what a head foretells is the target's own text
        losses = heads_loss(heads, target, hidden, law, first)
        torch.stack(losses).sum().backward()
        for group in optimiser.param_groups:
            group["lr"] = plan.heads_rate * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent.append([loss, *(float(x.detach()) for x in losses)])
        if (step + 1) % 20 == 0:
            means = np.round(np.mean(recent, 0), 3).tolist()
            log.info("step %d of %d, losses %s, %.0f s", step + 1, len(steps), means, time.monotonic() - began)
            recent.clear()


def _facts(path: Path) -> tuple[int, float]:
    """Prefix length and temperature of a part."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return int(metadata["prefix"]), float(metadata["temperature"])


@torch.inference_mode()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, heads: Heads, prompts: list[list[int]], tokens: int = 96
) -> dict:
    """On continuations of held-out prompts: heads' accuracies by rank and the draft's agreement (greedy), alpha
    (temperature 1).
    """
    hits = np.zeros((len(heads.weight), 4))
    seen = np.zeros(len(heads.weight))
    agree, alpha = [], []
    for number, prompt in enumerate(prompts):
        prefix, start = torch.tensor([prompt]), len(prompt) - 1
        ids, hidden = continue_text(target, prefix, len(prompt) + tokens, 0.0, number)
        agree.append(
            float(
                (draft(input_ids=ids).logits.argmax(-1) == target.lm_head(hidden).argmax(-1))[0, start:].float().mean()
            )
        )
        for k in range(len(heads.weight)):
            top = target.lm_head(heads(k, hidden[0, start : -2 - k])).topk(4).indices
            right = top == ids[0, start + 2 + k :, None]
            hits[k] += right.sum(0).numpy()
            seen[k] += len(right)
        ids, hidden = continue_text(target, prefix, len(prompt) + tokens, 1.0, number)
        q = draft(input_ids=ids).logits[0, start:].float().softmax(-1)
        alpha.append(float(torch.minimum(target.lm_head(hidden)[0, start:].float().softmax(-1), q).sum(-1).mean()))
    return {
        "heads": (hits / seen[:, None]).round(3).tolist(),
        "draft_agreement": round(float(np.mean(agree)), 3),
        "alpha": round(float(np.mean(alpha)), 3),
    }


def save_heads(heads: Heads, path: Path) -> None:
    """In float32, to go on from."""
    save_file({"weight": heads.weight.detach(), "bias": heads.bias.detach()}, path)


def load_heads(path: Path) -> Heads:
    """Heads from ``weight [K, L, H, H]`` and ``bias [K, L, H]``, in float32."""
    tensors = load_file(path)
    count, layers, hidden, _ = tensors["weight"].shape
    heads = Heads(count, layers, hidden)
    heads.load_state_dict(tensors)
    return heads
