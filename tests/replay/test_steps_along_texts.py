"""Steps along recorded texts: equal, on average over texts, to the exact number of steps of the design itself."""

from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import tree
from spec_lab.propose.trees import parse
from spec_lab.replay import pseudo_tokens
from spec_lab.replay.recorded_trees import NeedsModel, RecordedText, RunVerifier
from spec_lab.replay.steps_along_texts import Rule, TextRows, evaluate, evaluate_deterministic, static
from spec_lab.replay.subtrees import Subtree
from spec_lab.verify import KSeq, Lenient, Match, Token, Traversal
from tests.replay.recorded import by_hand, decoded, without_nodes

V, LENGTH = 3, 4
GENERATOR = np.random.default_rng(0)
P, Q = (GENERATOR.dirichlet(np.full(V, 0.8), V) for _ in range(2))  # of the next token, given the last one


def recorded_text(text, top=None):
    """Trees without nodes below every token of a text that follows the token 0."""
    before = [0, *text]
    p, q = P[before[: len(text)]], Q[before[: len(text)]]
    shape = without_nodes(len(text))
    draft = Draft(shape, torch.empty(0, dtype=torch.long), "iid", torch.from_numpy(q), np.arange(len(text)))
    number = np.arange(len(text))
    steps = pd.DataFrame(
        {"group": 0, "request": 0, "sequence": 0, "forward": number, "position": 1 + number, "prefill": False}
    )
    return by_hand(draft, p, top=top, texts={0: RecordedText(1, np.array(text))}, steps=steps)


def repeated(q, text, top=None, temperature=1.0):
    """A text at each of whose tokens q, of six tokens, is the same; p is about even over the tokens 0, 1 and 2."""
    p = np.array([0.34, 0.33, 0.33, 0.0, 0.0, 0.0])
    count = len(text)
    rows = torch.tensor(q, dtype=torch.float64).repeat(count, 1)
    draft = Draft(without_nodes(count), torch.empty(0, dtype=torch.long), "iid", rows, np.arange(count))
    number = np.arange(count)
    steps = pd.DataFrame(
        {"group": 0, "request": 0, "sequence": 0, "forward": number, "position": 1 + number, "prefill": False}
    )
    texts, facts = {0: RecordedText(1, np.array(text))}, {"name": "draft_tree", "temperature": temperature}
    return TextRows.of(by_hand(draft, np.tile(p, (count, 1)), top=top, texts=texts, proposer=facts, steps=steps))


def exact_steps(verifier, choices, drawn, q=Q, sure=None):
    """The expected number of steps that emit LENGTH - 1 tokens after the token x, for each x."""
    shape = tree(choices)

    @lru_cache(None)
    def outcomes(x):
        masses = []
        for tokens in product(range(V), repeat=shape.nodes):
            rows = [x, *tokens]
            chance, alive = 1.0, np.ones(shape.rows, dtype=bool)
            for node, token in enumerate(tokens):
                row = shape.parent[node]
                above = rows[row]
                if drawn == "iid":
                    chance *= q[above, token]
                else:
                    chance *= token == np.argsort(-q[above], kind="stable")[shape.rank[node]]
                if sure is not None and row and not sure[rows[shape.parent[row - 1]]]:
                    alive[1 + node] = False
                alive[1 + node] &= alive[row]
            if not chance:
                continue
            index = np.full(shape.rows, -1)
            index[shape.expanded] = np.arange(len(shape.expanded))
            carried = (torch.from_numpy(q[np.array(rows)[shape.expanded]]), index) if drawn == "iid" else (None, None)
            draft, kept = Draft(shape, torch.tensor(tokens), drawn, *carried).keep(alive)
            p = torch.from_numpy(P[np.array(rows)])[kept]
            verdict = verifier(draft, p)
            for row in range(draft.shape.rows):
                if verdict.stop[row] > 0:
                    residual = verdict.residual(np.array([row]))[0].numpy()
                    path = [int(draft.token[node - 1]) for node in draft.shape.path(row)]
                    for token, mass in enumerate(residual / residual.sum()):
                        masses.append((chance * verdict.stop[row] * mass, [*path, token]))
        return masses

    @lru_cache(None)
    def count(left, x):
        if left <= 0:
            return 0.0
        return 1 + sum(mass * count(left - len(emitted), emitted[-1]) for mass, emitted in outcomes(x) if mass)

    return [count(LENGTH - 1, x) for x in range(V)]


CASES = {
    "token-chain": (Token(), "1x1", "iid"), "token-2": (Token(), "2", "iid"), "token-2x1": (Token(), "0 1 0.0", "iid"),
    "kseq-2": (KSeq(), "2", "iid"), "match-2x1": (Match(), "0 1 1.0", "iid"),
    "deterministic": (Match(), "0 1 1.0", "deterministic"),
    "kseq-chain": (KSeq(), "1x1", "iid"),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_texts_is_the_exact_number_of_steps(case):
    verifier, shape, drawn = CASES[case]
    choices, total = parse(shape), 0.0
    for text in product(range(V), repeat=LENGTH):
        chance = np.prod([P[a, b] for a, b in zip([0, *text], text, strict=False)])
        sums = evaluate(TextRows.of(recorded_text(text)), verifier, [(1.0, Rule(choices, drawn))])
        assert sums.tokens.tolist() == [[LENGTH - 1]]
        total += chance * sums.steps.item()
    expected = float(P[0] @ exact_steps(verifier, choices, drawn))
    assert total == pytest.approx(expected, rel=1e-9)


def test_draft_temperatures_confidences_and_mixtures_are_exact_too():
    choices, colder = parse("1x1"), Q**2 / (Q**2).sum(1, keepdims=True)
    sure = Q.max(1) >= 0.6
    assert 0 < sure.sum() < V
    totals = np.zeros(3)
    for text in product(range(V), repeat=LENGTH):
        chance = np.prod([P[a, b] for a, b in zip([0, *text], text, strict=False)])
        text_rows = TextRows.of(recorded_text(text))
        rules = [Rule(choices, temperature=0.5), Rule(choices, confidence=0.6), Rule(parse("1")), Rule(parse("1x1"))]
        each = [evaluate(text_rows, Token(), [(1.0, rule)]).steps.item() for rule in rules]
        both = evaluate(text_rows, Token(), [(0.0, rules[2]), (1.0, rules[3])]).steps.item()
        assert both == pytest.approx(each[3])
        half = evaluate(text_rows, Token(), [(0.5, rules[2]), (0.5, rules[3])]).steps.item()
        assert each[3] - 1e-12 <= half <= each[2] + 1e-12
        totals += chance * np.array([each[0], each[1], each[3]])
    expected = [
        exact_steps(Token(), choices, "iid", colder), exact_steps(Token(), choices, "iid", sure=sure),
        exact_steps(Token(), choices, "iid"),
    ]  # fmt: skip
    np.testing.assert_allclose(totals, np.array(expected) @ P[0], rtol=1e-9)


def test_a_decoded_run_s_texts_hold_every_row_but_those_of_accepted_leaves(target):
    trees, rows = decoded(target, "iid", "1x1", new=12)
    text_rows = TextRows.of(trees)
    inside = np.arange(text_rows.text.shape[1]) < text_rows.length[:, None]
    assert (text_rows.row[inside] >= 0).all() and text_rows.prefill
    leaves = ~trees.expanded[text_rows.row[inside]]
    assert leaves.sum() <= (rows["accepted"] == 2).sum()
    exact = evaluate(text_rows, Token(), [(1.0, Rule(parse("1x1")))])
    assert len(exact.tokens) == (2 if leaves.any() else 1)
    assert (exact.steps.min(0) <= exact.steps.max(0)).all()


def test_rows_without_a_q_leave_an_interval_that_holds_the_value():
    text = (1, 0, 2, 1)
    trees = recorded_text(text)
    known = evaluate(TextRows.of(trees), Token(), [(1.0, Rule(parse("1x1")))]).steps.item()
    lacking = replace(trees, expanded=np.array([True, True, False, True]))
    bounds = evaluate(TextRows.of(lacking), Token(), [(1.0, Rule(parse("1x1")))]).steps
    assert bounds.min() <= known <= bounds.max() and bounds.max() > bounds.min()


def test_recorded_point_trees_are_followed_along_the_text():
    """Point drafts of a Markov draft model at every position: the steps are those of a simulation."""
    text, width = (1, 0, 2, 1, 1, 0, 2, 2), parse("0 1 0.0")
    shape = tree(width)
    before = [0, *text[:-1]]
    order = np.argsort(-Q, axis=1, kind="stable")
    from spec_lab.core.shape import forest

    drafted = [[order[x, 0], order[x, 1], order[order[x, 0], 0]] for x in before]
    whole = forest((shape,) * len(text))
    token = np.concatenate(drafted)
    rows = np.concatenate([before, token])
    number = np.arange(len(text))
    steps = pd.DataFrame(
        {"group": 0, "request": 0, "sequence": 0, "forward": number, "position": 1 + number, "prefill": False}
    )
    trees = by_hand(
        Draft(whole, torch.from_numpy(token)), P[rows], texts={0: RecordedText(1, np.array(text))}, steps=steps,
        proposer={"name": "ngram"},
    )  # fmt: skip
    count, position = 0, 1
    while position < len(text):
        tree_here, count = drafted[position], count + 1
        if text[position] == tree_here[0]:
            position += 1 + (position + 1 < len(text) and text[position + 1] == tree_here[2])
        elif text[position] == tree_here[1]:
            position += 1
        position += 1
    sums = evaluate_deterministic(TextRows.of(trees), Token(), Subtree())
    assert sums.steps.tolist() == [[count]] and sums.tokens.tolist() == [[len(text) - 1]]
    single = evaluate_deterministic(TextRows.of(trees), Traversal(), Subtree(nodes=1)).steps.item()
    assert count <= single <= len(text) - 1
    cut = TextRows.of(replace(trees, proposer={"name": "ngram", "policy": {"name": "bandit"}}))
    for limits in (Subtree(), Subtree(nodes=1)):
        with pytest.raises(NeedsModel, match="policy 'bandit' decided how far .* not followed along"):
            evaluate_deterministic(cut, Token(), limits)
    whole_tree = evaluate_deterministic(cut, Token(), Subtree.parse("0 1 0.0"))
    assert whole_tree.steps.tolist() == [[count]], "the policy drafted all of it in every step"


def test_what_texts_cannot_identify_is_refused_by_name(target):
    trees, _ = decoded(target)
    text_rows, chain = TextRows.of(trees), [(1.0, Rule(parse("1x1")))]
    for verifier, changed, rules, why in (
        (Traversal(), {}, chain, "no closed form"),
        (Lenient(0.5), {}, chain, "lossy"),
        (Token(), {"verifier": RunVerifier("lenient", False)}, chain, "those of the lossy verifier 'lenient'"),
        (Token(), {"verifier": RunVerifier("mine.Own", None)}, chain, "not known whether verifier 'mine.Own'"),
        (Token(), {"proposer": {"name": "eagle_chain"}}, chain, "depends on where its step began"),
        (Token(), {"proposer": trees.proposer | {"text_only": False}}, chain, "depends on where its step began"),
        (Token(), {}, [(1.0, Rule(parse("1x1"), "without_replacement"))], "siblings drawn 'without_replacement'"),
    ):
        with pytest.raises(NeedsModel, match=why):
            evaluate(replace(text_rows, trees=replace(trees, **changed)), verifier, rules)
    points, _ = decoded(target, "deterministic")
    with pytest.raises(NeedsModel, match="task.every=1"):
        evaluate_deterministic(TextRows.of(points), Token(), Subtree())
    with pytest.raises(NeedsModel, match="lossy verifier 'lenient'"):
        evaluate_deterministic(TextRows.of(replace(points, verifier=RunVerifier("lenient", False))), Token(), Subtree())
    with pytest.raises(NeedsModel, match="texts are not known"):
        TextRows.of(replace(trees, texts={}))


def test_a_proposer_of_one_s_own_that_reads_the_text_only_is_followed(target):
    trees, _ = decoded(target)
    declared = replace(trees, proposer={**trees.proposer, "name": "mine", "text_only": True})
    sums, known = (evaluate(TextRows.of(each), Token(), [(1.0, Rule(parse("1x1")))]) for each in (declared, trees))
    assert sums.steps == pytest.approx(known.steps)


UNSEEN = [0.05, 0.05, 0.05, 0.3, 0.3, 0.25]  # the likeliest tokens are not among three that are recorded


def test_a_confidence_reads_the_largest_probability_even_of_a_token_that_is_not_recorded():
    text, rule = (0, 0, 0, 0, 0), Rule(parse("1x1"), confidence=0.2)
    full, part = (evaluate(repeated(UNSEEN, text, top), Token(), [(1.0, rule)]).steps for top in (None, 3))
    assert part.min() == pytest.approx(full.item()) and part.max() == pytest.approx(full.item())
    stopped = evaluate(repeated(UNSEEN, text), Token(), [(1.0, replace(rule, confidence=0.31))]).steps
    assert stopped.item() > full.item()


def test_a_confidence_that_the_rest_s_mass_decides_is_refused():
    rows, rule = repeated(UNSEEN, (0, 0, 0, 0), top=3, temperature=2.0), Rule(parse("1x1"))
    low, high = (bounds[0] for bounds in pseudo_tokens.certainty(rows.trees))
    exact = 0.09 / np.square(UNSEEN).sum()
    assert low < exact < high
    with pytest.raises(NeedsModel, match="at 4 of 4 rows; set a larger record_top"):
        evaluate(rows, Token(), [(1.0, replace(rule, confidence=float(low + high) / 2))])
    assert evaluate(rows, Token(), [(1.0, replace(rule, confidence=float(low) / 2))]).steps.min() > 0


@pytest.mark.parametrize("choices", ["1", "2"])
def test_deterministic_tokens_that_may_not_be_recorded_are_refused(choices):
    rules = [(1.0, Rule(parse(choices), "deterministic"))]
    with pytest.raises(NeedsModel, match=r"draft tokens may include .* at 4 of 4 rows; set a larger record_top"):
        evaluate(repeated(UNSEEN, (0, 0, 0, 0), top=3), Match(), rules)
    likeliest_is_recorded = [0.4, 0.05, 0.05, 0.25, 0.15, 0.1]
    full, part = (
        evaluate(repeated(likeliest_is_recorded, (0, 0, 0, 0), top), Match(), rules).steps for top in (None, 3)
    )
    assert full.item() == part.max() == part.min() == 2


@pytest.mark.parametrize("policy", [{"name": "threshold", "rule": "svip"}, {"name": "fixed", "depth": 1}])
def test_a_policy_s_decisions_are_not_followed_along_the_text(policy):
    trees = recorded_text((1, 0, 2, 1))
    plain = {**trees.proposer, "tree": "1x1"}
    assert static(replace(trees, proposer=plain), Subtree()) == parse("1x1")
    cut = replace(trees, proposer={**plain, "policy": policy})
    for subtree in (Subtree(), Subtree(depth=1)):
        with pytest.raises(NeedsModel, match=f"policy '{policy['name']}' decided .* name a shape"):
            static(cut, subtree)
    assert static(cut, Subtree.parse("1x1")) == parse("1x1")
