"""Every family emits the tokens of transformers' own ``generate``, however it is decoded; the page that says so."""

import pytest
import torch
from transformers import GenerationConfig

from spec_lab.core.draft import chain
from spec_lab.core.own_attention import own_attention
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.engine import Engine, Limits
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import parse_sublayers
from spec_lab.models.plain_forwards import EXACT
from spec_lab.models.self_check import self_check
from spec_lab.models.support import refuse_by_name
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.decode.foretold import TREE, Foretold
from tests.models.families import FAMILIES, PAGE, kinds_of, page, tiny_family
from tests.propose.lab import decode, emitted, requests
from tests.tiny import CONTEXT

PROMPTS = ((3, 14, 15, 9, 26, 5, 35, 8, 9), (2, 7, 18), (31, 41, 5, 9, 2, 6), (8,))
NEW = 16
TREES = TreePlan(parse("2x2x1"), "point")
WITHOUT_LAYER_RANGES = {"gemma4_text with shared keys and values"}
"""Families of which no range of layers can be run, so that proposers which require it are refused."""

CASES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if one.short else [pytest.mark.nightly]) for name, one in FAMILIES.items()]
)


def generated(model):
    """Each prompt's greedy continuation by transformers' own attention and KV cache."""
    model.set_attn_implementation(own_attention(model))
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        texts.append(model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)[0].tolist())
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def truths():
    """The texts of the families that were asked for."""
    return {}


@pytest.fixture
def truth(name, truths):
    if name not in truths:
        truths[name] = generated(tiny_family(name))
    return truths[name]


def target_of(model, attention="spans", fixed=False):
    return Target(CausalLM(model, attention, chunk=6, fixed=fixed), None, "tiny", CONTEXT, "", 0.0)


def wanted():
    return requests(new=NEW, prompts=PROMPTS)


def told(truth, shape):
    return Foretold(truth, shape=shape, nodes=shape.nodes)


@CASES
def test_the_kinds_of_layers_and_the_self_check(name):
    model, family = tiny_family(name), FAMILIES[name]
    refuse_by_name(model.config)
    assert kinds_of(model.config) == family.kinds
    for attention, fixed in (("spans", False), ("spans", True), ("dense", False)):
        assert self_check(model, attention, fixed).error < EXACT[family.dtype]


@CASES
def test_windows_chunks_and_caps_change_the_texts(name, truth):
    assert min(len({*text}) for text in truth) > 1 and sum(len({*text}) for text in truth) >= 20
    for changes in FAMILIES[name].matters:
        assert generated(tiny_family(name, **changes)) != truth, changes


@CASES
def test_forwards_without_a_cache_have_the_logits_of_transformers_attention(name):
    """Checks and training call the model so, with the engine's attention function."""
    model, texts = tiny_family(name), torch.arange(1, 25).view(2, 12)
    with torch.inference_mode():
        model.set_attn_implementation(own_attention(model))
        expected = model(input_ids=texts, use_cache=False).logits
        found = CausalLM(model).model(input_ids=texts, use_cache=False).logits
    assert float((found - expected).abs().max() / expected.std()) < EXACT[FAMILIES[name].dtype]


@pytest.mark.one_in(6)
@CASES
@pytest.mark.parametrize("shape", [chain(3), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("how", ["alone", "batch", "dense", "fixed"])
def test_chains_and_trees_emit_the_tokens_of_generate(name, truth, shape, how):
    target = target_of(tiny_family(name), "dense" if how == "dense" else "spans", how == "fixed")
    if how == "alone":
        found, steps = [], []
        for one in wanted():
            group, own = decode(target, told(truth, shape), [one])
            found += emitted(group)
            steps += own
        most = NEW * len(PROMPTS)
    else:
        group, steps = decode(target, told(truth, shape), wanted())
        found, most = emitted(group), NEW
    assert found == truth
    assert len(steps) < most, "drafts are accepted"
    assert bool(target.lm.graphs.captured) == (how == "fixed")
    assert not target.lm.cells.references.any()


@CASES
def test_continuous_batching_emits_the_tokens_of_generate(name, truth):
    """Requests join while others decode, prompts are computed in parts, and the KV cache is too small for all."""
    target = target_of(tiny_family(name))
    limits = Limits(3, 4, CONTEXT // 3)
    engine, steps = Engine(target, told(truth, TREE), Token(), CounterDraws(0), limits=limits), []
    for one in wanted():
        engine.add(one)
        steps += [engine.step(), engine.step()]
    steps += engine
    assert emitted(engine) == truth
    assert max(len(step.sequences) for step in steps if step) > 1


@CASES
@pytest.mark.parametrize("drafts", ["draft_model", "early_exit", "skip"])
@pytest.mark.one_in(3)
def test_a_model_that_drafts_for_itself_emits_the_tokens_of_generate(name, truth, drafts):
    """A draft model extends its trees level by level; the others run some of the target's layers."""
    target = target_of(tiny_family(name))
    proposer = {
        "draft_model": lambda: DraftModel(CausalLM(tiny_family(name)), CONTEXT, TREES),
        "early_exit": lambda: EarlyExit(target.lm, 1, TREES),
        "skip": lambda: Skip(target.lm, TREES, parse_sublayers("attn 1"), "request"),
    }[drafts]()
    if name in WITHOUT_LAYER_RANGES and drafts != "draft_model":
        assert "share keys and values" in target.lm.why_no_layer_ranges
        with pytest.raises(ValueError, match=f"proposer '{drafts}' requires layer_ranges of the target"):
            decode(target, proposer, wanted())
        return
    group, steps = decode(target, proposer, wanted())
    assert emitted(group) == truth
    if drafts == "draft_model":
        assert len(steps) < NEW, "drafts are accepted"


def test_the_page_lists_what_is_tested():
    assert PAGE.read_text() == page(), "write it with: python -m tests.models.families"
