"""An adapter with a KV cache, driven by hand over steps with rejections, agrees with one over whole sequences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_lab.core.clock import Clock
from spec_lab.core.draft import forest, tree
from spec_lab.engine.proposer import Observation
from spec_lab.engine.request import Request
from spec_lab.models.kangaroo_files import read_kangaroo
from spec_lab.propose.kangaroo import KangarooHead
from spec_lab.propose.trees import parse
from tests.oracles import kangaroo as oracle
from tests.propose.eagle_heads import SIZES, written
from tests.propose.kangaroo_adapters import adapter
from tests.propose.lab import COLD
from tests.tiny import tiny_target

H = 32
REQUEST = Request(0, "p0", (1, 2), COLD, 6, frozenset())
SHAPE = "0 1 0.0 0.1 1.0 0.0.0"


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=3)


@pytest.fixture(params=[1, 2])
def driven(request, target, tmp_path):
    """The adapter, and what it should return: whole exit states ``[n, H]`` -> logits ``[V]`` at the last of them."""
    config, w = adapter(H, 2, layers=request.param)
    network = read_kangaroo(written(tmp_path, config, w), target).network
    timed = Clock(torch.device("cpu")).phase("propose_forward")

    def expected(exits):
        return target.services.lm_head(oracle.adapter(w, exits, SIZES)[-1])

    return KangarooHead(network, target, 6), expected, timed


class Sequence:
    """Random exit states of one sequence, and what the adapter knows of it."""

    def __init__(self, own, seed):
        self.own, self.generator = own, torch.Generator().manual_seed(seed)
        self.known, self.state, self.computed = torch.empty(0, H, dtype=torch.float64), own.init(REQUEST), 0

    def more(self, count):
        return torch.randn(count, H, generator=self.generator, dtype=torch.float64)

    def commit(self, exits):
        """What the target computes is observed."""
        self.known = torch.cat([self.known[: self.computed], exits])
        holder = SimpleNamespace(state=self.state)
        self.own.observe([Observation(holder, self.computed, [0] * (len(exits) + 1), exits.clone())])
        self.computed += len(exits)


def step(own, timed, expected, sequences, pending, accepted):
    """A step in which every sequence has a tree; the nodes ``accepted`` of each are committed."""
    exits = [one.more(count) for one, count in zip(sequences, pending, strict=True)]
    found = own.roots(sequences, pending, torch.cat(exits), timed).logits
    for one, given, logits in zip(sequences, exits, found, strict=True):
        torch.testing.assert_close(logits, expected(torch.cat([one.known, given])), rtol=0, atol=1e-6)
    shape = forest((tree(parse(SHAPE)),) * len(sequences))
    nodes = torch.randn(shape.nodes, H, generator=sequences[0].generator, dtype=torch.float64)
    for depth in (1, 2, 3):
        rows = np.flatnonzero(shape.depth == depth)
        found = own.nodes(sequences, shape, rows, nodes[rows - shape.roots], timed).logits
        for row, logits in zip(rows, found, strict=True):
            root = next(number for number, some in enumerate(shape.trees) if row in some)
            path = nodes[[node - shape.roots for node in shape.path(row)]]
            whole = torch.cat([sequences[root].known, exits[root], path])
            torch.testing.assert_close(logits, expected(whole), rtol=0, atol=1e-6)
    for root, (one, given, kept) in enumerate(zip(sequences, exits, accepted, strict=True)):
        own_rows = shape.trees[root][1:][list(kept)] if kept else []
        one.commit(torch.cat([given, nodes[[row - shape.roots for row in own_rows]]]))


@torch.no_grad()
def test_logits_are_those_of_whole_sequences_over_steps_with_rejections(driven):
    own, expected, timed = driven
    sequences = [Sequence(own, 1), Sequence(own, 2)]
    sequences[0].commit(sequences[0].more(5))  # a prompt, of one sequence only
    for pending, accepted in [
        ((1, 4), ((0, 2), ())),
        ((1, 1), ((), (1,))),
        ((3, 1), ((0, 2, 5), (0,))),
        ((1, 2), ((),) * 2),
    ]:
        step(own, timed, expected, sequences, pending, accepted)
    sequences[1].commit(sequences[1].more(3))  # a step without a draft
    step(own, timed, expected, sequences, (1, 1), ((1,), (0, 3)))
    for one in sequences:
        one.state.close()
    assert not own.lm.cells.references.any()


@torch.no_grad()
def test_forks_and_rewinds_forget_what_they_should(driven):
    own, expected, timed = driven
    first = Sequence(own, 1)
    first.commit(first.more(4))
    step(own, timed, expected, [first], (2,), ((0, 2),))
    twin = Sequence(own, 3)
    twin.state.close()
    twin.state, twin.known, twin.computed = first.state.fork(), first.known, first.computed
    for length in (7, 5, 5, 1, 0):
        own.rewind(twin.state, length)
        twin.computed = length
        twin.known = twin.known[:length]
        step(own, timed, expected, [first, twin], (1, 2), ((1,), (0, 3)))
    own.rewind(first.state, first.computed)  # nothing to forget but the tentative nodes
    step(own, timed, expected, [first], (1,), ((),))
    for one in (first, twin):
        one.state.close()
    assert not own.lm.cells.references.any()
