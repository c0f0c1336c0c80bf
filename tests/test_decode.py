"""The loop: any proposer gives the target's tokens, cuts fall where they should, and batch mates do not matter."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from spec_lab.batch import Request
from spec_lab.cells import SpanFull
from spec_lab.decode import Group, history
from spec_lab.draft import Draft, chain, empty, forest, tree
from spec_lab.law import CounterDraws, Sampling
from spec_lab.propose import Null
from spec_lab.verify import Match, Token
from tests.tiny import CONTEXT, VOCABULARY, tiny_target

TREE = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
PROMPTS = ((3, 14, 15, 9, 26, 5), (2, 7, 18), (31, 41, 5, 9, 2, 6, 5, 35, 8))


@dataclass
class Foretold:
    """Drafts what it was told will come, spoilt at random; its own draws depend on no batch mate."""

    future: dict[int, list[int]]
    spoil: float = 0.3
    name: str = "foretold"
    drawn: str = "point"
    nodes: int = TREE.nodes
    wants_hidden: bool = False
    closed: list = field(default_factory=list)

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            noise = np.random.default_rng([sequence.request.id, sequence.round])
            coming = self.future[sequence.request.id][len(sequence.emitted) :] + [0, 0, 0]
            right = {1: coming[0], 3: coming[1], 6: coming[2]}
            for row in range(1, TREE.rows):
                wrong = int(noise.integers(VOCABULARY))
                tokens.append(right[row] if row in right and noise.random() > self.spoil else wrong)
        return Draft(forest((TREE,) * len(batch.sequences)), torch.tensor(tokens))

    def close(self, sequence):
        self.closed.append(sequence.request.id)


GREEDY = Sampling()


def requests(sampling=GREEDY, new=24, stop=frozenset(), prompts=PROMPTS, first=0):
    return [Request(first + i, f"p{first + i}", p, sampling, new, stop) for i, p in enumerate(prompts)]


def run(target, proposer, wanted, verifier=None, seed=0):
    group = Group(target, proposer, verifier or Token(), wanted, CounterDraws(seed))
    rounds = list(group)
    return group, rounds


def emitted(group):
    return {s.request.id: s.emitted for s in group.sequences}


def plain_greedy(target, prompt, count):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = target.lm.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def truth(target):
    return {i: plain_greedy(target, prompt, 24) for i, prompt in enumerate(PROMPTS)}


def test_the_null_proposer_is_plain_greedy_decoding(target, truth):
    group, rounds = run(target, Null(), requests())
    assert emitted(group) == truth
    assert [s.finish for s in group.sequences] == ["length"] * 3
    assert len(rounds) == 24


@pytest.mark.parametrize("verifier", [Token(), Match()], ids=lambda v: v.name)
def test_speculative_greedy_equals_autoregressive_greedy(target, truth, verifier):
    group, rounds = run(target, Foretold(truth), requests(), verifier)
    assert emitted(group) == truth
    assert len(rounds) < 20


def test_a_perfect_draft_is_accepted_whole(target, truth):
    _, rounds = run(target, Foretold(truth, spoil=0.0), requests())
    assert [c.accepted for c in rounds[0].committed] == [3, 3, 3]
    assert rounds[0].expected.tolist() == [3.0, 3.0, 3.0]
    assert len(rounds) == 24 // 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_mates_do_not_matter(target, truth, temperature):
    sampling = Sampling(temperature=temperature)
    together, _ = run(target, Foretold(truth), requests(sampling))
    for one in requests(sampling):
        alone, _ = run(target, Foretold(truth), [one])
        assert emitted(alone)[one.id] == emitted(together)[one.id]


def test_seeds_and_requests_get_streams_of_their_own(target, truth):
    hot = Sampling(temperature=1.0)
    first, _ = run(target, Null(), requests(hot))
    again, _ = run(target, Null(), requests(hot))
    other, _ = run(target, Null(), requests(hot), seed=1)
    twins, _ = run(target, Null(), requests(hot, prompts=(PROMPTS[0], PROMPTS[0])))
    assert emitted(first) == emitted(again) != emitted(other)
    assert emitted(twins)[0] != emitted(twins)[1]


def test_requests_with_their_own_sampling_share_a_batch(target, truth):
    cold, hot = requests()[0], requests(Sampling(temperature=1.0, top_k=5))[1]
    mixed, _ = run(target, Foretold(truth), [cold, hot])
    alone, _ = run(target, Foretold(truth), [hot])
    assert emitted(mixed)[0] == truth[0]
    assert emitted(mixed)[1] == emitted(alone)[1]


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_ends_the_text_wherever_it_falls(target, truth, place):
    """Inside an accepted path, as the bonus, as the residual: the cut is at its first occurrence."""
    stop = truth[0][place]
    expected = truth[0][: truth[0].index(stop) + 1]
    for spoil in (0.0, 0.5, 1.0):
        group, rounds = run(target, Foretold(truth, spoil), requests(stop=frozenset({stop}))[:1])
        assert group.sequences[0].emitted == expected
        assert group.sequences[0].finish == "stop"
        last = rounds[-1].committed[0]
        assert last.emitted_kept <= last.emitted and last.accepted_kept <= last.accepted


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_the_length_limit_cuts_inside_an_accepted_path(target, truth, new):
    group, rounds = run(target, Foretold(truth, 0.0), requests(new=new))
    assert emitted(group) == {i: tokens[:new] for i, tokens in truth.items()}
    assert {s.finish for s in group.sequences} == {"length"}
    assert sum(c.emitted for c in rounds[-1].committed) == 12  # what verification emitted stays on record
    assert sum(c.emitted_kept for r in rounds for c in r.committed) == 3 * new


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_full_context_is_a_named_finish(family):
    """GPT-2 has no embedding beyond its context, so a draft that reached over it would fail."""
    target = tiny_target(family)
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, VOCABULARY, CONTEXT - 6))
    told = {0: plain_greedy(target, prompt, 6)}
    for proposer in (Null(), Foretold(told, 0.0), Foretold(told, 0.6)):
        group, _ = run(target, proposer, requests(new=50, prompts=(prompt,)))
        assert group.sequences[0].finish == "context"
        assert emitted(group) == told


def test_a_prompt_that_fills_the_context_is_refused_by_name(target):
    with pytest.raises(ValueError, match=f"prompt 'p0' has {CONTEXT} tokens; the context holds {CONTEXT}"):
        Group(target, Null(), Token(), requests(prompts=((1,) * CONTEXT,)), CounterDraws(0))


@pytest.mark.parametrize("attention", ["spans", "dense"])
def test_nan_logits_end_the_request_by_name_and_spare_the_others(truth, attention):
    target = tiny_target(attention=attention)
    spared = attention == "spans"  # under the dense mask one NaN reaches all that are computed with it
    poison = next(t for t in range(VOCABULARY) if all(t not in p for p in PROMPTS) and t not in truth[0] + truth[2])
    with torch.no_grad():
        target.lm.model.model.embed_tokens.weight[poison] = float("nan")
        target.lm.model.lm_head.weight.data = target.lm.model.lm_head.weight.data.clone().nan_to_num()
    sick = (PROMPTS[0], (4, poison, 7), PROMPTS[2])
    healthy, _ = run(target, Null(), requests(prompts=(PROMPTS[0], PROMPTS[2])))
    group, _ = run(target, Null(), requests(prompts=sick))
    assert [s.finish for s in group.sequences] == (["length", "nan", "length"] if spared else ["nan"] * 3)
    if spared:
        assert emitted(group)[0] == emitted(healthy)[0] and emitted(group)[2] == emitted(healthy)[1]
    assert emitted(group)[1] == []
    assert list(group.errors) == (["p1"] if spared else ["p0", "p1", "p2"])
    assert "step 0" in group.errors["p1"] and "NaN" in group.errors["p1"]
    later, _ = run(target, Null(), requests(prompts=(PROMPTS[0], PROMPTS[0], PROMPTS[2])))
    assert emitted(later)[2] == emitted(healthy)[1], "a poisoned span must not leak into its next owner"


def test_every_cell_comes_back_also_from_an_abandoned_group(target, truth):
    run(target, Foretold(truth), requests())
    assert not target.lm.cells.references.any()
    group = Group(target, Foretold(truth), Token(), requests(), CounterDraws(0))
    for round in group:
        if round.sequences[0].round > 2:
            break
    del round
    iter_closed = Group(target, proposer := Foretold(truth), Token(), requests(), CounterDraws(0))
    rounds = iter(iter_closed)
    next(rounds)
    rounds.close()
    assert sorted(proposer.closed) == [0, 1, 2]


def test_a_group_that_cannot_open_gives_back_what_it_opened():
    target = tiny_target()
    target.lm.cells.limit = 64
    long = tuple(range(1, 60))
    with pytest.raises(SpanFull):
        run(target, Null(), requests(prompts=(PROMPTS[1], long)))
    target.lm.cells.limit = None
    _, rounds = run(target, Null(), requests(prompts=(PROMPTS[1],)))
    assert target.lm.cells.spans == 1 and len(rounds) == 24


def test_a_repetition_penalty_sees_each_path_s_own_history(target):
    penalised = Sampling(repetition_penalty=1.7)
    alone, _ = run(target, Null(), requests(penalised))
    told = emitted(alone)
    group, rounds = run(target, Foretold(told), requests(penalised))
    assert emitted(group) == told
    assert len(rounds) < 20


def test_history_holds_prompt_and_path(target):
    batch = type("B", (), {})()
    batch.sequences = [type("S", (), {"tokens": [1, 2]})(), type("S", (), {"tokens": [3]})()]
    batch.target, batch.device = target, "cpu"
    draft = Draft(forest((chain(2), chain(1))), torch.tensor([7, 8, 9]))
    rows = [set(np.flatnonzero(row).tolist()) for row in history(batch, draft).numpy()]
    assert rows == [{1, 2}, {3}, {1, 2, 7}, {1, 2, 7, 8}, {3, 9}]


def test_an_empty_draft_is_autoregressive_decoding(target, truth):
    class Silent(Foretold):
        def propose(self, batch):
            return empty(len(batch.sequences))

    group, rounds = run(target, Silent(truth), requests())
    assert emitted(group) == truth and len(rounds) == 24


def test_rounds_name_their_phases_and_their_time_adds_up(target, truth):
    _, rounds = run(target, Foretold(truth), requests())
    seconds = rounds[1].seconds(target.lm.clock)
    phases = [seconds[name] for name in ("propose", "target", "law", "verify", "commit")]
    assert sum(phases) == pytest.approx(seconds["whole"])
    assert 0 < seconds["target_forward"] <= seconds["target"]
    assert [r.prefill for r in rounds][:2] == [[True] * 3, [False] * 3]
