"""A draft model: its stated distributions, its tokens, its cells after any history, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Match, Traversal
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    Recording,
    batch_of,
    calls,
    decode,
    draft_model,
    emitted,
    expanded,
    fork_of,
    path_tokens,
    plain_logits,
    plain_probabilities,
    requests,
)
from tests.tiny import CONTEXT, VOCABULARY, tiny_model, tiny_target

TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
KINDS = [
    ("1x1x1x1", "iid"),
    (TREE, "iid"),
    (TREE, "without_replacement"),
    (TREE, "deterministic"),
    ("1x1x1", "deterministic"),
]


# Tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tree", "drawn"),
    [("1x1x1x1", "iid"), ("1x1x1x1", "without_replacement"), (TREE, "deterministic"), ("1x1x1", "deterministic")],
)
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, tree, drawn):
    proposer = draft_model(tree, drawn)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    assert not proposer.lm.cells.references.any()
    forwards = [calls(step) for step in steps]
    assert max(forwards) <= max(map(len, proposer.tree))


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.parametrize(("tree", "drawn"), KINDS[:4])
def test_a_batch_decodes_as_its_requests_alone_and_in_any_order(target, tree, drawn, sampling):
    sampled_tree = tree == TREE and drawn != "deterministic"
    proposer = draft_model(tree, drawn, temperature=1.0 if sampled_tree and sampling == COLD else None)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted)[0])
    alone = [emitted(decode(target, proposer, [request])[0])[0] for request in wanted]
    assert together == alone
    swapped = emitted(decode(target, proposer, wanted[::-1])[0])
    assert swapped == together


@pytest.mark.parametrize("verifier", [None, Traversal()])
@pytest.mark.parametrize("sampling", [COLD, WARM])
def test_the_target_as_its_own_draft_is_always_accepted(target, sampling, verifier):
    proposer = draft_model("1x1x1x1", "iid", seed=0, num_hidden_layers=2)
    _, steps = decode(target, proposer, requests(sampling, new=26), verifier)
    for step in steps:
        assert [len(done.path) for done in step.committed] == [4] * len(step.sequences)
        np.testing.assert_allclose(step.expected, 4, atol=1e-9)
    assert len(steps) == -(-26 // 5)


def test_the_draft_s_context_bounds_its_trees(target, truth):
    proposer = draft_model(TREE, "deterministic", context=16)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    deepest = {}
    for step in steps:
        for root, context in enumerate(step.context):
            deepest[context] = max(
                deepest.get(context, 0), int(step.draft.shape.depth[step.draft.shape.trees[root]].max())
            )
    # Computed nodes stay within position 15.
    assert all(depth == max(0, min(3, 17 - context)) for context, depth in deepest.items())
    short = tiny_target(context=20)
    group, _ = decode(short, draft_model("1x1x1x1"), requests(prompts=PROMPTS[:1]))
    assert [s.finish for s in group.sequences] == ["context"]


# Distributions -----------------------------------------------------------------------------------------------------


def check_distributions(draft, batch, model, draws):
    """Check that every stated q is a plain forward's over that path, and that every token was drawn from it as
    declared."""
    shape = draft.shape
    keys = [key for _, key, _ in draws.picks]
    assert len(set(keys)) == len(keys) == shape.nodes  # one draw each, keys all different
    taken = iter(sorted(draws.picks, key=lambda pick: pick[1]))
    for row, sequence, text, _ in expanded(draft, batch.sequences):
        plain = plain_probabilities(model, text, sequence.request.sampling)
        torch.testing.assert_close(draft.q[draft.q_row[row]], plain, atol=1e-9, rtol=0)
    assert len(draft.q) == len(np.unique(shape.parent))
    # Draws come tree by tree in order of number, which is breadth first: nodes in row order.
    earlier = {}
    for row in sorted(range(shape.roots, shape.rows), key=lambda r: (shape.root[r], r)):
        weights, key, token = next(taken)
        parent = int(shape.parent[row - shape.roots])
        expected = draft.q[draft.q_row[parent]].clone()
        if draft.drawn == "without_replacement":
            expected[earlier.get(parent, [])] = 0
        assert torch.equal(weights, expected)
        assert int(draft.token[row - shape.roots]) == token
        assert key.request == batch.sequences[shape.root[row]].request.id
        earlier.setdefault(parent, []).append(token)
    if draft.drawn == "without_replacement":
        assert all(len(set(siblings)) == len(siblings) for siblings in earlier.values())


@pytest.mark.each_value
@pytest.mark.parametrize(
    "sampling", [WARM, Sampling(0.7, top_k=3), Sampling(1.2, top_p=0.6, repetition_penalty=1.5), COLD]
)
@pytest.mark.parametrize(
    ("tree", "drawn"), [("1x1x1", "iid"), (TREE, "iid"), (TREE, "without_replacement"), ("4x2", "without_replacement")]
)
def test_stated_distributions_are_those_drawn_from(target, tree, drawn, sampling):
    proposer, draws = draft_model(tree, drawn), Recording()
    wanted = [replace(request, sampling=sampling) for request in requests()[:2]] + [
        replace(requests()[2], sampling=WARM)
    ]
    batch = batch_of(target, wanted, proposer, draws)
    draft = proposer.propose(batch)
    check_distributions(draft, batch, proposer.lm.model, draws)
    for sequence in batch.sequences:
        proposer.close(sequence.state)


def test_siblings_beyond_the_support_are_left_out(target):
    support = {}
    for drawn in ("iid", "without_replacement"):
        for name, sampling in {"cold": COLD, "two": Sampling(1.0, top_k=2), "all": WARM}.items():
            proposer = draft_model("4x1", drawn)
            batch = batch_of(target, requests(sampling)[:1], proposer)
            support[drawn, name] = proposer.propose(batch).shape.nodes
    assert support == {
        ("iid", "cold"): 2, ("iid", "two"): 8, ("iid", "all"): 8,
        ("without_replacement", "cold"): 2, ("without_replacement", "two"): 4, ("without_replacement", "all"): 8,
    }  # fmt: skip


@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_point_drafts_the_likeliest(target, penalty):
    sampling = Sampling(0.5, top_k=1, repetition_penalty=penalty)
    proposer = draft_model(TREE, "deterministic")
    batch = batch_of(target, requests(sampling), proposer)
    draft = proposer.propose(batch)
    assert draft.q is None
    for _, _, text, children in expanded(draft, batch.sequences):
        logits = plain_logits(proposer.lm.model, text)
        seen = torch.unique(torch.tensor(text))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        assert children == logits.topk(len(children)).indices.tolist()


# Cells -------------------------------------------------------------------------------------------------------------


def test_accepted_nodes_are_found_again(target):
    """After a step only tokens that were no computed nodes are computed: the accepted last level and the token after
    it."""
    proposer = draft_model(TREE, "deterministic", seed=0, num_hidden_layers=2)
    lengths = []
    forward = proposer.lm.forward
    proposer.lm.forward = lambda sequences, pending, draft, **timed: (
        lengths.append([*map(len, pending)]),
        forward(sequences, pending, draft, **timed),
    )[1]
    _, steps = decode(target, proposer, requests(new=17, prompts=PROMPTS[:1]), Match())
    assert [len(done.path) for step in steps for done in step.committed] == [3] * 5
    assert lengths == [[6], *[[2]] * 4]


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=1, num_hidden_layers=1)


@st.composite
def histories(draw):
    """Any change of a sequence between two proposals."""
    kinds = st.sampled_from(["accept", "accept", "rewind", "replace", "force", "fork"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 6), st.integers(0, VOCABULARY - 1)), max_size=7))


@pytest.mark.nightly
@pytest.mark.parametrize(("tree", "drawn"), [(TREE, "iid"), (TREE, "deterministic"), ("1x1x1", "without_replacement")])
@given(history=histories())
@settings(max_examples=10)
def test_distributions_are_right_after_any_history(target, small, tree, drawn, history):
    proposer = draft_model(tree, drawn, lm=CausalLM(small))
    batch = batch_of(target, requests(WARM)[:1], proposer)
    for step, (what, number, token) in enumerate([("accept", 0, 0), *history]):
        draft = proposer.propose(batch)
        for row, _, text, children in expanded(draft, batch.sequences):
            plain = plain_probabilities(proposer.lm.model, text, WARM)
            if drawn == "deterministic":
                assert children == plain.topk(len(children)).indices.tolist()
            else:
                torch.testing.assert_close(draft.q[draft.q_row[row]], plain, atol=1e-9, rtol=0)
        seq = batch.sequences[number % len(batch.sequences)]
        if what == "accept":
            tree_rows = draft.shape.trees[number % len(batch.sequences)]
            seq.tokens += [*path_tokens(draft, int(tree_rows[number % len(tree_rows)])), token]
        elif what == "rewind":
            del seq.tokens[max(1, len(seq.tokens) - number) :]
        elif what == "replace":
            seq.tokens[-min(number, len(seq.tokens) - 1) or -1 :] = [token, token]
        elif what == "force":
            seq.tokens += [token] * number
        elif len(batch.sequences) < 3:
            batch.sequences.append(fork_of(seq, proposer, [*seq.tokens, token], step + 1))
        for sequence in batch.sequences:
            sequence.step += 1
    for sequence in batch.sequences:
        proposer.close(sequence.state)
    assert not proposer.lm.cells.references.any()
    assert not any(proposer.lm.cells._users)


def forked(target, proposer):
    """A batch of one sequence that has drafted, and a fork of it that has not."""
    batch = batch_of(target, requests(WARM)[:1], proposer)
    proposer.propose(batch)
    sequence = batch.sequences[0]
    return batch, sequence, fork_of(sequence, proposer)


def test_a_fork_drafts_after_its_origin_has_closed(target):
    proposer = draft_model("1x1")
    batch, sequence, twin = forked(target, proposer)
    proposer.close(sequence.state)
    batch.sequences[:] = [twin]
    proposer.propose(batch)
    proposer.close(twin.state)
    assert not proposer.lm.cells.references.any()


@pytest.mark.parametrize("tree", ["1x1", "2x1"])
def test_calls_of_the_draft_are_timed_with_the_step_and_leave_its_runner_as_it_was(target, tree):
    proposer = draft_model(tree, "deterministic")
    clock = proposer.lm.clock
    _, steps = decode(target, proposer, requests())
    assert calls(steps[0]) == 2 and all(calls(step) <= 2 for step in steps)
    assert proposer.lm.clock is clock is not target.lm.clock and not clock.spans


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tree", "drawn", "temperature"),
    [("1x1x1", "iid", None), (TREE, "iid", 0.3), (TREE, "without_replacement", 0.3), (TREE, "deterministic", None)],
)
@pytest.mark.each_value
def test_nan_logits_end_their_own_request_only(target, truth, bad, tree, drawn, temperature):
    proposer = draft_model(tree, drawn, temperature)
    poison = 18  # in the second prompt only
    assert not any(poison in truth[i] for i in (0, 2))
    with torch.no_grad():
        proposer.lm.model.get_input_embeddings().weight[poison] = bad
    group, _ = decode(target, proposer, requests())
    assert [s.finish for s in group.sequences] == ["length", "nan", "length"]
    assert [emitted(group)[i] for i in (0, 2)] == [truth[0], truth[2]]
    assert list(group.errors) == [group.sequences[1]]
    assert "request 'p1', step 0: the draft's logits are NaN or infinite" in group.errors[group.sequences[1]]
    again, _ = decode(target, proposer, requests()[::2])  # in the cells with NaN
    assert emitted(again) == [truth[0], truth[2]]


def tokenizer_of(words, split="Whitespace"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = getattr(pre_tokenizers, split)()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0])


WORDS = ["<unk>", "def", "f", "(", "x", ")", ":", *(f"w{n}" for n in range(VOCABULARY - 7))]


def saved(folder, words=WORDS, split="Whitespace", **changes):
    tiny_model(num_hidden_layers=1, **changes).to(torch.float32).save_pretrained(folder)
    tokenizer_of(words, split).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_with_words(target):
    return replace(target, tokenizer=tokenizer_of(WORDS))


def test_a_loaded_draft_has_the_target_s_type_and_states_its_facts(target_with_words, truth, tmp_path):
    path = saved(tmp_path)
    chain = DraftModel.load(target_with_words, path, depth=3)
    assert (chain.name, chain.drawn, chain.nodes, chain.context) == ("draft_chain", "iid", 3, CONTEXT)
    assert chain.lm.dtype == target_with_words.lm.dtype
    assert chain.facts == {"tree": "0 0.0 0.0.0", "nodes": 3, "temperature": None, "confidence": 0.0}
    tree = DraftModel.load(target_with_words, path, tree="2x2", drawn="without_replacement", temperature=1)
    assert (tree.name, tree.nodes, len(tree.sha256)) == ("draft_tree", 6, 64)
    assert emitted(decode(target_with_words, tree, requests())[0]) == truth


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"depth"),
        ({"depth": 2, "tree": "2x2"}, r"depth"),
        ({"tree": "2,2"}, "written as"),
        ({"tree": "99"}, f"99 wide .* {VOCABULARY}"),
    ],
)
def test_wrong_options_are_named(target_with_words, tmp_path_factory, options, named):
    folder = tmp_path_factory.getbasetemp() / "draft"
    path = str(folder) if folder.exists() else saved(folder)
    with pytest.raises(ValueError, match=named):
        DraftModel.load(target_with_words, path, **options)


def test_other_tokenizers_are_refused(target_with_words, tmp_path):
    other = WORDS.copy()
    other[4], other[9] = other[9], other[4]
    with pytest.raises(
        ValueError, match=r"2 ids differ \(target against draft: 4 is 'x' against 'w2'; 9 is 'w2' against"
    ):
        DraftModel.load(target_with_words, saved(tmp_path / "swapped", other), depth=2)
    fewer = saved(tmp_path / "fewer", WORDS[:-1])
    with pytest.raises(ValueError, match=f"{VOCABULARY} .*{VOCABULARY - 1} .*1 ids"):
        DraftModel.load(target_with_words, fewer, depth=2)
    with pytest.raises(ValueError, match="splits"):
        DraftModel.load(target_with_words, saved(tmp_path / "split", split="WhitespaceSplit"), depth=2)
    wider = saved(tmp_path / "wider", vocab_size=64)
    with pytest.raises(ValueError, match=f"64 tokens.*tiny-llama.* {VOCABULARY}"):
        DraftModel.load(target_with_words, wider, depth=2)
    with pytest.raises(OSError, match=r"no config\.json"):
        DraftModel.load(target_with_words, str(tmp_path), depth=2)


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_a_tree_of_drawn_siblings_is_refused_at_temperature_0(drawn):
    cold, warm = Sampling(0.0), Sampling(1.0)
    with pytest.raises(ValueError, match=rf"drawn {drawn} .*proposer\.drawn=d"):
        draft_model("2x1", drawn).check_sampling(cold)
    draft_model("2x1", drawn).check_sampling(warm)
    draft_model("2x1", drawn, temperature=1.0).check_sampling(cold)
    draft_model("2x1", "deterministic").check_sampling(cold)
    draft_model("1x1", drawn).check_sampling(cold)
    with pytest.raises(ValueError, match="shrink the tree"):
        draft_model("2x1", drawn, temperature=0.0).check_sampling(warm)


def sureness(proposer, sequences, draft):
    """The likeliest token's probability at every row that could have children, by row."""
    likeliest = {}
    for root, sequence in enumerate(sequences):
        for row in draft.shape.trees[root].tolist():
            if draft.shape.depth[row] < 3:
                text = [*sequence.tokens, *path_tokens(draft, row)]
                likeliest[row] = float(plain_logits(proposer.lm.model, text).softmax(-1).max())
    return likeliest


@pytest.mark.parametrize("drawn", ["iid", "deterministic", "without_replacement"])
def test_an_unsure_token_ends_its_path(target, drawn):
    proposer = draft_model("2x2x1", drawn)
    batch = batch_of(target, requests(WARM), proposer)
    whole = proposer.propose(batch)
    proposer.plan = replace(
        proposer.plan, confidence=sorted(sureness(proposer, batch.sequences, whole).values())[whole.shape.rows // 4]
    )
    draft = proposer.propose(batch_of(target, requests(WARM), proposer))
    shape = draft.shape
    assert 2 * shape.roots < shape.nodes < whole.shape.nodes
    sure = sureness(proposer, batch.sequences, draft)
    for row in sure:
        above = shape.parent[row - shape.roots] if row >= shape.roots else None
        assert bool(len(shape.children[row])) == (above is None or sure[above] >= proposer.plan.confidence - 1e-12)
    proposer.plan = replace(proposer.plan, confidence=1.0)
    assert proposer.propose(batch_of(target, requests(WARM), proposer)).shape.depth.max() == 1


@pytest.mark.parametrize("sampling", [COLD, WARM])
def test_a_confident_draft_decodes_as_its_requests_alone(target, sampling):
    proposer = draft_model("1x1x1", "iid")
    batch = batch_of(target, requests(sampling), proposer)
    proposer.plan = replace(
        proposer.plan, confidence=sorted(sureness(proposer, batch.sequences, proposer.propose(batch)).values())[4]
    )
    wanted = requests(sampling, new=14)
    group, steps = decode(target, proposer, wanted)
    assert len({step.draft.shape.nodes for step in steps}) > 1
    assert emitted(group) == [emitted(decode(target, proposer, [request])[0])[0] for request in wanted]
