"""Block drafters: the cached, batched network agrees with plain forwards over whole texts; drafts are as declared."""

import pytest
import torch

from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.verify import Traversal
from tests.drafters.block_drafters import dflash, dflash2, domino, dspark, speculators
from tests.drafters.eagle_heads import SIZES, written
from tests.oracles import block as oracle
from tests.propose.lab import (
    COLD,
    WARM,
    batch_of,
    calls,
    compare_stated,
    decode,
    emitted,
    expanded,
    fork_of,
    observations,
    plain_greedy,
    requests,
)
from tests.tiny import VOCABULARY, tiny_target

H = 32
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"


def lfm2():
    """A DSpark drafter as Liquid AI writes it: with fields in both places, and a rotary embedding of neighbours."""
    config, tensors = dspark(H, VOCABULARY, layout="specforge", mask=60, architectures=["Lfm2DSparkDraftModel"])
    inner = config["dflash_config"]
    inside = {name: inner[name] for name in ("mask_token_id", "target_layer_ids")} | {"num_target_layers": 4}
    outside = {name: inner[name] for name in ("markov_rank", "markov_head_type", "enable_confidence_head")}
    return config | outside | {"dflash_config": inside}, tensors


def both_ways():
    """A DFlash drafter of speculators whose blocks attend in both directions under a window shorter than they are."""
    head = dflash(H, head=VOCABULARY, layers=1, layer_types=["sliding_attention"], sliding_window=2)
    config, tensors = speculators(head, "dflash", VOCABULARY)
    return config | {"sliding_window_non_causal": True}, tensors


KEPT = [0, 2, 3, 7, *range(11, 55), 57]
VARIANTS = {
    "dflash": dflash(H, rope_theta=1e6),
    "dflash-llama": dflash(H, family="llama", layers=1, size=4),
    "dflash-own-head": dflash(H, layers=1, size=7, head=VOCABULARY),
    "dspark": dspark(H, VOCABULARY),
    "dspark-product": dspark(H, VOCABULARY, rank=0, confidence=False, layers=2),
    "dspark-gated": dspark(H, VOCABULARY, kind="gated", layout="specforge", mask=60),
    "dspark-rnn": dspark(H, VOCABULARY, kind="rnn", layout="modelopt", mask=60),
    "dspark-own-row": dspark(H, VOCABULARY, kind="rnn", layout="specforge", mask=60, sample_from_anchor=False),
    "dspark-speculators": speculators(dspark(H, VOCABULARY, kind="gated"), "dspark", VOCABULARY, KEPT),
    "dflash-speculators": speculators(
        dflash(H, head=VOCABULARY, layers=1, layer_types=["sliding_attention"], sliding_window=5), "dflash", VOCABULARY
    ),
    "dflash-speculators-both-ways": both_ways(),
    "dflash-skip": dflash(H, layers=1),
    "dspark-lfm2": lfm2(),
    "dflash2": dflash2(H, VOCABULARY, layer_types=["sliding_attention"] * 2, sliding_window=6, is_causal=False),
    "dflash2-three-taps": dflash2(H, VOCABULARY, taps=3, group=32, candidates=3, output_multiplier=0.5),
    "domino": domino(H, VOCABULARY),
    "domino-own-row": domino(H, VOCABULARY, shifted=False, uncorrected=0),
    "dflash-neighbours": dflash(H, layers=1, rope_is_neox_style=False),
    "dflash-windows": dflash(
        H, layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True
    ),
    "dflash-llama-windows": dflash(
        H, family="llama", layer_types=["full_attention", "sliding_attention"], sliding_window=4, is_causal=False
    ),
    "dflash-swa": dflash(H, use_swa=True, swa_window_size=7),
    "dflash-causal": dflash(H, layers=1, causal=True),
    "dflash-scaled": dflash(
        H,
        layers=1,
        input_embedding_scale=5.5,
        output_multiplier=0.4,
        final_logit_softcapping=1.5,
    ),
}


KINDS = {
    "dflash-windows": [(6, True), (None, False)],
    "dflash-llama-windows": [(None, False), (4, False)],
    "dflash-speculators": [(5, True)],
    "dflash-speculators-both-ways": [(2, False)],
    "dflash2": [(6, False)] * 2,
    "dflash-swa": [(7, False)] * 2,
    "dflash-causal": [(None, True)],
}
"""The windows of layers, and whether rows of a block attend to rows before them only."""


OPTIONS = {"dflash-skip": {"positions": 2}}
ANCHORED = {"dflash-speculators", "dflash-speculators-both-ways"}
"""Drafters whose windows are those of the last computed position."""


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: written(tmp_path_factory.mktemp(name), *drafter) for name, drafter in VARIANTS.items()}


def plain_rows(name, target, text):
    """Normed outputs and logits of the rows of the block after ``text``, whose last token is pending."""
    config, w = VARIANTS[name]
    model, inner = target.lm.model, config.get("dflash_config", config)
    states = model(input_ids=torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
    numbers = config.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in inner["target_layer_ids"]]
    taps = torch.cat([states[number][0] for number in numbers], -1)
    parts = model.get_input_embeddings().weight, model.lm_head.weight
    block = text[-1], inner["mask_token_id"], config["block_size"]
    scales = [
        config.get(field, default)
        for field, default in (
            ("input_embedding_scale", 1),
            ("output_multiplier", 1),
            ("final_logit_softcapping", None),
        )
    ]
    theta = config.get("transformer_layer_config", config)["rope_theta"]
    reading = KINDS.get(name, ()), name == "dspark-lfm2" or not config.get("rope_is_neox_style", True)
    return oracle.rows(
        w, *parts, taps, *block, SIZES, theta, *scales, *reading, name in ANCHORED, int(name == "dflash-skip")
    )


def reference(name, target, text, path):
    """Logits ``[V]`` after ``text`` and a drafted ``path``."""
    config, w = VARIANTS[name]
    inner, (hidden, logits) = config.get("dflash_config", config), plain_rows(name, target, text)
    next_row = inner.get("shift_label", config.get("sample_from_anchor", name.startswith("dspark")))
    embedding = target.lm.model.get_input_embeddings().weight
    fields = embedding, inner.get("pure_draft_prefix_len", 0), inner.get("selector_top_k", 0)
    row_logits = oracle.level(w, hidden, logits, [text[-1], *path], next_row, *fields)
    if len(row_logits) < VOCABULARY:
        nothing = torch.full((VOCABULARY,), -torch.inf, dtype=row_logits.dtype)
        row_logits = nothing.index_copy(0, torch.tensor(KEPT), row_logits)
    return row_logits


def check(name, target, draft, sequences):
    """Compare every stated distribution; return how many there are."""
    compared = 0
    for row, sequence, text, _ in expanded(draft, sequences):
        logits = reference(name, target, sequence.tokens, text[len(sequence.tokens) :])
        expected = logits_to_probs(logits[None], [WARM])[0]
        torch.testing.assert_close(draft.q[draft.q_row[row]], expected, rtol=0, atol=1e-6)
        compared += 1
    return compared


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, folders, name):
    proposer = BlockDrafter.load(target, folders[name], tree=TREE, drawn="without_replacement", **OPTIONS.get(name, {}))

    def expected(text, path):
        return reference(name, target, text, path)

    def each(info):
        assert calls(info) <= 1

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=12), expected, each)
    assert compared > 50 and rejections > 5


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_only_with_a_markov_head_a_level_depends_on_the_token_above(target, folders, name):
    proposer = BlockDrafter.load(target, folders[name], tree="2x1", drawn="without_replacement")
    _, steps = decode(target, proposer, requests(WARM, new=4))
    draft = next(info.draft for info in steps if info.draft.shape.nodes)
    first, second = (draft.q[draft.q_row[row]] for row in draft.shape.children[0])
    assert torch.equal(first, second) == (name == "dflash")


@pytest.mark.parametrize("name", ["dspark", "dspark-gated", "dspark-rnn"])
@torch.no_grad()
def test_the_confidence_head_is_read(target, folders, name):
    network = BlockDrafter.load(target, folders[name], depth=2).network
    hidden, token = torch.randn(3, H, dtype=torch.float64), torch.tensor([7, 0, 60])
    expected = [oracle.confidence(VARIANTS[name][1], *row) for row in zip(hidden, token, strict=True)]
    torch.testing.assert_close(network.confidence(hidden, token), torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dspark", "dspark-rnn"])
@torch.no_grad()
def test_every_drafted_node_has_the_confidence_of_the_row_that_drafts_it(target, folders, name):
    proposer, w = BlockDrafter.load(target, folders[name], tree=TREE, drawn="without_replacement"), VARIANTS[name][1]
    _, steps = decode(target, proposer, requests(WARM, new=6))
    compared = 0
    for info in (info for info in steps if info.draft.shape.nodes):
        shape, predicted = info.draft.shape, info.draft.predict(info.draft)
        token = [None] * shape.roots + info.draft.token.tolist()
        for tree, sequence in enumerate(info.sequences):
            text = sequence.tokens[: info.context[tree]]
            hidden = plain_rows(name, target, text)[0] if len(shape.trees[tree]) > 1 else None
            for row in shape.trees[tree][1:].tolist():
                path = [text[-1], *(token[above] for above in shape.path(row))]
                expected = oracle.confidence(w, hidden[len(path) - 2], torch.tensor(path[-2]))
                torch.testing.assert_close(predicted[row - shape.roots], expected[0], rtol=0, atol=1e-6)
                compared += 1
    assert compared > 40


@torch.no_grad()
def test_distributions_are_right_after_rewinds_and_forks_and_forced_tokens_are_computed_first(target, folders):
    proposer = BlockDrafter.load(target, folders["dspark"], depth=3)
    batch = batch_of(target, requests(WARM)[:1], proposer)
    (seq,) = batch.sequences
    target.lm.capture(proposer.requires.hidden)

    def compute():
        starts = [len(sequence.kv) for sequence in batch.sequences]
        pending = [sequence.pending for sequence in batch.sequences]
        for sequence in batch.sequences:
            sequence.tokens.append(7)
        output = target.lm.forward([sequence.kv for sequence in batch.sequences], pending, empty(len(batch.sequences)))
        proposer.observe(observations(batch.sequences, output, starts))

    def drafted():
        draft = proposer.propose(batch)
        for sequence in batch.sequences:
            sequence.step += 1
        return check("dspark", target, draft, batch.sequences)

    assert drafted() == 0, "no position is computed"
    compute()
    assert drafted() == 3
    seq.tokens += [5, 9]
    assert drafted() == 0, "several tokens are pending"
    compute()
    assert drafted() == 3
    for length in (4, 1):
        del seq.tokens[length + 1 :]
        seq.kv.truncate(length)
        proposer.rewind(seq.state, length)
        seq.tokens[-1] = 30 + length
        assert drafted() == 3
        compute()
    batch.sequences.append(fork_of(seq, proposer))
    assert drafted() == 6
    batch.sequences[1].tokens[-1] = 3
    compute()
    assert drafted() == 6
    target.lm.capture(())
    for sequence in batch.sequences:
        proposer.close(sequence.state)
    assert not proposer.lm.cells.references.any()


WAYS = [
    {"tree": TREE, "drawn": "deterministic"},
    {"depth": 4},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
    {"nodes": 7, "max_depth": 4, "drawn": "without_replacement", "temperature": 1.0},
]


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2", "domino"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, folders, name, options):
    truth = [plain_greedy(target.lm.model, request.tokens, 20) for request in requests()]
    group, steps = decode(target, BlockDrafter.load(target, folders[name], **options), requests())
    assert emitted(group) == truth
    assert all(info.draft.shape.nodes == 0 for info in steps[:1]), "no position is computed before the first step"
    assert sum(info.draft.shape.nodes for info in steps) > 60


@pytest.mark.parametrize("name", ["dflash", "dspark-rnn", "dflash2"])
@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, folders, name, sampling):
    proposer = BlockDrafter.load(target, folders[name], tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


def test_drafts_end_with_the_target_s_context(folders):
    target = tiny_target(num_hidden_layers=4, context=20)
    group, _ = decode(target, BlockDrafter.load(target, folders["dflash"], depth=4), requests())
    assert {sequence.finish for sequence in group.sequences} <= {"context", "length"}
    for request, text in zip(requests(), emitted(group), strict=True):
        assert text == plain_greedy(target.lm.model, request.tokens, len(text))


def test_taps_are_spread_over_the_target_where_none_are_named(tmp_path):
    config, tensors = dflash(H, ids=(0, 0, 0), layers=3)
    del config["dflash_config"]["target_layer_ids"]
    target = tiny_target(num_hidden_layers=12)
    proposer = BlockDrafter.load(target, written(tmp_path / "drafter", config, tensors), depth=2)
    assert proposer.requires.hidden == (2, 6, 10)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_field_with_the_value_that_is_meant_without_it_changes_nothing(target, folders, tmp_path, where):
    """Configs of the block's authors, of NVIDIA's exporter and of SpecForge state many of these."""
    config, tensors = VARIANTS["dflash"]
    more = {
        "causal": False, "use_swa": False, "sample_from_anchor": False, "shift_label": False, "markov_rank": 0,
        "rope_is_neox_style": True, "output_multiplier": 1, "final_logit_softcapping": None, "attention_mode": "gqa",
        "num_target_layers": 4, "swa_window_size": 1024, "projector_type": "dflash",
    }  # fmt: skip
    inside = config["dflash_config"] | (more if where == "inside" else {"block_size": config["block_size"]})
    changed = config | {"dflash_config": inside} | (more if where == "outside" else {})
    if where == "outside":
        del changed["block_size"]  # which some files hold in dflash_config only
    path = written(tmp_path / "drafter", changed, tensors)
    texts = [
        emitted(decode(target, BlockDrafter.load(target, folder, tree=TREE), requests(WARM))[0])
        for folder in (folders["dflash"], path)
    ]
    assert texts[0] == texts[1]


def inner(**fields):
    return lambda config, _: config["dflash_config"].update(fields)


def outer(**fields):
    return lambda config, _: config.update(fields)


REFUSED = {
    "missing": (dflash, lambda c, t: t.pop("hidden_norm.weight"), "hidden_norm.weight is missing"),
    "surplus": (dflash, lambda c, t: t.update(extra=torch.zeros(2)), "'extra' is in no layer"),
    "misshapen": (dflash, lambda c, t: t.update({"norm.weight": torch.ones(5)}), r"norm.weight is \[5\], not \[32\]"),
    "nan": (dflash, lambda c, t: t["fc.weight"].fill_(float("nan")), "'fc.weight' holds NaN"),
    "no drafter": (dflash, lambda c, t: c.pop("dflash_config"), "neither dflash_config .* nor markov_rank"),
    "mask token": (dflash, inner(mask_token_id=VOCABULARY), f"mask_token_id .* 0 to {VOCABULARY - 1}, not"),
    "no mask token": (dflash, lambda c, t: c["dflash_config"].pop("mask_token_id"), "mask_token_id .*null"),
    "taps": (dflash, inner(target_layer_ids=[0, 4]), "names layer 4, but the target .* -1 to 3 can"),
    "taps of text": (dflash, inner(target_layer_ids="all"), "list of layers"),
    "fewer taps": (dflash, inner(target_layer_ids=[1]), r"fc.weight is \[32, 64\], not \[32, 32\]"),
    "the same tap twice": (dflash, inner(target_layer_ids=[2, 2]), "different layers"),
    "other taps outside": (dflash, outer(target_layer_ids=[0, 1]), r"is \[0, 1\], but \[0, 2\] in dflash_config"),
    "another block inside": (dflash, inner(block_size=7), "block_size is 5, but 7 in dflash_config"),
    "DSpark without its head": (
        dflash,
        inner(projector_type="dspark", markov_rank=6, markov_head_type="vanilla"),
        "markov_head.markov_w1.weight is missing",
    ),
    "DSpark without its rank": (dflash, inner(projector_type="dspark"), "markov_rank must be a whole number"),
    "DSpark without its confidence head": (
        dflash,
        inner(projector_type="dspark", markov_rank=0, enable_confidence_head=True),
        "confidence_head.proj.weight is missing",
    ),
    "a Markov head that DFlash lacks": (
        dflash,
        lambda c, t: t.update({"markov_head.markov_w1.weight": torch.ones(VOCABULARY, 6)}),
        "'markov_head.markov_w1.weight' is in no layer",
    ),
    "a rank that DFlash lacks": (
        dflash,
        outer(architectures=["DFlashDraftModel"], markov_rank=6),
        "markov_rank is 6, and only 0",
    ),
    "an anchor of two minds": (
        dspark,
        outer(sample_from_anchor=False, shift_label=True),
        "shift_label is true, which contradict",
    ),
    "another kind": (dflash, inner(projector_type="xpress"), "projector_type 'xpress' is not supported, only 'dflash'"),
    "causal by one field, and not by another": (
        dflash,
        outer(causal=True, sliding_window_non_causal=True),
        "sliding_window_non_causal and causal are true, which",
    ),
    "windows inside": (
        dflash,
        inner(sliding_window=4),
        "dflash_config.sliding_window is 4, but sliding_window is read",
    ),
    "classes": (dflash, outer(architectures=7), "architectures must be a list of names, not 7"),
    "causal and not": (dflash, outer(causal=True, is_causal=False), "is_causal is false and causal is true, which"),
    "windows without a size": (dflash, inner(use_swa=True), "sliding_window must be a whole number"),
    "windows by one field only": (
        dflash,
        outer(use_sliding_window=False, layer_types=["sliding_attention"] * 2, sliding_window=4),
        "use_sliding_window is false, but layer_types",
    ),
    "caps": (dflash, inner(final_logit_softcapping=-30.0), "final_logit_softcapping must be a number above 0"),
    "factor": (dflash, inner(output_multiplier=True), "output_multiplier must be a number above 0"),
    "sinks": (dflash, inner(attention_sink_bias=True), "attention_sink_bias is true"),
    "DFlash2 without a size": (dflash, inner(conv_kernel_size=2), "selector_top_k must be a whole number"),
    "DFlash2 without its tensors": (
        dflash,
        inner(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=4),
        "candidate_selector.hidden_projection.weight is missing",
    ),
    "groups of DFlash2": (
        dflash,
        inner(conv_kernel_size=2, conv_group_size=5, selector_rank=6, selector_top_k=4),
        "conv_group_size is 5, which does not divide",
    ),
    "Domino without a size": (dflash, inner(projector_type="domino", gru_hidden_dim=8), "emb_dim must be a whole"),
    "Domino without its tensors": (
        dflash,
        inner(projector_type="domino", gru_hidden_dim=8, emb_dim=4),
        "prefix_gru.weight_hh_l0 is missing",
    ),
    "another speculator": (
        dspark,
        outer(speculators_model_type="mtp"),
        "speculators_model_type 'mtp' is not supported",
    ),
    "no layers of speculators": (
        dspark,
        outer(speculators_model_type="dspark"),
        "transformer_layer_config must be a mapping",
    ),
    "a smaller vocabulary without d2t": (
        dflash,
        lambda c, t: t.update({"lm_head.weight": torch.ones(9, H)}),
        "drafts 9 of the target's 61 tokens, but holds no d2t",
    ),
    "a smaller vocabulary without its head": (dflash, outer(draft_vocab_size=9), "drafts 9 .* holds no lm_head.weight"),
    "unknown field": (dspark, outer(gate_scale=2), r"gate_scale \(2\)"),
    "block": (dflash, outer(block_size=0), "block_size must be a whole number"),
    "block of one": (dflash, outer(block_size=1), "block_size is 1"),
    "a part of the rotary numbers": (
        dflash,
        outer(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "rope_parameters.partial_rotary_factor is 0.5, and only 1.0 is supported",
    ),
    "windows of fewer layers": (dflash, outer(layer_types=["sliding_attention"]), "for each of 2 layers"),
    "chunks": (dflash, outer(layer_types=["chunked_attention"] * 2), "layer_types must name one of full_attention"),
    "family": (dflash, outer(model_type="mamba"), "model_type must be one of llama, qwen3, not 'mamba'"),
    "layers": (dflash, outer(num_hidden_layers=10**6), "num_hidden_layers is 1000000"),
    "hidden size": (dflash, outer(target_hidden_size=64), "size 64, the target .* 32"),
    "recurrent": (dspark, outer(markov_head_type="rnn"), "markov_head.joint_proj.weight is missing"),
    "another Markov head": (dspark, outer(markov_head_type="deep"), "one of vanilla, gated, rnn, not 'deep'"),
    "rank": (dspark, outer(markov_rank=5), r"markov_w1.weight is \[61, 6\], not \[61, 5\]"),
    "another vocabulary": (
        dspark,
        lambda c, t: t.update({"lm_head.weight": torch.ones(99, H)}),
        "draft_vocab_size must be a whole number from 1 to 61, not 99",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(target, tmp_path, case):
    kind, change, message = REFUSED[case]
    config, tensors = kind(H) if kind is dflash else kind(H, VOCABULARY)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        BlockDrafter.load(target, written(tmp_path / "drafter", config, tensors), depth=2)


NEXT = {"taps": [1, 2, 3], "anchor": "next"}
OWN = {"taps": [1, 3], "anchor": "own"}
FULL = {"window": 0, "positions": 1, "causal": "none", "rope": "neox", "rope_scaling": "own"}
READINGS = {
    "dflash": FULL | OWN,
    "dspark": FULL | NEXT,
    "dspark-own-row": FULL | NEXT | {"anchor": "own"},
    "dspark-speculators": FULL | NEXT | {"d2t": "offset"},
    "dspark-lfm2": FULL | NEXT | {"rope": "interleaved"},
    "dflash-windows": FULL
    | {"taps": [1, 3], "anchor": "own", "window": 6, "window_from": "query", "causal": "windows"},
    "dflash-llama-windows": FULL | OWN | {"window": 4, "window_from": "query"},
    "dflash-causal": FULL | OWN | {"causal": "all"},
    "dflash-neighbours": FULL | OWN | {"rope": "interleaved"},
}


@pytest.mark.parametrize("name", READINGS)
def test_the_reading_of_a_drafter_is_recorded_and_its_values_are_options(target, folders, name):
    proposer = BlockDrafter.load(target, folders[name], depth=2)
    assert proposer.reading.values == READINGS[name]
    assert proposer.facts["reading"] == proposer.reading.facts
    again = BlockDrafter.load(target, folders[name], depth=2, **READINGS[name])
    assert again.network.settings == proposer.network.settings
    for convention, _, value in proposer.reading.others:
        other = BlockDrafter.load(target, folders[name], depth=2, **{convention: value})
        assert other.reading.values == READINGS[name] | {convention: value}


@pytest.mark.parametrize(("name", "wrong", "right"), [
    ("dspark-gated", {"sample_from_anchor": False}, {"anchor": "next"}),
    ("dflash-neighbours", {"rope_is_neox_style": True}, {"rope": "interleaved"}),
    ("dflash-causal", {"causal": False}, {"causal": "all"}),
    ("dflash-swa", {"swa_window_size": 3}, {"window": 7}),
    ("dflash", {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3]}}, {"taps": [1, 3]}),
])  # fmt: skip
def test_an_option_sets_right_what_a_config_misstates(target, folders, tmp_path, name, wrong, right):
    config, tensors = VARIANTS[name]
    path = written(tmp_path / "drafter", config | wrong, tensors)
    texts = [
        emitted(decode(target, BlockDrafter.load(target, folder, depth=3, **options), requests(WARM, new=10))[0])
        for folder, options in ((folders[name], {}), (path, right), (path, {}))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_taps_are_read_in_the_order_of_the_layers_and_the_other_order_is_offered(target, tmp_path, caplog):
    config, tensors = dflash(H, ids=(2, 0))
    proposer = BlockDrafter.load(target, written(tmp_path / "drafter", config, tensors), depth=2)
    assert proposer.requires.hidden == (1, 3)
    assert ("taps", "in the order of the list", [3, 1]) in proposer.reading.others
    assert "try taps=[3,1]" in caplog.text


def test_a_tree_wider_than_dflash2_has_candidates_is_refused(target, folders):
    assert BlockDrafter.load(target, folders["dflash2"], tree="5").nodes == 5
    with pytest.raises(ValueError, match="a tree 6 wide does not fit a vocabulary of 5"):
        BlockDrafter.load(target, folders["dflash2"], tree="6")


@pytest.mark.parametrize("options", [{"depth": 5}, {"tree": "1x1x1x1x1"}, {"nodes": 9, "max_depth": 5}])
def test_trees_deeper_than_a_block_are_refused(target, folders, options):
    with pytest.raises(ValueError, match="drafts 4 tokens at a time, not 5: set a smaller proposer.depth"):
        BlockDrafter.load(target, folders["dflash"], **options)
