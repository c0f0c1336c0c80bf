"""``report.html``: one page about a run of any task or a sweep, for a browser, that needs no other file.

The page contains its figures as SVG, its style and its script; it fetches nothing, and its content security policy
forbids fetching and evaluation of text as code. Whatever came from outside (prompts, outputs, options, errors) is
escaped. Every number comes from ``spec_lab.analysis.metrics``. ``figures/`` in the same folder has the same figures as
PNG and SVG files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis.compare import Comparison
from spec_lab.analysis.report.facts import facts
from spec_lab.analysis.report.page import render
from spec_lab.analysis.report.token_view import token_view, verifications
from spec_lab.analysis.results import (
    certificate,
    comparison,
    cost,
    distance,
    drafter_check,
    online,
    recommendation,
    run,
    serving,
    training,
    verifiers,
)
from spec_lab.analysis.results import sweep as sweep_result
from spec_lab.core.files import write_text
from spec_lab.results import run_state, sweep
from spec_lab.results.manifest import begun
from spec_lab.results.old_names import TABLES
from spec_lab.results.result import Result
from spec_lab.results.schema import SCHEMAS

RESULTS: Mapping[str, Callable[[Path], Result]] = {
    "spec_lab.tasks.train.train": training.result,
    "spec_lab.tasks.train_online.train_online": online.result,
    "spec_lab.tasks.certify.task.certify": certificate.result,
    "spec_lab.tasks.cost.measure": cost.result,
    "spec_lab.tasks.verifier_study.study_verifiers": verifiers.result,
    "spec_lab.tasks.constraint_distance.task.measure": distance.result,
    "spec_lab.tasks.serve.serve": serving.result,
    "spec_lab.tasks.check_drafter.check": drafter_check.result,
    "spec_lab.tasks.recommend.recommend": recommendation.result,
}
"""The result of each task (``_target_`` of its option ``task``); any other task's must have the rows of a run."""


def write(folder: Path) -> Path:
    """Write ``report.html`` and ``figures/`` in the directory of a run of any task, or of a sweep.

    A run may still be running, or have been killed: its finished groups are shown. Of a sweep, finished runs are shown,
    and the state of the others.

    Returns:
        The page.

    Raises:
        ValueError: the directory holds neither a run nor a sweep, or the results of a task without rows, or files that
            are not readable.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    if run_state.is_run(folder):
        page = _page(folder)
    elif sweep.is_sweep(folder):
        swept = sweep_result.result(folder)
        page = render(swept, folder, swept.title, swept.facts, where=folder.resolve().name)
    else:
        what = "holds neither a run (manifest.json) nor a sweep (sweep.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: name the output directory of a run or sweep")
    file = folder / "report.html"
    write_text(file, page, errors="backslashreplace")
    return file


def write_comparison(compared: Comparison, file: Path) -> Path:
    """Write the page about a comparison, and its figures to a folder beside it, ``<name>_figures``; return the page.

    Raises:
        OSError: a file cannot be written.
    """
    result = comparison.result(compared)
    page = render(result, file.parent, result.title, {}, f"{file.stem}_figures")
    write_text(file, page, errors="backslashreplace")
    return file


def result_of(folder: Path) -> Result:
    """Return the result of a run of any task, in any state, or of a sweep; arguments and errors as of ``write``."""
    if sweep.is_sweep(folder):
        return sweep_result.result(folder)
    read = _reader(begun(folder) or {"config": {}})
    return run.computed(run.RunFiles.read(folder)) if read is None else read(folder)


def _reader(manifest: Mapping[str, Any]) -> Callable[[Path], Result] | None:
    """Return what reads the result of the task of a manifest; None for a task with the rows of a run."""
    return RESULTS.get(str((manifest["config"].get("task") or {}).get("_target_", "")))


def _page(folder: Path) -> str:
    """Return the page about a run."""
    manifest: Mapping[str, Any] = begun(folder) or {"config": {}}
    read = _reader(manifest)
    view, names = None, []
    if read is not None:
        result = read(folder)
    else:
        rows = run.RunFiles.read(folder)
        if not len(rows.tables.requests):
            _refuse_other_task(folder)
        result, names = run.computed(rows), list(rows.states)
        view = token_view(folder, rows.tables, names, verifications(rows.manifest, rows.states, rows.temperature))
        manifest = rows.manifest
    about = facts(manifest, result.constraint, **result.facts)
    title = f"{result.title}: {_task(manifest)}"
    return render(result, folder, title, about, view=view, names=names, where=_where(folder.resolve()))


def _task(manifest: Mapping[str, Any]) -> str:
    """Return the name of a run's task, from its ``_target_``; "benchmark" where the manifest has none."""
    path = str((manifest["config"].get("task") or {}).get("_target_") or "spec_lab.tasks.benchmark.run").split(".")
    return (path[2] if path[:2] == ["spec_lab", "tasks"] and len(path) > 2 else path[-1]).replace("_", " ")


def _where(folder: Path) -> str:
    """Return the name of a run's folder; of a run of a sweep what distinguishes it from the others."""
    if not sweep.is_sweep(folder.parent):
        return folder.name
    try:
        return f"run {sweep.which_run(folder)}, of {folder.parent.name}"
    except ValueError:  # the run's page does not depend on the list of runs
        return folder.name


def _refuse_other_task(folder: Path) -> None:
    """Refuse a directory without rows that is not a run's; a run whose first group is not finished has none yet."""
    every = [
        file for subfolder in (".", "parts", "figures") for file in (folder / subfolder).glob("*.*") if file.is_file()
    ]
    tables = "|".join([*TABLES, *SCHEMAS, "tokens", "replay"])
    expected = re.compile(rf"\.|(manifest|ended)\.json$|report\.html$|({tables})[-.]")
    others = sorted(str(file.relative_to(folder)) for file in every if not expected.match(file.name))
    ended = run_state.ended(folder)
    if others or (ended and ended["state"] == "done"):
        files = ", ".join(others[:6]) + f" and {len(others) - 6} more" * (len(others) > 6)
        raise ValueError(
            f"{folder} holds no rows of a run, which a report requires; "
            + (f"its task wrote {files}" if others else "its task wrote nothing but manifest.json")
        )
