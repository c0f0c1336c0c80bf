"""Trackers: views of a run while it goes on. The files under the run's directory stay the truth.

wandb is known here only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

Mode = Literal["auto", "online", "offline", "disabled"]


class Tracker(Protocol):
    """What a run tells a tracker."""

    def start(self, name: str, manifest: Mapping[str, Any], out: Path) -> None:
        """The run begins; ``manifest`` is what ``manifest.json`` says."""
        ...

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """A group of prompts has finished; its figures."""
        ...

    def finish(self, summary: Mapping[str, Any], figures: list[Path]) -> None:
        """The run is over: what ``summary.json`` says, and the figures drawn."""
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

    def finish(self, summary: Mapping[str, Any], figures: list[Path]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Wandb:
    """Logs the manifest, each group's figures, the summary and the figures to Weights & Biases.

    Args:
        project: where the run appears.
        entity: whose project; None for the default of the login.
        mode: "online", "offline" (files under the run's directory, to be synchronised later), "disabled", or "auto":
            online where a login is configured, offline where none is. ``WANDB_MODE`` decides for "auto" where set.
    """

    def __init__(self, project: str = "spec_lab", entity: str | None = None, mode: Mode = "auto") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"tracker.mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
        self.project, self.entity, self.mode = project, entity, mode
        self._run: Any = None

    def start(self, name: str, manifest: Mapping[str, Any], out: Path) -> None:
        """See ``Tracker``."""
        import wandb

        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=f"{name} {out.name}",
                group=name,
                config=dict(manifest),
                dir=str(out),
                mode=self.resolved_mode(),
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),  # no sampling while timing
            )
        except wandb.errors.Error as error:
            raise OSError(f"Weights & Biases could not start a run ({error}); use tracker.mode=offline") from error

    def resolved_mode(self) -> Literal["online", "offline", "disabled"]:
        """The mode "auto" stands for here."""
        import wandb

        chosen = os.environ.get("WANDB_MODE", "auto") if self.mode == "auto" else self.mode
        if chosen == "auto":
            chosen = "online" if wandb.login(prompt=False, verify=False) else "offline"
        return chosen  # type: ignore[return-value]

    def group(self, number: int, figures: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log({"group": number, **figures})

    def finish(self, summary: Mapping[str, Any], figures: list[Path]) -> None:
        """See ``Tracker``."""
        import wandb

        self._run.summary.update(dict(summary))
        self._run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})

    def close(self) -> None:
        """See ``Tracker``."""
        if self._run is not None:
            self._run.finish()
            self._run = None
