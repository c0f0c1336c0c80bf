"""MTP: the cached, batched modules over trees agree with plain forwards over whole texts; files and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.mtp import propose as mtp
from spec_lab.drafters.mtp.files import write_mtp
from spec_lab.drafters.mtp.network import Mtp, MtpSettings
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Traversal
from tests.checkpoints import checkpoint
from tests.drafters.eagle_heads import written
from tests.drafters.mtp_modules import SIZES, modules
from tests.oracles import mtp as oracle
from tests.propose.lab import COLD, WARM, compare_stated, decode, emitted, plain_greedy, requests
from tests.tiny import COMMON, CONTEXT, VOCABULARY, tiny_target

H, DEPTH = 32, 2
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
VARIANTS = {
    "deepseek": ("deepseek", {}),
    "deepseek-own-embedding-and-head": ("deepseek", {"embedding": True, "head": True}),
    "deepseek-two-modules": ("deepseek", {"count": 2, "head": True}),
    "qwen": ("qwen", {"norms": True}),
    "qwen-own-embedding": ("qwen", {"embedding": True}),
    "qwen-three-modules": ("qwen", {"count": 3, "norms": True}),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def made():
    return {name: modules(H, VOCABULARY, layout, DEPTH, **more) for name, (layout, more) in VARIANTS.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, made):
    return {name: written(tmp_path_factory.mktemp(name), *some) for name, some in made.items()}


def reference(name, w, model, text, path):
    """Logits ``[V]`` after ``text`` and a drafted ``path``, whose hidden states are the modules' own."""
    layout, more = VARIANTS[name]
    hidden = model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
    embedding, tokens = model.get_input_embeddings().weight, torch.tensor(text[1:])
    for level, token in enumerate((*path, None)):
        number = min(level, more.get("count", 1) - 1)
        outputs = oracle.mtp(w, number, layout, DEPTH, embedding, tokens, hidden, SIZES)[-1:]
        if token is None:
            return oracle.head(w, number, layout, DEPTH, outputs, model.lm_head.weight)[0]
        hidden, tokens = torch.cat([hidden, outputs]), torch.cat([tokens, torch.tensor([token])])
    return None


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
@pytest.mark.one_in(3)
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, made, folders, name):
    proposer = mtp.load(target, folders[name], tree=TREE, drawn="without_replacement")

    def expected(text, path):
        return reference(name, made[name][1], target.lm.model, text, path)

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=14), expected)
    assert compared > 50 and rejections > 5


@pytest.mark.parametrize("name", ["deepseek", "qwen-three-modules"])
@pytest.mark.parametrize("options", [
    {"depth": 4}, {"tree": TREE, "drawn": "deterministic"},
    {"nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
    {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
], ids=str)  # fmt: skip
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(target, folders, name, options):
    truth = [plain_greedy(target.lm.model, request.tokens, 20) for request in requests()]
    group, steps = decode(target, mtp.load(target, folders[name], **options), requests())
    assert emitted(group) == truth
    assert all(info.draft.shape.nodes == 0 for info in steps[:1]), "no position is computed before the first step"
    assert sum(info.draft.shape.nodes for info in steps) > 60


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["deepseek-two-modules", "qwen"])
@pytest.mark.parametrize("sampling", [COLD, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
def test_a_batch_decodes_as_its_requests_alone(target, folders, name, sampling):
    proposer = mtp.load(target, folders[name], tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=12)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


def test_positions_of_drafted_rows_are_a_reading(target, folders):
    proposer = mtp.load(target, folders["qwen"], depth=3, temperature=1.0)
    others = [(name, value) for name, _, value in proposer.reading.others]
    assert proposer.reading.values == {"taps": [-1], "positions": 1} and ("positions", 2) in others
    other = mtp.load(target, folders["qwen"], depth=3, temperature=1.0, positions=2)
    first, second = (
        next(info.draft.q for info in decode(target, drafter, requests(WARM, new=4)[:1])[1] if info.draft.shape.nodes)
        for drafter in (proposer, other)
    )
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


# Modules inside the target's own checkpoint


def insert(folder, config, tensors):
    """Add modules to a checkpoint."""
    held = load_file(folder / "model.safetensors")
    save_file(
        held | {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def counted(config):
    return {
        name: value for name, value in config.items() if name in ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("family", "name"), [
    ("llama", "deepseek"), ("llama", "qwen-own-embedding"), ("qwen3", "qwen"), ("llama", "deepseek-two-modules"),
])  # fmt: skip
@torch.no_grad()
def test_modules_in_the_target_s_checkpoint_are_left_out_of_the_target_and_drafted_with(tmp_path, made, family, name):
    config, w = made[name]
    sizes = {"intermediate_size": 24, "num_key_value_heads": 2}
    folder = checkpoint(tmp_path / "target", torch.float64, family=family, **sizes)
    plain = Target.load(str(folder), dtype="float64")
    target = Target.load(str(insert(folder, counted(config), w)), dtype="float64")
    assert target.lm.model.state_dict().keys() == plain.lm.model.state_dict().keys()

    def expected(text, path):
        return reference(name, w, target.lm.model, text, path)

    for path in (None, str(folder)):
        proposer = mtp.load(target, path, tree=TREE, drawn="without_replacement")
        assert proposer.sha256 == target.sha256
        assert compare_stated(target, proposer, requests(WARM, new=14), expected)[0] > 50


SPARSE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "deepseek_v3": SPARSE | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-2,  # not that of the norms inside latent attention
    },
    "glm4_moe": SPARSE | {
        "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
    "qwen3_next": SPARSE | {
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention"] * DEPTH,
    },
}  # fmt: skip
"""Latent attention and routed experts; experts; gated attention, experts and norms around one."""


def with_module(folder, family):
    """A checkpoint of a family with one module; the module's tensors, and transformers' model that ends with its layer.

    The module's layer is saved as the last layer of a model that is one layer deeper.
    """
    torch.manual_seed(0)
    settings = COMMON | FAMILIES[family]
    deeper = settings | {"num_hidden_layers": DEPTH + 1, "layer_types": ["full_attention"] * (DEPTH + 1)}
    deeper = deeper if "layer_types" in settings else settings | {"num_hidden_layers": DEPTH + 1}
    model, source = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).double().eval()
        for sizes in (settings, deeper)
    )
    for layers_of in (model, source):
        for parameter in layers_of.parameters():
            parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    names = oracle.QWEN if family == "qwen3_next" else oracle.DEEPSEEK
    prefix = "mtp." if family == "qwen3_next" else f"model.layers.{DEPTH}."
    module = {f"{prefix}{name}.weight": 0.3 * torch.randn(H, dtype=torch.float64) for name in (*names[:2], names[3])}
    if family != "qwen3_next":
        module = {name: 1 + tensor for name, tensor in module.items()}
    module[f"{prefix}{names[2]}.weight"] = 0.2 * torch.randn(H, 2 * H, dtype=torch.float64)
    source.save_pretrained(folder / "source")
    layers = load_file(folder / "source" / "model.safetensors")
    begin, own_begin = f"model.layers.{DEPTH}.", "mtp.layers.0." if family == "qwen3_next" else f"model.layers.{DEPTH}."
    module |= {name.replace(begin, own_begin): tensor for name, tensor in layers.items() if name.startswith(begin)}
    model.save_pretrained(folder)
    insert(folder, {}, module)
    return module, prefix, names, source


@pytest.mark.nightly
@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_modules_of_other_families_agree_with_transformers_layers(tmp_path, family):
    folder = checkpoint(tmp_path / "target", torch.float64)  # for its tokenizer
    w, prefix, names, source = with_module(folder, family)
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"  # has float64
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64).eval()
    lm = CausalLM(model, "dense_mask" if family == "deepseek_v3" else "per_sequence")
    target = Target(lm, None, str(folder), CONTEXT, "0" * 64, 0.0)
    proposer = mtp.load(target, tree=TREE, drawn="without_replacement")
    layer = source.model.layers[DEPTH]
    source.config._attn_implementation = source.config._experts_implementation = "eager"

    def norm(x, name):
        weight = w[f"{prefix}{name}.weight"] + (family == "qwen3_next")
        return torch.nn.functional.rms_norm(x, (H,), weight, config.rms_norm_eps)

    def expected(text, path):
        ours, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
        hidden = model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
        model.config._attn_implementation = ours
        tokens = torch.tensor(text[1:])
        for token in (*path, None):
            both = torch.cat([norm(model.model.embed_tokens(tokens), names[0]), norm(hidden, names[1])], -1)
            x, positions = both @ w[f"{prefix}{names[2]}.weight"].T, torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            rotation = source.model.rotary_emb(x[None], positions)
            out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            normed = norm((out if isinstance(out, torch.Tensor) else out[0])[0, -1:], names[3])
            if token is None:
                return model.lm_head(normed)[0]
            hidden, tokens = torch.cat([hidden, normed]), torch.cat([tokens, torch.tensor([token])])
        return None

    assert compare_stated(target, proposer, requests(WARM, new=14), expected)[0] > 50
    assert hasattr(layer.mlp, "experts")


def test_a_checkpoint_of_deepseek_v3_with_a_module_drafts_after_loading(tmp_path):
    folder = checkpoint(tmp_path / "target")
    with_module(folder, "deepseek_v3")
    target = Target.load(str(folder), dtype="float32", attention="dense_mask")
    group, steps = decode(target, mtp.load(target, depth=2), requests(new=8))
    assert emitted(group) == emitted(decode(target, Null(), requests(new=8))[0])
    assert sum(info.draft.shape.nodes for info in steps) > 20


# Files


@pytest.mark.parametrize(("layout", "settings"), [
    ("deepseek", {}), ("deepseek", {"modules": 2, "own_head": True}), ("qwen", {}),
    ("qwen", {"modules": 2, "shared": True, "own_embedding": True}),
], ids=str)  # fmt: skip
def test_modules_that_are_written_are_read_again(target, tmp_path, layout, settings):
    network = random_network(Mtp(MtpSettings(small_layer(H), H, VOCABULARY, **settings)), target, torch.float64, seed=3)
    sha256 = write_mtp(network, tmp_path / "modules", layout, DEPTH, {"source": "test"})
    read = mtp.load(target, str(tmp_path / "modules"), depth=2)
    assert read.sha256 == sha256
    assert read.network.state_dict().keys() == network.state_dict().keys()
    for name, tensor in read.network.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])


@pytest.mark.parametrize(("layout", "shared"), [("deepseek", True), ("qwen", False)])
def test_a_layout_that_cannot_hold_the_modules_is_refused(target, tmp_path, layout, shared):
    settings = MtpSettings(small_layer(H), H, VOCABULARY, 2, shared)
    network = random_network(Mtp(settings), target, torch.float64)
    with pytest.raises(ValueError, match=f"layout '{layout}' cannot hold 2 MTP modules"):
        write_mtp(network, tmp_path / "modules", layout, DEPTH, {})


L = f"model.layers.{DEPTH}."


def put(name, tensor):
    return lambda config, tensors: tensors.update({name: tensor})


def without(name):
    return lambda config, tensors: tensors.pop(name)


def stating(**fields):
    return lambda config, tensors: config.update(fields)


REFUSED = {
    "missing": (without(f"{L}hnorm.weight"), rf"{L}hnorm\.weight is missing"),
    "missing in the layer": (without(f"{L}mlp.up_proj.weight"), rf"{L}mlp\.up_proj\.weight is missing"),
    "surplus in the module": (put(f"{L}extra.weight", torch.ones(2)), rf"{L}extra\.weight is in no layer"),
    "surplus in the frame": (put(f"{L}enorm.bias", torch.ones(2)), rf"'{L}enorm\.bias' is in no layer"),
    "surplus": (put("lm_head.weight", torch.ones(2)), "'lm_head.weight' is in no layer"),
    "misshapen": (put(f"{L}eh_proj.weight", torch.ones(H, H)), r"eh_proj.weight is \[32, 32\], not \[32, 64\]"),
    "misshapen in the layer": (put(f"{L}input_layernorm.weight", torch.ones(5)), rf"{L}input_.* is \[5\], not \[32\]"),
    "nan": (put(f"{L}eh_proj.weight", torch.full((H, 2 * H), torch.nan)), rf"'{L}eh_proj.weight' holds NaN"),
    "infinite": (
        put(f"{L}mlp.up_proj.weight", torch.full((24, H), torch.inf)),
        rf"'{L}mlp.up_proj.weight' holds NaN or",
    ),
    "vocabulary": (put(f"{L}shared_head.head.weight", torch.ones(7, H)), r"head.weight is \[7, 32\], not \[61, 32\]"),
    "another number": (stating(num_nextn_predict_layers=2), "num_nextn_predict_layers is 2, .* hold 1 MTP"),
    "hidden size": (stating(hidden_size=48), "hidden size 48, the target tiny-llama has 32"),
    "both layouts": (put("mtp.fc.weight", torch.ones(2)), "two layouts"),
    "no module": (without(f"{L}eh_proj.weight"), "holds no MTP module"),
    "size": (stating(intermediate_size=2**30), "describes MTP modules with 1030"),
    "recurrent": (stating(model_type="mamba2"), "'mamba2' are not supported in a drafter: they have no full attention"),
    "windows": (stating(model_type="mistral", sliding_window=4), "'mistral' are not supported .*windows"),
    "attention of its own": (stating(model_type="gptj", n_head=4, rotary_dim=4), "'gptj'"),
    "unknown": (stating(model_type="nothing"), "'nothing'"),
    "unknown fields": (stating(mtp_layer_scale=2, top=None), r"unknown: mtp_layer_scale \(2\)"),
    "another meaning": (stating(scoring_func="softmax"), "scoring_func is 'softmax', and only 'sigmoid'"),
    "no kind": (lambda config, tensors: config.pop("model_type"), "model_type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_do_not_fit_are_refused_with_the_reason(target, tmp_path, case):
    config, tensors = modules(H, VOCABULARY, "deepseek", DEPTH, seed=1)
    change, message = REFUSED[case]
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        mtp.load(target, written(tmp_path / "modules", config, tensors), depth=2)


def test_a_target_without_modules_is_named(tmp_path):
    folder = checkpoint(tmp_path / "target")
    target = Target.load(str(folder), dtype="float32")
    with pytest.raises(ValueError, match=r"(?s)checkpoint of the target .*target holds no MTP module.*proposer\.path"):
        mtp.load(target, depth=2)


def test_surplus_layers_that_are_no_modules_are_still_refused(tmp_path):
    folder = insert(
        checkpoint(tmp_path / "target"), {"num_nextn_predict_layers": 1}, {f"{L}enorm.weight": torch.ones(H)}
    )
    with pytest.raises(ValueError, match=rf"{L}enorm\.weight is in no layer of the model"):
        Target.load(str(folder), dtype="float32")
