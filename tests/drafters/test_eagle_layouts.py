"""Published layouts of EAGLE heads, each as its author writes it, draft what a plain reference of the head drafts.

The reference (``tests.oracles.eagle``) reads the tensors of the head as they were made, under the names of EAGLE-3's
authors; the proposer reads the same head in another layout, or with a convention set by an option.
"""

from dataclasses import dataclass, field

import pytest
import torch

from spec_lab.drafters.eagle import propose as eagle
from tests.drafters.eagle_heads import DIM, HEADS, SHARED, SIZES, eagle1, eagle3, speculators, written
from tests.oracles import eagle as oracle
from tests.propose.lab import WARM, compare_stated, requests
from tests.tiny import VOCABULARY, tiny_target

H = 32
IDS = [3, 5, 6, 8, 13, 14, 15, 21, 26, 31, 34, 41, 50, 55, 57, 60]
TREE = "0 1 0.0 0.1 0.0.0"
AUX = "eagle_aux_hidden_state_layer_ids"
NORM_OUTPUT = ("norm_output",)


@dataclass
class Case:
    """A head as its author writes it, and how the reference reads the head that it was made from.

    Args:
        written: config and tensors.
        made: tensors by the names of EAGLE-3's authors.
        ids: the target's tokens that it drafts.
        taps: numbers of the hidden states; -1 after the final norm.
        flags: of the reference.
        how: of the reference's attention.
        options: of the proposer.
        warns: conventions that are guessed.
        target_head: whether the target's LM head is used.
    """

    written: tuple
    made: dict
    ids: list = field(default_factory=lambda: IDS)
    taps: tuple = (1, 2, 2)
    flags: tuple = ()
    how: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    warns: tuple = ("taps",)
    target_head: bool = False


def case(change=None, head=None, **more):
    """A case whose config and tensors, those of ``head``, are changed to the author's form."""
    config, tensors = head or eagle3(H, VOCABULARY, IDS)
    written_config, written_tensors = dict(config), dict(tensors)
    changed = None if change is None else change(written_config, written_tensors)
    return Case(changed or (written_config, written_tensors), tensors, **more)


def fields(**more):
    return lambda config, tensors: config.update(more)


def renamed(name_of):
    return lambda config, tensors: (config, {name_of(name): tensor for name, tensor in tensors.items()})


def by_frequency(config, tensors):
    order = torch.tensor([5, 0, 15, 3, 9, 1, 2, 14, 4, 13, 6, 12, 7, 8, 11, 10])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(IDS)[order] - torch.arange(len(IDS))


def without(*names, **more):
    def change(config, tensors):
        for name in names:
            tensors.pop(name)
        config.update(more)

    return change


def with_biases(config, tensors):
    config["qkv_bias"] = True


def biased_head():
    config, tensors = eagle3(H, VOCABULARY, IDS)
    for number, (kind, count) in enumerate((("q", HEADS), ("k", SHARED), ("v", SHARED))):
        generator = torch.Generator().manual_seed(number)
        biases = torch.randn(count * DIM, generator=generator, dtype=torch.float64)
        tensors[f"midlayer.self_attn.{kind}_proj.bias"] = biases
    return config, tensors


def fc_bias_head():
    config, tensors = eagle3(H, VOCABULARY, IDS)
    return config, tensors | {"fc.bias": torch.linspace(-1, 1, H, dtype=torch.float64)}


def no_fc_head():
    config, tensors = eagle3(H, VOCABULARY, IDS)
    tensors.pop("fc.weight")
    return config, tensors


def windowed_speculators(config, tensors):
    config, tensors = speculators(config, tensors)
    layer = config["transformer_layer_config"]
    layer |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    return config, tensors


def tables_of_all(config, tensors):
    tensors["d2t"] = torch.arange(VOCABULARY).flip(0)
    tensors["t2d"] = torch.zeros(VOCABULARY + 3, dtype=torch.bool)


ALL = list(range(VOCABULARY))
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
TWO = eagle3(H, VOCABULARY, IDS, layers=2)
FULL = eagle3(H, VOCABULARY)
OUTPUT = eagle3(H, VOCABULARY, IDS, flags=NORM_OUTPUT)
OWN_EMBEDDING = eagle3(H, VOCABULARY, IDS, embedding=True)
CASES = {
    "of its authors": case(),
    "phi3": case(fields(model_type="phi3", original_max_position_embeddings=4096, embd_pdrop=0.0, sliding_window=3)),
    "qwen2": case(fields(model_type="qwen2", use_sliding_window=False, sliding_window=3)),
    "mistral": case(fields(model_type="mistral", sliding_window=3)),
    "gemma3_text": case(
        fields(model_type="gemma3_text", sliding_window=3, query_pre_attn_scalar=256, rope_local_base_freq=10000.0)
    ),
    "gpt_oss": case(
        fields(model_type="gpt_oss", num_local_experts=32, experts_per_token=4, sliding_window=2,
               layer_types=["sliding_attention", "full_attention"] * 12)
    ),
    "mrope": case(
        fields(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]})
    ),
    "mrope of another theta": case(
        fields(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=500.0),
        options={"rope_theta": 10000.0},
    ),
    "its theta": case(
        fields(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=500.0), how={"theta": 500.0},
        warns=("taps", "rope_theta"),
    ),
    "its theta without its scaling": case(
        fields(rope_theta=None, rope_parameters=LINEAR), how={"theta": 500.0}, options={"rope_scaling": "none"},
    ),
    "its theta with the target's scaling": case(
        fields(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0}), how={"theta": 500.0},
        options={"rope_scaling": "target"},
    ),
    "another theta with the target's scaling": case(
        fields(rope_theta=None, rope_parameters=LINEAR), how={"theta": 700.0},
        options={"rope_scaling": "target", "rope_theta": 700.0},
    ),
    "biases of queries, keys and values": case(with_biases, biased_head()),
    "a window that Llama ignores": case(fields(sliding_window=3)),
    "a window by the option": case(fields(sliding_window=3), options={"window": 3}, how={"windows": {"midlayer": 3}}),
    "windows of one layer, from the anchor": case(
        windowed_speculators, TWO, how={"windows": {"midlayer": 3}, "anchored": True}
    ),
    "windows of one layer": case(
        windowed_speculators, TWO, how={"windows": {"midlayer": 3}}, options={"window_from": "query"}
    ),
    "windows from the anchor by the option": case(
        None, how={"windows": {"midlayer": 2}, "anchored": True}, options={"window": 2, "window_from": "anchor"}
    ),
    "a position is left out": case(None, how={"skip": 1}, options={"positions": 2}),
    "the last position again": case(None, how={"skip": -1}, options={"positions": 0}),
    "no windows by the option": case(windowed_speculators, TWO, options={"window": 0}),
    "tables of all tokens": case(tables_of_all, FULL, ids=ALL),
    "d2t in order of frequency": case(by_frequency),
    "d2t of absolute numbers": case(
        lambda config, tensors: tensors.update(d2t=torch.tensor(IDS)), warns=("taps", "d2t"),
    ),
    "an empty list of taps": case(fields(eagle_config={AUX: [], "use_aux_hidden_state": True})),
    "taps in the order of a set": case(fields(eagle_config={AUX: [2, 0, 1]}), taps=(1, 2, 3)),
    "taps in the order of the list": case(
        fields(eagle_config={AUX: [2, 0, 1]}), taps=(3, 1, 2), options={"taps": [3, 1, 2]}, warns=(),
    ),
    "states in eagle_config": case(
        fields(eagle_config={AUX: [0, 1, 2]}), taps=(0, 1, 2), options={"taps": [0, 1, 2]}, warns=(),
    ),
    "the last tap before the final norm": case(fields(**{AUX: [1, 2, 4]}), taps=(1, 2, 4)),
    "the last tap after it": case(fields(**{AUX: [1, 2, 4]}), taps=(1, 2, -1), options={"taps": [1, 2, -1]}, warns=()),
    "without taps and fc": case(fields(eagle_config={"use_aux_hidden_state": False}), no_fc_head(), taps=(-1,)),
    "without taps, before the final norm": case(
        fields(use_aux_hidden_state=False), no_fc_head(), taps=(4,), options={"taps": [4]}, warns=(),
    ),
    "layers.0 without tables": case(renamed(lambda name: name.replace("midlayer.", "layers.0.")), FULL, ids=ALL),
    "several layers of midlayer": case(
        renamed(lambda name: name.replace("midlayer.", "midlayer.0.").replace("layers.1.", "midlayer.1.")), TWO
    ),
    "a prefix": case(renamed(lambda name: name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}")),
    "a bias of fc": case(None, fc_bias_head()),
    "no LM head": case(without("lm_head.weight"), FULL, ids=ALL, target_head=True),
    "the target's LM head by the option": case(None, ids=ALL, target_head=True, options={"lm_head": "target"}),
    "an embedding of its own": case(None, OWN_EMBEDDING),
    "norm_output of SpecForge": case(None, OUTPUT, warns=("taps", "norm_output")),
    "norm_output of SpecForge, since it was mended": case(
        None, OUTPUT, flags=NORM_OUTPUT, options={"norm_output": "feedback"}
    ),
    "norm_output false of SpecForge": case(
        fields(norm_output=False), flags=("raw_output",), options={"norm_output": "raw"}
    ),
    "norm_output of speculators": case(speculators, OUTPUT, flags=NORM_OUTPUT),
    "norm_output with a prefix": case(
        renamed(lambda name: name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"), OUTPUT,
        flags=NORM_OUTPUT,
    ),
    "no norm before fc by the option": case(
        None, eagle3(H, VOCABULARY, IDS, flags=("norm_before_fc",)), options={"norm_before_fc": False}
    ),
    "no norms of taps by the option": case(
        speculators, eagle3(H, VOCABULARY, IDS, flags=("fc_norm",)), options={"fc_norm": False}
    ),
    "norm_before_residual by the option": case(
        None, flags=("norm_before_residual",), options={"norm_before_residual": True}
    ),
    "rotated neighbours": case(fields(rope_is_neox_style=False), how={"neighbours": True}),
    "rotated neighbours by the option": case(None, how={"neighbours": True}, options={"rope": "interleaved"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=4)


def states_of(model, tokens):
    """Hidden states ``[n, H]`` by number, -1 after the final norm."""
    before = []
    with model.model.norm.register_forward_pre_hook(lambda _, args: before.append(*args)):
        states = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return {number: state[0] for number, state in enumerate((*states[:-1], *before))} | {-1: states[-1][0]}


def reference(target, drawn, text, path):
    """Logits ``[V]`` after ``text`` and a drafted ``path``, whose features are the head's own."""
    model, w = target.lm.model, drawn.made
    states, tokens = states_of(model, text[:-1]), torch.tensor(text[1:])
    if drawn.target_head:
        w = w | {"lm_head.weight": model.lm_head.weight}
    features = oracle.eagle3_features(w, [states[tap] for tap in drawn.taps], drawn.flags)
    how = drawn.how | {"computed": len(tokens)}
    embedding = model.get_input_embeddings().weight
    for token in (*path, None):
        outputs, logits = oracle.eagle3(w, embedding, tokens, features, SIZES, drawn.flags, **how)
        if token is None:
            whole = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
            return whole.index_copy(0, torch.tensor(drawn.ids), logits[-1])
        features, tokens = torch.cat([features, outputs[-1:]]), torch.cat([tokens, torch.tensor([token])])
    return None


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_a_layout_drafts_what_the_reference_of_its_head_drafts(target, tmp_path, caplog, name):
    head = CASES[name]
    proposer = eagle.load(
        target, written(tmp_path, *head.written), tree=TREE, drawn="without_replacement", **head.options
    )
    guessed = [convention for convention, reading in proposer.reading.conventions.items() if reading.source == "guess"]
    assert sorted(guessed) == sorted(head.warns) and len(caplog.messages) == len(head.warns)
    assert all(proposer.reading.values[option] == value for option, value in head.options.items())
    compared, _ = compare_stated(target, proposer, requests(WARM, new=6), lambda *at: reference(target, head, *at))
    assert compared > 15


@torch.no_grad()
def test_an_eagle1_head_without_a_bias_need_not_say_so(target, tmp_path, caplog):
    config, tensors = eagle1(H, VOCABULARY, bias=False)
    config.pop("bias")
    proposer = eagle.load(target, written(tmp_path, config, tensors), depth=2)
    assert not proposer.network.settings.bias and not caplog.messages
    assert proposer.reading.values["taps"] == [-1] and ("taps", [4]) in [(n, v) for n, _, v in proposer.reading.others]
    assert eagle.load(target, written(tmp_path, config, tensors), depth=2, taps=[4]).requires.hidden == (4,)
    with pytest.raises(ValueError, match=r"holds no fc.bias, but config.json states"):
        eagle.load(target, written(tmp_path / "stated", config | {"bias": True}, tensors), depth=2)


@torch.no_grad()
def test_every_other_reading_that_a_head_leaves_open_can_be_set_by_its_option(target, tmp_path):
    for name in ("its theta", "windows of one layer", "norm_output of SpecForge", "an embedding of its own"):
        path = written(tmp_path / name.replace(" ", "_"), *CASES[name].written)
        reading = eagle.load(target, path, depth=2).reading
        assert len(reading.others) > 5
        for convention, _, value in reading.others:
            other = eagle.load(target, path, depth=2, **{convention: value}).reading
            assert {**reading.values, **other.values} == reading.values | {convention: value}
            assert other.conventions[convention].source == "option"


def test_another_theta_leaves_the_scaling_as_the_head_states_it(target, tmp_path):
    config, tensors = eagle3(H, VOCABULARY, IDS, rope_scaling={"type": "linear", "factor": 4.0})
    network = eagle.load(target, written(tmp_path, config, tensors), depth=2, rope_theta=700.0).network
    stated = network.body.config.rope_parameters
    assert (stated["rope_type"], stated["factor"], stated["rope_theta"]) == ("linear", 4.0, 700.0)


@pytest.mark.parametrize(("change", "message"), [
    (lambda c, t: c.update(additional_fc=True), "additional_fc is true, and only false"),
    (lambda c, t: c.update(eagle_config={"rope_theta": 5.0}), "eagle_config.rope_theta is 5.0, but rope_theta is"),
    (lambda c, t: c.update(architectures=7), "architectures must be a list of names, not 7"),
    (lambda c, t: c.update(layer_types=5), "layer_types must name one of .*, not 5"),
    (lambda c, t: c.update(final_logit_softcapping=30.0), r"final_logit_softcapping \(30.0\)"),
    (lambda c, t: c.update(num_local_experts=4, architectures=["Eagle3Model"]), r"num_local_experts \(4\)"),
    (lambda c, t: t.update({"model.norm.weight": t["norm.weight"].clone()}), "both 'norm.weight' and 'model.norm"),
    (lambda c, t: t.update(d2t=torch.full((len(IDS),), 100)), "d2t names no tokens"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(target, tmp_path, change, message):
    config, tensors = eagle3(H, VOCABULARY, IDS)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        eagle.load(target, written(tmp_path, config, tensors), depth=2)
