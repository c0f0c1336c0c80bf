"""``spec-lab track``: show a run on Weights & Biases from its files, finished or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spec_lab.analysis import metrics
from spec_lab.analysis.tracking import client, series
from spec_lab.analysis.tracking.client import Mode
from spec_lab.core.files import Unreadable, read_json
from spec_lab.results import sweep
from spec_lab.results.manifest import begun, without_groups


def track(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> str:
    """Show the run in ``folder`` on Weights & Biases, as a tracked run would: done, interrupted or killed.

    A run that did not reach its end is shown as failed, with the figures of its finished groups. A run that is tracked
    again replaces its former upload.

    Args:
        folder: the run's directory.
        project: where the run appears.
        entity: the owner of the project; None for the default of the login.
        mode: "auto", "online" or "offline", as in ``Wandb``.

    Returns:
        The upload's address, or its folder.

    Raises:
        ValueError: there is no run, its task has no groups, or none of them is finished; its files are not readable.
        sweep.Locked: the run is still running.
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
    with sweep.holding(folder):
        tables = metrics.load(folder)
        if tables.requests.empty:
            raise ValueError(without_groups(folder, manifest))
        written = read_json(folder / "summary.json")
        files = [] if written is None else sorted((folder / "figures").glob("*.png"))  # else older than the rows
        pictures = [file for file in files if file.is_file()]
    summary = written or series.summary(tables, manifest)  # from here on the run may continue
    run = client.begin(folder, manifest, project, entity, mode)
    try:
        client.replay(run, tables, manifest, summary, pictures)
    except BaseException:
        run.finish(exit_code=1)
        raise
    return client.end(run, complete=written is not None)


def track_all(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> Iterator[str]:
    """Track a run, or every run of a sweep; yields a line for each, also for those that could not be shown.

    Raises:
        ValueError, sweep.Locked, OSError: as ``track``, for a run; OSError also for a sweep.
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
        except (ValueError, sweep.Locked) as error:
            yield f"{run.folder}: not shown: {error}"
            unreadable += [run.folder.name] * isinstance(error, Unreadable)
    if unreadable:
        raise Unreadable(f"unreadable in {folder}: {', '.join(unreadable)}")
