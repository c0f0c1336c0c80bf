"""Decoding with ``distribution="global"`` has exactly the target's distribution given that the output is valid."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest

import spec_lab.decode.rows
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.engines.grammar import regex
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.potential import Potential
from spec_lab.constrain.protocol import TokenWeights
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.faults import PartError
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, fixed_group
from spec_lab.decode.global_constraint import Conditional
from spec_lab.tasks.certify.exact import decoded, examine
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import CONDITIONED, END, PIECES, PLAIN, Instance, conditioned
from spec_lab.tasks.certify.toy_models import RandomToy, code
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.test_certified import Healed
from tests.constrain.test_potential import words
from tests.constrain.toys import Table, distance, uneven
from tests.labs import Repeat
from tests.tasks.certify.parts import LOSSLESS
from tests.tiny import VOCABULARY, tiny_target

WORLD = RandomToy(5, support=2, plain=True)
STOP = frozenset({3})
ENUMERATED = [pair for pair in LOSSLESS if pair[1] != "gumbel"]  # Gumbel noise cannot be enumerated
PATTERN = "(ab|c)(a|b|c)*b|a[bc]"


def given_valid(constraint, placement="target", **options) -> AppliedConstraint:
    return AppliedConstraint(constraint, placement, distribution="global", **options)


def by_enumeration(toy: RandomToy, allowed, stop: int, length: int) -> dict:
    """p(x | valid): the product of the tables' probabilities for every valid text, renormalised."""
    masses = {}
    for count in range(1, length + 1):
        for text in product(range(toy.v), repeat=count):
            if text[-1] == stop and stop not in text[:-1]:
                steps = [(text[:number], token) for number, token in enumerate(text)]
                if all(token in allowed(before) for before, token in steps):
                    p = [toy.probabilities(len(before))[0][code(before, toy.v)][token] for before, token in steps]
                    masses[((text, "stop"),)] = float(np.prod(p))
    total = sum(masses.values())
    return {output: p / total for output, p in masses.items()}


def branching(text: tuple[int, ...]) -> list[int]:
    """Two or three tokens, and the end of the text but at its beginning and after token 1."""
    allowed = [token for token in range(3) if len(text) % 2 or token != (sum(text) + len(text)) % 3]
    return allowed + [3] * (bool(text) and text[-1] != 1)


def instance_of(tree: str, tokens: int, placement: str = "both", **options) -> Instance:
    return Instance(WORLD, tree, tokens, STOP, applied=given_valid(Table(branching), placement, **options))


@pytest.mark.parametrize(("length", "outputs"), [(2, 1), (3, 5), (4, 13)])
def test_the_reference_is_the_enumeration_of_the_tables(length, outputs):
    wanted = by_enumeration(WORLD, branching, 3, length)
    assert len(wanted) == outputs
    assert distance(truth(instance_of("1", length)), wanted) < 1e-14


@pytest.mark.each_value
@pytest.mark.parametrize("verifier", ENUMERATED, ids=lambda pair: f"{pair[0].name}, {pair[1]}")
@pytest.mark.parametrize("placement", ["target", "both"])
def test_every_verifier_has_the_conditional_distribution(verifier, placement):
    verifier, drawn = verifier
    tree = {"target": "2", "both": "1x1" if verifier.chains_only else "2x1"}[placement]
    instance = instance_of(tree, 3, placement, fast_forward=placement == "both")
    wanted = by_enumeration(WORLD, branching, 3, 3)
    assert distance(decoded(instance, drawn, verifier), wanted) < 1e-12


@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
@pytest.mark.parametrize("instance", conditioned(), ids=lambda instance: instance.name)
@pytest.mark.each_value
def test_certify_s_enumeration_under_a_grammar_finds_no_difference(instance, verifier):
    finding = examine(instance, "iid", verifier)
    assert finding.wrong is None
    assert finding.outcomes >= 5
    assert finding.drafted


@pytest.mark.each_value
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.9), Sampling(1.0, repetition_penalty=1.5)],
    ids=str,
)
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_what_the_sampling_truncates_has_no_probability(sampling, verifier):
    """The conditional distribution is that of what would be sampled without the constraint."""
    instance = instance_of("2x1", 3)
    wanted = truth(instance, sampling)
    assert distance(wanted, truth(instance)) > 1e-3
    assert distance(decoded(instance, "iid", verifier, sampling), wanted) < 1e-12


@pytest.mark.parametrize("options", [{"async_masks": True}, {"draft_budget": 1}, {"fast_forward": False}], ids=str)
def test_options_of_the_draft_do_not_change_it(options):
    instance = instance_of("2x1", 3, **options)
    assert distance(decoded(instance, "iid", Token()), by_enumeration(WORLD, branching, 3, 3)) < 1e-12


def test_it_composes_with_a_minimum_length_and_healing():
    grammar = regex(Vocabulary.plain(PIECES, 4), PATTERN)
    for constraint in (
        Combined([grammar, MinNewTokens(2, 5)]),
        Healed(b"ab"),
    ):
        instance = Instance(CONDITIONED, "1x1", 3, END, applied=given_valid(constraint, "both"))
        wanted = truth(instance)
        assert len(wanted) > 1
        assert distance(wanted, truth(replace(instance, applied=given_valid(grammar)))) > 0.01
        assert distance(decoded(instance, "iid", Token()), wanted) < 1e-12


# Faults ----------------------------------------------------------------------------------------------------------


@contextmanager
def weights_are(change):
    """Replace the potentials of every node."""
    right = Potential.weights.func
    with mock.patch.object(Potential, "weights", property(lambda self: [change(weights) for weights in right(self)])):
        yield


FAULTS = {
    "masked only": lambda: weights_are(lambda weights: TokenWeights(weights.tokens, np.ones(len(weights.tokens)))),
    "a potential twice": lambda: weights_are(lambda weights: TokenWeights(weights.tokens, weights.weight**2)),
    "in place of p": lambda: mock.patch.object(
        spec_lab.decode.rows,
        "condition_",
        lambda p, weights, right=spec_lab.decode.rows.condition_: right(p.fill_(1.0), weights),
    ),
    "a longer limit": lambda: mock.patch.object(Conditional, "_length", return_value=4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name):
    with FAULTS[name]():
        assert distance(decoded(instance_of("1x1", 3), "iid", Token()), by_enumeration(WORLD, branching, 3, 3)) > 1e-3


@pytest.mark.nightly
def test_the_masked_distribution_is_another_one():
    instance = instance_of("1x1", 4)
    local = decoded(replace(instance, applied=replace(instance.applied, distribution="local")), "iid", Token())
    assert distance(local, by_enumeration(WORLD, branching, 3, 4)) > 0.1


# Requests --------------------------------------------------------------------------------------------------------

TARGET_STOP = frozenset({2})


def texts_for(request: Request):
    """Each prompt has valid outputs of its own; prompt 9 has none."""
    first = request.tokens[0]
    return {9: [(5, 6)], 8: [(5, 2), (6, 7, 2)]}.get(first, [(first, 2), (first + 1, 4, 2), (5, first, 6, 2)])


class OfPrompt(Table):
    """A table for every prompt."""

    def start(self, request):
        return Table(words(*texts_for(request)), VOCABULARY).start(request)


def decode(target, firsts, applied, verifier=None, **changes):
    requests = [
        Request(number, f"r{number}", (first, 5, 9), Sampling(1.0), 5, TARGET_STOP, **changes)
        for number, first in enumerate(firsts)
    ]
    return fixed_group(Arm(target, Repeat(2), verifier or Token(), CounterDraws(0), applied), requests)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_each_request_of_a_batch_has_its_own_distribution(target):
    firsts = [11, 8, 11, 12, 8]
    group = decode(target, firsts, given_valid(OfPrompt(uneven, VOCABULARY), "both"))
    list(group)
    assert not group.errors
    for sequence in group.sequences:
        assert tuple(sequence.emitted) in texts_for(sequence.request) and sequence.finish == "stop"
    alone = [decode(target, [first], given_valid(OfPrompt(uneven, VOCABULARY))) for first in (11, 8)]
    for group_of_one, number in zip(alone, (0, 1), strict=True):
        group_of_one.add(replace(group.sequences[number].request, id=7, name="copy"))
        list(group_of_one)
    assert target.lm.cells.references.sum() == 0


def test_the_potential_is_computed_once_for_copies_of_a_request(target):
    calls = []

    def counted(*arguments, right=spec_lab.decode.global_constraint.potential):
        calls.append(arguments[1].name)
        return right(*arguments)

    with mock.patch.object(spec_lab.decode.global_constraint, "potential", counted):
        list(decode(target, [11, 11, 11, 8], given_valid(OfPrompt(uneven, VOCABULARY))))
    assert calls == ["r0", "r3"]


def test_a_request_without_a_valid_output_ends_alone(target):
    group = decode(target, [11, 9, 8], given_valid(OfPrompt(uneven, VOCABULARY), "both"))
    list(group)
    by_id = sorted(group.sequences, key=lambda sequence: sequence.request.id)
    assert [sequence.finish for sequence in by_id] == ["stop", "stuck", "stop"] and not by_id[1].emitted
    assert list(group.errors) == [by_id[1]]
    assert group.errors[by_id[1]].startswith("request 'r1'")
    assert "no output that the constraint allows ends within max_new_tokens" in group.errors[by_id[1]]


@pytest.mark.parametrize(
    ("changes", "applied", "words"),
    [
        (dict(sampling=Sampling(0.0)), {}, "at temperature 0 the model has one output.*sampling.temperature above 0"),
        (dict(stop=frozenset()), {}, "the target has no token that ends a text"),
        (dict(stop_strings=("a",)), {}, r"stop strings end outputs .* set stop_strings=\[\]"),
        ({}, dict(max_prefixes=3), "valid outputs have more than 3 prefixes of up to 5 tokens: set a smaller max_new"),
    ],
)
def test_requests_without_such_a_distribution_are_refused(target, changes, applied, words):
    valid = given_valid(OfPrompt(uneven, VOCABULARY), **applied)
    engine = Engine(Arm(target, Repeat(2), Token(), CounterDraws(0), valid, pieces=[b"x"] * VOCABULARY))
    request = replace(Request(0, "r0", (11, 5, 9), PLAIN, 5, TARGET_STOP), **changes)
    with pytest.raises(ValueError, match=f"^request 'r0': constraint.distribution=global .*{words}") as error:
        engine.add(request)
    assert "\n" not in str(error.value) and not engine.has_unfinished()


def test_constraints_whose_outputs_cannot_be_enumerated_are_refused():
    with pytest.raises(ValueError, match="distribution=global is not possible: 'table' backtracks, forks or ends"):
        given_valid(replace(Table(uneven), has_actions=True))

    class Alone(Table):
        supports_drafts = False

    with pytest.raises(ValueError, match="distribution=global is not possible: 'table' cannot be forked"):
        given_valid(Alone(uneven))


def test_logits_that_are_not_finite_end_the_run_by_name(target, monkeypatch):
    monkeypatch.setattr("spec_lab.decode.text_logits.finite_", lambda logits: np.array([True]))
    with pytest.raises(PartError, match="request 'r0': the target's logits are NaN or infinite"):
        list(decode(target, [11], given_valid(OfPrompt(uneven, VOCABULARY))))
