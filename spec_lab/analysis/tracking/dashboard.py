"""The dashboard as code: the sections of a workspace on Weights & Biases that shows many runs.

It requires the extra ``dashboard`` (wandb-workspaces). Only ``save`` requires a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.analysis.tracking import client, series

ARMS = ("", "baseline")
"""Arms shown unless others are named: of each run the main one, whose series have no prefix, and the baseline."""

AXES = {
    series.GROUP: "group of prompts",
    series.STEP: "decode step",
    series.BATCH_STEP: "step of the batch",
    series.TRAIN_STEP: "training step",
}
"""Labels of the axes."""

FIGURES = ("acceptance", "throughput", "phases")
"""Figures of a run that are shown beside the series of their section."""

WIDE = ("Outputs", "Report")
"""Sections whose panels are as wide as the page."""

COLUMNS = (
    "config:proposer.name", "config:verifier.name", "config:sampling.temperature", "summary:speedup",
    "summary:speedup/low", "summary:speedup/high", "summary:tokens_per_second", "summary:tau",
    "summary:acceptance_rate", "summary:ttft", "summary:tpot",
)  # fmt: skip
"""Pinned columns of the runs table."""


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Args:
        kind: "bar" of figures of runs, "line" of their series, "media" or "table".
        keys: what it shows: figures, series of an arm, names of media, or the table.
        axis: of a line.
        arms: keys of the arms of a line; empty: every arm's figures have the same names.
        stacked: whether the series of a line are stacked.
    """

    kind: str
    title: str
    keys: Sequence[str]
    axis: str = ""
    arms: Sequence[str] = ()
    stacked: bool = False


def sections(arms: Sequence[str]) -> dict[str, list[Panel]]:
    """Return the panels of each section, in the order of a run's report.

    Args:
        arms: keys of the arms shown, the main one first; its key is not read.
    """
    arms = ARMS[:1] + tuple(arms[1:])
    main, group, step, train = arms[:1], series.GROUP, series.STEP, series.TRAIN_STEP
    figures = {name: Panel("media", "figures", [f"figures/{name}"]) for name in FIGURES}
    tables = {name: Panel("table", name, [f"tables/{name}"]) for name in ("depths", "requests", "steps")}
    phases = series.SERIES[series.BATCH_STEP]
    return {
        "Speed": [
            Panel("bar", "speed-up (ratio of sums)", ["speedup", "speedup/low", "speedup/high"]),
            Panel("bar", "tokens/s", ["tokens_per_second", "baseline/tokens_per_second"]),
            Panel("bar", "seconds to the first token; per output token", ["ttft", "tpot"]),
            Panel("line", "speed-up by group", ["speedup"], group, arms),
            Panel("line", "tokens/s by group", ["tokens_per_second"], group, arms),
            figures["throughput"],
        ],
        "Acceptance": [
            Panel("bar", "tau and expected tau", ["tau", "expected_tau"]),
            Panel("bar", "acceptance rate", ["acceptance_rate"]),
            Panel("line", "tau so far", ["tau"], step, arms),
            Panel("line", "acceptance rate so far", ["acceptance_rate"], step, main),
            Panel("line", "accepted and expected tokens of a step", ["accepted_tokens", "expected_accepted_tokens"],
                  step, main),
            Panel("line", "emitted tokens of a step", ["emitted_tokens"], step, main),
            figures["acceptance"],
            tables["depths"],
        ],
        "Time": [
            Panel("bar", "overhead: share of decode time outside module calls", ["overhead", "baseline/overhead"]),
            *(Panel("line", f"seconds per step by phase: {arm or 'proposer'}", phases,
                    series.BATCH_STEP, [arm], stacked=True) for arm in arms),
            figures["phases"],
        ],
        "Outputs": [tables["requests"], tables["steps"], Panel("bar", "repeated 8-grams", ["repeated_8gram_share"])],
        "Report": [Panel("media", "report", [client.REPORT])],
        "Training": [
            Panel("line", "loss", ["train/loss"], train),
            Panel("line", "acceptance rate of the first draft token", ["train/acceptance_rate/1"], train),
            Panel("line", "tau of a chain", ["train/tau"], train),
            Panel("bar", "tau on held-out prompts", ["eval/tau", "eval/expected_tau"]),
        ],
    }  # fmt: skip


def dashboard(project: str, entity: str, arms: Sequence[str] = ARMS) -> Any:
    """Return the definition: ``sections``; runs grouped by ``facts.group``.

    Args:
        entity: the owner of the project.
        arms: keys of the arms shown, the main one first; its key is not read.

    Returns:
        A ``wandb_workspaces.workspaces.Workspace``.

    Raises:
        OSError: the extra is not installed.
    """
    try:
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise OSError("the dashboard requires an extra: pip install 'spec-lab[dashboard]'") from error
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="spec_lab",
        sections=[
            workspaces.Section(
                name=name,
                panels=[_made(panel) for panel in shown],
                is_open=True,
                layout_settings=workspaces.SectionLayoutSettings(columns=1 if name in WIDE else 3, rows=2),
            )
            for name, shown in sections(arms).items()
        ],
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group")], pinned_columns=[nested(column) for column in COLUMNS]
        ),
    )


def _made(panel: Panel) -> Any:
    """Return a panel as wandb-workspaces defines it."""
    import wandb_workspaces.reports.v2 as panels

    if panel.kind == "bar":
        return panels.BarPlot(title=panel.title, metrics=[panels.SummaryMetric(key) for key in panel.keys])
    if panel.kind == "media":
        return panels.MediaBrowser(title=panel.title, media_keys=list(panel.keys))
    if panel.kind == "table":
        return panels.WeavePanelSummaryTable(table_name=panel.keys[0])
    keys, known = list(panel.keys), series.keys(ARMS[:1] + tuple(panel.arms))
    if panel.arms:
        keys = [name for arm in panel.arms for key in panel.keys if (name := series.name(arm, key, ARMS[0])) in known]
    look = {"plot_type": "stacked-area"} if panel.stacked else {}
    return panels.LinePlot(title=panel.title, x=panel.axis, y=keys, title_x=AXES[panel.axis], **look)


def nested(column: str) -> str:
    """Return the name of a column of the config as Weights & Biases stores it, with ``value`` after the first part."""
    section, _, name = column.partition(":")
    first, _, rest = name.partition(".")
    return f"{section}:{first}.value.{rest}" if section == "config" and rest else column


def save(project: str, entity: str, arms: Sequence[str] = ARMS) -> str:
    """Save the dashboard as a view of the project; returns its address.

    Raises:
        OSError: the extra is not installed; there is no login; Weights & Biases cannot be reached, or rejects it.
    """
    definition = dashboard(project, entity, arms)
    if client.resolved_mode("auto", "mode") != "online":
        raise OSError(
            "saving a dashboard requires Weights & Biases online: log in with wandb login, or set WANDB_API_KEY"
        )
    try:
        return str(definition.save().url)
    except Exception as error:  # its client raises many types, none of its own
        raise OSError(f"the dashboard could not be saved ({type(error).__name__}: {error})") from error
