"""Hydra: cached, batched heads over trees agree with plain forwards over whole texts; drafts are as declared."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.draft_layers import small_layer
from spec_lab.drafters.hydra.files import read_hydra, write_hydra
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.models.support import Unsupported
from spec_lab.verify import Traversal
from tests.drafters.eagle_heads import written
from tests.drafters.hydra_heads import hydra
from tests.oracles import hydra as oracle
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
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

H, SIZES, K = 32, (4, 2, 8), 4
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
VARIANTS = {
    "mlp": hydra(H, VOCABULARY, layers=4),
    "mlp-one-layer-shared": hydra(H, VOCABULARY, layers=1, shared=True),
    "mlp-identity-shared": hydra(H, VOCABULARY, layers=2, shared=True, identity=True),
    "prefix": hydra(H, VOCABULARY, layers=4, prefix=True),
    "prefix-without-copies": hydra(H, VOCABULARY, layers=3, prefix=True, copies=False),
    "prefix-one-layer-shared": hydra(H, VOCABULARY, layers=1, prefix=True, shared=True),
    "prefix-identity": hydra(H, VOCABULARY, layers=3, prefix=True, identity=True),
}
BOTH = ["mlp", "prefix"]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: written(tmp_path_factory.mktemp(name), *head) for name, head in VARIANTS.items()}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.one_in(3)
def test_packed_heads_draft_as_heads_that_are_not(folders, name):
    """In float32 linear layers are packed, in float64 they are not."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        target = tiny_target(dtype=dtype)
        group, steps = decode(
            target, Hydra.load(target, folders[name], tree=TREE, drawn="deterministic"), requests(new=12)
        )
        runs.append((emitted(group), [info.draft.token.tolist() for info in steps]))
    assert runs[0] == runs[1] and sum(map(len, runs[0][1])) > 40


def with_copies(config, w):
    """All tensors of a file with a prefix layer that holds only the first of the repeated layers."""
    if config["hydra_head_arch"] == "mlp":
        return w
    more = {
        name.replace(".3.linear", f".{2 * k + 1}.linear"): tensor
        for name, tensor in w.items()
        for k in range(2, config["hydra_num_layers"])
    }
    return more | w


@torch.no_grad()
def reference(name, target, computed, after, taps=(-1,), lm_head="own"):
    """Logits ``[V]`` after ``computed`` tokens and those ``after`` them, pending or drafted."""
    config, w = VARIANTS[name]
    model, layers, before = target.lm.model, config["hydra_num_layers"], []
    with model.model.norm.register_forward_pre_hook(lambda _, args: before.append(*args)):
        states = model.base_model(input_ids=torch.tensor([computed]), use_cache=False)[0][0]
    states = states if taps == (-1,) else before[0][0]
    lm_head = model.lm_head if config.get("shared_lm_head") or lm_head == "target" else None
    embedding = model.get_input_embeddings().weight
    return oracle.logits(with_copies(config, w), embedding, states, after, SIZES, layers, lm_head)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
@pytest.mark.one_in(3)
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, folders, name):
    proposer = Hydra.load(target, folders[name], tree=TREE, drawn="without_replacement")

    def expected(text, path):
        return reference(name, target, text[:-1], [*text[-1:], *path])

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=9), expected)
    assert compared > 40 and rejections > 5


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_the_last_state_and_the_lm_head_are_readings(target, folders, name):
    proposer = Hydra.load(target, folders[name], tree=TREE, drawn="without_replacement")
    assert proposer.reading.values == {"taps": [-1], "lm_head": "own"} and proposer.facts["reading"]
    assert [(name, value) for name, _, value in proposer.reading.others] == [("taps", [2]), ("lm_head", "target")]
    other = Hydra.load(target, folders[name], tree=TREE, drawn="without_replacement", taps=[2], lm_head="target")

    def expected(text, path):
        return reference(name, target, text[:-1], [*text[-1:], *path], (2,), "target")

    assert compare_stated(target, other, requests(WARM, new=6), expected)[0] > 20
    with pytest.raises(ValueError, match="taps must name one hidden state of Hydra heads"):
        Hydra.load(target, folders[name], tree=TREE, taps=[1, 2])


def test_heads_without_lm_heads_leave_only_the_last_state_open(target, folders):
    path = folders["mlp-one-layer-shared"]
    assert [name for name, *_ in Hydra.load(target, path, tree=TREE).reading.others] == ["taps"]
    with pytest.raises(ValueError, match="holds no LM heads of its own"):
        Hydra.load(target, path, tree=TREE, lm_head="own")


WAYS = [
    {"tree": TREE, "drawn": "deterministic"},
    {"depth": 4},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
    {"nodes": 7, "max_depth": 4, "drawn": "without_replacement", "temperature": 1.0},
]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, folders, name, options):
    truth = [plain_greedy(target.lm.model, request.tokens, 20) for request in requests()]
    group, steps = decode(target, Hydra.load(target, folders[name], **options), requests())
    assert emitted(group) == truth
    assert steps[0].draft.shape.nodes == 0, "no position is computed before the first step"
    assert sum(info.draft.shape.nodes for info in steps) > 60


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, folders, name, sampling):
    proposer = Hydra.load(target, folders[name], tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


def computed(target, proposer, batch):
    """Compute the pending tokens of all sequences, and let the proposer observe them."""
    target.lm.capture(proposer.requires.hidden)
    starts = [len(sequence.kv) for sequence in batch.sequences]
    pending = [sequence.pending for sequence in batch.sequences]
    output = target.lm.forward([sequence.kv for sequence in batch.sequences], pending, proposer.propose(batch))
    proposer.observe(observations(batch.sequences, output, starts))
    target.lm.capture(())


def agree(name, target, draft, batch):
    """Whether all stated distributions are those of plain forwards; the number of levels of each tree."""
    for row, sequence, text, _ in expanded(draft, batch.sequences):
        known = len(sequence.kv)
        expected = reference(name, target, text[:known], text[known:]).softmax(-1)
        torch.testing.assert_close(draft.q[draft.q_row[row]], expected, rtol=0, atol=1e-6)
    return [int(draft.shape.depth[rows].max()) for rows in draft.shape.trees]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("options", [{"tree": "2x1x1"}, {"nodes": 8, "children": 2, "max_depth": 3, "width": 2}])
@torch.no_grad()
def test_below_several_pending_tokens_drafting_begins_with_a_later_head(target, folders, name, options):
    """In one batch with a prompt that is not yet computed, and with more pending tokens than there are heads."""
    proposer = Hydra.load(target, folders[name], drawn="without_replacement", **options)
    batch = batch_of(target, requests(WARM, prompts=(*PROMPTS, PROMPTS[0], PROMPTS[1], PROMPTS[2])), proposer)
    fresh = batch.sequences.pop()
    computed(target, proposer, batch)
    for sequence, count in zip(batch.sequences, (3, 1, 2, 5, 4), strict=True):
        sequence.tokens += [7, 8, 9, 10, 11][:count]
    batch.sequences.append(fresh)
    assert agree(name, target, proposer.propose(batch), batch) == [2, 3, 3, 0, 1, 0]


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_a_fork_and_a_rewound_sequence_draft_from_their_own_last_position(target, folders, name):
    """Also where drafting has happened before, so that the prefix layer has read all positions."""
    proposer = Hydra.load(target, folders[name], tree="2x1x1", drawn="without_replacement")
    batch = batch_of(target, requests(WARM, prompts=PROMPTS[:1]), proposer)
    seq = batch.sequences[0]
    computed(target, proposer, batch)
    seq.tokens.append(7)
    agree(name, target, proposer.propose(batch), batch)
    batch.sequences.append(fork_of(seq, proposer))
    for number, (sequence, length) in enumerate(zip(batch.sequences, (6, 4), strict=True)):
        sequence.kv.truncate(length)
        sequence.tokens[length:] = [8 + number]
        proposer.rewind(sequence.state, length)
    assert agree(name, target, proposer.propose(batch), batch) == [3, 3]
    computed(target, proposer, batch)
    for sequence in batch.sequences:
        sequence.tokens.append(20)
    assert agree(name, target, proposer.propose(batch), batch) == [3, 3]
    for sequence in batch.sequences:
        proposer.close(sequence.state)
        sequence.kv.close()
    assert proposer.lm is None or not proposer.lm.cells.references.any()


@torch.no_grad()
def test_what_the_prefix_layer_read_of_removed_tokens_is_forgotten_though_nothing_is_drafted_at_once(target, folders):
    proposer = Hydra.load(target, folders["prefix"], tree="2x1", drawn="without_replacement")
    batch = batch_of(target, requests(WARM, prompts=PROMPTS[:1]), proposer)
    sequence = batch.sequences[0]
    computed(target, proposer, batch)
    sequence.tokens.append(7)
    proposer.propose(batch)
    sequence.kv.truncate(3)
    proposer.rewind(sequence.state, 3)
    sequence.tokens[3:] = range(10, 10 + K + 1)
    assert proposer.propose(batch).shape.nodes == 0, "more pending tokens than heads"
    computed(target, proposer, batch)
    sequence.tokens.append(7)
    assert agree("prefix", target, proposer.propose(batch), batch) == [2]


@pytest.mark.parametrize("name", VARIANTS)
def test_written_heads_are_read_again(target, folders, tmp_path, name):
    network = read_hydra(folders[name], target)
    sha256 = write_hydra(network, tmp_path / "again", "a target", {"source_sha256": "ab" * 32})
    again = read_hydra(str(tmp_path / "again"), target)
    held = dict(again.named_parameters())
    assert held.keys() == dict(network.named_parameters()).keys()
    assert all(torch.equal(parameter, held[key]) for key, parameter in network.named_parameters())
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as opened:
        names, facts = set(opened.keys()), opened.metadata()
    config, w = VARIANTS[name]
    assert names == with_copies(config, w).keys() - {"prefix_embeding_layer.embed_tokens.weight"}
    assert facts["source_sha256"] == "ab" * 32
    assert Hydra.load(target, str(tmp_path / "again"), depth=1).sha256 == sha256
    data = json.loads((tmp_path / "again" / "config.json").read_text())
    layer = data.pop("prefix_layer_config", None)
    assert data == config | {"base_model_name_or_path": "a target"}
    assert (layer is not None) == name.startswith("prefix")


FIRST = "hydra_mlp.1.1.linear.weight"
REFUSED = {
    "missing": (lambda c, t: t.pop(FIRST), f"{FIRST} is missing"),
    "missing residual": (lambda c, t: t.pop("hydra_mlp.0.1.res_connection.bias"), "res_connection.bias is missing"),
    "missing prefix": (lambda c, t: t.pop("prefix_embeding_layer.norm.weight"), "prefix_embeding_layer.norm.weight is"),
    "surplus": (lambda c, t: t.update(extra=torch.zeros(2)), "'extra' is in no layer"),
    "misshapen": (lambda c, t: t.update({FIRST: torch.ones(H, H)}), rf"{FIRST} is \[32, 32\], not \[32, 96\]"),
    "nan": (lambda c, t: t[FIRST].fill_(float("nan")), f"'{FIRST}' holds NaN"),
    "infinite": (lambda c, t: t["hydra_lm_head.3.1.bias"].fill_(float("inf")), "infinite"),
    "copies that differ": (lambda c, t: t["hydra_mlp.2.5.linear.bias"].add_(1), "differs from 'hydra_mlp.2.3.linear"),
    "some copies": (lambda c, t: t.pop("hydra_mlp.2.7.linear.bias"), "hydra_mlp.2.7.linear.bias is missing"),
    "more heads": (lambda c, t: c.update(hydra_num_heads=5), "hydra_num_heads is 5, but the weight files hold 4"),
    "fewer heads": (lambda c, t: c.update(hydra_num_heads=3), "hydra_num_heads is 3, but the weight files hold 4"),
    "more layers": (lambda c, t: c.update(hydra_num_layers=5), "hydra_mlp.0.9.linear.bias is missing"),
    "fewer layers": (lambda c, t: c.update(hydra_num_layers=3), "'hydra_mlp.0.7.linear.bias' is in no layer"),
    "endless layers": (lambda c, t: c.update(hydra_num_layers=10**9), "hydra_num_layers must .* from 1 to 1024, not"),
    "no heads": (lambda c, t: c.update(hydra_num_heads=0), "hydra_num_heads must .* from 1 to 1024, not 0"),
    "heads of text": (lambda c, t: c.update(hydra_num_heads="4"), "hydra_num_heads must .* not '4'"),
    "layers not named": (lambda c, t: c.pop("hydra_num_layers"), "hydra_num_layers must .* not null"),
    "other arch": (lambda c, t: c.update(hydra_head_arch="cross-attn"), "'cross-attn'"),
    "wrong arch": (lambda c, t: c.update(hydra_head_arch="mlp"), "do not fit its config.json"),
    "names of the other arch": (
        lambda c, t: (t.clear(), t.update(hydra(H, VOCABULARY, layers=4)[1])), "do not fit its config.json",
    ),
    "unknown fields": (lambda c, t: c.update(gated=True, vocab_size=61, sizes=[1]), r"gated \(true\), sizes \("),
    "unknown fields of the prefix": (
        lambda c, t: c.update(prefix_layer_config={"hidden_size": H, "model_type": "llama", "qk_scale": 2}), "qk_scale",
    ),
    "ungrounded": (lambda c, t: c.update(grounded_heads=False), "grounded_heads must be true, not false"),
    "offset": (lambda c, t: c.update(hidden_state_offset=1), "hidden_state_offset must be 0, not 1"),
    "identity of text": (lambda c, t: c.update(identity_skip="no"), "identity_skip must be true or false"),
    "identity, with own": (lambda c, t: c.update(identity_skip=True), "'hydra_mlp.0.1.res_connection.bias' is in"),
    "shared of text": (lambda c, t: c.update(shared_lm_head="yes"), "shared_lm_head must be true or false"),
    "shared, with own": (lambda c, t: c.update(shared_lm_head=True), "'hydra_lm_head.0.1.bias' is in no layer"),
    "unused of another size": (
        lambda c, t: t.update({"prefix_embeding_layer.embed_tokens.weight": torch.ones(5, H)}), r"is \[5, 32\]",
    ),
    "prefix of text": (lambda c, t: c.update(prefix_layer_config="llama"), "prefix_layer_config must be a mapping"),
    "prefix of another size": (lambda c, t: c.update(prefix_layer_config={}), "prefix_layer_config.hidden_size"),
    "prefix of no family": (
        lambda c, t: c.update(prefix_layer_config={"hidden_size": H, "model_type": "none"}), "model_type 'none'",
    ),
    "not Hydra": (lambda c, t: (t.clear(), t.update(a=torch.zeros(1))), "no Hydra heads"),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_do_not_fit_are_refused_with_the_reason(target, tmp_path, case):
    change, message = REFUSED[case]
    config, tensors = hydra(H, VOCABULARY, layers=4, prefix=True)
    change(config, tensors)
    path = written(tmp_path / "head", config, tensors)
    with pytest.raises(ValueError, match=message):
        Hydra.load(target, path, depth=2)


@pytest.mark.parametrize(("sizes", "message"), [
    ((48, VOCABULARY), "for hidden size 48, the target .* has 32"),
    ((H, 50), "for a vocabulary of 50 tokens, the target .* has 61"),
])  # fmt: skip
@pytest.mark.parametrize("prefix", [False, True])
def test_heads_for_another_target_are_refused(target, tmp_path, sizes, message, prefix):
    path = written(tmp_path / "head", *hydra(*sizes, prefix=prefix))
    with pytest.raises(ValueError, match=message):
        Hydra.load(target, path, depth=2)


def test_a_prefix_layer_for_a_target_without_a_config_of_transformers_needs_its_own(target, tmp_path):
    kept = {name: getattr(target.lm, name) for name in ("device", "dtype", "capabilities")}
    lm = SimpleNamespace(hf_model=None, vocabulary=VOCABULARY, **kept)
    bare = replace(target, lm=lm, parts=target.services)
    config, tensors = hydra(H, VOCABULARY, prefix=True, sizes=(2, 1, 4), inner=8)
    with pytest.raises(Unsupported, match="prefix_layer_config"):
        Hydra.load(bare, written(tmp_path / "without_replacement", config, tensors), depth=2)
    config["prefix_layer_config"] = small_layer(H)
    assert Hydra.load(bare, written(tmp_path / "with", config, tensors), depth=2).facts["head_arch"] == "prefix-mlp"


def test_what_the_prefix_layer_does_not_read_may_be_in_the_file(target, tmp_path):
    config, tensors = hydra(H, VOCABULARY, prefix=True)
    tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    names = dict(read_hydra(written(tmp_path / "head", config, tensors), target).named_parameters())
    assert "prefix.norm.weight" in names and not any("embed" in name or "freq" in name for name in names)


@pytest.mark.parametrize(("options", "named"), [
    ({"depth": 5}, "depth"),
    ({"tree": "0 0.0 0.0.0 0.0.0.0 0.0.0.0.0"}, "tree"),
    ({"nodes": 9, "max_depth": 5}, "max_depth"),
    ({"nodes": 9, "rerank": True, "drawn": "deterministic"}, "max_depth"),
])  # fmt: skip
def test_a_plan_with_more_levels_than_heads_is_refused(target, folders, options, named):
    with pytest.raises(ValueError, match=rf"{named}.* levels.* only 4 Hydra heads"):
        Hydra.load(target, folders["mlp"], **options)


def test_wrong_options_are_refused_before_files_are_read(target):
    with pytest.raises(ValueError, match=r"tree"):
        Hydra.load(target, "nowhere", tree="99")
