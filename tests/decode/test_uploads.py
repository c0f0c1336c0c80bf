"""How often a step copies from the host to a device: every copy is counted, and a plan known in advance needs few.

Tensors of the ``meta`` device have no numbers; ``Readback`` makes some up here, as in ``test_copies``.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode import step as engine_step
from spec_lab.decode.arm import Arm
from spec_lab.decode.sequence import SequenceState
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.eagle.network import Eagle3, Eagle3Settings
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.verify import Token
from tests.decode.test_copies import CHAIN, PROPOSERS, TREE, MadeUp, target_on
from tests.tiny import VOCABULARY

HEAD = Eagle3Settings(small_layer(32), 32, 32, VOCABULARY, (0, 1), VOCABULARY - 8)


def eagle3(plan):
    return lambda target: FeatureDrafter(random_network(Eagle3(HEAD), target), target, plan, "eagle3")


STATIC = PROPOSERS | {"eagle3_chain": eagle3(TreePlan(CHAIN)), "eagle3_points": eagle3(TreePlan(TREE, "deterministic"))}

SAMPLED = {
    "greedy": [Sampling(0.0)],
    "sampled": [Sampling(0.8)],
    "various": [
        Sampling(0.8),
        Sampling(1.0, top_k=5),
        Sampling(0.7, top_p=0.9),
        Sampling(0.0),
        Sampling(1.0, min_p=0.1),
    ],
}
MOST = dict.fromkeys(["null"], 2) | dict.fromkeys(
    ["medusa", "draft_chain", "draft_points", "eagle3_chain", "eagle3_points"], 3
)


class HostCopies(TorchDispatchMode):
    """Counts operations that make a tensor of a device from a tensor or from numbers of the host."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count, plain = 0, torch.tensor

        def tensor(*args, device=None, **kwargs):
            self.count += device is not None and torch.device(device).type == "meta"
            return plain(*args, device=device, **kwargs)

        monkeypatch.setattr(torch, "tensor", tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.is_meta:
            given = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.count += any(not tensor.is_meta and tensor.dim() for tensor in given)
        return output


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("samplings", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.one_in(12)
def test_uploads_of_a_step(monkeypatch, name, size, samplings):
    """Steps after the first of a batch: its sampling parameters and the arrays of its forest stay on the device."""
    monkeypatch.setattr(engine_step, "Readback", MadeUp)
    monkeypatch.setattr(MadeUp, "whole", 0)
    target = target_on("meta")
    proposer = STATIC[name](target)
    arm = Arm(target, proposer, Token(), CounterDraws(1))
    states = []
    for number in range(size):
        request = Request(number, f"r{number}", (1, 2, 3, 4), samplings[number % len(samplings)], 20)
        states.append(SequenceState(request, target.lm.open(), list(request.tokens), state=proposer.init(request)))
    steps = []
    for _ in range(4):
        with monkeypatch.context() as patched, HostCopies(patched) as copies:
            steps.append(engine_step.step(states, arm))
        assert steps[-1].uploads == copies.count
    assert steps[-1].draft.shape.nodes == proposer.nodes * size and steps[-1].copies_before == 0
    assert steps[-1].uploads == steps[-1].row()["uploads"] <= MOST[name]
