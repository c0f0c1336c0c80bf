"""Trackers, which receive the progress of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import client, series
from spec_lab.analysis.tracking.client import Mode
from spec_lab.core.faults import warn
from spec_lab.core.options import check_wandb_name


class Tracker:
    """Receives the progress of a run; does nothing with it.

    An error in a tracker is printed, and the run continues without it (``Guarded``).
    """

    def start(self, manifest: Mapping[str, Any], out: Path) -> None:
        """Start the run with the contents of its ``manifest.json``.

        Raises:
            OSError: the run is refused, before anything is computed.
        """

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a finished group of prompts."""

    def training(self, line: Mapping[str, Any]) -> None:
        """Log a line of the learning curve of a training (``train.fit``)."""

    def metrics(self, values: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> None:
        """Log the values of the run's own metrics (``conf/metrics``), just before ``finish``.

        Args:
            values: by arm and name: ``mean``, and its interval from ``low`` to ``high``, None where there is none. The
                arm of ``proposer`` is the first, and has its name.
        """

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """Log the contents of ``summary.json``, the figures and, of a task that has some, the rows."""

    def close(self) -> None:
        """Release everything; called last, also after an error."""


class Guarded(Tracker):
    """Calls another tracker. When that raises an error, this is printed, and the run continues without it.

    Args:
        tracker: is called. An ``OSError`` of its ``start`` refuses the run, before anything is computed.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.failed = tracker, False

    def start(self, manifest: Mapping[str, Any], out: Path) -> None:
        """See ``Tracker``."""
        self.failed = False
        self._call(lambda: self.tracker.start(manifest, out), OSError)

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._call(lambda: self.tracker.group(number, figures))

    def training(self, line: Mapping[str, Any]) -> None:
        """See ``Tracker``."""
        self._call(lambda: self.tracker.training(line))

    def metrics(self, values: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> None:
        """See ``Tracker``."""
        self._call(lambda: self.tracker.metrics(values))

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """See ``Tracker``."""
        self._call(lambda: self.tracker.finish(summary, figures, tables))

    def close(self) -> None:
        """See ``Tracker``. After an error it is called as well."""
        self.failed = False
        self._call(self.tracker.close)

    def _call(self, call: Callable[[], object], *refuses: type[Exception]) -> None:
        """Call the tracker unless it has failed; errors of the types ``refuses`` are raised."""
        if self.failed:
            return
        try:
            call()
        except refuses:
            raise
        except Exception as error:
            self.failed, kind = True, type(self.tracker)
            warn(f"tracker '{kind.__name__}'", error, kind.__module__, "the run continues without it")


class Files(Tracker):
    """Writes nothing: a run's own files are enough."""


class Wandb(Tracker):
    """Shows the run on Weights & Biases: each group's figures as it finishes, and the lines of a learning curve; at the
    end series, tables, figures, the report and the summary (``client.replay``).

    Little is sent while speed is measured. Where the run appears is printed at its start and its end; offline this is
    the command that uploads it later. If Weights & Biases fails after the run has started, the run continues
    without it and reports the failure at its end: its files are complete, and ``spec-lab track`` uploads them later.
    The exit code is the run's own.

    Args:
        project: where the run appears; at most 128 characters, without slashes, backslashes or any of ``# ? % :``.
        entity: the owner of the project; None for the default of the login.
        mode: "online", "offline" (files in the run's directory, for a later ``wandb sync``), "disabled", or "auto":
            the value of ``WANDB_MODE`` if set, else online with a login and offline without.

    Raises:
        ValueError: an option has a wrong value; names the option.
    """

    def __init__(self, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> None:
        if mode != "auto":
            client.resolved_mode(mode)
        check_wandb_name("tracker.project", project)
        if entity is not None:
            check_wandb_name("tracker.entity", entity)
        self.project, self.entity, self.mode = project, entity, mode
        self._run: Any = None
        self._reset()

    def _reset(self) -> None:
        self._groups: set[int] = set()
        self._steps: set[int] = set()
        self._complete, self._error = False, ""

    def start(self, manifest: Mapping[str, Any], out: Path) -> None:
        """See ``Tracker``.

        Raises:
            OSError: Weights & Biases cannot be reached, or rejects the run.
        """
        self._reset()
        self._manifest, self._out = manifest, out
        self._run = client.begin(out, manifest, self.project, self.entity, self.mode)
        _say(client.where(self._run))

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._call(lambda: self._run.log({series.GROUP: number, **figures}))
        self._groups.add(number)

    def training(self, line: Mapping[str, Any]) -> None:
        """See ``Tracker``."""
        self._call(lambda: client.show_training(self._run, [line]))
        self._steps.add(line["step"])

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """See ``Tracker``."""

        def log() -> None:
            client.show_training(self._run, summary.get("learning", []), self._steps)
            if tables is None:
                client.show(self._run, summary, figures)
            else:
                client.replay(self._run, self._out, tables, self._manifest, summary, self._groups)

        self._call(log)
        self._complete = True

    def close(self) -> None:
        """See ``Tracker``. Reports an error of Weights & Biases, if there was one."""
        if self._run is not None:
            self._call(lambda: _say(client.end(self._run, self._complete)))
            self._run = None
            if self._error:
                print(
                    f"Weights & Biases failed ({self._error}). The run's files are complete: "
                    f"spec-lab track {self._out} uploads them.",
                    file=sys.stderr,
                )

    def _call(self, call: Callable[[], object]) -> None:
        """Call wandb unless a call has failed before; whatever it raises, the run continues."""
        if not self._error:
            try:
                call()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"


def _say(where: str) -> None:
    """Print where the run appears."""
    if where:
        print(f"Weights & Biases: {where}", file=sys.stderr)
