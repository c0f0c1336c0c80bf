"""Every kind of constraint, placement and verifier: the exact output distribution of the real loop.

The truth is autoregressive decoding by hand from the masked distribution. Tokens are a few letters and a stop token.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.engines import grammar
from spec_lab.constrain.healing import BytePrefix
from spec_lab.constrain.protocol import Constraint
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.tasks.certify.exact import decoded, examine
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import CONSTRAINED, END, PIECES, Instance, constrained
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.toys import distance

CHAIN, TREE = ("1x1", "iid", 3), ("2x1", "iid", 2)
DRAFTS = (CHAIN, TREE, ("2x1", "without_replacement", 2), ("2x1", "deterministic", 3))
SOURCES = {
    "regex": (PIECES, "(ab|c)(a|b|c)*b|a[bc]"),
    "choice": (PIECES, ["ab", "abc", "acb", "cab", "b"]),
    "lark": (PIECES, 'start: "a" tail | "c" ("b" | tail)\ntail: "b" "c"? | "c"'),
    "json_schema": ([b"1", b"0", b"-", b".", b""], '{"type": "number"}'),
}


@cache
def constraint(kind: str):
    tokens, source = SOURCES[kind]
    return getattr(grammar, kind)(Vocabulary.plain(tokens, 4), source)


@pytest.mark.each_value
@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("kind", "tree", "drawn", "tokens", "placement"),
    [
        # The short run has every placement for one kind, and one for the others.
        pytest.param(kind, *draft, placement, marks=[] if kind == "regex" or quick else [pytest.mark.nightly])
        for kind in SOURCES
        for draft in (CHAIN, TREE)
        for placement in ("target", "draft", "both", "none")
        for quick in [draft == TREE and placement == "both"]
    ],
)
def test_the_output_has_the_masked_distribution(kind, tree, drawn, tokens, verifier, placement):
    check(kind, tree, drawn, tokens, verifier, placement)


@pytest.mark.each_value
@pytest.mark.parametrize(("tree", "drawn", "tokens"), DRAFTS[2:])
@pytest.mark.parametrize("placement", ["target", "both"])
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_the_output_has_the_masked_distribution_however_siblings_are_drawn(tree, drawn, tokens, verifier, placement):
    check("regex", tree, drawn, tokens, verifier, placement)


def check(kind, tree, drawn, tokens, verifier, placement):
    applied = AppliedConstraint(constraint(kind), placement, fast_forward=placement == "both")
    instance = Instance(CONSTRAINED, tree, tokens, END, applied=applied)
    outputs, wanted = decoded(instance, drawn, verifier), truth(instance)
    assert len(wanted) > 2
    assert distance(outputs, wanted) < 1e-12


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [0, 1, 2])
@pytest.mark.parametrize(("tree", "drawn", "tokens"), DRAFTS)
@pytest.mark.parametrize("placement", ["draft", "both"])
def test_the_output_does_not_depend_on_how_many_masks_the_draft_uses(budget, tree, drawn, tokens, placement):
    applied = AppliedConstraint(constraint("regex"), placement, draft_budget=budget)
    instance = Instance(CONSTRAINED, tree, tokens, END, applied=applied)
    assert distance(decoded(instance, drawn, Token()), truth(instance)) < 1e-12


@pytest.mark.each_value
@pytest.mark.parametrize(("tree", "drawn", "tokens"), DRAFTS)
@pytest.mark.parametrize("placement", ["target", "both", "none"])
def test_masks_computed_during_the_target_s_forward_change_nothing(tree, drawn, tokens, placement):
    in_thread = AppliedConstraint(constraint("regex"), placement, async_masks=True)
    instance = Instance(CONSTRAINED, tree, tokens, END, applied=in_thread)
    assert distance(decoded(instance, drawn, Token()), truth(instance)) < 1e-12


@pytest.mark.each_value
@pytest.mark.parametrize("instance", constrained(), ids=lambda instance: instance.name)
@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
def test_certify_s_enumeration_under_constraints_finds_no_difference(instance, verifier):
    finding = examine(instance, "iid", verifier)
    assert finding.wrong is None
    assert finding.outcomes >= 5
    assert finding.drafted


def test_a_loop_that_omits_the_mask_on_the_target_is_detected():
    """The distribution of the target alone, compared with the truth under a constraint, differs."""
    bare = Instance(CONSTRAINED, "1x1", 2, END, applied=replace(constrained()[0].applied, placement="none"))
    wanted = truth(constrained()[0])
    assert distance(decoded(bare, "iid", Token()), wanted) > 0.1


@dataclass(frozen=True)
class Healed(Constraint):
    """Token healing with given bytes."""

    cut: bytes
    name: str = "healed"
    vocabulary: int = 5

    def start(self, request):
        return BytePrefix(PIECES, self.cut)


@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["target", "both"])
@pytest.mark.parametrize(("tree", "drawn", "tokens"), [CHAIN, TREE])
@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
def test_healing_has_the_masked_distribution(placement, tree, drawn, tokens, verifier):
    for cut in (b"a", b"abb", b"ca"):
        instance = Instance(CONSTRAINED, tree, tokens, END, applied=AppliedConstraint(Healed(cut), placement))
        wanted = truth(instance)
        assert distance(decoded(instance, drawn, verifier), wanted) < 1e-12
        for ((text, _),) in wanted:
            output = b"".join(PIECES[token] for token in text)
            assert output.startswith(cut) or cut.startswith(output)
