"""The base class of parts: defaults that subclasses replace, and names that are nearly those of members."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from spec_lab.constrain.protocol import Constraint, ConstraintState, action_of
from spec_lab.core.draft import empty
from spec_lab.core.protocols import Part, check_declared, required
from spec_lab.decode.proposer import DECLARED, Proposer, Requires
from spec_lab.policy.policy import Policy
from spec_lab.verify import Verifier


class Least(Proposer):
    """Nothing but what every proposer states."""

    name, drawn = "least", "iid"

    def __init__(self, nodes):
        self.nodes = nodes

    def propose(self, batch):
        return empty(1)


def test_what_is_not_stated_has_defaults_that_follow_from_what_is():
    chain, tree = Least(1), Least(2)
    assert (chain.branches, tree.branches) == (False, None) and chain.draws == {"iid"}
    assert chain.requires == Requires() and chain.why_not_stopped is chain.sha256 is None and chain.shared_store == ""
    assert chain.toy(None, None, ()) is chain and chain.fork([state := []]) == [state]
    check_declared(chain, DECLARED)


def test_an_attribute_of_a_class_of_an_object_and_a_field_replace_a_default():
    @dataclass(frozen=True)
    class Fields(Least):
        forced_nodes: int  # no default: a dataclass does not take the base class's for one
        nodes: int = 3
        branches: bool = True

    assert vars(Fields(2)) == {"forced_nodes": 2, "nodes": 3, "branches": True}
    with pytest.raises(TypeError, match="forced_nodes"):
        Fields()
    proposer = Least(1)
    proposer.requires = Requires(top_k=3)
    assert proposer.requires.top_k == 3 and Least(1).requires.top_k == 0


def test_what_has_no_default_is_missing_until_it_is_stated():
    assert required(Proposer) == ["drawn", "nodes", "name"] and required(Policy) == ["name"]
    with pytest.raises(AttributeError, match="Least has no nodes"):
        print(Least.__new__(Least).nodes)
    with pytest.raises(TypeError, match="abstract.*propose"):
        type("Silent", (Proposer,), {"name": "silent", "drawn": "iid", "nodes": 1})()


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("branchs", False, "branches"), ("node", 3, "nodes"), ("target_cell", 4, "target_cells"),
        ("shared_stores", property(lambda self: ""), "shared_store"), ("observed", lambda self, o: None, "observe"),
        ("check_samplings", lambda self, sampling: None, "check_sampling"),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_that_of_a_member_is_refused(name, value, meant):
    with pytest.raises(TypeError, match=rf"Wrong\.{name} is no member of Proposer: did you mean {meant}\?"):
        type("Wrong", (Least,), {name: value})
    if not callable(value) and not isinstance(value, property):
        proposer = Least(1)
        setattr(proposer, name, value)
        with pytest.raises(TypeError, match=rf"Least\.{name}"):
            check_declared(proposer, DECLARED)


def test_an_annotation_is_a_name_and_policies_have_names_of_their_own():
    with pytest.raises(TypeError, match=r"Wrong\.branche .*branches"):
        type("Wrong", (Least,), {"__annotations__": {"branche": bool}})
    with pytest.raises(TypeError, match=r"Wrong\.decides .*Policy.*decide"):
        type("Wrong", (Policy,), {"decides": lambda self, batch, states: []})
    with pytest.raises(TypeError, match=r"Wrong\.chain_only .*Verifier.*chains_only"):
        type("Wrong", (Verifier,), {"chain_only": True})


def test_other_names_are_free():
    free = {
        "closed": True,
        "depth": 3,
        "_branchs": 1,
        "drafted": lambda self: 0,
        "tokens": (),
        "names": lambda self: [],
    }
    assert type("Right", (Least,), free)(1).closed
    assert issubclass(Least, Part) and not isinstance(SimpleNamespace(), Part)


@pytest.mark.parametrize("name", ["frok", "clsoe", "rewidn", "inti", "darws"])
def test_a_name_with_a_members_letters_in_another_order_is_a_misspelling(name):
    value = property(lambda part: frozenset()) if name == "darws" else lambda part, *arguments: None
    with pytest.raises(TypeError, match=name):
        type("Misspelt", (Least,), {name: value})


def test_a_misspelt_member_of_a_constraints_state_is_refused():
    with pytest.raises(TypeError, match="actions.*action"):
        type("Misspelt", (ConstraintState,), {"actions": lambda state: None})


def test_actions_that_a_constraint_does_not_declare_are_refused():
    class Acting(ConstraintState):
        def fork(self):
            return self

        def advance(self, token):
            pass

        def mask(self):
            return None

        def action(self):
            return ()

    class Undeclared(Constraint):
        name, vocabulary = "undeclared", 4

        def start(self, request):
            return Acting()

    class Declares(Undeclared):
        has_actions = True

    with pytest.raises(TypeError, match="has_actions"):
        action_of(Undeclared(), Acting())
    assert action_of(Declares(), Acting()) == ()
