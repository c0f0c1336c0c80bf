"""On a GPU: the same forwards as on the CPU, eagerly and with captured graphs."""

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.fused import fuse
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.runners.test_causal_lm import TREE, World
from tests.tiny import CONTEXT, tiny_model

pytestmark = pytest.mark.cuda
TOLERANCE = 1e-6
"""transformers computes norms and rotary angles in float32 even in a float64 model; a wrong position changes 0.7."""
FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["eager", "captured"])


@FIXED
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral-windows"])
def test_forests_on_a_gpu_have_the_logits_of_the_cpu(family, fixed):
    model = tiny_model(family).cuda()
    if fixed:
        fuse(model)
    lm = CausalLM(model, fixed=fixed)
    world = World(lm, np.random.default_rng(1))
    world.add(9)
    world.add(4)
    oracle = tiny_model(family)
    for accept in ([(0, 1), (0,)], [(1, 0), ()], [(), (0, 0)], [(2,), (0,)]):
        shape = forest((TREE, chain(2)))
        pending = [tokens[len(cache) :] for tokens, cache in zip(world.tokens, world.caches, strict=True)]
        drafted = torch.from_numpy(world.generator.integers(0, 61, shape.nodes))
        logits = lm.forward(world.caches, pending, Draft(shape, drafted.cuda())).logits.cpu()
        for row in range(shape.rows):
            text = world.tokens[int(shape.root[row])] + [int(drafted[at - 2]) for at in shape.path(row)]
            with torch.inference_mode():
                expected = oracle(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=TOLERANCE)
        for b, cache in enumerate(world.caches):
            row, kept = b, []
            for rank in accept[b]:
                row = int(shape.children[row][rank])
                kept.append(int(shape.places[row]))
                world.tokens[b].append(int(drafted[row - 2]))
            cache.accept(kept)
            world.tokens[b].append(7)
    assert bool(lm.graphs.captured) == fixed


@FIXED
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_on_a_gpu_get_the_tokens_of_the_cpu(fixed, temperature):
    texts = {}
    for device in ("cpu", "cuda"):
        target = Target(CausalLM(tiny_model().to(device), fixed=fixed), None, "tiny", CONTEXT, "", 0.0)
        for proposer in (Null(), Ngram(4, 3, 1)):
            requests = [Request(n, f"r{n}", (1, 2, 3, 1, 2), Sampling(temperature), 30) for n in range(3)]
            group = fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), requests)
            list(group)
            texts[device, proposer.name] = [sequence.tokens for sequence in group.sequences]
    for (device, name), text in texts.items():
        assert text == texts["cpu", name], (device, name)
