"""Run any task: claim the output directory, track the run, handle Ctrl-C and errors, write the summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spec_lab.analysis.console import show
from spec_lab.analysis.metrics import SCHEMA_VERSION
from spec_lab.core.faults import PartError
from spec_lab.core.files import remove_abandoned, write_text
from spec_lab.results.manifest import JUDGED, claim, finite, manifest, unclaim, write_json
from spec_lab.results.result import Result
from spec_lab.results.run_state import INTERRUPTED
from spec_lab.results.table_parts import TableParts
from spec_lab.results.writer import Tables
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.prompts import digest


@dataclass(frozen=True)
class Done:
    """The results of a task.

    Args:
        summary: the contents of its summary file, without ``schema_version``.
        result: reads the result in the run's directory, once the summary is written; None where nothing is shown.
        tables: the run's rows, for the tracker; None for a task with other tables.
        code: the exit code.
        drawn: names of the figures that are drawn, which may be none; None for all.
    """

    summary: Mapping[str, Any]
    result: Callable[[Path], Result] | None
    tables: Tables | None = None
    code: int = 0
    drawn: Sequence[str] | None = None


@dataclass(frozen=True)
class Task:
    """A task: its work, and what is needed around it.

    Args:
        work: does the work in the claimed directory; called with the contents of its manifest.
        left: returns the number of finished units of work on disk and a sentence that states it; called after Ctrl-C
            and when a part has failed.
        parts: the tables of rows, gathered after Ctrl-C; the same command resumes from them. None for a task without
            such tables.
        more: further entries of the manifest.
        summary: name of the summary file.
        leaves: names the files in the directory, for the last printed line.
        resumes: whether the same command resumes the task although it has no ``parts``.
    """

    lab: Lab
    settings: Settings
    config: Mapping[str, Any]
    arms: Iterable[str]
    work: Callable[[dict[str, Any]], Done]
    left: Callable[[], tuple[int, str]]
    parts: TableParts | None = None
    more: Mapping[str, Any] | None = None
    summary: str = "summary.json"
    leaves: str = "Rows, summary, manifest and figures"
    resumes: bool = False

    def run(self, console: Console) -> int:
        """Do the work and return the exit code: the task's own, or 130 after Ctrl-C.

        Raises:
            ValueError: the directory holds another run, or an option or a part is invalid.
            PartError: a proposer, verifier or constraint of another package raised an error; the message states how
                many units of work are on disk.
            OSError: the directory cannot be written.
        """
        lab, out = self.lab, self.settings.output_dir
        made = lab.weights(), digest(lab.prompts), list(self.arms), lab.facts(), lab.parts(), lab.target.cache
        entries = manifest(self.config, self.settings.seed, *made) | {"sampling": asdict(lab.sampling)}
        entries |= {"target": lab.target.facts, "device": str(lab.target.lm.device)}
        if (chat := lab.chat_facts()) is not None:
            entries["chat"] = chat
        entries |= dict(self.more or {})
        facts = claim(out, entries | {"config_sha256": self.settings.config_sha256}, self.settings.anew)
        remove_abandoned(out / "parts")
        before = lab.target.lm.forwards
        resumes = self.resumes or self.parts is not None
        resume = f"same command with output_dir={self.config.get('output_dir', out)}"
        try:
            lab.tracker.start(facts, out)
            done = self.work(facts)
            summary = finite({"schema_version": SCHEMA_VERSION, **done.summary})
            write_json(out / self.summary, summary)
            if "verdict" in summary:
                facts |= {name: summary[name] for name in JUDGED if name in summary}
                write_json(out / "manifest.json", facts)
            result = done.result and done.result(out)
            if result:
                write_text(out / "summary.md", _page(result, facts, self.settings.given))
            if lab.metrics:
                lab.tracker.metrics({arm: figures["metrics"] for arm, figures in summary["arms"].items()})
            lab.tracker.finish(summary, _draw(result, out / "figures", done.drawn) if result else [], done.tables)
        except KeyboardInterrupt:
            if self.parts is not None:
                self.parts.gather()
            how = f"; run the {resume} to resume." if resumes else "."
            print(f"\nInterrupted: {self.left()[1]}{how}", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            unclaim(out, entries, error, decoded=lab.target.lm.forwards > before)
            if isinstance(error, PartError) and resumes:
                count, on_disk = self.left()
                if count:
                    anew = "retry=true" if self.settings.overrides is not None else "overwrite=true"
                    raise PartError(
                        f"{error}; {on_disk}, and the {resume} resumes there; once the part is changed, {anew} begins "
                        "anew"
                    ) from error
            raise
        finally:
            lab.tracker.close()
        if result:
            show(result, console, self.settings.verbose)
        console.print(f"{self.leaves}: {out}", soft_wrap=True, highlight=False)
        return done.code


def _page(result: Result, facts: Mapping[str, Any], given: Sequence[str]) -> str:
    """Return ``summary.md``."""
    from spec_lab.analysis import markdown
    from spec_lab.analysis.report.facts import facts as shown

    return markdown.document(result, shown(facts, result.constraint, **result.facts), given)


def _draw(result: Result, folder: Path, names: Sequence[str] | None) -> list[Path]:
    if names is not None and not names:
        return []
    from spec_lab.analysis import figures

    return figures.save(result.draw(names), folder, ("png",))
