"""Comparing the speed of two checkouts: order of the runs, ratios, intervals, and the bound."""

import json
import math

import pytest
from scipy import stats

from scripts import compare_speed
from scripts.compare_speed import Ratio, compare, measured, ratio, report


def test_the_mean_is_geometric_and_the_interval_is_student_s_of_the_logarithms():
    """Halved and doubled speed cancel: an arithmetic mean would be 1.25."""
    found = ratio([0.5, 2.0])
    assert found.mean == pytest.approx(1.0)
    half = 12.706 * math.log(2)  # t(0.975, 1) * s / sqrt(2), where s = sqrt(2) * log 2
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((-half, half), rel=1e-4)


def test_the_interval_agrees_with_scipy_s():
    ratios = [0.91, 0.88, 0.93, 0.9, 0.87, 0.92]
    logs = [math.log(one) for one in ratios]
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=stats.tmean(logs), scale=stats.sem(logs))
    assert ratio(ratios)[1:] == pytest.approx((math.exp(low), math.exp(high)))


def test_equal_ratios_have_an_interval_of_no_width():
    assert ratio([0.8, 0.8, 0.8]) == pytest.approx((0.8, 0.8, 0.8))


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ([0.85, 0.86, 0.84, 0.85], 1),  # slower, significantly
        ([0.6, 1.3, 0.7, 0.9], 0),  # slower on average, not significantly
        ([0.95, 0.951, 0.949], 0),  # significant, and within the bound
        ([1.2, 1.21, 1.19], 0),
    ],
)
def test_only_a_mean_below_the_bound_whose_interval_excludes_1_fails(ratios, code, capsys):
    assert report({"fine": [1.0, 1.01, 0.99, 1.0], "one": ratios}, bound=0.9) == code
    assert report({"one": ratios}, bound=0.5) == 0
    assert f"{ratio(ratios).mean:.3f}" in capsys.readouterr().out


def test_an_interval_that_ends_at_1_includes_it():
    assert not Ratio(0.8, 0.64, 1.0).too_slow(0.9)
    assert Ratio(0.8, 0.65, 0.99).too_slow(0.9)


def test_runs_alternate_and_a_drift_of_the_machine_cancels():
    """Each run is slower than the previous one by the same factor; the second checkout is 1.5 times as fast."""
    order, speed = [], iter(0.97**n for n in range(8))

    def tree(name, factor):
        def measure():
            order.append(name)
            return {"arm": factor * next(speed)}

        return measure

    found = compare([tree("earlier", 10.0), tree("this", 15.0)], pairs=4)
    assert order == ["earlier", "this", "this", "earlier"] * 2
    assert found["arm"] == pytest.approx([1.5 * 0.97, 1.5 / 0.97] * 2)
    assert ratio(found["arm"]).mean == pytest.approx(1.5)


@pytest.mark.parametrize("has_its_own", [True, False])
def test_a_tree_is_measured_by_its_own_script_where_it_has_one(tmp_path, monkeypatch, has_its_own):
    here = tmp_path / "here.py"
    here.write_text("import json, os, sys; print(json.dumps(['here', sys.argv[1:], os.environ['PYTHONPATH']]))")
    monkeypatch.setattr(compare_speed, "__file__", str(here))
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    if has_its_own:
        (tree / "scripts" / here.name).write_text(here.read_text().replace("here", "own"))
    assert measured(tree) == ["own" if has_its_own else "here", ["--measure", str(tree)], str(tree)]


def test_a_tree_whose_run_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "compare_speed.py").write_text("raise SystemExit('no such option')")
    with pytest.raises(SystemExit, match=rf"{tmp_path}:\nno such option"):
        measured(tmp_path)


def test_a_tree_whose_package_is_not_the_one_imported_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path}"):
        compare_speed.measure(tmp_path)


def test_another_workload_is_not_compared(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(compare_speed, "git", lambda *arguments: asked.append(arguments) or "0" * 40)
    workloads = iter(["4 prompts", "8 prompts"])
    monkeypatch.setattr(compare_speed, "measured", lambda tree: {"workload": next(workloads)})
    assert compare_speed.main([]) == 0
    assert "workload differs" in capsys.readouterr().out
    assert [one[:2] for one in asked[1:]] == [("worktree", "add"), ("worktree", "remove")]


def test_an_unknown_revision_and_too_few_pairs_are_refused(capsys):
    with pytest.raises(SystemExit, match="no-such-revision"):
        compare_speed.main(["no-such-revision"])
    with pytest.raises(SystemExit):
        compare_speed.main(["--pairs", "1"])
    assert "--pairs must be at least 2 (got 1)" in capsys.readouterr().err


def test_its_options_are_options_of_this_tree(cli):
    """A renamed option is renamed here too; the run itself is nightly."""
    code, output, errors = cli(*compare_speed.OPTIONS, "output_dir=measured", "--cfg", "job")
    assert code == 0, errors
    assert "limit: 4" in output and "baseline: true" in output


@pytest.mark.nightly
def test_a_tree_is_measured(capsys):
    assert compare_speed.main(["--measure", str(compare_speed.ROOT)]) == 0
    rates = json.loads(capsys.readouterr().out)["tokens_per_second"]
    assert rates.keys() == {"autoregressive", "medusa_tree"} and all(rate > 0 for rate in rates.values())
