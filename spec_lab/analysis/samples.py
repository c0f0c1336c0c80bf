"""A run's answers as files for the official evaluators of code, which execute it; this package never does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.core.files import own_folder, write_text
from spec_lab.results.manifest import begun
from spec_lab.text.checkers import completion, final, last_block


def write_samples(folder: Path) -> list[Path]:
    """Write ``samples/ARM.jsonl`` or ``.json`` of each arm of a run; return the files.

    Of HumanEval a line holds ``task_id`` and ``completion``, as its ``evaluate_functional_correctness`` reads them; of
    LiveCodeBench the file is a list of ``question_id`` and ``code_list``, as its ``custom_evaluator`` reads them.
    Groups that broke are left out.

    Raises:
        ValueError: there is no run, none of its prompts is of these datasets, or its files are not readable.
        OSError: a file cannot be written.
    """
    facts = begun(folder)
    if facts is None:
        raise ValueError(f"{folder} holds no run (no manifest.json)")
    requests = metrics.load(folder).requests
    unbroken = ~requests["group"].isin(metrics.broken_groups(requests))
    requests = requests[requests["source"].isin(FORMATS) & requests["kept"] & unbroken]
    if requests.empty:
        raise ValueError(f"{folder} holds no answers to {' or '.join(FORMATS)}: samples are of these datasets only")
    completes = (facts["config"].get("prompts") or {}).get("template") == "none"
    several = requests["source"].nunique() > 1
    files: dict[Path, tuple[str, str]] = {}
    for (source, arm), rows in requests.groupby(["source", "arm"]):
        name = re.sub(r"[^\w.-]", "_", f"{source}-{arm}" if several else str(arm))
        ending, text = FORMATS[source](rows, completes)
        file = folder / "samples" / f"{name}.{ending}"
        if file in files:
            raise ValueError(
                f"the arms '{files[file][0]}' and '{arm}' would both be written to {file.name}: rename one of them, "
                "and run again"
            )
        files[file] = arm, text
    own_folder(folder / "samples")
    for file, (_, text) in files.items():
        write_text(file, text)
    return list(files)


def _humaneval(rows: pd.DataFrame, completes: bool) -> tuple[str, str]:
    lines = []
    for row in rows.to_dict("records"):
        text = final(row["text"], row["prompt"])
        block = None if completes else last_block(text)  # a whole function: it replaces the one that the prompt began
        lines.append({"task_id": row["name"], "completion": completion(text) if block is None else f"\n{block}"})
    return "jsonl", "".join(json.dumps(line) + "\n" for line in lines)


def _livecodebench(rows: pd.DataFrame, completes: bool) -> tuple[str, str]:
    codes: dict[str, list[str]] = {}
    for row in rows.to_dict("records"):
        codes.setdefault(row["name"], []).append(last_block(final(row["text"], row["prompt"])) or "")
    return "json", json.dumps([{"question_id": name, "code_list": each} for name, each in codes.items()]) + "\n"


FORMATS: Mapping[str, Any] = {"HumanEval": _humaneval, "LiveCodeBench": _livecodebench}
"""By the ``source`` of the prompts (``text.datasets``): return the ending of a file's name, and its text. Arguments are
the rows, and whether the model completed texts (``prompts.template=none``).
"""
