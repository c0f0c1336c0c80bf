"""Measured step costs, kept between runs, so that the same command chooses the same tree.

Costs are kept in a folder, one JSON file for each set of conditions that they depend on. They are measurements, not
code: if a file is damaged or was not written by this module, the costs are measured again.
"""

from __future__ import annotations

import json
import logging
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spec_lab.core.files import read_json, write_json
from spec_lab.propose.step_costs import StepCosts

log = logging.getLogger(__name__)

MAX_AGE = timedelta(days=30)
"""Costs that are older are measured again."""

LARGEST = 1_000_000
"""Bytes of the largest file that is read."""

NOTICE, PATIENCE = 10.0, 600.0
"""Seconds of waiting for another process that measures: until it is reported, and until this one measures anyway."""


def now() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class CostCache:
    """A folder of measured step costs.

    Args:
        folder: of the cache; costs are in its ``step_costs``. None: nothing is kept.
        clock: returns the current time.
        notice: seconds of waiting for another process until that is reported.
        patience: seconds of waiting for another process until this one measures anyway.
    """

    folder: Path | None
    clock: Callable[[], datetime] = now
    notice: float = NOTICE
    patience: float = PATIENCE

    def costs(
        self,
        conditions: Mapping[str, Any],
        sizes: Sequence[int],
        measure: Callable[[], StepCosts],
        again: bool = False,
    ) -> StepCosts:
        """The costs under these conditions: from the cache, else measured and, if steady, kept.

        Processes of one machine measure one after the other, whatever their conditions, so that they do not disturb
        each other; those that waited for the same costs read what the first one kept. Nothing about the cache is an
        error: a folder that cannot be written, a damaged file or a lock that is never released is a warning.

        Args:
            conditions: everything that the costs depend on, as JSON.
            sizes: in rising order; costs may stop before the last.
            again: measure even if there are costs, unless another process has done so since this call.
        """
        conditions = json.loads(json.dumps(conditions))
        began = self.clock()
        oldest = began if again else began - MAX_AGE
        with suppress(ValueError):  # reported below
            if kept := self._read(conditions, sizes, oldest):
                return kept
        with self._alone() as writable:
            try:
                if kept := self._read(conditions, sizes, oldest):
                    return kept
            except ValueError as error:
                log.warning("the cached step costs %s are measured again: %s", self._file(conditions), error)
            costs = replace(measure(), measured=self.clock().isoformat(timespec="seconds"))
            if writable and costs.steady:
                self._write(conditions, costs)
            return costs

    def _file(self, conditions: Mapping[str, Any]) -> Path | None:
        """The file for these conditions."""
        if self.folder is None:
            return None
        digest = sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
        return self.folder / "step_costs" / f"{digest[:32]}.json"

    def _read(self, conditions: Mapping[str, Any], sizes: Sequence[int], oldest: datetime) -> StepCosts | None:
        """The costs that are kept; None where there are none, or only older ones."""
        file = self._file(conditions)
        try:
            value = None if file is None else read_json(file, LARGEST)
        except NotADirectoryError:
            return None
        except OSError as error:
            raise ValueError(f"it cannot be read ({type(error).__name__})") from error
        if value is None:
            return None
        costs = _parse(value, conditions, sizes)
        moment = datetime.fromisoformat(costs.measured)
        return costs if oldest <= moment <= self.clock() + timedelta(days=1) else None

    def _write(self, conditions: Mapping[str, Any], costs: StepCosts) -> None:
        """Keep costs."""
        file = self._file(conditions)
        if file is None:
            return
        kept = {name: value for name, value in asdict(costs).items() if name != "cached"}
        try:
            write_json(file, {"conditions": conditions, "costs": kept})
        except OSError as error:
            self._report(error)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Wait until no other process of this machine measures; yields whether the folder can be written."""
        lock: FileLock | None = None
        try:
            if self.folder is None:
                raise OSError("no home folder is known")
            folder = self.folder / "step_costs"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"measuring-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node())}.lock")
            try:
                lock.acquire(timeout=self.notice)
            except Timeout:
                log.warning("waiting while another process measures step costs (%s)", lock.lock_file)
                lock.acquire(timeout=self.patience)
            writable = True
        except Timeout:
            log.warning("%s is still locked after %.0f s: step costs are measured anyway", folder, self.patience)
            writable = True
        except (OSError, NotImplementedError) as error:
            self._report(error)
            writable = False
        try:
            yield writable
        finally:
            if lock is not None:
                lock.release()

    def _report(self, error: Exception) -> None:
        """Warn that costs cannot be kept."""
        log.warning(
            "measured step costs cannot be kept in %s (%s), so the next run measures again and may choose another "
            "tree: set SPEC_LAB_CACHE to a folder that can be written", self.folder, error,
        )  # fmt: skip


def _parse(value: Any, conditions: Mapping[str, Any], sizes: Sequence[int]) -> StepCosts:
    """Costs from what a file holds."""
    if not isinstance(value, dict) or not isinstance(value.get("costs"), dict):
        raise ValueError("it holds no step costs")
    if value.get("conditions") != conditions:
        raise ValueError("it is for other conditions")
    kept = value["costs"]
    try:
        seconds = {int(size): _number(took) for size, took in kept["seconds"].items()}
        spread = {int(size): _number(share, 0.0) for size, share in kept["spread"].items()}
        steps, threads, cores = (int(_number(kept[name], 1.0)) for name in ("steps", "threads", "cores"))
        load = None if kept["other_load"] is None else _number(kept["other_load"], 0.0)
        measured = datetime.fromisoformat(kept["measured"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"it is malformed ({type(error).__name__})") from error
    timed = list(sizes[: len(seconds)])
    if not timed or list(seconds) != timed or list(spread) != timed or measured.tzinfo is None:
        raise ValueError("it is malformed (sizes or date)")
    return StepCosts(seconds, spread, steps, threads, load, cores, kept["measured"], cached=True)


def _number(value: Any, minimum: float = 1e-9) -> float:
    """``value``, if it is a number from ``minimum`` to a million."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= 1e6:
        raise ValueError("not a number in range")
    return float(value)
