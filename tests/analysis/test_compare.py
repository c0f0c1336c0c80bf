"""Comparisons of runs and sweeps: pairing, verdicts, and rejected input."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.analysis.compare import compare
from spec_lab.analysis.compare.changes import fewest_units
from spec_lab.analysis.console import WIDE, show
from spec_lab.analysis.results.comparison import result
from spec_lab.core.request import BROKEN
from spec_lab.results import run_state, sweep
from spec_lab.results.schema import SCHEMAS
from spec_lab.results.writer import Recorder

EMPTY = {"string": "", "int64": 0, "double": 0.0, "bool": False, "list<item: int64>": []}


def row(table: str, **given) -> dict:
    kinds = {name: str(kind).replace("element", "item") for name, (kind, _) in SCHEMAS[table].items()}
    return {name: EMPTY[kind] for name, kind in kinds.items()} | given


def write(
    folder: Path,
    tau: Sequence[float],
    gain: Sequence[float] | None = None,
    arms: Sequence[str] = ("repeat",),
    order: Sequence[int] | None = None,
    prompt: str = "prompt",
    baseline: bool = True,
    broken: Sequence[int] = (),
    batch_size: int = 1,
    config: dict | None = None,
    **manifest,
) -> Path:
    """A run: prompt i emits 60 tokens at ``tau[i]`` a step, ``gain[i]`` times as fast as the baseline."""
    count, gain = len(tau), tau if gain is None else gain
    order = range(count) if order is None else order
    forwards, steps, requests = [], [], []
    for group in range(-(-count // batch_size)):
        for n in range(group * batch_size, min(count, (group + 1) * batch_size)):
            which = order[n]  # the prompt's own number, wherever the run has it
            for arm in (*arms, *(["baseline"] if baseline else [])):
                speed = 1.0 if arm == "baseline" else gain[which]
                keys = dict(group=group, arm=arm, request=n)
                forwards.append(row("forwards", id=f"{group}/{arm}/0", group=group, arm=arm))
                length = 60 if arm == "baseline" else round(60 / tau[which])
                emitted = [1] * 60 if arm == "baseline" else np.diff(np.linspace(0, 60, length + 1).round()).astype(int)
                for number, tokens in enumerate(map(int, emitted)):
                    counts = dict(
                        emitted=tokens, emitted_kept=tokens, accepted=tokens - 1, expected_emitted=float(tokens)
                    )
                    drafted = 0 if arm == "baseline" else 8
                    steps.append(
                        row("steps", id=f"{n}/{arm}/0/{number}", forward=number, nodes=drafted, **keys, **counts)
                    )
                ends = dict(finish=BROKEN[0] if n in broken else "length", decode_tokens=60, decode_seconds=1 / speed)
                what = dict(name=f"p{which}", prompt=f"{prompt} {which}", tokens=[which])
                requests.append(row("requests", id=f"{n}/{arm}/0", **keys, **ends, **what))
    Recorder(folder).write(0, forwards, steps, requests)  # all groups in one file: faster
    facts = {
        "config": {"proposer": {"depth": 3}, "output_dir": str(folder), "tracker": {"key": "***"}} | (config or {}),
        "seed": 0,
        "weights_sha256": {},
        "prompts_sha256": "",
        "commit": "0" * 40,
        "versions": {"torch": "2"},
        "machine": {"processor": "one", "cores": 2, "gpus": [], "system": "x"},
        "threads": 1,
        "arms": list(arms),
        "proposers": {arm: {"name": "toy"} for arm in arms},
        "groups": -(-count // batch_size),
    }
    (folder / "manifest.json").write_text(json.dumps(facts | manifest))
    return folder


def taus(count: int, seed: int = 0) -> np.ndarray:
    return 1 + np.random.default_rng(seed).gamma(4, 0.5, count)


def noise(count: int, seed: int) -> np.ndarray:
    return np.exp(0.05 * np.random.default_rng(seed).normal(size=count))


def words(comparison) -> dict[str, str]:
    """The verdict on each figure of the first pair."""
    return {change.figure: change.verdict for change in comparison.pairs[0].changes}


def figure(comparison, name: str, pair: int = 0):
    return next(change for change in comparison.pairs[pair].changes if change.figure == name)


def shown(comparison, width: int = 100, verbose: bool = False) -> str:
    text = io.StringIO()
    show(result(comparison), Console(file=text, width=width), verbose)
    return text.getvalue()


# Which changes are significant -------------------------------------------------------------------------------------


def test_a_difference_that_exists_is_significant(tmp_path):
    tau = taus(16)
    a = write(tmp_path / "a", tau, tau * noise(16, 1))
    b = write(tmp_path / "b", 1.5 * tau, 1.5 * tau * noise(16, 2))
    comparison = compare([a, b])
    assert (
        words(comparison)["speedup_geometric_mean"]
        == words(comparison)["tau_pooled"]
        == words(comparison)["expected_tau"]
        == "significant"
    )
    faster = figure(comparison, "speedup_geometric_mean")
    assert faster.simultaneous.low < 1.5 < faster.simultaneous.high
    assert faster.simultaneous.low < faster.interval.low
    assert "significant from" not in shown(comparison)
    for text in (shown(comparison, width=80, verbose=True), shown(comparison, WIDE)):
        line = next(line for line in reversed(text.splitlines()) if "speed-up, geometric mean" in line)
        interval = f"[×{faster.interval.low:.2f}, ×{faster.interval.high:.2f}]"
        assert interval in line and "16 groups," in line and "…" not in text
    assert figure(comparison, "tau_pooled").reference == metrics.tau_pooled(
        metrics.decode_steps(metrics.load(a).steps, "repeat")
    )


def test_without_a_difference_nothing_is_significant_and_the_smallest_visible_change_is_named(tmp_path):
    tau = taus(16)
    a = write(tmp_path / "a", tau * noise(16, 1), tau * noise(16, 2))
    b = write(tmp_path / "b", tau * noise(16, 3), tau * noise(16, 4))
    comparison = compare([a, b])
    assert words(comparison)["speedup_geometric_mean"] == words(comparison)["tau_pooled"] == "not significant"
    speedup_change = figure(comparison, "speedup_geometric_mean")
    assert speedup_change.smallest == pytest.approx(speedup_change.simultaneous.high / speedup_change.simultaneous.mean)
    assert f"×{speedup_change.smallest:.2f}" in shown(comparison, WIDE)


def test_identical_rows_are_identical(tmp_path):
    a = write(tmp_path / "a", taus(9), taus(9) * noise(9, 1))
    b = write(tmp_path / "b", taus(9), taus(9) * noise(9, 2))
    comparison = compare([a, b])
    assert {words(comparison)[name] for name in ("tau_pooled", "expected_tau", "nodes_per_step")} == {"identical"}
    assert words(comparison)["speedup_geometric_mean"] == "not significant"
    assert comparison.pairs[0].identical == 1.0


def test_on_few_groups_nothing_is_tested(tmp_path):
    comparison = compare([write(tmp_path / "a", taus(7)), write(tmp_path / "b", 2 * taus(7))])
    assert words(comparison)["speedup_geometric_mean"] == words(comparison)["tau_pooled"] == "too few"
    assert comparison.tested == 0 and "; too few prompts to test" in shown(comparison)
    assert "7 prompts, 8 needed" in shown(comparison)
    assert "No change could be tested: at least 8 prompts" in " ".join(shown(comparison).split())
    two = [write(tmp_path / name, 2 * taus(2) * noise(2, seed)) for seed, name in enumerate("cd")]
    assert words(compare(two, level=0.999999))["speedup_geometric_mean"] == "too few"


def test_where_the_number_of_changes_requires_more_prompts_than_there_are_none_is_said_to_be_tested(tmp_path):
    comparison = compare([write(tmp_path / "a", taus(8)), write(tmp_path / "b", 2 * taus(8))], level=0.999)
    text = " ".join(shown(comparison).split())
    assert comparison.tested and "; too few prompts to test" in text and "Significant:" not in text
    assert f"at least {fewest_units(comparison.tested, 0.999)} prompts (for speed: groups) are needed" in text


@pytest.mark.nightly
def test_more_tests_need_wider_intervals_and_more_groups(tmp_path):
    folders = [write(tmp_path / str(n), taus(8) * noise(8, n), taus(8) * noise(8, n + 20)) for n in range(4)]
    two, four = compare(folders[:2]), compare(folders)
    assert (two.tested, four.tested) == (5, 15)
    assert figure(two, "tau_pooled").simultaneous.high < figure(four, "tau_pooled").simultaneous.high
    assert figure(two, "tau_pooled").interval == figure(four, "tau_pooled").interval
    assert words(two)["tau_pooled"] == "not significant"
    assert figure(four, "tau_pooled").why == "8 prompts, 10 needed"  # 2 ** -9 < 0.05 / 15 < 2 ** -8


def test_the_speed_up_is_shown_as_in_the_run_and_its_geometric_mean_is_tested(tmp_path):
    gain = taus(12)
    a, b = write(tmp_path / "a", taus(12), gain), write(tmp_path / "b", taus(12), gain * noise(12, 1))
    comparison = compare([a, b])
    pooled, tested = figure(comparison, "speedup"), figure(comparison, "speedup_geometric_mean")
    assert pooled.reference == metrics.speedup(metrics.load(a).requests, "repeat").mean
    assert tested.reference == pytest.approx(np.exp(np.log(gain).mean())) != pytest.approx(pooled.reference)
    assert (pooled.verdict, tested.verdict) == ("not tested", "not significant")


# What is paired with what ------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_units_are_paired_by_their_prompts_wherever_they_stand(tmp_path):
    tau = taus(12)
    a = write(tmp_path / "a", tau * noise(12, 1))
    b = write(tmp_path / "b", tau * noise(12, 2))
    again = write(tmp_path / "c", tau * noise(12, 2), order=range(11, -1, -1))
    comparison = compare([a, b, again])
    straight, turned = ([change.interval for change in pair.changes] for pair in comparison.pairs)
    assert np.allclose(straight, turned, equal_nan=True)
    assert comparison.pairs[1].identical == 1.0


def test_pairing_is_worth_much_where_prompts_differ_more_than_runs(tmp_path):
    tau = taus(12)
    a, b = write(tmp_path / "a", tau), write(tmp_path / "b", tau * noise(12, 1))
    elsewhere = write(tmp_path / "c", tau * noise(12, 1), prompt="another")
    comparison = compare([a, b, elsewhere])
    paired, unpaired = (figure(comparison, "tau_pooled", pair) for pair in (0, 1))
    assert paired.paired and not unpaired.paired
    assert paired.smallest < 0.3 * unpaired.smallest
    assert "no prompts in common: compared as unpaired samples" in shown(comparison)
    assert np.isnan(comparison.pairs[1].identical)


def test_prompts_that_only_one_run_has_are_left_out(tmp_path):
    tau = taus(20)
    comparison = compare([write(tmp_path / "a", tau), write(tmp_path / "b", 1.3 * tau[:12])])
    assert comparison.pairs[0].prompts == comparison.pairs[0].groups == 12
    longer = figure(comparison, "speedup_geometric_mean")
    assert longer.units == (12, 12)
    assert longer.reference == pytest.approx(np.exp(np.log(tau[:12]).mean()))


def test_other_batch_sizes_leave_prompts_paired_and_groups_not(tmp_path):
    tau = taus(16)
    a, b = write(tmp_path / "a", tau), write(tmp_path / "b", tau, batch_size=2)
    comparison = compare([a, b])
    assert words(comparison)["tau_pooled"] == "identical"
    assert (
        figure(comparison, "speedup_geometric_mean").units == (16, 8)
        and not figure(comparison, "speedup_geometric_mean").paired
    )
    assert "their speeds are unpaired" in shown(comparison)


def test_broken_groups_are_left_out_of_both_and_named(tmp_path):
    tau = taus(12)
    comparison = compare([write(tmp_path / "a", tau), write(tmp_path / "b", tau, broken=[3])])
    assert figure(comparison, "tau_pooled").units == figure(comparison, "speedup_geometric_mean").units == (11, 11)
    assert "1 of 12 groups left out" in comparison.described["B"]


def test_without_a_baseline_acceptance_is_compared_and_speed_is_not(tmp_path):
    comparison = compare([write(tmp_path / "a", taus(12)), write(tmp_path / "b", 2 * taus(12), baseline=False)])
    assert words(comparison)["speedup"] == "not tested" and "speedup_geometric_mean" not in words(comparison)
    assert figure(comparison, "speedup").why == "B has no baseline"
    assert words(comparison)["tau_pooled"] == "significant"


def test_arms_that_only_one_run_has_are_not_compared_with_others_in_their_place(tmp_path):
    a = write(tmp_path / "a", taus(9), arms=["chain", "tree"])
    b = write(tmp_path / "b", taus(9), arms=["tree", "words"])
    assert [pair.arms for pair in compare([a, b]).pairs] == [("tree", "tree")]
    assert [pair.arms for pair in compare([a, write(tmp_path / "c", taus(9), arms=["words"])]).pairs] == [
        ("chain", "words")
    ]


def test_an_unfinished_run_counts_with_its_finished_groups_and_says_so(tmp_path):
    comparison = compare([write(tmp_path / "a", taus(12)), write(tmp_path / "b", taus(9), groups=12)])
    assert "UNFINISHED: 9 of 12 groups" in comparison.described["B"]
    assert comparison.pairs[0].groups == 9


def test_an_arm_that_is_not_lossless_stands_below_the_verdict_of_its_run(tmp_path):
    a, b = write(tmp_path / "a", taus(9)), write(tmp_path / "b", taus(9))
    certificate = {"failure": "token 0 has 0.8, not 0.6"}
    arm = {"lossless": True, "certified": None, "verifier": "mine", "certificate": certificate}
    (b / "summary.json").write_text(json.dumps({"arms": {"repeat": arm}}))
    _, verdict, lossy = result(compare([a, b])).verdict
    assert verdict.startswith("B: ")
    assert lossy == "B: NOT lossless: repeat; verifier 'mine' is declared lossless, but: token 0 has 0.8, not 0.6"


# Sweeps ------------------------------------------------------------------------------------------------------------


def make_sweep(folder: Path, runs: dict[str, float], failed: Sequence[str] = (), **facts) -> Path:
    sweep.plan(folder, [[name] for name in runs])
    for name, gain in runs.items():
        run_folder = sweep.folders(folder, [[name]])[0]
        if name in failed:
            run_folder.mkdir()
            run_state.fail(run_folder, [name], ValueError("no"), "no", 0.0)
        else:
            write(run_folder, gain * taus(12), config={"proposer": {"depth": int(name[-1])}}, **facts)
            run_state.end(run_folder, [name], "", 0, 1.0)
    return folder


def test_a_sweep_stands_for_its_finished_runs_the_first_as_reference(tmp_path):
    comparison = compare([make_sweep(tmp_path, {"depth=1": 1, "depth=2": 1.4, "depth=3": 1}, failed=["depth=3"])])
    assert [(pair.reference, pair.other) for pair in comparison.pairs] == [("A", "B")]
    assert [run.name for run in comparison.runs] == ["depth=1", "depth=2"]
    assert words(comparison)["tau_pooled"] == "significant"
    assert "failed" in comparison.notes[0] and "depth=3" in comparison.notes[0]


# What is shown ----------------------------------------------------------------------------------------------------


def test_what_differs_between_the_runs_is_named_and_where_results_go_is_not(tmp_path):
    a = write(tmp_path / "a", taus(8), config={"arms": {}, "tracker": {"project": "x"}})
    b = write(tmp_path / "b", taus(8), config={"proposer": {"depth": 5}, "arms": {"n": {"_target_": "N"}}}, commit="1")
    comparison = compare([a, b])
    assert [(difference.key, difference.values) for difference in comparison.configuration] == [
        ("proposer.depth", (("3", ("A",)), ("5", ("B",)))),
        ("arms.n", (("not set", ("A",)), ("N", ("B",)))),
    ]
    assert [difference.key for difference in comparison.provenance] == ["commit"]
    assert "proposer.depth" in shown(comparison)


def test_what_cannot_be_compared_is_refused_by_name(tmp_path):
    a = write(tmp_path / "a", taus(8))
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "manifest.json").write_text((a / "manifest.json").read_text())
    only = write(tmp_path / "only", taus(8), arms=[])
    for folders, message in (
        ([], "two or more"),
        ([a, tmp_path / "no"], "there is no folder .*no"),
        ([a, tmp_path / "empty"], "empty holds neither a run"),
        ([a, begun], "no group of the run in .*begun is finished"),
        ([a, tmp_path / "a" / ".." / "a"], "given twice"),
        ([a], "one run with one arm"),
        ([a, only], "only holds the baseline only"),
        ([a, write(tmp_path / "bad", taus(1), broken=[0])], "in every group of .*bad a request broke"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(folders)
    with pytest.raises(ValueError, match="level"):
        compare([a, only], level=95)
