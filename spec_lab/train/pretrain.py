"""Pre-training of a Llama on token streams: bf16 weights for compute, float32 masters, Muon and AdamW,
warm-up-stable-decay.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) updates the hidden matrices, AdamW the embedding and
norms. The schedule is stable until told otherwise: ``control.json`` in the work folder, read at every step, says where
the decay starts and how long it takes, so that the end can be decided while training runs. A checkpoint is one file,
replaced atomically; a step depends on nothing but it, the streams and the control file: a killed run resumes to the
same weights.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.train.fast import cross_entropy
from spec_lab.train.tokens import Batches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings."""

    hidden: int = 512
    layers: int = 6
    heads: int = 8
    intermediate: int = 1280
    vocab: int = 4096
    positions: int = 2048


TARGET = Shape()
DRAFT = Shape(hidden=256, layers=1, heads=4, intermediate=768)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights, besides streams and control file. Rates are peak values."""

    batch: int = 8
    grown_batch: int = 16
    part: int = 4
    length: int = 512
    seed: int = 0
    warmup: int = 60
    muon_rate: float = 6e-3
    adamw_rate: float = 4e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    mix: tuple[tuple[str, float], ...] = (("code", 0.65), ("json", 0.12), ("prose", 0.23))


def build(shape: Shape, seed: int, eos: int = 0) -> LlamaForCausalLM:
    """A freshly initialised float32 model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
        attn_implementation="blocked",
    )
    return LlamaForCausalLM(config)


def schedule(step: int, warmup: int, stable: int, decay: int) -> float:
    """Factor on the rates: linear warm-up, one, then ``1 - sqrt(t)`` down to zero (Hägele et al. 2024, arXiv
    2405.18392).
    """
    if step < stable:
        return min(1.0, (step + 1) / warmup)
    return max(0.0, 1.0 - math.sqrt((step - stable + 1) / (decay + 1)))


M = TypeVar("M", bound=torch.nn.Module)


class Trainer(Generic[M]):
    """Model in bf16, masters in float32, Muon and AdamW; one file holds it all. ``sequences`` counts those trained on.

    ``threads`` work side by side on parts of a batch, which needs no barrier inside a forward: on two cores that others
    use too, that is faster than threads inside each operation. The parts do not depend on the number of threads, nor
    does the result.
    """

    def __init__(self, model: M, plan: Plan, threads: int = 1):
        self.plan, self.threads, self.step, self.sequences = plan, threads, 0, 0
        self.masters = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in model.named_parameters()}
        self.model = model.bfloat16()
        self.weights = dict(self.model.named_parameters())
        self.pool = ThreadPoolExecutor(threads)
        hidden = [p for n, p in self.masters.items() if p.ndim == 2 and "embed_tokens" not in n]
        rest = [p for n, p in self.masters.items() if p.ndim != 2 or "embed_tokens" in n]
        muon = partial(torch.optim.Muon, momentum=0.95, ns_steps=4, adjust_lr_fn="match_rms_adamw")
        self.optimisers = [
            (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), plan.adamw_rate),
            *((muon(hidden[k::threads], weight_decay=plan.weight_decay), plan.muon_rate) for k in range(threads)),
        ]

    def update(self, losses: Sequence[Callable[[], Tensor]], factor: float) -> tuple[float, float]:
        """One optimiser step on the sum of ``losses``, each computed in a thread: that sum, the gradient's norm."""

        def gradients(loss_of: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = loss_of()
            return loss.detach(), torch.autograd.grad(loss, list(self.weights.values()))

        found = list(self.pool.map(gradients, losses))
        for master, *parts in zip(self.masters.values(), *(g for _, g in found), strict=True):
            master.grad = parts[0].float()
            for part in parts[1:]:
                master.grad += part
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.plan.clip)

        def step(optimiser: torch.optim.Optimizer, rate: float) -> None:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        list(self.pool.map(lambda pair: step(*pair), self.optimisers))
        self.refresh()
        self.step += 1
        return sum(float(loss) for loss, _ in found), float(norm)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters to the weights that compute."""
        for name, master in self.masters.items():
            self.weights[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Masters as ``master.<name>`` and optimiser state as ``state.<name>.<entry>``."""
        found = {f"master.{n}": p.detach() for n, p in self.masters.items()}
        for optimiser, _ in self.optimisers:
            for name, master in self.masters.items():
                found |= {f"state.{name}.{k}": v for k, v in optimiser.state.get(master, {}).items()}
        return found

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int, sequences: int) -> None:
        """Take over what ``tensors`` gave."""
        self.step, self.sequences = step, sequences
        for key, value in tensors.items():
            kind, rest = key.split(".", 1)
            if kind == "master":
                self.masters[rest].copy_(value)
                continue
            name, entry = rest.rsplit(".", 1)
            master = self.masters[name]
            optimiser = next(o for o, _ in self.optimisers if any(master is p for p in o.param_groups[0]["params"]))
            optimiser.state[master][entry] = value.clone()
        self.refresh()

    def save(self, path: Path) -> None:
        """Write one file, atomically."""
        unfinished = path.with_suffix(".partial")
        metadata = {
            "step": str(self.step),
            "sequences": str(self.sequences),
            "layers": str(_layers(self.model)),
            "plan": json.dumps(asdict(self.plan)),
        }
        save_file({n: t.contiguous() for n, t in self.tensors().items()}, unfinished, metadata=metadata)
        os.replace(unfinished, path)


def _layers(model: torch.nn.Module) -> int:
    return model.config.num_hidden_layers if isinstance(model, LlamaForCausalLM) else 0


def load(path: Path, shape: Shape, plan: Plan, threads: int = 1) -> Trainer[LlamaForCausalLM]:
    """A trainer as saved, at the depth it had then."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    trainer = Trainer(build(replace(shape, layers=int(metadata["layers"])), plan.seed), plan, threads)
    trainer.restore(tensors, int(metadata["step"]), int(metadata["sequences"]))
    return trainer


def grow(trainer: Trainer[LlamaForCausalLM], shape: Shape) -> Trainer[LlamaForCausalLM]:
    """Twice as deep with the same function: each layer is followed by its copy, whose output matrices are zero.

    Half the training at half the depth costs half as much (depth growth, e.g. Du et al. 2024, arXiv 2405.15319; zero
    output matrices as in LLaMA Pro, arXiv 2401.02415, keep the loss where it was).
    """
    grown = Trainer(build(shape, trainer.plan.seed), trainer.plan, trainer.threads)
    tensors = {}
    for key, value in trainer.tensors().items():
        place = re.search(r"layers\.(\d+)\.", key)
        if place is None:
            tensors[key] = value
            continue
        original, copy = (f"layers.{2 * int(place[1]) + k}." for k in (0, 1))
        tensors[key.replace(place[0], original)] = value
        if key.startswith("master."):
            zero = "o_proj" in key or "down_proj" in key
            tensors[key.replace(place[0], copy)] = torch.zeros_like(value) if zero else value
    grown.restore(tensors, trainer.step, trainer.sequences)
    return grown


def token_loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss in nats of ``ids [B, T+1]``."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _share(model: torch.nn.Module, ids: Tensor, share: float) -> Tensor:
    return share * token_loss(model, ids)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, folder: Path, length: int, windows: int) -> dict[str, float]:
    """Mean loss in nats per token of each workload over ``windows`` windows spread evenly over its held-out stream."""
    losses = {}
    for path in sorted(folder.glob("*.bin")):
        stream = np.fromfile(path, dtype=np.uint16).astype(np.int64)
        count = min(windows, (len(stream) - 1) // length)
        starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
        parts = [float(token_loss(model, torch.from_numpy(stream[s : s + length + 1])[None])) for s in starts]
        losses[path.stem] = sum(parts) / len(parts)
    return losses


@dataclass(frozen=True)
class Control:
    """Where the phases begin, in steps, and a factor on all rates; ``control.json`` in the work folder overrides it
    while training runs.
    """

    grow_step: int = 3700
    stable_steps: int = 4420
    decay_steps: int = 560
    rate: float = 0.4

    def read(self, work: Path) -> "Control":
        """What holds now."""
        path = work / "control.json"
        return replace(self, **json.loads(path.read_text())) if path.exists() else self


def pretrain(
    shape: Shape,
    plan: Plan,
    streams: Path,
    held_out: Path,
    work: Path,
    control: Control,
    save_seconds: float = 120,
    eval_steps: int = 200,
    eval_windows: int = 24,
    stop_after: int | None = None,
    threads: int = 1,
) -> Trainer[LlamaForCausalLM]:
    """Train (or resume) until the decay has ended; ``stop_after`` returns early at that step, as a kill would.

    The first ``grow_step`` steps run at half the depth.
    """
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint.safetensors"
    if checkpoint.exists():
        trainer = load(checkpoint, shape, plan, threads)
        log.info("resumed at step %d", trainer.step)
    else:
        layers = shape.layers // 2 if control.read(work).grow_step else shape.layers
        trainer = Trainer(build(replace(shape, layers=layers), plan.seed), plan, threads)
    batches = Batches(streams, dict(plan.mix), plan.length, plan.seed)

    def report() -> None:
        losses = held_out_loss(trainer.model, held_out, plan.length, eval_windows)
        log.info("step %d held-out %s", trainer.step, json.dumps({k: round(v, 3) for k, v in losses.items()}))

    began = saved = time.monotonic()
    first, recent = trainer.sequences, []
    while True:
        now = control.read(work)
        if trainer.step >= now.stable_steps + now.decay_steps or trainer.step == stop_after:
            break
        grown = trainer.model.config.num_hidden_layers == shape.layers
        if not grown and trainer.step >= now.grow_step:
            trainer, grown = grow(trainer, shape), True
            log.info("grown to %d layers at step %d", shape.layers, trainer.step)
        size = plan.grown_batch if grown else plan.batch
        ids = torch.from_numpy(batches.at(trainer.sequences, size))
        losses = [partial(_share, trainer.model, part, len(part) / size) for part in ids.split(plan.part)]
        factor = now.rate * schedule(trainer.step, plan.warmup, now.stable_steps, now.decay_steps)
        loss, norm = trainer.update(losses, factor)
        trainer.sequences += size
        recent.append(loss)
        if trainer.step % 10 == 0:
            rate = (trainer.sequences - first) * plan.length / (time.monotonic() - began)
            tokens = trainer.sequences * plan.length / 1e6
            log.info(
                "step %d tokens %.2fM loss %.3f norm %.2f tokens/s %.0f",
                trainer.step,
                tokens,
                sum(recent) / len(recent),
                norm,
                rate,
            )
            recent.clear()
        if trainer.step % eval_steps == 0:
            report()
        if time.monotonic() - saved > save_seconds:
            trainer.save(checkpoint)
            saved = time.monotonic()
    trainer.save(checkpoint)
    report()
    return trainer
