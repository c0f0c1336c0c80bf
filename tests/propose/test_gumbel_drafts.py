"""Gumbel drafts, whose noise the verifier shares: their fields, no noise used twice, the output distribution."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy import stats

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws, Key, Purpose
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.verify import Gumbel, Match, Token, Traversal
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
    decode,
    draft_model,
    emitted,
    expanded,
    path_tokens,
    plain_logits,
    plain_probabilities,
    requests,
)
from tests.tiny import VOCABULARY

TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
CHAIN = "1x1x1x1"


@dataclass
class Watched:
    """Counter draws that record every key and all noise."""

    seed: int = 0
    keys: list[Key] = field(default_factory=list)
    noise: dict[Key, np.ndarray] = field(default_factory=dict)

    def pick(self, weights, keys):
        self.keys += keys
        return CounterDraws(self.seed).pick(weights, keys)

    def race(self, width, keys):
        self.keys += keys
        noise = CounterDraws(self.seed).race(width, keys)
        self.noise |= dict(zip(keys, noise, strict=True))
        return noise

    @property
    def repeats(self) -> int:
        return len(self.keys) - len(set(self.keys))


def proposed(target, tree=TREE, sampling=WARM, draws=None, prompts=PROMPTS, proposer=None):
    """One draft, its batch and its proposer."""
    proposer = proposer or draft_model(tree, "gumbel")
    batch = batch_of(target, requests(sampling, prompts=prompts), proposer, draws)
    return proposer.propose(batch), batch, proposer


# Fields of a draft -------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [WARM, Sampling(0.7, top_k=3), Sampling(1.2, top_p=0.6, repetition_penalty=1.5)])
@pytest.mark.parametrize("tree", [CHAIN, TREE, "4x2", "9x1"])
def test_siblings_are_the_best_of_their_parent_s_race(target, tree, sampling):
    draws = Watched()
    draft, batch, proposer = proposed(target, tree, sampling, draws)
    shape = draft.shape
    parents = np.unique(shape.parent)
    assert draft.noise.dtype == torch.float64 and draft.noise.shape == draft.q.shape == (len(parents), VOCABULARY)
    assert sorted(draft.q_row[parents]) == list(range(len(parents)))
    assert (np.delete(draft.q_row, parents) == -1).all()
    for row, sequence, text, children in expanded(draft, batch.sequences):
        q, noise = draft.q[draft.q_row[row]], draft.noise[draft.q_row[row]]
        torch.testing.assert_close(
            q, plain_probabilities(proposer.lm.model, text, sequence.request.sampling), atol=1e-9, rtol=0
        )
        order = (q.log() + noise).argsort(descending=True).tolist()
        assert children == order[: len(children)] and (q[children] > 0).all()
    assert draws.keys == list(draws.noise) and draws.repeats == 0  # one race each, and nothing else is drawn
    assert len(draws.noise) == len(parents)


def test_siblings_beyond_the_support_are_left_out(target):
    nodes = {name: proposed(target, "4x1", s)[0].shape.nodes for name, s in SUPPORTS.items()}
    assert nodes == {"cold": 6, "two": 12, "all": 24}  # of three trees


SUPPORTS = {"cold": COLD, "two": Sampling(1.0, top_k=2), "all": WARM}


def test_places_in_the_whole_tree_key_the_noise(target):
    """The root's is -1. Nodes left out because of the support or the context change no other node's noise."""
    draws = Watched()
    proposed(target, "2x2x1", Sampling(1.0, top_k=1), draws)
    # nodes by place: 0 1 | 2 3, 4 5 | 6 ..; of a support of one there are 0, 2 and 6
    wanted = [Key(n, 0, 0, Purpose.RACE, index) for index in (-1, 0, 2) for n in range(3)]
    assert draws.keys == wanted
    whole, cut = Watched(), Watched()
    proposed(target, "2x2x1", WARM, whole)
    proposed(target, proposer=draft_model("2x2x1", "gumbel", context=len(PROMPTS[0]) + 1), draws=cut)
    assert 0 < len(cut.noise) < len(whole.noise)
    assert all((whole.noise[key] == noise).all() for key, noise in cut.noise.items())


def test_noise_does_not_depend_on_the_batch(target):
    together, batch, _ = proposed(target)
    rows = [row for row, *_ in expanded(together, batch.sequences)]
    noise = together.noise[together.q_row[rows]]
    alone = []
    for request in requests(WARM):
        proposer = draft_model(TREE, "gumbel")
        batch = batch_of(target, [request], proposer)
        draft = proposer.propose(batch)
        alone += [draft.noise[draft.q_row[row]] for row, *_ in expanded(draft, batch.sequences)]
    assert torch.equal(noise, torch.stack(alone))


def test_the_drafted_tokens_have_the_draft_s_distribution(target):
    sampling = Sampling(1.0, top_k=8)
    proposer, tokens = draft_model("1", "gumbel"), []
    batch = batch_of(target, requests(sampling, prompts=PROMPTS[1:2] * 100), proposer)
    for number in range(40):
        for sequence in batch.sequences:
            sequence.step = number
        draft = proposer.propose(batch)
        tokens.append(draft.token.numpy())
    distribution = draft.q[0].numpy()
    assert (distribution > 0).sum() == 8
    assert agrees(np.concatenate(tokens), distribution)
    assert not agrees(np.concatenate(tokens), (distribution > 0) / 8)


def agrees(tokens: np.ndarray, distribution: np.ndarray) -> bool:
    """Whether tokens fit the distribution: Pearson's test at 1e-6 with rare ones pooled; none of mass zero."""
    counts, expected = np.bincount(tokens, minlength=len(distribution)), len(tokens) * distribution
    rare = expected < 10
    cells = [(np.append(x[~rare], x[rare].sum())) for x in (counts, expected)]
    some = cells[1] > 0
    return counts[distribution == 0].sum() == 0 and stats.chisquare(cells[0][some], cells[1][some]).pvalue > 1e-6


# Decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", [Gumbel(), Match()], ids=["gumbel", "match"])
@pytest.mark.parametrize(("tree", "temperature"), [(CHAIN, None), (CHAIN, 1.5), (TREE, 1.5)])
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, verifier, tree, temperature):
    proposer = draft_model(tree, "gumbel", temperature)
    group, _ = decode(target, proposer, requests(), verifier)
    assert emitted(group) == truth
    assert not proposer.lm.cells.references.any()


@pytest.mark.parametrize("tree", [CHAIN, TREE])
def test_the_target_as_its_own_draft_is_always_accepted(target, tree):
    proposer = draft_model(tree, "gumbel", seed=0, num_hidden_layers=2)
    depth = max(map(len, proposer.tree))
    _, steps = decode(target, proposer, requests(WARM, new=25), Gumbel())
    # In a tree y is always the first child; the first children of TREE go three deep.
    assert [len(done.path) for step in steps for done in step.committed] == [depth] * 3 * len(steps)
    assert len(steps) == -(-25 // (depth + 1))


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.parametrize("tree", [CHAIN, TREE])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone_and_in_any_order(target, tree, sampling):
    proposer = draft_model(tree, "gumbel", 1.0 if tree == TREE and sampling == COLD else None)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Gumbel())[0])
    assert together == [emitted(decode(target, proposer, [request], Gumbel())[0])[0] for request in wanted]
    assert together == emitted(decode(target, proposer, wanted[::-1], Gumbel())[0])


def test_steps_are_recorded_conditional_on_the_noise(target):
    """Nothing is random, so the expected number is the accepted number."""
    _, steps = decode(target, draft_model(TREE, "gumbel"), requests(WARM), Gumbel())
    rows = [row for step in steps for row in step.slim().rows()]
    assert len(rows) > 20 and {row["expected_kind"] for row in rows} == {"noise"}
    assert all(row["expected_accepted"] == row["accepted"] for row in rows)
    assert 0 < sum(row["accepted"] for row in rows) < sum(row["depth"] for row in rows)
    _, steps = decode(target, draft_model(TREE, "gumbel"), requests(WARM), Match())
    assert {row["expected_kind"] for step in steps for row in step.rows()} == {"exact"}


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=["token", "traversal"])
def test_rejection_sampling_is_refused_before_anything_runs(target, verifier):
    with pytest.raises(ValueError, match=f"'{verifier.name}' .*deterministic, iid, without_replacement"):
        fixed_group(Arm(target, draft_model(CHAIN, "gumbel"), verifier, CounterDraws(0)), requests(WARM))


# No noise is used twice --------------------------------------------------------------------------------------------


def watched(target, tree) -> Watched:
    """Every draw of a decode of several steps."""
    draws = Watched()
    group = fixed_group(Arm(target, draft_model(tree, "gumbel"), Gumbel(), draws), requests(WARM, new=16))
    steps = list(group)
    assert len(steps) > 4
    assert sum(step.draft.shape.nodes > 0 for step in steps) > 3
    raced = {key for key in draws.keys if key.purpose == Purpose.RACE}
    assert raced == set(draws.noise)
    # Every noise that a draft carries came from those draws.
    known = {noise.tobytes() for noise in draws.noise.values()}
    assert all(row.tobytes() in known for step in steps for row in step.draft.noise.numpy())
    return draws


@pytest.mark.parametrize("tree", [CHAIN, TREE])
def test_every_key_of_a_decode_is_drawn_once(target, tree):
    draws = watched(target, tree)
    assert draws.repeats == 0
    assert len({noise.tobytes() for noise in draws.noise.values()}) == len(draws.noise)


# Early stops and bad input -----------------------------------------------------------------------------------------


def test_a_confident_draft_ends_paths_by_its_distribution_alone_and_keeps_rows_aligned(target):
    draft, batch, proposer = proposed(target, "2x2x1")
    sure = {}
    for row, _, text, _ in expanded(draft, batch.sequences):
        sure[row] = float(plain_logits(proposer.lm.model, text).softmax(-1).max())
    proposer.plan = replace(proposer.plan, confidence=sorted(sure.values())[len(sure) // 3])
    draws = Watched()
    fewer, batch, _ = proposed(target, proposer=proposer, draws=draws)
    assert 2 * 3 < fewer.shape.nodes < draft.shape.nodes
    assert len(fewer.noise) == len(draws.noise) == len(np.unique(fewer.shape.parent))
    for row, _, text, children in expanded(fewer, batch.sequences):
        q, noise = fewer.q[fewer.q_row[row]], fewer.noise[fewer.q_row[row]]
        torch.testing.assert_close(q, plain_probabilities(proposer.lm.model, text, WARM), atol=1e-9, rtol=0)
        assert children == (q.log() + noise).topk(len(children)).indices.tolist()
        same = next(
            r for r in draft.shape.trees[fewer.shape.root[row]] if path_tokens(draft, r) == path_tokens(fewer, row)
        )
        assert torch.equal(noise, draft.noise[draft.q_row[same]])
    wanted = requests(WARM, new=14)
    together = emitted(decode(target, proposer, wanted, Gumbel())[0])
    assert together == [emitted(decode(target, proposer, [request], Gumbel())[0])[0] for request in wanted]


def test_a_tree_is_refused_at_temperature_0_and_a_chain_is_not():
    with pytest.raises(ValueError, match=r"drawn gumbel .*proposer\.drawn=d"):
        draft_model("2x1", "gumbel").check_sampling(COLD)
    draft_model("2x1", "gumbel").check_sampling(WARM)
    draft_model("2x1", "gumbel", temperature=1.0).check_sampling(COLD)
    draft_model(CHAIN, "gumbel").check_sampling(COLD)
