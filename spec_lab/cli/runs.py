"""Runs from Python: ``spec_lab.run`` does what ``spec-lab`` does, in this process, and returns the run's results."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from spec_lab.cli import interrupt
from spec_lab.cli.commands import SHORT
from spec_lab.cli.jobs import job
from spec_lab.cli.main import checked_line, composing, config_folders, in_place, quote_prompt
from spec_lab.cli.refusals import reason
from spec_lab.results import run_names, sweep
from spec_lab.results.run_figures import figure_rows, left_behind

if TYPE_CHECKING:
    import pandas as pd

    from spec_lab.results.result import Result
    from spec_lab.results.writer import Tables


@dataclass(frozen=True)
class Run:
    """A run or a sweep that has ended; its files are read when they are asked for. A notebook shows its tables.

    Args:
        folder: its directory.
        code: its exit code: 0, or that of a task that found a fault, such as ``certify``.
    """

    folder: Path
    code: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of ``summary.json``, or of ``certificate.json``; empty of a sweep."""
        return left_behind(self.folder)

    @property
    def tables(self) -> Tables:
        """The rows of a run: ``forwards``, ``steps`` and ``requests``.

        Raises:
            ValueError: it is a sweep, whose ``runs`` have rows.
        """
        from spec_lab.analysis import metrics
        from spec_lab.results.manifest import begun

        if begun(self.folder) is None:
            raise ValueError(f"{self.folder} is a sweep, which has no rows of its own: read run.runs[0].tables")
        return metrics.load(self.folder)

    @property
    def table(self) -> pd.DataFrame:
        """The figures, a row for each arm; of a sweep for each arm of each run that is done, with the options."""
        import pandas as pd

        if sweep.is_sweep(self.folder):
            return sweep.collect(self.folder)
        return pd.DataFrame([{"run": self.folder.name} | row for row in figure_rows(self.folder)])

    @property
    def runs(self) -> list[Run]:
        """The runs of a sweep that are done, in its order; of a single run, itself."""
        if not sweep.is_sweep(self.folder):
            return [self]
        return [Run(state.folder, state.code) for state in sweep.runs(self.folder) if state.state == "done"]

    @cached_property
    def result(self) -> Result:
        """The sections that page and terminal show: tables, figures and notes."""
        from spec_lab.analysis.report import result_of

        return result_of(self.folder)

    def report(self) -> Path:
        """Write ``report.html`` and its figures; return the page."""
        from spec_lab.analysis.report import write

        return write(self.folder)

    def _repr_markdown_(self) -> str:
        from spec_lab.analysis.markdown import body

        return body(self.result)


def run(overrides: str | Sequence[str], quiet: bool = False) -> Run:
    """Run an experiment in this process, as ``spec-lab OVERRIDES`` does; a finished or stopped one is resumed likewise.

    Models that were loaded stay in memory for the next run.

    Args:
        overrides: what is typed after ``spec-lab``, as words, or in one text that is split as a shell does: options,
            flags such as ``--multirun`` and ``--config-dir``, or ``train NAME``, ``check-drafter``, ``recommend``.
        quiet: print nothing.

    Returns:
        The run, or the sweep.

    Raises:
        ValueError: an option or a part is invalid, or a file cannot be read or written.
        KeyboardInterrupt: Ctrl-C; the same call resumes the run if ``output_dir`` is given.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported, later
    words = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    with ExitStack() as stack:
        if quiet:
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(redirect_stderr(StringIO()))
        try:
            return _run(_line(words))
        except OmegaConfBaseException as error:  # of output_dir, before the job begins
            raise ValueError(reason(error)) from error
        except SystemExit as left:
            raise ValueError(str(left.code).removeprefix("spec_lab: ")) from left


def _line(words: Sequence[str]) -> list[str]:
    """Return the options of a run that a command line stands for."""
    words, folders = config_folders(words)
    if not words or not re.fullmatch(r"[A-Za-z][\w-]*", words[0]):
        line = words if {"-m", "--multirun"} & set(words) else [quote_prompt(word) for word in words]
        return [*line, *in_place(folders)]
    if words[0] not in SHORT:
        raise ValueError(
            f"{words[0]} is no run: give options such as proposer=ngram, or {', '.join(SHORT)}; other commands of "
            "spec-lab read the folders of runs"
        )
    with redirect_stderr(StringIO()) as said:
        try:
            return [*SHORT[words[0]](words), *in_place(folders)]
        except SystemExit as left:
            raise ValueError(said.getvalue().strip().rpartition("\n")[2] or f"{words[0]} --help runs nothing") from left


def _run(line: list[str]) -> Run:
    """Compose and run a checked command line."""
    line = checked_line(line)
    given, unknown = get_args_parser().parse_known_args(line)
    prints = given.help or given.hydra_help or given.cfg or given.info or given.shell_completion
    if unknown or prints:
        raise ValueError(f"{' '.join(unknown) or 'a flag that prints and runs nothing'} is not supported: leave it out")
    name, overrides = given.config_name or "config", list(given.overrides)
    with composing(given) as hydra:
        config = hydra.compose_config(name, overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        folder = str(config.output_dir)
        if not any(run_names.key(override) == "output_dir" for override in overrides):
            if "${now:" in str(config._get_node("output_dir")._value()):
                folder = _unused(folder)
            overrides.append(f"output_dir={QuotedString(folder, Quote.single).with_quotes()}")
        many = given.multirun or config.hydra.mode == RunMode.MULTIRUN
        code = 0
        try:
            (hydra.multirun if many else hydra.run)(name, job, overrides)
        except SystemExit as left:
            if left.code == interrupt.CODE:
                raise KeyboardInterrupt from left
            if isinstance(left.code, str):
                raise
            code = int(left.code or 0)
    return Run(Path(folder), code)


def _unused(folder: str) -> str:
    """Return the name of a folder, with a number where it exists: two short runs may begin in the same second."""
    names = chain([folder], (f"{folder}-{number}" for number in count(2)))
    return next(name for name in names if not Path(name).exists())
