"""Training on a CPU: weights for computing, float32 master weights, Muon and AdamW, warm-up-stable-decay.

Muon updates the hidden matrices, AdamW the embedding, LM head and norms. A checkpoint is one file, replaced atomically.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from spec_lab.train.muon import Muon


@dataclass(frozen=True)
class Plan:
    """The settings of a training. Learning rates are peak values."""

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


def schedule(step: int, warmup: int, stable: int, decay: int) -> float:
    """Return the factor of the learning rates: linear warm-up, 1, then ``1 - sqrt(t)`` down to 0.

    Source: Hägele et al. (2405.18392).
    """
    if step < stable:
        return min(1.0, (step + 1) / warmup)
    return max(0.0, 1.0 - math.sqrt((step - stable + 1) / (decay + 1)))


def matrix_products(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context in which matrix products on a device have a data type; None for that of their tensors."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


M = TypeVar("M", bound=torch.nn.Module)


class Trainer(Generic[M]):
    """A model with its master weights in float32 and its optimisers.

    Each thread computes the forward of one part of a batch, so a forward has no barrier: on few, shared cores this is
    faster than threads inside each operation. The result does not depend on the number of threads.

    Args:
        model: converted in place.
        threads: that work in parallel.
        dtype: of computing; bfloat16 is slow on CPUs without instructions for it.
        autocast: data type of the matrix products in a model of float32, and of Muon's; None for float32.
    """

    def __init__(
        self,
        model: M,
        plan: Plan,
        threads: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        autocast: torch.dtype | None = None,
    ):
        self.plan, self.threads, self.step, self.sequences = plan, threads, 0, 0
        self.autocast = autocast
        self.masters = {  # in float32 the model computes with the master weights themselves
            n: torch.nn.Parameter(p.detach().to(torch.float32, copy=dtype != torch.float32))
            for n, p in model.named_parameters()
        }
        self.model = model
        for parameter in model.parameters():  # and no buffers: rotary embeddings stay in float32
            parameter.data = parameter.data.to(dtype)
        self.weights = dict(self.model.named_parameters())
        self.pool = ThreadPoolExecutor(threads)
        edges = {n for n in self.masters if "embed_tokens" in n or "lm_head" in n or n.startswith("head.")}
        hidden = [p for n, p in self.masters.items() if p.ndim == 2 and n not in edges]
        rest = [p for n, p in self.masters.items() if p.ndim != 2 or n in edges]
        shares, products = min(threads, len(hidden)), autocast or torch.float32
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), plan.adamw_rate),
            *((Muon(hidden[k::threads], plan.weight_decay, products=products), plan.muon_rate) for k in range(shares)),
        ]

    def update(self, losses: Sequence[Callable[[], Tensor]], factor: float) -> tuple[float, float]:
        """Take one optimiser step on the sum of ``losses``, each computed in a thread.

        Returns:
            The sum of the losses, and the norm of its gradient.

        Raises:
            ValueError: one of these is NaN or infinite; the weights are not changed.
        """
        device, autocast = next(iter(self.weights.values())).device, self.autocast

        def gradients(loss_of: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            with matrix_products(device, autocast):
                loss = loss_of()
            return loss.detach(), torch.autograd.grad(loss, list(self.weights.values()))

        total = 0.0
        for loss, parts in self.pool.map(gradients, losses):  # each is added as soon as it is there
            total += float(loss)
            for master, part in zip(self.masters.values(), parts, strict=True):
                master.grad = part.float() if master.grad is None else master.grad.add_(part)
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.plan.clip))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise ValueError(
                f"training step {self.step + 1} has a loss of {total:g} and a gradient of norm {norm:g}, so the "
                "weights were not updated and the last checkpoint is kept: start a new training with lower learning "
                "rates (task.learning_rate of task=train)"
            )

        def step(optimiser: torch.optim.Optimizer, rate: float) -> None:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        list(self.pool.map(lambda pair: step(*pair), self.optimisers))
        self.refresh()
        self.step += 1
        return total, norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the master weights to the model's weights."""
        for name, master in self.masters.items():
            self.weights[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return the master weights as ``master.<name>`` and the optimiser state as ``state.<name>.<entry>``."""
        tensors = {f"master.{n}": p.detach() for n, p in self.masters.items()}
        for optimiser, _ in self.optimisers:
            for name, master in self.masters.items():
                tensors |= {f"state.{name}.{k}": v for k, v in optimiser.state.get(master, {}).items()}
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int, sequences: int) -> None:
        """Restore the state that ``tensors`` returned."""
        self.step, self.sequences = step, sequences
        for key, value in tensors.items():
            kind, rest = key.split(".", 1)
            if kind == "master":
                self.masters[rest].copy_(value)
                continue
            name, entry = rest.rsplit(".", 1)
            master = self.masters[name]
            optimiser = next(o for o, _ in self.optimisers if any(master is p for p in o.param_groups[0]["params"]))
            # Numbers of steps stay on the host.
            optimiser.state[master][entry] = value.to(master.device if value.ndim else value.device, copy=True)
        self.refresh()
