"""Trackers: what a run tells its progress to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import board
from spec_lab.analysis.tracking.board import Mode


class Tracker(Protocol):
    """What a run tells a tracker."""

    def start(self, name: str, manifest: Mapping[str, Any], out: Path) -> None:
        """The run begins; ``manifest`` is what ``manifest.json`` says."""
        ...

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """A group of prompts has finished; its figures."""
        ...

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """The run is over: what ``summary.json`` says, the figures drawn, and the rows, of a task that has some."""
        ...

    def close(self) -> None:
        """Whatever happened, nothing more comes."""
        ...


class Files:
    """Nothing beyond the files that every run leaves."""

    def start(self, name: str, manifest: Mapping[str, Any], out: Path) -> None:
        """Nothing to do."""

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """Nothing to do."""

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def _check_name(option: str, value: Any) -> None:
    """Check a name that Weights & Biases would refuse only once the run has begun."""
    if not isinstance(value, str) or not re.fullmatch(r"[^/\\#?%:]{1,128}", value) or not value.isprintable():
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:40]}..."
        raise ValueError(
            f"{option} must be a text of 1 to 128 printable characters without any of / \\ # ? % :, not {shown}"
        )


class Wandb:
    """Shows the run on Weights & Biases: each group's figures as it finishes, all else (``board.replay``) at the end.

    Little is sent while the machine is measured. Where Weights & Biases fails once the run has begun, the run goes on
    without it and says so at its end: its files have everything, and ``spec-lab track`` shows them later. The exit code
    is the run's own.

    Args:
        project: where the run appears; at most 128 characters, without slashes, backslashes or any of ``# ? % :``.
        entity: whose project; None for the default of the login.
        mode: "online", "offline" (files under the run's directory, to be synchronised later), "disabled", or "auto":
            online where a login is configured, offline where none is. ``WANDB_MODE`` decides for "auto" where set.

    Raises:
        ValueError: an option out of its range; names it.
    """

    def __init__(self, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> None:
        if mode != "auto":
            board.resolved(mode)
        _check_name("tracker.project", project)
        if entity is not None:
            _check_name("tracker.entity", entity)
        self.project, self.entity, self.mode = project, entity, mode
        self._run: Any = None
        self._forget()

    def _forget(self) -> None:
        self._logged: set[int] = set()
        self._whole, self._lost = False, ""

    def start(self, name: str, manifest: Mapping[str, Any], out: Path) -> None:
        """See ``Tracker``.

        Raises:
            OSError: Weights & Biases cannot be reached, or refuses.
        """
        self._forget()
        self._manifest, self._out = manifest, out
        self._run = board.begin(out, manifest, self.project, self.entity, self.mode)

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._spare(lambda: self._run.log({"group": number, **figures}))
        self._logged.add(number)

    def finish(self, summary: Mapping[str, Any], figures: list[Path], tables: Tables | None = None) -> None:
        """See ``Tracker``."""
        if tables is None:
            self._spare(lambda: board.show(self._run, summary, figures))
        else:
            self._spare(lambda: board.replay(self._run, tables, self._manifest, summary, figures, self._logged))
        self._whole = True

    def close(self) -> None:
        """See ``Tracker``. Says what was lost, if anything was."""
        if self._run is not None:
            self._spare(lambda: board.end(self._run, self._whole))
            self._run = None
            if self._lost:
                print(
                    f"Weights & Biases failed ({self._lost}); the run's files are whole: spec-lab track {self._out} "
                    "shows them there.",
                    file=sys.stderr,
                )

    def _spare(self, call: Callable[[], object]) -> None:
        """Make one call to wandb; once one has failed, no more. Whatever it raises, the run is worth more."""
        if not self._lost:
            try:
                call()
            except Exception as error:
                self._lost = f"{type(error).__name__}: {error}"
