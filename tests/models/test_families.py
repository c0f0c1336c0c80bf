"""Every family emits the tokens of transformers' own ``generate``, however it is decoded; the page that says so."""

import copy

import pytest
import torch
from transformers import GenerationConfig

from spec_lab.core.draft import Draft
from spec_lab.core.own_attention import own_attention
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import parse_sublayers
from spec_lab.models.packed import pack, unpack
from spec_lab.models.plain_forwards import EXACT
from spec_lab.models.self_check import self_check
from spec_lab.models.support import Unsupported, model_context, refuse_by_name
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.decode.foretold import TREE, Foretold
from tests.models.families import EVERY, FAMILIES, PAGE, POSITIONS, kinds_of, page, tiny_family
from tests.propose.lab import decode, emitted, requests
from tests.runners.replays import replayed
from tests.tiny import CONTEXT

PROMPTS = ((3, 14, 15, 9, 26, 5, 35, 8, 9), (2, 7, 18), (31, 41, 5, 9, 2, 6), (8,))
NEW = 16
TREES = TreePlan(parse("2x2x1"), "deterministic")
WITHOUT_LAYER_RANGES = {
    "gemma4_text with shared keys and values": "share keys and values",
    "longcat_flash": "not one list",
}
"""Families of which no range of layers can be run, and why; proposers which require it are refused."""
WITHOUT_SUBLAYERS = {"bloom", "bloom-six-heads"}
"""Families whose sublayers add the residual themselves, so that none can be skipped."""


def marks(family):
    """The short run has the families that differ most from each other."""
    return [] if family.short else [pytest.mark.nightly]


def cases(families):
    """Every family."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks(family)) for name, family in families.items()]
    )


CASES, POSITION_CASES = cases(EVERY), cases(POSITIONS)


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


def target_of(name, attention="per_sequence", fixed=False):
    model = tiny_family(name)
    context = model_context(model.config)
    assert context == EVERY[name].context
    return Target(CausalLM(model, attention, chunk=6, fixed=fixed), None, "tiny", context, "", 0.0)


def wanted():
    return requests(new=NEW, prompts=PROMPTS)


def told(truth, shape):
    return Foretold(truth, shape=shape, nodes=shape.nodes)


@CASES
def test_the_kinds_of_layers_and_the_self_check(name):
    model, family = tiny_family(name), EVERY[name]
    refuse_by_name(model.config)
    assert kinds_of(model.config) == family.kinds
    for attention, fixed in (("per_sequence", False), ("per_sequence", True), ("dense_mask", False)):
        if attention == "dense_mask" and not family.dense:
            with pytest.raises(Unsupported, match=r"ALiBi .*target\.attention=per_sequence"):
                self_check(model, attention)
        else:
            assert self_check(model, attention, fixed).error < EXACT[family.dtype]


@cases(FAMILIES)
def test_windows_chunks_and_caps_change_the_texts(name, truth):
    assert min(len({*text}) for text in truth) > 1 and sum(len({*text}) for text in truth) >= 20
    for changes in FAMILIES[name].matters:
        assert generated(tiny_family(name, **changes)) != truth, changes


@cases(FAMILIES)
def test_forwards_without_a_cache_have_the_logits_of_transformers_attention(name):
    """Checks and training call the model so, with the engine's attention function."""
    model, texts = tiny_family(name), torch.arange(1, 25).view(2, 12)
    with torch.inference_mode():
        model.set_attn_implementation(own_attention(model))
        expected = model(input_ids=texts, use_cache=False).logits
        logits = CausalLM(model).model(input_ids=texts, use_cache=False).logits
    assert float((logits - expected).abs().max() / expected.std()) < EXACT[FAMILIES[name].dtype]


WAYS = {"alone": chain(3), "batch": TREE, "dense": TREE, "fixed": chain(3)}
"""Ways of decoding, and the shape of their drafts."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=marks(family))
        for name, family in EVERY.items()
        for way in WAYS
        if way != "dense" or family.dense
    ],
)
def test_chains_and_trees_emit_the_tokens_of_generate(name, truth, way):
    target = target_of(name, "dense_mask" if way == "dense" else "per_sequence", way == "fixed")
    texts, count = [], 0
    for group in [[request] for request in wanted()] if way == "alone" else [wanted()]:
        decoded, steps = decode(target, told(truth, WAYS[way]), group)
        texts += emitted(decoded)
        count += len(steps)
    assert texts == truth
    assert count < NEW * (len(PROMPTS) if way == "alone" else 1), "drafts are accepted"
    assert bool(target.lm.graphs.captured) == (way == "fixed")
    assert not target.lm.cells.references.any()


@CASES
def test_continuous_batching_emits_the_tokens_of_generate(name, truth):
    """Requests join while others decode, prompts are computed in parts, and the KV cache is too small for all."""
    target = target_of(name)
    limits = Limits(3, 4, CONTEXT // 3)
    engine, steps = Engine(Arm(target, told(truth, TREE), Token(), CounterDraws(0)), limits=limits), []
    for request in wanted():
        engine.add(request)
        steps += [engine.step(), engine.step()]
    steps += engine
    assert emitted(engine) == truth
    assert max(len(step.sequences) for step in steps if step) > 1


@CASES
@pytest.mark.parametrize("drafts", ["draft_model", "early_exit", "skip"])
def test_a_model_that_drafts_for_itself_emits_the_tokens_of_generate(name, truth, drafts):
    """A draft model extends its trees level by level; the others run some of the target's layers."""
    target = target_of(name)
    proposer = {
        "draft_model": lambda: DraftModel(CausalLM(tiny_family(name)), target.context, TREES),
        "early_exit": lambda: EarlyExit(target.lm, 1, TREES),
        "skip": lambda: Skip(target.lm, TREES, parse_sublayers("attn 1"), "request"),
    }[drafts]()
    if name in WITHOUT_LAYER_RANGES and drafts != "draft_model":
        assert WITHOUT_LAYER_RANGES[name] in target.lm.why_no_layer_ranges
        with pytest.raises(ValueError, match=f"proposer '{drafts}' requires layer_ranges of the target"):
            decode(target, proposer, wanted())
        return
    if name in WITHOUT_SUBLAYERS and drafts == "skip":
        with pytest.raises(ValueError, match="the target cannot skip attn 1; it can skip nothing"):
            Skip.load(target, skipped="attn 1", tree="2x2x1")
        return
    group, steps = decode(target, proposer, wanted())
    assert emitted(group) == truth
    if drafts == "draft_model":
        assert len(steps) < NEW, "drafts are accepted"


@POSITION_CASES
def test_packed_layers_pass_the_self_check(name):
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_family(name, dtype)
        if pack(model) and name == "longcat_flash":  # its router reads the weight of a linear layer
            with pytest.raises(Unsupported):
                self_check(model, "per_sequence")
            unpack(model)
        assert self_check(model, "per_sequence").passed


@POSITION_CASES
def test_a_forward_reads_nothing_back_and_can_be_captured(name, truth):
    """On the device without numbers (``test_meta``), and as replayed operations on static buffers."""
    shape = forest((TREE, chain(0)))
    if POSITIONS[name].dtype == torch.float64:  # experts are chosen on the host there
        with torch.device("meta"):
            lm = CausalLM(tiny_family(name, torch.float32))
        draft = Draft(shape, torch.empty(shape.nodes, dtype=torch.long, device="meta"))
        output = lm.run(lm.prepare([lm.open(), lm.open()], [[1, 2], [3]], draft))
        assert output.logits.device.type == "meta"
        target = target_of(name, fixed=True)
        target.lm.graphs.capture = replayed
        assert emitted(decode(target, told(truth, TREE), wanted())[0]) == truth


@pytest.mark.nightly
@POSITION_CASES
def test_a_copy_of_an_adapted_model_computes_with_its_own_weights(name):
    model = tiny_family(name)
    self_check(model, "per_sequence")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert self_check(twin, "per_sequence").error < EXACT[POSITIONS[name].dtype]


def test_the_page_lists_what_is_tested():
    assert PAGE.read_text() == page(), "write it with: python -m tests.models.families"
