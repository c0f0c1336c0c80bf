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

AXES = {"group": "group of prompts", "step": "step", "round": "step of the batch"}
"""Labels of the axes (``series.SERIES``)."""

PICTURES = ("acceptance", "throughput", "phases")
"""The figures that a run draws."""


def dashboard(project: str, entity: str, arms: Sequence[str] = ARMS) -> Any:
    """Return the definition: sections for speed, acceptance, time and texts; runs grouped by ``series.group``.

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

    def line(title: str, axis: str, *names: str, of: Sequence[str] = arms, **options: Any) -> Any:
        known = series.keys(list(of))
        shown = [f"{arm}/{name}" for arm in of for name in names if f"{arm}/{name}" in known]
        return panels.LinePlot(title=title, x=axis, y=shown, title_x=AXES[axis], **options)

    def bar(title: str, *names: str) -> Any:
        return panels.BarPlot(title=title, metrics=[panels.SummaryMetric(name) for name in names])

    def pictures(*names: str) -> Any:
        return panels.MediaBrowser(title="figures", media_keys=[f"figures/{name}" for name in names])

    def table(name: str) -> Any:
        return panels.WeavePanelSummaryTable(table_name=f"tables/{name}")

    acceptance, throughput, phases = PICTURES
    sections = {
        "speed": [
            bar("speed-up (ratio of sums)", "speedup.mean"),
            bar("tokens/s", "tokens_per_second", "baseline_tokens_per_second"),
            line("tokens/s over the baseline's, by group", "group", "speedup"),
            line("tokens/s by group", "group", "tokens_per_second"),
            pictures(throughput),
        ],
        "acceptance": [
            bar("tau and expected tau", "tau_pooled", "expected_tau"),
            line("tau so far", "step", "tau"),
            line("accepted and expected tokens, by step", "step", "accepted", "expected", of=arms[:1]),
            line("emitted tokens, by step", "step", "emitted", of=arms[:1]),
            pictures(acceptance),
            table("depths"),
        ],
        "time": [
            bar("overhead: share of decode time outside module calls", "overhead", "baseline_overhead"),
            *(
                line(
                    f"seconds per step by phase: {'proposer' if arm == MAIN else arm}",
                    "round",
                    *series.SERIES["round"],
                    of=[arm],
                    plot_type="stacked-area",
                )
                for arm in arms
            ),
            pictures(phases),
        ],
        "texts": [bar("repeated 8-grams", "repeated_8gram_share"), table("requests")],
    }
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="spec_lab",
        sections=[workspaces.Section(name=name, panels=shown, is_open=True) for name, shown in sections.items()],
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")]),
    )


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
