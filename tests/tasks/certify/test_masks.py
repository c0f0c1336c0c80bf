"""Masks of random drafts against those of states that processed no draft: wrong constraints are found, others pass."""

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from spec_lab.constrain import AppliedConstraint, ConstraintError, Continuation
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.constrain.engines.grammar import json_schema
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.protocol import Constraint, ConstraintState, Masks, allows, mask_of, masks_by_forking, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from spec_lab.tasks.certify.masks import compare_masks

PIECES = (b"(", b")", b"[", b"]", b"a", b" ", b"")
END = 6
OPEN, CLOSE = {0: 1, 2: 3}, {1: 0, 3: 2}
REQUESTS = [Request(number, f"prompt {number}", (4,), stop=frozenset({END})) for number in range(3)]


@dataclass
class Nested(ConstraintState):
    """The state of a text of nested brackets: those that are open, and whether the text has ended."""

    open: list[int] = field(default_factory=list)
    over: bool = False

    def fork(self):
        return Nested(list(self.open), self.over)

    def advance(self, token):
        if token in OPEN:
            self.open.append(token)
        elif token in CLOSE:
            self.open.pop()
        self.over |= token == END

    def mask(self):
        if self.over:
            return mask_of([END], len(PIECES))
        return mask_of([0, 2, 4, 5, *([OPEN[self.open[-1]]] if self.open else [END])], len(PIECES))


class Brackets(Constraint):
    """Brackets that nest, of two kinds."""

    name, vocabulary = "brackets", len(PIECES)

    def start(self, request):
        return Nested()


class Corrupt(Brackets):
    """One mask in 500 lacks a token."""

    def __init__(self):
        self.count = 0

    def masks(self, states, shape, token):
        masks = masks_by_forking(states, shape, token, self.vocabulary)
        for row in np.flatnonzero(masks.legal):
            self.count += 1
            if self.count % 500 == 0:
                masks.bits[row, 0] &= masks.bits[row, 0] - np.uint32(1)  # without its lowest bit
        return masks


class Matcher:
    """Consumes tokens and takes them back; what it takes back of a closing bracket is always a round one."""

    def __init__(self, right):
        self.right, self.state, self.history = right, Nested(), []

    def consume(self, token):
        before = self.state.fork()
        self.history.append(before if self.right or token != 3 else Nested([*before.open[:-1], 0], before.over))
        self.state.advance(token)

    def rollback(self, count):
        self.state = self.history[-count]
        del self.history[-count:]


class Rolled(ConstraintState):
    """A state on whose own matcher drafts are tried, and taken back."""

    def __init__(self, right, tokens=()):
        self.right, self.tokens, self.matcher = right, list(tokens), Matcher(right)
        for token in tokens:
            self.matcher.consume(token)

    def fork(self):
        return Rolled(self.right, self.tokens)

    def advance(self, token):
        self.tokens.append(token)
        self.matcher.consume(token)

    def mask(self):
        return self.matcher.state.mask()


@dataclass
class Rollback(Constraint):
    """Brackets whose trees the state's own matcher traverses depth first."""

    right: bool
    name, vocabulary = "rollback", len(PIECES)

    def start(self, request):
        return Rolled(self.right)

    def masks(self, states, shape, token):
        bits = np.zeros((shape.rows, width(self.vocabulary)), dtype=np.uint32)
        legal = np.zeros(shape.rows, dtype=bool)
        for head, state in enumerate(states):
            self._below(head, state.matcher, shape, token, bits, legal)
        return Masks(bits, legal, np.zeros(shape.rows, dtype=bool))

    def _below(self, row, matcher, shape, token, bits, legal):
        bits[row], legal[row] = matcher.state.mask(), True
        for child in shape.children[row].tolist():
            drafted = int(token[child - shape.roots])
            if allows(bits[row], drafted):
                matcher.consume(drafted)
                self._below(child, matcher, shape, token, bits, legal)
                matcher.rollback(1)


class Shared(Nested):
    """No copy: what is tried on a fork happens to the state itself."""

    def fork(self):
        return self


def found(constraint, rows=3000, seed=0, requests=REQUESTS, **options):
    return compare_masks(AppliedConstraint(constraint, **options), requests, rows, seed, PIECES)


def test_masks_that_are_right_pass():
    for constraint in (Brackets(), Rollback(right=True), Combined([Brackets(), MinNewTokens(3, len(PIECES))])):
        seen = found(constraint)
        assert seen.different == 0 and seen.first is None
        assert seen.rows >= 3000 and seen.texts >= 4 and seen.longest > 20 and seen.steps > 50


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
def test_one_corrupt_mask_in_five_hundred_is_found(seed):
    seen = found(Corrupt(), seed=seed)
    assert 1 <= seen.different <= 10
    assert seen.first.what == "mask" and seen.first.asked == "complete" and not seen.first.added
    assert len(seen.first.missing) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
def test_a_rollback_that_restores_another_state_is_found(seed):
    seen = found(Rollback(right=False), seed=seed)
    assert seen.different >= 1 and seen.first.what == "mask"
    text = [*seen.first.committed, *seen.first.drafted]
    fresh = Nested()
    for token in text:
        fresh.advance(token)
    assert set(seen.first.missing) == {OPEN[fresh.open[-1]]} and seen.first.added, "what only fresh states know"


def test_a_fork_that_is_no_copy_is_found(monkeypatch):
    monkeypatch.setattr(Brackets, "start", lambda self, request: Shared())
    assert found(Brackets(), rows=500).different >= 1


def test_a_wrong_mask_of_a_growing_draft_is_found():
    """``masks`` is right; a growing draft asks the states themselves."""

    class Guided(Nested):
        def fork(self):
            return Wrong(list(self.open), self.over)

    class Wrong(Nested):
        def mask(self):
            return mask_of([0, 1, 2, 3], len(PIECES))

    class Half(Brackets):
        def start(self, request):
            return Guided()

        def masks(self, states, shape, token):
            right = [Nested(list(state.open), state.over) for state in states]
            return masks_by_forking(right, shape, token, self.vocabulary)

    seen = found(Half(), rows=500)
    assert seen.different >= 1 and seen.first.asked == "growing"


def test_the_same_seed_compares_the_same_rows_and_counts_them():
    ticks = []
    comparison = compare_masks(AppliedConstraint(Corrupt()), REQUESTS, 800, 5, PIECES, ticks.append)
    assert comparison == compare_masks(AppliedConstraint(Corrupt()), REQUESTS, 800, 5, PIECES)
    assert sum(ticks) == 800 <= comparison.rows
    assert comparison != compare_masks(AppliedConstraint(Corrupt()), REQUESTS, 800, 6, PIECES)


def test_a_constraint_that_breaks_on_a_draft_counts_as_different():
    class Breaks(Brackets):
        def masks(self, states, shape, token):
            if shape.nodes > 30:
                raise ConstraintError("too many nodes")
            return masks_by_forking(states, shape, token, self.vocabulary)

    seen = found(Breaks(), rows=1000)
    assert seen.different >= 1 and seen.first.what == "failure"


@pytest.mark.parametrize("supports_drafts", [True, False])
def test_texts_end_at_an_action(supports_drafts):
    @dataclass
    class Counts:
        left: int = 5

        def step(self, event):
            self.left -= len(event.append)
            return [Branch(allow={0, 4, END})] if self.left > 0 else [Branch(backtrack=2), Branch()]

        def fork(self):
            return replace(self)

    seen = found(
        ControllerConstraint(lambda _: Counts(), len(PIECES), "counts", supports_drafts=supports_drafts), rows=300
    )
    assert seen.different == 0 and seen.longest <= 5 and seen.texts > 10


def test_an_action_that_a_draft_does_not_see_is_found():
    class Acting(Nested):
        def fork(self):
            return Nested(list(self.open), self.over)

        def action(self):
            return (Continuation(0, Nested()),) if len(self.open) == 3 else None

    class Late(Brackets):
        has_actions = True

        def start(self, request):
            return Acting()

    seen = found(Late(), rows=500)
    assert seen.different >= 1 and seen.first.what in ("action", "mask")


def test_grammars_are_compared_with_states_that_only_fork():
    pieces = [*(bytes([c]) for c in b'{}":,v012 \n'), b'{"', b'":', b'"v":', b" {", b""]
    vocabulary = Vocabulary.plain(pieces, len(pieces) - 1)
    schema = """{"$defs": {"t": {"type": "object", "properties": {"v": {"anyOf": [{"type": "integer"},
        {"$ref": "#/$defs/t"}]}}, "additionalProperties": false}}, "$ref": "#/$defs/t"}"""
    grammar = json_schema(vocabulary, schema)

    class Forks(Constraint):
        """The grammar without its faster masks."""

        name, vocabulary = "forks", grammar.vocabulary
        start = staticmethod(grammar.start)

    requests = [replace(REQUESTS[0], stop=frozenset(vocabulary.ends))]
    seen = compare_masks(AppliedConstraint(Forks(), fast_forward=True), requests, 1500, 0, pieces)
    assert seen.different == 0 and seen.longest > 20


# From the command line

MODULE = """
import numpy as np

from spec_lab.core.request import Request
from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, masks_by_forking, full_mask
from spec_lab.core.options import whole


class State(ConstraintState):
    def __init__(self, vocabulary):
        self.words = full_mask(vocabulary)

    def fork(self):
        return self

    def advance(self, token): ...

    def mask(self):
        return self.words


class Mine(Constraint):
    name = "mine"

    def __init__(self, vocabulary, every=0, refuses=(), breaks=False):
        self.vocabulary, self.every, self.refuses, self.breaks = vocabulary.size, every, refuses, breaks
        self.count = 0

    def start(self, request):
        if request.id in self.refuses:
            raise ConstraintError(f"request '{request.name}': refused")
        return State(self.vocabulary)

    def masks(self, states, shape, token):
        if self.breaks:
            raise KeyError("lost")
        masks = masks_by_forking(states, shape, token, self.vocabulary)
        for row in range(shape.rows):
            self.count += 1
            if self.every and masks.legal[row] and self.count % self.every == 0:
                masks.bits[row, 0] &= np.uint32(0xFFFFFFF7)
        return masks
"""
SHORT = [
    "+experiment=certify",
    "proposer=ngram",
    "prompts.limit=2",
    "max_new_tokens=8",
    "task.samples=500",
    "output_dir=here",
]
MINE = ["constraint=controller", "constraint.make=my_masks.Mine", "task.tokens=0"]


@pytest.fixture
def mine(flat_cli, tmp_path, monkeypatch):
    """``certify`` with a constraint of the user: (exit code, stdout, stderr), and the certificate."""
    (tmp_path / "my_masks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    certificate = tmp_path / "here" / "certificate.json"

    def call(*options):
        outputs = flat_cli(*SHORT, *options)
        return *outputs, json.loads(certificate.read_text()) if certificate.exists() else None

    return call


@pytest.mark.nightly
def test_wrong_masks_fail_with_the_first_path_as_tokens_and_text(mine):
    code, output, errors, report = mine(*MINE, "task.mask_rows=2000", "constraint.options={every: 500}")
    assert code == 1, errors
    assert report["complete"] is True and report["certified"] is False
    masks = report["constraint"]["masks"]
    assert masks["different"] >= 1 and masks["first"]["missing"] == [3]
    assert isinstance(masks["first"]["text"], str) and isinstance(masks["first"]["committed"], list)
    assert any("masks differ" in why for why in report["failed"])
    assert [pair["certified"] for pair in report["pairs"]] == [None]
    assert "FAILS: constraint 'mine'" in output and "masks are wrong" in output


@pytest.mark.nightly
def test_prompts_that_a_constraint_refuses_are_counted_and_left_out(mine):
    code, output, errors, report = mine(*MINE, "task.mask_rows=400", "constraint.options={refuses: [1]}")
    assert code == 0, errors
    masks = report["constraint"]["masks"]
    assert masks["rows"] >= 400
    assert masks["refused_prompts"] == 1 and masks["refusal"].endswith(": refused")
    assert "The constraint refuses 1 of the prompts: " in output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*MINE, "task.mask_rows=-1"], "task.mask_rows must be a whole number of 0 or more, not -1"),
        ([*MINE, "constraint.options={refuses: [0, 1]}"], "constraint 'mine' refuses every prompt"),
        ([*MINE, "constraint.options={breaks: true}"], "constraint 'mine' raised KeyError: 'lost' ("),
    ],
)
@pytest.mark.one_in(3)
def test_what_cannot_be_compared_is_refused_and_leaves_no_folder(mine, tmp_path, options, message):
    code, _, errors, report = mine(*options)
    assert code == 1 and report is None
    assert message in errors and "Traceback" not in errors
    assert not (tmp_path / "here").exists()
