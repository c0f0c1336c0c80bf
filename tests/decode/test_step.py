"""Steps: every proposer emits the target's tokens, errors are named and free every cell, batches change no token."""

import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.faults import PartError
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Null
from spec_lab.verify import Match, Token, Traversal, Verifier
from tests.decode.foretold import NEW, Foretold
from tests.propose.lab import PROMPTS, WARM, decode, emitted, requests
from tests.tiny import CONTEXT, VOCABULARY, tiny_target


def forest_of(tokens):
    """The same chain below each of three roots, with these tokens."""
    return Draft(forest((chain(len(tokens) // 3),) * 3), torch.tensor(tokens))


def test_the_null_proposer_is_plain_greedy_decoding(target, truth):
    group, steps = decode(target, Null(), requests())
    assert emitted(group) == truth
    assert [s.finish for s in group.sequences] == ["length"] * 3
    assert len(steps) == NEW


@pytest.mark.parametrize("verifier", [Token(), Match()], ids=lambda v: v.name)
def test_speculative_greedy_equals_autoregressive_greedy(target, truth, verifier):
    group, steps = decode(target, Foretold(truth), requests(), verifier)
    assert emitted(group) == truth
    assert len(steps) < NEW - 4


@pytest.mark.parametrize("verifier", [Token(), Match(), Traversal()], ids=lambda v: v.name)
def test_following_the_arg_max_gives_the_rows_of_the_whole_verdict(target, truth, verifier):
    class Verdicts(Verifier):
        """The same verifier, which does not declare that it follows the arg max."""

        name, accepts, lossless = verifier.name, verifier.accepts, True

        def __call__(self, draft, p):
            calls.append(draft.shape.nodes)
            return verifier(draft, p)

    def rows(rule):
        group, steps = decode(target, Foretold(truth), requests(), rule)
        return emitted(group), [(info.expected.tolist(), info.empty.tolist(), info.rows()) for info in steps]

    calls = []
    assert rows(verifier) == rows(Verdicts())
    assert len(calls) > 2


def test_a_perfect_draft_is_fully_accepted(target, truth):
    _, steps = decode(target, Foretold(truth, spoil=0.0), requests())
    assert [len(c.path) for c in steps[0].committed] == [3, 3, 3]
    assert steps[0].expected.tolist() == [3.0, 3.0, 3.0]
    assert len(steps) == NEW // 4


def test_a_verifier_that_does_not_support_the_draft_is_refused_at_once(target, truth):
    class Sampled(Token):
        accepts = frozenset({"iid"})

    refused = "verifier 'token' .*iid; proposer 'foretold' .*'deterministic'"
    with pytest.raises(ValueError, match=refused):
        fixed_group(Arm(target, Foretold(truth), Sampled(), CounterDraws(0)), requests())


# Batches


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_requests_of_a_batch_do_not_change_a_request_s_tokens(target, truth, temperature):
    wanted = requests(Sampling(temperature=temperature))
    together, _ = decode(target, Foretold(truth), wanted)
    alone = [emitted(decode(target, Foretold(truth), [request])[0])[0] for request in wanted]
    assert emitted(together) == alone


# Refused requests


@pytest.mark.parametrize(
    ("draft", "refused"),
    [
        (None, "Draft.*NoneType"),
        (empty(2), "2 trees .*3 sequences"),
        (forest_of([VOCABULARY, 0, 0]), rf"token {VOCABULARY}\b"),
        (forest_of([-1, 0, 0]), "token -1"),
        (forest_of(range(9)), "3 rows .*at most 2"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_with_its_proposer(target, truth, draft, refused):
    proposer = Foretold(truth, nodes=2)
    proposer.propose = lambda batch: draft
    with pytest.raises(PartError, match=f"proposer 'foretold' .*{refused}"):
        decode(target, proposer, requests())
    assert not target.lm.cells.references.any()


@pytest.mark.parametrize("token", [VOCABULARY, -1, 10**6])
def test_a_token_id_that_the_target_does_not_have_is_refused_by_name(target, token):
    with pytest.raises(ValueError, match=f"prompt 'p0' .*token id {token}.* {VOCABULARY}"):
        decode(target, Null(), requests(prompts=((1, token, 2),)))


def test_a_prompt_that_fills_the_context_is_refused_by_name(target):
    with pytest.raises(ValueError, match=rf"prompt 'p0' .*{CONTEXT} tokens.*\b{CONTEXT}\b"):
        fixed_group(Arm(target, Null(), Token(), CounterDraws(0)), requests(prompts=((1,) * CONTEXT,)))


# Cells


@pytest.mark.parametrize("ending", ["finished", "abandoned", "failed"])
def test_every_cell_is_freed(target, truth, ending):
    class Failing(Foretold):
        def propose(self, batch):
            if batch.sequences[0].step == 2:
                raise RuntimeError("the proposer broke")
            return super().propose(batch)

    proposer = (Failing if ending == "failed" else Foretold)(truth)
    steps = iter(fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), requests()))
    next(steps)
    assert target.lm.cells.references.any()
    if ending == "failed":
        with pytest.raises(
            ValueError, match=r"proposer 'foretold' raised RuntimeError: the proposer broke \(.*:\d+, in"
        ):
            list(steps)
    elif ending == "finished":
        list(steps)
    else:
        steps.close()
    assert not target.lm.cells.references.any()
    assert sorted(proposer.closed) == sorted(proposer.opened) == [0, 1, 2]
    streams = target.lm.cells.streams
    decode(target, Null(), requests())
    assert target.lm.cells.streams == streams, "the next group has the cells that this one had"


@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["cold", "warm"])
def test_nan_logits_end_only_their_request_and_are_named(truth, attention, sampling):
    target = tiny_target(attention=attention)
    healthy, _ = decode(target, Null(), requests(sampling)[::2])
    well = emitted(healthy)
    poison = next(t for t in range(VOCABULARY) if all(t not in text for text in (*PROMPTS, *well)))
    with torch.no_grad():
        target.lm.model.model.embed_tokens.weight[poison] = float("nan")
        target.lm.model.lm_head.weight.data = target.lm.model.lm_head.weight.data.clone().nan_to_num()
    sick = (poison, *[7] * 40)
    group, _ = decode(target, Null(), requests(sampling, prompts=(PROMPTS[0], sick, PROMPTS[2])))
    if attention == "per_sequence":
        assert [s.finish for s in group.sequences] == ["length", "nan", "length"]
        assert emitted(group) == [well[0], [], well[1]]
        assert list(group.errors) == [group.sequences[1]]
    else:  # under the dense mask one NaN reaches the whole batch
        assert [s.finish for s in group.sequences] == ["nan"] * 3
        assert list(group.errors) == group.sequences
    error = group.errors[group.sequences[1]]
    assert "step 0" in error and "NaN" in error
    later, _ = decode(target, Null(), requests(sampling, prompts=(PROMPTS[0], PROMPTS[1], PROMPTS[2])))
    assert emitted(later)[::2] == well, "cells that a shorter owner does not overwrite must not leak into it"
    assert {s.finish for s in later.sequences} == {"length"}


# Time


def test_a_step_names_its_phases_and_their_time_adds_up(target, truth):
    _, steps = decode(target, Foretold(truth), requests())
    seconds = steps[1].seconds()
    phases = [seconds[name] for name in ("propose", "target", "probabilities", "verify", "commit")]
    assert seconds["mask_wait"] == 0, "nothing is constrained"
    assert min(phases) > 0 and 0.5 * seconds["whole"] < sum(phases) <= seconds["whole"] * (1 + 1e-9)
    assert 0 < seconds["target_forward"] <= seconds["target"]
    assert [r.prefill for r in steps][:2] == [[True] * 3, [False] * 3]
