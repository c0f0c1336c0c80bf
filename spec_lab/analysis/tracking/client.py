"""One run on Weights & Biases: start it, log the rows (``series``), finish it.

A run keeps its id (``series.identity``), and each upload of it is complete. So wandb's ``resume`` is not used, which
would append every point a second time: online, a new upload replaces the former one; offline, older folders are removed
once the new one is complete. A run that was deleted online cannot be created again under its id; choose another
project.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.names import names_in_manifest, with_names
from spec_lab.analysis.tracking import series
from spec_lab.core.files import refuse_link

Mode = Literal["auto", "online", "offline", "disabled"]

UPLOAD_TIMEOUT = 300
"""Seconds to wait for an upload at the end; the rest stays on disk, for ``wandb sync``."""


def resolved_mode(mode: Mode, option: str = "tracker.mode") -> Literal["online", "offline", "disabled"]:
    """Return the mode to use: for "auto" the value of ``WANDB_MODE``, else online with a login and offline without.

    Raises:
        ValueError: an unknown mode; names ``option``.
    """
    import wandb

    if mode not in get_args(Mode):
        raise ValueError(f"{option} must be one of {', '.join(get_args(Mode))} (got {mode!r})")
    chosen = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode
    if chosen == "auto":
        chosen = "online" if wandb.login(prompt=False, verify=False) else "offline"
    return chosen  # type: ignore[return-value]


def begin(folder: Path, manifest: Mapping[str, Any], project: str, entity: str | None, mode: Mode) -> Any:
    """Start a wandb run for the run in ``folder``, without points.

    Args:
        folder: the run's directory; wandb writes to ``wandb/`` in it.
        manifest: the run's manifest, which becomes wandb's config.
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
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
    )
    try:
        run = wandb.init(
            project=project,
            entity=entity,
            id=series.identity(folder, manifest),
            name=folder.absolute().name,
            group=series.group(folder, manifest),
            job_type=series.experiment(manifest),
            tags=series.tags(manifest.get("parts", {})),
            config=dict(manifest),
            dir=str(folder),
            mode=resolved_mode(mode),
            settings=settings,
        )
    except Exception as error:  # wandb raises many types, some of them not its own
        raise OSError(f"Weights & Biases could not start a run ({error}); mode offline needs no network") from error
    for axis in series.SERIES:
        run.define_metric(axis, hidden=True, summary="none")
    for name, axis in series.keys(manifest.get("arms", [])).items():
        run.define_metric(name, step_metric=axis, summary="none")
    return run


def replay(
    run: Any,
    tables: Tables,
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    pictures: list[Path],
    logged: Collection[int] = (),
) -> None:
    """Log everything that the rows show.

    Args:
        run: of ``begin``.
        tables: the rows of the finished groups.
        manifest: the run's manifest.
        summary: the contents of ``summary.json``.
        pictures: files of the figures; if empty, they are drawn from the rows.
        logged: groups whose figures are logged already.
    """
    import wandb

    for number, figures_of_group in series.groups(tables):
        if number not in logged:
            run.log({"group": number, **figures_of_group})
    for point in series.points(tables):
        run.log(point)
    named = with_names(tables, names_in_manifest(manifest))
    for name, frame in (("requests", series.requests(named)), ("depths", series.depths(named))):
        frame = frame.where(frame.notna(), None)
        run.log({f"tables/{name}": wandb.Table(columns=list(frame.columns), data=frame.to_numpy().tolist())})
    with TemporaryDirectory() as folder:
        if not pictures:
            from spec_lab.analysis import figures  # importing matplotlib is slow

            pictures = figures.draw(named, Path(folder))
        show(run, summary, pictures)
    run.summary.update({"rows_per_point": series.rows_per_point(tables), "groups_of": manifest.get("groups")})


def show(run: Any, summary: Mapping[str, Any], pictures: list[Path]) -> None:
    """Log the summary and the figures, and tag the run with the parts that the summary names."""
    import wandb

    run.tags = tuple(dict.fromkeys((*run.tags, *series.tags(summary))))
    run.summary.update(dict(summary))
    if pictures:
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in pictures})


def end(run: Any, complete: bool) -> str:
    """Finish the upload and remove older offline folders of the same run; returns its address or folder.

    Args:
        run: of ``begin``.
        complete: whether the run reached its end; if not, Weights & Biases shows it as failed.
    """
    run.finish(exit_code=0 if complete else 1)
    if not run.offline:
        return str(run.url)
    folder = Path(run.settings.sync_dir)
    for other in folder.parent.iterdir():
        if other != folder and not other.is_symlink() and series.is_offline_folder(other.name, run.id):
            shutil.rmtree(other)
    return f"{folder} (offline; wandb sync {folder} uploads it)"
