"""Pre-training of a Llama on token streams: warm-up-stable-decay, the first part at half the depth.

``control.json`` in the work folder, read at every step, sets where the decay starts and how long it takes, so that the
end can be decided while training runs. A step depends only on the checkpoint, the streams and the control file: a run
that was killed resumes to the same weights.
"""

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.core.tensors import save_tensors
from spec_lab.train.trainer import Plan, Trainer, schedule

from .batches import Batches
from .kernels import cross_entropy

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


def build(shape: Shape, seed: int, eos: int = 0) -> LlamaForCausalLM:
    """Return a new float32 model."""
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


def load(path: Path, shape: Shape, plan: Plan, threads: int = 1) -> Trainer[LlamaForCausalLM]:
    """Load a trainer at the depth that it was saved with."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    trainer = Trainer(build(replace(shape, layers=int(metadata["layers"])), plan.seed), plan, threads)
    trainer.restore(tensors, int(metadata["step"]), int(metadata["sequences"]))
    return trainer


def write_checkpoint(trainer: Trainer[LlamaForCausalLM], path: Path) -> None:
    """Write a checkpoint atomically."""
    metadata = {
        "step": str(trainer.step), "sequences": str(trainer.sequences),
        "layers": str(trainer.model.config.num_hidden_layers), "plan": json.dumps(asdict(trainer.plan)),
    }  # fmt: skip
    save_tensors(trainer.tensors(), path, metadata)


def grow(trainer: Trainer[LlamaForCausalLM], shape: Shape) -> Trainer[LlamaForCausalLM]:
    """Double the depth without changing the function: each layer is followed by its copy with zero output matrices.

    Steps at half the depth cost half as much (depth growth, e.g. Du et al. 2024, 2405.15319; zero output matrices, as
    in LLaMA Pro, 2401.02415, leave the loss unchanged).
    """
    grown = Trainer(build(shape, trainer.plan.seed), trainer.plan, trainer.threads)
    tensors = {}
    for key, value in trainer.tensors().items():
        layer = re.search(r"layers\.(\d+)\.", key)
        if layer is None:
            tensors[key] = value
            continue
        original, copy = (f"layers.{2 * int(layer[1]) + k}." for k in (0, 1))
        tensors[key.replace(layer[0], original)] = value
        if key.startswith("master."):
            zero = "o_proj" in key or "down_proj" in key
            tensors[key.replace(layer[0], copy)] = torch.zeros_like(value) if zero else value
    grown.restore(tensors, trainer.step, trainer.sequences)
    return grown


def token_loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the mean next-token loss in nats of ``ids [B, T+1]``."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _share(model: torch.nn.Module, ids: Tensor, share: float) -> Tensor:
    return share * token_loss(model, ids)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, folder: Path, length: int, windows: int) -> dict[str, float]:
    """Return each workload's mean loss, in nats per token, over ``windows`` windows spread evenly over its stream."""
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
    """Where the phases begin, in steps, and a factor of all rates; ``control.json`` in the work folder overrides it."""

    grow_step: int = 3700
    stable_steps: int = 4420
    decay_steps: int = 560
    rate: float = 0.4

    def read(self, work: Path) -> "Control":
        """Return the current values, with those of ``control.json``."""
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
    """Train, or resume, until the decay has ended; ``stop_after`` ends at that step, as after a kill.

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
            write_checkpoint(trainer, checkpoint)
            saved = time.monotonic()
    write_checkpoint(trainer, checkpoint)
    report()
    return trainer
