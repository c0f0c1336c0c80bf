"""Host and device time of one level of an EAGLE-3 head, and of chains of five draft tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from experiments.gpu.check.part import Part, run
from experiments.gpu.check.proposers import LAYER
from experiments.gpu.random_models import SHAPES, WAYS, llama, target_of
from experiments.gpu.timing import random_requests
from spec_lab.core.clock import Clock
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import Shape
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine
from spec_lab.drafters.draft_layers import load_weights
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.eagle.network import Eagle3, Eagle3Settings
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.models.fused import fuse
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.feature_lm import FeatureLM
from spec_lab.verify import Token

CONTEXT, ROWS = 512, 10
CHAIN = TreePlan(parse("1x1x1x1x1"), "deterministic")
PROFILED = 3
"""Calls whose kernels are summed."""


class Timer:
    """Times calls: on the host, on the device's time line, and the device's kernels alone.

    Args:
        device: where calls compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.host: list[float] = []
        self.device: list[float] = []
        self.whole: list[float] = []
        self.kernels: list[tuple[int, float]] = []
        self.profiles = False

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Call, and note the seconds until it returns, those between events around it, and those until all is done."""
        if self.profiles:
            return self._profile(call)
        clock = self.clock
        clock.synchronise()
        began, start = time.perf_counter(), clock.mark()
        result = call()
        stop, returned = clock.mark(), time.perf_counter()
        clock.synchronise()
        self.whole.append(time.perf_counter() - began)
        self.host.append(returned - began)
        self.device.append(clock.seconds(start, stop))
        return result

    def _profile(self, call: Callable[[], Any]) -> Any:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            result = call()
            self.clock.synchronise()
        kernels = [event for event in profiled.events() if event.device_type.name == "CUDA"]
        self.kernels.append((len(kernels), sum(event.time_range.elapsed_us() for event in kernels) / 1e6))
        return result

    def results(self) -> dict[str, Any]:
        """Medians; the first three calls, which warm up, are left out."""
        results: dict[str, Any] = {"calls": len(self.host[3:])}
        results |= {
            name: median(seconds[3:])
            for name, seconds in (("host_s", self.host), ("device_s", self.device), ("whole_s", self.whole))
        }
        if self.kernels:
            results["kernels"], results["kernels_s"] = (median(column) for column in zip(*self.kernels, strict=True))
        return results


def say(part: Part, name: str, timer: Timer) -> None:
    """Report what was timed."""
    results = timer.results()
    part.keep(name, results)
    more = f", {results['kernels']:.0f} kernels of {results['kernels_s'] * 1e3:.2f} ms" if "kernels" in results else ""
    device = "" if part.tiny else f"device {results['device_s'] * 1e3:.2f} ms, "
    part.say(f"{name}: host {results['host_s'] * 1e3:.2f} ms, {device}whole {results['whole_s'] * 1e3:.2f} ms{more}")


def eagle3(part: Part, target: Target) -> nn.Module:
    """A random EAGLE-3 head in the target's sizes, as published ones: one layer, 32,000 draft tokens, three taps."""
    config, layers = target.model.config, target.lm.capabilities.hidden_layers
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {**LAYER, **{name: getattr(config, name) for name in names}}
    wide, v = config.hidden_size, target.vocabulary
    settings = Eagle3Settings(layer, wide, wide, v, (min(2, layers), layers // 2, layers - 1), min(32000, v))
    network = Eagle3(settings)
    tensors = {
        name: torch.randn(parameter.shape, device=part.device, dtype=part.dtype) * parameter.shape[-1] ** -0.5
        if parameter.dim() > 1
        else torch.ones(parameter.shape, device=part.device, dtype=part.dtype)
        for name, parameter in network.named_parameters()
    }
    return load_weights(network, tensors, target)


@torch.inference_mode()
def level(part: Part, network: Any, seconds: float) -> Timer:
    """Time one level of ``ROWS`` nodes below one root."""
    clock, timer = Clock(part.device), Timer(part.device)
    lm, context = FeatureLM(network, 1, part.device, part.dtype), 16 if part.tiny else CONTEXT
    sequence, phase = lm.open(context + 2 * ROWS), clock.phase("level")
    wide = network.settings.hidden_size
    lm.forward([sequence], [context], torch.randn(context, 2 * wide, device=part.device, dtype=part.dtype), phase)
    shape, rows = Shape(1, np.zeros(ROWS, dtype=np.int64)), np.arange(1, ROWS + 1)
    token = torch.arange(ROWS, device=part.device)
    feature = torch.randn(ROWS, wide, device=part.device, dtype=part.dtype)

    def call() -> Any:
        return network.outputs(lm.extend([sequence], shape, rows, network.inputs(token, feature), phase))

    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(timer.host) < 6:
        timer(call)
        sequence.accept()
        clock.take()

    def accepted() -> None:
        timer(call)
        sequence.accept()

    with_kernels(part, timer, accepted)
    return timer


def with_kernels(part: Part, timer: Timer, again: Callable[[], Any]) -> None:
    """Sum the kernels of some more calls, where the device has any."""
    if not part.tiny:
        timer.profiles = True
        with part.attempt("profiler"):
            for _ in range(PROFILED):
                again()


@torch.inference_mode()
def chain(part: Part, target: Target, proposer: Any, seconds: float) -> Timer:
    """Time the proposer's part of decoding steps."""
    timer, propose = Timer(part.device), proposer.propose
    proposer.propose = lambda batch: timer(lambda: propose(batch))
    prompt, new = (16, 60) if part.tiny else (CONTEXT, 400)
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)))
    engine.add(random_requests(target.vocabulary, 1, prompt, new)[0])
    for _ in range(2):  # the prompt is computed, and the first chain appends it to the drafter's cache
        engine.step()
    timer.host, timer.device, timer.whole = [], [], []
    end = time.perf_counter() + seconds
    while (time.perf_counter() < end or len(timer.host) < 6) and len(timer.host) < 50:
        engine.step()
    with_kernels(part, timer, engine.step)
    engine.close()
    return timer


def measure(part: Part) -> None:
    """Time the head's level, its chain, and chains of a draft model of 1B parameters, eager and captured."""
    shape, small, seconds = ("tiny", "tiny", 0.1) if part.tiny else ("8B", "1B", 3.0)
    context = 128 if part.tiny else 2 * CONTEXT
    model = llama(SHAPES[shape], part.device, part.dtype, context)
    fuse(model)
    target = target_of(model, shape)
    with part.attempt("EAGLE-3"):
        network = eagle3(part, target)
        with part.attempt("EAGLE-3 level"):
            say(part, f"EAGLE-3 level of {ROWS} rows", level(part, network, seconds))
        with part.attempt("EAGLE-3 chain"):
            proposer: Proposer = FeatureDrafter(network, target, CHAIN, "eagle")
            say(part, "EAGLE-3 chain of 5", chain(part, target, proposer, seconds))
    with part.attempt(f"draft model {small}"):
        draft = llama(SHAPES[small], part.device, part.dtype, context)
        fuse(draft)
        for way in WAYS:
            with part.attempt(f"draft model {small}, {way}"):
                proposer = DraftModel(CausalLM(draft, fixed=way == "captured"), context, CHAIN)
                say(part, f"{small} draft chain of 5, {way}", chain(part, target, proposer, seconds))


if __name__ == "__main__":
    run(measure)
