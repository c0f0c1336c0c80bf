"""Drafting that overlaps with verification: seconds against enumerated schedules, hit rates against tables by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from spec_lab.analysis.projection import Acceptance, Deployment, Overlap, overlap, speedup
from spec_lab.analysis.projection.acceptance import of_steps
from spec_lab.analysis.projection.drafting import Drafting
from spec_lab.analysis.projection.overlap import foreseen
from spec_lab.cli.commands import command
from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.recording import pack_ids
from spec_lab.tasks.benchmark import run
from tests.analysis.metrics.tables import steps
from tests.analysis.projection.test_project import Constant, Linear, of_chain
from tests.labs import lab, settings
from tests.tiny import VOCABULARY

PEARL = Overlap.parse("pearl")


def pearl_of_chain(rate, length):
    """Full chains whose tokens are accepted with one rate, independently."""
    accepted = of_chain(rate, length)
    return Acceptance(accepted.drafts, accepted.share, accepted.survival, accepted.survival, np.array([[rate]]))


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("length", "pass_seconds"), [(1, 0.5), (4, 0.1), (4, 0.6)])
def test_pearl_takes_the_seconds_of_its_two_states(rate, length, pass_seconds):
    """Algorithm 2 of 2408.11850 as a Markov chain: before verification one row is computed, in it ``length`` rows.

    The second state verifies the tokens of a draft but the first, which has been accepted, and the next draft's first.
    """
    target = Linear(1.0, 0.05)
    drafted = length * pass_seconds
    before, after = max(1.05, drafted), max(1.0 + 0.05 * length, drafted)
    share = rate / (1 - rate**length + rate)  # of the second state
    emitted = (1 - share) + share * sum(rate**k for k in range(length))
    expected = emitted * 1.05 / ((1 - share) * before + share * after)
    deployment = Deployment("any", target, {}, overlap=PEARL)
    value = speedup(pearl_of_chain(rate, length), length, deployment, Drafting(Constant(pass_seconds)), 1, 0.0)
    assert value == pytest.approx(expected)


@pytest.mark.parametrize(("batch", "missed"), [(1, 0.4), (2, 1 - 0.36)])
def test_ssd_drafts_after_a_miss_of_any_sequence(batch, missed):
    """Two passes of 0.1 s; ahead of time a pass for the last row and two for all outcomes, beside a forward of 1 s."""
    rates, hits, once = np.array([[0.8, 0.5]]), np.array([[0.9, 0.6]]), np.ones((1, 1))
    accepted = Acceptance(np.ones((1, 2)), once, rates, hits, once)
    draft = Drafting(Constant(0.1))
    deployment = Deployment("any", Constant(1.0), {}, overlap=Overlap.parse("ssd:3"))
    value = speedup(accepted, 2, deployment, draft, batch, 0.0)
    assert value == pytest.approx(2.3 / (1.0 + missed * 0.2))


def test_drafts_of_many_outcomes_may_take_longer_than_the_target():
    accepted = Acceptance(np.ones((1, 1)), np.ones((1, 1)), np.array([[0.5]]), np.array([[1.0]]), np.ones((1, 1)))
    deployment = Deployment("any", Constant(1.0), {}, overlap=Overlap(7))
    draft = Drafting(Linear(0.5, 0.1))
    assert speedup(accepted, 1, deployment, draft, 1, 0.0) == pytest.approx(1.5 / (0.5 + 0.1 + 0.5 + 0.1 * 14))


def test_a_hit_of_pearl_is_a_draft_that_is_accepted_whole():
    """Drafts of 3, 3, 1 and 0 tokens, of which 3, 1, 1 and 0 are accepted: by length 1, 2, 3."""
    frame = steps(*({"nodes": n, "depth": n, "accepted": a} for n, a in ((3, 3), (3, 1), (1, 1), (0, 0))))
    design = of_steps(frame, "chain", "draft_chain", "token")
    assert design.hits.tolist() == [[3, 2, 2]]
    assert design.accepting.sum() == 3
    tokens = [PEARL.tokens(design.draws(0), length)[0] for length in (1, 2, 3)]
    assert tokens == pytest.approx([(4 + 3 - 3) / 4, (4 + 4 - 2) / 4, (4 + 5 - 2) / 4])


def replayed(forward, *tokens_and_q):
    """Rows of ``replay`` of a chain: token, and q of the tokens 0, 1, ..; None of the last."""
    return [
        {
            "request": 0, "sequence": 0, "forward": forward, "row": row, "token": token, "q_most": 0.0,
            "ids": pack_ids(np.arange(4)), "q": b"" if q is None else np.array(q, dtype="<f4").tobytes(),
        }
        for row, (token, q) in enumerate(tokens_and_q)
    ]  # fmt: skip


def recorded_chains():
    """Four steps of chains of two tokens, and the rows of their distributions."""
    frame = steps(
        {"forward": 1, "accepted": 2, "depth": 2, "nodes": 2, "emitted_tokens": [0, 1, 3]},
        {"forward": 2, "accepted": 0, "depth": 2, "nodes": 2, "emitted_tokens": [2]},
        {"forward": 3, "accepted": 1, "depth": 2, "nodes": 2, "emitted_tokens": [1, 0]},
        {"forward": 4, "accepted": 0, "depth": 0, "nodes": 0, "emitted_tokens": [1]},
    )
    high = [0.5, 0.3, 0.15, 0.05]
    rows = pd.DataFrame(
        [
            *replayed(1, (9, high), (0, high), (1, None)),  # of one token, the second is what follows: rank 1 of q
            *replayed(2, (9, high), (0, high), (0, None)),  # the first token is rejected: 2 is second of the others
            *replayed(3, (9, high), (1, high), (3, None)),  # cut to one token all is accepted, and 0 follows: rank 0
        ]
    )
    return frame, rows.assign(arm="", prefill=False)


def test_outcomes_are_foreseen_by_the_draft_probabilities_after_the_accepted_tokens():
    frame, rows = recorded_chains()
    hits = {outcomes: foreseen(frame, rows, outcomes, 2).astype(int).tolist() for outcomes in (1, 2)}
    assert hits[1] == [[0, 0], [0, 0], [1, 1], [0, 0]]
    assert hits[2] == [[1, 0], [1, 1], [1, 1], [0, 0]], "what follows a whole draft was not recorded"
    with pytest.raises(ValueError, match="record_share=1"):
        foreseen(frame, rows[rows["forward"] != 2], 1, 2)


@pytest.mark.parametrize(
    ("q", "most_of_others", "known"),
    [([0.25] * 4, 0.0, [1, 1, 0, 0]), ([0.5, 0.25], 0.25, [1, 0, 0, 0]), ([0.25] * 2, 0.25, [0, 0, 0, 0])],
)
def test_of_tokens_with_equal_draft_probabilities_no_more_are_foreseen_than_fit(q, most_of_others, known):
    each = [{"forward": token, "accepted": 0, "depth": 1, "nodes": 1, "emitted_tokens": [token]} for token in range(4)]
    rows = pd.DataFrame([row for token in range(4) for row in replayed(token, (9, q), (9, None))])
    hits = foreseen(steps(*each), rows.assign(q_most=most_of_others), 2, 1)
    assert hits[:, 0].astype(int).tolist() == known


def test_hits_of_ssd_are_counted_within_requests_and_of_shorter_drafts(tmp_path, monkeypatch):
    frame, rows = recorded_chains()
    monkeypatch.setattr(overlap, "load_replay", lambda folder: rows)
    design = Overlap(2).of_design(of_steps(frame, "name", "draft_chain", "token"), frame, tmp_path)
    assert design.left_out == "" and list(design.lengths) == [1]
    assert design.hits.tolist() == [[3.0]] and design.draws(0).hit_rate(1).tolist() == [0.75]
    monkeypatch.setattr(overlap, "load_replay", lambda folder: rows[:0])
    assert (
        "record=replay" in Overlap(2).of_design(of_steps(frame, "a", "draft_chain", "token"), frame, tmp_path).left_out
    )


@pytest.mark.parametrize(
    ("proposer", "nodes", "option", "why"),
    [
        ("eagle3", 3, "pearl", "hidden states"),
        ("draft_tree", 6, "pearl", "trees"),
        ("draft_chain", 1, "ssd:2", "one token"),
        ("pld_plus", 3, "pearl", "hidden states of the forward that it would overlap with"),
        ("recycling", 3, "pearl", "the likeliest tokens of the forward that it would overlap with"),
    ],
)
def test_designs_that_cannot_overlap_are_left_out(tmp_path, proposer, nodes, option, why):
    frame = steps({"nodes": nodes, "depth": min(nodes, 3), "accepted": 1})
    design = of_steps(frame, "name", proposer, "token", {"tree": "0 1 2"})
    assert why in Overlap.parse(option).of_design(design, frame, tmp_path).left_out


@pytest.mark.parametrize("text", ["", "ssd", "ssd:0", "pearl:2", "mirror"])
def test_other_overlaps_are_refused(text):
    with pytest.raises(ValueError, match="--overlap must be pearl, or ssd:N"):
        Overlap.parse(text)


class Sampled(Proposer):
    """Drafts chains of three tokens, drawn from uniform distributions."""

    name = "draft_chain"
    drawn = "iid"
    nodes = 3

    def propose(self, batch):
        shape = forest((chain(3),) * len(batch.sequences))
        q = torch.full((shape.nodes, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
        rows = np.full(shape.rows, -1)
        rows[shape.parent] = np.arange(shape.nodes)
        token = torch.tensor([sequence.tokens[-1] for sequence in batch.sequences for _ in range(3)])
        return Draft(shape, token, "iid", q, rows)


@pytest.mark.nightly
def test_the_command_projects_overlapped_drafting(tmp_path, capsys):
    out = tmp_path / "run"
    config = {"record": "replay", "verifier": {"_target_": "spec_lab.verify.Token"}}
    assert run(lab(temperature=1.0, proposer=Sampled()), settings(out, record="replay", record_top=61), config) == 0
    args = ["project", str(out), "--model", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--out", str(tmp_path / "to")]
    for option, lengths in (("pearl", [1, 2, 3]), (f"ssd:{VOCABULARY}", [1, 2])):
        assert command([*args, "--overlap", option, "--batch", "1"]) == 0
        cells = pd.read_csv(tmp_path / "to" / "projection.csv")
        assert cells["length"].tolist() == lengths
        assert (cells["hit_rate"] == 1).all() == (option != "pearl"), "every token is among all tokens"
    assert "hit rate" in capsys.readouterr().out
