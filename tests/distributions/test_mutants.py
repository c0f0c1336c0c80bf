"""Broken verifiers, proposers, draws and loops, as found in public code: each is detected, its original is not."""

from pathlib import Path

import pytest
import torch

from spec_lab.core.randomness import Purpose
from spec_lab.core.request import Request
from spec_lab.tasks.certify.certificate import Control, prove
from spec_lab.tasks.certify.exact import toy_parts
from spec_lab.tasks.certify.instances import LOOPS, PLAIN, QUICK, STEPS, Instance
from spec_lab.tasks.certify.sampled import JOINT, scores
from spec_lab.tasks.certify.toy_models import PROMPT
from spec_lab.verify import Lenient, Token, Verdict
from tests.distributions import mutants, twin
from tests.distributions.mutants import ALPHA, MUTANTS, PINNED, WEIGHT_IS_S, WEIGHT_STAYS, identify
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES

NOTES = (
    "residual = p",
    "residual = |p-q|",
    "residual = p minus the rejected token",
    "q from the previous position",
    "bonus from one position early, or from q",
    "block early break",
    "block unscaled residual",
    "block h_i = p_i",
    "with/without replacement swapped",
    "siblings re-ranked",
    "top-k draft verified with softmax q",
    "recovery shares draft noise",
    "noise reused across steps",
    "grammar trim then bonus",
    "mask on residual only",
    "lenience 0.99",
    "traversal a <- S",
    "tokens after EOS",
)
"""The mutants that the notes on verification list: the exact layer must kill each."""

WORDS = {"step": "after [", "loop": "outputs ", "seam": "is used for two choices", "samples": "chi-square"}


def test_the_list_of_the_notes_is_complete():
    assert set(NOTES) <= {mutant.name for mutant in MUTANTS if mutant.layer in ("step", "loop")}
    assert len(NOTES) == 18
    assert len({identify(mutant) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=identify)
def test_a_mutant_is_killed(mutant):
    for case, kill in zip(mutant.cases, mutants.seen(mutant), strict=True):
        assert kill.where is not None
        assert WORDS[mutant.layer] in kill.where
        if mutant.layer != "samples":
            assert kill.tv == pytest.approx(case.tv, rel=0.05)
        assert mutants.original(mutant.layer, case.instance, case.drawn, mutant.original).where is None


@pytest.mark.nightly
def test_the_committed_table_is_this_one():
    file = Path(__file__).parents[2] / "experiments" / "exactness" / "mutants.csv"
    assert file.read_text() == mutants.table()


ENOUGH = (*QUICK, LOOPS[4])  # the instances that every run enumerates of its own pair, and a loop with a stop token
FREE = [
    mutant
    for mutant in MUTANTS
    if mutant.layer in ("step", "loop") and not isinstance(mutant.cases[0].instance.toy, mutants.Grammar)
]


@pytest.mark.parametrize("mutant", FREE, ids=identify)
@pytest.mark.one_in(9)
def test_a_few_instances_kill_all_mutants_that_need_no_grammar(mutant):
    """By another distribution, or because the verifier receives a draft that cannot have been drawn."""
    drafts, verifier = mutant.proposer or mutant.cases[0].drawn, mutant.verifier or mutant.original

    def survives(instance: Instance) -> bool:
        try:
            return mutants.check(mutant.layer, instance, drafts, verifier).where is None
        except ValueError as error:
            return "toy draft" not in str(error)

    with mutant.patch():
        assert not all(survives(instance) for instance in ENOUGH)


# Blind spots of each layer


@pytest.mark.parametrize(
    "patch",
    [mutants.same_step, lambda: mutants.shared(Purpose.STOP), lambda: mutants.shared(Purpose.EMIT)],
    ids=["reused across steps", "shared with the test", "shared with the residual"],
)
def test_a_single_step_s_distribution_is_blind_to_noise(patch):
    """It checks the distribution of each choice, not whether the choices are independent."""
    with patch(), mutants.inverse():
        assert prove("iid", Token(), STEPS[:3]).failure is None


def test_noise_reused_across_steps_keeps_each_step_s_distribution_and_the_first_token():
    with mutants.same_step(), mutants.inverse():
        assert prove("iid", Token(), [Instance(PINNED, "1", tokens=1)]).failure is None
        assert prove("iid", Token(), [Instance(PINNED, "1", tokens=2)]).failure is not None


@pytest.mark.parametrize("weight", [WEIGHT_IS_S, WEIGHT_STAYS], ids=["a <- S", "a stays"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_a_wrong_weight_is_invisible_at_depth_one(weight, drawn):
    """The reason to enumerate depth 2."""
    assert prove(drawn, weight, [Instance(PINNED, "3")]).failure is None


@pytest.mark.nightly
def test_samples_do_not_detect_a_lenience_of_0_99():
    """The exact layer does, at a total variation of 0.0014."""
    assert mutants.p_value("iid", Lenient(0.99)) > ALPHA


@pytest.mark.parametrize(
    ("drafts", "verifier", "score"),
    [(mutants.truncated(2), Token(), "draft"), ("iid", Control(), "towards the draft")],
    ids=["top-k draft verified with softmax q", "residual = p"],
)
@pytest.mark.nightly
def test_a_score_detects_strong_mutants(drafts, verifier, score):
    def bound(drafts, verifier):
        parts = toy_parts(JOINT, drafts, dtype=torch.float32)
        requests = [Request(number, f"{number}", PROMPT, PLAIN, JOINT.tokens) for number in range(500)]
        return scores(parts.target, parts.proposer, verifier, requests, seed=0, batch_size=250)[score].bound

    assert bound(drafts, verifier) < ALPHA < bound("iid", Token())


# Refusals


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        (mutants.swapped(Token()), "repeat"),
        (mutants.previous_q(Token()), "parent.s q"),
    ],
    ids=["without for iid", "q from the previous position"],
)
def test_a_draft_that_cannot_have_been_drawn_is_refused(verify, message):
    with pytest.raises(ValueError, match=message):
        prove("iid", mutants.Broken(verify), STEPS[6:8])


@pytest.mark.parametrize("verifier", [twin.token, twin.traversal, twin.match])
def test_unbroken_twins_survive(verifier):
    def verify(draft, p):
        stop, emit = verifier(draft, p.numpy())
        return Verdict(stop, lambda rows: torch.from_numpy(emit[rows]))

    for drawn in ("iid", "without_replacement", "deterministic"):
        assert Outputs.of_forest(World(11, plain=True), verify, TREES["[2,1]"], drawn).tv() < 1e-12
