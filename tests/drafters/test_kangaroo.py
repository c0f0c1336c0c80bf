"""Kangaroo: the adapter with a KV cache agrees with one over whole texts, by hand and as a proposer; refusals."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_lab.core.clock import Clock
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.core.shape import forest, tree
from spec_lab.decode.proposer import Observation
from spec_lab.drafters.kangaroo import propose as kangaroo
from spec_lab.drafters.kangaroo.files import read_kangaroo
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.models.support import Unsupported
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.draft_pass import Partial
from spec_lab.verify import Traversal
from tests.drafters.eagle_heads import SIZES, written
from tests.drafters.kangaroo_adapters import adapter
from tests.oracles import kangaroo as oracle
from tests.propose.lab import COLD, WARM, compare_stated, decode, emitted, plain_greedy, requests
from tests.tiny import tiny_target

H = 32
REQUEST = Request(0, "p0", (1, 2), COLD, 6, frozenset())
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
SHAPE = "0 1 0.0 0.1 1.0 0.0.0"


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=3)


@pytest.fixture(params=[1, 2])
def driven(request, target, tmp_path):
    """The adapter, and what it should return: whole exit states ``[n, H]`` -> logits ``[V]`` at the last of them."""
    config, w = adapter(H, 2, layers=request.param)
    network = read_kangaroo(written(tmp_path, config, w), target)
    timed = Clock(torch.device("cpu")).phase("propose_forward")

    def expected(exits):
        return target.services.lm_head(oracle.adapter(w, exits, SIZES)[-1])

    return KangarooDrafter(network, target, TreePlan(parse(SHAPE))), expected, timed


class Sequence:
    """Random exit states of one sequence, and what the adapter knows of it."""

    def __init__(self, drafter, seed):
        self.own, self.generator = drafter, torch.Generator().manual_seed(seed)
        self.known, self.state, self.computed = torch.empty(0, H, dtype=torch.float64), drafter.init(REQUEST), 0

    def more(self, count):
        return torch.randn(count, H, generator=self.generator, dtype=torch.float64)

    def commit(self, exits):
        """Observe the target's outputs."""
        self.known = torch.cat([self.known[: self.computed], exits])
        holder = SimpleNamespace(state=self.state)
        self.own.observe([Observation(holder, self.computed, [0] * (len(exits) + 1), exits.clone())])
        self.computed += len(exits)


def step(drafter, timed, expected, sequences, pending, accepted):
    """A step in which every sequence has a tree; the nodes ``accepted`` of each are committed."""
    exits = [sequence.more(count) for sequence, count in zip(sequences, pending, strict=True)]
    root_logits = drafter.root_logits(sequences, pending, Partial(None, torch.cat(exits)), timed).logits
    for sequence, given, logits in zip(sequences, exits, root_logits, strict=True):
        torch.testing.assert_close(logits, expected(torch.cat([sequence.known, given])), rtol=0, atol=1e-6)
    shape = forest((tree(parse(SHAPE)),) * len(sequences))
    nodes = torch.randn(shape.nodes, H, generator=sequences[0].generator, dtype=torch.float64)
    for depth in (1, 2, 3):
        rows = np.flatnonzero(shape.depth == depth)
        node_logits = drafter.node_logits(
            sequences, shape, rows, Partial(None, nodes[rows - shape.roots]), timed
        ).logits
        for row, logits in zip(rows, node_logits, strict=True):
            root = next(number for number, some in enumerate(shape.trees) if row in some)
            path = nodes[[node - shape.roots for node in shape.path(row)]]
            whole = torch.cat([sequences[root].known, exits[root], path])
            torch.testing.assert_close(logits, expected(whole), rtol=0, atol=1e-6)
    for root, (sequence, given, kept) in enumerate(zip(sequences, exits, accepted, strict=True)):
        own_rows = shape.trees[root][1:][list(kept)] if kept else []
        sequence.commit(torch.cat([given, nodes[[row - shape.roots for row in own_rows]]]))


@torch.no_grad()
def test_logits_are_those_of_whole_sequences_over_steps_with_rejections(driven):
    drafter, expected, timed = driven
    sequences = [Sequence(drafter, 1), Sequence(drafter, 2)]
    sequences[0].commit(sequences[0].more(5))  # a prompt, of one sequence only
    for pending, accepted in [
        ((1, 4), ((0, 2), ())),
        ((1, 1), ((), (1,))),
        ((3, 1), ((0, 2, 5), (0,))),
        ((1, 2), ((),) * 2),
    ]:
        step(drafter, timed, expected, sequences, pending, accepted)
    sequences[1].commit(sequences[1].more(3))  # a step without a draft
    step(drafter, timed, expected, sequences, (1, 1), ((1,), (0, 3)))
    for sequence in sequences:
        sequence.state.close()
    assert not drafter.lm.cells.references.any()


@torch.no_grad()
def test_forks_and_rewinds_forget_what_they_should(driven):
    drafter, expected, timed = driven
    first = Sequence(drafter, 1)
    first.commit(first.more(4))
    step(drafter, timed, expected, [first], (2,), ((0, 2),))
    twin = Sequence(drafter, 3)
    twin.state.close()
    twin.state, twin.known, twin.computed = first.state.fork(), first.known, first.computed
    for length in (7, 5, 5, 1, 0):
        drafter.rewind(twin.state, length)
        twin.computed = length
        twin.known = twin.known[:length]
        step(drafter, timed, expected, [first, twin], (1, 2), ((1,), (0, 3)))
    drafter.rewind(first.state, first.computed)  # nothing to forget but the tentative nodes
    step(drafter, timed, expected, [first], (1,), ((),))
    for sequence in (first, twin):
        sequence.state.close()
    assert not drafter.lm.cells.references.any()


# As a proposer ------------------------------------------------------------------------------------------------------


def reference(target, w, exit_layer):
    """Logits ``[V]`` after ``text`` and a drafted ``path``, by plain forwards over all of it."""

    def expected(text, path):
        ids = torch.tensor([[*text, *path]])
        every = target.lm.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return target.services.lm_head(oracle.adapter(w, every[exit_layer][0], SIZES)[-1])

    return expected


@pytest.mark.each_value
@pytest.mark.parametrize(("exit_layer", "layers"), [(1, 1), (2, 1), (2, 2)])
@torch.no_grad()
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(
    target, tmp_path, exit_layer, layers
):
    config, w = adapter(H, exit_layer, layers)
    proposer = kangaroo.load(
        target, written(tmp_path, config, w), depth=None, tree=TREE, drawn="without_replacement", confidence=0
    )
    expected = reference(target, w, exit_layer)
    compared, rejections = compare_stated(target, proposer, requests(WARM, new=14), expected)
    assert compared > 50 and rejections > 5
    assert not proposer.lm.cells.references.any()


@pytest.mark.parametrize("options", [
    {"depth": 6, "confidence": 0.6}, {"tree": TREE, "drawn": "deterministic"},
    {"nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
], ids=str)  # fmt: skip
def test_greedy_drafting_emits_the_target_s_tokens(target, tmp_path, options):
    proposer = kangaroo.load(target, written(tmp_path, *adapter(H, 2)), **options)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == [plain_greedy(target.lm.model, request.tokens, 20) for request in requests()]
    assert steps[0].draft.shape.nodes > 0, "the first layers run on the prompt before it is verified"
    assert not proposer.lm.cells.references.any()


@pytest.mark.parametrize("sampling", [COLD, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
def test_a_batch_decodes_as_its_requests_alone(target, tmp_path, sampling):
    folder = written(tmp_path, *adapter(H, 1))
    proposer = kangaroo.load(target, folder, tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


def test_each_row_runs_each_layer_of_the_target_once(tmp_path):
    target, rows = tiny_target(num_hidden_layers=3), Counter()
    proposer = kangaroo.load(target, written(tmp_path, *adapter(H, 1)), depth=4, confidence=0)
    for number, layer in enumerate(target.lm.model.model.layers):
        layer.register_forward_hook(lambda _, args, __, number=number: rows.update({number: args[0].shape[1]}))
    _, steps = decode(target, proposer, requests())
    assert rows == dict.fromkeys(range(3), sum(sum(info.pending) + info.draft.shape.nodes for info in steps))


def test_drafting_stops_after_the_first_token_of_low_confidence_which_stays(target, tmp_path):
    folder = written(tmp_path, *adapter(H, 2))
    proposer = kangaroo.load(target, folder, depth=6, confidence=0.05)
    _, steps = decode(target, proposer, requests(WARM))
    lengths = Counter()
    for info in steps:
        shape = info.draft.shape
        for tree_rows in shape.trees:
            lengths[len(tree_rows) - 1] += 1
            for row in tree_rows[:-1].tolist():  # of each drafted token
                sure = float(info.draft.q[info.draft.q_row[row]].max()) >= 0.05
                assert sure or row == tree_rows[-2], "nothing is drafted below a token of low confidence"
    assert lengths[1] and sum(count for length, count in lengths.items() if length > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 2}, r"exit_layer must be 1"),
        ({"depth": None, "tree": "99"}, r"tree"),
    ],
)
def test_wrong_options_are_refused_by_name(target, tmp_path, options, message):
    given = {"path": written(tmp_path, *adapter(H, 1)), "depth": 6} | options
    with pytest.raises(ValueError, match=message):
        kangaroo.load(target, **given)


def test_unknown_fields_are_refused_by_name(target, tmp_path):
    config, tensors = adapter(H, 1)
    with pytest.raises(ValueError, match=r"unknown: gate \(true\)"):
        kangaroo.load(target, written(tmp_path, config | {"gate": True}, tensors), depth=6)


def test_a_target_that_cannot_run_ranges_of_layers_is_refused(tmp_path):
    dense = tiny_target(attention="dense_mask", num_hidden_layers=3)
    with pytest.raises(Unsupported, match="kangaroo.*attention=dense_mask"):
        kangaroo.load(dense, written(tmp_path, *adapter(H, 1)), depth=6)
