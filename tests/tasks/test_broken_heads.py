"""Broken heads: the bundled EAGLE-3 head with conventions of its files broken, which ``check-drafter`` names exactly.

With the options that it names the tau is that of the original.
"""

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.cli.bundled import zoo
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.check_drafter.acceptance import tau
from spec_lab.tasks.check_drafter.along_text import Answer, predicted
from spec_lab.tasks.check_drafter.readings import try_readings
from spec_lab.text.prompts import Prompt, encode, mixed
from tests.propose.lab import decode

TAPS = "eagle_aux_hidden_state_layer_ids"
DEPTH = 3
WARM = Sampling(1.0)
HEAD_DIM, DRAFT_TOKENS = 64, 1439


def bundled():
    """Config and tensors of the bundled head, as speculators writes it."""
    folder = Path(zoo("eagle3"))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def official():
    """The same head as its authors, SpecForge and SGLang write it."""
    config, tensors = bundled()
    layer = config["transformer_layer_config"]
    flat = {name: value for name, value in layer.items() if name != "rope_parameters"}
    flat |= {"rope_theta": layer["rope_parameters"]["rope_theta"], "architectures": ["LlamaForCausalLMEagle3"]}
    flat |= {"draft_vocab_size": config["draft_vocab_size"], TAPS: config[TAPS]}
    return flat, {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def stated(head=official, without=(), tensors=None, **fields):
    """The config states these fields, not those; further tensors are in the file."""
    config, held = head()
    kept = {name: value for name, value in config.items() if name not in without}
    return kept | fields, held | (tensors or {})


def layer_states(**fields):
    """Fields of the layers, as speculators writes them."""
    config, tensors = bundled()
    return config | {"transformer_layer_config": config["transformer_layer_config"] | fields}, tensors


def in_order(order, inside=False):
    """``fc`` reads the taps in this order, in which they are listed, perhaps as outputs of layers."""
    config, tensors = official()
    parts, states = tensors["fc.weight"].chunk(3, 1), config.pop(TAPS)
    taps = [states[place] for place in order]
    listed = {"eagle_config": {TAPS: [tap - 1 for tap in taps]}} if inside else {TAPS: taps}
    return config | listed, tensors | {"fc.weight": torch.cat([parts[place] for place in order], 1)}


def orders():
    """A head for every order of its taps but that of the layers."""
    return {
        f"states in the order {' '.join(map(str, order))}": (
            lambda order=order: in_order(order), {"taps": [(1, 3, 5)[place] for place in order]},
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    }  # fmt: skip


def interleaved(**fields):
    """Queries and keys are written for a rotary embedding that turns neighbours."""
    config, tensors = official()
    for name in ("q_proj", "k_proj"):
        weight = tensors[f"midlayer.self_attn.{name}.weight"]
        halves = weight.view(-1, 2, HEAD_DIM // 2, weight.shape[1])
        tensors[f"midlayer.self_attn.{name}.weight"] = halves.transpose(1, 2).reshape(weight.shape)
    return config | fields, tensors


def fewer_tokens(absolute):
    """The first draft tokens alone, whose numbers name tokens as offsets and as they are."""
    config, tensors = official()
    del tensors["t2d"]
    ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"])[:DRAFT_TOKENS]
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][:DRAFT_TOKENS]}
    tensors |= {"d2t": ids if absolute else ids - torch.arange(DRAFT_TOKENS)}
    return config | {"draft_vocab_size": DRAFT_TOKENS}, tensors


def noise(rows):
    """Weights that were never trained."""
    return torch.randn(rows, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def target_lm_head(own):
    """The head without an LM head of its own, or with one that was never trained."""
    config, tensors = official()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    return config | {"draft_vocab_size": 4096}, tensors | ({"lm_head.weight": noise(4096)} if own else {})


WINDOW = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
BROKEN = {
    "layers listed as states": (lambda: stated(**{TAPS: [0, 2, 4]}), {"taps": [1, 3, 5]}),
    **orders(),
    "layers in the order 1 0 2": (lambda: in_order((1, 0, 2), inside=True), {"taps": [3, 1, 5]}),
    "layers in the order 2 1 0": (lambda: in_order((2, 1, 0), inside=True), {"taps": [5, 3, 1]}),
    "absolute tokens": (lambda: fewer_tokens(True), {"d2t": "absolute"}),
    "a window of 8, speculators": (lambda: layer_states(sliding_window=8, **WINDOW), {"window": 0}),
    "interleaved stated": (lambda: stated(rope_is_neox_style=False), {"rope": "neox"}),
    "is_neox_style stated": (lambda: stated(is_neox_style=False), {"rope": "neox"}),
    "interleaved weights": (interleaved, {"rope": "interleaved"}),
    "linear scaling": (
        lambda: stated(rope_scaling={"rope_type": "linear", "factor": 32.0}), {"rope_scaling": "none"},
    ),
    "the theta of mrope": (
        lambda: stated(rope_theta=30.0, rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]}),
        {"rope_theta": 10000.0},
    ),
    "a residual from the normed features": (
        lambda: stated(norm_before_residual=True), {"norm_before_residual": False},
    ),
    "a residual from the normed features, in eagle_config": (
        lambda: stated(eagle_config={"norm_before_residual": True}), {"norm_before_residual": False},
    ),
    "a residual from the normed features, speculators": (
        lambda: stated(bundled, norm_before_residual=True), {"norm_before_residual": False},
    ),
    "the normed state fed back": (lambda: stated(bundled, norm_output=True), {"norm_output": "plain"}),
    "an embedding that was not trained": (
        lambda: stated(tensors={"embed_tokens.weight": noise(4096)}), {"embedding": "target"},
    ),
    "an embedding that was not trained, speculators": (
        lambda: stated(bundled, tensors={"embed_tokens.weight": noise(4096)}), {"embedding": "target"},
    ),
    "an LM head that was not trained": (lambda: target_lm_head(True), {"lm_head": "target"}),
    "layers as states, and a wrong residual": (
        lambda: stated(norm_before_residual=True, **{TAPS: [0, 2, 4]}),
        {"taps": [1, 3, 5], "norm_before_residual": False},
    ),
}  # fmt: skip
"""How each head is broken: its files, and the options that fix it."""

ORIGINALS = {
    "absolute tokens": lambda: fewer_tokens(False), "an LM head that was not trained": lambda: target_lm_head(False),
}  # fmt: skip
"""The unbroken heads of those that are not the bundled one."""


SMALL = {
    "a window of 8, speculators", "interleaved stated", "is_neox_style stated", "interleaved weights",
    "linear scaling", "the theta of mrope", "states in the order 1 0 2", "layers in the order 1 0 2",
}  # fmt: skip
"""Heads whose tau is broken a little, so that many texts are needed to see it."""


@pytest.fixture(scope="module")
def target():
    return Target.load(zoo("target"), dtype="float32")


@pytest.fixture(scope="module")
def measures(target):
    """What measures a drafter along few texts, and along many."""

    def measure(texts, tokens):
        prompts = encode(mixed(zoo("prompts"), texts), target.tokenizer, target.context, 96)
        asked = [Request(number, str(number), prompt, WARM, tokens) for number, prompt in enumerate(prompts)]
        group, _ = decode(target, Null(), asked)
        answers = [Answer(sequence.request, sequence.tokens) for sequence in group.sequences]
        return lambda drafter, _: predicted(target, drafter, answers, texts, WARM, DEPTH)

    return measure(10, 20), measure(20, 32)


def loaded(target, folder, config, tensors):
    """What builds a head with options."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return lambda options: eagle.load(target, str(folder), depth=DEPTH, **options)


def tried(target, measure, folder, head):
    build = loaded(target, folder, *head)
    return try_readings(build({}), [Prompt("one", "text")], target, build, measure)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BROKEN)
def test_the_broken_convention_is_named_and_its_fix_has_the_tau_of_the_original(target, measures, tmp_path, name):
    (broken, fix), measure = BROKEN[name], measures[name in SMALL]
    _, best = tried(target, measure, tmp_path / "head", broken())
    assert best.changed == fix and {convention: best.reading.values[convention] for convention in fix} == fix
    original = measure(loaded(target, tmp_path / "original", *ORIGINALS.get(name, bundled)())({}), None)
    assert tau(best.texts).mean == pytest.approx(tau(original).mean, abs=0.01)


@pytest.mark.nightly
def test_the_reading_of_the_original_is_the_best(target, measures, tmp_path):
    readings, best = tried(target, measures[0], tmp_path / "head", bundled())
    assert best is readings[0] and not any(reading.helps for reading in readings)


def test_there_are_at_least_twenty_broken_heads():
    assert len(BROKEN) >= 20
