"""Early exit: its stated distributions, its work, what is left in the KV cache after any history, and refusals."""

from collections import Counter

import pytest
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine
from spec_lab.decode.proposer import Requires
from spec_lab.drafters.early_exit import EarlyExit, FirstLayers
from spec_lab.models.layer_checks import check_exit
from spec_lab.models.support import Unsupported
from spec_lab.propose.best_first import Budget
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token, Traversal
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    calls,
    compare_stated,
    decode,
    emitted,
    plain_greedy,
    plain_logits,
    requests,
)
from tests.tiny import tiny_model, tiny_target

TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
PLANS = {
    "chain": TreePlan(parse("1x1x1x1")),
    "confident": TreePlan(parse("1x1x1x1"), confidence=0.3),
    "tree": TreePlan(parse(TREE), "deterministic"),
    "sampled tree": TreePlan(parse(TREE), "without_replacement", 1.0),
    "best first": TreePlan(drawn="deterministic", budget=Budget(6, 2, 3, 2)),
    "reranked": TreePlan(drawn="deterministic", budget=Budget(5, 3, 3, 3, rerank=True)),
}
LAYERS = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=LAYERS)


def early_exit(target, plan="chain", layers=2):
    return EarlyExit(target.lm, layers, PLANS[plan] if isinstance(plan, str) else plan)


def first_layers(layers):
    """The draft as a model of its own."""
    model = tiny_model(num_hidden_layers=LAYERS)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


# Tokens and distributions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, plan, layers):
    group, steps = decode(target, early_exit(target, plan, layers), requests())
    assert emitted(group) == truth
    assert not target.lm.cells.references.any()
    assert sum(step.draft.shape.nodes for step in steps) > 0
    assert max(map(calls, steps)) <= PLANS[plan].depth


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "gemma", "phi", "opt"])
def test_other_families_do_as_well(family):
    target = tiny_target(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3})
    wanted = [plain_greedy(target.lm.model, prompt, 8) for prompt in PROMPTS]
    assert emitted(decode(target, early_exit(target, "tree", 2), requests(new=8))[0]) == wanted


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@pytest.mark.parametrize("layers", [1, 3])
def test_stated_distributions_are_those_of_the_first_layers(target, layers, drawn):
    proposer = early_exit(target, TreePlan(parse("2x1x1"), drawn), layers)
    proposer.lm = target.lm
    draft = first_layers(layers)
    compared, rejections = compare_stated(
        target, proposer, requests(WARM, 12), lambda text, path: plain_logits(draft, [*text, *path]), atol=1e-10
    )
    assert compared > 20 and rejections > 2


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.parametrize("plan", ["chain", "sampled tree", "best first"])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, plan, sampling):
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, early_exit(target, plan), wanted)[0])
    assert together == [emitted(decode(target, early_exit(target, plan), [request])[0])[0] for request in wanted]


# Work --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["chain", "tree", "best first"])
def test_each_row_runs_each_layer_once(plan):
    target, rows = tiny_target(num_hidden_layers=LAYERS), Counter()
    proposer = early_exit(target, plan)
    assert len(target.lm.sublayers) == 2 * LAYERS  # found by a forward of one token
    for number, layer in enumerate(target.lm.model.model.layers):
        layer.register_forward_hook(lambda _, args, __, number=number: rows.update({number: args[0].shape[1]}))
    _, steps = decode(target, proposer, requests())
    assert rows == dict.fromkeys(range(LAYERS), sum(sum(step.pending) + step.draft.shape.nodes for step in steps))


def test_nodes_that_are_not_kept_run_the_first_layers_only():
    target, rows = tiny_target(num_hidden_layers=LAYERS), Counter()
    with torch.no_grad():  # unequal probabilities: deeper nodes are better than some that were expanded
        target.lm.model.lm_head.weight.mul_(20)
    proposer = early_exit(target, "reranked")
    assert len(target.lm.sublayers) == 2 * LAYERS  # found by a forward of one token
    for number, layer in enumerate(target.lm.model.model.layers):
        layer.register_forward_hook(lambda _, args, __, number=number: rows.update({number: args[0].shape[1]}))
    _, steps = decode(target, proposer, requests())
    assert rows[2] == rows[3] == sum(sum(step.pending) + step.draft.shape.nodes for step in steps) < rows[0] == rows[1]


# Histories ---------------------------------------------------------------------------------------------------------


def test_an_aborted_request_gives_its_cells_back(target, truth):
    engine = Engine(Arm(target, early_exit(target), Token(), CounterDraws(0)))
    for request in requests():
        engine.add(request)
    engine.step()
    engine.step()
    engine.abort(1)
    while engine.has_unfinished():
        engine.step()
    texts = emitted(engine)
    assert texts[0] == truth[0] and texts[2] == truth[2] and texts[1] == truth[1][: len(texts[1])]
    assert not target.lm.cells.references.any()


def test_an_abandoned_draft_is_given_back(target, monkeypatch):
    """The step fails after the draft, before the target's forward."""
    engine = Engine(Arm(target, early_exit(target, "tree"), Traversal(), CounterDraws(0)))
    for request in requests():
        engine.add(request)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(target.lm, "prepare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not target.lm.cells.references.any()


# Heads of its own --------------------------------------------------------------------------------------------------


class Recorded(FirstLayers):
    """The target's final norm and LM head after two layers, and what is observed."""

    def __init__(self, target, plan, hidden):
        super().__init__(target.lm, 2, PLANS[plan], "recorded", hidden)
        self.services, self.seen, self.ended = target.services, {}, 0

    def init(self, request):
        return [request.id]

    def fork(self, state):
        return list(state)

    def close(self, state):
        self.ended += 1

    def observe(self, observed):
        for each in observed:
            for number, state in enumerate(each.hidden):
                self.seen[each.sequence.state[0], each.start + number] = state

    def root_logits(self, sequences, pending, part, timed):
        assert len(part.exits) == sum(pending) and [sequence.state[0] for sequence in sequences]
        return self._logits(part.exits[torch.tensor(pending).cumsum(0) - 1])

    def node_logits(self, sequences, shape, rows, part, timed):
        assert len(rows) == len(part.exits) and len(sequences) == shape.roots
        return self._logits(part.exits)

    def _logits(self, exits):
        return RowLogits.of(self.services.lm_head(self.services.final_norm(exits)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", ["chain", "tree", "best first"])
def test_a_drafter_gets_the_exit_states_of_every_row_and_position(target, truth, plan):
    """With all hidden states, also those below the exit, and those before and after the final norm."""
    recorded = Recorded(target, plan, (0, 1, 2, 3, LAYERS, -1))
    group, steps = decode(target, recorded, requests())
    assert emitted(group) == truth
    _, same = decode(target, early_exit(target, plan, 2), requests())
    assert all(torch.equal(a.draft.token, b.draft.token) for a, b in zip(steps, same, strict=True))
    assert recorded.ended == 3
    for sequence in group.sequences:
        ids = torch.tensor([sequence.tokens])
        before, model = [], target.lm.model
        with (
            torch.no_grad(),
            model.model.norm.register_forward_pre_hook(lambda _, args, kept=before: kept.append(*args)),
        ):
            states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        wanted = torch.cat([*(state[0] for state in states[:LAYERS]), before[0][0], states[-1][0]], -1)
        length = len(sequence.tokens) - 1
        observed = torch.stack([recorded.seen[sequence.request.id, position] for position in range(length)])
        torch.testing.assert_close(observed, wanted[:length], rtol=0, atol=1e-10)


# Loading -----------------------------------------------------------------------------------------------------------


def test_options_are_checked(target):
    assert EarlyExit.load(target, depth=3).layers == 1
    proposer = EarlyExit.load(target, 3, tree="2x1", drawn="deterministic")
    assert proposer.facts["layers"] == 3 and proposer.facts["of_layers"] == LAYERS
    assert proposer.requires == Requires(abilities=frozenset({"layer_ranges"}))
    for layers, why in ((4, "at most 3"), (0, "1 or more"), (True, "whole number"), (1.5, "whole number")):
        with pytest.raises(ValueError, match=f"layers must be .*{why}"):
            EarlyExit.load(target, layers, depth=3)
    with pytest.raises(ValueError, match="does not fit a vocabulary"):
        EarlyExit.load(target, 1, tree="62", drawn="deterministic")
    with pytest.raises(Unsupported, match="single layer"):
        EarlyExit.load(tiny_target(num_hidden_layers=1), depth=3)


def test_a_model_that_continues_wrongly_is_refused():
    """A layer that reads more than the hidden states of the one before."""
    model = tiny_model(num_hidden_layers=3)
    last = [0.0]
    model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] + last[0], *args[1:]))
    model.model.layers[0].register_forward_hook(lambda _, __, out: last.insert(0, out.sum()))
    with pytest.raises(Unsupported, match="continues wrongly after 1 layers"):
        check_exit(CausalLM(model), 1, "odd")
    sound = CausalLM(tiny_model(num_hidden_layers=3))
    assert check_exit(sound, 2, "llama").error < 1e-12 and not sound.cells.references.any()
