"""The decode loop under constraints: the masked law, exactly."""

import pytest

from spec_lab.certify.constrained import decoded, truth
from spec_lab.certify.exact import Instance
from spec_lab.certify.worlds import Random
from spec_lab.constrain import Binding
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.toys import Table, distance, uneven

WORLD = Random(8, support=2)
DRAFTS = (("1x1", "iid", 3), ("2x1", "iid", 2), ("2x1", "without", 2), ("2x1", "point", 3))


@pytest.mark.parametrize("placement", ["target", "both"])
@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
@pytest.mark.parametrize(("tree", "drawn", "tokens"), DRAFTS)
def test_the_output_has_the_masked_law(placement, fast_forward, verifier, tree, drawn, tokens):
    binding = Binding(Table(uneven), placement, fast_forward=fast_forward)
    instance = Instance(WORLD, tree, tokens)
    assert distance(decoded(instance, drawn, verifier, binding), truth(instance, binding)) < 1e-12
