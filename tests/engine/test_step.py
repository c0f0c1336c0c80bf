"""Steps: every proposer emits the target's tokens, texts end where they should, other requests do not matter."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft, chain, empty, forest, tree
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.kv_cache import SpanFull
from spec_lab.engine.proposer import Lifecycle
from spec_lab.engine.rows import history
from spec_lab.propose import Null
from spec_lab.verify import Match, Token
from tests.propose.lab import (
    PROMPTS,
    WARM,
    decode,
    draft_model,
    emitted,
    path_tokens,
    plain_greedy,
    plain_probabilities,
    requests,
)
from tests.tiny import CONTEXT, VOCABULARY, tiny_target

TREE = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
NEW = 20


@dataclass
class Foretold(Lifecycle):
    """Drafts the future tokens, some of them replaced at random; other requests do not change its draft."""

    future: list[list[int]]  # of each request
    spoil: float = 0.3
    name: str = "foretold"
    drawn: str = "point"
    nodes: int = TREE.nodes
    opened: list = field(default_factory=list)
    closed: list = field(default_factory=list)

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            noise = np.random.default_rng([sequence.request.id, sequence.step])
            coming = self.future[sequence.request.id][len(sequence.emitted) :] + [0, 0, 0]
            right = {1: coming[0], 3: coming[1], 6: coming[2]}
            for row in range(1, TREE.rows):
                wrong = int(noise.integers(VOCABULARY))
                tokens.append(right[row] if row in right and noise.random() > self.spoil else wrong)
        return Draft(forest((TREE,) * len(batch.sequences)), torch.tensor(tokens))

    def init(self, request):
        self.opened.append(request.id)
        return request.id

    def close(self, state):
        self.closed.append(state)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def truth(target):
    return [plain_greedy(target.lm.model, prompt, NEW) for prompt in PROMPTS]


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


def test_a_perfect_draft_is_fully_accepted(target, truth):
    _, steps = decode(target, Foretold(truth, spoil=0.0), requests())
    assert [len(c.path) for c in steps[0].committed] == [3, 3, 3]
    assert steps[0].expected.tolist() == [3.0, 3.0, 3.0]
    assert len(steps) == NEW // 4


def test_an_empty_draft_is_autoregressive_decoding(target, truth):
    class Silent(Foretold):
        def propose(self, batch):
            return empty(len(batch.sequences))

    group, steps = decode(target, Silent(truth), requests())
    assert emitted(group) == truth and len(steps) == NEW


def test_a_verifier_that_does_not_support_the_draft_is_refused_at_once(target, truth):
    class Sampled(Token):
        accepts = frozenset({"iid"})

    refused = "verifier 'token' .*iid; proposer 'foretold' .*'point'"
    with pytest.raises(ValueError, match=refused):
        fixed_group(target, Foretold(truth), Sampled(), requests(), CounterDraws(0))


# Batches


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_requests_of_a_batch_do_not_change_a_request_s_tokens(target, truth, temperature):
    wanted = requests(Sampling(temperature=temperature))
    together, _ = decode(target, Foretold(truth), wanted)
    alone = [emitted(decode(target, Foretold(truth), [one])[0])[0] for one in wanted]
    assert emitted(together) == alone


def test_seeds_and_requests_get_streams_of_their_own(target):
    first, _ = decode(target, Null(), requests(WARM))
    again, _ = decode(target, Null(), requests(WARM))
    other, _ = decode(target, Null(), requests(WARM), seed=1)
    twins, _ = decode(target, Null(), requests(WARM, prompts=(PROMPTS[0], PROMPTS[0])))
    assert emitted(first) == emitted(again) != emitted(other)
    assert emitted(twins)[0] != emitted(twins)[1]


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=5), Sampling(1.0, repetition_penalty=1.5)])
def test_requests_with_their_own_sampling_share_a_batch(target, truth, sampling):
    cold, hot = requests()[0], requests(sampling)[1]
    mixed, _ = decode(target, Foretold(truth), [cold, hot])
    alone, _ = decode(target, Foretold(truth), [hot])
    assert emitted(mixed) == [truth[0], *emitted(alone)]


# Cuts


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_ends_the_text_wherever_it_falls(target, truth, place):
    """Inside an accepted path, as the bonus, as the residual: the cut is at its first occurrence."""
    stop = truth[0][place]
    expected = truth[0][: truth[0].index(stop) + 1]
    for spoil in (0.0, 0.5, 1.0):
        group, steps = decode(target, Foretold(truth, spoil), requests(stop=frozenset({stop}))[:1])
        assert group.sequences[0].emitted == expected
        assert group.sequences[0].finish == "stop"
        committed = [c for r in steps for c in r.committed]
        assert sum(c.count(kept=True) for c in committed) == len(expected)
        kept = [(c.count(accepted=True, kept=True), c.count(kept=True)) for c in committed]
        assert all(path == min(len(c.path), every) for c, (path, every) in zip(committed, kept, strict=True))
        assert all(c.count() == c.count(kept=True) == len(c.path) + 1 for c in committed[:-1]), "only the last is cut"


def test_a_stop_token_beyond_the_limit_is_ignored(target, truth):
    """Both in one accepted path: the limit comes first, so it is the finish reason."""
    new = next(n for n in (1, 2, 3) if truth[0][n] not in truth[0][:n])
    group, _ = decode(target, Foretold(truth, 0.0), requests(new=new, stop=frozenset({truth[0][new]}))[:1])
    assert (group.sequences[0].finish, emitted(group)) == ("length", [truth[0][:new]])


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_the_length_limit_cuts_inside_an_accepted_path(target, truth, new):
    group, steps = decode(target, Foretold(truth, 0.0), requests(new=new))
    assert emitted(group) == [tokens[:new] for tokens in truth]
    assert {s.finish for s in group.sequences} == {"length"}
    assert [c.count() for c in steps[-1].committed] == [4] * 3, "what verification emitted is recorded whole"
    left = (new - 1) % 4 + 1
    assert [(c.count(accepted=True, kept=True), c.count(kept=True)) for c in steps[-1].committed] == [
        (min(3, left), left)
    ] * 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_full_context_is_a_named_finish(family):
    """GPT-2 has no embedding beyond its context, so a longer draft would fail."""
    target = tiny_target(family)
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, VOCABULARY, CONTEXT - 6))
    told = [plain_greedy(target.lm.model, prompt, 6)]
    for proposer in (Null(), Foretold(told, 0.0), Foretold(told, 0.6)):
        group, steps = decode(target, proposer, requests(new=50, prompts=(prompt,)))
        assert group.sequences[0].finish == "context"
        assert emitted(group) == told
        if proposer.nodes:  # as many nodes as there are positions left
            depths = [int(r.draft.shape.depth.max()) for r in steps]
            assert depths == [min(3, CONTEXT - r.context[0]) for r in steps]


@pytest.mark.parametrize("token", [VOCABULARY, -1, 10**6])
def test_a_token_id_that_the_target_does_not_have_is_refused_by_name(target, token):
    with pytest.raises(ValueError, match=f"prompt 'p0' .*token id {token}.* {VOCABULARY}"):
        decode(target, Null(), requests(prompts=((1, token, 2),)))


def test_a_prompt_that_fills_the_context_is_refused_by_name(target):
    with pytest.raises(ValueError, match=rf"prompt 'p0' .*{CONTEXT} tokens.*\b{CONTEXT}\b"):
        fixed_group(target, Null(), Token(), requests(prompts=((1,) * CONTEXT,)), CounterDraws(0))


def test_requests_for_no_tokens_are_refused():
    with pytest.raises(ValueError, match="prompt 'p0' .*empty"):
        requests(prompts=((),))
    with pytest.raises(ValueError, match=r"max_new_tokens .* \(got 0\)"):
        requests(new=0)


# Cells


def test_between_steps_a_sequence_has_cells_for_all_but_its_last_token(target, truth):
    """Accepted nodes are not computed again, and cells of rejected ones are freed at once."""
    cells = target.lm.cells
    group = fixed_group(target, Foretold(truth, 0.5), Token(), requests(new=12), CounterDraws(0))
    for done in group:
        for sequence in (s for s in done.sequences if s.finish is None):
            assert len(sequence.kv) == len(sequence.tokens) - 1
            assert sorted(np.flatnonzero(cells.references[sequence.kv.span])) == sorted(sequence.kv.slots)
            assert sequence.tokens == [*sequence.request.tokens, *truth[sequence.request.id][: len(sequence.emitted)]]


@pytest.mark.parametrize("ending", ["finished", "abandoned", "failed"])
def test_every_cell_is_freed(target, truth, ending):
    class Failing(Foretold):
        def propose(self, batch):
            if batch.sequences[0].step == 2:
                raise RuntimeError("the proposer broke")
            return super().propose(batch)

    proposer = (Failing if ending == "failed" else Foretold)(truth)
    steps = iter(fixed_group(target, proposer, Token(), requests(), CounterDraws(0)))
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
    spans = target.lm.cells.spans
    decode(target, Null(), requests())
    assert target.lm.cells.spans == spans, "the next group lives where this one did"


def test_a_group_that_cannot_open_frees_what_it_opened():
    target = tiny_target()
    target.lm.cells.limit = 64
    long = tuple(range(1, 60))
    with pytest.raises(SpanFull):
        decode(target, Null(), requests(prompts=(PROMPTS[1], long)))
    target.lm.cells.limit = None
    _, steps = decode(target, Null(), requests(prompts=(PROMPTS[1],)))
    assert target.lm.cells.spans == 1 and len(steps) == NEW


@pytest.mark.parametrize("attention", ["spans", "dense"])
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
    if attention == "spans":
        assert [s.finish for s in group.sequences] == ["length", "nan", "length"]
        assert emitted(group) == [well[0], [], well[1]]
        assert list(group.errors) == ["p1"]
    else:  # under the dense mask one NaN reaches the whole batch
        assert [s.finish for s in group.sequences] == ["nan"] * 3
        assert list(group.errors) == ["p0", "p1", "p2"]
    assert "step 0" in group.errors["p1"] and "NaN" in group.errors["p1"]
    later, _ = decode(target, Null(), requests(sampling, prompts=(PROMPTS[0], PROMPTS[1], PROMPTS[2])))
    assert emitted(later)[::2] == well, "cells that a shorter owner does not overwrite must not leak into it"
    assert {s.finish for s in later.sequences} == {"length"}


# History and time


def test_a_repetition_penalty_sees_each_path_s_own_history(target):
    penalised = Sampling(repetition_penalty=1.7)
    told = emitted(decode(target, Null(), requests(penalised))[0])
    group, steps = decode(target, Foretold(told), requests(penalised))
    assert emitted(group) == told
    assert len(steps) < NEW - 4


def test_history_holds_prompt_and_path(target):
    sequences = [type("S", (), {"tokens": [1, 2]})(), type("S", (), {"tokens": [3]})()]
    draft = Draft(forest((chain(2), chain(1))), torch.tensor([7, 8, 9]))
    rows = [set(np.flatnonzero(row).tolist()) for row in history(sequences, draft, target).numpy()]
    assert rows == [{1, 2}, {3}, {1, 2, 7}, {1, 2, 7, 8}, {3, 9}]


def test_a_step_names_its_phases_and_their_time_adds_up(target, truth):
    _, steps = decode(target, Foretold(truth), requests())
    seconds = steps[1].seconds()
    phases = [seconds[name] for name in ("propose", "target", "probabilities", "verify", "commit")]
    assert seconds["mask_wait"] == 0, "nothing is constrained"
    assert min(phases) > 0 and 0.5 * seconds["whole"] < sum(phases) <= seconds["whole"] * (1 + 1e-9)
    assert 0 < seconds["target_forward"] <= seconds["target"]
    assert [r.prefill for r in steps][:2] == [[True] * 3, [False] * 3]


# Recorded drafts


@pytest.mark.parametrize("drawn", ["without", "point"])
def test_recorded_drafts_hold_the_probabilities_of_both_models_at_each_parent(target, drawn):
    proposer = draft_model("2x1", drawn)
    wanted = requests(WARM, new=6)
    engine = fixed_group(target, proposer, Token(), wanted, CounterDraws(0), record=True)
    steps = list(engine)
    texts = [list(request.tokens) for request in wanted]
    for info in steps:
        shape = info.draft.shape
        for row, sequence, rows in zip(info.rows(), info.sequences, shape.trees, strict=True):
            nodes = rows[1:]
            assert row["draft_tokens"] == info.draft.token[torch.from_numpy(nodes - shape.roots)].tolist()
            for place, node in enumerate(nodes.tolist()):
                above = [*texts[sequence.request.id], *path_tokens(info.draft, int(shape.parent[node - shape.roots]))]
                p, q = (plain_probabilities(model.lm.model, above, WARM) for model in (target, proposer))
                token = row["draft_tokens"][place]
                assert row["draft_p"][place] == pytest.approx(float(p[token]))
                assert row["draft_q"][place] == (None if drawn == "point" else pytest.approx(float(q[token])))
        for sequence, got in zip(info.sequences, info.committed, strict=True):
            texts[sequence.request.id] += [one.token for one in got.tokens if one.kept]
    assert sum(len(row["draft_tokens"]) for info in steps for row in info.rows()) > 20


def test_drafts_are_not_recorded_unless_asked_for(target):
    _, steps = decode(target, draft_model("2x1"), requests(WARM, new=4))
    assert all(info.recorded is None and "draft_p" not in row for info in steps for row in info.rows())
