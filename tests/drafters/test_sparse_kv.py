"""The target on a small KV cache: its stated distributions, its cells after any history, its work, and refusals."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import avg_pool1d
from transformers import DynamicCache

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.proposer import Requires
from spec_lab.drafters.sparse_kv import SparseKV
from spec_lab.drafters.triforce import TriForce
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose.best_first import Budget
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.quantized_kv import dequantized, quantized, row_bytes
from spec_lab.runners.sparse_kv import Selection
from spec_lab.verify import Token
from tests.propose.lab import (
    PROMPTS,
    WARM,
    cascade,
    compare_stated,
    decode,
    draft_model,
    emitted,
    plain_greedy,
    requests,
)
from tests.tiny import CONTEXT, tiny_model, tiny_target

STREAMING, SNAPKV = Selection("streaming_llm", 5, 2), Selection("snapkv", 5, window=2, kernel=3)
SELECTIONS = {"streaming_llm": STREAMING, "snapkv": SNAPKV}
PLANS = {
    "chain": TreePlan(parse("1x1x1")),
    "tree": TreePlan(parse("0 1 0.0 0.1 1.0 0.0.0"), "deterministic"),
    "sampled tree": TreePlan(parse("2x1x1"), "without_replacement", 1.0),
    "best first": TreePlan(drawn="deterministic", budget=Budget(6, 2, 3, 2)),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=3)


def sparse_kv(target, selection=STREAMING, plan="chain"):
    return SparseKV(target.lm.sparse(selection), target.context, PLANS[plan])


@pytest.fixture(scope="module")
def plain():
    """The target's model with attention of transformers, whose tokens ``[n]`` it computes with a cache."""
    model = tiny_model(num_hidden_layers=3)

    def run(tokens, attention="sdpa", cache=None, **options):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens]), use_cache=True, **{cache_argument(model): cache}, **options)

    return run


def chosen(selection, attention, prompt, length, heads):
    """For each head of keys and values the positions of a small cache of ``length`` positions, ``[heads, n]``."""
    if selection.method == "streaming_llm":
        first = min(length, selection.sinks)
        last = range(max(first, length - selection.budget + selection.sinks), length)
        return torch.tensor([[*range(first), *last]] * heads)
    if prompt <= selection.budget:
        return torch.arange(length).expand(heads, -1)
    before = prompt - selection.window
    scores = avg_pool1d(attention[:, before:prompt, :before].sum(1), selection.kernel, 1, selection.kernel // 2)
    best = scores.unflatten(0, (heads, -1)).sum(1).topk(selection.budget - selection.window).indices.sort().values
    return torch.cat([best, torch.arange(before, length).expand(heads, -1)], 1)


def expected(plain, selection, text, path):
    """Logits after a path: transformers' own forward on exactly the chosen keys and values of the text's."""
    prompt = next(len(prompt) for prompt in PROMPTS if tuple(text[: len(prompt)]) == prompt)
    kept, attentions = DynamicCache(), plain(text[:-1], "eager", output_attentions=True).attentions
    for number, layer in enumerate(plain(text[:-1]).past_key_values.layers):
        heads = layer.keys.shape[1]
        index = chosen(selection, attentions[number][0], prompt, len(text) - 1, heads)[None, :, :, None]
        pair = (states.gather(2, index.expand(-1, -1, -1, states.shape[3])) for states in (layer.keys, layer.values))
        kept.update(*pair, number)
    positions = torch.arange(len(text) - 1, len(text) + len(path))[None]
    return plain([text[-1], *path], position_ids=positions, cache=kept).logits[0, -1]


# Distributions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SELECTIONS)
def test_stated_distributions_are_those_of_a_forward_on_exactly_these_cells(target, plain, method):
    proposer = sparse_kv(target, SELECTIONS[method], "sampled tree")
    compared, rejections = compare_stated(
        target, proposer, requests(WARM, 9), partial(expected, plain, SELECTIONS[method]), atol=1e-10
    )
    assert compared > 20 and rejections > 2


@pytest.mark.parametrize("method", SELECTIONS)
def test_a_stated_distribution_depends_on_where_its_step_began(target, plain, method):
    text = [*PROMPTS[0], 7]
    one_step, two_steps = (expected(plain, SELECTIONS[method], *ends) for ends in ((text, [8]), ([*text, 8], [])))
    assert (one_step - two_steps).abs().max() > 1e-6
    assert not sparse_kv(target, SELECTIONS[method]).text_only


@pytest.mark.parametrize("method", SELECTIONS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, plan, method):
    group, steps = decode(target, sparse_kv(target, SELECTIONS[method], plan), requests())
    assert emitted(group) == truth
    assert not target.lm.cells.references.any()
    assert sum(step.draft.shape.nodes for step in steps) > 0


def test_targets_of_fixed_shapes_have_small_caches_in_shapes_as_they_come():
    target = Target(CausalLM(tiny_model(), fixed=True), None, "graphs", CONTEXT, "", 0.0)
    wanted = [plain_greedy(target.lm.model, prompt, 6) for prompt in PROMPTS]
    assert emitted(decode(target, sparse_kv(target, SNAPKV), requests(new=6))[0]) == wanted


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "gemma", "phi", "opt", "falcon"])
def test_other_families_do_as_well(family):
    target = tiny_target(family)
    wanted = [plain_greedy(target.lm.model, prompt, 6) for prompt in PROMPTS]
    assert emitted(decode(target, sparse_kv(target, SNAPKV), requests(new=6))[0]) == wanted


def test_a_cache_of_the_whole_text_drafts_what_the_target_emits(target, truth):
    group, steps = decode(target, sparse_kv(target, Selection("streaming_llm", 64)), requests())
    assert emitted(group) == truth
    assert all(len(done.path) == 3 for step in steps[1:-2] for done in step.committed)


@pytest.mark.parametrize("method", SELECTIONS)
@pytest.mark.parametrize("sampling", [WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, method, sampling):
    wanted = requests(sampling, new=8)
    together = emitted(decode(target, sparse_kv(target, SELECTIONS[method]), wanted)[0])
    alone = [decode(target, sparse_kv(target, SELECTIONS[method]), [request])[0] for request in wanted]
    assert together == [emitted(group)[0] for group in alone]


# In few bits -------------------------------------------------------------------------------------------------------

INT8, INT4 = Selection("int8", group=4), Selection("int4", group=8)


class RoundedCache(DynamicCache):
    """Keys and values of every row as a quantised cache returns them."""

    def __init__(self, selection):
        super().__init__()
        self.selection = selection

    def update(self, key_states, value_states, *given, **options):
        bits, group = self.selection.bits, self.selection.group
        rounded = [
            dequantized(quantized(states, bits, group), states.shape[-1], bits, group).to(states.dtype)
            for states in (key_states, value_states)
        ]
        return super().update(*rounded, *given, **options)


@pytest.mark.parametrize("selection", [INT8, INT4], ids=str)
def test_stated_distributions_are_those_of_a_forward_on_rounded_keys_and_values(target, plain, selection):
    def logits(text, path):
        kept = RoundedCache(selection)
        for number, layer in enumerate(plain(text[:-1]).past_key_values.layers):
            kept.update(layer.keys, layer.values, number)
        positions = torch.arange(len(text) - 1, len(text) + len(path))[None]
        return plain([text[-1], *path], position_ids=positions, cache=kept).logits[0, -1]

    proposer = sparse_kv(target, selection, "sampled tree")
    compared, _ = compare_stated(target, proposer, requests(WARM, 9), logits, atol=1e-10)
    text = [*PROMPTS[2], 7]
    assert compared > 10 and (logits(text, []) - plain(text).logits[0, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("selection", [INT8, INT4], ids=str)
@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_drafts_in_few_bits_emit_the_target_s_tokens_and_free_their_cells(target, truth, selection, plan):
    proposer = sparse_kv(target, selection, plan)
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth and sum(step.draft.shape.nodes for step in steps) > 0
    assert not target.lm.cells.references.any() and not proposer.lm.cells.references.any()
    store = proposer.lm.cells.views[0][0][0]
    assert store.dtype == torch.uint8 and store.shape[-1] == row_bytes(8, selection.bits, selection.group)
    assert proposer.facts["selection"] == selection.method and "budget" not in proposer.facts


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dim", "group"), [(8, 4), (12, 8), (5, 32), (1, 32)])
def test_numbers_are_rounded_to_the_nearest_level_of_their_group(bits, dim, group):
    x = torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(dim)).double()
    x[0, 0] = 0.75
    rows = quantized(x, bits, group)
    assert rows.dtype == torch.uint8 and rows.shape == (3, 2, row_bytes(dim, bits, group))
    rounded = dequantized(rows, dim, bits, group).double()
    groups = x.unflatten(-1, (-1, math.gcd(dim, group)))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (rounded - x).abs().unflatten(-1, (-1, math.gcd(dim, group))).amax(-1)
    assert (error <= step / 2 + 1e-5).all() and torch.equal(rounded[0, 0], x[0, 0])
    assert not dequantized(torch.zeros_like(rows), dim, bits, group).any(), "a free cell holds zeros"


def test_a_quantised_cache_takes_a_share_of_the_memory(target):
    whole, small = target.lm.memory, target.lm.sparse(Selection("int4", group=8)).memory
    assert small.kv_bytes([256]) == whole.kv_bytes([256]) * row_bytes(8, 4, 8) // (8 * whole.kv_itemsize)


# Cells -------------------------------------------------------------------------------------------------------------


def test_after_rejections_the_small_cache_holds_the_target_s_keys_and_values(target, monkeypatch):
    proposer, lengths = sparse_kv(target), []
    follow = proposer.lm.follow

    def compared(kv, source, prompt):
        follow(kv, source, prompt)
        positions = chosen(STREAMING, None, len(prompt), len(source), 1)[0].numpy()
        for small, whole in zip(proposer.lm.cells.views, target.lm.cells.views, strict=True):
            for copies, originals in zip(small, whole, strict=True):
                held = copies[kv.stream][:, :, kv.slots.copy()]
                assert torch.equal(held, originals[source.stream][:, :, source.slots[positions]])
        assert len(kv) == len(source) and not len(kv.held)
        lengths.append(len(kv.slots))

    monkeypatch.setattr(proposer.lm, "follow", compared)
    _, steps = decode(target, proposer, requests(WARM))
    assert max(lengths) == STREAMING.budget and len(lengths) > 10
    assert any(len(done.path) < 3 for step in steps for done in step.committed)


def test_a_draft_s_forwards_attend_to_the_budget_and_what_they_drafted(target, monkeypatch):
    lm, attended = target.lm.sparse(STREAMING), []
    prepare = lm.prepare

    def recorded(*args):
        prepared = prepare(*args)
        attended.append(prepared.attended)
        return prepared

    monkeypatch.setattr(lm, "prepare", recorded)
    decode(target, SparseKV(lm, target.context, PLANS["chain"]), requests(new=30)[2:])
    assert max(attended) <= STREAMING.budget + PLANS["chain"].depth and len(attended) > 5
    assert lm.cells.capacity <= 256


def test_a_rewound_cache_is_copied_anew(target):
    """To a length of which the small cache holds the last positions, and to one of which it does not."""
    lm, whole = target.lm.sparse(STREAMING), target.lm.open()
    small = lm.open()
    target.lm.forward([whole], [list(range(12))], empty(1, target.lm.device))
    lm.follow(small, whole, (1, 2))
    for length, left in ((11, 11), (4, 0)):
        whole.truncate(length)
        small.truncate(length)
        assert len(small) == left
        lm.follow(small, whole, (1, 2))
        assert len(small) == length and len(small.slots) == min(length, STREAMING.budget)
    whole.close()
    small.close()
    assert not lm.cells.references.any()


# In a cascade ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SELECTIONS)
def test_a_draft_model_s_small_cache_drafts_for_it(target, truth, method):
    lm = CausalLM(tiny_model(num_hidden_layers=2, seed=1))
    inner = sparse_kv(Target(lm, None, "draft", CONTEXT, "", 0.0), SELECTIONS[method])
    assert emitted(decode(target, cascade(inner, lm), requests())[0]) == truth
    assert not lm.cells.references.any()


def triforce(target, inner, selection=STREAMING):
    model = replace(target, lm=target.lm.sparse(selection))
    return TriForce(Arm(model, inner, Token(), CounterDraws(0)), 3)


INNER = {"n-gram": lambda: Ngram(3, 2, 1), "draft model": lambda: draft_model("1x1")}


@pytest.mark.parametrize(("inner", "method"), [("n-gram", "snapkv"), ("draft model", "streaming_llm")])
def test_a_chain_of_triforce_is_distributed_as_the_small_cache_s_tokens(target, plain, inner, method):
    proposer = triforce(target, INNER[inner](), SELECTIONS[method])
    proposer.lm = proposer.arm.target.lm
    compared, rejections = compare_stated(
        target, proposer, requests(WARM, 9), partial(expected, plain, SELECTIONS[method]), atol=1e-10
    )
    assert compared > 15 and rejections > 2


@pytest.mark.parametrize("inner", INNER)
def test_triforce_emits_the_target_s_tokens(target, truth, inner):
    group, _ = decode(target, triforce(target, INNER[inner]()), requests())
    assert emitted(group) == truth
    assert not target.lm.cells.references.any()


def test_triforce_refuses_an_inner_proposer_that_reads_hidden_states_of_all_positions(target):
    inner = SimpleNamespace(name="eagle", requires=Requires(hidden=(1,)))
    with pytest.raises(ValueError, match="'eagle' reads hidden states"):
        TriForce.load(target, lambda _: inner, Token())


# Loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "why"), [
    (dict(budget=4, sinks=4), "sinks must be less than proposer.budget=4"),
    (dict(selection="snapkv", budget=32), r"window must be less than .* \(got 32\)"),
    (dict(selection="snapkv", kernel=4), "kernel must be odd"),
    (dict(selection="snapkv", sinks=4), "sinks is read with selection=streaming_llm only, not with snapkv"),
    (dict(window=32), "window is read with selection=snapkv only"), (dict(kernel=4), "kernel is read with"),
    (dict(group=8), "group is read with selection=int8 or int4 only"), (dict(selection="int4", sinks=4), "sinks is"),
])  # fmt: skip
def test_wrong_options_are_refused(target, options, why):
    with pytest.raises(ValueError, match=why):
        SparseKV.load(target, **options, depth=3)
    with pytest.raises(ValueError, match=why):
        TriForce.load(target, lambda model: Ngram(3, 2, 1), Token(), **options)


@pytest.mark.parametrize(("other", "why"), [
    (lambda: tiny_target("mistral-windows"), "windows"), (lambda: tiny_target(attention="dense_mask"), "dense_mask"),
])  # fmt: skip
def test_targets_without_full_attention_over_cells_are_refused(other, why):
    with pytest.raises(Unsupported, match=why):
        SparseKV.load(other(), depth=3)


def test_records_state_the_selection(target):
    facts = SparseKV.load(target, selection="snapkv", budget=64, depth=3).facts
    assert {"selection": "snapkv", "budget": 64, "window": 32, "kernel": 5}.items() <= facts.items()
    assert SparseKV.load(target, depth=3).target_cells == 0
