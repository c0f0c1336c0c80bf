"""Medusa: the head of each node, exact tokens, calibration, named trees and refusals."""

import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.medusa import measure as measuring
from spec_lab.drafters.medusa.measure import measure
from spec_lab.drafters.medusa.network import Heads, Trunk
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import calibrate as calibration
from spec_lab.propose import step_costs
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.calibrate import calibrate, time_steps
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.step_costs import VISIT, WARM_UP, StepCosts
from spec_lab.propose.trees import by_rank, expected_tokens, grow, parse, widths, write
from spec_lab.verify import Traversal
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
    calls,
    decode,
    emitted,
    fork_of,
    observations,
    plain_greedy,
    requests,
)
from tests.tiny import VOCABULARY, tiny_target

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = json.loads((ROOT / "tests" / "data" / "tree_digests.json").read_text())
TREE = parse("0 1 2 0.0 0.1 1.0 0.0.0 0.1.0 0.0.0.0")
HIDDEN, WIDTH = 32, 24


def heads_of(target, count=4, layers=1, seed=5, trunk=True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias = normal(count, layers, HIDDEN, HIDDEN), normal(count, layers, HIDDEN)
    model = target.lm.model
    inner, outer = (normal(WIDTH, 2 * HIDDEN), normal(WIDTH)), (normal(HIDDEN, WIDTH), normal(HIDDEN))
    mixing = Trunk(inner, outer, model.get_input_embeddings()) if trunk else None
    return Heads(weight, bias, model.get_output_embeddings(), mixing)


def plain_heads(heads, hidden, token):
    """Head by head, layer by layer: ``[K, V]``."""
    rows = []
    if heads.trunk:
        both = torch.cat([hidden, heads.trunk.embed(torch.tensor(token))])
        inner = silu(heads.trunk.inner[0] @ both + heads.trunk.inner[1])
        hidden = hidden + heads.trunk.outer[0] @ inner + heads.trunk.outer[1]
    for head in range(len(heads)):
        x = hidden
        for weight, bias in zip(heads.weight[head], heads.bias[head], strict=True):
            x = x + silu(weight @ x + bias)
        rows.append(heads.lm_head(x))
    return torch.stack(rows)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("trunk", [False, True])
@torch.no_grad()
def test_heads_equal_the_plain_formula(target, layers, trunk):
    heads = heads_of(target, 3, layers, trunk=trunk)
    generator = torch.Generator().manual_seed(1)
    hidden, token = torch.randn(5, HIDDEN, generator=generator, dtype=torch.float64), torch.arange(5)
    expected = torch.stack([plain_heads(heads, *pair) for pair in zip(hidden, token.tolist(), strict=True)])
    torch.testing.assert_close(heads(hidden, token), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(heads.first(2)(hidden, token), expected[:, :2], atol=1e-9, rtol=0)
    assert torch.equal(heads(hidden, token), heads(hidden, token + 1)) is not trunk


@pytest.mark.parametrize("verifier", [None, Traversal()])
@pytest.mark.parametrize("trunk", [False, True])
def test_greedy_drafting_emits_the_target_s_tokens(target, truth, verifier, trunk):
    proposer = Medusa(heads_of(target, trunk=trunk), TREE)
    group, steps = decode(target, proposer, requests(), verifier)
    assert emitted(group) == truth
    assert steps[0].draft.shape.nodes == 0  # nothing was computed yet
    assert steps[1].draft.shape.nodes == 3 * len(TREE)
    assert [calls(step) for step in steps[:3]] == [0, 1, 1]


@pytest.mark.parametrize("sampling", [COLD, WARM, Sampling(0.7, top_p=0.8, repetition_penalty=1.2)])
def test_a_batch_decodes_as_its_requests_alone(target, sampling):
    proposer = Medusa(heads_of(target), TREE)
    wanted = requests(sampling, new=14)
    together = emitted(decode(target, proposer, wanted)[0])
    assert together == [emitted(decode(target, proposer, [request])[0])[0] for request in wanted]


def test_nodes_hold_their_heads_tokens(target):
    """Also below several pending tokens, which no head has read, and in a batch with a prompt that is not yet
    computed."""
    proposer = Medusa(heads_of(target), TREE)
    batch = batch_of(target, requests(prompts=(*PROMPTS, PROMPTS[0])), proposer)
    fresh = batch.sequences.pop()
    computed(target, proposer, batch)
    batch.sequences[0].tokens += [7]
    batch.sequences[1].tokens += [7, 8]
    batch.sequences[2].tokens += [1, 2, 3, 4, 5]
    batch.sequences.append(fresh)
    draft = proposer.propose(replace(batch, recorded=True))
    shape = draft.shape
    for head, (sequence, gap) in enumerate(zip(batch.sequences, (0, 1, 4, 4), strict=True)):
        rows = shape.trees[head][1:]
        assert sorted(shape.ranks(int(row)) for row in rows) == sorted(path for path in TREE if len(path) <= 4 - gap)
        if gap == 4:
            continue
        text = sequence.tokens[: len(sequence.tokens) - gap - 1]
        hidden = last_state(target, text)
        logits = plain_heads(proposer.heads, hidden, sequence.tokens[len(text)])
        likeliest, q = logits.topk(3).indices, logits.softmax(-1)
        for row in rows:
            level, rank = shape.depth[row] - 1 + gap, shape.rank[row - shape.roots]
            token = draft.token[row - shape.roots]
            assert token == likeliest[level, rank]
            torch.testing.assert_close(draft.greedy_q[row - shape.roots], q[level, token])


def test_a_fork_drafts_like_its_origin(target):
    proposer = Medusa(heads_of(target), TREE)
    batch = batch_of(target, requests(prompts=PROMPTS[:1]), proposer)
    sequence = batch.sequences[0]
    computed(target, proposer, batch)
    sequence.tokens.append(7)
    batch.sequences.append(fork_of(sequence, proposer))
    token = proposer.propose(batch).token.view(2, -1)
    assert len(token[0]) and torch.equal(token[0], token[1])


def test_after_a_rewind_the_heads_read_the_state_of_the_last_kept_token(target):
    """Also in a fork that removes tokens of its own."""
    proposer = Medusa(heads_of(target), TREE)
    batch = batch_of(target, requests(prompts=PROMPTS[:1]), proposer)
    seq = batch.sequences[0]
    computed(target, proposer, batch)
    batch.sequences.append(fork_of(seq, proposer))
    for number, (sequence, length) in enumerate(zip(batch.sequences, (4, 2), strict=True)):
        sequence.kv.truncate(length)
        sequence.tokens[length:] = [7 + number]
        proposer.rewind(sequence.state, length)
    draft = proposer.propose(batch)
    for head, sequence in enumerate(batch.sequences):
        likeliest = plain_heads(proposer.heads, last_state(target, sequence.tokens[:-1]), sequence.tokens[-1]).topk(3)
        for row in draft.shape.trees[head][1:]:
            level, rank = draft.shape.depth[row] - 1, draft.shape.rank[row - 2]
            assert draft.token[row - 2] == likeliest.indices[level, rank]


def computed(target, proposer, batch):
    """Compute the pending tokens of all sequences, and let the proposer observe them."""
    target.lm.capture(proposer.requires.hidden)
    starts = [len(sequence.kv) for sequence in batch.sequences]
    pending = [sequence.pending for sequence in batch.sequences]
    output = target.lm.forward([sequence.kv for sequence in batch.sequences], pending, proposer.propose(batch))
    proposer.observe(observations(batch.sequences, output, starts))
    target.lm.capture(())


@torch.no_grad()
def last_state(target, text):
    """The state after the final norm of the last token, by a plain forward."""
    return target.lm.model.base_model(input_ids=torch.tensor([text]), use_cache=False)[0][0, -1]


# Calibration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [3, 64])
def test_measured_ranks_are_those_of_plain_forwards(at_once, monkeypatch):
    monkeypatch.setattr(measuring, "SAMPLES", at_once)
    target = tiny_target()
    heads = heads_of(target, 2)
    accuracy = measure(target, heads, PROMPTS, tokens=9, width=5)
    ranks = []
    for prompt in PROMPTS:
        text = [*prompt, *plain_greedy(target.lm.model, prompt, 9)]
        for end in range(len(prompt), len(text) - 2):
            with torch.no_grad():
                hidden = target.lm.model.base_model(input_ids=torch.tensor([text[:end]]), use_cache=False)[0][0, -1]
            order = plain_heads(heads, hidden, text[end]).argsort(descending=True).tolist()
            ranks.append([order[head].index(text[end + 1 + head]) for head in range(2)])
    assert accuracy == Accuracy.of(np.array(ranks), 5)
    assert accuracy.samples == 3 * 7
    assert not target.lm.cells.references.any()


def test_accuracy_counts_paths_and_conditions_where_samples_allow():
    ranks = np.array([[0, 0], [0, 1], [1, 0], [9, 0]] * 100)
    accuracy = Accuracy.of(ranks, 3)
    assert accuracy.accuracy == [[0.5, 0.25, 0.0], [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0]]
    assert accuracy.paths == {(0,): 200, (0, 0): 100, (0, 1): 100, (1,): 100, (1, 0): 100}
    few = Accuracy.of(ranks[:40], 3)
    assert few.accuracy[1] == [0.75, 0.25, 0.0]  # too few for a condition: regardless of the first head
    # Shrunk towards accuracies by rank: (count + 20 p) / (above + 20).
    assert accuracy.value((0,)) == pytest.approx((200 + 20 * 0.5) / 420)
    assert accuracy.value((1, 0)) == pytest.approx(accuracy.value((1,)) * (100 + 20 * 2 / 3) / 120)
    assert accuracy.value((2, 0)) == pytest.approx(0.0)
    assert replace(accuracy, samples=0).value((0, 1)) == pytest.approx(0.5 / 3)
    with pytest.raises(ValueError, match="no samples"):
        Accuracy.of(ranks[:0], 3)


def test_accuracies_are_measured_on_text_of_the_temperature():
    target = tiny_target()
    heads = heads_of(target, 2)
    greedy, sampled = (measure(target, heads, PROMPTS, 30, width=5, temperature=t) for t in (0.0, 1.0))
    assert sampled.temperature == 1.0
    assert sampled.samples == greedy.samples
    assert sampled.paths != greedy.paths


def test_accuracy_is_the_same_after_saving_and_loading(tmp_path):
    accuracy = Accuracy.of(np.random.default_rng(0).integers(0, 4, (500, 3)), 3)
    accuracy.write(tmp_path, rare=1, text="held-out code")
    again = Accuracy.read(tmp_path)
    assert again.paths == accuracy.paths
    assert again.samples == 500
    np.testing.assert_allclose(again.accuracy, accuracy.accuracy, atol=1e-6)
    assert json.loads((tmp_path / "calibration.json").read_text())["text"] == "held-out code"
    (tmp_path / "calibration.json").write_text('{"accuracy": [[0.5, 0.2], [0.4]]}')
    plain = Accuracy.read(tmp_path)
    assert plain.value((1, 0)) == pytest.approx(0.2 * 0.4)


RANKED = Accuracy([[0.6, 0.2, 0.1], [0.5, 0.1, 0.1], [0.4, 0.1, 0.1], [0.4, 0.1, 0.1]], {})


def costs_of(seconds):
    return StepCosts(seconds, dict.fromkeys(seconds, 0.0), 10)


@pytest.fixture
def calibrated(tmp_path):
    """``calibrate`` with an empty cache."""
    return partial(calibrate, cache=CostCache(tmp_path / "cache"))


@pytest.mark.parametrize("per_node", [0.0, 0.01, 0.05, 0.25, 1.0])
def test_the_tree_weighs_tokens_against_measured_seconds(target, calibrated, per_node):
    def timed(target, proposers, *_):
        assert {size: proposer.nodes for size, proposer in proposers.items()} == {size: size for size in proposers}
        return costs_of({size: 1.0 + (0.5 + per_node * size) * (size > 0) for size in proposers})

    chosen = calibrated(target, partial(Medusa, heads_of(target)), 4, RANKED, max_nodes=30, timing=timed)
    grown = grow(by_rank(RANKED.accuracy), 30, 4, 3)
    rates = {0: 1.0} | {
        size: (1 + sum(value for _, value in grown[:size])) / (1.5 + per_node * size)
        for size in (*calibration.SIZES, 30)
        if 0 < size <= 30
    }
    best = max(rates, key=rates.get)
    best = max(size for size, rate in rates.items() if rate >= 0.98 * rates[best]) if best else 0
    assert {0.0: 30, 1.0: 0}.get(per_node, best) == best
    assert chosen.choices == (parse([path for path, _ in grown[:best]]) if best else ())
    assert chosen.expected_tokens == pytest.approx(expected_tokens(chosen.choices, RANKED.value))
    assert chosen.expected_speedup == pytest.approx(rates[best])


def test_nothing_is_drafted_where_no_tree_is_faster(target, truth, tmp_path, monkeypatch, caplog):
    dear = {n: 1.0 + 9 * n for n in (0, 1, 2)}
    monkeypatch.setattr(calibration, "time_steps", lambda *_: costs_of(dear))
    folder = saved(tmp_path)
    Accuracy([[0.5, 0.1]] * 4, {}).write(folder)
    proposer = Medusa.load(target, str(folder), batch_size=3)
    assert "nothing will be drafted" in caplog.text
    assert (proposer.nodes, proposer.requires.hidden, proposer.facts["tree"]) == (0, (), "none")
    assert Medusa.load(target, str(folder), tree="none").nodes == 0  # as an interrupted run is resumed
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    assert not any(step.draft.shape.nodes for step in steps)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_whole_steps_are_timed_alternately_and_free_everything(batch_size, monkeypatch, calibrated):
    target = tiny_target()
    drafting, plain, seen = partial(Medusa, heads_of(target)), target.lm.prepare, []

    def watched(sequences, pending, draft, prefill):
        every = [*zip(sequences, pending, strict=True), *prefill]
        assert len(every) == batch_size and not (sequences and prefill)
        seen.append((draft.shape.nodes, {len(new) for _, new in every}, {len(old) for old, _ in every}))
        return plain(sequences, pending, draft, prefill)

    monkeypatch.setattr(target.lm, "prepare", watched)
    monkeypatch.setattr("spec_lab.propose.calibrate.measure", step_costs.measure)
    monkeypatch.setattr("spec_lab.propose.step_costs.MIN_RATE", 0.0)
    monkeypatch.setattr("spec_lab.propose.step_costs.STEADY", float("inf"))
    monkeypatch.setattr("spec_lab.core.machine.SLACK", float("inf"))
    chosen = calibrated(
        target, drafting, 4, Accuracy([[0.5, 0.1]] * 4, {}), batch_size, max_nodes=9,
        timing=partial(time_steps, seconds=0.0),
    )  # fmt: skip
    sizes = [0, 1, 2, 3, 4, 5, 6, 8, 9]
    prompts, steps = seen[: len(sizes)], seen[len(sizes) :]
    assert prompts == [(0, {200}, {0})] * len(sizes)  # each size observes it
    order = [*sizes * WARM_UP, *(sizes + sizes[::-1]) * 3]
    assert steps == [(size * batch_size, {1}, {199 + n}) for size in order for n in range(VISIT)]
    costs = chosen.costs.seconds
    assert list(costs) == sizes and min(costs.values()) > 0
    assert chosen.batch_size == batch_size
    assert not target.lm.cells.references.any()
    assert target.lm.call.hook is None


# Files -------------------------------------------------------------------------------------------------------------


def saved(folder, config=(), tensors=(), count=4):
    """A folder of heads; ``config`` and ``tensors`` replace entries, None removes them."""
    folder.mkdir(exist_ok=True)
    settings = {
        "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_heads": count, "num_layers": 1, "shared_lm_head": True,
        "target_sha256": "",
    }  # fmt: skip
    stored = {"weight": torch.randn(count, 1, HIDDEN, HIDDEN), "bias": torch.randn(count, 1, HIDDEN)}
    settings, stored = settings | dict(config), stored | dict(tensors)
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if value is not None})
    )
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")
    return folder


TRUNK = {
    "trunk_in.weight": torch.ones(5, 2 * HIDDEN), "trunk_in.bias": torch.ones(5),
    "trunk_out.weight": torch.ones(HIDDEN, 5), "trunk_out.bias": torch.ones(HIDDEN),
}  # fmt: skip


def test_loaded_heads_use_a_named_tree_or_the_calibrated_one(target, truth, tmp_path, monkeypatch):
    folder = saved(tmp_path)
    named = Medusa.load(target, str(folder), tree="3x2")
    assert (named.nodes, len(named.heads), named.calibration, len(named.sha256)) == (9, 2, None, 64)
    assert named.heads.weight.dtype == target.lm.dtype
    assert named.facts["tree"] == write(widths([3, 2]))
    Accuracy([[0.5, 0.1]] * 4, {}).write(folder)
    monkeypatch.setattr(calibration, "time_steps", partial(time_steps, seconds=0.0))
    chosen = Medusa.load(target, str(folder), batch_size=2, max_nodes=3)
    assert chosen.calibration.batch_size == 2
    assert chosen.facts["expected_tokens"] == chosen.calibration.expected_tokens
    json.dumps(chosen.facts)
    likeliest = Medusa.load(target, str(folder), tree="likeliest", max_nodes=3)
    assert likeliest.tree == parse("0 0.0 0.0.0")  # 0.5, 0.25, 0.125: before 1, which is right once in ten
    for proposer in (named, chosen, likeliest):
        assert emitted(decode(target, proposer, requests())[0]) == truth


@pytest.mark.parametrize("max_depth", [1, 2, 3, 4, 9])
def test_the_likeliest_and_the_calibrated_tree_respect_the_depth_limit(target, tmp_path, monkeypatch, max_depth):
    folder = saved(tmp_path)
    Accuracy([[0.5, 0.1]] * 4, {}).write(folder)
    free = lambda target, proposers, *_: costs_of(dict.fromkeys(proposers, 1.0))  # noqa: E731
    monkeypatch.setattr(calibration, "time_steps", free)
    for tree in ("likeliest", "calibrated"):  # nodes cost nothing: the largest
        proposer = Medusa.load(target, str(folder), tree=tree, max_nodes=6, max_depth=max_depth)
        assert proposer.tree == parse([path for path, _ in grow(by_rank([[0.5, 0.1]] * 4), 6, min(max_depth, 4), 2)])
        assert len(proposer.heads) == min(max_depth, 4)
    assert Medusa.load(target, str(folder), tree="1x1x1", max_depth=max_depth).nodes == 3, "a named tree is as named"


@pytest.mark.parametrize(
    ("config", "tensors", "options", "message"),
    [
        ({"hidden_size": 64}, {}, {}, "for hidden size 64, the target tiny-llama has 32"),
        ({"vocab_size": 99}, {}, {}, f"a vocabulary of 99 tokens, the target tiny-llama has {VOCABULARY}"),
        ({"num_heads": None}, {}, {}, "num_heads must be a whole number from 1 to .*, not null"),
        ({"num_heads": "four"}, {}, {}, "num_heads must be a whole number from 1 to .*, not 'four'"),
        ({"shared_lm_head": False}, {}, {}, "shared_lm_head"),
        ({"num_heads": 5}, {}, {}, r"weight is \[4, 1, 32, 32\], not \[5, 1, 32, 32\]"),
        ({"num_layers": 2}, {}, {}, r"bias is \[4, 1, 32\], not \[4, 2, 32\]"),
        ({"head_dropout": 0.5}, {}, {}, r"head_dropout \(0\.5\)"),
        ({}, {"bias": None}, {}, "bias is missing"),
        ({}, {"bias": torch.full((4, 1, HIDDEN), torch.nan)}, {}, "'bias' holds NaN"),
        ({"trunk_size": -1}, {}, {}, "trunk_size must be a whole number from 0 to .*, not -1"),
        ({"trunk_size": 5}, {}, {}, r"trunk_in\.weight is missing"),
        (
            {"trunk_size": 5},
            dict(TRUNK, **{"trunk_in.weight": torch.zeros(5, HIDDEN)}),
            {},
            r"trunk_in\.weight is \[5, 32\], not \[5, 64\]",
        ),
        ({}, TRUNK, {}, r"'trunk_in\.weight' is in no layer"),
        ({}, {}, {"tree": "1x1x1x1x1"}, "tree has depth 5.* 4 Medusa heads"),
        ({}, {}, {"tree": "99"}, f"tree .*99 .*{VOCABULARY}"),
        ({}, {}, {"tree": "best"}, "a tree is written as"),
        ({}, {}, {"batch_size": 0}, "batch_size"),
        ({}, {}, {"max_nodes": "many"}, "max_nodes"),
        ({}, {}, {"tree": "99999x99999"}, "tree has 99999 nodes or more, at most 1024"),
    ],
)
def test_wrong_heads_and_options_are_refused(target, tmp_path, config, tensors, options, message):
    with pytest.raises(ValueError, match=message):
        Medusa.load(target, str(saved(tmp_path, config, tensors)), **{"tree": "2x1"} | options)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"accuracy": [[None]]}, r"accuracy\[0\]\[0\] must be a number, not null"),
        ({"accuracy": [[True]]}, r"accuracy\[0\]\[0\] must be a number, not true"),
        ({"samples": "many"}, "samples must be a whole number"),
        ({"temperature": None}, "temperature must be a number, not null"),
        ({"paths": {"0.x": 1}}, "'x'"),
        ({"paths": {"0": 1.5}}, "paths.0 must be a whole number"),
    ],
)
def test_a_value_of_the_calibration_is_refused_by_its_place(target, tmp_path, more, message):
    folder = saved(tmp_path / "heads")
    (folder / "calibration.json").write_text(json.dumps({"accuracy": [[0.5]]} | more))
    with pytest.raises(ValueError, match=rf"calibration\.json is malformed: .*{message}"):
        Medusa.load(target, str(folder))


def test_missing_and_broken_files_are_named(target, tmp_path, caplog):
    with pytest.raises(OSError, match=r"there is no folder .*nowhere"):
        Medusa.load(target, str(tmp_path / "nowhere"), tree="2")
    folder = saved(tmp_path / "heads")
    with pytest.raises(OSError, match=r"tree=.*calibration\.json"):
        Medusa.load(target, str(folder))
    for text in ("{", "[]", '{"accuracy": []}', '{"accuracy": [[2]]}', '{"paths": {}}', '{"accuracy": [["x"]]}'):
        (folder / "calibration.json").write_text(text)
        with pytest.raises(ValueError, match=r"calibration\.json"):
            Medusa.load(target, str(folder))
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(OSError, match=r"model\.safetensors .*truncated or corrupt"):
        Medusa.load(target, str(folder), tree="2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"neither model\.safetensors nor"):
        Medusa.load(target, str(folder), tree="2")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not readable"):
        Medusa.load(target, str(folder), tree="2")
    other = saved(tmp_path / "other", {"target_sha256": "abc"})
    Medusa.load(replace(target, sha256="def", source_sha256="abc"), str(other), tree="2")
    assert "trained on other weights" not in caplog.text
    Medusa.load(replace(target, sha256="def"), str(other), tree="2")
    assert "trained on other weights" in caplog.text


@pytest.mark.parametrize("name", DIGESTS)
def test_published_trees_are_restated(name):
    assert sha256(write(tuple(sorted(parse(name)))).encode()).hexdigest() == DIGESTS[name]
