"""Suffix lookups, counts and scores against naive twins, through growth, rewinds, forks and forgotten responses."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.propose import suffix_index as module
from spec_lab.propose.suffix import SharedResponses, Suffix
from spec_lab.propose.suffix_counts import SuffixRules, grow
from spec_lab.propose.suffix_index import SuffixIndex
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from spec_lab.verify import Token

TEXT = st.lists(st.integers(0, 2), max_size=40)
EDITS = st.lists(st.tuples(st.integers(0, 9), TEXT), max_size=5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks and bulks so small that a few tokens split, merge and empty them."""
    monkeypatch.setattr(module, "BLOCK", 3)
    monkeypatch.setattr(module, "BULK", 12)


# Naive twins -----------------------------------------------------------------------------------------------------


def naive_order(texts, longest, end=-1):
    """(text, position) of every position with a context, sorted by reversed contexts, which end at the text's start."""

    def context(match):
        text, position = match
        before = texts[text][max(0, position - longest) : position][::-1]
        return before + [end] * (longest - len(before))

    return sorted(((t, p) for t, text in enumerate(texts) for p in range(1, len(text))), key=context)


def naive_match(text, position, context, longest):
    length = 0
    while length < min(longest, position, len(context)) and text[position - 1 - length] == context[-1 - length]:
        length += 1
    return length


def naive_spread(items, wanted):
    if len(items) <= wanted:
        return items
    return [items[-1]] if wanted == 1 else [items[i * (len(items) - 1) // (wanted - 1)] for i in range(wanted)]


def naive_matches(texts, context, longest, least, most, end=-1):
    """((text, position), match) of the occurrences."""
    order = naive_order(texts, longest, end)
    match = {position: naive_match(texts[position[0]], position[1], context, longest) for position in order}
    matches = []
    for length in range(longest, least - 1, -1):
        chosen = naive_spread([position for position in order if match[position] == length], most - len(matches))
        matches += [(position, length) for position in sorted(chosen, reverse=True)] if len(matches) < most else []
    return matches


def naive_draft(rows, budget, children, min_share):
    """(path, count) of the drafted nodes: from the trie of all beginnings with counts, the best ones one by one."""
    count = Counter(tuple(row[:end]) for row in rows for end in range(1, len(row) + 1))
    first = {path: at for at, path in reversed([*enumerate(tuple(r[:e]) for r in rows for e in range(1, len(r) + 1))])}
    drafted, reachable, born = [], [], 0

    def open_below(path):
        nonlocal born
        below = sorted(
            (child for child in count if child[:-1] == path),
            key=lambda path_below: (-count[path_below], first[path_below]),
        )
        for child in below[:children]:
            if count[child] / len(rows) >= min_share:
                born += 1
                reachable.append((-count[child], born, child))

    open_below(())
    while reachable and len(drafted) < budget:
        chosen = min(reachable)
        reachable.remove(chosen)
        drafted.append((chosen[2], count[chosen[2]]))
        open_below(chosen[2])
    return drafted


def naive_best(sources, context, longest, rules):
    """(score, paths) of the best draft over sources and match lengths."""
    best = (0.0, [])
    for texts in sources:
        matches = naive_matches(texts, context, longest, rules.min_match, rules.occurrences)
        for length in sorted({length for _, length in matches}, reverse=True):
            rows = [texts[t][p : p + rules.depth] for (t, p), match in matches if match >= length]
            drafted = naive_draft(rows, rules.budget(length), rules.children, rules.min_share)
            score = sum(count for _, count in drafted) / len(rows)
            if score > best[0]:
                best = (score, [path for path, _ in drafted])
            if rules.longest_only:
                break
    return best


def found_by(source, context, least, most):
    """(position, match) of the occurrences that a source finds."""
    levels = source.matches(context, most, lambda length: length >= least)
    return [(position, length) for length, places in levels for position in places]


def continued(source, matches, count):
    return source.continuations([position for position, _ in matches], count)


# The index -------------------------------------------------------------------------------------------------------


def check_structure(index):
    """Blocks are not empty, their heads are right."""
    sizes = [len(block) for block in index._blocks]
    assert len(sizes) == 1 or all(sizes)
    assert index._heads == [index._context(block[0]) if block else bytearray() for block in index._blocks]


@given(TEXT, EDITS, st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_the_index_of_a_text_that_grows_and_is_rewound(tokens, edits, longest, most, told):
    index = SuffixIndex(longest)
    known = 0
    for back, new in [(0, []), *edits]:
        kept = max(0, len(tokens) - back)
        known = min(known, kept)
        tokens = tokens[:kept] + new
        index.follow(tokens, known if told else 0)
        known = len(tokens)
        check_structure(index)
        assert index.positions == [position for _, position in naive_order([tokens], longest)]
        for least in (1, 2):
            matches = found_by(index, tokens, least, most)
            assert [((0, p), m) for p, m in matches] == naive_matches([tokens], tokens, longest, least, most)
            assert continued(index, matches, 3) == [tokens[p : p + 3] for p, _ in matches]


@given(st.lists(TEXT, max_size=9), st.lists(st.booleans(), max_size=9), TEXT, st.integers(1, 5), st.integers(1, 9))
def test_several_texts_are_not_joined_and_the_oldest_is_forgotten(texts, drops, context, longest, most):
    index, kept, starts, end = SuffixIndex(longest), [], [], 0
    for text, drop in zip(texts, [*drops, *[False] * 9], strict=False):
        index.add(text)
        kept.append(text)
        starts.append(end)
        end += len(text) + longest + 1
        if drop:
            index.drop()
            kept, starts = kept[1:], starts[1:]
        check_structure(index)
        assert index.positions == [starts[t] + p for t, p in naive_order(kept, longest)]
        matches = found_by(index, context, 1, most)
        naive = naive_matches(kept, context, longest, 1, most)
        assert matches == [(starts[t] + p, match) for (t, p), match in naive]
        assert continued(index, matches, 4) == [kept[t][p : p + 4] for (t, p), _ in naive]


# Drafts ----------------------------------------------------------------------------------------------------------


def paths(parents, tokens):
    node_paths = [()]
    for parent, token in zip(parents, tokens, strict=True):
        node_paths.append((*node_paths[parent], token))
    return node_paths[1:]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 3))
def test_a_tree_has_the_nodes_of_the_largest_counts(rows, budget, children):
    for min_share in (0.0, 0.3):
        got = grow(rows, budget, children, min_share)
        naive = naive_draft(rows, budget, children, min_share)
        assert paths(got.parents, got.tokens) == [path for path, _ in naive]
        assert got.score == sum(count for _, count in naive) / len(rows)
        of_path = {(): len(rows), **dict(naive)}
        assert got.shares == [count / of_path[path[:-1]] for path, count in naive]


def test_a_score_is_the_expected_number_of_accepted_tokens():
    """Two of three occurrences continue with 5, one of these with 6: 2/3 + 1/3."""
    got = grow([[5, 6], [5, 7], [8]], 2, 1, 0.1)
    assert got.tokens == (5, 6) and got.score == pytest.approx(1.0) and got.shares == [2 / 3, 1 / 2]
    assert grow([[5, 6], [5, 7], [8]], 9, 9, 0.5).tokens == (5,)


RULES = (
    SuffixRules(),
    SuffixRules(nodes=4, depth=3, factor=2.0, children=3, min_share=0.0, occurrences=7),
    SuffixRules(factor=4.0, offset=1, longest_only=True, min_match=2),
)


def batch(proposer, *texts):
    sequences = [SimpleNamespace(tokens=list(text), state=proposer.init(None)) for text in texts]
    return SimpleNamespace(
        sequences=sequences, device=torch.device("cpu"), room=lambda: [99] * len(sequences), recorded=True
    )


def drafted(proposer, asked):
    """The draft's paths, tree by tree."""
    draft = proposer.propose(asked)
    shape, token = draft.shape, draft.token.tolist()
    assert (shape.sizes - 1 <= proposer.nodes).all()
    return [
        [tuple(token[row - shape.roots] for row in shape.path(int(row))) for row in tree[1:]] for tree in shape.trees
    ]


@settings(max_examples=60)
@given(st.lists(TEXT, max_size=3), TEXT.filter(bool), EDITS, st.integers(2, 5), st.sampled_from(RULES))
def test_the_best_draft_over_match_lengths_and_sources(responses, tokens, edits, longest, rules):
    """Also where a source is not searched, because its longest match has been too short shortly before."""
    stored = [[0, 1, 2, 2, 0, 0, 1, 1, 2, 0, 1, 2, 1, 0, 2, 2, 1]]
    store = SuffixIndex(longest)
    store.add(stored[0])
    proposer = Suffix(rules, longest, shared=SharedResponses(SuffixIndex(longest), 1000), store=store)
    asked = batch(proposer, tokens)
    (sequence,) = asked.sequences
    learned = []
    for (back, new), response in zip([(0, []), *edits], [[], *responses, *[[]] * 5], strict=False):
        kept = max(1, len(sequence.tokens) - back)
        if back:
            proposer.rewind(sequence.state, kept)
        sequence.tokens = sequence.tokens[:kept] + new
        finished = SimpleNamespace(finish="stop", emitted=response)
        proposer.observe([SimpleNamespace(sequence=finished), SimpleNamespace(sequence=SimpleNamespace(finish=None))])
        learned += [response] if response else []
        score, expected = naive_best([[sequence.tokens], learned, stored], sequence.tokens, longest, rules)
        (got,) = proposer.scores(asked)
        assert got == pytest.approx(score) and drafted(proposer, asked) == [expected]


def test_the_own_text_wins_ties_and_a_better_score_wins():
    proposer = Suffix.load(None, shared=100)
    proposer.shared.learn([1, 2, 7, 7])
    assert drafted(proposer, batch(proposer, [1, 2, 8, 1, 2]))[0][0] == (8,)
    proposer.shared.learn([9, 1, 2, 6, 5, 4])
    assert drafted(proposer, batch(proposer, [1, 2, 8, 9, 1, 2])) == [[(6,), (6, 5), (6, 5, 4)]]


def test_shares_of_a_chain_are_those_of_its_tree():
    """Of three occurrences of (1, 2) two continue with 7, and these agree on what follows."""
    text = [1, 2, 7, 8, 9, 3, 1, 2, 5, 4, 6, 1, 2, 7, 8, 9, 0, 1, 2]
    chains, trees = (Suffix(SuffixRules(children=children, min_match=2)) for children in (1, 3))
    chain, tree = (proposer.propose(batch(proposer, text)) for proposer in (chains, trees))
    assert chain.token.tolist() == tree.token.tolist() == [7, 8]
    assert chain.greedy_q.tolist() == tree.greedy_q.tolist() == [2 / 3, 1.0]
    unrecorded = batch(chains, text)
    unrecorded.recorded = False
    assert chains.propose(unrecorded).greedy_q is None


def test_a_fork_drafts_from_a_text_of_its_own():
    proposer = Suffix.load(None)
    asked = batch(proposer, [1, 2, 3, 1, 2])
    (sequence,) = asked.sequences
    proposer.propose(asked)
    twin = SimpleNamespace(tokens=[1, 2, 9, 1], state=proposer.fork(sequence.state))
    proposer.rewind(twin.state, 2)
    before = sequence.state.own.positions
    asked.sequences[:] = [twin]
    assert drafted(proposer, asked) == drafted(proposer, batch(proposer, twin.tokens))
    assert sequence.state.own.positions == before
    sequence.tokens += [3]
    asked.sequences[:] = [sequence]
    assert drafted(proposer, asked) == drafted(proposer, batch(proposer, sequence.tokens))


def test_responses_are_forgotten_oldest_first_and_all_at_once():
    proposer = Suffix.load(None, own=False, shared=6)
    assert "6 tokens" in proposer.shared_store
    asked = batch(proposer, [1], [2])
    for response in ([1, 5, 5], [2, 6, 6]):
        proposer.shared.learn(response)
    assert drafted(proposer, asked) == [[(5,)], [(6,)]]
    proposer.shared.learn([3])
    assert drafted(proposer, asked) == [[], [(6,)]]
    proposer.shared.learn([8, 8, 1, 4, 8, 8, 8, 8])  # only its last tokens fit
    assert drafted(proposer, asked) == [[(4,)], []]
    proposer.forget()
    assert drafted(proposer, asked) == [[], []]
    assert Suffix.load(None).shared_store == ""


@pytest.mark.parametrize(
    "options",
    [{}, {"shared": 9}, {"children": 3, "nodes": 5, "factor": 4.0}, {"longest_only": True, "factor": 4.0, "offset": 1}],
    ids=str,
)
def test_it_is_lossless_by_enumeration(options):
    proof = prove(Suffix.load(None, **options), Token(), QUICK)
    assert proof.failure is None and not proof.missing and proof.drafts == "proposer"
    assert proof.worst.tv < 1e-12


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_match": 3, "max_match": 2}, "min_match is 3"),
        ({"factor": 0}, "factor and offset"),
        ({"own": False}, "own=false"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Suffix.load(None, **options)
