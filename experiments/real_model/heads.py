"""Write the README's table of trained heads: python -m experiments.real_model.heads RUN ...

A ``RUN`` is the output_dir of ``spec-lab train`` (``task=train``), which has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.plots import fill, markdown
from spec_lab.analysis.results.training import LINE, SUMMARY
from spec_lab.results.result import ended_run

HERE = Path(__file__).parent


def row_of(run: Path) -> list[str]:
    """Return the table's row of a training.

    Raises:
        ValueError: no training, or one that has not ended.
    """
    manifest, summary = ended_run(run, SUMMARY | {"learning": [LINE]})
    task: dict[str, Any] = manifest["config"]["task"]
    seconds = summary["learning"][-1]["seconds"]
    machine, device = manifest["machine"], str(manifest.get("device", "cpu"))
    where = f"{machine['processor']}, {manifest['threads']} of {machine.get('cores')} cores"
    where = where if device == "cpu" else ", ".join(machine["gpus"])
    accepted = " ".join(f"{share:.2f}" for share in summary["accepted"])
    return [
        summary["drafter"],
        f"{summary['parameters'] / 1e6:.1f}",
        f"{summary['texts']} x {task['passes']:g}",
        f"{summary['steps']}",
        f"{seconds / 3600:.2f}",
        where,
        f"{accepted} (T = {summary['temperature']:g})",
        f"{summary['estimated_length']:.2f}",
        f"{summary['measured_length']:.2f}",
        f"`{summary['sha256']}`",
    ]


def table(runs: Sequence[Path]) -> str:
    """Return the table in Markdown."""
    head = ["head", "M parameters", "texts x passes", "steps", "hours of gradients", "on"]
    head += ["accepted by position, held out", "accepted length, estimated", "measured", "SHA-256 of the weights"]
    return markdown([head, *(row_of(run) for run in runs)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output_dir of each training")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the README is")
    chosen = parser.parse_args(arguments)
    try:
        text = table(chosen.runs)
    except ValueError as error:
        parser.error(str(error))
    fill(chosen.folder / "README.md", text, "heads")
    print(text)


if __name__ == "__main__":
    main()
