"""``spec-lab track``: a run's files as a view on Weights & Biases, however the run ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spec_lab.analysis import metrics
from spec_lab.analysis.tracking import board, view
from spec_lab.analysis.tracking.board import Mode
from spec_lab.core.files import Unreadable, read_json
from spec_lab.results import sweep
from spec_lab.results.manifest import begun


def track(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> str:
    """Show the run in ``folder`` on Weights & Biases, as a tracked run would: done, interrupted or killed.

    A run that did not come to its end is shown as failed, with the figures of its finished groups. Tracked again, a run
    takes the place of its former view.

    Args:
        folder: the run's directory.
        project: where the run appears.
        entity: whose project; None for the default of the login.
        mode: "auto", "online" or "offline", as in ``Wandb``.

    Returns:
        Where the view is: its address, or its folder.

    Raises:
        ValueError: there is no run, or none of its groups is finished; its files are not readable.
        sweep.Locked: the run still goes on.
        OSError: Weights & Biases cannot be reached, or fails.
    """
    folder = Path(folder)
    if sweep.is_sweep(folder):
        raise ValueError(f"{folder} holds a sweep; its runs are in folders of their own")
    manifest = begun(folder)
    if manifest is None:
        what = "holds no run (no manifest.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}; name the directory that a run left behind")
    if board.resolved(mode, "mode") == "disabled":
        raise ValueError("Weights & Biases is disabled (mode, or WANDB_MODE): choose mode offline or online")
    with sweep.holding(folder):
        tables = metrics.load(folder)
        if tables.requests.empty:
            raise ValueError(f"{folder} holds no finished group of prompts; there is nothing to show yet")
        found = read_json(folder / "summary.json")
        whole = found is not None
        every = sorted((folder / "figures").glob("*.png")) if whole else []  # of an unfinished run: not of its rows
        pictures = [one for one in every if one.is_file()]
    summary = found or view.summary(tables, manifest)  # from here on the run may go on
    run = board.begin(folder, manifest, project, entity, mode)
    try:
        board.replay(run, tables, manifest, summary, pictures)
    except BaseException:
        run.finish(exit_code=1)
        raise
    return board.end(run, whole)


def track_all(folder: Path, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> Iterator[str]:
    """As ``track``, for a run or for every run of a sweep: one line for each, those that could not be shown included.

    Raises:
        ValueError, sweep.Locked, OSError: as ``track``, of a run alone; OSError also of a sweep.
        Unreadable: of a sweep, after all lines: there are runs whose files are not readable.
    """
    folder = Path(folder)
    if not sweep.is_sweep(folder):
        yield f"{folder}: {track(folder, project, entity, mode)}"
        return
    spoilt = []
    for one in sweep.runs(folder):
        try:
            with sweep.reading(one.folder):
                where = track(one.folder, project, entity, mode)
            yield f"{one.folder}: {where}"
        except (ValueError, sweep.Locked) as error:
            yield f"{one.folder}: not shown: {error}"
            spoilt += [one.folder.name] * isinstance(error, Unreadable)
    if spoilt:
        raise Unreadable(f"unreadable in {folder}: {', '.join(spoilt)}")
