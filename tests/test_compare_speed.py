"""Comparing the speed of two checkouts: order of the runs, ratios, intervals, and the bound."""

import json
import math

import pytest

from scripts import compare_speed
from scripts.compare_speed import compare, ratio, report


def test_the_mean_is_geometric_and_the_interval_is_student_s_of_the_logarithms():
    """Halved and doubled speed cancel: an arithmetic mean would be 1.25."""
    mean_ratio = ratio([0.5, 2.0])
    assert mean_ratio.mean == pytest.approx(1.0)
    half = 12.706 * math.log(2)  # t(0.975, 1) * s / sqrt(2), where s = sqrt(2) * log 2
    assert (math.log(mean_ratio.low), math.log(mean_ratio.high)) == pytest.approx((-half, half), rel=1e-4)


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


def test_runs_alternate_and_a_drift_of_the_machine_cancels():
    """Each run is slower than the previous one by the same factor; the second checkout is 1.5 times as fast."""
    order, speed = [], iter(0.97**n for n in range(8))

    def tree(name, factor):
        def measure():
            order.append(name)
            return {"arm": factor * next(speed)}

        return measure

    comparison = compare([tree("earlier", 10.0), tree("this", 15.0)], pairs=4)
    assert order == ["earlier", "this", "this", "earlier"] * 2
    assert comparison["arm"] == pytest.approx([1.5 * 0.97, 1.5 / 0.97] * 2)
    assert ratio(comparison["arm"]).mean == pytest.approx(1.5)


def test_a_tree_whose_package_is_not_the_one_imported_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path}"):
        compare_speed.measure(tmp_path)


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
