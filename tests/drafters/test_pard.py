"""PARD: the stated distributions are those of plain forwards over mask tokens; the mask token is never drafted."""

import json
from dataclasses import replace

import pytest
import torch

from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.drafters.pard.propose import Pard
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Traversal
from tests.drafters.test_draft_model import WORDS, tokenizer_of
from tests.oracles import pard as oracle
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
    calls,
    compare_stated,
    decode,
    emitted,
    expanded,
    fork_of,
    requests,
)
from tests.tiny import CONTEXT, VOCABULARY, tiny_model

LAYERS, SIZES = 2, (4, 2, 8)
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
VARIANTS = {"own mask token": (VOCABULARY + 3, VOCABULARY + 1), "shared": (VOCABULARY, 60), "narrow": (50, 7)}
"""The draft's vocabulary, and its mask token."""


def pard(size=VOCABULARY + 3, mask=VOCABULARY + 1, context=CONTEXT, **options):
    lm = CausalLM(tiny_model(seed=1, num_hidden_layers=LAYERS, vocab_size=size))
    return Pard(lm, context, mask, TreePlan.read(**options), vocabulary=size if size < VOCABULARY else None)


def levels(proposer, text, depth):
    """The logits ``[V]`` of each level below ``text``."""
    weights = proposer.lm.model.state_dict()
    text = [token if token < len(weights["lm_head.weight"]) else proposer.mask_token for token in text]
    return oracle.levels(weights, text, proposer.mask_token, depth, VOCABULARY, LAYERS, SIZES)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, variant):
    proposer = pard(*VARIANTS[variant], tree=TREE, drawn="without_replacement")

    def each(info):
        assert calls(info) <= 1
        assert not (info.draft.token == proposer.mask_token).any()

    def of_level(text, path):
        return levels(proposer, text, 3)[len(path)]

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=12), of_level, each)
    assert compared > 50 and rejections > 5


def test_every_row_of_a_level_states_the_same_distribution(target):
    proposer = pard(nodes=12, children=3, width=2, max_depth=3, drawn="without_replacement")
    draft = proposer.propose(batch_of(target, requests(WARM), proposer))
    shape = draft.shape
    for tree in range(3):
        for depth in range(3):
            rows = [r for r in shape.trees[tree] if shape.depth[r] == depth and shape.count[r]]
            assert all(torch.equal(draft.q[draft.q_row[r]], draft.q[draft.q_row[rows[0]]]) for r in rows)
    assert (shape.depth[shape.expanded] > 0).any()


WAYS = [
    {"tree": TREE, "drawn": "deterministic"},
    {"depth": 4},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
    {"nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_greedy_drafting_emits_the_target_s_tokens_with_one_forward_a_step(target, truth, options):
    proposer = pard(**options)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    assert max(calls(info) for info in steps) == 1
    assert steps[0].draft.shape.nodes >= 3 * 4, "the first step drafts below the prompts"


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
def test_a_batch_decodes_as_its_requests_alone(target, sampling):
    proposer = pard(tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


@torch.no_grad()
def test_distributions_are_right_after_forced_tokens_rewinds_and_forks(target):
    proposer = pard(depth=3)
    batch = batch_of(target, requests(WARM)[:1], proposer)
    (seq,) = batch.sequences

    def check():
        draft = proposer.propose(batch)
        assert draft.shape.nodes == 3 * len(batch.sequences)
        for row, sequence, _, _ in expanded(draft, batch.sequences):
            level = logits_to_probs(levels(proposer, sequence.tokens, 3)[draft.shape.depth[row]][None], [WARM])[0]
            torch.testing.assert_close(draft.q[draft.q_row[row]], level, rtol=0, atol=1e-6)
        for sequence in batch.sequences:
            sequence.step += 1

    check()
    assert len(seq.state.kv) == len(seq.tokens), "mask tokens are no part of the sequence"
    seq.tokens += [5, 9, 2]  # several pending tokens
    check()
    del seq.tokens[4:]
    check()
    batch.sequences.append(fork_of(seq, proposer, [*seq.tokens[:3], 8]))
    check()
    seq.tokens[-1] = 30
    check()
    for sequence in batch.sequences:
        proposer.close(sequence.state)
    assert not proposer.lm.cells.references.any()


@pytest.mark.parametrize("context", [16, 12])
def test_mask_tokens_stay_within_the_draft_s_context(target, truth, context):
    proposer = pard(context=context, tree="1x1x1x1")
    group, steps = decode(target, proposer, requests(prompts=PROMPTS[:1]))
    assert emitted(group) == truth[:1]
    for info in steps:
        assert info.draft.shape.deepest == max(0, min(4, context + 1 - info.context[0], 26 - info.context[0]))


# Loading -----------------------------------------------------------------------------------------------------------

MASKED = [*WORDS, "<mask>"]


def saved(folder, words=MASKED, **fields):
    tiny_model(num_hidden_layers=1, vocab_size=VOCABULARY + 3).to(torch.float32).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    tokenizer_of(words).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_with_words(target):
    return replace(target, tokenizer=tokenizer_of(WORDS))


def test_a_checkpoint_names_its_mask_token(target_with_words, truth, tmp_path):
    path = saved(tmp_path, pard_token=VOCABULARY)
    proposer = Pard.load(target_with_words, path, tree="2x2", drawn="deterministic")
    assert (proposer.name, proposer.nodes, proposer.context, len(proposer.sha256)) == ("pard", 6, CONTEXT, 64)
    assert proposer.facts["mask_token"] == VOCABULARY
    assert emitted(decode(target_with_words, proposer, requests())[0]) == truth
    unnamed = saved(tmp_path / "unnamed")
    assert Pard.load(target_with_words, unnamed, mask_token=VOCABULARY, depth=2).mask_token == VOCABULARY


@pytest.mark.parametrize(("fields", "options", "message"), [
    ({}, {}, "no pard_token .*set proposer.mask_token"),
    ({"pard_token": VOCABULARY + 3}, {}, f"pard_token .* 0 to {VOCABULARY + 2}, not {VOCABULARY + 3}"),
    ({"pard_token": "<mask>"}, {}, "pard_token .*'<mask>'"),
    ({"pard_token": VOCABULARY, "spd_type": "pard2"}, {}, "spd_type .'pard2'."),
    ({"pard_token": VOCABULARY, "pard_taps": [1, 2]}, {}, "pard_taps"),
    ({}, {"mask_token": -1}, "mask_token .*-1"),
    ({}, {"mask_token": True}, "mask_token .*true"),
    ({}, {"mask_token": 9}, f"1 ids differ .*{VOCABULARY} is None against '<mask>'"),
    ({"pard_token": VOCABULARY}, {"depth": None, "tree": str(VOCABULARY + 1)}, f"vocabulary of {VOCABULARY}"),
    ({"pard_token": VOCABULARY}, {"tree": "2"}, "depth"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_reason(target_with_words, tmp_path, fields, options, message):
    with pytest.raises(ValueError, match=message):
        Pard.load(target_with_words, saved(tmp_path, **fields), **{"depth": 2} | options)


def test_other_tokens_than_the_mask_token_must_agree(target_with_words, tmp_path):
    words = [*WORDS[:-1], "other", "<mask>"]
    with pytest.raises(ValueError, match=f"{VOCABULARY - 1} is 'w53' against 'other'"):
        Pard.load(target_with_words, saved(tmp_path, words, pard_token=VOCABULARY), depth=2)
