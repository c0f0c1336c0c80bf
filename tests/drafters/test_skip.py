"""Skipped sublayers: stated distributions, the search, what is left in the KV cache after any history, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.proposer import Requires
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import SkipSearch, Try, expected_improvement, parse_sublayers, write_sublayers
from spec_lab.models.support import Unsupported
from spec_lab.propose import Null
from spec_lab.propose.best_first import Budget
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_draft_pass import CausalDraftPass
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.kv_cache import Cells
from spec_lab.runners.layer_ranges import _Zero
from spec_lab.verify import Token
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
    compare_stated,
    decode,
    emitted,
    fork_of,
    plain_greedy,
    plain_logits,
    requests,
)
from tests.tiny import tiny_target

LAYERS = 4
PLANS = {
    "chain": TreePlan(parse("1x1x1")),
    "tree": TreePlan(parse("2x2x1"), "deterministic"),
    "sampled tree": TreePlan(parse("2x1x1"), "without_replacement", 1.0),
    "best first": TreePlan(drawn="deterministic", budget=Budget(6, 2, 3, 2)),
}
INNER = tuple(Sublayer(kind, layer) for layer in (1, 2) for kind in ("attn", "mlp"))
SETS = {
    "attention": "attn 1 2",
    "whole layer": "attn 1 mlp 1",
    "mixed": "attn 2 mlp 1 3",
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=LAYERS)


def skip(target, plan="chain", skipped="mixed", scope="request", **search):
    chosen = SkipSearch(INNER, 0.5, **{"tries": 4, "every": 2, "window": 4} | search)
    if skipped is not None:
        chosen = parse_sublayers(SETS[skipped])
    return Skip(target.lm, PLANS[plan] if isinstance(plan, str) else plan, chosen, scope)


# Tokens and distributions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [*SETS, None])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, plan, skipped):
    group, steps = decode(target, skip(target, plan, skipped), requests())
    assert emitted(group) == truth
    assert not target.lm.cells.references.any()
    assert sum(step.draft.shape.nodes for step in steps) > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "gemma", "phi", "cohere"])
def test_other_families_do_as_well(family):
    target = tiny_target(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4})
    wanted = [plain_greedy(target.lm.model, prompt, 8) for prompt in PROMPTS]
    assert emitted(decode(target, skip(target, "tree"), requests(new=8))[0]) == wanted


def test_stated_distributions_follow_the_target_s_cache(target):
    """The past of all layers, then the draft without its sublayers: each row by a pass of its own."""
    proposer = skip(target, TreePlan(parse("2x1x1"), "iid"))
    proposer.lm = target.lm
    oracle = CausalLM(target.lm.model)
    timed = oracle.clock.phase("propose_forward")

    def expected(text, path):
        kv = oracle.open()
        try:
            past = max(0, expected.computed[tuple(text)])
            if past:
                oracle.forward([kv], [text[:past]], empty(1))
            draft_pass = oracle.draft_pass(Route(skipped=proposer.skipped))
            return draft_pass.forward([kv], [[*text[past:], *path]], timed).logits[0]
        finally:
            kv.close()

    expected.computed = {}
    inner = proposer.propose

    def propose(batch):
        expected.computed |= {tuple(sequence.tokens): len(sequence.kv) for sequence in batch.sequences}
        return inner(batch)

    proposer.propose = propose
    compared, rejections = compare_stated(target, proposer, requests(WARM, 12), expected, atol=1e-10)
    assert compared > 20 and rejections > 2


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.parametrize("skipped", ["mixed", None])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, skipped, sampling):
    wanted = requests(sampling, new=14)
    together = emitted(decode(target, skip(target, "sampled tree", skipped), wanted)[0])
    alone = [emitted(decode(target, skip(target, "sampled tree", skipped), [request])[0])[0] for request in wanted]
    assert together == alone


def without_finite_logits(target):
    """Layer 1 returns NaN where its attention is skipped."""
    layer = target.lm.model.model.layers[1]
    layer.register_forward_hook(
        lambda module, _, out: out * float("nan") if isinstance(module.self_attn, _Zero) else out
    )


def finite_cells(target):
    spans = [span for layer in target.lm.cells.views for store in layer for span in store]
    return all(torch.isfinite(span).all() for span in spans)


@pytest.mark.parametrize("sampling", [COLD, WARM])
@pytest.mark.parametrize("plan", ["chain", "best first"])
def test_a_draft_without_finite_logits_is_none(plan, sampling):
    target = tiny_target(num_hidden_layers=LAYERS)
    wanted = emitted(decode(target, Null(), requests(sampling, 8))[0])
    without_finite_logits(target)
    group, steps = decode(target, skip(target, plan, "attention"), requests(sampling, 8))
    assert not group.errors and finite_cells(target) and sum(step.draft.shape.nodes for step in steps) == 0
    assert emitted(group) == wanted if sampling is COLD else all(len(text) == 8 for text in emitted(group))
    assert not target.lm.cells.references.any()


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [COLD, WARM])
@pytest.mark.parametrize("plan", ["chain", "sampled tree", "best first"])
def test_nothing_is_drafted_below_a_row_without_finite_logits(monkeypatch, plan, sampling):
    """The rows above it keep what was drawn from their distributions."""
    target = tiny_target(num_hidden_layers=LAYERS)
    inner = CausalDraftPass.extend
    monkeypatch.setattr(
        CausalDraftPass, "extend", lambda *args: (output := inner(*args))._replace(logits=output.logits * float("nan"))
    )
    group, steps = decode(target, skip(target, plan), requests(sampling, 8))
    assert not group.errors and finite_cells(target)
    assert {int(step.draft.shape.depth.max(initial=0)) for step in steps[:3]} == {1}


def test_a_set_without_finite_logits_scores_nothing_and_leaves_nothing():
    target = tiny_target(num_hidden_layers=LAYERS)
    without_finite_logits(target)
    proposer = skip(target, "chain", None, window=6)
    batch = batch_of(target, requests(prompts=[(*PROMPTS[2], *PROMPTS[0])]), proposer)
    (sequence,) = batch.sequences
    target.lm.forward([sequence.kv], [sequence.tokens[:-1]], empty(1))
    assert proposer._try(sequence, frozenset({INNER[0]}), len(sequence.tokens), batch).score == 0
    assert finite_cells(target)
    sequence.kv.close()
    assert not target.lm.cells.references.any()


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_window_beyond_a_chunk_is_scored_in_parts(chunk):
    target, other = tiny_target(num_hidden_layers=LAYERS), tiny_target(num_hidden_layers=LAYERS, chunk=chunk)
    scores = []
    for each_target in (target, other):
        proposer = skip(each_target, "chain", None, window=11)
        batch = batch_of(each_target, requests(prompts=[(*PROMPTS[2], *PROMPTS[0])]), proposer)
        (sequence,) = batch.sequences
        each_target.lm.forward([sequence.kv], [sequence.tokens[:-1]], empty(1))
        timed = batch.clock.phase("propose_forward")
        one_pass, twin = each_target.lm.draft_pass(Route(skipped=frozenset(INNER[:1]))), sequence.kv.fork()
        twin.truncate(3)
        scores.append(proposer._logits(one_pass, twin, sequence.tokens[3:-1], timed))
        one_pass.drop()
        twin.close()
        proposer._try(sequence, frozenset(INNER[:1]), len(sequence.tokens), batch)
        sequence.kv.close()
        assert not each_target.lm.cells.references.any()
    torch.testing.assert_close(*scores, rtol=0, atol=1e-10)


def test_a_try_that_fails_leaves_no_fork(target, monkeypatch):
    proposer = skip(target, "chain", None)
    batch = batch_of(target, requests(), proposer)
    for sequence in batch.sequences:
        target.lm.forward([sequence.kv], [sequence.tokens[:-1]], empty(1))
    with monkeypatch.context() as patch:
        patch.setattr(target.lm, "draft_pass", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            proposer.propose(batch)
    for sequence in batch.sequences:
        sequence.kv.close()
    assert not target.lm.cells.references.any()


RERANKED = TreePlan(drawn="deterministic", budget=Budget(3, 3, 3, 3, rerank=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("plan", "skipped", "window"), [(RERANKED, "mixed", 4), ("chain", None, 18)])
def test_cells_in_use_stay_within_the_limit(target, truth, monkeypatch, plan, skipped, window):
    """A draft may use more cells than the forward that verifies it, and a try more than a draft."""
    proposer, used, take = skip(target, plan, skipped, window=window), [], Cells.take
    assert proposer.target_cells > proposer.nodes

    def counted(cells, *args):
        cells_taken = take(cells, *args)
        used.append(np.count_nonzero(cells.references))
        return cells_taken

    monkeypatch.setattr(Cells, "take", counted)
    most = max(len(request.tokens) for request in requests()) + 20 + proposer.target_cells
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)), limits=Limits(max_kv_tokens=most))
    for request in requests():
        engine.add(request)
    assert sum(1 for _ in engine) > 3 and emitted(engine) == truth
    assert max(used) <= most


# The search --------------------------------------------------------------------------------------------------------


def test_what_is_found_follows_from_the_text_alone(target):
    """Step by step, in one step, after a rewind, and in a fork."""
    proposer = skip(target, "chain", None, tries=8)
    text = [*PROMPTS[0], *plain_greedy(target.lm.model, PROMPTS[0], 16)]

    def follow(state_of, lengths):
        batch = batch_of(target, requests(prompts=PROMPTS[:1]), proposer)
        (sequence,) = batch.sequences
        if state_of is not None:
            sequence.state = state_of
        for length in lengths:
            sequence.tokens[:] = text[:length]
            target.lm.forward([sequence.kv], [sequence.pending[:-1]], empty(1)) if len(sequence.pending) > 1 else None
            proposer.propose(batch)
        tries = list(sequence.state.tries)
        sequence.kv.close()
        return sequence.state, tries

    steps = [len(PROMPTS[0]), *range(len(PROMPTS[0]) + 1, len(text) + 1)]
    state, slowly = follow(None, steps)
    _, at_once = follow(None, [len(text)])
    assert slowly == at_once
    assert len({attempt.skipped for attempt in slowly}) == len(slowly) == proposer.skipped.sets == 4  # each set once
    twin = proposer.fork(state)
    proposer.rewind(twin, 9)
    assert twin.tries == slowly[:2] and state.tries == slowly
    _, again = follow(twin, [len(text)])
    assert again == slowly
    assert not target.lm.cells.references.any()


def test_scores_are_agreements_with_the_text(target):
    proposer = skip(target, "chain", None, window=6)
    batch = batch_of(target, requests(prompts=[(*PROMPTS[2], *PROMPTS[0])]), proposer)
    (sequence,) = batch.sequences
    target.lm.forward([sequence.kv], [sequence.tokens[:-1]], empty(1))
    attempt = proposer._try(
        sequence, frozenset(), len(sequence.tokens), batch
    )  # nothing skipped: the target's own arg max
    greedy = [
        int(plain_logits(target.lm.model, sequence.tokens[:end]).argmax()) for end in range(1, len(sequence.tokens))
    ]
    assert attempt.score == np.mean([a == b for a, b in zip(greedy[-6:], sequence.tokens[-6:], strict=True)])
    twin = fork_of(sequence, proposer)
    twin.kv.close()
    sequence.kv.close()
    assert not target.lm.cells.references.any()


def test_a_search_ends_with_a_good_set_or_after_its_tries():
    search = SkipSearch(INNER, 0.5, tries=3, enough=0.9, every=4, window=6)
    assert search.ends(10, 9, []) == [] and search.ends(10, 21, []) == [10, 14, 18]
    assert search.ends(2, 6, []) == [] and search.ends(2, 12, []) == [7, 11]  # a score rests on the whole window
    assert not search.due(6, 0) and search.due(7, 0) and not search.due(10, 7) and search.due(11, 7)
    done = [Try(search.candidate(()), 0.5, 10)]
    assert search.ends(10, 18, done) == [14, 18] and not search.over(done)
    assert search.over([*done, replace(done[0], score=0.9)]) and search.over(done * 3)
    assert search.ends(10, 50, [replace(done[0], score=0.95)]) == []
    better = Try(frozenset({INNER[0], INNER[3]}), 0.7, 14)
    assert search.best([*done, better, replace(better, skipped=frozenset())]) == better.skipped


def test_every_set_is_scored_once():
    inner = tuple(Sublayer(kind, layer) for layer in range(1, 5) for kind in ("attn", "mlp"))
    search, done = SkipSearch(inner, 0.25, tries=64), []
    assert search.sets == 16
    while not search.over(done):
        done.append(Try(search.candidate(done), 0.5, len(done)))
    assert len({attempt.skipped for attempt in done}) == len(done) == 16


def test_candidates_keep_the_ratio_and_repeat():
    inner = tuple(Sublayer(kind, layer) for layer in range(1, 11) for kind in ("attn", "mlp"))
    search, done = SkipSearch(inner, 0.45), []
    generator = np.random.default_rng(0)
    for number in range(12):
        chosen = search.candidate(done)
        assert chosen == search.candidate(done) and chosen <= set(inner)
        for kind in ("attn", "mlp"):
            assert sum(sublayer.kind == kind for sublayer in chosen) == 4  # round(4.5)
        done.append(Try(chosen, float(generator.random()), number))
    assert len({attempt.skipped for attempt in done}) == 12


def test_the_search_finds_which_sublayers_matter():
    """Each bad sublayer costs agreement: the Gaussian process beats the random candidates' average."""
    inner = tuple(Sublayer(kind, layer) for layer in range(1, 9) for kind in ("attn", "mlp"))
    search = SkipSearch(inner, 0.5, enough=1.0)
    generator = np.random.default_rng(1)
    cost = {sublayer: float(generator.random()) / 8 for sublayer in inner}
    done = []
    for number in range(40):
        skipped = search.candidate(done)
        done.append(Try(skipped, 1 - sum(cost[sublayer] for sublayer in skipped), number))
    chosen = [attempt.score for number, attempt in enumerate(done) if number >= 15 and number % 5 == 0]
    random = [attempt.score for number, attempt in enumerate(done) if number % 5]
    assert np.mean(chosen) > np.mean(random) + np.std(random) / 2


def test_expected_improvement_prefers_what_resembles_the_best():
    known = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=bool)
    pool = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], dtype=bool)
    gain = expected_improvement(known, np.array([0.9, 0.1]), pool)
    assert gain[0] > gain[1] > 0
    flat = expected_improvement(known, np.array([0.5, 0.5]), pool)
    np.testing.assert_allclose(flat[0], flat[1])


# Loading -----------------------------------------------------------------------------------------------------------


def test_options_are_checked(target):
    proposer = Skip.load(target, depth=3)
    assert proposer.requires == Requires(abilities=frozenset({"layer_ranges"}))
    assert proposer.facts["skipped"] == "searched" and proposer.facts["scope"] == "run"
    assert set(proposer.skipped.sublayers) == set(INNER)
    assert proposer.shared_store and not Skip.load(target, scope="request", depth=3).shared_store
    fixed = Skip.load(target, "attn 1 mlp 2", depth=3)
    assert fixed.facts["skipped"] == "attn 1 mlp 2" and not fixed.shared_store
    for options, why in (
        ({"skipped": "attn 9"}, "cannot skip attn 9; it can skip attn 0 1 2 3 mlp 0 1 2 3"),
        ({"skipped": "attn 0 1 2 3 mlp 0 1 2 3"}, "must leave some"),
        ({"ratio": 0.0}, "ratio must lie between"),
        ({"ratio": 1}, "ratio must lie between"),
        ({"tries": 0}, "tries"),
        ({"every": 0}, "every"),
        ({"window": "x"}, "window"),
        ({"enough": 2}, "enough"),
        ({"scope": "all"}, "scope"),
    ):
        with pytest.raises(ValueError, match=why):
            Skip.load(target, depth=3, **options)
    with pytest.raises(ValueError, match="finds no sublayer"):
        Skip.load(tiny_target(num_hidden_layers=2), depth=3)
    with pytest.raises(ValueError, match="cannot skip mlp 1; it can skip attn 0 1 2"):
        Skip.load(tiny_target("opt", num_hidden_layers=3), "mlp 1", depth=3)


def test_sublayers_that_cannot_be_found_are_refused(monkeypatch):
    target = tiny_target(num_hidden_layers=LAYERS)
    for layer in target.lm.model.model.layers:
        layer.register_forward_hook(lambda *_: None)
    monkeypatch.setattr("spec_lab.runners.layer_ranges._probe", lambda *_: {})
    with pytest.raises(Unsupported, match="do not return hidden states"):
        Skip.load(target, depth=3)


def test_sublayers_are_read_and_written():
    sublayers = parse_sublayers("attn 2 3, mlp 4")
    assert sublayers == {Sublayer("attn", 2), Sublayer("attn", 3), Sublayer("mlp", 4)}
    assert write_sublayers(sublayers) == "attn 2 3 mlp 4"


@pytest.mark.parametrize("wrong", ["", "attn", "2 3", "attn 2 x", "attn -1", "mlp 1.5", "ffn 2", "attn ²"])
def test_what_names_no_sublayers_is_refused(wrong):
    with pytest.raises(ValueError, match="skipped must name sublayers"):
        parse_sublayers(wrong)


def test_a_layer_that_runs_only_as_a_whole_is_refused():
    """Its MLP is read by the layer's own code."""
    target = tiny_target(num_hidden_layers=LAYERS)
    for layer in target.lm.model.model.layers:
        layer.register_forward_pre_hook(lambda module, _: (module.mlp.down_proj, None)[1])
    with pytest.raises(Unsupported, match="'tiny-llama' cannot skip sublayers .AttributeError"):
        Skip.load(target, depth=3)
