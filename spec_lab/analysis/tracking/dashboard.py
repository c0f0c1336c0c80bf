"""The dashboard as code: the sections of a workspace on Weights & Biases that shows many runs.

It requires the extra ``dashboard`` (wandb-workspaces). Only ``save`` requires a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_lab.analysis.names import MAIN
from spec_lab.analysis.tracking import client, series

ARMS = (MAIN, "baseline")
"""Keys of the arms shown unless others are named."""

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


def dashboard(project: str, entity: str, arms: Sequence[str] = ARMS) -> Any:
    """Return the definition: sections in the order of a run's report; runs grouped by ``facts.group``.

    Args:
        project: the project whose runs it shows.
        entity: the owner of the project.
        arms: keys of the arms shown, the main one first.

    Returns:
        A ``wandb_workspaces.workspaces.Workspace``.

    Raises:
        OSError: the extra is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise OSError("the dashboard requires an extra: pip install 'spec-lab[dashboard]'") from error

    def line(title: str, axis: str, *figures: str, of: Sequence[str] = arms, **options: Any) -> Any:
        known = series.keys(list(of))
        named = [series.name(arm, figure) for arm in of for figure in figures]
        shown = [key for key in named if key in known]
        return panels.LinePlot(title=title, x=axis, y=shown, title_x=AXES[axis], **options)

    def training(title: str, *figures: str) -> Any:
        axis = series.TRAIN_STEP
        return panels.LinePlot(title=title, x=axis, y=[f"train/{figure}" for figure in figures], title_x=AXES[axis])

    def bar(title: str, *figures: str) -> Any:
        return panels.BarPlot(title=title, metrics=[panels.SummaryMetric(figure) for figure in figures])

    def media(title: str, *keys: str) -> Any:
        return panels.MediaBrowser(title=title, media_keys=list(keys))

    def table(name: str) -> Any:
        return panels.WeavePanelSummaryTable(table_name=f"tables/{name}")

    acceptance, throughput, phases = (media("figures", f"figures/{figure}") for figure in FIGURES)
    sections = {
        "Speed": [
            bar("speed-up (ratio of sums)", "speedup", "speedup/low", "speedup/high"),
            bar("tokens/s", "tokens_per_second", "baseline/tokens_per_second"),
            bar("seconds to the first token; per output token", "ttft", "tpot"),
            line("speed-up by group", series.GROUP, "speedup"),
            line("tokens/s by group", series.GROUP, "tokens_per_second"),
            throughput,
        ],
        "Acceptance": [
            bar("tau and expected tau", "tau", "expected_tau"),
            bar("acceptance rate", "acceptance_rate"),
            line("tau so far", series.STEP, "tau"),
            line("acceptance rate so far", series.STEP, "acceptance_rate", of=arms[:1]),
            line(
                "accepted and expected tokens of a step",
                series.STEP,
                "accepted_tokens",
                "expected_accepted_tokens",
                of=arms[:1],
            ),
            line("emitted tokens of a step", series.STEP, "emitted_tokens", of=arms[:1]),
            acceptance,
            table("depths"),
        ],
        "Time": [
            bar("overhead: share of decode time outside module calls", "overhead", "baseline/overhead"),
            *(
                line(
                    f"seconds per step by phase: {'proposer' if arm == MAIN else arm}",
                    series.BATCH_STEP,
                    *series.SERIES[series.BATCH_STEP],
                    of=[arm],
                    plot_type="stacked-area",
                )
                for arm in arms
            ),
            phases,
        ],
        "Outputs": [table("requests"), table("steps"), bar("repeated 8-grams", "repeated_8gram_share")],
        "Report": [media("report", client.REPORT)],
        "Training": [
            training("loss", "loss"),
            training("acceptance rate of the first draft token", "acceptance_rate/1"),
            training("tau of a chain", "tau"),
            bar("tau on held-out prompts", "eval/tau", "eval/expected_tau"),
        ],
    }
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="spec_lab",
        sections=[
            workspaces.Section(
                name=name,
                panels=shown,
                is_open=True,
                layout_settings=workspaces.SectionLayoutSettings(columns=1 if name in WIDE else 3, rows=2),
            )
            for name, shown in sections.items()
        ],
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group")], pinned_columns=[nested(column) for column in COLUMNS]
        ),
    )


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
