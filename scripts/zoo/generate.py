"""Generate training data: the target continues prefixes of training text; draft model and heads learn from the result.

Letters: B rows, P tokens of a prefix, T tokens per row, H hidden size, k kinds of hidden states.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.tensors import read_tensors, save_tensors

from .batches import Batches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """How text is continued. Part i of the data depends only on these settings and on i.

    Args:
        batch: B, rows of a part.
        length: T, tokens of a row, prefix included.
        prefixes: prefix lengths P, used in rotation; a part with ``length`` is plain text.
        temperatures: used in rotation; 0 is greedy.
        plain_every: every so many parts, one is plain text.
        seed: of the windows of text.
        mix: share of each workload.
        states: numbers of the hidden states to keep, as in transformers' ``hidden_states``; -1 is the last, after the
            final norm.
    """

    batch: int = 64
    length: int = 256
    prefixes: tuple[int, ...] = (32, 96, 64, 128)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    plain_every: int = 5
    seed: int = 1
    mix: tuple[tuple[str, float], ...] = (("code", 0.7), ("json", 0.12), ("prose", 0.18))
    states: tuple[int, ...] = (-1,)


@torch.inference_mode()
def continue_text(
    target: LlamaForCausalLM, prefix: Tensor, length: int, temperature: float, seed: int, kept: Sequence[int] = (-1,)
) -> tuple[Tensor, Tensor]:
    """Continue ``prefix [B, P]`` to ``length`` tokens; return ids ``[B, T]`` and hidden states ``[B, T, k * H]``."""
    generator = torch.Generator().manual_seed(seed)
    cache = StaticCache(config=target.config, max_cache_len=length)
    read: dict[str, Any] = {cache_argument(target.model): cache}
    ids, hidden = [prefix], []
    step = prefix
    while True:
        every = target.model(input_ids=step, use_cache=True, output_hidden_states=True, **read)
        states = every.last_hidden_state
        hidden.append(torch.cat([every.hidden_states[number] for number in kept], -1).bfloat16())
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
    """Write parts of ids ``[B, T]`` and hidden states ``[B, T, k * H]`` in bfloat16; existing ones are kept.

    Args:
        target: the target.
        streams: folder of the token streams (``tokens.Batches``).
        folder: of the parts.
        plan: how text is continued.
        parts: number of parts.
        seconds: time after which no further part is begun.

    Returns:
        The number of parts on disk.
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
        prefix = plan.prefixes[part // len(plan.temperatures) % len(plan.prefixes)]
        if part % plan.plain_every == plan.plain_every - 1:
            prefix = plan.length
        plain = prefix == plan.length
        ids, hidden = continue_text(target, text[:, :prefix], plan.length, temperature, part, plan.states)
        facts = {"prefix": str(prefix), "temperature": str(1.0 if plain else temperature)}
        save_tensors({"ids": ids.to(torch.int32), "hidden": hidden}, path, facts)
        log.info("part %d: prefix %d, temperature %s, %.0f s", part, prefix, temperature, time.monotonic() - began)
    return parts


@dataclass(frozen=True)
class TextPart:
    """A part of the data: ids ``[B, T]``, hidden states ``[B, T, k * H]``, prefix length P, temperature."""

    ids: Tensor
    hidden: Tensor
    prefix: int
    temperature: float

    @staticmethod
    def read(path: Path) -> "TextPart":
        """Read a file that ``generate`` wrote."""
        tensors, facts = read_tensors(path)
        return TextPart(tensors["ids"].long(), tensors["hidden"], int(facts["prefix"]), float(facts["temperature"]))
