"""A drafter that learns from what it has served, round by round, beside one that does not."""

import json
from hashlib import sha256

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.cli.commands import SHORT
from spec_lab.drafters.medusa.train import MedusaRecipe
from spec_lab.results.run_figures import figure_rows
from spec_lab.tasks.train_online import train_online
from tests import checkpoints
from tests.labs import lab, settings

TRAINED = ["task.recipe.heads=2", "task.warmup_steps=1", "task.rows=2", "task.before=2", "task.requests=2"]


def options(tmp_path, *more):
    """Two prompts are learned from before the stream; two are served, and two of another workload after them."""
    run = [option for option in checkpoints.short_runs(tmp_path) if "proposer=" not in option]
    file = tmp_path / "others.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "workload": "other"}) + "\n" for text in ("z y x ", "to be ")))
    drift = ["+prompts@task.drift=jsonl", f"task.drift.path={file}"]
    line = SHORT["train"](["train", "medusa", "--online", *TRAINED])
    return [*line, *run, *drift, "proposer=none", "max_new_tokens=6", "batch_size=2", *more]


def test_each_round_is_served_by_the_version_that_has_learned_from_those_before(quick_cli, tmp_path):
    code, out, errors = quick_cli(*options(tmp_path))
    assert code == 0, errors
    folder = tmp_path / "swept"
    summary, steps = json.loads((folder / "summary.json").read_text()), pd.read_parquet(folder / "steps.parquet")
    files = [folder / "versions" / number / "model.safetensors" for number in ("0", "1")]
    hashes = [sha256(file.read_bytes()).hexdigest() for file in files]
    assert [version["sha256"] for version in summary["versions"]] == hashes and hashes[0] != hashes[1]
    assert [version["texts"] for version in summary["versions"]] == [2, 2]
    assert [*steps["arm"].unique()] == ["frozen", "online"]
    online, frozen = (steps[steps["arm"] == arm].reset_index(drop=True) for arm in ("online", "frozen"))
    assert (frozen["head_version"] == 0).all() and (online["head_version"] == online["stream_round"]).all()
    assert (steps["head_sha256"] == steps["head_version"].map(dict(enumerate(hashes)))).all()
    assert (steps["drifted"] == (steps["stream_round"] == 1)).all() and summary["change"] == 2
    assert set(steps.loc[steps["drifted"], "workload"]) == {"other"}
    first = [arm[arm["stream_round"] == 0][["request", "path", "emitted"]].map(str) for arm in (online, frozen)]
    pd.testing.assert_frame_equal(*first)
    last = metrics.decode_steps(steps[steps["stream_round"] == 1], "online")
    shown = summary["arms"]["online"]["rounds"][-1]
    assert (shown["first"], shown["steps"]) == (2, len(last))
    assert shown["tau_pooled"]["mean"] == pytest.approx(metrics.tau_pooled(last))
    whole = metrics.tau_pooled(metrics.decode_steps(steps, "online"))
    assert summary["arms"]["online"]["tau_pooled"]["mean"] == pytest.approx(whole)
    assert {row["arm"]: row["tau_pooled"] for row in figure_rows(folder)}["online"] == pytest.approx(whole)
    assert "The workload changes with request 2, in round 2" in " ".join(out.split())


@pytest.mark.nightly
def test_a_run_that_is_started_again_comes_to_the_same_versions(quick_cli, tmp_path):
    assert quick_cli(*options(tmp_path))[0] == 0
    summary = tmp_path / "swept" / "summary.json"
    before = [version["sha256"] for version in json.loads(summary.read_text())["versions"]]
    summary.unlink()
    assert quick_cli(*options(tmp_path))[0] == 0
    assert [version["sha256"] for version in json.loads(summary.read_text())["versions"]] == before


@pytest.mark.parametrize(
    ("options", "temperature", "message"),
    [
        ({"requests": 3}, 1.0, "requests must be a multiple of rows=2"),
        ({"before": 6}, 1.0, "before=6 leaves no prompt of 5 to serve"),
        ({"before": 2, "requests": 2, "passes": 0.1}, 1.0, "passes=0.1 of 2 answers makes no training step of rows=2"),
        (
            {"before": 0, "recipe": MedusaRecipe(heads=2, draft_vocab_size=5)},
            1.0,
            "before=0 leaves no texts .* set task.before=16 or task.recipe.draft_vocab_size=null",
        ),
        ({}, 0.5, "task=train_online does not support sampling.temperature=0.5"),
    ],
)
def test_what_cannot_be_served_and_learned_is_refused(tmp_path, options, temperature, message):
    given = {"recipe": MedusaRecipe(heads=2), "rows": 2, **options}
    with pytest.raises(ValueError, match=message):
        train_online(lab(temperature=temperature), settings(tmp_path / "out"), {}, **given)
    assert not (tmp_path / "out").exists()


def test_experts_are_not_counted_where_no_forwards_are_written(tmp_path):
    with pytest.raises(ValueError, match="does not support count_experts=true"):
        train_online(lab(), settings(tmp_path / "out", count_experts=True), {}, recipe=MedusaRecipe(heads=2))
