"""Trees that grow best first: equal to a plain twin, within their budget, independent of batch mates, exact."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws, Key, Purpose
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks.certify.exact import examine
from spec_lab.tasks.certify.instances import FEW, Instance, constrained
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Token, Traversal
from tests.constrain import toys
from tests.drafters.test_draft_model import WORDS, saved, tokenizer_of
from tests.propose.lab import (
    COLD,
    WARM,
    bare_batch,
    batch_of,
    decode,
    draft_model,
    emitted,
    path_tokens,
    plain_probabilities,
    requests,
)
from tests.tiny import CONTEXT, VOCABULARY, tiny_model, tiny_target

V = 7
WAYS = ("iid", "without_replacement", "deterministic")
EACH_WAY = pytest.mark.parametrize("drawn", WAYS)


# The twin ----------------------------------------------------------------------------------------------------------


def sampled(weights, uniform):
    """Inverse transform sampling, in plain Python."""
    total = sum(weights)
    return next(token for token, mass in enumerate(accumulate(weights)) if mass > uniform * total)


def children_of(p, drawn, count, uniforms):
    """The tokens drawn from p (a list), in order."""
    if drawn == "deterministic":
        return [token for token in sorted(range(len(p)), key=lambda token: -p[token])[:count] if p[token]]
    tokens, left, support = [], list(p), sum(mass > 0 for mass in p)
    for uniform in uniforms[: min(count, support)] if drawn == "without_replacement" or support == 1 else uniforms:
        tokens.append(sampled(left, uniform))
        if drawn == "without_replacement":
            left[tokens[-1]] = 0.0
    return tokens


def twin(probabilities, drawn, budget, depth, key, seed=0):
    """One tree: of each node the number of its parent (0 is the root) and its token, in the order drawn.

    Args:
        probabilities: of the token after a path (a tuple of tokens), as a list; all 0 where nothing may follow.
    """
    paths, parents, scores, unexpanded = [()], [None], [1.0], {0} if depth else set()
    while unexpanded:
        fits = min(budget.width, (budget.nodes - len(paths) + 1) // budget.children)
        deep = [node for node in unexpanded if len(paths[node]) < min(depth, budget.depth)]
        deep = [node for node in deep if any(probabilities(paths[node]))]
        chosen = sorted(deep, key=lambda node: (-scores[node], node))[:fits]
        if not chosen:
            break
        for node in sorted(chosen):
            unexpanded.remove(node)
            places = [node * budget.children + rank for rank in range(budget.children)]
            uniforms = [CounterDraws(seed).uniform(Key(*key, Purpose.DRAFT, index)) for index in places]
            p = probabilities(paths[node])
            for token in children_of(p, drawn, budget.children, uniforms):
                unexpanded.add(len(paths))
                paths.append((*paths[node], token))
                parents.append(node)
                scores.append(scores[node] * p[token])
    return [(above, path[-1]) for above, path in zip(parents[1:], paths[1:], strict=True)]


def tree_of(draft, tree):
    """The same for one tree of a draft."""
    shape = draft.shape
    rows = shape.trees[tree].tolist()
    number = {row: index for index, row in enumerate(rows)}
    return [(number[int(shape.parent[row - shape.roots])], int(draft.token[row - shape.roots])) for row in rows[1:]]


def allowed_after(path):
    """A constraint, ``[V]`` bool: which tokens may follow a path. After a 0 nothing may."""
    return np.array([token != (sum(path) + 1) % V and path[-1:] != (0,) for token in range(V)])


@dataclass
class Masks:
    """The draft masks of a constraint that is the same for every tree; ``asked`` are the rows of each call."""

    allowed: Callable
    forces: bool = False
    asked: list = field(default_factory=list)

    def __call__(self, shape, rows, token):
        self.asked += rows.tolist()
        paths = [tuple(int(token[node - shape.roots]) for node in shape.path(row)) for row in rows.tolist()]
        return np.stack([self.allowed(path) for path in paths])


@dataclass
class Table:
    """Random logits after every path of every tree; ``forwards`` counts the rows of each call."""

    seed: int = 0
    spread: float = 2.0
    masks: Masks | None = None

    def __post_init__(self):
        self.forwards = []

    def logits(self, number, path):
        return self.spread * np.random.default_rng([self.seed, number, *path]).normal(size=V)

    def probabilities(self, number):
        def after(path):
            p = torch.from_numpy(self.logits(number, path)).softmax(-1).numpy()
            p = p if self.masks is None else p * self.masks.allowed(path)
            return (p / max(p.sum(), 1e-300)).tolist()

        return after

    def grow(self, drawn, budget, depths=(9,), numbers=None, seed=0):
        """A forest with a tree for each of ``numbers``, which name the trees' tables and requests."""
        numbers = range(len(depths)) if numbers is None else numbers
        keys = [(number, 0, 3) for number in numbers]

        drawn_at = {}

        def expand(shape, rows, token):
            self.forwards.append(len(rows))
            drawn_at.update(zip(rows.tolist(), token.tolist(), strict=True))
            paths = [[drawn_at[node] for node in shape.path(row)] for row in rows.tolist()]
            trees = shape.root[rows].tolist()
            logits = [self.logits(numbers[tree], path) for tree, path in zip(trees, paths, strict=True)]
            return RowLogits(torch.from_numpy(np.array(logits)))

        roots = [self.logits(number, ()) for number, depth in zip(numbers, depths, strict=True) if depth]
        batch = bare_batch(keys, V, CounterDraws(seed), self.masks, recorded=True)
        growing = BestFirst(budget, drawn, batch, depths, [WARM] * len(keys))
        return growing.grow(RowLogits(torch.from_numpy(np.array(roots).reshape(-1, V))), expand)


BUDGETS = [Budget(1, 1, width=1), Budget(6, 1, width=1), Budget(7, 2, width=1), Budget(20, 3, 3, 1)]


@EACH_WAY
@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_width_of_1_is_strictly_best_first(drawn, budget, seed):
    table = Table(seed)
    draft = table.grow(drawn, budget, seed=seed)
    assert tree_of(draft, 0) == twin(table.probabilities(0), drawn, budget, 9, (0, 0, 3), seed)
    assert set(table.forwards) <= {1}


@EACH_WAY
@pytest.mark.parametrize("budget", [Budget(8, 2, width=2), Budget(30, 2, 5, 4), Budget(11, 3, 8, 64)], ids=str)
def test_a_forward_expands_the_best_of_each_tree_together(drawn, budget):
    table = Table(1)
    draft = table.grow(drawn, budget, depths=(9, 0, 2, 1))
    for tree, depth in enumerate((9, 0, 2, 1)):
        assert tree_of(draft, tree) == twin(table.probabilities(tree), drawn, budget, depth, (tree, 0, 3))


def reranked(table, budget, number, depth):
    """EAGLE-2's tree (2406.16858, section 4), written out: the paths that are kept, and the forwards it takes.

    A level costs a forward if a node below it might be kept: fewer than ``nodes`` - 1 nodes are better than its best.
    """
    after, scores, level, forwards = table.probabilities(number), {}, [()], 0
    for _ in range(min(depth, budget.depth)):
        better = [sum(other > scores[path] for other in scores.values()) for path in level if path]
        forwards += any(count < budget.nodes - 1 for count in better)
        below = {}
        for path in level:
            p = after(path)
            best = sorted(range(V), key=lambda token: (-p[token], token))[: budget.children]
            below |= {(*path, token): scores.get(path, 0.0) + np.log(p[token]) for token in best}
        scores |= below
        level = sorted(below, key=lambda path: -below[path])[: budget.width]
    return set(sorted(scores, key=lambda path: -scores[path])[: budget.nodes]), forwards


RERANKED = [Budget(7, 2, 3, 2, True), Budget(12, 4, 4, 3, True), Budget(3, 5, 6, 1, True), Budget(1, 2, 4, 2, True)]


@pytest.mark.parametrize("budget", RERANKED)
@pytest.mark.parametrize("seed", range(6))
def test_a_reranked_tree_expands_the_best_of_the_newest_level_and_keeps_the_best_of_all(budget, seed):
    table, depths = Table(seed), (9, 0, 2, 1)
    draft = table.grow("deterministic", budget, depths=depths)
    most = 0
    for tree, depth in enumerate(depths):
        kept, forwards = reranked(table, budget, tree, depth) if depth else (set(), 0)
        paths = [tuple(path_tokens(draft, row)) for row in draft.shape.trees[tree].tolist()[1:]]
        assert len(paths) == len(kept) and set(paths) == kept
        most = max(most, forwards)
    assert len(table.forwards) == most and max(table.forwards, default=0) <= 2 * budget.width


def test_sampled_nodes_are_never_reranked():
    for drawn in ("iid", "without_replacement"):
        with pytest.raises(ValueError, match=r"rerank .*drawn=deterministic"):
            TreePlan((), drawn, budget=Budget(4, 2, 2, 2, True))


@EACH_WAY
@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [1, 3, 8, 50])
@pytest.mark.parametrize("children", [1, 2, 5])
def test_budget_children_and_depth_are_never_exceeded(drawn, width, children):
    for nodes in (children, children + 1, 17):
        budget = Budget(nodes, children, 4, width)
        table = Table(nodes)
        shape = table.grow(drawn, budget, depths=(9, 2, 0)).shape
        sizes = [len(rows) - 1 for rows in shape.trees]
        assert max(sizes) <= nodes and sizes[0] >= children and sizes[2] == 0
        assert shape.count.max() <= children
        assert [int(shape.depth[rows].max()) <= most for rows, most in zip(shape.trees, (4, 2, 0), strict=True)]
        assert all(rows <= 2 * width for rows in table.forwards)
        full = nodes - children < sizes[0]
        assert full or children == 1, "a tree of two children a node grows until no more fit"


@EACH_WAY
def test_a_tree_is_the_same_alone_and_in_a_batch(drawn):
    budget, table = Budget(12, 2, 5, 3), Table(2)
    together = table.grow(drawn, budget, depths=(9, 1, 9, 3), numbers=(0, 5, 7, 4))
    for index, (number, depth) in enumerate(((0, 9), (5, 1), (7, 9), (4, 3))):
        alone = table.grow(drawn, budget, depths=(depth,), numbers=(number,))
        assert tree_of(together, index) == tree_of(alone, 0)
        if drawn != "deterministic":
            mine, theirs = ([d.q_row[row] for row in d.shape.trees[t]] for d, t in ((together, index), (alone, 0)))
            for here, there in zip(mine, theirs, strict=True):
                assert (here < 0) == (there < 0) and (here < 0 or torch.equal(together.q[here], alone.q[there]))


# Constraints -------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@EACH_WAY
@pytest.mark.parametrize("width", [1, 3])
def test_draft_masks_follow_each_path_and_dead_ends_are_not_expanded(drawn, width):
    budget = Budget(24, 3, 6, width)
    ended = 0
    for seed in range(6):
        table = Table(seed, spread=3.0, masks=Masks(allowed_after))
        draft = table.grow(drawn, budget, depths=(9, 0, 3), seed=seed)
        for tree, depth in enumerate((9, 0, 3)):
            assert tree_of(draft, tree) == twin(table.probabilities(tree), drawn, budget, depth, (tree, 0, 3), seed)
        shape = draft.shape
        for row in range(shape.rows):
            path = tuple(path_tokens(draft, row))
            assert all(allowed_after(path[:n])[token] for n, token in enumerate(path))
            if path[-1:] == (0,):
                ended += 1
                assert not len(shape.children[row])
            expected = torch.tensor(table.probabilities(int(shape.root[row]))(path), dtype=torch.float64)
            if drawn == "deterministic":
                for node in (int(child) - shape.roots for child in shape.children[row]):
                    torch.testing.assert_close(draft.greedy_q[node], expected[draft.token[node]])
            elif len(shape.children[row]):
                torch.testing.assert_close(draft.q[draft.q_row[row]], expected)
        assert len(table.masks.asked) == len(set(table.masks.asked)), "each row is asked about once"
    assert ended


PENALISED = Sampling(0.8, top_k=9, repetition_penalty=1.6)


@EACH_WAY
@pytest.mark.parametrize("static", [False, True])
def test_under_a_constraint_no_node_that_it_forbids_is_drafted(target, drawn, static):
    constraint = toys.Table(lambda text: [(2 * len(text)) % VOCABULARY, len(text) % VOCABULARY], VOCABULARY)
    applied = AppliedConstraint(constraint, "both")
    proposer = draft_model("3x2", drawn) if static else best_first(Budget(8, 3, 4, 2), drawn)
    group = fixed_group(Arm(target, proposer, Token(), CounterDraws(0), applied), requests(PENALISED))
    rows = [row for info in group for row in info.rows()]
    assert sum(row["nodes"] for row in rows) > 100 and all(row["legal"] == row["nodes"] for row in rows)


# The draft model ---------------------------------------------------------------------------------------------------


def best_first(budget, drawn="deterministic", temperature=None, context=CONTEXT, **changes):
    lm = CausalLM(tiny_model(**{"seed": 1, "num_hidden_layers": 1} | changes))
    return DraftModel(lm, context, TreePlan((), drawn, temperature, budget=budget))


@EACH_WAY
@pytest.mark.parametrize("sampling", [WARM, PENALISED], ids=["warm", "penalised"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.each_value
def test_a_draft_model_grows_the_tree_of_plain_forwards(target, drawn, sampling, width):
    proposer, budget = best_first(Budget(9, 2, 4, width), drawn), Budget(9, 2, 4, width)
    batch = batch_of(target, requests(sampling), proposer)
    draft = proposer.propose(batch)
    scored = sampling if drawn != "deterministic" else Sampling(1.0, repetition_penalty=sampling.repetition_penalty)
    for tree, sequence in enumerate(batch.sequences):

        def after(path, text=sequence.tokens):
            return plain_probabilities(proposer.lm.model, [*text, *path], scored).tolist()

        assert tree_of(draft, tree) == twin(after, drawn, budget, 9, sequence.key)
        if drawn != "deterministic":
            for row in draft.shape.trees[tree].tolist():
                if len(draft.shape.children[row]):
                    expected = torch.tensor(after(path_tokens(draft, row)), dtype=torch.float64)
                    torch.testing.assert_close(draft.q[draft.q_row[row]], expected, rtol=0, atol=1e-9)


@pytest.mark.each_value
@EACH_WAY
@pytest.mark.parametrize("sampling", [COLD, WARM, PENALISED], ids=["cold", "warm", "penalised"])
def test_a_batch_decodes_as_its_requests_alone(target, drawn, sampling):
    proposer = best_first(Budget(8, 2, 4, 3), drawn, temperature=1.0)
    wanted = requests(sampling, new=12)
    group, steps = decode(target, proposer, wanted)
    alone = [decode(target, proposer, [request]) for request in wanted]
    assert emitted(group) == [emitted(single)[0] for single, _ in alone]
    assert [tree_of(steps[0].draft, tree) for tree in range(3)] == [
        tree_of(steps_alone[0].draft, 0) for _, steps_alone in alone
    ]
    assert not proposer.lm.cells.references.any() and not target.lm.cells.references.any()


def test_a_likelier_path_is_drafted_deeper_than_a_fixed_tree_of_as_many_nodes(target):
    """The target as its own draft: the greedy path is accepted as far as it was drafted."""
    proposer = best_first(Budget(8, 2, 8, 1), seed=0, num_hidden_layers=2)
    _, steps = decode(target, proposer, requests(new=26))
    depths = {int(step.draft.shape.depth.max()) for step in steps[:3]}
    assert max(depths) > 2, "two children a node of 8 nodes, level by level, reach depth 2"


@pytest.mark.parametrize("drawn", ["without_replacement", "deterministic"])
def test_no_tree_is_deeper_than_the_draft_s_and_the_target_s_context_allow(target, truth, drawn):
    proposer = best_first(Budget(12, 2, 6, 1), drawn, temperature=0.5, context=16)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    short = tiny_target(context=14)
    ended, more = decode(short, best_first(Budget(12, 2, 6, 1), drawn, temperature=0.5), requests())
    assert {sequence.finish for sequence in ended.sequences} == {"context"}
    seen = set()
    for infos, most in ((steps, 16 + 1), (more, 14)):
        for info in infos:
            for tree, context in enumerate(info.context):
                rows = info.draft.shape.trees[tree]
                depth = int(info.draft.shape.depth[rows].max())
                assert depth <= max(0, min(6, most - context))
                seen.add((most, depth == 0))
    assert {(17, True), (17, False), (14, False)} <= seen


def test_logits_that_are_nan_are_reported_for_their_request_only(target, monkeypatch):
    proposer = best_first(Budget(6, 2, 4, 2))
    plain = proposer.lm.extend

    def breaking(sequences, shape, rows, *more):
        logits = plain(sequences, shape, rows, *more)
        logits.logits[torch.from_numpy(shape.root[rows] == 1)] = float("nan")
        return logits

    monkeypatch.setattr(proposer.lm, "extend", breaking)
    draft = proposer.propose(batch_of(target, requests(), proposer))
    assert set(draft.broken) == {1}


# Exactness ---------------------------------------------------------------------------------------------------------


@dataclass
class Larger:
    """Best-first drafting whose toy keeps its own budget, which ``DraftModel.toy`` would reduce."""

    drawn: str
    budget: Budget
    name = "larger"
    nodes = 4

    def toy(self, target, draft, tree):
        return DraftModel(draft, target.context, TreePlan((), self.drawn, budget=self.budget), self.name)


INSTANCES = [Instance(FEW, "1x1", 2), Instance(RandomToy(6), "1")]
ENUMERATED = [Budget(4, 2, 3, width=1), Budget(3, 1, 3, width=1)]


@pytest.mark.each_value
@EACH_WAY
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("budget", ENUMERATED, ids=str)
def test_the_output_distribution_is_the_target_s(drawn, verifier, budget):
    for instance in INSTANCES:
        finding = examine(instance, Larger(drawn, budget), verifier)
        assert finding.wrong is None and finding.tv < 1e-12 and abs(finding.mass - 1) < 1e-12
        assert finding.drafted > 0 and finding.accepted > 0


BOUND = [replace(instance, tree="1x1", tokens=2) for instance in constrained() if instance.applied.on_draft]
GRAMMARS = [instance for instance in BOUND if not instance.applied.constraint.has_actions]
CASES = [(grammar, drawn, Budget(4, 2, 3, width=1)) for grammar in GRAMMARS for drawn in WAYS]
CASES += [
    (instance, "deterministic", Budget(2, 1, 3, width=1)) for instance in BOUND if instance not in GRAMMARS
]  # samples are too many


@pytest.mark.each_value
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name.partition('tokens, ')[2]}, {case[1]}")
def test_under_a_constraint_the_output_distribution_is_the_masked_target_s(case, verifier):
    instance, drawn, budget = case
    finding = examine(instance, Larger(drawn, budget), verifier)
    assert finding.wrong is None and finding.tv < 1e-12 and abs(finding.mass - 1) < 1e-12
    assert finding.drafted > 0 and finding.accepted > 0


# Options -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_with_words(target):
    return replace(target, tokenizer=tokenizer_of(WORDS))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"depth": 2}, "nodes"),
        ({"rerank": True, "drawn": "iid"}, "rerank"),
        ({"rerank": True, "drawn": "deterministic", "children": 1000, "max_depth": 200}, "rerank"),
        ({"tree": "2x2"}, "nodes"),
        ({"nodes": 3, "children": 4}, "children must be at most nodes, 3"),
        ({"nodes": 99, "children": 99}, f"children.* vocabulary of {VOCABULARY}"),
        ({"drawn": "gumbel"}, "drawn=gumbel"),
        ({"confidence": 0.5, "rerank": True, "drawn": "deterministic"}, "confidence"),
    ],
    ids=str,
)
def test_wrong_options_are_named(target_with_words, path, options, named):
    with pytest.raises(ValueError, match=named):
        DraftModel.load(target_with_words, path, **{"nodes": 8} | options)


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_drawn_siblings_are_refused_at_temperature_0(drawn):
    """There a tree would be a chain."""
    with pytest.raises(ValueError, match=r"drawn=deterministic"):
        best_first(Budget(6), drawn).check_sampling(COLD)
    best_first(Budget(6), drawn).check_sampling(WARM)
    best_first(Budget(6), drawn, temperature=1.0).check_sampling(COLD)
    best_first(Budget(6), "deterministic").check_sampling(COLD)
    best_first(Budget(6, 1), drawn).check_sampling(COLD)
