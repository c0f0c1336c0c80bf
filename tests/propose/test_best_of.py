"""The best of several proposers: who drafts follows from scores and from what was accepted before."""

import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Observation, Proposer
from spec_lab.propose.best_of import RECOVERY, BestOf
from spec_lab.propose.ngram import Ngram
from tests.propose.lab import COLD, WARM, batch_of, decode, draft_model, emitted, requests


class Says(Proposer):
    """Drafts its token, and promises so many accepted ones, by the number of tokens of the text."""

    drawn, branches, name, nodes = "deterministic", False, "says", 1

    def __init__(self, token, promise):
        self.token, self.promise = token, promise

    def scores(self, batch):
        return [self.promise(len(sequence.tokens)) for sequence in batch.sequences]

    def propose(self, batch):
        return Draft(forest((chain(1),) * len(batch.sequences)), torch.full((len(batch.sequences),), self.token))


class Truth(Proposer):
    """Drafts what the target will emit, ``depth`` tokens of it, or something else."""

    drawn, branches, name = "deterministic", False, "truth"

    def __init__(self, truth, depth, right=True):
        self.truth, self.nodes, self.right = truth, depth, right

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            emitted_so_far = len(sequence.emitted)
            after = (self.truth[sequence.request.id] + [0] * self.nodes)[emitted_so_far:][: self.nodes]
            tokens += [token if self.right else (token + 1) % 50 for token in after]
        return Draft(forest((chain(self.nodes),) * len(batch.sequences)), torch.tensor(tokens))


def best_of(*parts, **options):
    return BestOf.load(None, {f"p{n}": part for n, part in enumerate(parts)}, **options)


def test_the_part_with_the_best_score_drafts_for_each_sequence(target):
    both = best_of(Says(1, lambda length: 2), Says(2, lambda length: length))
    batch = batch_of(target, requests(prompts=((5,), (6, 7, 8))), both)
    assert both.propose(batch).token.tolist() == [1, 2]
    dear = best_of(Says(1, lambda length: 2), Says(2, lambda length: length), costs={"p1": 1.0})
    assert dear.propose(batch_of(target, requests(prompts=((5,), (6, 7, 8))), dear)).token.tolist() == [1, 1]


def test_a_part_that_disappoints_is_left_for_one_that_is_accepted(target, truth):
    both = best_of(Truth(truth, 3, right=False), Truth(truth, 3), start=2.0, memory=0.5)
    group, steps = decode(target, both, requests())
    assert emitted(group) == truth
    accepted = [[len(done.path) for done in step.committed] for step in steps]
    assert accepted[0] == [0, 0, 0] and accepted[1] == accepted[2] == [3, 3, 3]


def test_a_fork_learns_by_itself(target):
    both = best_of(Says(1, lambda _: 0), Ngram(3, 2, 1))
    state = both.init(None)
    copy = both.fork(state)
    copy.own.accepted[1] = 9.0
    assert state.own.accepted == [2.0, 2.0]


@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["cold", "warm"])
def test_parts_that_sample_and_parts_that_do_not_take_turns_in_one_batch(target, truth, sampling):
    both = best_of(Says(1, lambda length: length % 3), draft_model("1x1"), start=1.0)
    group, steps = decode(target, both, requests(sampling))
    ways = [step.draft.ways for step in steps if step.draft.shape.nodes]
    if sampling is COLD:
        assert emitted(group) == truth
    assert {"iid", "deterministic"} in ways
    assert not both.proposers[1].lm.cells.references.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": {"heads": 1.0}}, "costs names heads, but the parts are p0, p1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        best_of(Ngram(3, 2, 1), Ngram(2, 2, 1), **options)
    with pytest.raises(ValueError, match="at least two"):
        best_of(Ngram(3, 2, 1))


class Sometimes(Says):
    """Drafts its token where the text has an even number of tokens, and has no scores."""

    def scores(self, batch):
        return None

    def propose(self, batch):
        sizes = [1 - len(sequence.tokens) % 2 for sequence in batch.sequences]
        return Draft(forest(tuple(chain(size) for size in sizes)), torch.full((sum(sizes),), self.token))


def test_where_a_part_drafts_nothing_the_next_one_does(target):
    both = best_of(Sometimes(1, None), Sometimes(2, None), Says(3, lambda _: 1.0))
    batch = batch_of(target, requests(prompts=((5,), (6, 7))), both)
    draft = both.propose(batch)
    assert dict(zip(draft.shape.root[2:].tolist(), draft.token.tolist(), strict=True)) == {0: 3, 1: 1}
    assert [sequence.state.own.chosen for sequence in batch.sequences] == [2, 0]


def test_a_part_that_never_drafts_does_not_keep_the_others_from_it(target, truth):
    both = best_of(Ngram(3, 60, 59), Truth(truth, 3))
    group, steps = decode(target, both, requests())
    assert emitted(group) == truth and all(step.draft.shape.nodes for step in steps[:2])


@pytest.mark.parametrize("costs", [0.3, "heads", [1]])
def test_costs_must_be_a_mapping(costs):
    with pytest.raises(ValueError, match="costs"):
        best_of(Says(1, None), Says(2, None), costs=costs)


def test_an_expectation_that_has_fallen_recovers_while_another_part_drafts(target):
    both = best_of(Sometimes(1, None), Says(3, lambda _: 0.0), memory=0.5)
    batch = batch_of(target, requests(prompts=((5,),)), both)
    (sequence,) = batch.sequences
    sequence.state.own.accepted[0] = 1.0
    assert both.propose(batch).token.tolist() == [3] and sequence.state.own.chosen == 1
    both.observe([Observation(sequence, 0, (5, 6), accepted=(0,))])
    assert sequence.state.own.accepted == [1.0 + RECOVERY, 1.5]


def test_a_draft_of_no_part_counts_as_none_accepted_for_the_first_that_was_asked(target):
    both = best_of(Sometimes(1, None), Sometimes(2, None), memory=0.5)
    batch = batch_of(target, requests(prompts=((5,),)), both)
    (sequence,) = batch.sequences
    assert not both.propose(batch).shape.nodes and sequence.state.own.chosen == 0
    both.observe([Observation(sequence, 0, (5, 6))])
    assert sequence.state.own.accepted == [1.0, 2.0]
