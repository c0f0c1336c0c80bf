"""One run on Weights & Biases: start it, log what its files hold, finish it.

A run keeps its id (``facts.identity``), also after it was resumed, and each upload of it is complete. So wandb's
``resume`` is not used, which would append every point a second time: online, a new upload replaces the former one;
offline, older folders are removed once the new one is complete. A run that was deleted online cannot be created again
under its id; choose another project.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import facts, headline, series, tables
from spec_lab.core.files import refuse_link

Mode = Literal["auto", "online", "offline", "disabled"]

UPLOAD_TIMEOUT = 300
"""Seconds to wait for an upload at the end; the rest stays on disk, for ``wandb sync``."""

MAX_REPORT = 20_000_000
"""Most bytes of a report that is uploaded."""

REPORT = "report/page"
"""Name of the report among a run's media."""


def resolved_mode(mode: Mode, option: str = "tracker.mode") -> Literal["online", "offline", "disabled"]:
    """Return the mode to use: for "auto" the value of ``WANDB_MODE``, else online with a login and offline without.

    Raises:
        ValueError: an unknown mode; names ``option``.
        OSError: there is a login that cannot be used, such as a malformed ``WANDB_API_KEY``.
    """
    import wandb

    if mode not in get_args(Mode):
        raise ValueError(f"{option} must be one of {', '.join(get_args(Mode))} (got {mode!r})")
    chosen = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode
    if chosen == "auto":
        try:
            chosen = "online" if wandb.login(prompt=False, verify=False) else "offline"
        except Exception as error:  # wandb raises many types, some of them not its own
            raise OSError(
                f"the login of Weights & Biases cannot be used ({error}): correct WANDB_API_KEY, or log in again"
            ) from error
    return chosen  # type: ignore[return-value]


def begin(folder: Path, manifest: Mapping[str, Any], project: str, entity: str | None, mode: Mode) -> Any:
    """Start a wandb run for the run in ``folder``, without points.

    The group is the run's sweep (else its experiment), the job type its task; tags name its parts.

    Args:
        folder: the run's directory; wandb writes to ``wandb/`` in it.
        manifest: the run's manifest, from which wandb's config is made (``facts.config``).
        project, entity, mode: as in ``Wandb``.

    Raises:
        OSError: Weights & Biases cannot be reached, or rejects the run.
        ValueError: ``wandb/`` is a symlink.
    """
    import wandb

    refuse_link(folder / "wandb")
    settings = wandb.Settings(
        console="off",
        silent=True,
        finish_timeout=UPLOAD_TIMEOUT,
        finish_timeout_raises=True,
        x_disable_stats=True,  # no sampling while the run is timed
        x_disable_meta=True,  # the command line may contain a secret; the manifest describes the run
        x_disable_machine_info=True,
        host="",  # its name may identify a person
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
    )
    try:
        run = wandb.init(
            project=project,
            entity=entity,
            id=facts.identity(folder, manifest),
            name=folder.absolute().name,
            group=facts.group(folder, manifest),
            job_type=facts.job_type(manifest),
            tags=facts.tags(manifest.get("parts", {})),
            config=facts.config(manifest),
            dir=str(folder),
            mode=resolved_mode(mode),
            settings=settings,
        )
    except Exception as error:  # wandb raises many types, some of them not its own
        raise OSError(f"Weights & Biases could not start a run ({error}); mode offline needs no network") from error
    for axis in (*series.SERIES, series.TRAIN_STEP):
        run.define_metric(axis, hidden=True, summary="none")
    for name, axis in series.keys(manifest.get("arms", [])).items():
        if name.rpartition("/")[2] in series.RUNNING:
            run.define_metric(name, step_metric=axis)  # the summary holds the last point
        else:  # the run's figure is no point of the series, and is set at the end
            run.define_metric(name, step_metric=axis, summary="none")
    run.define_metric("train/*", step_metric=series.TRAIN_STEP)
    return run


def replay(
    run: Any,
    folder: Path,
    rows: Tables,
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    logged: Collection[int] = (),
) -> None:
    """Log everything that the rows show: series, tables, the report with its figures, and the summary.

    Args:
        run: of ``begin``.
        folder: the run's directory; ``report.html`` and ``figures/`` are written there.
        rows: of the finished groups.
        summary: the contents of ``summary.json``.
        logged: groups whose figures are logged already.
    """
    import wandb

    from spec_lab.analysis import report  # importing matplotlib is slow

    for number, figures_of_group in series.groups(rows):
        if number not in logged:
            run.log({series.GROUP: number, **figures_of_group})
    for point in series.points(rows):
        run.log(point)
    shown = {"requests": tables.requests(rows), "steps": tables.steps(rows), "depths": tables.depths(rows)}
    for name, frame in shown.items():
        frame = frame.where(frame.notna(), None)
        run.log({f"tables/{name}": wandb.Table(columns=list(frame.columns), data=frame.to_numpy().tolist())})
    page = report.write(folder)
    if page.stat().st_size <= MAX_REPORT:
        run.log({REPORT: wandb.Html(page, inject=False)})
    show(run, summary, pictures(folder))
    averaged = {f"rows_per_point/{name}": count for name, count in series.rows_per_point(rows).items()}
    run.summary.update(series.mean_seconds(rows) | averaged)


def show(run: Any, summary: Mapping[str, Any], files: list[Path]) -> None:
    """Log figures and the summary (``headline.figures``), and tag the run with the parts that the summary names."""
    import wandb

    run.tags = tuple(dict.fromkeys((*run.tags, *facts.tags(summary))))
    if files:
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in files})
    run.summary.update(headline.figures(summary))


def show_training(run: Any, lines: Collection[Mapping[str, Any]], logged: Collection[int] = ()) -> None:
    """Log the lines of a learning curve (``headline.training``) with a loss, whose steps are not logged yet."""
    for line in lines:
        if line["loss"] and line["step"] not in logged:
            run.log({series.TRAIN_STEP: line["step"], **headline.training(line)})


def pictures(folder: Path) -> list[Path]:
    """Return the figures of the run in ``folder``."""
    return [file for file in sorted((folder / "figures").glob("*.png")) if file.is_file()]


def end(run: Any, complete: bool) -> str:
    """Finish the upload and remove older offline folders of the same run; return what ``where`` does.

    Args:
        run: of ``begin``.
        complete: whether the run reached its end; if not, Weights & Biases shows it as failed.
    """
    run.finish(exit_code=0 if complete else 1)
    if run.offline:
        folder = Path(run.settings.sync_dir)
        for other in folder.parent.iterdir():
            if other != folder and not other.is_symlink() and facts.is_offline_folder(other.name, run.id):
                shutil.rmtree(other)
    return where(run)


def where(run: Any) -> str:
    """Return a run's address; if it is offline, the command that uploads it. Empty if it is disabled."""
    if run.offline:
        return f"offline, to be uploaded with: wandb sync {shlex.quote(run.settings.sync_dir)}"
    return "" if run.disabled else str(run.url)
