"""One run on Weights & Biases: opened, filled from rows, closed. What it shows is said in ``view``.

A run keeps its id (``view.identity``), and every view of it is whole. So wandb is told of no resuming: online, a new
view takes the place of the one before; offline, older ones are removed once the new one is complete. (``resume`` would
append every point a second time.) A run that was deleted online cannot come back under its id; choose another project.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import view
from spec_lab.core.files import refuse_link

Mode = Literal["auto", "online", "offline", "disabled"]

PATIENCE = 300
"""Seconds to wait for an upload at the end; what is left then stays on disk, for ``wandb sync``."""


def resolved(mode: Mode, option: str = "tracker.mode") -> Literal["online", "offline", "disabled"]:
    """What a mode stands for here: "auto" is what ``WANDB_MODE`` says, else online with a login and offline without.

    Raises:
        ValueError: no such mode; names ``option``.
    """
    import wandb

    if mode not in get_args(Mode):
        raise ValueError(f"{option} must be one of {', '.join(get_args(Mode))}, not {mode!r}")
    chosen = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode
    if chosen == "auto":
        chosen = "online" if wandb.login(prompt=False, verify=False) else "offline"
    return chosen  # type: ignore[return-value]


def begin(folder: Path, manifest: Mapping[str, Any], project: str, entity: str | None, mode: Mode) -> Any:
    """A wandb run for the run in ``folder``, with everything but points.

    Args:
        folder: the run's; wandb writes to ``wandb/`` in it.
        manifest: the run's, its config there.
        project, entity, mode: as in ``Wandb``.

    Raises:
        OSError: Weights & Biases cannot be reached, or refuses.
        ValueError: ``wandb/`` is a symlink.
    """
    import wandb

    refuse_link(folder / "wandb")
    quiet = wandb.Settings(
        console="off",
        silent=True,
        finish_timeout=PATIENCE,
        finish_timeout_raises=True,
        x_disable_stats=True,  # nothing is sampled while the run is timed
        x_disable_meta=True,  # the command line may hold a secret; the manifest says what the run was
        x_disable_machine_info=True,
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
    )
    try:
        run = wandb.init(
            project=project,
            entity=entity,
            id=view.identity(folder, manifest),
            name=folder.absolute().name,
            group=view.group(folder, manifest),
            job_type=view.experiment(manifest),
            tags=view.tags(manifest.get("parts", {})),
            config=dict(manifest),
            dir=str(folder),
            mode=resolved(mode),
            settings=quiet,
        )
    except Exception as error:  # of many kinds, not all of them wandb's own
        raise OSError(f"Weights & Biases could not start a run ({error}); mode offline needs no network") from error
    for axis in view.SERIES:
        run.define_metric(axis, hidden=True, summary="none")
    for name, axis in view.keys(manifest.get("arms", [])).items():
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
        run: as ``begin`` made it.
        tables: the rows of the finished groups.
        manifest: the run's.
        summary: what ``summary.json`` says, or would.
        pictures: the figures drawn; where there are none, they are drawn from the rows.
        logged: groups whose figures have been logged already.
    """
    import wandb

    for number, seen in view.groups(tables):
        if number not in logged:
            run.log({"group": number, **seen})
    for point in view.series(tables):
        run.log(point)
    for name, frame in (("requests", view.requests(tables)), ("depths", view.depths(tables))):
        frame = frame.where(frame.notna(), None)
        run.log({f"tables/{name}": wandb.Table(columns=list(frame.columns), data=frame.to_numpy().tolist())})
    with TemporaryDirectory() as drawn:
        if not pictures:
            from spec_lab.analysis import figures  # matplotlib takes a while to import

            pictures = figures.draw(tables, Path(drawn))
        show(run, summary, pictures)
    run.summary.update({"rows_per_point": view.averaged(tables), "groups_of": manifest.get("groups")})


def show(run: Any, summary: Mapping[str, Any], pictures: list[Path]) -> None:
    """Log the summary and the figures; the run is tagged with the parts that the summary names."""
    import wandb

    run.tags = tuple(dict.fromkeys((*run.tags, *view.tags(summary))))
    run.summary.update(dict(summary))
    if pictures:
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in pictures})


def end(run: Any, whole: bool) -> str:
    """Close the view, and remove older offline ones of the same run from beside it; returns where it is.

    Args:
        run: as ``begin`` made it.
        whole: whether the run came to its end; if not, Weights & Biases calls it failed.
    """
    run.finish(exit_code=0 if whole else 1)
    if not run.offline:
        return str(run.url)
    here = Path(run.settings.sync_dir)
    for other in here.parent.iterdir():
        if other != here and not other.is_symlink() and view.is_view(other.name, run.id):
            shutil.rmtree(other)
    return f"{here} (offline; wandb sync {here} uploads it)"
