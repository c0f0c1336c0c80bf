"""P-EAGLE: the cached, batched forward agrees with plain forwards over texts and mask rows; drafts are as declared."""

import pytest
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.verify import Traversal
from tests.drafters.eagle_heads import SIZES, eagle3, speculators, written
from tests.oracles import eagle as oracle
from tests.propose.lab import COLD, WARM, calls, compare_stated, decode, emitted, plain_greedy, requests
from tests.tiny import VOCABULARY, tiny_target

H = 32
IDS = [3, 5, 6, 8, 13, 14, 15, 21, 26, 31, 34, 41, 50, 55, 57, 60]
TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"


def peagle(layers=2, flags=(), token="mask_token_id", layout="specforge", **config):
    """Config and tensors of a head as its authors or SpecForge ("midlayer" is "layers.0"), or speculators write it."""
    config, tensors = eagle3(H, VOCABULARY, IDS, layers=layers, flags=flags, embedding=True, **config)
    generator = torch.Generator().manual_seed(7)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * H, generator=generator, dtype=torch.float64)
    if layout == "speculators":
        config, tensors = speculators(config, tensors)
        config |= {
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "embed_requires_grad": True,
        }
    else:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        config |= {"architectures": ["PEagleDraftModel"], "parallel_drafting": True}
    return config | {token: 59}, tensors


OPTIONS = {"anchor": {"window_from": "anchor"}, "skip": {"positions": 2}}
VARIANTS = {
    "four-layers": peagle(layers=4),
    "speculators": peagle(layout="speculators", flags=("norm_before_residual", "norm_before_fc")),
    "pard-token": peagle(layers=1, token="pard_token"),
    "windows": peagle(layer_types=["sliding_attention", "full_attention"], sliding_window=5, use_sliding_window=True),
    "anchor": peagle(layer_types=["sliding_attention", "full_attention"], sliding_window=2, use_sliding_window=True),
    "skip": peagle(layers=1),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: written(tmp_path_factory.mktemp(name), *head) for name, head in VARIANTS.items()}


def reference(name, target, text, path):
    """Logits ``[V]`` after ``text``, whose last token is pending, and a drafted ``path``, whatever its tokens."""
    config, w = VARIANTS[name]
    w = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in w.items()}
    model = target.lm.model
    states = model(input_ids=torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
    flags = [flag for flag in ("norm_before_residual", "norm_before_fc") if config.get(flag)]
    masks = w["mask_hidden"][0].expand(len(path), -1)
    taps = [torch.cat([states[tap][0], mask]) for tap, mask in zip((1, 2, 2), masks.split(H, 1), strict=True)]
    tokens = torch.tensor([*text[1:], *[59] * len(path)])
    windows = {"windows": {"midlayer": 5}, "anchor": {"midlayer": 2}}.get(name, {})
    how = {"computed": len(text) - 1, "anchored": name == "anchor", "skip": int(name == "skip")}
    features = oracle.eagle3_features(w, taps, flags)
    _, logits = oracle.eagle3(w, None, tokens, features, SIZES, flags, windows=windows, **how)
    return torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64).index_copy(0, torch.tensor(IDS), logits[-1])


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_every_stated_distribution_is_that_of_plain_forwards_over_steps_with_rejections(target, folders, name):
    proposer = PEagleDrafter.load(
        target, folders[name], tree=TREE, drawn="without_replacement", **OPTIONS.get(name, {})
    )

    def expected(text, path):
        return reference(name, target, text, path)

    def each(info):
        assert calls(info) <= 1

    compared, rejections = compare_stated(target, proposer, requests(WARM, new=8), expected, each)
    assert compared > 40 and rejections > 5


def test_the_reading_of_a_head_is_recorded_and_each_of_its_values_is_an_option(target, folders):
    proposer = PEagleDrafter.load(target, folders["windows"], depth=2)
    values = {
        "taps": [1, 2, 2],
        "d2t": "offset",
        "window": 5,
        "window_from": "query",
        "positions": 1,
        "rope": "neox",
        "rope_scaling": "own",
    }
    values |= {
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": "plain",
        "embedding": "own",
        "lm_head": "own",
    }
    assert proposer.reading.values == values
    again = PEagleDrafter.load(target, folders["windows"], depth=2, **values)
    assert again.network.settings == proposer.network.settings
    for convention, _, value in proposer.reading.others:
        reading = PEagleDrafter.load(target, folders["windows"], depth=2, **{convention: value}).reading
        assert {"d2t": "offset", **reading.values} == values | {convention: value}


WAYS = [
    {"depth": 4},
    {"depth": 1},
    {"tree": TREE, "drawn": "deterministic"},
    {"nodes": 7, "max_depth": 4, "drawn": "without_replacement", "temperature": 1.0},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_greedy_drafting_emits_the_target_s_tokens(target, folders, options):
    truth = [plain_greedy(target.lm.model, request.tokens, 12) for request in requests()]
    group, _ = decode(target, PEagleDrafter.load(target, folders["four-layers"], **options), requests(new=12))
    assert emitted(group) == truth


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.8, top_k=9, repetition_penalty=1.3)])
@pytest.mark.each_value
def test_a_batch_decodes_as_its_requests_alone(target, folders, sampling):
    proposer = PEagleDrafter.load(target, folders["windows"], tree=TREE, drawn="without_replacement", temperature=1.0)
    wanted = requests(sampling, new=10)
    together = emitted(decode(target, proposer, wanted, Traversal())[0])
    assert together == [emitted(decode(target, proposer, [request], Traversal())[0])[0] for request in wanted]


REFUSED = {
    "an EAGLE-3 head": (lambda c, t: t.pop("mask_hidden"), "no P-EAGLE head .* include mask_hidden"),
    "no mask token": (lambda c, t: c.pop("mask_token_id"), "none of mask_token_id, ptd_token_id, pard_token"),
    "two mask tokens": (lambda c, t: c.update(pard_token=3), "several mask tokens"),
    "a mask token beyond": (lambda c, t: c.update(mask_token_id=61), "mask_token_id must be .* 0 to 60, not 61"),
    "misshapen": (lambda c, t: t.update(mask_hidden=torch.ones(1, 1, H)), r"mask_hidden is .* not \[1, 1, 96\]"),
    "unknown field": (lambda c, t: c.update(drop_ratio=0.7), r"drop_ratio \(0\.7\)"),
    "another speculator": (lambda c, t: c.update(speculators_model_type="eagle3"), "choose peagle"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(target, tmp_path, case):
    change, message = REFUSED[case]
    config, tensors = peagle(layers=1)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        PEagleDrafter.load(target, written(tmp_path / "head", config, tensors), depth=2)


def test_eagle_names_the_proposer_of_a_parallel_head(target, folders):
    with pytest.raises(ValueError, match="choose proposer=peagle"):
        eagle.load(target, folders["four-layers"], depth=2)
