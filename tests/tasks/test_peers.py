"""transformers' generation and the project's loop on the same tiny checkpoint in float64."""

import json
from dataclasses import replace

import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.tracking import Files
from spec_lab.core.probabilities import Sampling
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.target import Target
from spec_lab.runners.attention import SPANS
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.lab import Lab
from spec_lab.tasks.peers import Bare, Generate
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Token
from tests import checkpoints
from tests.labs import Repeat, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    checkpoints.checkpoint(folder / "target")
    checkpoints.checkpoint(folder / "draft", seed=1)
    checkpoints.prompts(folder / "prompts.jsonl")
    return folder


def build(folder, sampling: Sampling) -> Lab:
    target = Target.load(str(folder / "target"), dtype="float64")
    peers = {
        "bare": Bare(target, Sampling(sampling.temperature), 0),
        "greedy": Generate.plain(target, sampling, 0),
        "assisted": Generate.assisted(target, sampling, 0, str(folder / "draft")),
        "assisted_same": Generate.assisted(target, sampling, 0, str(folder / "draft"), tokens=4),
        "prompt_lookup": Generate.lookup(target, sampling, 0),
    }
    prompts = jsonl(str(folder / "prompts.jsonl"))
    return Lab(target, Repeat(), Token(), sampling, prompts, Files(), peers=peers)


@pytest.mark.nightly
def test_greedy_generation_is_the_same_text_everywhere(folder, tmp_path):
    assert run(build(folder, Sampling()), settings(tmp_path, batch_size=1, max_new_tokens=24), {}) == 0
    tables = metrics.load(tmp_path)
    names = ["repeat", "assisted", "assisted_same", "bare", "greedy", "prompt_lookup", "baseline"]
    assert metrics.arms(tables) == names
    for arm in names[:-1]:
        assert metrics.identical_outputs(tables.requests, arm) == 1.0
    peers = tables.requests[tables.requests["arm"].isin(names[1:-1])]
    assert (peers["prefill_tokens"] + peers["decode_tokens"] == 24).all()
    assert (peers[peers["arm"].isin(["greedy", "bare"])]["prefill_tokens"] == 1).all()
    assert (peers[["prefill_seconds", "decode_seconds"]] > 0).all(axis=None)
    assert set(tables.forwards["arm"]) == {"repeat", "baseline"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["arms"]["assisted"]["speedup"]["mean"] > 0
    assert summary["arms"]["assisted"]["tau_pooled"] is None
    assert summary["arms"]["assisted"]["survival"] == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["greedy", "bare", "assisted"])
def test_sampling_is_seeded_by_request(folder, name):
    lab = build(folder, Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01))
    requests = lab.requests(settings(folder, max_new_tokens=16))[:2]
    arm = lab.peers[name]
    first, again = arm.decode(requests), arm.decode(requests[::-1])
    assert [outcome.tokens for outcome in first.outcomes] == [outcome.tokens for outcome in again.outcomes[::-1]]
    assert first.outcomes[0].tokens != first.outcomes[1].tokens


@pytest.mark.parametrize("name", ["greedy", "bare"])
def test_a_stop_token_stops_a_peer(folder, name):
    lab = build(folder, Sampling())
    (request,) = lab.requests(settings(folder, max_new_tokens=24))[:1]
    arm = lab.peers[name]
    (free,) = arm.decode([request]).outcomes
    stop = free.tokens[5]
    (stopped,) = arm.decode([replace(request, stop=frozenset({stop}))]).outcomes
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (free.finish, stopped.finish) == ("length", "stop")


def test_the_bare_loop_refuses_what_it_cannot_do(folder):
    target = Target.load(str(folder / "target"), dtype="float64")
    with pytest.raises(ValueError, match=r"sampling\.temperature only"):
        Bare(target, Sampling(1.0, top_k=5), 0)


def test_peers_share_the_targets_weights_and_nothing_else(folder):
    lab = build(folder, Sampling())
    ours = lab.target.lm.model
    assert lab.weights()["assisted"] == lab.weights()["assisted_same"] == weights_hash(str(folder / "draft"))
    assert ours.config._attn_implementation == SPANS
    for peer in lab.peers.values():
        assert peer.model is not ours
        assert peer.model.config._attn_implementation == "sdpa"
        theirs = dict(peer.model.named_parameters())
        assert all(theirs[name] is parameter for name, parameter in ours.named_parameters())


def rows_of_forwards(folder, arm, lab, monkeypatch):
    """Rows of each of the target's forwards after the prompt's, in one decode."""
    rows = []
    forward = arm.model.forward

    def counted(*args, input_ids, **kwargs):
        rows.append(input_ids.shape[1])
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(arm.model, "forward", counted)
    (outcome,) = arm.decode(lab.requests(settings(folder, max_new_tokens=24))[:1]).outcomes
    assert len(outcome.tokens) == 24
    return rows[1:]


def test_the_requested_number_of_tokens_is_drafted(folder, monkeypatch):
    lab = build(folder, Sampling())
    assert set(rows_of_forwards(folder, lab.peers["greedy"], lab, monkeypatch)) == {1}
    constant = rows_of_forwards(folder, lab.peers["assisted_same"], lab, monkeypatch)
    assert set(constant[:-4]) == {1 + 4}, "all but the last, which the limit cuts short"
    assert 1 < max(rows_of_forwards(folder, lab.peers["prompt_lookup"], lab, monkeypatch)) <= 1 + 10
    free = lab.peers["assisted"].assistant.generation_config
    assert free.num_assistant_tokens is None and free.assistant_confidence_threshold is None
    sure = Generate.assisted(lab.target, Sampling(), 0, str(folder / "draft"), tokens=4, confidence=1)
    assert set(rows_of_forwards(folder, sure, lab, monkeypatch)) == {1 + 1}, "no token of a tiny draft is that likely"
    with pytest.raises(ValueError, match="confidence .*from 0 to 1.* 3"):
        Generate.assisted(lab.target, Sampling(), 0, str(folder / "draft"), tokens=4, confidence=3)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "four", True])
def test_drafts_are_counted_in_whole_tokens(folder, wrong):
    target = Target.load(str(folder / "target"), dtype="float64")
    with pytest.raises(ValueError, match="tokens .*from 1"):
        Generate.assisted(target, Sampling(), 0, str(folder / "draft"), tokens=wrong)
    with pytest.raises(ValueError, match="tokens .*from 1"):
        Generate.lookup(target, Sampling(), 0, tokens=wrong)
    with pytest.raises(ValueError, match="max_ngram .*from 1"):
        Generate.lookup(target, Sampling(), 0, max_ngram=wrong)
