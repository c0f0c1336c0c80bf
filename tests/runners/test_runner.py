"""Runners: what they declare, what the engine does with runners that can do less, and a runner without transformers."""

from dataclasses import dataclass, field

import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.clock import Clock
from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.proposer import Requires
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.best_first import Budget
from spec_lab.propose.calibrate import conditions
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.runner import ABILITIES, Capabilities, Extended, Output, Runner
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, code, logits, table_models
from spec_lab.verify import Token, Traversal
from tests.constrain.scripted import Scripted, after
from tests.labs import lab
from tests.propose.lab import COLD, WARM, draft_model, emitted, requests
from tests.tiny import CONTEXT, VOCABULARY, tiny_model, tiny_target


class Declaring(CausalLM):
    """Declares other capabilities than it has, and counts the sequences of each forward."""

    def __init__(self, capabilities):
        super().__init__(tiny_model())
        self.declared, self.widths = capabilities, []

    @property
    def capabilities(self):
        return self.declared

    def prepare(self, sequences, pending, draft, prefill=()):
        self.widths.append(len(sequences) + len(prefill))
        return super().prepare(sequences, pending, draft, prefill)


def declaring(**capabilities):
    return Target(Declaring(Capabilities(**capabilities)), None, "declaring", CONTEXT, "", 0.0)


# Abilities -----------------------------------------------------------------------------------------------------------


def requiring(**names):
    """The null proposer with these requirements."""

    class Requiring(Null):
        requires = Requires(**names)

    return Requiring()


@pytest.mark.parametrize("ability", ABILITIES)
def test_a_proposer_that_requires_an_ability_that_the_runner_lacks_is_refused_at_once(ability):
    others = frozenset(ABILITIES) - {ability}
    with pytest.raises(ValueError, match=f"'none' requires {ability} ") as refused:
        Engine(Arm(declaring(abilities=others), requiring(abilities=frozenset({ability})), Token(), CounterDraws(0)))
    assert all(other in str(refused.value) for other in others), "what the runner has is named"


def test_a_proposer_whose_requirements_the_runner_meets_is_accepted():
    target = declaring(hidden_layers=2, abilities=frozenset(ABILITIES))
    Engine(Arm(target, requiring(hidden=(1, -1), abilities=frozenset(ABILITIES)), Token(), CounterDraws(0))).close()


def test_a_runner_without_hidden_states_refuses_a_proposer_that_requires_one():
    with pytest.raises(ValueError, match=r"'none' requires hidden state -1 .* no hidden states"):
        Engine(Arm(declaring(), requiring(hidden=(-1,)), Token(), CounterDraws(0)))


# Sequences at once ---------------------------------------------------------------------------------------------------


def decoded(target, proposer, limits=None, applied=None, sampling=WARM):
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0), applied), limits=limits or Limits())
    for request in requests(sampling, new=8):
        engine.add(request)
    list(engine)
    assert not target.lm.cells.references.any()
    return engine


@pytest.mark.each_value
@pytest.mark.parametrize("limits", [Limits(), Limits(max_batch_size=2), Limits(max_prefill_tokens=4)], ids=repr)
@pytest.mark.parametrize("sequences", [1, 2])
def test_requests_wait_where_the_runner_computes_fewer_sequences_at_once(sequences, limits):
    target = declaring(sequences=sequences)
    engine = decoded(target, draft_model("1x1"), limits)
    assert max(target.lm.widths) == sequences
    assert emitted(engine) == emitted(decoded(tiny_target(), draft_model("1x1")))


@pytest.mark.each_value
@pytest.mark.parametrize(("leaves", "at_once"), [(6, 2), (5, 1), (1, 1), (100, 3)])
def test_requests_wait_where_the_runner_computes_fewer_leaves_at_once(leaves, at_once):
    """A tree of three nodes may have three leaves; with one request at once any tree is tried."""
    target = declaring(leaves=leaves)
    engine = decoded(target, draft_model("0 1 0.0", "without_replacement"))
    assert max(target.lm.widths) == at_once
    assert emitted(engine) == emitted(decoded(tiny_target(), draft_model("0 1 0.0", "without_replacement")))


@pytest.mark.parametrize("sequences", [1, 2])
def test_forks_wait_where_the_runner_computes_fewer_sequences_at_once(sequences):
    def forked(target):
        script = after(2, [Branch(), Branch(), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), VOCABULARY, "scripted"))
        engine = decoded(target, Null(), applied=applied, sampling=COLD)
        return {(sequence.request.id, sequence.lineage): sequence.emitted for sequence in engine.sequences}

    target = declaring(sequences=sequences)
    copies = forked(target)
    assert max(target.lm.widths) == sequences and len(copies) == 9
    assert copies == forked(tiny_target())


# A runner without transformers ---------------------------------------------------------------------------------------

TOY = RandomToy(seed=5, plain=True)
LENGTH = 6
"""Tokens after the prompt for which there are tables."""


@dataclass
class Text:
    """A KV cache that is a list of tokens; of each held node it keeps the tokens from its root down, by its place."""

    tokens: list = field(default_factory=list)
    held: dict = field(default_factory=dict)
    forks: list = field(default_factory=list)
    closed: bool = False

    def __len__(self):
        return len(self.tokens)

    def accept(self, nodes=()):
        held, self.held = self.held, {}
        if len(nodes):
            path = held[int(nodes[-1])]
            assert [held[int(node)] for node in nodes] == [path[: n + 1] for n in range(len(path))]
            self.tokens += path

    def truncate(self, length):
        assert 0 <= length <= len(self)
        self.held, self.tokens = {}, self.tokens[:length]

    def fork(self):
        self.forks.append(Text(list(self.tokens)))
        return self.forks[-1]

    def close(self):
        self.closed = True


class Lookup(Runner):
    """Looks logits up in the tables of a toy model: no module, no cells, no attention mask."""

    device, dtype, vocabulary = torch.device("cpu"), torch.float64, TOY.v
    capabilities = Capabilities()

    def __init__(self, side, capabilities=None):
        self.tables = [logits(TOY.probabilities(length)[side]) for length in range(LENGTH + 1)]
        self.clock, self.forwards, self.opened = Clock(), 0, []
        self.capabilities = capabilities or Capabilities()

    def row(self, tokens):
        text = tokens[len(PROMPT) :]
        assert tuple(tokens[: len(PROMPT)]) == PROMPT
        return torch.from_numpy(self.tables[len(text)][code(text, TOY.v)])

    def open(self, reserve=0):
        self.opened.append(Text())
        return self.opened[-1]

    def capture(self, layers=()):
        assert not layers

    def prepare(self, sequences, pending, draft, prefill=()):
        for sequence, tokens in (*zip(sequences, pending, strict=True), *prefill):
            assert len(tokens) and not sequence.held and not sequence.closed
            sequence.tokens += tokens
        shape = draft.shape
        texts = [[*sequence.tokens] for sequence in sequences]
        return texts + self.nodes(sequences, shape, range(shape.roots, shape.rows), draft.token.tolist())

    def nodes(self, sequences, shape, rows, tokens):
        """Hold these rows of a forest, parents first; their texts."""
        texts = []
        for row, token in zip(rows, tokens, strict=True):
            sequence, parent = sequences[shape.root[row]], shape.parent[row - shape.roots]
            above = [] if parent < shape.roots else sequence.held[int(shape.places[parent])]
            sequence.held[int(shape.places[row])] = [*above, token]
            texts.append([*sequence.tokens, *above, token])
        return texts

    def run(self, prepared):
        self.forwards += 1
        return Output(torch.stack([self.row(text) for text in prepared]) if prepared else torch.empty(0, TOY.v), 0)

    def forward(self, sequences, pending, draft, *, timed=None):
        with timed:
            return self.run(self.prepare(sequences, pending, draft))

    def extend(self, sequences, shape, rows, token, timed=None):
        with timed:
            return Extended(self.run(self.nodes(sequences, shape, rows.tolist(), token.tolist())).logits, None)

    def freed(self):
        every = list(self.opened)
        for sequence in every:
            every += sequence.forks
        return bool(every) and all(sequence.closed for sequence in every)


def lookups(capabilities=None):
    """A target and a draft model that are looked up."""
    return Target(Lookup(0, capabilities), None, "lookup", len(PROMPT) + LENGTH, "", 0.0), Lookup(1)


def toy_requests(sampling):
    """Texts of unequal lengths."""
    starts = ((), (2,), (3, 1), (0,))
    return [Request(n, f"p{n}", (*PROMPT, *start), sampling, LENGTH - 1) for n, start in enumerate(starts)]


def decode_toys(target, proposer, verifier, sampling, limits=None, applied=None):
    """Return each sequence's tokens, and those drafted and accepted in each step."""
    engine = Engine(Arm(target, proposer, verifier, CounterDraws(3), applied), limits=limits or Limits())
    for request in toy_requests(sampling):
        engine.add(request)
    steps = [(info.draft.token.tolist(), [done.path for done in info.committed]) for info in engine]
    assert not engine.errors
    return {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }, steps


DRAFTS = {
    "chain": ("1x1x1", "iid", Token()),
    "tree of the likeliest": ("0 1 0.0 0.1 1.0 0.0.0", "deterministic", Token()),
    "tree without replacement": ("0 1 0.0 1.0", "without_replacement", Traversal()),
    "best first": (Budget(6, 2, 3, 2), "iid", Token()),
}


def drafting(kind, target, draft):
    tree, drawn, verifier = DRAFTS[kind]
    if isinstance(tree, Budget):
        return DraftModel(draft, target.context, TreePlan((), drawn, 1.0, budget=tree)), verifier
    return DraftModel(draft, target.context, TreePlan(parse(tree), drawn, 1.0)), verifier


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(2, 4), Limits(None, None, 40)], ids=["all", "chunks", "little memory"]
)
@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.7, top_k=3)], ids=["greedy", "warm", "truncated"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.each_value
def test_the_engine_decodes_with_any_runner_as_with_a_model_of_transformers(kind, sampling, limits):
    """Target and draft model: the same drafts in every step, and the same output."""
    target, draft = lookups()
    outputs = decode_toys(target, *drafting(kind, target, draft), sampling, limits)
    assert any(drafted for drafted, _ in outputs[1]) and target.lm.freed() and draft.freed()
    toys = table_models(TOY, LENGTH)
    assert outputs == decode_toys(toys[0], *drafting(kind, *toys), sampling, limits)


@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_decoding_with_any_runner_emits_its_likeliest_tokens(kind):
    target, draft = lookups()
    outputs, steps = decode_toys(target, *drafting(kind, target, draft), COLD)
    for request in toy_requests(COLD):
        text = list(request.tokens)
        while len(text) < min(target.context, len(request.tokens) + request.max_new_tokens):
            text.append(int(target.lm.row(text).argmax()))
        assert outputs[request.id, ()][0] == text[len(request.tokens) :]
    assert target.lm.forwards == len(steps) and any(path for _, paths in steps for path in paths)


def test_forks_and_removed_tokens_need_no_cells():
    def decoded(target, draft):
        script = after(2, [Branch(), Branch(1), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), TOY.v, "scripted"))
        return decode_toys(target, *drafting("chain", target, draft), WARM, applied=applied)

    target, draft = lookups(Capabilities(sequences=3))
    outputs, _ = decoded(target, draft)
    assert len(outputs) == 12 and target.lm.freed() and draft.freed()
    assert outputs == decoded(*table_models(TOY, LENGTH))[0]


def test_what_requires_a_model_of_transformers_is_refused_with_another_runner():
    target, _ = lookups()
    for use in (lambda: target.model, lambda: target.services):
        with pytest.raises(Unsupported, match="'lookup' .* Lookup"):
            use()
    assert target.vocabulary == TOY.v and target.ends == frozenset()


def test_limits_are_measured_with_the_threads_that_a_runner_states(monkeypatch):
    laboratory = lab()
    monkeypatch.setattr(type(laboratory.target.lm), "threads", 3)
    assert laboratory.roofline().limits.threads == 3


def test_a_model_of_transformers_drafts_for_a_target_with_another_runner():
    target, _ = lookups()
    lm = target.draft_runner(tiny_model(), "")
    assert isinstance(lm, CausalLM) and lm.attention == "per_sequence"
    assert lm.forward([lm.open()], [[1, 2]], empty(1)).logits.shape == (1, VOCABULARY)


def test_the_costs_of_steps_depend_on_what_the_runner_states():
    target, _ = lookups()
    facts, other = (conditions(each_target, "heads", parse("0 1"), 1, COLD) for each_target in (target, tiny_target()))
    assert other.keys() - facts.keys() == {
        "devices",
        "parameters",
        "dtype",
        "kv_dtype",
        "attention",
        "graphs",
        "packed",
    }
