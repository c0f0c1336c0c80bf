"""The dashboard as code: what a workspace on Weights & Biases shows of many runs, in sections.

It needs the extra ``dashboard`` (wandb-workspaces). The definition is built without a network; only ``save`` needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_lab.analysis.tracking import board, view

ARMS = ("speculative", "baseline")
"""The arms that most runs have."""

PICTURES = ("acceptance", "throughput", "phases")
"""The figures that a run draws."""


def dashboard(project: str, entity: str, arms: Sequence[str] = ARMS) -> Any:
    """The definition: sections for speed, acceptance, time and texts; runs grouped as ``view.group`` says.

    Args:
        project: whose runs it shows.
        entity: whose project.
        arms: those shown, the one that is decomposed by phase first.

    Returns:
        A ``wandb_workspaces.workspaces.Workspace``.

    Raises:
        OSError: the extra is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise OSError("the dashboard needs an extra: pip install 'spec-lab[dashboard]'") from error

    def line(title: str, axis: str, *names: str, of: Sequence[str] = arms, **more: Any) -> Any:
        known = view.keys(list(of))
        shown = [f"{arm}/{name}" for arm in of for name in names if f"{arm}/{name}" in known]
        return panels.LinePlot(title=title, x=axis, y=shown, title_x=axis, **more)

    def bar(title: str, *names: str) -> Any:
        return panels.BarPlot(title=title, metrics=[panels.SummaryMetric(name) for name in names])

    def pictures(*names: str) -> Any:
        return panels.MediaBrowser(title="figures", media_keys=[f"figures/{name}" for name in names])

    def table(name: str) -> Any:
        return panels.WeavePanelSummaryTable(table_name=f"tables/{name}")

    acceptance, throughput, phases = PICTURES
    sections = {
        "speed": [
            bar("speed-up over the baseline (mean over groups)", "speedup.mean"),
            bar("tokens/s", "tokens_per_second", "baseline_tokens_per_second"),
            line("speed-up by group", "group", "speedup"),
            line("tokens/s by group", "group", "tokens_per_second"),
            pictures(throughput),
        ],
        "acceptance": [
            bar("tau (pooled), and as expected", "tau_pooled", "expected_tau"),
            line("tau so far", "step", "tau"),
            line("accepted and expected, by step", "step", "accepted", "expected", of=arms[:1]),
            line("emitted, by step", "step", "emitted", of=arms[:1]),
            pictures(acceptance),
            table("depths"),
        ],
        "time": [
            bar("overhead: share of decode time outside the models", "overhead", "baseline_overhead"),
            *(
                line(
                    f"seconds of a round by phase: {arm}",
                    "round",
                    *view.SERIES["round"],
                    of=[arm],
                    plot_type="stacked-area",
                )
                for arm in arms
            ),
            pictures(phases),
        ],
        "texts": [bar("loops: share of repeated 8-grams", "repeated_8gram_share"), table("requests")],
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
        OSError: the extra is not installed; there is no login; Weights & Biases cannot be reached, or refuses.
    """
    definition = dashboard(project, entity, arms)
    if board.resolved("auto", "mode") != "online":
        raise OSError("saving a dashboard needs Weights & Biases online: log in with wandb login, or set WANDB_API_KEY")
    try:
        return str(definition.save().url)
    except Exception as error:  # its client raises many kinds, none of its own
        raise OSError(f"the dashboard could not be saved ({type(error).__name__}: {error})") from error
