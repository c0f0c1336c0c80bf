"""The tests with the marker ``cuda`` that belong to the short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.gpu.check.part import Part, run

ROOT = Path(__file__).resolve().parents[3]


class Outcomes:
    """Reports the outcome of each test to the part. A plugin of pytest."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep each test's call, and what skipped it or failed before or after it."""
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.passed else report.longreprtext.strip().splitlines()[-1]
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": report.duration, "error": why[:400]}
            self.part.keep("tests", self.tests)

    def count(self, outcome: str) -> int:
        """Return the number of tests that had this outcome."""
        return sum(test["outcome"] == outcome for test in self.tests.values())


def measure(part: Part) -> None:
    """Run them in this process. Without a GPU they are collected and skipped."""
    files = sorted(
        str(file) for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in file.read_text("utf-8")
    )
    part.keep("files", [str(Path(file).relative_to(ROOT)) for file in files])
    outcomes = Outcomes(part)
    options = ["-q", "-m", "cuda and not nightly", "-o", "addopts=", "-p", "no:cacheprovider", "--strict-markers"]
    code = pytest.main([*options, "--import-mode=importlib", "--rootdir", str(ROOT), *files], plugins=[outcomes])
    counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    part.keep("counts", counts)
    part.say(", ".join(f"{count} {name}" for name, count in counts.items()))
    for name, test in outcomes.tests.items():
        if test["outcome"] == "failed":
            part.say(f"{name}: {test['error']}")
    if counts["failed"] or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{counts['failed']} of {len(outcomes.tests)} tests failed (pytest's exit code {int(code)})")


if __name__ == "__main__":
    run(measure)
