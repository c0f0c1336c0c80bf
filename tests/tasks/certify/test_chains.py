"""Verifiers that declare that they verify chains only: what is enumerated, and which pairs are refused."""

import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import forest, tree
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.tasks.certify.certificate import in_short, prove
from spec_lab.tasks.certify.instances import QUICK, STEPS, Instance, every_instance
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Lenient, Token, check_pair, misfit
from tests.tasks.certify.parts import Uniform, Verifies
from tests.tasks.certify.test_exact import draft_model


class Straight(Verifies):
    """Token verification that fails where a row has two children."""

    name = "straight"
    chains_only = True

    def __call__(self, draft, p):
        assert max(map(len, draft.shape.children)) <= 1, "a tree came"
        return super().__call__(draft, p)


class Biased(Straight):
    """Wrong on chains as well."""

    def __call__(self, draft, p):
        return Lenient(0.9)(draft, p)


class Pairs(Uniform):
    """Drafts two siblings, and does not declare that."""

    name, nodes = "pairs", 2
    drawn = "deterministic"

    def propose(self, batch):
        tokens = torch.tensor([0, 1] * len(batch.sequences))
        return Draft(forest((tree(((0,), (1,))),) * len(batch.sequences)), tokens)


@pytest.mark.nightly
def test_chains_are_enumerated_and_nothing_else():
    chosen = [instance for instance in every_instance() if instance.chain]
    assert 20 < len(chosen) < len(every_instance())
    proof = prove("iid", Straight(), QUICK)
    assert [finding.instance for finding in proof.findings] == [instance.name for instance in QUICK if instance.chain]
    assert proof.failure is None and not proof.missing
    assert in_short(draft_model("1x1"), Straight())["certified"] == "quick"


def test_a_chain_verifier_that_is_wrong_is_found():
    assert prove("iid", Biased(), STEPS[:3]).failure is not None


def test_a_proposer_that_declares_trees_is_refused_when_the_pair_is_composed():
    shipped = draft_model("2x1"), NgramTree(4, 2, 2, 1)
    for proposer in shipped:
        with pytest.raises(ValueError, match=f"'straight' .*chains.* '{proposer.name}' drafts"):
            check_pair(proposer.name, proposer.drawn, Straight(), proposer.branches)
        check_pair(proposer.name, proposer.drawn, Token(), proposer.branches)
    for proposer in (draft_model("1x1x1"), Ngram(3, 2, 1), Null()):
        assert (
            proposer.branches is False and misfit(proposer.name, proposer.drawn, Straight(), proposer.branches) is None
        )
    assert Pairs().branches is None and Uniform().branches is False, "one node is a chain"


def test_a_tree_of_one_that_does_not_declare_it_is_refused_when_it_is_drafted():
    with pytest.raises(ValueError, match="'straight' .*chains.* 'pairs' has drafted"):
        prove(Pairs(), Straight(), [Instance(RandomToy(1), "1x1")])
