"""Bounds of recorded runs: shares of the optimum, parts of what is lost, and what is refused."""

import json
from dataclasses import replace
from io import StringIO
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.cli.commands import command
from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import tree
from spec_lab.decode.recording import Recording
from spec_lab.propose.trees import parse
from spec_lab.replay import bounds, pseudo_tokens
from spec_lab.replay.bounds import acceptance, best_deterministic, bounds_of, tree_gain
from spec_lab.replay.optimum import by_rank, modelled
from spec_lab.replay.recorded_trees import RunVerifier
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.verifier_study import study_verifiers
from spec_lab.verify import KSeq, Match, Token, Traversal
from spec_lab.verify.transport import spechub_acceptance, transport_bound
from tests.distributions.tabular import Outputs, World, every_draft
from tests.labs import Repeat, lab, settings
from tests.propose.lab import draft_model
from tests.replay.recorded import by_hand, decoded

RECORDING = Recording(top=8)
CONFIG = {"target": {"path": "tiny"}, "record": "replay", "verifier": {"_target_": "spec_lab.verify.Token"}}


def named(tree, drawn="iid"):
    proposer = draft_model(tree, drawn)
    proposer.name = f"draft_{proposer.plan.kind}"
    return proposer


def used(trees, verifier):
    """The trees of a run of this verifier."""
    return replace(trees, verifier=RunVerifier(verifier, True, verifier))


def quiet() -> Console:
    return Console(file=StringIO(), width=80)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished run of a sampled chain, of points and of the baseline."""
    out = tmp_path_factory.mktemp("bounds") / "out"
    laboratory = lab(temperature=1.0, proposer=named("1x1"), more_proposers={"repeat": Repeat()})
    assert run(laboratory, settings(out, record="replay", record_top=61), CONFIG, quiet()) == 0
    return out


def by_name(arm):
    return {verifier.name: verifier for verifier in arm.verifiers}


def total(arm, verifier):
    return sum(value.mean for value in verifier.lost.values()) + verifier.tau.mean - arm.depth - 1


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
@pytest.mark.parametrize("shape", ["1x1", "2x1", "0 1 0.0"])
def test_parts_sum_to_what_is_lost(target, drawn, shape):
    trees, _ = decoded(target, drawn, shape)
    arm = bounds_of(used(trees, "token"))
    assert not arm.needs and arm.kind == ("exact" if drawn == "deterministic" or shape == "1x1" else "bound")
    order = [(not verifier.lossless, -verifier.tau.mean) for verifier in arm.verifiers]
    assert order == sorted(order) and {verifier.lossless for verifier in arm.verifiers} == {True, False}
    for verifier in arm.verifiers:
        assert total(arm, verifier) == pytest.approx(0, abs=1e-12)
        assert verifier.used == (verifier.name == "token") and verifier.unknown == 0
        assert verifier.lost["tree"].mean >= 0 and verifier.lost["draft"].mean >= -1e-12
        if verifier.lossless:
            assert verifier.lost["verifier"].mean >= -1e-12
            assert np.isnan([verifier.tau.low, verifier.tau.high]).all(), "fewer than eight requests have no interval"
    assert by_name(arm)[arm.best].lost["verifier"].mean == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("shape", ["1x1", "1"])
def test_a_chain_s_nodes_are_optimal_by_token_and_whole_chains_by_traversal(target, shape):
    trees, _ = decoded(target, "iid", shape)
    arm = bounds_of(used(trees, "token"))
    arms = by_name(arm)
    assert arms["token"].share_first.mean == pytest.approx(1.0, abs=1e-9), "1 - TV is the optimum of one child"
    assert arms["traversal"].share.mean == pytest.approx(1.0, abs=1e-12)
    assert arms["traversal"].lost["open"].mean == pytest.approx(0, abs=1e-12)
    assert arm.optimum.mean == arms["traversal"].tau.mean
    assert arms["match"].share_first.mean < 1


def test_points_are_accepted_as_often_as_their_tokens_by_every_lossless_verifier(target):
    trees, _ = decoded(target, "deterministic", "2x1")
    arm = bounds_of(used(trees, "match"))
    for verifier in arm.verifiers:
        if verifier.lossless:
            assert [verifier.share.mean, verifier.share_first.mean] == pytest.approx([1.0, 1.0])
    assert arm.deterministic.mean >= arm.optimum.mean - 1e-9


def test_a_draft_equal_to_its_target_loses_nothing():
    generator, v = np.random.default_rng(0), 6
    shape = tree(parse("1x1x1"))
    p = torch.from_numpy(generator.dirichlet(np.ones(v), shape.rows))
    draft = Draft(shape, torch.tensor([1, 2, 3]), "iid", p[:3].clone(), np.array([0, 1, 2, -1]))
    arm = bounds_of(by_hand(draft, p.numpy()))
    assert arm.optimum.mean == pytest.approx(4) and by_name(arm)["token"].tau.mean == pytest.approx(4)
    assert all(abs(value.mean) < 1e-9 for value in by_name(arm)["token"].lost.values())
    assert np.isnan(arm.optimum.low), "one request has no interval"


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_spechub_s_drafts_are_compared_with_the_optimum_of_two_children(drawn):
    generator, shape = np.random.default_rng(1), tree(parse("2x1"))
    p, q = (torch.from_numpy(generator.dirichlet(np.ones(5), shape.rows)) for _ in range(2))
    rows = np.full(shape.rows, -1)
    rows[shape.expanded] = np.arange(len(shape.expanded))
    draft = Draft(shape, torch.tensor([0, 1, 2, 3]), drawn, q[shape.expanded], rows)
    arm = bounds_of(by_hand(draft, p.numpy()))
    first = p[:1], q[:1]
    (share,) = spechub_acceptance(*first) / transport_bound(*first, 2, drawn)
    assert arm.spechub.mean == pytest.approx(share) and arm.spechub_kind == "exact"
    assert bounds.table({"a": arm})["share_spechub"].tolist() == pytest.approx([share] * len(arm.verifiers))


def test_spechub_has_no_share_of_an_optimum_of_zero():
    """The target's only token is never drafted."""
    shape = tree(parse("2"))
    p, q = torch.eye(5, dtype=torch.float64)[[4] * shape.rows], torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]]).double()
    rows = np.full(shape.rows, -1)
    rows[shape.expanded] = 0
    arm = bounds_of(by_hand(Draft(shape, torch.tensor([0, 1]), "iid", q, rows), p.numpy()))
    assert not arm.needs and np.isnan(arm.spechub.mean)


def test_spechub_has_no_share_of_other_numbers_of_children(target):
    for drawn, shape in (("iid", "1x1"), ("deterministic", "2x1")):
        assert np.isnan(bounds_of(used(decoded(target, drawn, shape)[0], "token")).spechub.mean)


@pytest.mark.nightly
def test_a_better_tree_is_the_best_of_all_trees_of_as_many_nodes():
    """Six children below the root, of which further ones are hardly accepted, and one below the first of them."""
    generator, shape = np.random.default_rng(0), tree((*((rank,) for rank in range(6)), (0, 0)))
    p, q = (generator.dirichlet(np.ones(9), shape.rows) for _ in range(2))
    p = (p + q) / 2
    draft = Draft(
        shape, torch.tensor([0, 1, 2, 3, 4, 5, 6]), "iid", torch.from_numpy(q[:2]), np.append([0, 1], [-1] * 6)
    )
    accuracy = by_rank(draft, torch.from_numpy(p), np.ones(8), 7)
    paths = [(rank,) for rank in range(7)] + [(above, two) for above in range(4) for two in range(5)]

    def is_tree(nodes):
        return all((path[:-1] in nodes or len(path) == 1) and (not path[-1] or (*path[:-1], path[-1] - 1) in nodes)
                   for path in nodes)  # fmt: skip

    best = max(
        modelled(tree(nodes), accuracy)[0] for nodes in map(tuple, combinations(paths, 7)) if is_tree(set(nodes))
    )
    modelled_tau = modelled(shape, accuracy)[0]
    assert best > modelled_tau + 0.05
    gain = tree_gain(by_hand(draft, p), draft, torch.from_numpy(p), np.ones(8))
    assert gain[0] == pytest.approx(best - modelled_tau)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("verifier", [Token(), Match()])
def test_closed_forms_are_the_enumerated_acceptance(verifier, count):
    for seed in range(12):
        world = World(seed)
        draft, probability = every_draft(world, tree(parse(str(count))), "iid")
        enumerated = Outputs.of_drafts(world, verifier, draft, probability).accepted
        rates = acceptance(verifier, world.p(())[None], world.q(())[None], np.array([count]))
        assert rates[0] == pytest.approx(enumerated, abs=1e-12)
    assert acceptance(KSeq(), np.ones((1, 1)), np.ones((1, 1)), np.array([1])) is None


def test_no_share_of_the_first_level_exceeds_one():
    generator = np.random.default_rng(1)
    p, q = (generator.dirichlet(np.ones(8), 50) for _ in range(2))
    for count in (1, 2, 5):
        largest = transport_bound(torch.from_numpy(p), torch.from_numpy(q), count, "iid")
        for verifier in (Token(), Traversal(), Match()):
            assert (acceptance(verifier, p, q, np.full(50, count)) <= largest + 1e-12).all()


def test_the_best_points_are_the_likeliest_texts():
    """Against all trees of three nodes; what follows tokens that were not drafted counts as certain."""
    world = World(2, v=3, support=3, plain=True)
    whole = tree(parse("3x3"))
    draft = every_draft(world, whole, "deterministic")[0]
    p = np.zeros((whole.rows, 3))
    paths = [()]
    for above, token in zip(whole.parent.tolist(), draft.token.tolist(), strict=True):
        paths.append((*paths[above], token))
    p[:] = [world.p(path) for path in paths]
    texts = sorted(
        (np.prod([world.p(path[:k])[path[k]] for k in range(len(path))]) for path in paths[1:]), reverse=True
    )
    trees = by_hand(draft, p)
    full = np.concatenate([trees.p, np.zeros((whole.rows, pseudo_tokens.PSEUDO))], 1)
    assert best_deterministic(trees, full)[0] == pytest.approx(sum(texts))
    first = tree(((0,), (0, 0)))
    worst = int(np.argmin(world.p(())))
    missed = Draft(first, torch.tensor([worst, 0]))
    rows = np.array([world.p(()), world.p((worst,)), world.p((worst, 0))])
    trees = by_hand(missed, rows)
    full = np.concatenate([trees.p, np.zeros((3, pseudo_tokens.PSEUDO))], 1)
    assert best_deterministic(trees, full)[0] == pytest.approx(2 * world.p(()).max())


def test_truncated_rows_have_a_bound_that_is_no_smaller(target):
    for drawn, shape in (("iid", "2x1"), ("without_replacement", "2x2"), ("iid", "1x1")):
        whole = bounds_of(decoded(target, drawn, shape)[0])
        some = bounds_of(decoded(target, drawn, shape, recording=RECORDING)[0])
        assert some.optimum.mean >= whole.optimum.mean - 1e-6
        assert some.kind == "bound" and by_name(some)["token"].unknown >= 0
        assert (whole.spechub_kind, some.spechub_kind) == (("", "") if shape == "1x1" else ("exact", "estimate"))
    tempered = decoded(target, "iid", "2x1", Sampling(0.7), recording=RECORDING)[0]
    assert bounds_of(tempered).kind == "estimate"


def test_what_has_no_bound_says_why(target):
    trees, _ = decoded(target, "iid", "2x1")
    for proposer, why in (
        ({"tree": "best first"}, "the shape of the sampled trees follows from their tokens"),
        ({"policy": {"name": "threshold", "rule": "svip"}}, "the shape of the sampled trees follows from their tokens"),
        ({"confidence": 0.5}, "the shape of the sampled trees follows from their tokens"),
    ):
        assert why in bounds_of(replace(trees, proposer={**trees.proposer, **proposer})).needs
    fixed = {**trees.proposer, "policy": {"name": "fixed", "depth": 2}}
    assert not bounds_of(replace(trees, proposer=fixed)).needs, "its depth does not follow from the tokens"
    raced = replace(trees, codes=np.full_like(trees.codes, 3))
    assert "noise of drafts drawn gumbel" in bounds_of(raced).needs
    mixed = replace(trees, codes=np.where(np.arange(len(trees.codes)) % 2, 0, trees.codes).astype(np.int8))
    assert "no bound is known for trees drawn deterministic and iid" in bounds_of(mixed).needs
    assert set(bounds_of(raced).summary()) == {"needs"}


@pytest.mark.nightly
def test_the_command_prints_every_arm_and_writes_all_numbers(recorded, tmp_path):
    console = quiet()
    assert command(["bounds", str(recorded), "--csv", str(tmp_path / "all.csv")], console) == 0
    shown = console.file.getvalue()
    assert "token *" in shown and "drawn iid" in shown and "drawn deterministic" in shown and "optimum" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    frame = pd.read_csv(tmp_path / "all.csv", keep_default_na=False, na_values=[""])
    lost = frame[[f"lost_{part}" for part in bounds.PARTS]].sum(axis=1)
    np.testing.assert_allclose(lost, frame["depth"] + 1 - frame["tau"], atol=1e-9)
    assert set(frame["arm"]) == {"draft_chain", "repeat"}


@pytest.mark.nightly
def test_a_study_has_them_too(tmp_path):
    laboratory = lab(temperature=1.0, proposer=named("2x1"), verifiers={"token": Token(), "kseq": KSeq()})
    options = settings(tmp_path / "out", record="replay", record_top=61, batch_size=1)
    assert study_verifiers(laboratory, options, CONFIG, quiet(), every=4, repeats=1) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    figures = summary["bounds"]["draft_tree"]
    expected = summary["proposers"]["draft_tree"]["verifiers"]["kseq"]["expected_accepted"]["mean"]
    assert figures["verifiers"]["kseq"]["tau"]["mean"] == pytest.approx(1 + expected, rel=1e-5)
    share = summary["proposers"]["draft_tree"]["verifiers"]["kseq"]["share_of_bound"]["mean"]
    assert share > 0 and 0.7 < figures["verifiers"]["kseq"]["share_first"]["mean"] <= 1.3
