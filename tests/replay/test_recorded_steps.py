"""Expected tokens at the recorded steps: equal to the engine's, to the verifiers' on subtrees, and within bounds."""

from io import StringIO
from itertools import product

import numpy as np
import pytest
import torch
from rich.console import Console

from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.propose.trees import parse
from spec_lab.replay import pseudo_tokens, recorded_steps
from spec_lab.replay.designs import (
    Design,
    Options,
    Shares,
    designs,
    estimate,
    evaluate,
    limits,
    mixed,
    ordered,
    table,
    verifier_of,
)
from spec_lab.replay.recorded_trees import NeedsModel
from spec_lab.replay.replay_tables import print_table
from spec_lab.replay.subtrees import Subtree
from spec_lab.verify import (
    Cascade,
    KSeq,
    Lenient,
    Match,
    Relaxed,
    Replayed,
    Token,
    Traversal,
    Typical,
    Verifier,
)
from tests.propose.lab import WARM
from tests.replay.recorded import by_hand, decoded, without_nodes

ALL = (Token(), Traversal(), Match(), KSeq(), Cascade(), Lenient(0.6), Typical(), Relaxed(3, 0.2))


def fits(drawn):
    return [verifier for verifier in ALL if drawn in verifier.accepts]


def drawn_tree(generator, drawn, shape="2x2", vocabulary=7, peak=1.5):
    """A random draft of one tree, drawn from a random q, and a random p; float64."""
    forest_shape = forest((tree(parse(shape)),))
    p = torch.from_numpy(generator.normal(size=(forest_shape.rows, vocabulary)) * peak).softmax(-1)
    q = torch.from_numpy(generator.normal(size=(forest_shape.rows, vocabulary)) * peak).softmax(-1)
    token = np.zeros(forest_shape.nodes, dtype=np.int64)
    for parent in forest_shape.expanded:
        children = forest_shape.children[parent] - forest_shape.roots
        mass = q[parent].numpy()
        token[children] = generator.choice(vocabulary, len(children), replace=drawn == "iid", p=mass / mass.sum())
        if drawn == "deterministic":
            token[children] = np.argsort(-mass)[: len(children)]
    q_and_rows = (
        (None, None) if drawn == "deterministic" else (q[forest_shape.expanded], np.full(forest_shape.rows, -1))
    )
    if q_and_rows[1] is not None:
        q_and_rows[1][forest_shape.expanded] = np.arange(len(forest_shape.expanded))
    return Draft(forest_shape, torch.from_numpy(token), drawn, *q_and_rows), p


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
@pytest.mark.parametrize("sampling", [WARM, Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=9)], ids=str)
def test_with_full_rows_the_recorded_run_s_expectation_is_replayed(target, drawn, sampling):
    trees, rows = decoded(target, drawn, "2x1", sampling)
    (sums,) = recorded_steps.evaluate(trees, Token(), [Subtree()])
    by_request = rows[~rows["prefill"]].groupby("request")["expected_accepted"].agg(["sum", "count"])
    assert len(sums.tokens) == 1, "all is recorded: one evaluation"
    np.testing.assert_allclose(sums.tokens[0], by_request["sum"] + by_request["count"], rtol=2e-6)
    np.testing.assert_allclose(sums.steps[0], by_request["count"])
    estimated = estimate(Design("token", Shares(((1.0, Subtree()),))), "steps", sums)
    mean = 1 + rows[~rows["prefill"]]["expected_accepted"].mean()
    assert estimated.bound_low == estimated.bound_high == estimated.tau == pytest.approx(mean)
    assert np.isnan([estimated.low, estimated.high]).all(), "fewer than eight requests have no interval"


@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
def test_every_subtree_has_the_expectation_of_its_own_verdict(drawn):
    """One verdict of top-down verifiers holds for all subtrees; the others verify each."""
    generator = np.random.default_rng(1)
    shapes = [Subtree(), Subtree(depth=1), Subtree(children=1), Subtree(nodes=3), Subtree.parse("0 1 0.0")]
    for verifier in fits(drawn):
        for _ in range(4):
            draft, p = drawn_tree(generator, drawn)
            trees = by_hand(draft, p.numpy())
            for subtree, sums in zip(shapes, recorded_steps.evaluate(trees, verifier, shapes), strict=True):
                keep = np.append([True], subtree.keeps(draft.shape))
                smaller, rows = draft.keep(keep)
                expected = verifier(smaller, p[rows]).expected_accepted(smaller.shape)[0]
                assert sums.tokens[0].item() == pytest.approx(1 + expected, rel=1e-12), (verifier.name, str(subtree))


@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
@pytest.mark.parametrize(("shape", "subtree"), [("1x1x1", "all"), ("3", "all"), ("3x2", "all"), ("3x2", "nodes=4")])
@pytest.mark.parametrize("peak", [0.5, 3.0])
@pytest.mark.each_value
def test_the_value_of_full_rows_lies_within_its_bounds(drawn, shape, subtree, peak):
    generator, seen = np.random.default_rng(2), set()
    for _ in range(12):
        draft, p = drawn_tree(generator, drawn, shape, 9, peak)
        full, part = by_hand(draft, p.numpy()), by_hand(draft, p.numpy(), top=4)
        for verifier in fits(drawn):
            wanted = [Subtree.parse(subtree)]
            both = (next(iter(recorded_steps.evaluate(trees, verifier, wanted))) for trees in (full, part))
            exact, bounds = both
            if isinstance(bounds, NeedsModel):
                assert isinstance(verifier, Cascade | Relaxed) and "record_top" in str(bounds)
                continue
            seen.add((verifier.name, bounds.kind))
            if bounds.kind != "spread":
                low, high = bounds.tokens.min(), bounds.tokens.max()
                assert low - 1e-9 <= exact.tokens.item() <= high + 1e-9, verifier.name
    without_bounds = {"token", "match", "lenient", "typical"} & {verifier.name for verifier in fits(drawn)}
    assert {name for name, kind in seen if kind != "spread"} >= without_bounds
    assert (("traversal", "spread") in seen) == (shape != "1x1x1" and drawn != "deterministic")


@pytest.mark.parametrize("temperature", [0.5, 0.9, 1.6])
def test_another_temperature_of_the_target_follows_from_the_recorded_probabilities(temperature):
    generator = np.random.default_rng(3)
    for _ in range(20):
        draft, p = drawn_tree(generator, "iid", "1x1", 9)
        warm = logits_to_probs(p.log(), [Sampling(temperature)])
        expected = 1 + Token()(draft, warm).expected_accepted(draft.shape)[0]
        (sums,) = recorded_steps.evaluate(by_hand(draft, p.numpy()), Token(), [Subtree()], Sampling(temperature))
        assert sums.tokens.item() == pytest.approx(expected)
        (sums,) = recorded_steps.evaluate(by_hand(draft, p.numpy(), top=4), Token(), [Subtree()], Sampling(temperature))
        assert sums.tokens.min() - 1e-9 <= expected <= sums.tokens.max() + 1e-9


def test_the_rest_s_mass_at_another_temperature_lies_within_its_bounds():
    generator = np.random.default_rng(4)
    x = generator.dirichlet(np.full(30, 0.3), 50)
    trees = by_hand(Draft(without_nodes(50), torch.empty(0, dtype=torch.long)), x, top=6)
    for power in (0.4, 0.8, 1.2, 3.0):
        bounds = pseudo_tokens.target(trees, Sampling(1 / power))
        exact = (x**power).sum(1) - bounds.top.sum(1)
        assert (bounds.lower <= exact + 1e-9).all() and (exact <= bounds.upper + 1e-9).all()


def test_truncation_follows_where_the_recorded_tokens_settle_it():
    generator = np.random.default_rng(5)
    x = generator.dirichlet(np.full(30, 0.1), 20)
    trees = by_hand(Draft(without_nodes(20), torch.empty(0, dtype=torch.long)), x, top=25)
    for sampling in (Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.7), Sampling(1.0, min_p=0.2), Sampling(0.0)):
        expected = logits_to_probs(torch.from_numpy(x).log(), [sampling]).numpy()
        completed = pseudo_tokens.target(trees, sampling).complete("lower", 0)[:, :-2]
        np.testing.assert_allclose(completed, np.take_along_axis(expected, trees.ids.astype(np.int64), 1), atol=1e-9)
    few = by_hand(Draft(without_nodes(20), torch.empty(0, dtype=torch.long)), x, top=2)
    for sampling in (Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.99), Sampling(1.0, min_p=0.01)):
        with pytest.raises(NeedsModel, match="record_top"):
            pseudo_tokens.target(few, sampling)


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_weights_turn_recorded_drafts_into_those_of_another_temperature(drawn):
    """By enumeration: sum over drafts of q(draft) w(draft) E(draft) is the expectation under q'."""
    generator, temperature, vocabulary = np.random.default_rng(6), 0.6, 3
    p, q = (torch.from_numpy(generator.normal(size=(3, vocabulary))).softmax(-1) for _ in range(2))
    shape = tree(parse("2"))
    other = (q.log() / temperature).softmax(-1)

    def chance(of, first, second):
        left = 1.0 if drawn == "iid" else 1 - float(of[0, first])
        return float(of[0, first] * of[0, second]) / left

    pairs = [(a, b) for a, b in product(range(vocabulary), repeat=2) if drawn == "iid" or a != b]
    total = expected = mass = 0.0
    for pair in pairs:
        q_row = np.array([0, -1, -1])
        draft = Draft(shape, torch.tensor(pair), drawn, q[:1], q_row)
        trees = by_hand(draft, p.numpy(), proposer={"temperature": 1.0, "tree": "0 1", "confidence": 0.0})
        changed = pseudo_tokens.drafted(trees, temperature).complete("lower", 0)
        weight = float(np.exp(recorded_steps.tempered_weights(trees, changed).sum()))
        (sums,) = recorded_steps.evaluate(trees, Token(), [Subtree()], None, temperature)
        assert sums.ess == pytest.approx(1) and sums.kind == "estimate"
        value = sums.tokens.item() / sums.steps.item()
        drafted = Draft(shape, torch.tensor(pair), drawn, other[:1], q_row)
        assert value == pytest.approx(1 + Token()(drafted, p).expected_accepted(shape)[0])
        total += chance(q, *pair) * weight * value
        mass += chance(q, *pair) * weight
        expected += chance(other, *pair) * value
    assert mass == pytest.approx(1) and total == pytest.approx(expected)


def test_what_recorded_rows_cannot_identify_is_refused_by_name(target):
    sampled, _ = decoded(target, "iid", "2x1")
    points, _ = decoded(target, "deterministic", "2x1")
    for trees, verifier, subtree, more, why in (
        (points, KSeq(), Subtree(), {}, "supports drafts drawn iid"),
        (sampled, Token(), Subtree.parse("3x1"), {}, "no recorded tree has the node 2"),
        (points, Token(), Subtree(), {"draft_temperature": 0.5}, "sampled drafts only"),
        (sampled, Token(), Subtree(), {"draft_temperature": 0.0}, "at temperature 1 do not show"),
    ):
        (sums,) = recorded_steps.evaluate(trees, verifier, [subtree], **more)
        assert isinstance(sums, NeedsModel) and why in str(sums) and str(sums).startswith("needs the model: ")
    with pytest.raises(NeedsModel, match="noise"):
        recorded_steps.check(sampled, __import__("spec_lab.verify", fromlist=["Gumbel"]).Gumbel())


def test_a_mixture_of_trees_has_the_mixed_expectation(target):
    trees, _ = decoded(target)
    first, second = recorded_steps.evaluate(trees, Token(), [Subtree(depth=1), Subtree()])
    both = mixed([(0.25, first), (0.75, second)])
    taus = [sums.tokens.sum() / sums.steps.sum() for sums in (first, second, both)]
    assert taus[2] == pytest.approx(0.25 * taus[0] + 0.75 * taus[1])
    text = "0.25*depth=1+0.75*all"
    (estimated,) = [
        estimated for estimated in evaluate(trees, [Design("token", Shares.parse(text))]) if estimated.method == "steps"
    ]
    assert estimated.tau == pytest.approx(taus[2]) and str(estimated.design.shapes) == text


def test_designs_are_all_combinations_and_the_table_is_sorted(target):
    trees, _ = decoded(target, "without_replacement", "2x2", new=6)
    wanted = designs(trees, Options())
    assert {design.verifier for design in wanted} == {
        "token",
        "traversal",
        "match",
        "cascade",
        "lenient",
        "typical",
        "relaxed",
    }
    assert len(wanted) == 7 * len(limits(trees)) and len(limits(trees)) == 4 + 5
    frame = ordered(table([*evaluate(trees, wanted[:12])]))
    known = frame[frame["needs"] == ""]
    assert all(rows["tau"].is_monotonic_decreasing for _, rows in known.groupby("lossless")) and known["tau"].min() >= 1
    with pytest.raises(ValueError, match="replay has no verifier 'tokens'"):
        designs(trees, Options(verifiers=["tokens"]))
    assert verifier_of("typical:epsilon=0.2,delta=0.4") == Typical(0.2, 0.4)
    with pytest.raises(ValueError, match="'token:epsilon=0.2': .*'epsilon'; the options of token are none"):
        verifier_of("token:epsilon=0.2")
    with pytest.raises(ValueError, match="'typical:eps=0.2': .*'eps'; the options of typical are epsilon, delta"):
        verifier_of("typical:eps=0.2")


class Mine(Verifier):
    """A verifier of a user's own: token verification under another name."""

    name = "mine"
    accepts = Token.accepts
    lossless = True

    def __init__(self, top_down: bool | int | None = None) -> None:
        if not isinstance(top_down, bool | None):
            raise TypeError("a number is no direction")
        if top_down is not None:
            self.replayed = Replayed(whole_rows=False, top_down=top_down)

    def __call__(self, draft, p):
        return Token()(draft, p)


def test_a_verifier_of_one_s_own_is_replayed_as_far_as_it_declares():
    draft, p = drawn_tree(np.random.default_rng(0), "iid", "3x1")
    path, subtrees = f"{__name__}.Mine", [Subtree(), Subtree(children=1)]
    whole, some = by_hand(draft, p.numpy()), by_hand(draft, p.numpy(), top=4)
    assert isinstance(verifier_of(path), Mine)
    for verifier in (Mine(), Mine(top_down=False), Mine(top_down=True)):
        for result, known in zip(
            *(recorded_steps.evaluate(whole, each, subtrees) for each in (verifier, Token())), strict=True
        ):
            assert result.kind == "exact" and result.tokens == pytest.approx(known.tokens)
    refused, _ = recorded_steps.evaluate(some, Mine(), subtrees)
    assert isinstance(refused, NeedsModel) and "verifier 'mine' reads whole rows (Verifier.replayed)" in str(refused)
    sums, _ = recorded_steps.evaluate(some, Mine(top_down=True), subtrees)
    assert sums.kind == "spread", "it declares no bound"


@pytest.mark.parametrize(
    ("path", "why"),
    [("no_such_package.Mine", "cannot be imported"), (f"{__name__}.Yours", "cannot be imported"),
     (f"{__name__}.ALL", "is no class of a verifier but .*: name a class derived from"),
     ("collections.OrderedDict", "is no class of a verifier")],
)  # fmt: skip
def test_a_path_that_names_no_verifier_is_refused(path, why):
    with pytest.raises(ValueError, match=why):
        verifier_of(path)


def test_a_type_error_of_a_verifier_of_one_s_own_is_not_taken_for_an_unknown_option():
    with pytest.raises(TypeError, match="a number is no direction"):
        verifier_of(f"{__name__}.Mine:top_down=1")


def test_a_subtree_is_closed_under_parents_and_earlier_siblings():
    shape = forest((tree(parse("2x2")), chain(3)))
    for subtree in (Subtree(nodes=3), Subtree(children=1), Subtree(depth=2, nodes=2), Subtree.parse("0 0.0 0.1")):
        keep = np.append([True, True], subtree.keeps(shape))
        for node in range(2, shape.rows):
            if keep[node]:
                above = shape.parent[node - 2]
                assert keep[above]
                assert keep[[child for child in shape.children[above] if child < node]].all()
    assert isinstance(shape, Shape) and Subtree.parse("2x1").keeps(shape).tolist() == [True] * 2 + [
        True, False, True, False, True, True, False,
    ]  # fmt: skip


def test_drafts_stopped_by_q_are_not_weighted_as_those_of_another_temperature():
    draft, p = drawn_tree(np.random.default_rng(7), "iid", "1x1")
    facts = {"temperature": 1.0, "tree": "1x1", "confidence": 0.0}
    for changed, stops in (
        ({}, False),
        ({"confidence": 0.4}, True),
        ({"tree": "reranked"}, True),
        ({"policy": {"name": "threshold", "rule": "svip"}}, True),
        ({"policy": {"name": "gain", "rule": "gain"}}, True),
        ({"policy": {"name": "goodput", "rule": "adaedl"}}, True),
        ({"policy": {"name": "of another package"}}, True),
        ({"policy": {"name": "fixed", "depth": 2}}, False),
        ({"policy": {"name": "bandit", "bandit": "ucb"}}, False),
    ):
        trees = by_hand(draft, p.numpy(), proposer=facts | changed)
        (sums,) = recorded_steps.evaluate(trees, Token(), [Subtree()], None, 0.6)
        assert trees.stops_by_q == stops == isinstance(sums, NeedsModel), changed
        if stops:
            assert "the shape of the recorded trees follows from q" in str(sums)


@pytest.mark.parametrize(("top", "shape", "kinds"), [
    (None, "2x1", ("exact", "estimate")), (4, "1x1", ("proved", "estimate")), (4, "2x1", ("spread", "spread")),
])  # fmt: skip
def test_weighted_drafts_are_an_estimate_even_with_whole_rows(top, shape, kinds):
    draft, p = drawn_tree(np.random.default_rng(8), "iid", shape, 9)
    trees = by_hand(draft, p.numpy(), top=top, proposer={"temperature": 1.0, "tree": shape, "confidence": 0.0})
    verifier, every = Traversal() if kinds[0] == "spread" else Token(), Shares.parse("all")
    for temperature, kind in zip((None, 0.6), kinds, strict=True):
        (sums,) = recorded_steps.evaluate(trees, verifier, [Subtree()], None, temperature)
        assert sums.kind == mixed([(0.5, sums), (0.5, sums)]).kind == kind
        frame = table([estimate(Design("token", every, temperature), "steps", sums)])
        frame.insert(0, "arm", "repeat")
        console = Console(file=StringIO(), width=80)
        print_table(frame, console)
        assert frame["bound_kind"].item() == kind and f" {kind} " in console.file.getvalue().splitlines()[3]
