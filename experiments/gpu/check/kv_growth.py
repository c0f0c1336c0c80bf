"""Captured decoding while the KV caches of a target and of a draft model grow twice: the tokens are those of eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from experiments.gpu.check.part import Part, run
from experiments.gpu.random_models import SHAPES, WAYS, llama, target_of
from experiments.gpu.timing import Captures, random_requests
from spec_lab.core.draft import empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.fused import fuse
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.graphs import CudaGraphs
from spec_lab.verify import Token

MEDIUM = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=4096)
CONTEXT = 2048
NEW = (60, 400, 900)
"""Most new tokens of each request: the first fits the smallest KV cache, each later one needs a larger one."""

STEPS = 12
"""Before the next request is added, and after the last one was."""

NOISE = 0.15
"""Noise of the draft model's weights, in standard deviations of the target's: some of its tokens are rejected."""


def noisy(model: Any) -> Any:
    """A draft model: the same weights with noise."""
    draft = deepcopy(model)
    torch.manual_seed(0)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.add_(NOISE * parameter.std() * torch.randn_like(parameter))
    return draft


def apart(forward: Callable[[], Any]) -> Callable[[], Any]:
    """Capture with a memory pool for each graph."""
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device()))(forward)


def decode(model: Any, draft: Any, captured: bool, pools: bool = False) -> dict[str, Any]:
    """Decode while requests are added; what they got, and how the caches grew.

    Args:
        model: of the target.
        draft: of the draft model.
        captured: whether steps run in fixed shapes.
        pools: whether each graph has a memory pool of its own.
    """
    target, lm = target_of(model, "target", captured), CausalLM(draft, fixed=captured)
    assert isinstance(target.lm, CausalLM)
    if pools:
        target.lm.graphs.capture = lm.graphs.capture = apart
    captures = {"target": Captures.of(target.lm), "draft": Captures.of(lm)}
    engine = Engine(
        Arm(target, DraftModel(lm, CONTEXT, TreePlan(parse("1x1x1x1"), "deterministic")), Token(), CounterDraws(0))
    )
    requests = random_requests(target.vocabulary, len(NEW), 40, max(NEW))
    sizes: dict[str, list[tuple[int, int]]] = {"target": [], "draft": []}
    accepted = drafted = 0
    with torch.inference_mode():
        for request, new in zip(requests, NEW, strict=True):
            engine.add(replace(request, max_new_tokens=new))
            for _ in range(STEPS):
                info = engine.step()
                assert info is not None
                accepted += sum(len(done.path) for done in info.committed)
                drafted += info.draft.shape.nodes
                for name, cells in (("target", target.lm.cells), ("draft", lm.cells)):
                    size = cells.streams, cells.capacity
                    if [size] != sizes[name][-1:]:
                        sizes[name].append(size)
    target.lm.clock.synchronise()
    texts = [list(sequence.emitted) for sequence in engine.sequences]
    engine.close()
    return {
        "tokens": texts,
        "streams_and_cells": sizes,
        "captures": {name: [counted.count, counted.seconds] for name, counted in captures.items()},
        "accepted": accepted,
        "drafted": drafted,
    }


def first_difference(texts: Mapping[str, list[list[int]]]) -> list[int] | None:
    """Request and position of the first token that differs between both ways; None where all agree."""
    for number, (first, second) in enumerate(zip(*texts.values(), strict=True)):
        for position, (token, other) in enumerate(zip(first, second, strict=False)):
            if token != other:
                return [number, position]
    return None


@torch.inference_mode()
def logits_error(model: Any, captured: bool) -> float:
    """The largest error of the logits of one-token steps against a plain forward, in standard deviations."""
    lm = CausalLM(model, fixed=captured)
    tokens = list(random_requests(lm.vocabulary, 1, 48, 1)[0].tokens)
    sequence, rows = lm.open(64), []
    for start, stop in ((0, 40), *((position, position + 1) for position in range(40, 48))):
        rows.append(lm.run(lm.prepare([sequence], [tokens[start:stop]], empty(1, lm.device))).logits[-1].float())
        sequence.accept()
    expected = lm.plain_logits(tokens, 9).float()
    return float((torch.stack(rows) - expected).abs().max() / expected.std())


def compare(part: Part, name: str, model: Any, draft: Any, exact: bool) -> None:
    """Decode both ways with a target and a draft model, and compare their tokens."""
    ended = {}
    for way in WAYS:
        with part.attempt(f"{name}, {way}"):
            ended[way] = decode(model, draft, way == "captured")
            part.keep(f"{name}, {way}", ended[way])
    for way in WAYS:
        with part.attempt(f"{name}, {way}, logits"):
            error = logits_error(model, way == "captured")
            part.keep(f"{name}, {way}, logits error", error)
            part.say(f"{name}, {way}: logits off by {error:.2g} standard deviations of a plain forward's")
    if len(ended) < len(WAYS):
        if "eager" in ended and not part.tiny:  # would it work if graphs shared no memory?
            with part.attempt(f"{name}, captured, a memory pool for each graph"):
                texts = {"eager": ended["eager"]["tokens"], "captured": decode(model, draft, True, True)["tokens"]}
                part.keep(f"{name}, a memory pool for each graph, first difference", first_difference(texts))
                part.say(f"{name}: with a memory pool for each graph it ends without an error")
        return
    texts = {way: decoded["tokens"] for way, decoded in ended.items()}
    different, count = first_difference(texts), sum(map(len, texts["captured"]))
    part.keep(f"{name}, first difference", different)
    where = "equal those of eager" if different is None else f"differ first at request {different[0]}, {different[1]}"
    captured = ended["captured"]
    grown = {who: len(sizes) - 1 for who, sizes in captured["streams_and_cells"].items()}
    captures = {who: number for who, (number, _) in captured["captures"].items()}
    part.say(
        f"{name}: {count} tokens {where}; {captured['accepted']} of {captured['drafted']} draft tokens accepted; the "
        f"caches grew {grown['target']} and {grown['draft']} times; {captures['target']} and {captures['draft']} "
        f"{part.captures}"
    )
    if min(grown.values()) < 2:
        part.fail(f"{name}: the caches should have grown twice: {grown}")
    if exact and different is not None:
        part.fail(f"{name}: captured tokens differ from eager ones")


@torch.inference_mode()
def measure(part: Part) -> None:
    """Compare on a model in float32, where tokens must be equal, then on one of 1B parameters in bfloat16."""
    with part.attempt("float32"):
        sizes = {**SHAPES["tiny"], "vocab_size": 64} if part.tiny else MEDIUM
        model = llama(sizes, part.device, torch.float32, CONTEXT)
        draft = noisy(model)
        fuse(model)
        fuse(draft)
        compare(part, "float32", model, draft, exact=True)
        del model, draft
    if not part.tiny:
        with part.attempt("1B, bfloat16"):
            model = llama(SHAPES["1B"], part.device, part.dtype, CONTEXT)
            draft = noisy(model)
            fuse(model)
            fuse(draft)
            compare(part, "1B, bfloat16", model, draft, exact=False)


if __name__ == "__main__":
    run(measure)
