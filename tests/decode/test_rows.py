"""Numbers of a forest's rows: token history, and the recorded probabilities of drafted tokens."""

import pytest
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.recording import Recording
from spec_lab.propose import Null
from spec_lab.verify import Token
from tests.decode.foretold import NEW, Foretold
from tests.propose.lab import WARM, decode, draft_model, emitted, path_tokens, plain_probabilities, requests


@pytest.mark.parametrize("penalised", [
    Sampling(repetition_penalty=1.7), Sampling(presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(logit_bias={3: 4.0}, bad_words_ids=[[4], [3, 3], [9, 3, 5]]),
])  # fmt: skip
def test_a_penalty_sees_each_path_s_own_history(target, penalised):
    told = emitted(decode(target, Null(), requests(penalised))[0])
    group, steps = decode(target, Foretold(told), requests(penalised))
    assert emitted(group) == told
    assert len(steps) < NEW - 4


@pytest.mark.parametrize("drawn", ["without_replacement", "deterministic"])
def test_recorded_drafts_hold_the_probabilities_of_both_models_at_each_parent(target, drawn):
    proposer = draft_model("2x1", drawn)
    wanted = requests(WARM, new=6)
    engine = fixed_group(Arm(target, proposer, Token(), CounterDraws(0), record=Recording(drafts=True)), wanted)
    steps = list(engine)
    texts = [list(request.tokens) for request in wanted]
    for info in steps:
        shape = info.draft.shape
        for row, sequence, rows in zip(info.rows(), info.sequences, shape.trees, strict=True):
            nodes = rows[1:]
            assert row["draft_tokens"] == info.draft.token[torch.from_numpy(nodes - shape.roots)].tolist()
            for number, node in enumerate(nodes.tolist()):
                above = [*texts[sequence.request.id], *path_tokens(info.draft, int(shape.parent[node - shape.roots]))]
                p, q = (plain_probabilities(model.lm.model, above, WARM) for model in (target, proposer))
                token = row["draft_tokens"][number]
                assert row["draft_p"][number] == pytest.approx(float(p[token]))
                likeliest = drawn == "deterministic"
                assert row["draft_greedy_q" if likeliest else "draft_q"][number] == pytest.approx(float(q[token]))
                assert row["draft_q"][number] is None if likeliest else row["draft_greedy_q"] is None
        for sequence, got in zip(info.sequences, info.committed, strict=True):
            texts[sequence.request.id] += [token.token for token in got.tokens if token.kept]
    assert sum(len(row["draft_tokens"]) for info in steps for row in info.rows()) > 20


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_a_chain_at_temperature_0_records_the_draft_model_s_probabilities_at_temperature_1(target, penalty):
    proposer, sampling = draft_model("1x1"), Sampling(repetition_penalty=penalty)
    wanted = requests(sampling, new=4)
    engine = fixed_group(Arm(target, proposer, Token(), CounterDraws(0), record=Recording(drafts=True)), wanted)
    texts = [list(request.tokens) for request in wanted]
    for info in engine:
        for row, sequence in zip(info.rows(), info.sequences, strict=True):
            above = list(texts[sequence.request.id])
            for token, q, greedy_q in zip(
                *(row[f"draft_{name}"] or [] for name in ("tokens", "q", "greedy_q")), strict=True
            ):
                expected = plain_probabilities(proposer.lm.model, above, Sampling(1.0, repetition_penalty=penalty))
                assert q == 1.0 and greedy_q == pytest.approx(float(expected[token])) and greedy_q < 1
                above.append(token)
        for sequence, got in zip(info.sequences, info.committed, strict=True):
            texts[sequence.request.id] += [token.token for token in got.tokens if token.kept]
    assert [len(text) for text in texts] == [len(request.tokens) + 4 for request in wanted]


def test_drafts_are_not_recorded_unless_asked_for(target):
    _, steps = decode(target, draft_model("2x1"), requests(WARM, new=4))
    assert all(info.recorded is None and "draft_p" not in row for info in steps for row in info.rows())
