"""The target's logits after many texts of one prompt equal those of a plain forward over each."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.decode.text_logits import text_logits
from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM
from tests.propose.lab import plain_logits, plain_probabilities
from tests.recurrent import FAMILIES
from tests.tiny import CONTEXT, VOCABULARY

WARPED = Sampling(0.7, top_k=9, repetition_penalty=1.3)
REQUEST = Request(0, "one", (3, 14, 15, 9, 3), WARPED)
TEXTS = [(), (5,), (9, 14), (5, 6, 7), (5, 6), (60,), (9, 14, 15, 15), (5, 8, 1)]
"""In no order; some are prefixes of others, one begins in one that is not asked for."""


def found(target, texts=TEXTS, request=REQUEST, **options):
    """The number of forwards, and each text's log-probabilities."""
    before, rows = target.lm.forwards, {}
    for some in text_logits(target, request, texts, **options):
        rows |= dict(zip(some.numbers.tolist(), some.log_probabilities(), strict=True))
    assert sorted(rows) == list(range(len(texts)))
    assert not target.lm.cells.references.any()
    return target.lm.forwards - before, [rows[number] for number in range(len(texts))]


def check(target, log_p, texts=TEXTS, request=REQUEST):
    for text, row in zip(texts, log_p, strict=True):
        p = plain_probabilities(target.lm.model, [*request.tokens, *text], request.sampling)
        assert np.exp(row) == pytest.approx(p.numpy(), abs=1e-9)
        assert row.dtype == np.float64


@pytest.mark.parametrize(("rows", "forwards"), [(256, 1), (3, 3), (1, 8)])
def test_every_text_has_the_probabilities_of_a_plain_forward(target, rows, forwards):
    computed, log_p = found(target, rows=rows)
    assert computed == forwards
    check(target, log_p)


@pytest.mark.parametrize(("leaves", "forwards"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_no_forward_has_more_leaves_than_the_runner_supports(target, monkeypatch, leaves, forwards):
    monkeypatch.setattr(type(target.lm), "capabilities", replace(target.lm.capabilities, leaves=leaves), raising=False)
    seen, prepare = [], target.lm.prepare
    monkeypatch.setattr(
        target.lm, "prepare", lambda kv, pending, draft: seen.append(draft) or prepare(kv, pending, draft)
    )
    computed, log_p = found(target)
    assert computed == forwards == len(seen)
    ends = [sum(not len(children) for children in draft.shape.children) for draft in seen]
    assert max(ends) <= leaves
    check(target, log_p)


def test_a_model_with_recurrent_layers_computes_one_chain_at_a_time():
    target = Target(CausalLM(FAMILIES["lfm2"]()), None, "lfm2", CONTEXT, "", 0.0)
    rows = {}
    for some in text_logits(target, REQUEST, TEXTS):
        rows |= dict(zip(some.numbers.tolist(), some.log_probabilities(), strict=True))
    check(target, [rows[number] for number in range(len(TEXTS))])


def test_many_texts_share_their_prefixes(target):
    texts = list(product(range(4), repeat=3)) + list(product(range(4), repeat=2))
    computed, log_p = found(target, texts, rows=16)
    assert computed == 5
    check(target, log_p, texts)


def test_under_a_mask_probabilities_are_renormalised(target):
    mask = np.random.default_rng(0).random((len(TEXTS), VOCABULARY)) < 0.3
    mask[3] = False
    (some,) = text_logits(target, REQUEST, TEXTS)
    log_p = some.log_probabilities(mask[some.numbers])
    for number, row in zip(some.numbers.tolist(), log_p, strict=True):
        tokens = [*REQUEST.tokens, *TEXTS[number]]
        seen = torch.zeros(1, VOCABULARY, dtype=torch.bool)
        seen[0, tokens] = True
        logits = plain_logits(target.lm.model, tokens)[None]
        p = logits_to_probs(logits, [WARPED], History(seen), torch.from_numpy(mask[number : number + 1]))[0]
        assert np.exp(row) == pytest.approx(p.numpy(), abs=1e-9)
        assert float(p.sum()) == pytest.approx(float(number != 3))


def test_logits_that_are_not_finite_name_the_request(target, monkeypatch):
    run = target.lm.run

    def broken(prepared):
        output = run(prepared)
        output.logits[-1, 7] = float("nan")
        return output

    monkeypatch.setattr(target.lm, "run", broken)
    with pytest.raises(ValueError, match="request 'one': the target's logits are NaN or infinite"):
        list(text_logits(target, REQUEST, TEXTS))
    assert not target.lm.cells.references.any()


def test_no_text_needs_no_forward(target):
    assert found(target, [])[0] == 0
