"""``spec-lab track``: show a run on Weights & Biases from its files, finished or not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import client, facts
from spec_lab.analysis.tracking.client import Mode
from spec_lab.core.files import Unreadable, expect
from spec_lab.core.roofline import Roofline
from spec_lab.results import run_state, sweep
from spec_lab.results.manifest import begun, finite, without_groups
from spec_lab.results.old_names import read_summary

LOG = logging.getLogger(__name__)

SUMMARIES = ("summary.json", "certificate.json")
"""The summary files of tasks."""


def track(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> str:
    """Show the run in ``folder`` on Weights & Biases, as a tracked run would: done, interrupted or killed.

    A run that did not reach its end is shown as failed, with the figures of its finished groups. A run that is tracked
    again replaces its former upload. Writes ``report.html`` and ``figures/``.

    Args:
        project: where the run appears.
        entity: the owner of the project; None for the default of the login.
        mode: "auto", "online" or "offline", as in ``Wandb``.

    Returns:
        The upload's address; offline, the command that uploads it.

    Raises:
        ValueError: there is no run, it has neither finished groups nor a summary; its files are not readable.
        run_state.Locked: the run is still running.
        OSError: Weights & Biases cannot be reached, or fails.
    """
    folder = Path(folder)
    if sweep.is_sweep(folder):
        raise ValueError(f"{folder} holds a sweep: name the folder of one of its runs")
    manifest = begun(folder)
    if manifest is None:
        what = "holds no run (no manifest.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: name the output directory of a run")
    if client.resolved_mode(mode, "mode") == "disabled":
        raise ValueError("Weights & Biases is disabled (mode, or WANDB_MODE): choose mode offline or online")
    with run_state.holding(folder):
        LOG.info("Reading %s", folder)
        tables = metrics.load(folder)
        written = next((summary for name in SUMMARIES if (summary := read_summary(folder / name)) is not None), None)
        curve = _learning(folder, written)
        if tables.requests.empty and written is None:
            raise ValueError(without_groups(folder, manifest))
        LOG.info("Logging %s and drawing its report", folder)
        run = client.begin(folder, manifest, project, entity, mode)
        try:
            client.show_training(run, curve)
            if tables.requests.empty:
                client.show(run, written or {}, client.pictures(folder))
            else:
                client.replay(run, folder, tables, manifest, written or finished_groups(tables, manifest))
        except BaseException:
            run.finish(exit_code=1)
            raise
    LOG.info("Finishing the upload of %s", folder)
    return client.end(run, complete=written is not None)


def finished_groups(tables: Tables, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the finished groups, for a run without ``summary.json``."""
    roofline = Roofline.of(manifest.get("roofline"))
    arms = {arm: metrics.summarise(tables, arm, roofline=roofline) for arm in metrics.arms(tables)}
    shared = {"experiment": facts.experiment(manifest), "groups": tables.requests["group"].nunique()}
    return dict(finite({**shared, **manifest.get("parts", {}), **next(iter(arms.values())), "arms": arms}))


def _learning(folder: Path, summary: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the learning curve in the summary of a training; empty for other tasks."""
    from spec_lab.analysis.results.training import LINE  # importing matplotlib is slow

    curve = [] if summary is None else summary.get("learning", [])
    try:
        expect({"learning": curve}, {"learning": [LINE]}, "")
    except ValueError as error:
        raise Unreadable(f"{folder / SUMMARIES[0]} is not readable ({error})") from error
    return list(curve)


def track_all(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> Iterator[str]:
    """Track a run, or every run of a sweep; yields a line for each, also for those that could not be shown.

    Raises:
        ValueError, run_state.Locked, OSError: as ``track``, for a run; OSError also for a sweep.
        Unreadable: for a sweep, after all lines: the files of some runs are not readable.
    """
    folder = Path(folder)
    if not sweep.is_sweep(folder):
        yield f"{folder}: {track(folder, project, entity, mode)}"
        return
    unreadable = []
    for run in sweep.runs(folder):
        try:
            with sweep.reading(run.folder):
                where = track(run.folder, project, entity, mode)
            yield f"{run.folder}: {where}"
        except (ValueError, run_state.Locked) as error:
            yield f"{run.folder}: not shown: {error}"
            unreadable += [run.folder.name] * isinstance(error, Unreadable)
    if unreadable:
        raise Unreadable(f"unreadable in {folder}: {', '.join(unreadable)}")
