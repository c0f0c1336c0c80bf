"""``spec-lab check`` and ``spec_lab.testing``: parts on a few toys, and what is said of wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab import testing
from spec_lab.constrain.protocol import Constraint, ConstraintState, full_mask, mask_of
from spec_lab.core.draft import Draft
from spec_lab.core.limit import Limit
from spec_lab.core.shape import chain, forest
from spec_lab.policy.policy import Policy
from spec_lab.verify import Gumbel, Lenient, Token
from tests.tasks.certify.parts import Claims, Misstates, Uniform, Verifies


class Once(Constraint):
    """No token comes twice in an output."""

    name = "once"

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def start(self, request):
        return After((), self.vocabulary)


class After(ConstraintState):
    def __init__(self, tokens, size):
        self.tokens, self.size = tokens, size

    def fork(self):
        return After(self.tokens, self.size)

    def advance(self, token):
        self.tokens = (*self.tokens, token)

    def mask(self):
        return full_mask(self.size) & ~mask_of(self.tokens, self.size)


class Bound(Uniform):
    """Is built for a target, whose vocabulary it keeps."""

    def __init__(self, target):
        self.vocabulary = target.vocabulary

    def propose(self, batch):
        assert self.vocabulary == batch.target.vocabulary
        return super().propose(batch)


class SameToken(Uniform):
    """Each request's tokens are uniform; those of a batch are all the same."""

    shared_store = "the token of a step"

    def propose(self, batch):
        draft = super().propose(batch)
        return replace(draft, token=draft.token[:1].expand(len(batch.sequences)))


class Silent(Uniform):
    drawn = "deterministic"

    def propose(self, batch):
        return Draft(forest((chain(0),) * len(batch.sequences)), torch.empty(0, dtype=torch.long))


class Fails(Uniform):
    def propose(self, batch):
        raise KeyError("lost")


class One(Policy):
    name = "one"

    def decide(self, batch, states):
        return [Limit(1) for _ in states]


class Alternates(One):
    """Its limits depend on how often it was asked."""

    name = "alternates"
    asked = 0

    def decide(self, batch, states):
        self.asked += 1
        return [Limit(self.asked % 2) for _ in states]


def text(results):
    return "\n".join(line for result in results for line in result.lines())


@pytest.mark.nightly
def test_a_correct_pair_is_lossless_with_its_policy_and_under_its_constraint():
    testing.assert_lossless(Token(), Bound, One(), lambda vocabulary: Once(vocabulary.size))


@pytest.mark.nightly
def test_a_verifier_alone_is_checked_with_each_way_of_drawing_that_it_accepts():
    results = testing.check_parts(Verifies())
    assert {result.drawn for result in results} == Token.accepts - {"gumbel"}
    assert not any(result.failed for result in results)


def test_a_wrong_verifier_is_refuted_by_the_smallest_counter_example_in_80_columns():
    results = testing.check_parts(Claims())
    assert all(result.failed for result in results)
    said = text(results)
    assert "NOT LOSSLESS, total variation 0." in said and "tree 1, one step" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80
    result = next(result for result in results if result.drawn == "iid")
    _, finding = result.smallest
    assert np.allclose(finding.after.emitted.sum(), 1) and f"{finding.after.p[0]:.4f}" in said
    assert "draft q" in said
    exact = [result for result in results if result.drawn == "deterministic"]
    assert exact and "draft q" not in text(exact), "no q is given to the verifier there"


def test_a_proposer_that_misstates_its_q_is_refuted():
    (result,) = testing.check_parts(proposer=Misstates())
    assert (
        result.failed and "misstates (iid) + token: NOT LOSSLESS" in text([result]) and "draft q" not in text([result])
    )
    with pytest.raises(AssertionError, match="Smallest counter-example"):
        testing.assert_lossless(proposer=Misstates())


def test_what_depends_on_another_request_is_refuted():
    (result,) = testing.check_parts(proposer=SameToken())
    toy, _ = result.smallest
    assert result.failed and toy.requests == 2, "one request alone is exact"


@pytest.mark.nightly
def test_a_constraint_whose_forks_share_their_state_is_refuted(monkeypatch):
    monkeypatch.setattr(After, "fork", lambda self: self)
    results = testing.check_parts(proposer=Uniform(), constraint=lambda vocabulary: Once(vocabulary.size))
    assert "NOT LOSSLESS" in text(results) and "once on target" in " ".join(text(results).split())


@pytest.mark.nightly
def test_a_lossy_verifier_is_no_failure_and_its_distance_is_printed():
    results = testing.check_parts(Lenient(0.9))
    assert not any(result.failed for result in results)
    assert "lossy, as declared: total variation up to 0." in " ".join(text(results).split())
    with pytest.raises(AssertionError, match="lossy"):
        testing.assert_lossless(Lenient(0.9))


@pytest.mark.parametrize(
    ("verifier", "proposer", "why"),
    [
        (Token(), Silent(), "proposer 'uniform' drafted nothing on any toy"),
        (Token(), Fails(), "KeyError: 'lost'"),
        (Gumbel(), Uniform(), "verifier 'gumbel'"),
        (Gumbel(), None, "Gumbel noise cannot be enumerated"),
    ],
)
def test_what_cannot_be_checked_fails_with_the_reason(verifier, proposer, why):
    (result,) = testing.check_parts(verifier, proposer)
    assert result.failed and "NOT CHECKED" in text([result]) and why in " ".join(text([result]).split())


def test_a_result_names_policy_and_constraint_and_says_that_nothing_was_cut():
    (result,) = testing.check_parts(proposer=Uniform(), policy=One())
    said = " ".join(text([result]).split())
    assert not result.failed and "uniform (iid) + token + one: lossless" in said
    assert "Policy 'one' cut no draft on these toys" in said, "the proposer drafts one token"


def test_a_fault_of_a_policy_is_not_blamed_on_the_proposer_alone():
    (result,) = testing.check_parts(proposer=Uniform(), policy=Alternates())
    said = " ".join(text([result]).split())
    assert "proposer 'uniform' under policy 'alternates' drafts differently" in said and "Neither declares" in said


def test_a_constraint_of_another_vocabulary_must_have_a_toy():
    with pytest.raises(ValueError, match=r"'once' is built for 7 tokens.*a, b, ab, c, end"):
        testing.check_parts(constraint=Once(7))


def test_a_policy_without_a_proposer_is_refused():
    with pytest.raises(ValueError, match="policy"):
        testing.check_parts(policy=One())


# The command


@pytest.fixture
def no_target(monkeypatch):
    def load(**_):
        raise AssertionError("a target is loaded")

    monkeypatch.setattr("spec_lab.models.target.Target.load", load)


@pytest.mark.parametrize("options", [["verifier=match"], ["proposer=ngram", "policy=fixed", "constraint=regex"]])
def test_the_command_reads_no_target_and_writes_no_files(cli, tmp_path, no_target, options):
    code, output, errors = cli("check", *options)
    assert (code, errors) == (0, "") and "lossless, total variation" in output
    assert not list(tmp_path.rglob("*.json"))
    assert ("NOT CHECKED: Gumbel" in " ".join(output.split())) == (options == ["verifier=match"])


@pytest.mark.nightly
def test_the_command_ends_with_1_for_a_wrong_part(cli, no_target, tmp_path):
    (tmp_path / "conf" / "verifier").mkdir(parents=True)
    (tmp_path / "conf" / "verifier" / "wrong.yaml").write_text("_target_: tests.tasks.certify.parts.Claims\n")
    code, output, _ = cli("check", "--config-dir", str(tmp_path / "conf"), "verifier=wrong")
    assert code == 1 and "NOT LOSSLESS" in output and "Smallest counter-example" in output


@pytest.mark.nightly
def test_a_proposer_that_requires_its_target_is_checked_with_it(cli):
    code, output, errors = cli("check", "proposer=draft_chain")
    assert code == 0 and "draft_chain (iid) + token: lossless" in output and "Loading" in errors
