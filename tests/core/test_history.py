"""The history that penalties, logit biases and banned words read, against transformers' own processors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from spec_lab.core.draft import Draft
from spec_lab.core.history import TextHistories
from spec_lab.core.options import WrongOption
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape

V = 12
CPU = torch.device("cpu")
TEXTS, PROMPTS = [[1, 2, 2, 5, 5], [3, 4]], [2, 2]
DRAFT = Draft(Shape(2, np.array([0, 2, 2, 1, 3])), torch.tensor([5, 6, 5, 7, 8]))
"""Below the first text 5, then 6 or 5, then 8 below 6; below the second text 7."""
PATHS = [[], [], [5], [5, 6], [5, 5], [7], [5, 6, 8]]
ROOT = [0, 1, 0, 0, 0, 1, 0]
ALL = Sampling(
    0.7, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3, logit_bias={5: 2.0, 9: -3.0},
    bad_words_ids=[[0], [5, 5], [5, 6, 8], [2, 5, 5, 7], [4, 11]],
)  # fmt: skip


def by_transformers(sampling, text, prompt, logits):
    """p after a text by transformers' processors, and the penalties of vLLM's documentation."""
    ids, scores = torch.tensor([text]), logits.clone()[None]
    scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()})(ids, scores)
    scores = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words_ids], [])(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(text[prompt:], dtype=torch.long), minlength=V)
    scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return (scores / sampling.temperature).softmax(-1)[0]


@pytest.mark.parametrize("device_tokens", [True, False])
def test_each_row_s_distribution_is_that_of_its_own_text(device_tokens):
    logits = torch.randn(7, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    histories = TextHistories.of(TEXTS, PROMPTS, [ALL], V, CPU)
    rows, token = np.array([6, 0, 4, 1, 2, 5, 3]), DRAFT.token if device_tokens else DRAFT.token.numpy()
    got = logits_to_probs(logits, [ALL], histories.before(DRAFT.shape, token, rows))
    for number, row in enumerate(rows):
        root = ROOT[row]
        wanted = by_transformers(ALL, TEXTS[root] + PATHS[row], PROMPTS[root], logits[number])
        torch.testing.assert_close(got[number], wanted, rtol=1e-6, atol=1e-12)
    banned = {int(row): set(np.flatnonzero(p == 0).tolist()) for row, p in zip(rows, got.numpy(), strict=True)}
    assert banned == {0: {0, 5, 7}, 1: {0, 11}, 2: {0, 5}, 3: {0, 8}, 4: {0, 5}, 5: {0}, 6: {0}}


def test_each_request_has_its_own_parameters():
    logits = torch.randn(7, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other = Sampling(1.0, bad_words_ids=[[7, 3]])
    got = logits_to_probs(
        logits, [(ALL, other)[root] for root in ROOT],
        TextHistories.of(TEXTS, PROMPTS, [ALL, other], V, CPU).before(DRAFT.shape, DRAFT.token, np.arange(7)),
    )  # fmt: skip
    alone = TextHistories.of(TEXTS[:1], PROMPTS[:1], [ALL], V, CPU)
    torch.testing.assert_close(got[:1], logits_to_probs(logits[:1], [ALL], alone.here()))
    torch.testing.assert_close(got[1], logits[1].softmax(-1))
    assert got[5, 3] == 0 and (got[5] > 0).sum() == V - 1


def test_no_history_is_kept_where_nothing_reads_it():
    assert TextHistories.of(TEXTS, PROMPTS, [Sampling(0.7, top_k=3)], V, CPU) is None
    history = TextHistories.of(TEXTS, PROMPTS, [Sampling(presence_penalty=1.0)], V, CPU).here()
    assert history.seen is None and history.bias is None
    assert history.counts[0].tolist() == [0, 0, 1, 0, 0, 2, *[0] * 6] and not history.counts[1].any()
    for sampling in (Sampling(presence_penalty=1.0), Sampling(logit_bias={1: 1.0}), Sampling(bad_words_ids=[[1]])):
        with pytest.raises(ValueError, match="history|counts"):
            logits_to_probs(torch.zeros(1, 3), [sampling])


def test_parameters_are_numbers_of_known_tokens():
    assert Sampling(logit_bias={"3": 1, 4: -2}).logit_bias == {3: 1.0, 4: -2.0}
    assert replace(ALL, temperature=1.0).untruncated == replace(ALL, temperature=1.0)
    assert ALL.without_penalties == Sampling(0.7) and len({ALL, replace(ALL)}) == 1
    assert not Sampling(logit_bias={}, bad_words_ids=[]).penalized
    for options, message in (
        ({"logit_bias": {"the": 1.0}}, "token ids as its names, not 'the'"),
        ({"logit_bias": {1: 200.0}}, r"logit_bias.1 must be a number from -100 to 100"),
        ({"bad_words_ids": [[]]}, "no empty list"),
        ({"presence_penalty": 3.0}, "presence_penalty must be a number from -2 to 2"),
    ):
        with pytest.raises(WrongOption, match=message):
            Sampling(**options)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(logit_bias={V: 1.0}), f"logit_bias names token {V}"),
        (Sampling(bad_words_ids=[[1, V]]), f"bad_words_ids names token {V}"),
        (Sampling(bad_words_ids=[[1, token] for token in range(V)]), "every token"),
    ],
)
def test_tokens_that_the_target_does_not_have_are_refused(sampling, message):
    with pytest.raises(WrongOption, match=message):
        Request(0, "0", (1,), sampling, 4).check_fits(64, V)
