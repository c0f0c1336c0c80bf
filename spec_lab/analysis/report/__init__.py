"""``report.html``: one page about a run or a sweep, for a browser, that needs no other file.

The page contains its figures as SVG, its style and its script; it fetches nothing, and its content security policy
forbids fetching and evaluation of text as code. Whatever came from outside (prompts, outputs, options, errors) is
escaped. Every number comes from ``spec_lab.analysis.metrics``. ``figures/`` in the same folder has the same figures as
PNG and SVG files.
"""

from __future__ import annotations

from pathlib import Path

from spec_lab.analysis.report import run_page, sweep_page
from spec_lab.core.files import write_text
from spec_lab.results import sweep


def write(folder: Path) -> Path:
    """Write ``report.html`` and ``figures/`` in the directory of a run or a sweep.

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
        page = run_page.page(folder)
    elif sweep.is_sweep(folder):
        page = sweep_page.page(folder)
    else:
        what = "holds neither a run (manifest.json) nor a sweep (sweep.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: name the output directory of a run or sweep")
    file = folder / "report.html"
    write_text(file, page, errors="backslashreplace")
    return file
