"""The Branch protocol: drafts change the speed under a controller, never the output distribution."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import ANY, Branch, ControllerConstraint, Event
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.protocol import ConstraintError, pack
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Null
from spec_lab.results.writer import outcomes
from spec_lab.tasks.certify.exact import decoded
from spec_lab.tasks.certify.instances import Instance
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.narrow import FEW, TWO, V
from tests.constrain.scripted import ALONE, GO, SEVERAL, Scripted, after, at, oracle, text_after
from tests.constrain.toys import distance
from tests.propose.lab import PROMPTS, draft_model
from tests.tiny import VOCABULARY, tiny_target

SCRIPTS = [(name, script, *((TWO, 2) if "again" in name else (FEW, 3))) for name, script in ALONE.items()]
SCRIPTS += [(name, script, TWO, 2) for name, script in SEVERAL.items()]
WAYS = list(product((Token(), Traversal(), Match()), ("target", "both"), (False, True)))
TREES = (("2x1", "iid"), ("2x1", "without_replacement"), ("2x1", "deterministic"))


def constraint(script, vocabulary=V, **changes):
    return ControllerConstraint(lambda request: Scripted(script), vocabulary, "scripted", **changes)


def makes(script):
    return lambda request: Scripted(script)


@pytest.mark.one_in(15)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=[pytest.mark.nightly] if name == "three at the start" else [])
        for number, (name, *_) in enumerate(SCRIPTS)
    ],
)
def test_the_output_has_the_distribution_of_the_protocol_with_and_without_drafts(number):
    _, script, world, tokens = SCRIPTS[number]
    wanted = oracle(world, makes(script), tokens)
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-12)
    plans = [("1x1", Null(), number), ("1x1", "iid", number), (*TREES[number % 3], 5 * number + 2)]
    for tree, drawn, way in plans:
        verifier, placement, fast_forward = WAYS[way % len(WAYS)]
        applied = AppliedConstraint(constraint(script), placement, fast_forward=fast_forward)
        outputs = decoded(Instance(world, tree, tokens, applied=applied), drawn, verifier)
        assert distance(outputs, wanted) < 1e-12, (tree, drawn, verifier.name, placement, fast_forward)


@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("name", ["puts after what is sampled", "takes back, puts after what is sampled", "puts later"])
@pytest.mark.each_value
def test_forced_lists_use_no_random_choice_with_any_verifier(name, fast_forward, verifier):
    applied = AppliedConstraint(constraint(ALONE[name]), fast_forward=fast_forward)
    wanted = oracle(FEW, makes(ALONE[name]), 3)
    assert distance(decoded(Instance(FEW, "2x1", 3, applied=applied), "deterministic", verifier), wanted) < 1e-12


@pytest.mark.parametrize("drawn", ["iid", "deterministic"])
@pytest.mark.parametrize("name", ["takes back the token", "puts after what is sampled", "puts past the limit", "stops"])
def test_a_stop_token_ends_the_sequence_within_a_list_as_well(name, drawn):
    stop = frozenset({2})
    wanted = oracle(FEW, makes(ALONE[name]), 3, stop)
    assert any(finish == "stop" for output in wanted for _, finish in output)
    outputs = decoded(Instance(FEW, "1x1", 3, stop, applied=AppliedConstraint(constraint(ALONE[name]))), drawn, Token())
    assert distance(outputs, wanted) < 1e-12


# The decode loop -----------------------------------------------------------------------------------------------------

WARM = Sampling(1.0)


def play(target, script, proposer, prompts=(PROMPTS[0],), new=12, seed=0, **changes):
    """Decode a group under scripted controllers; the script may depend on the request."""
    bound = AppliedConstraint(ControllerConstraint(lambda r: Scripted(script(r)), VOCABULARY, "scripted", **changes))
    wanted = [Request(number, f"p{number}", prompt, WARM, new) for number, prompt in enumerate(prompts)]
    return fixed_group(Arm(target, proposer, Token(), CounterDraws(seed), bound), wanted)


def results(group):
    return [(s.request.name, s.lineage, s.emitted, s.finish) for s in group.sequences]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_forks_share_the_cells_of_their_past_and_no_cell_moves(target):
    cells = target.lm.cells
    group = play(target, lambda r: after(3, [Branch(), Branch(1), Branch()]), draft_model())
    before, shared = {}, 0
    for _ in group:
        live = [s for s in group.sequences if s.finish is None]
        if not live:
            break
        used = set()
        for sequence in live:
            for position, slot in enumerate(sequence.kv.slots.tolist()):
                key = cells.views[0][0][sequence.kv.stream][0, :, slot].clone()
                text = tuple(sequence.tokens[: position + 1])
                assert torch.equal(key, before.setdefault((slot, text), key))
                used.add(slot)
        if len(live) == 3:
            first = cells.references[live[0].kv.stream]
            past = len(PROMPTS[0])
            assert all(sequence.kv.slots[:past].tolist() == live[0].kv.slots[:past].tolist() for sequence in live)
            assert (first[live[0].kv.slots[:past]] == 3).all()
            assert len(used) == (first > 0).sum() < sum(len(sequence.kv) for sequence in live)
            shared += 1
    assert shared and len(group.sequences) == 3
    assert not cells.references.any()


def test_forks_at_the_start_compute_the_prompt_once(target):
    group = play(target, lambda r: at(0, [Branch(), Branch()]), Null())
    steps = list(group)
    assert [len(r.sequences) for r in steps[:2]] == [1, 2]
    assert [p for r in steps for p, is_prompt in zip(r.pending, r.prefill, strict=True) if is_prompt] == [
        len(PROMPTS[0])
    ]


@dataclass
class Alone:
    """Cannot be forked."""

    events: list = field(default_factory=list)

    def step(self, event):
        self.events.append(event)
        return [Branch(backtrack=1, allow=set(range(30)))] if len(self.events) == 4 else GO

    def fork(self):
        raise NotImplementedError("it holds a connection")


@pytest.mark.parametrize("supports_drafts", [False, True])
def test_a_controller_that_cannot_be_forked_has_the_same_distribution(target, supports_drafts):
    def decode(proposer):
        bound = AppliedConstraint(ControllerConstraint(lambda r: Alone(), V, supports_drafts=supports_drafts))
        return decoded(Instance(FEW, "1x1", 3, applied=bound), proposer, Token())

    assert distance(decode("iid"), decode(Null())) < 1e-12


def test_a_controller_that_cannot_be_forked_is_decoded_without_drafts(target):
    bound = AppliedConstraint(ControllerConstraint(lambda r: Alone(), VOCABULARY, supports_drafts=False))
    group = fixed_group(
        Arm(target, draft_model(), Token(), CounterDraws(0), bound), [Request(0, "p", PROMPTS[0], WARM, 9)]
    )
    assert all(done.draft.shape.nodes == 0 for done in group)
    assert not group.errors and len(group.sequences[0].emitted) == 9


def test_a_controller_that_cannot_be_forked_may_not_fork_its_sequence(target):
    class Forking(Alone):
        def step(self, event):
            return [Branch(), Branch()] if event.append else GO

    bound = AppliedConstraint(ControllerConstraint(lambda r: Forking(), VOCABULARY, "forking", supports_drafts=False))
    group = fixed_group(Arm(target, Null(), Token(), CounterDraws(0), bound), [Request(0, "p", PROMPTS[0], WARM, 9)])
    list(group)
    (error,) = group.errors.values()
    assert "controller 'forking' at Event(" in error
    assert "NotImplementedError: it holds a connection" in error


def test_the_committed_controller_sees_every_event_once_whatever_forks_saw(target):
    made = []

    def make(request):
        made.append(Scripted(lambda events: [Branch(int(len(events) == 4), ANY, ((5, 6, 7),))]))
        return made[-1]

    bound = AppliedConstraint(ControllerConstraint(make, VOCABULARY))
    group = fixed_group(
        Arm(target, draft_model("2x1x1", "without_replacement"), Token(), CounterDraws(2), bound),
        [Request(0, "p", PROMPTS[0], WARM, 20)],
    )
    drafted = sum(done.draft.shape.nodes for done in group)
    (events,) = [controller.events for controller in made]
    assert drafted > 20 and events[0] == Event()
    assert list(text_after(events))[:20] == group.sequences[0].emitted
    assert [event.backtrack for event in events].count(1) == 1


BAD = {
    "returns nothing": (at(3, None), "step must return a list of Branch, not None"),
    "is no branch": (at(2, [(0, "any", ())]), "step must return a list of Branch"),
    "names a token that is none": (at(2, [Branch(allow={3, 61})]), "token 61"),
    "takes back the prompt": (at(3, [Branch(4)]), "removes 4 tokens, but 3 have been emitted"),
    "takes back the prompt in a fork": (at(3, [Branch(), Branch(9)]), "removes 9 tokens, but 3 have been emitted"),
    "forks without end": (lambda events: [Branch(), Branch()], "made more than 256 forks of the request"),
    "puts nothing": (lambda events: [Branch(allow=None, ff=((),))] if len(events) == 3 else GO, "an empty list"),
    "allows a word": (at(1, [Branch(allow="all")]), "allow='all'"),
    "packs its mask badly": (at(1, [Branch(allow=pack(np.ones(100, dtype=bool)))]), "a packed mask is [2] uint32"),
    "divides by zero": (lambda events: GO if len(events) < 3 else 1 // 0, "ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("proposer", [Null(), draft_model("2x1")], ids=["alone", "drafted"])
@pytest.mark.parametrize("what", BAD)
@pytest.mark.each_value
def test_a_controller_that_raises_ends_only_its_own_request_and_is_named(target, what, proposer):
    script, message = BAD[what]
    new = 12 if "without end" in what else 8
    scripts = {"p0": after(2, [Branch(1)]), "p1": script, "p2": at(1, [Branch(), Branch()])}
    group = play(target, lambda r: scripts[r.name], proposer, PROMPTS, new)
    list(group)
    assert set(group.errors) == {sequence for sequence in group.sequences if sequence.finish == "stuck"}
    for sequence, error in group.errors.items():
        assert sequence.request.name == "p1" and message in error and error.startswith("request 'p1', step ")
    assert "stuck" in [s.finish for s in group.sequences if s.request.name == "p1"]
    mates = [result for result in results(group) if result[0] != "p1"]
    well = play(target, lambda r: scripts[r.name] if r.name != "p1" else at(0, []), proposer, PROMPTS, new)
    list(well)
    assert mates == [result for result in results(well) if result[0] != "p1"]
    assert not target.lm.cells.references.any()


def test_endless_backtracking_is_ended(target):
    group = play(target, lambda r: lambda events: [Branch(int(len(events) > 1))], draft_model(), new=4)
    list(group)
    (sequence,) = group.sequences
    assert sequence.finish == "runaway" and sequence.spent == 4 * 32 and not target.lm.cells.references.any()


def test_every_sequence_is_kept_unless_the_constraint_chooses(target):
    def group_of(**changes):
        group = play(target, lambda r: at(0, [Branch(), Branch(), Branch()]), Null(), new=5, **changes)
        list(group)
        return group

    assert [s.kept for s in group_of().sequences] == [True] * 3
    seen = []
    group = group_of(keep=lambda ended: seen.extend(ended) or [1], reads_logprobs=True)
    assert {s.lineage: s.kept for s in group.sequences} == {(): False, (0, 1): True, (0, 2): False}
    assert [sequence.lineage for sequence in seen] == [(), (0, 1), (0, 2)]
    assert all(len(sequence.logprobs) == len(sequence.tokens) == 5 and sequence.finish == "length" for sequence in seen)
    both = Combined(
        [ControllerConstraint(lambda r: Scripted(at(9, [])), V, keep=len, reads_logprobs=True), MinNewTokens(1, V)]
    )
    assert both.keep is len and both.reads_logprobs
    group = group_of(keep=lambda ended: [3])
    assert [s.kept for s in group.sequences] == [True] * 3 and list(group.errors) == group.sequences[:1]
    assert "there are sequences 0 to 2" in group.errors[group.sequences[0]]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_fork_that_fails_at_once_does_not_fail_the_sequence_it_came_from(target, at_start):
    def script(events):
        if events[-1].branch:
            raise LookupError("it broke")
        return [Branch(), Branch(0, None, ((5,),))] if len(events) == 3 - 2 * at_start else GO

    bound = AppliedConstraint(ControllerConstraint(lambda r: Scripted(script), VOCABULARY), fast_forward=True)
    group = fixed_group(Arm(target, Null(), Token(), CounterDraws(0), bound), [Request(0, "p", PROMPTS[0], WARM, 6)])
    list(group)
    first, fork = group.sequences
    assert (first.finish, fork.finish) == ("length", "stuck") and list(group.errors) == [fork]
    assert "LookupError: it broke" in group.errors[fork]


def test_every_fork_that_fails_has_an_error_of_its_own(target):
    def script(events):
        number = next((event.branch for event in reversed(events) if event.branch), 0)
        if len(events) == 5 + 2 * number:
            raise LookupError(f"branch {number}")
        return [Branch()] * 3 if len(events) == 2 else GO

    bound = AppliedConstraint(
        ControllerConstraint(lambda r: Scripted(script), VOCABULARY, keep=lambda ended: [len(ended)])
    )
    wanted = [Request(number, f"p{number}", PROMPTS[number], WARM, 12) for number in range(2)]
    group = fixed_group(Arm(target, Null(), Token(), CounterDraws(0), bound), wanted)
    infos = list(group)
    assert len(group.sequences) == 6 and set(group.errors) == set(group.sequences)
    for sequence, outcome in zip(group.sequences, outcomes(group.sequences, infos, group.errors), strict=True):
        branch = sequence.lineage[-1] if sequence.lineage else 0
        assert f"LookupError: branch {branch};" in outcome.error and outcome.error == group.errors[sequence]
        assert f"it ends with the {len(sequence.emitted)} tokens" in outcome.error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(allow=None), "exactly one list"),
        (dict(allow=None, ff=((1,), (2,))), "exactly one list"),
        (dict(ff=((1, 2), (1, 3))), "same token"),
        (dict(ff=((),)), "an empty list"),
        (dict(backtrack=-1), "backtrack -1"),
    ],
)
def test_an_invalid_branch_is_refused(fields, message):
    with pytest.raises(ConstraintError, match=message):
        Branch(**fields)
