"""The dashboard, as the definition that would be saved."""

import json
import sys

import pytest

from spec_lab.analysis.tracking import client
from spec_lab.analysis.tracking.headline import figures, training
from tests.analysis.tracking.views import history, summary


@pytest.mark.nightly
def test_the_dashboard_names_only_what_a_view_logs(tracked, seen):
    pytest.importorskip("wandb_workspaces")
    from spec_lab.analysis.tracking.dashboard import dashboard

    made = dashboard("project", "entity")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    sections = {section["name"]: section["panels"] for section in spec["panelBankConfig"]["sections"]}
    assert list(sections) == ["Speed", "Acceptance", "Time", "Outputs", "Report", "Training"]
    (runs,) = spec["runSets"]
    assert runs["grouping"] == [{"section": "run", "name": "group"}]
    columns = {column for column in runs["runFeed"]["columnOrder"] if column.startswith("summary:")}
    assert {"summary:tau", "summary:speedup/low"} <= columns <= {f"summary:{name}" for name in summary(seen)}
    assert "config:proposer.value.name" in runs["runFeed"]["columnPinned"]
    curve = training({"loss": [2.0], "accepted": [0.5], "agreed": [0.5], "length_at_1": 0.5, "length_greedy": 0.5,
                      "texts": 1, "seconds": 1.0})  # fmt: skip
    held_out = figures({"learning": [], "measured_length": 0.5, "estimated_length": 0.5})
    in_summary = {f"summary_metrics.{name}" for name in (*summary(seen), *held_out)}
    logged = {*curve, "trainer/global_step"}
    for name in (name for point in history(seen) for name in point):
        logged |= {name, name.split(".")[0]}  # of media, the file's size and others follow a dot
    named = set()
    for panel in (panel for panels in sections.values() for panel in panels):
        config = panel["config"]
        if panel["viewType"] == "Weave":
            named.add(config["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"])
        else:
            named |= {*config.get("metrics", ()), *config.get("mediaKeys", ()), config.get("xAxis", "prompt_group")}
    assert {"tau", "baseline/tau", "prompt_group", "summary_metrics.tau", "figures/phases", "tables/steps"} <= named
    assert {"report/page", "train/loss", "summary_metrics.eval/tau"} <= named
    assert named <= logged | in_summary


def test_the_dashboard_is_refused_by_name(monkeypatch):
    from spec_lab.analysis.tracking import dashboard

    monkeypatch.setattr(client, "resolved_mode", lambda *_: "offline")
    if pytest.importorskip("wandb_workspaces"):
        with pytest.raises(OSError, match="wandb login"):
            dashboard.save("project", "entity")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(OSError, match=r"pip install 'spec-lab\[dashboard\]'"):
        dashboard.dashboard("project", "entity")
