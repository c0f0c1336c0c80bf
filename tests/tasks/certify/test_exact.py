"""Enumeration: every shipped verifier that is declared lossless is, and wrong declarations are found and localised."""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from spec_lab.cli.main import conf
from spec_lab.core.history import TextHistories
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws, Purpose
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.drafters.block.heads import HeadSettings
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.cascade import DraftCascade
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.draft_model.propose import DraftModel, StringDraftModel
from spec_lab.drafters.draft_model.strings import StringTokens
from spec_lab.drafters.draft_model.vocabularies import SharedTokens, TrimmedTokens, one_to_one
from spec_lab.drafters.eagle.network import Eagle3Settings, EagleSettings
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.drafters.hydra.network import HydraHeads, HydraSettings
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.mtp.network import Mtp, MtpSettings
from spec_lab.drafters.pard.propose import Pard
from spec_lab.drafters.peagle.network import PEagle, PEagleSettings
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import SkipSearch
from spec_lab.drafters.sparse_kv import SparseKV
from spec_lab.drafters.triforce import TriForce
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.best_first import Budget
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.jacobi import Jacobi
from spec_lab.propose.lookahead import Lookahead
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.propose.union import Union
from spec_lab.runners.draft_pass import Sublayer
from spec_lab.runners.sparse_kv import Selection
from spec_lab.tasks.certify.certificate import Control, Proof, grade, in_short, prove
from spec_lab.tasks.certify.exact import Finding, examine
from spec_lab.tasks.certify.instances import FEW, LOOPS, QUICK, STEPS, Instance
from spec_lab.tasks.certify.pair import Check, Pair
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, table_models
from spec_lab.verify import Cascade, Gumbel, KSeq, Lenient, Match, Token, Traversal, Verdict
from tests.drafters.eagle_heads import network_of
from tests.propose.lab import decode
from tests.tasks.certify.parts import LOSSLESS, VERIFIERS, Claims, Forgets, Hotter, Misstates, Uniform, Verifies

TARGET, DRAFT = table_models(RandomToy(4, plain=True), 3)
ENUMERATED = [(verifier, drawn) for verifier, drawn in LOSSLESS if drawn != "gumbel"]


def draft_model(tree="1x1", drawn="iid", vocabularies=None, **options):
    return DraftModel(DRAFT, TARGET.context, TreePlan(parse(tree), drawn, **options), vocabularies=vocabularies)


def shared_tokens():
    return SharedTokens([(0, 1), (3, 2)], 4, one_to_one({0: 1, 1: 0, 3: 2}), 4)


def string_model(tree):
    plan = TreePlan(parse(tree), "deterministic", penalized=False)
    return StringDraftModel(DRAFT, TARGET.context, plan, vocabularies=StringTokens(list, list, (), (), {}))


def medusa(trunk, own_lm_heads=False):
    return Medusa(Heads.random(TARGET, 2, trunk, own_lm_heads=own_lm_heads), parse("2x1"))


def union(*parts, **options):
    return Union.load(TARGET, {str(n): part for n, part in enumerate(parts)}, **options)


def best_of(*parts, **options):
    return BestOf.load(TARGET, {str(n): part for n, part in enumerate(parts)}, **options)


def cascade(inner, verifier=None, **options):
    model = Target(DRAFT, None, "draft", TARGET.context, "", 0.0)
    return DraftCascade(Arm(model, inner, verifier or Token(), CounterDraws(0)), 2, **options)


def eagle(settings, tree="2x1", drawn="deterministic", **options):
    network = random_network(network_of(settings), TARGET)
    return FeatureDrafter(network, TARGET, TreePlan(parse(tree), drawn, **options), "eagle")


def hydra(prefix, tree="2x1", drawn="deterministic", **options):
    settings = HydraSettings(4, 4, 3, 2, small_layer(4) if prefix else None, shared_lm_head=prefix)
    return Hydra(random_network(HydraHeads(settings), TARGET), TARGET, TreePlan(parse(tree), drawn, **options))


def mtp(settings, tree, drawn):
    network = random_network(Mtp(settings), TARGET)
    return FeatureDrafter(network, TARGET, TreePlan(parse(tree), drawn), "mtp")


def block(tree, drawn, size, **more):
    settings = BlockSettings(small_layer(4), 4, 4, 4, (0, 1), block_size=size, mask_token=3, **more)
    return BlockDrafter(random_network(BlockNetwork(settings), TARGET), TARGET, TreePlan(parse(tree), drawn))


def peagle(tree, drawn, **sizes):
    settings = PEagleSettings(small_layer(4), 4, 4, 4, (0, 1), layers=2, mask_token=3, **sizes)
    return PEagleDrafter(random_network(PEagle(settings), TARGET), TARGET, TreePlan(parse(tree), drawn))


def pard(tree, drawn, trimmed=None):
    return Pard(DRAFT, TARGET.context, 3, TreePlan(parse(tree), drawn), trimmed=trimmed)


def trimmed(proposer):
    """A proposer of a network that drafts three of the four tokens."""
    proposer.network.trim(torch.tensor([0, 2, 3]))
    return proposer


def early_exit(tree="1x1", drawn="iid", **options):
    return EarlyExit(TARGET.lm, 1, TreePlan(parse(tree), drawn, **options))


def kangaroo(tree="1x1", drawn="iid", **options):
    network = random_network(Kangaroo(KangarooSettings(small_layer(4), 4, 1)), TARGET)
    plan = TreePlan(parse(tree), drawn, **options)
    return KangarooDrafter(network, TARGET, plan)


def sparse_kv(tree="1x1", drawn="iid", method="streaming_llm"):
    return SparseKV(TARGET.lm.sparse(Selection(method)), TARGET.context, TreePlan(parse(tree), drawn))


def triforce(inner):
    model = replace(TARGET, lm=TARGET.lm.sparse(Selection()))
    return TriForce(Arm(model, inner, Token(), CounterDraws(0)), 2)


def skip(tree="1x1", drawn="iid", **options):
    return Skip(TARGET.lm, TreePlan(parse(tree), drawn, **options), frozenset({Sublayer("mlp", 1)}))


def searched(tree="1x1", drawn="iid"):
    search = SkipSearch((Sublayer("mlp", 0), Sublayer("mlp", 1)))
    return Skip(TARGET.lm, TreePlan(parse(tree), drawn), search)


PROPOSERS = {
    "none": Null(),
    "chain": draft_model(),
    "chain, confident": draft_model(confidence=0.6),
    "chain, warmer": draft_model(temperature=1.5),
    "tree iid": draft_model("2x1", confidence=0.5),
    "tree without": draft_model("2x1", "without_replacement"),
    "tree point": draft_model("2x1", "deterministic", confidence=0.5),
    "chain of shared tokens": draft_model(vocabularies=shared_tokens()),
    "tree of shared tokens": draft_model("2x1", "without_replacement", vocabularies=shared_tokens()),
    "chain of another tokenizer's text": string_model("1x1"),
    "tree of another tokenizer's text": string_model("2x1"),
    "best first iid": draft_model(budget=Budget(3)),
    "best first without": draft_model(drawn="without_replacement", budget=Budget(3, width=1)),
    "best first point": draft_model(drawn="deterministic", budget=Budget(3)),
    "Medusa": medusa(trunk=False),
    "Medusa with a trunk": medusa(trunk=True),
    "Medusa with LM heads of its own": medusa(trunk=False, own_lm_heads=True),
    "EAGLE-1 tree": eagle(EagleSettings(small_layer(4), 4, 4)),
    "EAGLE-3 chain": eagle(Eagle3Settings(small_layer(4), 4, 4, 4, (0, 1, 1), 3), "1x1", "iid"),
    "EAGLE-3 tree": eagle(Eagle3Settings(small_layer(4), 4, 4, 4, (0, 1), 4), "2x1", "without_replacement"),
    "EAGLE-3 with windows": eagle(
        Eagle3Settings(small_layer(4), 4, 4, 4, (0, 1), 3, layers=2, windows=(2, None)), "1x1", "iid"
    ),
    "EAGLE-3 best first": eagle(
        Eagle3Settings(small_layer(4), 4, 4, 4, (0, 1), 4), drawn="iid", budget=Budget(3, depth=3)
    ),
    "Hydra tree": hydra(prefix=False),
    "Hydra chain": hydra(prefix=False, tree="1x1", drawn="iid"),
    "Hydra tree with a prefix layer": hydra(prefix=True, drawn="without_replacement"),
    "Hydra best first": hydra(prefix=True, drawn="iid", budget=Budget(3, depth=3)),
    "Hydra reranked": hydra(prefix=False, budget=Budget(3, depth=3, rerank=True)),
    "MTP chain": mtp(MtpSettings(small_layer(4), 4, 4), "1x1", "iid"),
    "MTP tree": mtp(MtpSettings(small_layer(4), 4, 4, modules=2), "2x1", "without_replacement"),
    "block chain": block("1x1", "iid", size=3),
    "block tree": block("2x1", "deterministic", size=3),
    "block with windows": block(
        "2x1", "without_replacement", size=3, layers=2, windows=(5, None), causal=(True, False)
    ),
    "block of causal rows": block("1x1", "iid", size=3, causal=(True,)),
    "block with a smaller vocabulary": block("2x1", "without_replacement", size=3, draft_vocab_size=3),
    "block with Markov head, chain": block("1x1", "iid", size=2, predicts_next=True, head=HeadSettings("vanilla", 2)),
    "block with Markov head, tree": block(
        "2x1", "without_replacement", size=2, predicts_next=True, head=HeadSettings("vanilla", 2)
    ),
    "block with a gated Markov head": block("1x1", "iid", size=2, predicts_next=True, head=HeadSettings("gated", 2)),
    "block with a recurrent Markov head": block("2x1", "iid", size=3, head=HeadSettings("rnn", 2)),
    "DFlash2 chain": block(
        "1x1", "iid", size=3, head=HeadSettings("selector", 2, candidates=3), conv_taps=2, conv_group=2
    ),
    "DFlash2 tree": block(
        "2x1", "without_replacement", size=3, head=HeadSettings("selector", 2, candidates=2), conv_taps=2
    ),
    "Domino chain": block(
        "1x1", "iid", size=2, predicts_next=True, head=HeadSettings("domino", 2, state_size=2, uncorrected=1)
    ),
    "Domino tree": block("2x1", "without_replacement", size=3, head=HeadSettings("domino", 2, state_size=2)),
    "P-EAGLE chain": peagle("1x1", "iid"),
    "P-EAGLE with windows": peagle("1x1", "iid", windows=(5, None)),
    "P-EAGLE tree": peagle("2x1", "without_replacement", draft_vocab_size=3),
    "PARD chain": pard("1x1", "iid"),
    "PARD tree without": pard("2x1", "without_replacement"),
    "PARD tree point": pard("2x1", "deterministic"),
    "draft model with a trimmed vocabulary": draft_model("2x1", "without_replacement", TrimmedTokens((0, 2, 3), 4)),
    "PARD with a trimmed vocabulary": pard("1x1", "iid", TrimmedTokens((0, 2), 4)),
    "Medusa with a trimmed vocabulary": Medusa(
        Heads.random(TARGET, 2, False).trimmed(torch.tensor([0, 2, 3]), TARGET), parse("2x1")
    ),
    "EAGLE-1 with a trimmed vocabulary": trimmed(eagle(EagleSettings(small_layer(4), 4, 4), "1x1", "iid")),
    "EAGLE-3 with a trimmed vocabulary": trimmed(
        eagle(Eagle3Settings(small_layer(4), 4, 4, 4, (0, 1), 4), "2x1", "without_replacement")
    ),
    "Hydra with a trimmed vocabulary": trimmed(hydra(prefix=True, drawn="without_replacement")),
    "MTP with a trimmed vocabulary": trimmed(mtp(MtpSettings(small_layer(4), 4, 4, modules=2), "1x1", "iid")),
    "block with a trimmed vocabulary": trimmed(
        block("2x1", "without_replacement", size=2, predicts_next=True, head=HeadSettings("gated", 2))
    ),
    "DFlash2 with a trimmed vocabulary": trimmed(
        block("1x1", "iid", size=3, head=HeadSettings("selector", 2, candidates=4), conv_taps=2)
    ),
    "Domino with a trimmed vocabulary": trimmed(
        block("1x1", "iid", size=3, head=HeadSettings("domino", 2, state_size=2))
    ),
    "P-EAGLE with a trimmed vocabulary": trimmed(peagle("1x1", "iid", draft_vocab_size=4)),
    "early exit, chain": early_exit(),
    "early exit, chain, confident": early_exit(confidence=0.6),
    "early exit, tree iid": early_exit("2x1"),
    "early exit, tree without": early_exit("2x1", "without_replacement"),
    "early exit, tree point": early_exit("2x1", "deterministic"),
    "early exit, best first": early_exit(drawn="iid", budget=Budget(3)),
    "early exit, reranked": early_exit(drawn="deterministic", budget=Budget(3, depth=3, rerank=True)),
    "Kangaroo chain, confident": kangaroo(confidence=0.4),
    "Kangaroo tree": kangaroo("2x1", "without_replacement"),
    "Kangaroo, reranked": kangaroo(drawn="deterministic", budget=Budget(3, depth=3, rerank=True)),
    "union with an early exit": union(Ngram(2, 2, 1), early_exit("2x1", "without_replacement")),
    "skipped MLP, chain": skip(),
    "skipped MLP, tree without": skip("2x1", "without_replacement"),
    "skipped MLP, best first": skip(drawn="deterministic", budget=Budget(3)),
    "searched sublayers": searched("2x1", "without_replacement"),
    "small cache, chain": sparse_kv(),
    "small cache of the prompt, tree without": sparse_kv("2x1", "without_replacement", "snapkv"),
    "cache in 4 bits, chain": sparse_kv(method="int4"),
    "TriForce from an n-gram": triforce(Ngram(3, 3, 1)),
    "TriForce from a chain": triforce(draft_model("1x1", "iid")),
    "union of two early exits": union(early_exit("1x1", "deterministic"), early_exit("2", "without_replacement")),
    "union of an early exit and skipped sublayers": union(early_exit("2", "deterministic"), skip("1x1")),
    "best of an n-gram and an early exit": best_of(
        Ngram(2, 2, 1), early_exit("2x1", "without_replacement"), start=1.0, memory=0.5
    ),
    "n-gram chain": Ngram(3, 3, 1),
    "n-gram chain from the first match": Ngram(2, 2, 1, "first"),
    "n-gram tree": NgramTree(5, 3, 3, 1),
    "PLD+": PldPlus(3, -1),
    "Jacobi": Jacobi(2),
    "lookahead": Lookahead(1, 2, 2),
    "token recycling": Recycling(4, parse("2x1")),
    "union of points": union(Ngram(2, 3, 1), medusa(8)),
    "union with a sampled chain": union(NgramTree(2, 2, 2, 1), draft_model("1x1", "iid")),
    "union with a sampled tree": union(Ngram(2, 2, 1), draft_model("2x1", "without_replacement")),
    "union with a sampled tree that may repeat points": union(Ngram(2, 2, 1), draft_model("2", "iid"), exclude=False),
    "best of an n-gram and a chain": best_of(Ngram(2, 2, 1), draft_model("1x1", "iid"), start=1.0, memory=0.5),
    "cascade from an n-gram": cascade(Ngram(3, 3, 1)),
    "cascade of points from an n-gram tree": cascade(NgramTree(5, 3, 3, 1), drawn="deterministic"),
    "cascade from a chain": cascade(draft_model("1x1", "iid"), temperature=1.5),
    "cascade of points from a chain": cascade(draft_model("1x1", "iid"), drawn="deterministic"),
    "cascade from a tree": cascade(draft_model("2x1", "without_replacement"), Traversal()),
    "cascade from a union": cascade(union(NgramTree(2, 2, 2, 1), draft_model("1x1", "iid"))),
    "cascade from a cascade": cascade(cascade(Ngram(2, 2, 1))),
    "suffix chain": Suffix.load(None, shared=9),
    "suffix tree": Suffix.load(None, nodes=5, children=3, factor=4.0),
}
"""Every shipped proposer."""


@cache
def proved(name):
    """One of them with token verification."""
    return prove(PROPOSERS[name], Token(), QUICK)


def require_exact(proof: Proof):
    assert proof.failure is None, proof.failure.wrong
    assert proof.missing == ()
    assert proof.worst.tv < 1e-12
    assert all(abs(finding.mass - 1) < 1e-12 for finding in proof.findings)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exclude", [True, False])
def test_traversal_verification_is_exact_for_sampled_nodes_beside_points(exclude):
    both = union(NgramTree(2, 2, 2, 1), draft_model("2x1", "without_replacement"), exclude=exclude)
    require_exact(prove(both, Traversal(), QUICK))


@pytest.mark.each_value
@pytest.mark.parametrize(("verifier", "drawn"), ENUMERATED, ids=lambda value: getattr(value, "name", value))
def test_every_lossless_verifier_is(verifier, drawn):
    proof = prove(drawn, verifier, QUICK)
    require_exact(proof)
    assert proof.drafts == "reference"
    assert [finding.instance for finding in proof.findings] == [instance.name for instance in QUICK]
    assert grade(proof, verifier.lossless) == "exact"


def test_the_shipped_verifiers_are_all_here():
    assert {type(verifier) for verifier, _ in LOSSLESS} == {Token, Traversal, Match, KSeq, Gumbel}
    assert len(ENUMERATED) == 3 * 3 + 1


@pytest.mark.one_in(135)
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposer_is_enumerated_with_its_own_code(name):
    require_exact(proved(name))
    assert proved(name).drafts == "proposer"


def factory(proposer):
    """Return the function that configs name: drafters of features have one class and several networks."""
    kind = next((part for part in type(proposer).__mro__ if "load" in vars(part)), type(proposer))
    return (
        f"spec_lab.drafters.{proposer.name}.propose.load"
        if kind is FeatureDrafter or kind is KangarooDrafter
        else f"{kind.__module__}.{kind.__name__}.load"
    )


def test_the_shipped_proposers_are_all_here():
    shipped = {OmegaConf.load(file)["_target_"] for file in Path(conf(), "proposer").glob("*.yaml")}
    mine = {factory(proposer) for proposer in PROPOSERS.values()}
    assert {name.replace("null.Null", "Null") for name in mine} == shipped


@pytest.mark.parametrize("name", ["block with windows", "block of causal rows", "P-EAGLE with windows"])
def test_a_toy_attends_as_its_drafter_does_with_smaller_windows(name):
    proposer = PROPOSERS[name]
    expected = {
        layer: kind._replace(sliding_window=kind.sliding_window and 2) for layer, kind in proposer.network.kinds.items()
    }
    assert proposer.toy(TARGET, DRAFT, parse("1x1")).network.kinds == expected


def test_a_search_is_certified_as_one():
    target = table_models(RandomToy(4, plain=True), 3)[0]
    toy = searched().toy(target, DRAFT, parse("1x1"))
    assert isinstance(toy.skipped, SkipSearch) and toy.scope == "request" and toy.skipped.sets > 1
    group, _ = decode(target, toy, [Request(0, "toy", PROMPT, Sampling(1.0), 2, frozenset())])
    assert toy.skipped.ends(len(PROMPT), len(PROMPT) + 1, []) == [len(PROMPT), len(PROMPT) + 1] and not group.errors


@pytest.mark.nightly
def test_drafts_are_the_proposer_s_own():
    """Each drafts differently, so different outcomes are enumerated and different numbers of tokens accepted."""
    different = ["none", "chain", "chain, confident", "chain, warmer", "tree without", "tree point", "n-gram chain"]
    different += ["PARD tree without", "block chain", "block with Markov head, chain"]
    means = {name: [finding.accepted for finding in proved(name).findings] for name in different}
    assert means["none"] == [0.0] * len(QUICK)
    assert means["chain, confident"][1:2] == means["chain"][1:2]  # "2": one level, nothing to end early
    assert len({tuple(np.round(means[name], 9)) for name in different}) == len(different)


def test_the_instances_cover_what_small_instances_miss():
    """V = 5, depth 3, uneven siblings, stop tokens: V = 2 and depth 1 hide whole classes of faults."""
    assert {instance.toy.v for instance in STEPS} == {4, 5}
    assert {"1x1x1", "2x2", "3x1"} < {instance.tree for instance in STEPS}
    assert any(instance.stop for instance in LOOPS) and all(instance.tokens >= 2 for instance in LOOPS)
    assert len({instance.name for instance in STEPS + LOOPS}) == len(STEPS + LOOPS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [
    Sampling(0.7, top_k=2), Sampling(1.3, repetition_penalty=1.5),
    Sampling(1.2, presence_penalty=0.7, frequency_penalty=0.4), Sampling(1.0, logit_bias={1: -1.5, 2: 1.0}),
    Sampling(0.8, repetition_penalty=1.3, frequency_penalty=0.9, logit_bias={0: 1.0}, bad_words_ids=[[3], [1, 2]]),
])  # fmt: skip
def test_the_run_s_own_sampling_is_enumerated(sampling):
    require_exact(prove(draft_model(), Token(), LOOPS[:2], sampling))


def test_penalties_that_do_not_count_the_path_are_found(monkeypatch):
    """A count of the committed text alone is right at roots and after rejections, and wrong below a drafted token."""
    sampling = Sampling(1.0, frequency_penalty=1.5)
    monkeypatch.setattr(TextHistories, "before", lambda self, shape, token, rows: self.ends.at(shape.root[rows]))
    assert examine(Instance(FEW, "1x1", tokens=2), draft_model("1x1", "iid"), Token(), sampling).wrong is not None


def test_a_chain_of_sampled_tokens_is_enumerated_at_temperature_0_where_the_toy_s_tree_branches():
    branching = next(instance for instance in LOOPS if not instance.chain)
    finding = examine(branching, draft_model("1x1", "iid"), Token(), Sampling(0.0))
    assert finding.wrong is None and finding.drafted > 0


def test_a_step_may_begin_anywhere():
    for start in ((3,), (1, 2)):
        assert examine(Instance(RandomToy(1), "2x1", start=start), "without_replacement", Traversal()).wrong is None
    first, other = (examine(Instance(FEW, "1x1", start=start), "iid", Token()) for start in ((0,), (3,)))
    assert first.accepted != other.accepted


# Proposers without a toy


class Foreign(Uniform):
    """Looks its tokens up in a table of its own target's size."""

    name = "foreign"

    def propose(self, batch):
        if batch.target.vocabulary != 61:
            raise IndexError("token 7 of 4")
        return super().propose(batch)


def test_a_run_records_that_its_own_pair_is_exact():
    short = in_short(PROPOSERS["none"], Match())
    assert short == {"certified": "quick", "certificate": prove(Null(), Match(), QUICK).facts()}


class Narrow(Verifies):
    """Fails on toys."""

    def __call__(self, draft, p):
        assert p.shape[-1] == 61, "another vocabulary"
        return super().__call__(draft, p)


@pytest.mark.parametrize(
    ("verifier", "failure", "missing"),
    [(Lenient(0.5), True, False), (Claims(), True, False), (Narrow(), False, True)],
    ids=["lossy", "a false claim", "fails on toys"],
)
def test_a_run_records_no_certificate_of_a_pair_that_is_not_proved(verifier, failure, missing):
    short = in_short(Uniform(), verifier)
    assert short["certified"] is None
    assert bool(short["certificate"].get("failure")) is failure and bool(short["certificate"]["missing"]) is missing


def test_a_proposer_that_works_on_a_toy_is_enumerated_itself():
    proof = prove(Uniform(), Token(), QUICK)
    require_exact(proof)
    assert proof.drafts == "proposer"


@pytest.mark.nightly
def test_for_a_proposer_that_fails_on_toys_the_reference_drafts_and_the_reason_is_recorded():
    proof = prove(Foreign(), Token(), QUICK)
    assert proof.drafts == "reference" and proof.failure is None and len(proof.findings) == len(QUICK)
    (missing,) = proof.missing
    assert missing.startswith(
        "the proposer's own drafts: it has no toy(target, draft, tree) and fails on a toy target "
        "(proposer 'foreign' raised IndexError: token 7 of 4 ("
    )
    assert f"{__file__}:" in missing
    assert in_short(Foreign(), Token())["certificate"]["missing"] == list(proof.missing)


# Proposers that state a wrong q


@pytest.mark.each_value
@pytest.mark.parametrize("proposer", [Misstates(), Hotter(draft_model())], ids=["misstates", "hotter"])
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_a_wrong_q_is_found(proposer, verifier):
    proof = prove(proposer, verifier, QUICK)
    assert proof.drafts == "proposer"
    assert proof.worst.tv > 0.01
    assert proof.failure.wrong.startswith("after [] token ")
    assert in_short(proposer, verifier)["certified"] is None


@pytest.mark.nightly
def test_a_wrong_q_does_not_matter_to_a_verifier_that_does_not_read_q():
    require_exact(prove(Misstates(), Match(), QUICK))


def test_noise_that_is_used_twice_is_found():
    class Sharing(Uniform):
        purpose = Purpose.STOP

    failure = prove(Sharing(), Token(), LOOPS[:1]).failure
    assert failure.wrong.startswith("noise is used twice: Key(")
    assert "is used for two choices" in failure.wrong


# Gumbel: noise that cannot be enumerated


@pytest.mark.parametrize("proposer", ["gumbel", draft_model("2x1", "gumbel")], ids=["reference", "own"])
def test_gumbel_drafts_are_left_to_samples_and_never_called_exact(proposer):
    proof = prove(proposer, Gumbel(), QUICK)
    assert proof.findings == () and proof.worst is None and proof.failure is None
    assert proof.missing == ("Gumbel noise cannot be enumerated",)
    assert proof.drafts == ("reference" if proposer == "gumbel" else "proposer")
    assert grade(proof, lossless=True) is None
    assert grade(proof, lossless=True, sampled=True) == "sampled"
    assert grade(proof, lossless=True, sampled=True, rejected=True) is None


# Verifiers


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "drawn"),
    [(n, d) for n, v in VERIFIERS.items() if not v.lossless for d in sorted(v.accepts) if d != "gumbel"],
)
def test_lossy_verifiers_have_a_total_variation_and_are_not_certified(name, drawn):
    verifier = VERIFIERS[name]
    proof = prove(drawn, verifier, QUICK)
    assert 0.01 < proof.worst.tv < 1 and proof.failure is not None
    assert grade(proof, verifier.lossless) is None
    assert (proof.own_target_tv is not None) == (name in ("cascade", "diversed"))
    assert failed(proof, verifier) is None, "it is declared lossy"


def failed(proof, verifier):
    return Pair(Null(), verifier, proof, "iid", np.zeros(0), np.zeros(0)).failed


@pytest.mark.parametrize("verifier", [Cascade(0.4, "chow"), Cascade(0.1, "diff"), Cascade(0.3, "opt")])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@pytest.mark.each_value
def test_a_cascade_is_exact_against_its_own_target(verifier, drawn):
    assert prove(drawn, verifier, STEPS[:4] + STEPS[30:34]).own_target_tv < 1e-12


@pytest.mark.parametrize("broken", [lambda pi, p: p, lambda pi, p: pi * np.nan], ids=["another distribution", "NaN"])
def test_a_lossy_verifier_that_is_not_exact_against_its_own_target_fails(broken):
    class Astray(Cascade):
        def aim(self, draft, p):
            return broken(super().aim(draft, p), p)

        def __call__(self, draft, p):
            return Token()(draft, super().aim(draft, p))

    proof = prove("iid", Astray(), QUICK)
    assert not proof.own_target_tv <= 1e-12
    assert "from the distribution against which it declares to be exact" in failed(proof, Astray())


@pytest.mark.each_value
@pytest.mark.parametrize("verifier", [Claims(), Control()], ids=lambda v: v.name)
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_a_wrong_declaration_is_found_and_localised(verifier, drawn):
    proof = prove(drawn, verifier, QUICK)
    assert proof.worst.tv > 0.01
    assert proof.failure.wrong.startswith("after [] token ")
    assert grade(proof, verifier.lossless, sampled=True) is None
    assert failed(proof, verifier) == f"{proof.failure.wrong} ({proof.failure.instance})"


def test_a_fault_at_the_second_token_is_localised_there():
    """A bonus token drawn from p one position early."""

    class Early(Verifies):
        def __call__(self, draft, p):
            verdict, shape = Token()(draft, p), draft.shape
            above = np.arange(shape.rows)
            leaf = np.array([not len(children) for children in shape.children])
            above[leaf] = np.append(np.arange(shape.roots), shape.parent)[leaf]
            return Verdict(
                verdict.stop,
                lambda rows: torch.where(torch.from_numpy(leaf[rows, None]), p[above[rows]], verdict.residual(rows)),
            )

    wrong = examine(Instance(RandomToy(4, plain=True), "1"), "iid", Early()).wrong
    assert wrong.startswith("after [") and not wrong.startswith("after []")


def test_a_residual_that_has_nothing_left_loses_mass():
    finding = examine(QUICK[0], "iid", Forgets())
    assert finding.mass < 0.999 and finding.wrong is not None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, None),
        ({"failure": "after [2] .."}, "after [2] .."),
        ({"mass": 0.5}, "the probabilities of the outputs sum to 0.5"),
        ({"mass": np.nan}, "the probabilities of the outputs sum to nan"),
        ({"tv": 0.25}, "the distribution of the outputs has a total variation of 0.25 from the target's"),
        ({"tv": np.nan}, "the distribution of the outputs has a total variation of nan from the target's"),
        ({"expected": 1.0}, "0.5 tokens are accepted on average, the verdicts expected 1"),
    ],
)
def test_what_is_wrong_with_a_finding(change, wrong):
    assert replace(Finding("toy", 1e-16, 1.0, None, 0.5, 0.5, 9), **change).wrong == wrong


@dataclass(frozen=True)
class Fussy(Verifies):
    """Raises where a row has so many children."""

    children: int
    name = "fussy"

    def __call__(self, draft, p):
        if max(map(len, draft.shape.children)) == self.children:
            raise KeyError("sibling")
        return super().__call__(draft, p)


@pytest.mark.parametrize(
    ("children", "instance"),
    [(1, "V=4 mixed toy model 1, tree 1x1, one step"), (2, "V=4 mixed toy model 1, tree 2, one step")],
)
@pytest.mark.parametrize(("proposer", "by"), [("iid", ""), (draft_model(), " by 'draft_model'")])
def test_a_verifier_that_fails_on_toys_is_named_with_the_instance(proposer, by, children, instance):
    with pytest.raises(ValueError) as error:
        prove(proposer, Fussy(children), QUICK)
    by = by if children == 2 else ""  # the reference's drafts are tried first: it is the verifier's fault alone
    message = str(error.value)
    assert message.startswith(f"verifier 'fussy' raised KeyError: 'sibling' ({__file__}:")
    assert message.endswith(f"in __call__), on a toy draft drawn iid{by} ({instance})")


# Size


def test_an_instance_with_too_many_outcomes_is_left_out_and_recorded(monkeypatch):
    few = partial(examine, max_decodings=20)
    monkeypatch.setattr("spec_lab.tasks.certify.certificate.examine", few)
    proof = prove("iid", Token(), QUICK[:3])
    assert [finding.outcomes for finding in proof.findings] == [9, 9]
    assert proof.missing == ("V=4 mixed toy model 1, tree 2x1, one step: more than 20 outcomes",)
    assert grade(proof, lossless=True) is None and grade(proof, lossless=True, sampled=True) == "sampled"


def test_a_draft_s_own_temperature_makes_nothing_possible_that_was_not():
    """Else most of what is enumerated would be outcomes of probability 1e-200."""
    plain, warm = (draft_model(temperature=t) for t in (None, 100.0))
    counts = [
        [finding.outcomes for finding in prove(finding, Token(), QUICK[:3]).findings] for finding in (plain, warm)
    ]
    assert counts[0] == counts[1]


def pair_with(drafts, *detectable, drafted=1, verifier=None):
    checks = [Check(f"{number}", 1, 0.0, 0.5, seen, 0, drafted) for number, seen in enumerate(detectable)]
    proposer = Uniform()
    proof = Proof((), "proposer", ("not enumerated",))
    kind = proposer if drafts == "own" else "iid"
    return Pair(proposer, verifier or Token(), proof, kind, np.zeros(1, dtype=int), np.ones(1), checks)


def test_a_lossy_pair_that_drafted_nothing_was_not_tested():
    untested = pair_with("own", 0.05, drafted=0, verifier=Lenient(0.9))
    assert untested.failed is not None and untested.failed == untested.untested
    assert untested.result == "nothing drafted" == pair_with("own", 0.05, drafted=0).result
    assert pair_with("own", 0.05, verifier=Lenient(0.9)).failed is None


def test_samples_certify_only_own_drafts_and_only_if_they_detect_enough():
    assert pair_with("own", 0.05).certified == "sampled"
    assert pair_with("own", 0.5).certified is None
    assert (
        pair_with("own", 0.05, drafted=0).certified is None and "drafted no" in pair_with("own", 0.05, drafted=0).failed
    )
    assert pair_with("own", 0.05).failed is None
    assert pair_with("reference", 0.05).certified is None, "the reference's texts"
    assert pair_with("reference", 0.05, 0.1).certified == "sampled", "the model's own score tests"
