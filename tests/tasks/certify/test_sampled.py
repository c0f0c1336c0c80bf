"""Tests by samples: correct loops pass, and each test rejects the fault that it is for."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import Cells
from spec_lab.tasks.certify.certificate import Control
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.sampled import joint, scores
from spec_lab.tasks.certify.significance import ALPHA, chi_square
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Gumbel, KSeq, Match, Token, Traversal
from tests.propose.lab import draft_model
from tests.tasks.certify.parts import VERIFIERS, Hotter, Misstates, Uniform
from tests.tiny import VOCABULARY, tiny_model, tiny_target

SAMPLES = 3000
WARM = Sampling(1.0)


def histogram(drafts, verifier, samples=SAMPLES):
    texts, wanted = joint(drafts, verifier, samples, 0)
    return chi_square(np.bincount(texts, minlength=len(wanted)), wanted)


# Texts of a toy


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("drafts", "verifier"),
    [
        ("without_replacement", Traversal()),
        ("gumbel", Gumbel()),  # the only one that is not enumerated
        pytest.param("iid", Token(), marks=pytest.mark.nightly),
        pytest.param("deterministic", Match(), marks=pytest.mark.nightly),
        pytest.param("iid", KSeq(), marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_texts_of_a_lossless_loop_have_the_target_s_distribution(drafts, verifier):
    counts = histogram(drafts, verifier)
    assert counts.p_value > 1e-3
    assert counts.samples == SAMPLES and counts.cells > 30 and counts.impossible == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("drafts", "verifier"),
    [("iid", Control()), (Misstates(), Token())],
    ids=["p after a rejection", "wrong q"],
)
def test_the_texts_of_a_biased_loop_are_rejected(drafts, verifier):
    assert histogram(drafts, verifier, 1000).p_value < ALPHA


@pytest.mark.nightly
def test_gumbel_noise_that_is_reused_is_found():
    """Enumeration cannot find it: the residual is drawn with the noise that drew the rejected token."""

    class Racing(Gumbel):
        def __call__(self, draft, p):
            verdict = Token()(replace(draft, drawn="without_replacement", noise=None), p)
            return replace(verdict, residual=Gumbel()(draft, p).residual)

    assert histogram("gumbel", Racing(), 1000).p_value < ALPHA


def test_the_expected_distribution_is_that_of_the_sampling():
    cold = Sampling(0.5, top_k=2)
    toy = Instance(RandomToy(11, support=4, plain=True), "1x1", tokens=2)
    texts, wanted = joint("iid", Token(), 400, 0, cold, toy)
    assert (wanted > 0).sum() == 4 and wanted.sum() == pytest.approx(1)
    assert (wanted[texts] > 0).all()
    assert chi_square(np.bincount(texts, minlength=16), joint("iid", Token(), 1, 0, WARM, toy)[1]).p_value < ALPHA


# Tokens of a real model


@cache
def target():
    return tiny_target()


def requests(sampling=WARM, count=96, new=24):
    return [
        Request(n, f"p{n}", tuple((7 * n + k * k) % VOCABULARY for k in range(5)), sampling, new) for n in range(count)
    ]


def scored(proposer, verifier, wanted=None, batch_size=48):
    return scores(target(), proposer, verifier, wanted or requests(), 0, batch_size)


def rejected(score_of):
    return {name for name, score in score_of.items() if score.bound < ALPHA}


PAIRS = {
    "iid": lambda: (draft_model("1x1"), Token()),
    "iid tree": lambda: (draft_model("3"), KSeq()),
    "without_replacement": lambda: (draft_model("2x1", "without_replacement"), Traversal()),
    "many without": lambda: (draft_model("8", "without_replacement", temperature=0.5), Token()),
    "gumbel": lambda: (draft_model("2x1", "gumbel"), Gumbel()),
    "deterministic": lambda: (draft_model("2x1", "deterministic"), Match()),
    "its own temperature": lambda: (draft_model("1x1", temperature=1.7), Token()),
    "no model": lambda: (Uniform(), Traversal()),
    "n-gram": lambda: (Ngram(3, 3, 1), Token()),
}


@pytest.mark.one_in(21)
@pytest.mark.parametrize("name", PAIRS)
def test_correct_pairs_pass_every_test(name):
    proposer, verifier = PAIRS[name]()
    score_of = scored(proposer, verifier)
    assert all(score.bound > 1e-3 for score in score_of.values())
    drafted = [] if proposer.drawn == "deterministic" else ["draft"]
    assert list(score_of) == ["towards the draft", "mode", *drafted]
    assert score_of["mode"].tokens == 96 * 24
    assert 0 < score_of["towards the draft"].tokens < 96 * 24, "one for each step that drafted"


def test_without_drafts_there_is_the_mode_alone():
    score_of = scored(Null(), Match(), requests(count=24))
    assert list(score_of) == ["mode"] and score_of["mode"].bound > 1e-3


@pytest.mark.nightly
@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "warp",
    [Sampling(0.7, top_k=8), Sampling(1.2, top_p=0.8), Sampling(0.3, repetition_penalty=5.0), Sampling(0.0)],
    ids=["top-k", "top-p", "penalty", "greedy"],
)
def test_warped_requests_are_tested_against_warped_probabilities(warp):
    assert not rejected(scored(draft_model("1x1"), Token(), requests(warp, count=24, new=96)))


def test_the_control_is_rejected_towards_the_draft():
    score_of = scored(draft_model("1x1"), Control())
    assert "towards the draft" in rejected(score_of)
    assert score_of["towards the draft"].z > 0, "where p < q a rejection emits too often"
    assert "draft" not in rejected(score_of), "its drafts are right"


def test_a_deterministic_draft_that_is_accepted_too_often_is_rejected_towards_the_draft():
    likely = draft_model("2", "deterministic", seed=0, num_hidden_layers=2)  # the target's own likeliest tokens
    score_of = scored(likely, VERIFIERS["typical"], requests(count=24))
    assert "towards the draft" in rejected(score_of) and score_of["towards the draft"].z > 0


@pytest.mark.nightly
def test_drafts_that_are_not_drawn_from_their_q_are_rejected_as_drafts():
    score_of = scored(Hotter(draft_model("1x1")), Match())
    assert rejected(score_of) == {"draft"}, "matching never reads q, so the output is right"
    assert score_of["draft"].z < 0, "they were drawn hotter than stated: less often the likeliest"


@pytest.mark.nightly
@pytest.mark.one_in(3)
@pytest.mark.parametrize("verifier", [Token(), Match()], ids=lambda v: v.name)
def test_a_loop_that_forgets_a_warp_is_rejected_by_the_mode(monkeypatch, verifier):
    def forgetful(logits, rows, *more, **options):
        return logits_to_probs(logits, [replace(row, top_k=0) for row in rows], *more, **options)

    monkeypatch.setattr("spec_lab.decode.rows.logits_to_probs", forgetful)
    assert "mode" in rejected(scored(draft_model("1x1"), verifier, requests(Sampling(1.0, top_k=4))))


@pytest.mark.nightly
def test_a_loop_with_corrupt_cells_is_rejected_by_the_mode(monkeypatch):
    """Plain forwards use no KV cache, so the corruption does not reach them."""
    write = Cells.write
    monkeypatch.setattr(Cells, "write", lambda self, layer, key, value, places: write(self, layer, key, -value, places))
    assert "mode" in rejected(scored(Ngram(3, 3, 1), Token(), requests(count=192)))


@pytest.mark.nightly
def test_a_loop_that_reads_its_rows_in_another_order_is_rejected_towards_the_draft():
    class Mixed(CausalLM):
        """With a draft, every row gets the logits of the row before."""

        def run(self, prepared):
            output = super().run(prepared)
            drafted = any(rows.stop > rows.start for rows in prepared.nodes)
            return replace(output, logits=output.logits.roll(1, 0)) if drafted else output

    mixed = replace(target(), lm=Mixed(tiny_model()))
    assert "towards the draft" in rejected(scores(mixed, draft_model("1x1"), Token(), requests(), 0))


def test_stop_tokens_end_what_is_tested():
    wanted = [replace(request, stop=frozenset(range(0, VOCABULARY, 5))) for request in requests()]
    score_of = scored(draft_model("1x1"), Token(), wanted)
    assert score_of["mode"].tokens < 96 * 12
    assert not rejected(score_of)
