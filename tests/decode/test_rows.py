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
                assert row["draft_q"][number] == (None if drawn == "deterministic" else pytest.approx(float(q[token])))
        for sequence, got in zip(info.sequences, info.committed, strict=True):
            texts[sequence.request.id] += [token.token for token in got.tokens if token.kept]
    assert sum(len(row["draft_tokens"]) for info in steps for row in info.rows()) > 20


def test_drafts_are_not_recorded_unless_asked_for(target):
    _, steps = decode(target, draft_model("2x1"), requests(WARM, new=4))
    assert all(info.recorded is None and "draft_p" not in row for info in steps for row in info.rows())
