"""EAGLE: the cached, batched network over trees agrees with plain forwards over whole texts; drafts are as declared."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_lab.core.draft import empty
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.proposer import Observation
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.models.fused import FusedAttention
from spec_lab.models.support import Unsupported
from spec_lab.verify import Traversal
from tests.drafters.eagle_heads import SIZES, eagle1, eagle3, speculators, written
from tests.oracles import eagle as oracle
from tests.propose.lab import COLD, WARM, batch_of, compare_stated, decode, emitted, plain_greedy, requests
from tests.tiny import VOCABULARY, tiny_target

H = 32
IDS = [3, 5, 6, 8, 13, 14, 15, 21, 26, 31, 34, 41, 50, 55, 57, 60]
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
VARIANTS = {
    "eagle1": eagle1(H, VOCABULARY),
    "eagle1-two-layers-without-bias": eagle1(H, VOCABULARY, layers=2, bias=False),
    "eagle3": eagle3(H, VOCABULARY, IDS),
    "eagle3-every-flag": eagle3(
        H, VOCABULARY, IDS, flags=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    ),
    "eagle3-two-layers-all-tokens": eagle3(H, VOCABULARY, layers=2),
    "eagle3-five-taps-own-embedding": eagle3(
        H, VOCABULARY, IDS, taps=5, embedding=True, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 4]}
    ),
    "eagle3-norms-of-queries": eagle3(H, VOCABULARY, IDS, norms=True),
    "eagle3-narrow": eagle3(20, VOCABULARY, IDS, wide=H, embedding=True),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    heads = VARIANTS | {"eagle3-every-flag": speculators(*VARIANTS["eagle3-every-flag"])}  # which tells norm_output
    return {name: written(tmp_path_factory.mktemp(name), *head) for name, head in heads.items()}


def taps_of(config, last):
    inner = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return (
        sorted([2, last // 2, last - 3]) if inner is None else inner if max(inner) == last else [n + 1 for n in inner]
    )


def reference(name, target, text, path):
    """Logits ``[V]`` after ``text`` and a drafted ``path``, whose features are the network's own."""
    config, w = VARIANTS[name]
    model, before = target.lm.model, []
    with model.model.norm.register_forward_pre_hook(lambda _, args: before.append(*args)):
        states = model(input_ids=torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
    embedding, tokens = model.get_input_embeddings().weight, torch.tensor(text[1:])
    flags = [flag for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if config.get(flag)]
    if name.startswith("eagle1"):
        features = states[-1][0]
        for token in (*path, None):
            outputs = oracle.eagle1(w, embedding, tokens, features, SIZES)[-1:]
            if token is None:
                return model.lm_head(outputs)[0]
            features, tokens = torch.cat([features, outputs]), torch.cat([tokens, torch.tensor([token])])
    states = [*states[:-1], *before]  # the last one before the final norm
    taps = [states[tap][0] for tap in taps_of(config, len(states) - 1)]
    features = oracle.eagle3_features(w, taps, flags)
    for token in (*path, None):
        outputs, logits = oracle.eagle3(w, embedding, tokens, features, SIZES, flags)
        if token is None:
            ids = torch.arange(VOCABULARY) if "d2t" not in w else torch.arange(len(w["d2t"])) + w["d2t"]
            return torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64).index_copy(0, ids, logits[-1])
        features, tokens = torch.cat([features, outputs[-1:]]), torch.cat([tokens, torch.tensor([token])])
    return None


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
@pytest.mark.one_in(9)
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, folders, name):
    proposer = eagle.load(target, folders[name], tree=TREE, drawn="without_replacement")

    def expected(text, path):
        return reference(name, target, text, path)

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=9), expected)
    assert compared > 50 and rejections > 5


WAYS = [
    {"tree": TREE, "drawn": "deterministic"},
    {"depth": 4},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
    {"nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
    {"nodes": 7, "drawn": "deterministic", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, folders, name, options):
    truth = [plain_greedy(target.lm.model, request.tokens, 20) for request in requests()]
    group, steps = decode(target, eagle.load(target, folders[name], **options), requests())
    assert emitted(group) == truth
    assert all(info.draft.shape.nodes == 0 for info in steps[:1]), "no position is computed before the first step"
    assert sum(info.draft.shape.nodes for info in steps) > 60


@pytest.mark.parametrize("name", ["eagle1", "eagle3-two-layers-all-tokens"])
def test_attention_of_a_head_is_fused_and_its_rotations_are_read_from_a_table(target, folders, name):
    body = eagle.load(target, folders[name], depth=1).network.body
    assert all(isinstance(vars(layer.self_attn)["forward"], FusedAttention) for layer in body.layers)
    x = torch.empty(0, dtype=torch.float64)
    for positions in ([[3, 0, 0]], [[700, 2]], [[]]):
        places = torch.tensor(positions, dtype=torch.long)
        for values, expected in zip(body.rotate(x, places), body.rotary(x, places), strict=True):
            torch.testing.assert_close(values, expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3-two-layers-all-tokens", "eagle3-every-flag"])
def test_a_head_may_have_another_dtype_than_the_target(target, folders, name):
    proposer = eagle.load(target, folders[name], tree=TREE, drawn="without_replacement", dtype="float32")
    assert proposer.facts["dtype"] == "float32" and target.lm.dtype == torch.float64
    assert {parameter.dtype for parameter in proposer.network.parameters()} == {torch.float32}

    def expected(text, path):
        return reference(name, target, text, path)

    compare_stated(target, proposer, requests(WARM, new=9), expected, atol=1e-5, check_dtype=False)


@torch.no_grad()
def test_nothing_is_drafted_below_several_pending_tokens_and_drafting_resumes_after_them(target, folders):
    """Features of pending positions are not known."""
    proposer, wanted = eagle.load(target, folders["eagle3"], depth=2), requests(WARM, prompts=[(3, 14, 15, 9, 26, 5)])
    batch = batch_of(target, wanted, proposer, CounterDraws(1))
    (sequence,) = batch.sequences
    target.lm.capture(proposer.requires.hidden)
    for forced in ([4, 17, 8], [2]):  # what follows what is computed
        assert proposer.propose(batch).shape.nodes == 0
        start = len(sequence.kv)
        output = target.lm.forward([sequence.kv], [sequence.pending], empty(1))
        sequence.tokens += forced
        proposer.observe(
            [Observation(sequence, start, sequence.tokens[start : len(sequence.kv) + 1], output.pending[0])]
        )
    draft = proposer.propose(batch)
    assert draft.shape.nodes == 2
    expected = logits_to_probs(reference("eagle3", target, sequence.tokens, [])[None], [WARM])[0]
    torch.testing.assert_close(draft.q[draft.q_row[0]], expected, rtol=0, atol=1e-6)
    target.lm.capture()


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, folders, name, sampling):
    proposer = eagle.load(target, folders[name], tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


def test_the_formats_of_one_head_draft_the_same(target, tmp_path):
    config, tensors = eagle3(H, VOCABULARY, IDS, flags=("norm_before_residual",))
    official = written(tmp_path / "official", config, tensors)
    other = written(tmp_path / "speculators", *speculators(config, tensors))
    texts = [
        emitted(decode(target, eagle.load(target, path, tree=TREE, drawn="without_replacement"), requests(WARM))[0])
        for path in (official, other)
    ]
    assert texts[0] == texts[1]


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(("config", "taps", "source"), [
    ({}, [1, 2, 2], "guess"),
    ({AUX: []}, [1, 2, 2], "guess"),
    ({AUX: [1, 2, 3]}, [1, 2, 3], "file"),
    ({AUX: [1, 2, 4]}, [1, 2, 4], "guess"),
    ({"eagle_config": {AUX: [0, 1, 2]}}, [1, 2, 3], "guess"),
    ({"eagle_config": {AUX: [1, 2, 4]}}, [1, 2, 4], "guess"),
    ({"eagle_config": {AUX: [2, 0, 1], "use_aux_hidden_state": True}}, [1, 2, 3], "guess"),
])  # fmt: skip
def test_taps_are_read_by_the_convention_of_their_field(target, tmp_path, caplog, config, taps, source):
    path = written(tmp_path / "head", *eagle3(H, VOCABULARY, IDS, **config))
    proposer = eagle.load(target, path, depth=1)
    assert proposer.requires.hidden == tuple(taps)
    assert (proposer.reading.values["taps"], proposer.facts["reading"]["taps"]["source"]) == (taps, source)
    assert [" taps=[" in line for line in caplog.messages] == [True] * (source == "guess")


def test_an_option_sets_the_taps_and_the_file_s_own_become_another_reading(target, tmp_path, caplog):
    path = written(tmp_path / "head", *eagle3(H, VOCABULARY, IDS, eagle_config={AUX: [2, 0, 1]}))
    proposer = eagle.load(target, path, depth=1, taps=[3, 1, 2])
    assert proposer.requires.hidden == (3, 1, 2) and not caplog.messages
    assert proposer.facts["reading"]["taps"]["source"] == "option"
    others = {label: value for name, label, value in proposer.reading.others if name == "taps"}
    assert [1, 2, 3] in others.values() and [0, 1, 2] in others.values() and [3, 1, 2] not in others.values()
    with pytest.raises(ValueError, match="taps names hidden state 5, but the target .* has states 0 to 4"):
        eagle.load(target, path, depth=1, taps=[1, 2, 5])
    with pytest.raises(ValueError, match="fc.weight is"):
        eagle.load(target, path, depth=1, taps=[1, 2])


def test_an_option_for_what_a_file_does_not_have_is_refused(target, tmp_path):
    path = written(tmp_path / "head", *eagle1(H, VOCABULARY))
    with pytest.raises(ValueError, match=r"d2t sets a convention .* an EAGLE head .* do not have.*\(.* rope=neox, "):
        eagle.load(target, path, depth=1, d2t="offset")


def test_taps_in_another_order_than_the_layers_are_read_in_order_and_logged(target, tmp_path, caplog):
    order, other = [1, 2, 3], [3, 1, 2]
    texts = []
    for ids in (order, other):
        path = written(tmp_path / str(ids), *eagle3(H, VOCABULARY, IDS, eagle_aux_hidden_state_layer_ids=ids))
        with caplog.at_level("WARNING", "spec_lab.drafters.drafter_files"):
            texts.append(emitted(decode(target, eagle.load(target, path, tree=TREE), requests(WARM))[0]))
        assert [str(ids) in line for line in caplog.messages] == [True] * (ids == other)
    assert texts[0] == texts[1]


def test_a_head_that_this_package_trained_with_taps_in_another_order_keeps_it(target, tmp_path, caplog):
    config, tensors = eagle3(H, VOCABULARY, IDS, eagle_aux_hidden_state_layer_ids=[4, 1, 2])
    path = written(tmp_path / "head", config, tensors)
    facts = {"format": "pt", "target_sha256": "", "method": "eagle3", "seed": "0"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{path}/model.safetensors", facts)
    assert eagle.load(target, path, depth=1).requires.hidden == (4, 1, 2)
    assert [" taps=[1,2,4]" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm"])
def test_flags_in_eagle_config_are_read(target, tmp_path, name):
    config, tensors = eagle3(H, VOCABULARY, IDS, flags=(name,))
    inner = {key: value for key, value in config.items() if key != name} | {"eagle_config": {name: True}}
    texts = [
        emitted(
            decode(
                target, eagle.load(target, written(tmp_path / str(at), head_config, tensors), depth=2), requests(WARM)
            )[0]
        )
        for at, head_config in enumerate((config, inner))
    ]
    assert texts[0] == texts[1]


def broken(change, head=None):
    config, tensors = head or eagle3(H, VOCABULARY, IDS)
    config, tensors = dict(config), dict(tensors)
    change(config, tensors)
    return config, tensors


REFUSED = {
    "missing": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
    "surplus": (lambda c, t: t.update(extra=torch.zeros(2)), "'extra' is in no layer"),
    "misshapen": (lambda c, t: t.update({"norm.weight": torch.ones(5)}), r"norm.weight is \[5\], not \[32\]"),
    "nan": (lambda c, t: t["fc.weight"].fill_(float("nan")), "NaN"),
    "without d2t": (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "no d2t"),
    "descending d2t": (lambda c, t: t.update(d2t=t["d2t"].flip(0)), "d2t names no tokens"),
    "d2t of floats": (lambda c, t: t.update(d2t=t["d2t"].float()), "whole numbers"),
    "other t2d": (lambda c, t: t.update(t2d=~t["t2d"]), "d2t names no tokens"),
    "taps": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        "names layer 9, but the target .* 4 layers",
    ),
    "no taps": (
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}),
        r"fc.weight is \[32, 96\], not \[32, 32\]",
    ),
    "P-EAGLE": (
        lambda c, t: c.update(mask_token_id=3, parallel_drafting=True),
        r"parallel_drafting.*mask_token_id \(3\)",
    ),
    "unknown field": (lambda c, t: c.update(residual_multiplier=0.2), r"residual_multiplier \(0\.2\)"),
    "eagle_config of text": (lambda c, t: c.update(eagle_config="all"), "eagle_config must be a mapping"),
    "taps of text": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids="all"), "list of layers"),
    "no taps at all": (lambda c, t: t.update({"fc.weight": t["fc.weight"][:, :5]}), r"fc.weight is \[32, 5\]"),
    "hidden size": (lambda c, t: c.update(target_hidden_size=64), "size 64, the target .* 32"),
    "vocabulary": (lambda c, t: c.update(vocab_size=1000), "vocabulary of 1000 tokens, the target .* has 61"),
    "draft vocabulary": (lambda c, t: c.update(draft_vocab_size=1000), "draft_vocab_size"),
    "both names of a tensor": (
        lambda c, t: t.update({"layers.0.self_attn.q_proj.weight": t["midlayer.self_attn.q_proj.weight"].clone()}),
        "q_proj.weight' is in no layer",
    ),
    "scalar": (
        lambda c, t: (c.pop("draft_vocab_size"), t.update({"lm_head.weight": torch.tensor(1.0)})),
        "lm_head.weight",
    ),
    "quantized": (lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "'fc.weight' has data type I8"),
    "eight bits": (
        lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        "'fc.weight' has data type F8_E4M3",
    ),
    "windows": (lambda c, t: c.update(layer_types=["sliding_attention"]), "sliding_window must be a whole number"),
    "a part of the rotary numbers": (
        lambda c, t: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.25}),
        "rope_scaling.partial_rotary_factor is 0.25, and only 1.0 is supported",
    ),
    "chunks": (lambda c, t: c.update(layer_types=["chunked_attention"]), "layer_types must name one of"),
    "windows of a family": (
        lambda c, t: c.update(model_type="mistral", sliding_window=8, architectures=["Eagle3"]),
        "full attention",
    ),
    "endless rotary embedding": (lambda c, t: c.update(head_dim=2**31), "rotary embedding"),
    "flag": (lambda c, t: c.update(norm_before_residual="yes"), "norm_before_residual must be true or false"),
    "unread flag": (lambda c, t: c.update(norm_before_fc=True), "input_norm.weight is missing"),
    "layers": (lambda c, t: c.update(num_hidden_layers=10**6), "num_hidden_layers is 1000000"),
    "size": (lambda c, t: c.update(hidden_size="wide"), "hidden_size must be a whole number"),
    "family": (lambda c, t: c.update(model_type="mamba", architectures=["Eagle3"]), "mamba"),
    "other speculator": (lambda c, t: c.update(speculators_model_type="mlp"), "'mlp' is not supported"),
    "no head": (lambda c, t: (t.clear(), t.update(a=torch.zeros(1))), "no EAGLE head"),
}


def test_rotary_embeddings_are_scaled_by_the_head_s_own_context(target, tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 16}
    head = eagle3(H, VOCABULARY, max_position_embeddings=64, rope_parameters=rope)
    rotary = eagle.load(target, written(tmp_path / "head", *head), tree=TREE).network.body.rotary
    assert target.context != 64
    sizes = dict(hidden_size=H, num_attention_heads=4, head_dim=8)
    transformers_rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes, max_position_embeddings=64, rope_parameters=rope))
    x, places = torch.zeros(1, 1, 1, dtype=torch.float64), torch.arange(100)[None]
    for values, expected in zip(rotary(x, places), transformers_rotary(x, places), strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotations_that_depend_on_the_batch_are_refused(target, tmp_path, rope):
    head = eagle3(H, VOCABULARY, max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 10000.0})
    with pytest.raises(Unsupported, match="RoPE"):
        eagle.load(target, written(tmp_path / "head", *head), tree=TREE)


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(target, tmp_path, case):
    change, message = REFUSED[case]
    path = written(tmp_path / "head", *broken(change, eagle3(H, VOCABULARY, IDS, seed=1)))
    with pytest.raises(ValueError, match=message):
        eagle.load(target, path, depth=2)


def test_an_eagle1_head_for_another_width_is_refused(target, tmp_path):
    path = written(tmp_path / "head", *eagle1(48, VOCABULARY))
    with pytest.raises(ValueError, match="for hidden size 48, the target .* has 32"):
        eagle.load(target, path, depth=2)


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(target, folders):
    assert eagle.load(target, folders["eagle3"], tree=f"{len(IDS)}").nodes == len(IDS)
    with pytest.raises(ValueError, match=rf"tree: a tree {len(IDS) + 1} wide .* {len(IDS)}$"):
        eagle.load(target, folders["eagle3"], tree=f"{len(IDS) + 1}")
