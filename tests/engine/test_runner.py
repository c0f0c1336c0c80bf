"""Runners: what they declare, and what the engine does with runners that can do less."""

import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.engine import Engine, Limits
from spec_lab.engine.proposer import Requires, check_requires
from spec_lab.engine.runner import ABILITIES, Capabilities
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.verify import Token
from tests.constrain.scripted import Scripted, after
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
        Engine(declaring(abilities=others), requiring(abilities=frozenset({ability})), Token(), CounterDraws(0))
    assert all(other in str(refused.value) for other in others), "what the runner has is named"


def test_a_runner_without_any_ability_is_named_as_such():
    with pytest.raises(ValueError, match="'none' requires layer_ranges .* no such ability"):
        check_requires(requiring(abilities=frozenset({"layer_ranges"})), declaring().lm)


def test_a_proposer_whose_requirements_the_runner_meets_is_accepted():
    target = declaring(hidden_layers=2, abilities=frozenset(ABILITIES))
    Engine(target, requiring(hidden=(1, -1), abilities=frozenset(ABILITIES)), Token(), CounterDraws(0)).close()


def test_a_runner_without_hidden_states_refuses_a_proposer_that_requires_one():
    with pytest.raises(ValueError, match=r"'none' requires hidden state -1 .* no hidden states"):
        Engine(declaring(), requiring(hidden=(-1,)), Token(), CounterDraws(0))


# Sequences at once ---------------------------------------------------------------------------------------------------


def decoded(target, proposer, limits=None, applied=None, sampling=WARM):
    engine = Engine(target, proposer, Token(), CounterDraws(0), applied, limits=limits or Limits())
    for request in requests(sampling, new=8):
        engine.add(request)
    list(engine)
    assert not target.lm.cells.references.any()
    return engine


@pytest.mark.parametrize("limits", [Limits(), Limits(max_batch_size=2), Limits(max_prefill_tokens=4)], ids=repr)
@pytest.mark.parametrize("sequences", [1, 2])
def test_requests_wait_where_the_runner_computes_fewer_sequences_at_once(sequences, limits):
    target = declaring(sequences=sequences)
    engine = decoded(target, draft_model("1x1"), limits)
    assert max(target.lm.widths) == sequences
    assert emitted(engine) == emitted(decoded(tiny_target(), draft_model("1x1")))


@pytest.mark.parametrize("sequences", [1, 2])
def test_forks_wait_where_the_runner_computes_fewer_sequences_at_once(sequences):
    def forked(target):
        script = after(2, [Branch(), Branch(), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), VOCABULARY, "scripted"))
        engine = decoded(target, Null(), applied=applied, sampling=COLD)
        return {(one.request.id, one.lineage): one.emitted for one in engine.sequences}

    target = declaring(sequences=sequences)
    found = forked(target)
    assert max(target.lm.widths) == sequences and len(found) == 9
    assert found == forked(tiny_target())
