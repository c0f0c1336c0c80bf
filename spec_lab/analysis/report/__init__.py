"""``report.html``: one page about a run of any task or a sweep, for a browser, that needs no other file.

The page contains its figures as SVG, its style and its script; it fetches nothing, and its content security policy
forbids fetching and evaluation of text as code. Whatever came from outside (prompts, outputs, options, errors) is
escaped. Every number comes from ``spec_lab.analysis.metrics``. ``figures/`` in the same folder has the same figures as
PNG and SVG files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from spec_lab.analysis.report import (
    certificate_page,
    cost_page,
    distance_page,
    run_page,
    serving_page,
    sweep_page,
    training_page,
    verifiers_page,
)
from spec_lab.analysis.report.comparison_page import write_comparison as write_comparison
from spec_lab.core.files import write_text
from spec_lab.results import sweep
from spec_lab.results.manifest import begun

PAGES: Mapping[str, Callable[[Path], str]] = {
    "spec_lab.tasks.train.train": training_page.page,
    "spec_lab.tasks.certify.task.certify": certificate_page.page,
    "spec_lab.tasks.cost.measure": cost_page.page,
    "spec_lab.tasks.verifier_study.study_verifiers": verifiers_page.page,
    "spec_lab.tasks.constraint_distance.task.measure": distance_page.page,
    "spec_lab.tasks.serve.serve": serving_page.page,
}
"""The page of each task (``_target_`` of its option ``task``); any other task's must have the rows of a run."""


def write(folder: Path) -> Path:
    """Write ``report.html`` and ``figures/`` in the directory of a run of any task, or of a sweep.

    A run may still be running, or have been killed: its finished groups are shown. Of a sweep, finished runs are shown,
    and the state of the others.

    Args:
        folder: the directory.

    Returns:
        The page.

    Raises:
        ValueError: the directory holds neither a run nor a sweep, or the results of a task without rows, or files that
            are not readable.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    if sweep.is_run(folder):
        page = PAGES.get(_task(folder), run_page.page)(folder)
    elif sweep.is_sweep(folder):
        page = sweep_page.page(folder)
    else:
        what = "holds neither a run (manifest.json) nor a sweep (sweep.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: name the output directory of a run or sweep")
    file = folder / "report.html"
    write_text(file, page, errors="backslashreplace")
    return file


def _task(folder: Path) -> str:
    """Return the ``_target_`` of the task of a run; empty where its manifest has none.

    Raises:
        ValueError: the manifest is not readable.
    """
    manifest = begun(folder) or {"config": {}}
    return str((manifest["config"].get("task") or {}).get("_target_", ""))
