"""Broken heads: conventions of a drafter's files are broken, and ``check-drafter`` names exactly these.

With the options that it names the tau of the bundled EAGLE-3 head is that of the original. Random drafters have no tau
worth the name on a target's text; theirs is text that they drafted themselves, read rightly.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.cli.bundled import zoo
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.tasks.check_drafter.acceptance import tau
from spec_lab.tasks.check_drafter.along_text import Answer, predicted
from spec_lab.tasks.check_drafter.readings import try_readings
from spec_lab.tasks.check_drafter.task import explained
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt, encode, mixed
from spec_lab.verify.lenient import Lenient
from tests.drafters.block_drafters import dflash
from tests.drafters.eagle_heads import eagle1, eagle3, written
from tests.propose.lab import decode, requests
from tests.tiny import tiny_target

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
    taps = [states[index] for index in order]
    listed = {"eagle_config": {TAPS: [tap - 1 for tap in taps]}} if inside else {TAPS: taps}
    return config | listed, tensors | {"fc.weight": torch.cat([parts[index] for index in order], 1)}


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


def target_lm_head(untrained):
    """The head without an LM head of its own, or with one that was never trained."""
    config, tensors = official()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    return config | {"draft_vocab_size": 4096}, tensors | ({"lm_head.weight": noise(4096)} if untrained else {})


def ones(width, *names):
    """Weights of norms that were never trained."""
    return {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in names}


WINDOW = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
BROKEN = {
    "layers listed as states": (lambda: stated(**{TAPS: [0, 2, 4]}), {"taps": [1, 3, 5]}),
    "states in the order 1 0 2": (lambda: in_order((1, 0, 2)), {"taps": [3, 1, 5]}),
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
    "normed taps": (
        lambda: stated(norm_before_fc=True, tensors=ones(1536, "input_norm")), {"norm_before_fc": False},
    ),
    "normed taps, in eagle_config": (
        lambda: stated(eagle_config={"norm_before_fc": True}, tensors=ones(1536, "input_norm")),
        {"norm_before_fc": False},
    ),
    "each tap normed, speculators": (
        lambda: stated(bundled, fc_norm=True, tensors=ones(512, "fc_norm.0", "fc_norm.1", "fc_norm.2")),
        {"fc_norm": False},
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
    "linear scaling", "the theta of mrope", "states in the order 1 0 2",
    "layers as states, and a wrong residual",
}  # fmt: skip
"""Heads whose tau is broken a little, or in two ways, so that many texts are needed to see it."""


@pytest.fixture(scope="module")
def target():
    return Target.load(zoo("target"), dtype="float32")


@pytest.fixture(scope="module")
def measures(target):
    """Return the functions that measure a drafter along few texts, and along many."""

    def measure(texts, tokens):
        prompts = encode(mixed(zoo("prompts"), texts), target.tokenizer, target.context, 96)
        asked = [Request(number, str(number), prompt, WARM, tokens) for number, prompt in enumerate(prompts)]
        group, _ = decode(target, Null(), asked)
        answers = [Answer(sequence.request, sequence.tokens) for sequence in group.sequences]
        return lambda drafter, _: predicted(target, drafter, answers, texts, WARM, DEPTH)

    return measure(10, 20), measure(20, 32)


def loaded(target, folder, config, tensors):
    """Return a function that builds a head with options."""
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


def turned(head):
    """The head with queries and keys that depend much on their positions: all numbers turn fast."""
    config, tensors = head
    wide = {name: 3 * tensor for name, tensor in tensors.items() if "q_proj" in name}
    return config | {"rope_theta": 1.5}, tensors | wide


HEAD = eagle3(32, 61, **{TAPS: [0, 1, 2]})
MISREAD = {
    "rows of a block that predict the next position": (BlockDrafter, dflash(32, ids=(0, 1)), {"anchor": "next"}),
    "a block whose rows attend to all": (BlockDrafter, dflash(32, ids=(0, 1), is_causal=True), {"causal": "none"}),
    "a causal block": (BlockDrafter, dflash(32, ids=(0, 1)), {"causal": "all"}),
    "a block that reads the normed state": (BlockDrafter, dflash(32, ids=(0, 1)), {"taps": [1, -1]}),
    "a head that reads the normed state": (eagle, HEAD, {"taps": [0, 1, -1]}),
    "a head that reads the state before the norm": (eagle, eagle1(32, 61), {"taps": [2]}),
    "a head whose drafted rows leave a position out": (eagle, turned(HEAD), {"positions": 2}),
    "a block that leaves a position out": (BlockDrafter, turned(dflash(32, ids=(0, 1))), {"positions": 2}),
}  # fmt: skip
"""Random drafters whose files are read wrongly, and the options that fix it."""


@pytest.mark.parametrize("name", MISREAD)
@pytest.mark.one_in(3)
def test_the_reading_that_drafted_a_text_is_named(tmp_path, name):
    drafter, files, fix = MISREAD[name]
    target, path = tiny_target(), written(tmp_path / "head", *files)

    def build(options):
        return drafter.load(target, path, depth=2, drawn="deterministic", **options)

    asked = requests(WARM, 12, [(number, 2 * number + 1, 7, 9) for number in range(8)])
    group, _ = decode(target, build(fix), asked, Lenient(1e-6))  # which accepts every draft of a random target
    answers = [Answer(sequence.request, sequence.tokens) for sequence in group.sequences]
    _, best = try_readings(
        build({}), [Prompt("one", "text")], target, build,
        lambda read, _: predicted(target, read, answers, len(answers), WARM, 2),
    )  # fmt: skip
    assert best.changed == fix and best.tau.mean == pytest.approx(33 / 12, abs=0.1)


FOREIGN = " \u00c4\u00d6\u00df \u00f1 \u00e9 \u6f22\u5b57"
"""Text that the target has not seen, so that it goes on with what the head does not predict."""
MESSAGES = "{{% for sent in messages %}}{{{{ sent.content }}}}{}{{% endfor %}}"
SENT = {
    "a chat template": (ChatTemplate(MESSAGES.format(FOREIGN)), {"prompts.template": "none"}),
    "a thinking mode": (
        ChatTemplate(MESSAGES.format("{% if enable_thinking %}" + FOREIGN + "{% endif %}"), {"enable_thinking": True}),
        {"prompts.thinking": False},
    ),
}
"""Ways to send prompts that the head was not trained for, and what mends them."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", SENT)
def test_the_template_and_thinking_mode_of_prompts_are_named_and_explain_the_difference(target, name):
    template, fix = SENT[name]
    plain = mixed(zoo("prompts"), 10)
    head = eagle.load(target, zoo("eagle3"), depth=DEPTH)

    def measure(drafter, prompts):
        tokens = encode(plain if prompts is None else prompts, target.tokenizer, target.context, 96)
        asked = [Request(number, str(number), prompt, WARM, 20) for number, prompt in enumerate(tokens)]
        group, _ = decode(target, Null(), asked)
        answers = [Answer(sequence.request, sequence.tokens) for sequence in group.sequences]
        return predicted(target, drafter, answers, len(answers), WARM, DEPTH)

    sent = [replace(prompt, template=template) for prompt in plain]
    readings, best = try_readings(
        head, sent, target, None, lambda drafter, prompts: measure(drafter, sent if prompts is None else prompts)
    )
    mended = next(reading for reading in readings if reading.changed == fix)
    right = tau(measure(head, None)).mean
    assert best is readings[0] and mended.helps and mended.tau.mean == pytest.approx(right)
    facts = explained(right, readings, best)
    assert facts["by"] == "prompts" and facts["whole"]


@pytest.mark.nightly
def test_the_command_writes_the_best_reading(quick_cli, tmp_path):
    config, tensors = stated(tensors={"embed_tokens.weight": noise(4096)})
    code, shown, _ = quick_cli(
        "check-drafter", "proposer=eagle", f"proposer.path={written(tmp_path / 'head', config, tensors)}",
        "proposer.depth=3", "proposer.nodes=null", "proposer.drawn=iid", "proposer.rerank=false",
        "prompts.limit=8", "max_new_tokens=8", "batch_size=8", "output_dir=out",
    )  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert code == 0 and "Best reading: proposer.embedding=target" in shown
    assert summary["best_reading"] == summary["reading"] | {"embedding": "target"} != summary["reading"]
