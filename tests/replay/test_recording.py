"""Records of a step: which tokens, which steps, how many bytes."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import forest, tree
from spec_lab.decode.recording import Recording, pack_ids, recorded_numbers, unpack_ids
from spec_lab.propose.trees import parse
from spec_lab.results.schema import REPLAY
from spec_lab.results.table_parts import schema
from spec_lab.results.writer import replay_rows_of
from tests.propose.lab import WARM, plain_probabilities
from tests.replay.recorded import COLD, decoded
from tests.tiny import VOCABULARY


def test_tokens_of_any_vocabulary_are_packed_in_three_bytes():
    ids = np.array([0, 1, 255, 256, 65536, 2**24 - 1])
    assert len(pack_ids(ids)) == 18 and unpack_ids(pack_ids(ids)).tolist() == ids.tolist()


def test_the_recorded_tokens_are_the_likeliest_of_either_and_all_children():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 40, generator=generator, dtype=torch.float64)
    q = torch.rand(1, 40, generator=generator, dtype=torch.float64)
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    worst = torch.maximum(p[0], q[0]).argsort()[:2]
    draft = Draft(forest((tree(parse("2")),)), worst, "iid", q, np.array([0, -1, -1]))
    recorded = {name: values.numpy() for name, values in recorded_numbers(np.arange(3), draft, p, 5).items()}
    likeliest = torch.maximum(p[0], q[0]).topk(3).indices.tolist()
    assert {*recorded["ids"][0]} == {*likeliest, *worst.tolist()}
    for row in range(3):
        mass, other = (x[row if x is p else 0].numpy() if row == 0 or x is p else np.zeros(40) for x in (p, q))
        out = np.setdiff1d(np.arange(40), recorded["ids"][row])
        np.testing.assert_allclose(recorded["p"][row], mass[recorded["ids"][row]], rtol=1e-6)
        np.testing.assert_allclose(recorded["q"][row], other[recorded["ids"][row]], rtol=1e-6)
        numbers = [mass[out].sum(), other[out].sum(), mass[out].max(), other[out].max()]
        np.testing.assert_allclose(recorded["rest"][row], numbers, rtol=1e-6)


def test_a_row_takes_at_most_two_kilobytes_at_a_vocabulary_of_128k(tmp_path):
    generator, rows, vocabulary = np.random.default_rng(0), 512, 131072
    made = []
    for row in range(rows):  # no two numbers agree, so nothing compresses
        made.append(
            {
                "id": f"{row}/repeat/0/{row}/{row}", "group": row, "arm": "repeat", "request": row,
                "sequence": 0, "forward": row, "prefill": False, "position": row, "row": row, "parent": row - 1,
                "token": int(generator.integers(vocabulary)), "way": "without_replacement",
                "features": "0123456789abcdef", "ids": pack_ids(generator.integers(0, vocabulary, 128)),
                "p": generator.random(128, dtype=np.float32).tobytes(),
                "q": generator.random(128, dtype=np.float32).tobytes(),
                **dict.fromkeys(("p_rest", "q_rest", "p_most", "q_most"), float(generator.random())),
                "vocabulary": vocabulary, "sampling": '{"temperature": 0.7, "top_k": 0, "top_p": 0.9}',
            }
        )  # fmt: skip
    pq.write_table(pa.Table.from_pylist(made, schema=schema(REPLAY)), tmp_path / "replay.parquet")
    assert (tmp_path / "replay.parquet").stat().st_size / rows <= 2048


def test_a_share_of_the_steps_is_chosen_by_their_keys():
    recording, keys = Recording(top=1, share=0.3), [(request, 0, step) for request in range(40) for step in range(50)]
    chosen = recording.chosen(CounterDraws(1), keys)
    assert 0.27 < chosen.mean() < 0.33
    assert (chosen[5:9] == recording.chosen(CounterDraws(1), keys[5:9])).all()
    assert not Recording(drafts=True).chosen(CounterDraws(1), keys).any()
    assert Recording(top=1).chosen(CounterDraws(1), keys).all()


@pytest.mark.parametrize("sampling", [COLD, Sampling(0.6, top_p=0.9)], ids=["greedy", "warm"])
def test_p_is_recorded_at_temperature_1_whatever_the_request_s(target, sampling):
    trees, _ = decoded(target, "deterministic", "1x1", sampling)
    for request, text in trees.texts.items():
        first = int(np.flatnonzero((trees.steps["request"] == request) & ~trees.steps["prefill"])[0])
        from tests.propose.lab import PROMPTS

        before = [*PROMPTS[request], *text.tokens[: trees.steps["position"][first] - text.prompt].tolist()]
        expected = plain_probabilities(target.lm.model, before, WARM)
        np.testing.assert_allclose(trees.p[first, :VOCABULARY], expected.numpy(), rtol=1e-5, atol=1e-8)
    assert trees.sampling == sampling


def test_a_recorded_step_keeps_the_hash_of_the_features_that_the_proposer_reads(target):
    _, steps = decoded(target)
    assert len(steps)
    assert replay_rows_of([], 0, "repeat", 3) == []
