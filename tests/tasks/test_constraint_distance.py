"""The distance between masked outputs and the target's given a valid output: by hand, by samples, and as a task."""

import io
import json
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from spec_lab.constrain import AppliedConstraint, ConstraintError
from spec_lab.constrain.potential import explore
from spec_lab.constrain.protocol import tokens_of
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.tasks.certify.significance import chi_square
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, table_models
from spec_lab.tasks.constraint_distance import scores, task
from spec_lab.tasks.constraint_distance.distance import Sampler, distances, estimate, exact
from spec_lab.tasks.constraint_distance.scores import rows_after
from spec_lab.tasks.constraint_distance.task import measure
from spec_lab.verify import Lenient, Traversal
from tests.constrain.test_potential import words
from tests.constrain.toys import Table
from tests.decode.test_global_constraint import branching, by_enumeration
from tests.labs import Letters, lab, settings
from tests.tiny import VOCABULARY, tiny_target

STOP = frozenset({3})
WARM = Sampling(1.0)


@dataclass(frozen=True)
class ByHand:
    """p after the empty text, after token 0 and after token 1."""

    v: int = 4

    def probabilities(self, length):
        first = [0.5, 0.25, 0.15, 0.1]
        second = [[0.3, 0.3, 0.3, 0.1], [0.03, 0.02, 0.05, 0.9], [0.25] * 4, [0.25] * 4]
        p = np.array([[first], second][length]) if length < 2 else np.full((4**length, 4), 0.25)
        return p, p


def exactly(allowed, toy=None, length=2):
    target, _ = table_models(toy or ByHand(), 4)
    request = Request(0, "toy", PROMPT, WARM, length, STOP)
    prefixes = explore(Table(allowed).start(request), STOP, 4, length, 1000)
    return exact(target, request, prefixes)


# By hand ----------------------------------------------------------------------------------------------------------


def test_the_exact_distance_by_hand():
    """Both first tokens may be drawn, but the likelier one is hardly ever completed."""
    distance = exactly(words((0, 3), (1, 3)))
    assert list(distance.outputs) == [(0, 3), (1, 3)]
    assert np.exp(distance.log_z) == pytest.approx(0.5 * 0.1 + 0.25 * 0.9)
    assert distance.local == pytest.approx([2 / 3, 1 / 3])
    assert distance.conditional == pytest.approx([2 / 11, 9 / 11])
    assert distance.tv == pytest.approx(16 / 33) and distance.invalid == pytest.approx(0, abs=1e-12)
    assert distance.kl == pytest.approx(2 / 11 * np.log(3 / 11) + 9 / 11 * np.log(27 / 11))
    assert distance.kl_local == pytest.approx(2 / 3 * np.log(11 / 3) + 1 / 3 * np.log(11 / 27))


def test_masked_outputs_that_do_not_end_count_as_one_outcome():
    distance = exactly(words((0, 3), (1, 3), (1, 2, 3)))
    local = 1 / 3 * 0.9 / 0.95
    assert distance.local == pytest.approx([2 / 3, local]) and distance.invalid == pytest.approx(1 / 3 - local)
    assert distance.conditional == pytest.approx([2 / 11, 9 / 11])
    assert distance.tv == pytest.approx(9 / 11 - local)
    assert distance.kl == pytest.approx(2 / 11 * np.log(3 / 11) + 9 / 11 * np.log(9 / 11 / local))
    assert distance.kl_local == float("inf")
    assert [row["tokens"] for row in distance.facts()["probabilities"]] == [[1, 3], [0, 3]]


def test_without_a_difference_all_distances_are_zero():
    distance = exactly(words((1, 3)))
    assert distance.tv == pytest.approx(0, abs=1e-12) and distance.kl == pytest.approx(0, abs=1e-12)


def test_outputs_without_probability_have_no_distance():
    impossible = RandomToy(8, v=4, support=2)
    token = next(t for t in range(3) if impossible.probabilities(0)[0][0][t] == 0)
    with pytest.raises(ConstraintError, match="no output that the constraint allows has any probability"):
        exactly(words((token, 3)), impossible)


def test_estimates_by_hand():
    """Weights 1, 1, 3 and one masked output that is not valid; two of the others."""
    with np.errstate(divide="ignore"):
        local, given = np.log([1.0, 1.0, 3.0, 0.0]), np.log([1.0, 3.0])
    measured = distances(local, given)
    assert measured["z"].mean == pytest.approx(5 / 4)
    assert measured["tv"].mean == pytest.approx((0.2 + 0.2 + 1.4 + 1.0) / 4 / 2)
    assert measured["tv_global"].mean == pytest.approx((0 + 1 - 1.25 / 3) / 2)
    assert measured["kl"].mean == pytest.approx(np.log(3) / 2 - np.log(1.25))
    for interval in measured.values():
        assert interval.low < interval.mean < interval.high
    assert set(distances(local, np.empty(0))) == {"z", "tv"}
    assert np.isnan(distances(np.full(3, -np.inf), given)["tv"].mean)


# Samples ----------------------------------------------------------------------------------------------------------


def sampler_of(kind="rejection", seed=0, batch=50):
    toy = RandomToy(5, support=2, plain=True)
    target, draft = table_models(toy, 6)
    proposer = DraftModel(draft, target.context, TreePlan(parse("2x1"), "iid"))
    applied = AppliedConstraint(Table(branching), distribution="global")
    request = Request(0, "toy", PROMPT, WARM, 3, STOP)
    return Sampler(target, proposer, Traversal(), applied, request, kind, seed, batch)


@pytest.mark.nightly
def test_rejected_outputs_are_drawn_anew_until_there_are_enough():
    sampler = sampler_of()
    valid_outputs, wanted = sampler.given_valid(400, 100_000), by_enumeration(sampler_toy(), branching, 3, 3)
    outputs = [output[0][0] for output in wanted]
    counts = np.array([valid_outputs.count(output) for output in outputs])
    assert counts.sum() == len(valid_outputs) == 400 < sampler.attempts
    assert chi_square(counts, np.array(list(wanted.values()))).p_value > 1e-4
    assert 0 < sampler.futures.lower <= sampler.futures.upper + 1e-12 < 1
    bound = sampler.futures.upper
    sampler.given_valid(1, 100_000)
    assert sampler.futures.upper <= bound


@pytest.mark.parametrize("kind", ["rejection", "expected_futures"])
def test_what_a_sampler_keeps_grows_with_its_outputs_not_with_the_vocabulary(kind):
    sampler = sampler_of(kind, batch=8)
    outputs = [text for text, _ in sampler.local(30)]
    followed = {(text[:n], text[n]) for text in outputs for n in range(len(text))}
    seen = sampler.scores.seen
    assert {(text, token) for text, learned in seen.items() for token in learned.p} == followed
    sampler.given_valid(20, 200)
    constraint = sampler.applied.constraint
    for text, learned_text in seen.items():
        state = constraint.start(sampler.request)
        for token in text:
            state.advance(token)
        allowed = tokens_of(state.mask(), constraint.vocabulary)
        (row,) = rows_after(sampler.target, sampler.request, [text], [allowed])
        others = sampler.futures.may_follow(text, allowed) & ~np.isin(allowed, list(learned_text.p))
        assert learned_text.rest == pytest.approx(np.exp(row.log_p[others]).sum(), abs=1e-15)
        assert [learned_text.p[t] for t in learned_text.p] == pytest.approx(
            [row.log_p[np.searchsorted(allowed, t)] for t in learned_text.p]
        )
        learned = sampler.futures.known[text]
        assert learned.rest == learned_text.rest and learned.p.keys() == learned.bound.keys() == learned_text.p.keys()


def test_forwards_of_fewer_texts_give_the_same_rows(monkeypatch):
    whole = exactly(branching, sampler_toy(), 3)
    monkeypatch.setattr(scores, "MAX_LOGITS", 8)  # two rows of four tokens
    some = exactly(branching, sampler_toy(), 3)
    assert some.log_z == pytest.approx(whole.log_z) and some.local == pytest.approx(whole.local)


def sampler_toy():
    return RandomToy(5, support=2, plain=True)


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["rejection", "expected_futures"])
def test_estimates_agree_with_the_exact_distance(kind):
    whole = exactly(branching, sampler_toy(), 3)
    estimated = estimate(sampler_of(kind), 400, 4000)
    assert estimated["method"] == "sampled" and estimated["exact_samples"] == (kind == "rejection")
    assert estimated["local_samples"] == estimated["global_samples"] == 400 and not estimated["stopped_by_attempts"]
    assert estimated["z_lower"] - 1e-12 <= np.exp(whole.log_z) <= estimated["z_upper"] + 1e-12
    for name, value in (("z", np.exp(whole.log_z)), ("tv", whole.tv), ("tv_global", whole.tv), ("kl", whole.kl)):
        low, high = estimated[name]["low"], estimated[name]["high"]
        width = high - low
        assert low - width <= value <= high + width, name
        assert width < 0.5
    assert estimated["local_invalid"] == pytest.approx(whole.invalid, abs=0.1)


# The task -----------------------------------------------------------------------------------------------------------

VALID = [(5, 2), (6, 7, 2), (6, 8, 2), (9, 2)]


def toy_lab(texts=VALID, temperature=1.0, max_prefixes=4096, **changes):
    target = replace(tiny_target(), tokenizer=Letters(), stops=frozenset({2}))
    constraint = Table(words(*texts), VOCABULARY) if isinstance(texts, list) else texts
    applied = changes.pop("applied", AppliedConstraint(constraint, max_prefixes=max_prefixes))
    laboratory = lab(("the cat sat", "a b"), temperature, applied=applied, **changes)
    return replace(laboratory, target=replace(target, cache=laboratory.target.cache))


def run(out, laboratory=None, console=None, **options):
    console = console or Console(file=io.StringIO(), width=80)
    code = measure(laboratory or toy_lab(), settings(out, max_new_tokens=4), {}, console, **options)
    return code, console.file.getvalue()


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def test_a_run_leaves_a_table_a_summary_and_a_figure(tmp_path):
    code, printed = run(tmp_path)
    assert code == 0
    summary = summary_of(tmp_path)
    assert [row["prompt"] for row in summary["prompts"]] == ["p0", "p1"]
    for row in summary["prompts"]:
        assert row["method"] == "exact" and row["outputs"] == 4 and 0 < row["tv"] < 1 and row["kl"] > 0
        assert sum(output["global"] for output in row["probabilities"]) == pytest.approx(1)
        assert {tuple(output["tokens"]) for output in row["probabilities"]} == set(VALID)
        assert all(isinstance(output["text"], str) for output in row["probabilities"])
        assert f"{row['tv']:.3g}" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # the last names a folder
    assert "exact: every valid output enumerated" in " ".join(printed.split())
    assert (tmp_path / "figures" / "distance.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "manifest.json").read_text())["arms"] == ["constraint_distance"]


def interrupted_at(monkeypatch, name, number):
    """Let the ``number``-th call of a function of the task, from 1, be interrupted; returns the calls."""
    calls, right = [], getattr(task, name)

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(task, name, interrupted)
    return calls


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "most"), [("exact", 4096), ("estimate", 2)])
def test_a_resumed_run_keeps_the_prompts_that_were_finished(tmp_path, monkeypatch, capsys, name, most):
    options = dict(samples=20, attempts=2000)
    calls = interrupted_at(monkeypatch, name, 2)
    code, _ = run(tmp_path / "here", toy_lab(max_prefixes=most), **options)
    assert code == 130 and not (tmp_path / "here" / "summary.json").exists()
    told = capsys.readouterr().err
    assert "the distances of 1 of 2 prompts are in" in told and "to resume" in told
    assert run(tmp_path / "here", toy_lab(max_prefixes=most), **options)[0] == 0
    assert len(calls) == 3  # the second prompt only
    assert run(tmp_path / "whole", toy_lab(max_prefixes=most), **options)[0] == 0
    assert summary_of(tmp_path / "here")["prompts"] == summary_of(tmp_path / "whole")["prompts"]
    assert run(tmp_path / "here", toy_lab(max_prefixes=most), **options)[0] == 0
    assert len(calls) == 5  # of a finished run nothing is measured again


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        ('{"prompt": "p0", "method": "other"}', "method must be one of exact, none, sampled"),
        ('{"prompt": "p0", "method": "none"}', "error is missing"),
    ],
)
def test_a_damaged_entry_is_refused_with_its_prompt(tmp_path, entry, what):
    assert run(tmp_path)[0] == 0
    file = tmp_path / "distances.parquet"
    frame = pd.read_parquet(file)
    frame["entry"] = entry
    frame.to_parquet(file)
    with pytest.raises(ValueError, match=f"distances of prompt 0 are not readable .*{what}"):
        run(tmp_path)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        (dict(applied=None), {}, "task=constraint_distance: there is no constraint: choose one"),
        (dict(applied=AppliedConstraint(Table(branching, VOCABULARY), "draft")), {}, "=draft does not constrain"),
        (
            dict(applied=AppliedConstraint(Table(branching, VOCABULARY, has_actions=True))), {},
            "'table' backtracks, forks or ends the output itself: choose a grammar",
        ),
        (dict(verifier=Lenient(0.5)), {}, "verifier 'lenient' is lossy: choose another"),
        (dict(temperature=0.0), {}, "at temperature 0 the model has one output"),
        (dict(max_prefixes=2), dict(method="exact"), "valid outputs have more than 2 prefixes of up to 4 tokens"),
        ({}, dict(method="some"), "method must be one of auto, exact, sampled"),
        ({}, dict(sampler="some"), "sampler must be one of rejection, expected_futures"),
        ({}, dict(samples=1), "samples must be a whole number of 2 or more"),
        ({}, dict(attempts=0), "attempts must be a whole number"),
    ],
)  # fmt: skip
def test_what_has_no_distance_is_refused_in_one_sentence(tmp_path, parts, options, message):
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path / "out", toy_lab(**parts), **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
