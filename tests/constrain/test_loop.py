"""The decode loop under constraints has exactly the masked distribution."""

from collections import Counter
from dataclasses import dataclass
from typing import get_args

import pytest

from spec_lab.constrain import AppliedConstraint, ConstraintError
from spec_lab.constrain.applied import Placement
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.protocol import Constraint, ConstraintState
from spec_lab.core.faults import PartError
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.tasks.certify.exact import decoded
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.toys import At, Table, distance, uneven
from tests.labs import Repeat
from tests.tiny import VOCABULARY, tiny_target

WORLD = RandomToy(8, support=2)
DRAFTS = (("1x1", "iid", 3), ("2x1", "iid", 2), ("2x1", "without_replacement", 2), ("2x1", "deterministic", 3))


@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["target", "both"])
@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
@pytest.mark.parametrize(("tree", "drawn", "tokens"), DRAFTS)
def test_the_output_has_the_masked_distribution(placement, fast_forward, verifier, tree, drawn, tokens):
    applied = AppliedConstraint(Table(uneven), placement, fast_forward=fast_forward)
    instance = Instance(WORLD, tree, tokens, applied=applied)
    assert distance(decoded(instance, drawn, verifier), truth(instance)) < 1e-12


@dataclass
class Fragile(ConstraintState):
    """Allows everything; raises where a token comes twice in a row."""

    text: tuple[int, ...] = ()

    def fork(self):
        return Fragile(self.text)

    def advance(self, token):
        if self.text[-1:] == (token,):
            raise ConstraintError(f"request 'r1': {token} came twice")  # named, as the engines do
        self.text += (token,)

    def mask(self):
        return None


@dataclass(frozen=True)
class Breaks(Constraint):
    """Constrains request 1 by the fragile state, and no other."""

    name: str = "breaks"
    vocabulary: int = VOCABULARY

    def start(self, request):
        return Fragile() if request.id == 1 else At(Table(lambda _: range(VOCABULARY), VOCABULARY), ())


@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["target", "draft", "both", "none"])
@pytest.mark.parametrize("async_masks", [False, True])
def test_a_constraint_that_raises_ends_only_its_own_request(placement, async_masks):
    target = tiny_target()
    requests = [Request(number, f"r{number}", (number + 1, 5, 9), max_new_tokens=12) for number in range(3)]

    def decode(some, applied):
        group = fixed_group(Arm(target, Repeat(3), Token(), CounterDraws(0), applied), some)
        steps = list(group)
        return group, steps

    free, _ = decode(requests, None)
    group, _ = decode(requests, AppliedConstraint(Breaks(), placement, async_masks=async_masks))
    text = free.sequences[1].emitted
    twice = next(n for n in range(1, len(text)) if text[n] == text[n - 1])
    if placement in ("draft", "none"):  # a draft mask or an observer: the output continues without it
        assert [sequence.emitted for sequence in group.sequences] == [sequence.emitted for sequence in free.sequences]
        assert "came twice" in group.sequences[1].unwatched and not group.errors
        assert [sequence.unwatched for sequence in group.sequences[::2]] == ["", ""]
        return
    assert [sequence.finish for sequence in group.sequences] == ["length", "stuck", "length"]
    assert list(group.errors) == [group.sequences[1]]
    error = group.errors[group.sequences[1]]
    assert "came twice" in error and error.count("request 'r1'") == 1 and "tokens emitted so far" in error
    for number in (0, 2):
        assert group.sequences[number].emitted == free.sequences[number].emitted
    assert group.sequences[1].emitted == text[: twice + 1], "drafts do not change where it ends"
    assert target.lm.cells.references.sum() == 0


@dataclass
class Defective(Constraint):
    """Allows everything; the second call of one method raises what no constraint should."""

    failing: str
    calls: Counter
    name: str = "defective"
    vocabulary: int = VOCABULARY

    def call(self, method):
        self.calls[method] += 1
        if method == self.failing and self.calls[method] == 2:
            raise KeyError("it broke")

    def start(self, request):
        self.call("start")
        return DefectiveState(self)


@dataclass
class DefectiveState(ConstraintState):
    made_by: Defective

    def fork(self):
        self.made_by.call("fork")
        return self

    def advance(self, token):
        self.made_by.call("advance")

    def mask(self):
        self.made_by.call("mask")

    def action(self):
        self.made_by.call("action")


@pytest.mark.each_value
@pytest.mark.parametrize("failing", ["start", "fork", "advance", "mask", "action"])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "combined"])
@pytest.mark.parametrize(
    "options",
    [{"placement": placement} for placement in get_args(Placement)]
    + [{"fast_forward": True}, {"async_masks": True}, {"placement": "target", "async_masks": True}],
)
def test_an_error_in_a_constraint_ends_the_run_and_names_it_with_the_line(failing, others, options):
    target, constraint = tiny_target(), Defective(failing, Counter())
    if others:
        constraint = Combined([Table(lambda _: range(VOCABULARY), VOCABULARY), constraint])
    requests = [Request(number, f"r{number}", (number + 1, 5, 9), max_new_tokens=6) for number in range(3)]
    group = fixed_group(
        Arm(target, Repeat(3), Token(), CounterDraws(0), AppliedConstraint(constraint, **options)), requests
    )
    with pytest.raises(PartError, match=r"^constraint 'defective' raised KeyError: 'it broke' \(.*test_loop.py:\d+, "):
        list(group)
    assert not target.lm.cells.references.any() and not group.has_unfinished()


def test_a_row_that_allows_nothing_ends_its_request_by_name():
    target = tiny_target()
    table = Table(lambda text: range(VOCABULARY) if len(text) < 4 else (), VOCABULARY)
    group = fixed_group(
        Arm(target, Repeat(2), Token(), CounterDraws(0), AppliedConstraint(table)), [Request(0, "r", (1, 2))]
    )
    list(group)
    assert group.sequences[0].finish == "stuck" and len(group.sequences[0].emitted) == 4
    assert group.errors[group.sequences[0]].startswith("request 'r', step 4: its constraint")


def test_an_observed_constraint_is_counted_and_changes_nothing():
    target = tiny_target()
    request = Request(0, "r", (1, 2), max_new_tokens=10)
    free = fixed_group(Arm(target, Repeat(2), Token(), CounterDraws(0)), [request])
    list(free)
    text = free.sequences[0].emitted
    table = Table(lambda before: [text[len(before)]] if len(before) < 6 else [(text[6] + 1) % VOCABULARY], VOCABULARY)
    for placement in ("none", "draft"):
        group = fixed_group(
            Arm(target, Repeat(2), Token(), CounterDraws(0), AppliedConstraint(table, placement)), [request]
        )
        list(group)
        assert group.sequences[0].emitted == text
        assert group.sequences[0].violated == 6 and not group.errors
