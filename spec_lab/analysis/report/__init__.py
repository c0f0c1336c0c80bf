"""``report.html``: one page about a run or a sweep, for a browser, which needs nothing but the file.

The page holds its data, its style and one copy of the Vega libraries; it fetches nothing, and its content security
policy forbids it to. Whatever came from outside (prompts, outputs, options, errors) is escaped. Every number comes from
``spec_lab.analysis.metrics``. ``figures/`` beside the page has the same figures as PNG and SVG.
"""

from __future__ import annotations

from pathlib import Path

from spec_lab.analysis.report import of_run, of_sweep
from spec_lab.core.files import write_text
from spec_lab.results import sweep


def write(folder: Path) -> Path:
    """Make ``report.html`` and ``figures/`` in the directory of a run or a sweep.

    A run may still go on, or have been killed: what its finished groups say is shown. Of a sweep the runs that are done
    are shown, and where the others stand.

    Args:
        folder: the directory.

    Returns:
        The page.

    Raises:
        ValueError: it holds neither a run nor a sweep, or what a task without rows of a run has left, or files that
            are not readable.
        OSError: it cannot be written.
    """
    folder = Path(folder)
    if sweep.is_run(folder):
        page = of_run.page(folder)
    elif sweep.is_sweep(folder):
        page = of_sweep.page(folder)
    else:
        what = "holds neither a run (manifest.json) nor a sweep (sweep.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: give the directory that was output_dir= when it ran")
    file = folder / "report.html"
    write_text(file, page, errors="backslashreplace")
    return file
