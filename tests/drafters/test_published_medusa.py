"""Published Medusa heads: files of each layout agree with plain forwards head by head; damaged ones are refused."""

from functools import partial

import pytest
import torch

from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.measure import measure
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import calibrate as calibration
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.step_costs import StepCosts
from spec_lab.propose.trees import parse
from tests.drafters.eagle_heads import written
from tests.drafters.medusa_heads import authors, vllm
from tests.oracles import medusa as oracle
from tests.propose.lab import PROMPTS, WARM, rejected, requests, steps_after_texts
from tests.tiny import VOCABULARY

H = 32
TOKENS = [60, 3, 5, 8, 13, 21, 34, 55, 1, 2, 40]
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
VARIANTS = {
    "authors": authors(H, VOCABULARY),
    "authors-without-layers": authors(H, VOCABULARY, layers=0),
    "authors-three-layers": authors(H, VOCABULARY, heads=3, layers=3),
    "vllm": vllm(H, VOCABULARY),
    "vllm-biases-two-layers": vllm(H, VOCABULARY, layers=2, bias=True),
    "vllm-token-map": vllm(H, VOCABULARY, tokens=TOKENS),
    "vllm-token-map-of-whole-rows": vllm(H, VOCABULARY, tokens=TOKENS, rows=VOCABULARY),
    "vllm-one-lm-head": vllm(H, VOCABULARY, shared="lm_head.weight"),
    "vllm-first-lm-head": vllm(H, VOCABULARY, shared="lm_heads.0.weight"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, (config, tensors) in VARIANTS.items():
        clones = {key: tensor.clone() for key, tensor in tensors.items()}
        file = "medusa_lm_head.safetensors" if name == "authors" else "model.safetensors"
        made[name] = written(tmp_path_factory.mktemp(name), config, clones, file)
    return made


def reference(name, state, head):
    config, w = VARIANTS[name]
    if name.startswith("authors"):
        return oracle.of_authors(w, state, head)
    head_name = "lm_head.weight" if "lm_head.weight" in w else "lm_heads.0.weight"
    return oracle.of_vllm(w, state, head, VOCABULARY, head_name if config["original_lm_head"] else None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_plain_forwards_over_steps_with_rejections(target, folders, name, monkeypatch):
    proposer, wanted = Medusa.load(target, folders[name], tree=TREE), requests(WARM, new=12)
    computed, logits = Heads.__call__, []
    monkeypatch.setattr(Heads, "__call__", lambda *given: logits.append(computed(*given)) or logits[-1])
    compared, rejections = 0, 0
    paths = [tuple(map(int, path.split("."))) for path in TREE.split()]
    for info, before in steps_after_texts(target, proposer, wanted):
        trees = [tree[1:] for tree in info.draft.shape.trees]
        active = [number for number, nodes in enumerate(trees) if len(nodes)]
        step_logits = logits.pop() if active else None
        for index, number in enumerate(active):
            text = before[number].tokens
            state = target.lm.model.base_model(input_ids=torch.tensor([text[:-1]]), use_cache=False)[0][0, -1]
            expected = torch.stack([reference(name, state, head) for head in range(3)])
            torch.testing.assert_close(step_logits[index], expected, rtol=0, atol=1e-6)
            likeliest = expected.topk(3).indices
            shape = info.draft.shape
            drafted = {shape.ranks(int(row)): int(info.draft.token[row - shape.roots]) for row in trees[number]}
            assert drafted == {path: int(likeliest[len(path) - 1, path[-1]]) for path in paths}
            compared += 1
        rejections += rejected(info, 3)
    assert compared > 20 and rejections > 10 and not logits


@torch.no_grad()
def test_the_last_state_and_the_lm_head_are_readings(target, folders):
    proposer = Medusa.load(target, folders["authors"], tree="2x1")
    last = target.lm.capabilities.hidden_layers
    assert proposer.reading.values == {"taps": [-1], "lm_head": "own"} and proposer.facts["reading"]
    assert [(name, value) for name, _, value in proposer.reading.others] == [("taps", [last]), ("lm_head", "target")]
    other = Medusa.load(target, folders["authors"], tree="2x1", taps=[last], lm_head="target")
    assert other.requires.hidden == (last,) and other.heads.own_lm_heads is None
    state, token = torch.randn(1, H, dtype=torch.float64), torch.tensor([3])
    w = {name: tensor for name, tensor in VARIANTS["authors"][1].items() if "linear" in name}
    w |= {f"{head}.1.weight": target.lm.model.lm_head.weight for head in range(2)}
    expected = torch.stack([oracle.of_authors(w, state[0], head) for head in range(2)])
    torch.testing.assert_close(other.heads(state, token)[0], expected, rtol=0, atol=1e-6)
    assert Medusa.load(target, folders["vllm-token-map"], tree="1").reading.others == [
        ("taps", "the last state before the final norm", [last])
    ]


def test_the_tensors_count_where_the_config_states_fewer_heads(target, folders):
    heads = read_medusa(folders["authors"], target)
    assert VARIANTS["authors"][0]["medusa_num_heads"] == 2
    assert (len(heads), heads.weight.shape, heads.lm_head.weight.shape) == (5, (5, 1, H, H), (5, VOCABULARY, H))
    assert heads.weight.dtype == heads.lm_head.weight.dtype == target.lm.dtype
    assert len(Medusa.load(target, folders["authors"], tree="2x1").heads.lm_head.weight) == 2


def test_a_toy_of_published_heads_has_lm_heads_of_its_own(target, folders):
    toy = Medusa.load(target, folders["vllm"], tree="1").toy(target, None, parse("2x1"))
    assert toy.heads.lm_head.weight.shape == (2, VOCABULARY, H)


# Trees that need a calibration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["calibrated", "likeliest"])
def test_without_a_calibration_the_remedies_are_named(target, folders, tree):
    with pytest.raises(OSError, match=r"no calibration\.json") as raised:
        Medusa.load(target, folders["authors"], tree=tree)
    assert "proposer.tree=vicuna_7b_stage1" in str(raised.value)
    assert "spec_lab.drafters.medusa.measure.measure(target, heads, prompts)" in str(raised.value)
    assert Medusa.load(target, folders["authors"], tree="vicuna_7b_stage1").nodes == 63


@pytest.mark.parametrize("name", ["authors", "vllm-token-map"])
def test_measured_once_published_heads_are_calibrated(target, folders, tmp_path, monkeypatch, name):
    path = written(tmp_path / "heads", VARIANTS[name][0], {k: t.clone() for k, t in VARIANTS[name][1].items()})
    measure(target, read_medusa(path, target), PROMPTS, tokens=20, width=20).write(path)
    assert Accuracy.read(path).samples > 10
    free = lambda target, proposers, *_: StepCosts(dict.fromkeys(proposers, 1.0), dict.fromkeys(proposers, 0.0), 10)  # noqa: E731
    monkeypatch.setattr(calibration, "time_steps", free)
    load = partial(Medusa.load, target, path, max_nodes=40, cache=str(tmp_path / "cache"))
    for proposer in (load(), load(tree="likeliest")):
        assert proposer.nodes == 40
        assert max(node[-1] for node in proposer.tree) < (len(TOKENS) if "map" in name else VOCABULARY)


# Damaged and foreign files -------------------------------------------------------------------------------------------


def put(name, tensor):
    return lambda c, t: t.update({name: tensor})


REFUSED = {
    "missing layer": ("authors", lambda c, t: t.pop("1.0.linear.bias"), r"1\.0\.linear\.bias is missing"),
    "missing lm head": ("authors", lambda c, t: t.pop("0.1.weight"), r"0\.1\.weight is missing"),
    "missing lm head of a later head": ("authors", lambda c, t: t.pop("4.1.weight"), r"4\.1\.weight is missing"),
    "surplus": ("authors", put("extra", torch.zeros(2)), "'extra' is in no layer"),
    "far head": ("authors", put("999.0.linear.weight", torch.zeros(H, H)), r"linear\.weight is missing"),
    "misshapen": ("authors", put("2.0.linear.weight", torch.zeros(H, 3)), r"2\.0\.linear\.weight is \[32, 3\]"),
    "lm head of one row": ("authors", put("0.1.weight", torch.zeros(H)), r"0\.1\.weight is \[32\], not \[V, 32\]"),
    "nan": ("authors", lambda c, t: t["3.1.weight"].fill_(torch.nan), r"'3\.1\.weight' holds NaN"),
    "infinite": ("vllm", lambda c, t: t["blocks.1.layers.0.weight"].fill_(torch.inf), "infinite"),
    "layers": ("authors", lambda c, t: c.update(medusa_num_layers=2), "medusa_num_layers is 2, but .* 1 layers"),
    "layers of vllm": ("vllm", lambda c, t: c.update(num_hidden_layers=3), "num_hidden_layers is 3, but .* 1 layers"),
    "config of another vocabulary": ("vllm", lambda c, t: c.update(vocab_size=99), f"99 tokens, .* {VOCABULARY}"),
    "config of another hidden size": ("vllm", lambda c, t: c.update(hidden_size=64), "hidden size 64, .* has 32"),
    "biases": ("vllm", lambda c, t: c.update(medusa_fc_bias=True), "medusa_fc_bias"),
    "flag": ("vllm", lambda c, t: c.update(original_lm_head="no"), "original_lm_head must be true or false"),
    "missing lm head of vllm": ("vllm", lambda c, t: t.pop("lm_heads.2.weight"), r"lm_heads\.2\.weight is missing"),
    "no map": ("vllm", lambda c, t: c.update(truncated_vocab_size=11), "truncated_vocab_size is .*no token_map"),
    "map of another size": ("vllm-token-map", lambda c, t: c.update(truncated_vocab_size=5), "token_map has 11 tokens"),
    "map beyond": ("vllm-token-map", put("token_map", torch.tensor([61, *TOKENS[1:]])), "token_map must .* 0 to 60"),
    "map below": ("vllm-token-map", put("token_map", torch.tensor([-1, *TOKENS[1:]])), "token_map must"),
    "map twice": ("vllm-token-map", put("token_map", torch.tensor([3, *TOKENS[1:]])), "token_map must hold different"),
    "map of floats": ("vllm-token-map", lambda c, t: t.update(token_map=t["token_map"].double()), "token_map must"),
    "eight bits": ("vllm", lambda c, t: t.update({n: x.to(torch.float8_e4m3fn) for n, x in t.items()}), "F8_E4M3"),
    "unknown": ("vllm", lambda c, t: (t.clear(), t.update(a=torch.zeros(1))), "known layout, .*'a'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_do_not_fit_are_refused_with_the_reason(target, tmp_path, case):
    name, change, message = REFUSED[case]
    config, tensors = dict(VARIANTS[name][0]), {key: tensor.clone() for key, tensor in VARIANTS[name][1].items()}
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        Medusa.load(target, written(tmp_path / "heads", config, tensors), tree="2x1")


@pytest.mark.parametrize("head", [authors(48, VOCABULARY), vllm(48, VOCABULARY)])
def test_heads_of_another_hidden_size_are_refused(target, tmp_path, head):
    with pytest.raises(ValueError, match="for hidden size 48, the target tiny-llama has 32"):
        Medusa.load(target, written(tmp_path / "heads", *head), tree="2x1")


@pytest.mark.parametrize("head", [authors(H, 99), vllm(H, 99)])
def test_heads_of_another_vocabulary_are_refused(target, tmp_path, head):
    with pytest.raises(ValueError, match=f"a vocabulary of 99 tokens, the target tiny-llama has {VOCABULARY}"):
        Medusa.load(target, written(tmp_path / "heads", *head), tree="2x1")


def test_a_tree_wider_than_the_drafted_vocabulary_is_refused(target, folders):
    assert Medusa.load(target, folders["vllm-token-map"], tree="11").nodes == 11
    with pytest.raises(ValueError, match=r"tree .* 12 children .* 11 tokens"):
        Medusa.load(target, folders["vllm-token-map"], tree="12")
