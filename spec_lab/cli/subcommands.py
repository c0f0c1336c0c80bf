"""The sub-commands: each prints to a console and returns an exit code; its docstring is its help."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from spec_lab.analysis import console as terminal
from spec_lab.cli import new_part
from spec_lab.cli.explain import terminal as explain
from spec_lab.cli.status import Status
from spec_lab.cli.sweep_tables import print_results, print_sweep
from spec_lab.core.files import replacing, write_text
from spec_lab.core.options import check_wandb_name
from spec_lab.core.terminal import visible
from spec_lab.results import run_names, run_state, sweep

if TYPE_CHECKING:
    import pandas as pd

LOG = logging.getLogger(__name__)

say = partial(terminal.say, wrap=False)


def refuse(error: object) -> int:
    """Print an error in one line; return the exit code."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        error = f"{error.filename}: {error.strerror}"
    print(f"spec_lab: {visible(' '.join(str(error).split()))}", file=sys.stderr)
    return 1


def _check_there(folders: Sequence[Path]) -> None:
    """Refuse folders that do not exist, before anything is imported that takes a while."""
    for folder in folders:
        if not folder.exists():
            beside = [each.name for each in folder.absolute().parent.glob("*") if each.is_dir()]
            near = get_close_matches(folder.name, beside, 1)
            meant = f"; did you mean {folder.parent / near[0]}?" if near else ""
            raise ValueError(f"{folder} does not exist: name the output directory of a run or sweep{meant}")


def _for_each(folders: Sequence[Path], what: Callable[[Path], int]) -> int:
    """Call ``what`` for each folder; print errors and continue with the next folder. Return the largest exit code."""
    code = 0
    for folder in folders:
        try:
            _check_there([folder])
            with sweep.reading(folder):
                code = max(code, what(folder))
        except (OSError, ValueError, run_state.Locked) as error:
            code = refuse(error)
    return code


def _unreadable(folder: Path) -> int:
    """Print the runs of a sweep whose files are not readable; return the exit code."""
    broken = [run.unreadable for run in sweep.runs(folder) if run.unreadable]
    return max((refuse(f"unreadable: {why}") for why in broken), default=0)


def _state(given: argparse.Namespace, console: Console) -> int:
    """Print the state of each run of a sweep: done, running, failed or pending."""
    with sweep.reading(given.folder):
        print_sweep(given.folder, console, every=True)
        return _unreadable(given.folder)


def _collect(given: argparse.Namespace, console: Console) -> int:
    """Write a sweep's figures as one tidy table: table.parquet and table.csv in its directory."""
    with sweep.reading(given.folder):
        table = sweep.collect(given.folder)
        code = _collect_into(given.folder, table, console)
        if given.latex or given.markdown:
            _publish(given, table, console)
        if given.verbose:
            print_results(given.folder, console, verbose=True)
        else:
            from spec_lab.analysis.metrics.sweeps import run_labels
            from spec_lab.analysis.run_tables import refuted

            for line in refuted(table, run_labels(sweep.runs(given.folder))):
                say(console, line)
        return code


def _publish(given: argparse.Namespace, table: pd.DataFrame, console: Console) -> None:
    """Write the main figures of a sweep as tables for papers and issues."""
    from spec_lab.analysis import markdown
    from spec_lab.analysis.latex import latex
    from spec_lab.analysis.run_tables import published_table

    keys = dict.fromkeys(run_names.key(override) for run in sweep.runs(given.folder) for override in run.overrides)
    published = published_table(table, list(keys))
    for name, file, text_of in (
        ("LaTeX", given.latex, latex),
        ("Markdown", given.markdown, lambda data: markdown.table(data) + "\n"),
    ):
        if file:
            _write_table(file, text_of(published))
            say(console, f"{name} table: {file}")


def _collect_into(folder: Path, table: pd.DataFrame, console: Console) -> int:
    code = _unreadable(folder)
    if table.empty:
        raise ValueError(f"no run of {folder} is done; spec-lab state {folder} prints the state of each")
    left = sum(run.state != "done" for run in sweep.runs(folder))
    file = folder / "table.parquet"
    with replacing(file) as stream:
        table.to_parquet(stream, index=False)
    write_text(file.with_suffix(".csv"), table.to_csv(index=False))
    runs = table["run"].nunique()
    missing = f"; {left} runs are not done and left out" * bool(left)
    say(console, f"{runs} runs, {len(table)} rows: {file} and .csv{missing}")
    return code


def _compare(given: argparse.Namespace, console: Console) -> int:
    """Compare runs or sweeps, and print which differences are significant."""
    _check_there(given.folders)
    with Status():
        LOG.info("Importing matplotlib")
        from spec_lab.analysis.compare import as_frame, compare
        from spec_lab.analysis.console import show
        from spec_lab.analysis.report import write_comparison
        from spec_lab.analysis.results.comparison import result

    if not 0 < given.level < 1:
        raise ValueError(f"--level must be between 0 and 1, not {given.level:g}")
    with sweep.reading(*given.folders):
        comparison = compare(given.folders, given.level)
        show(result(comparison), console, given.verbose)
    if given.csv:
        _write_table(given.csv, as_frame(comparison).to_csv(index=False))
        say(console, f"Table: {given.csv}")
    if given.html:
        say(console, f"Page: {write_comparison(comparison, given.html)}, and figures beside it")
    return max((refuse(f"unreadable: {why}") for why in comparison.unreadable), default=0)


def _project(given: argparse.Namespace, console: Console) -> int:
    """Project the speed-up of recorded designs to other hardware; write tables and heat maps."""
    _check_there(given.folders)
    from spec_lab.analysis import projection

    batches = None if given.batch is None else _numbers("--batch", given.batch)
    lengths = None if given.lengths is None else _numbers("--lengths", given.lengths)
    for option, value in (("context", given.context), ("prompt", given.prompt), ("output", given.output)):
        if value is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1 (got {value})")
    if (given.prompt is None) != (given.output is None):
        raise ValueError("--prompt and --output go together: the share of the prefill depends on both")
    if not 0 <= given.lookup_ms < float("inf"):
        raise ValueError(f"--lookup-ms must be at least 0 (got {given.lookup_ms:g})")
    prefill = None if given.prompt is None else projection.Prefill(given.prompt, given.output)
    overlap = None if given.overlap is None else projection.Overlap.parse(given.overlap)
    with sweep.reading(*given.folders):
        designs, idle = projection.recorded(given.folders, overlap)
    lookup = given.lookup_ms / 1e3
    options = {name: value for name, value in vars(given).items() if name in ROOFLINE and value is not None}
    context, used = given.context or 1024, []
    if given.costs is not None:
        if options:
            raise ValueError(f"--costs replaces the roofline: leave out --{next(iter(options))}")
        with sweep.reading(given.costs):
            tables = projection.measured_forwards(given.costs)
        axes = tables["target"].grid.axes
        batches = batches or [int(size) for size in axes["batch"] if size == int(size)]
        if given.context is None:
            context = min(max(context, ceil(min(axes["context"]))), int(max(axes["context"])))
        used = [f"Measured forwards: {given.costs}, at a context of {context} tokens."]
        with sweep.reading(given.costs):
            used += [line for line in [projection.verdict_of_costs(given.costs)] if line]
        label = given.costs.resolve().name if given.costs.is_dir() else given.costs.stem
        deployments = [projection.measured_deployment(designs, tables, label, lookup)]
    elif given.model is None:
        raise ValueError("--model is required: name the target's size, or give measured forwards with --costs PATH")
    else:
        names = [name.strip() for name in options.pop("hardware", "h100-sxm").split(",") if name.strip()]
        options |= {"context": context, "lookup": lookup, "apart": overlap is not None}
        deployments = projection.deployments_of(designs, names, **options)
    deployments = [replace(deployment, overlap=overlap) for deployment in deployments]
    batches = batches or [2**power for power in range(8)]
    cells = projection.project(designs, deployments, batches, context, lengths, prefill)
    even = projection.break_even(designs, deployments, max(batches), context, lengths, prefill)
    notes = [*used, *projection.notes(designs, deployments, idle)]
    projection.show(cells, even, notes, console, given.verbose)
    out = given.out or given.folders[0] / "projection"
    for file in projection.write(cells, even, out):
        say(console, str(file))
    return 0


ROOFLINE = ("hardware", "model", "draft", "dtype", "experts", "runtime")
"""Options of ``project`` that describe a roofline."""


def _numbers(option: str, text: str) -> list[int]:
    """Return whole numbers from 1 on that are written with commas, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,6}", part, re.ASCII) for part in parts):
        raise ValueError(f"{option} must be whole numbers from 1 on with commas, such as 1,2,4 (got {text})")
    return sorted({int(part) for part in parts})


def _write_table(file: Path, text: str) -> None:
    """Write a table to ``file``: a regular file is replaced atomically; /dev/stdout is possible."""
    if not file.exists() or file.is_file():
        return write_text(file, text)
    try:
        descriptor = os.open(file, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its reader
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "a pipe that no process reads: name a regular file", str(file)) from error
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _report(given: argparse.Namespace, console: Console) -> int:
    """Write report.html and figures (PNG, SVG) into the directory of a run of any task, or of a sweep."""

    def report(folder: Path) -> int:
        with Status():
            LOG.info("Importing matplotlib")
            from spec_lab.analysis.report import write

        say(console, f"{write(folder)}, and figures in the same folder")
        return 0 if run_state.is_run(folder) else _unreadable(folder)

    return _for_each(given.folders, report)


def _replay(given: argparse.Namespace, console: Console) -> int:
    """Evaluate verifiers, draft trees and draft temperatures on the distributions that a run has recorded."""
    _check_there([given.folder])
    from spec_lab.replay.designs import Options
    from spec_lab.replay.replay_tables import print_table, print_trace, replay, trace

    if given.folder.is_file():
        frame = trace(given.folder, given.format, given.verifiers)
        print_trace(frame, console)
        if given.csv:
            _write_table(given.csv, frame.to_csv(index=False))
            say(console, f"Table: {given.csv}")
        return 0
    with sweep.reading(given.folder):
        wanted = given.verifiers, given.shapes, given.temperatures, given.top_k, given.confidence, given.drawn
        frame = replay(given.folder, Options(*wanted), given.arms)
    print_table(frame, console)
    if given.csv:
        _write_table(given.csv, frame.to_csv(index=False))
        say(console, f"Table: {given.csv}")
    return 0


def _bounds(given: argparse.Namespace, console: Console) -> int:
    """Print how close verifiers come to the optimum on recorded draft trees, and where the other tokens are lost."""
    _check_there([given.folder])
    from spec_lab.replay.bounds import of_run, table
    from spec_lab.replay.replay_tables import print_bounds

    with sweep.reading(given.folder):
        bounds = of_run(given.folder, given.arms)
    print_bounds(bounds, console)
    if given.csv:
        _write_table(given.csv, table(bounds).to_csv(index=False))
        say(console, f"Table: {given.csv}")
    return 0


def _samples(given: argparse.Namespace, console: Console) -> int:
    """Write a run's answers to HumanEval or LiveCodeBench for their own evaluators; nothing is executed."""

    def write_answers(folder: Path) -> int:
        from spec_lab.analysis.samples import write_samples

        for file in write_samples(folder):
            say(console, str(file))
        return 0

    return _for_each(given.folders, write_answers)


def _track(given: argparse.Namespace, console: Console) -> int:
    """Upload runs to Weights & Biases from their files, in any state."""
    _check_owner(given)

    def upload(folder: Path) -> int:
        with Status():
            LOG.info("Importing the tracker of Weights & Biases")
            from spec_lab.analysis.tracking import track_all
        lines = track_all(folder, given.project, given.entity, given.mode)
        while True:
            with Status():
                line = next(lines, None)
            if line is None:
                return 0
            say(console, line)

    return _for_each(given.folders, upload)


def _check_owner(given: argparse.Namespace) -> None:
    """Check the names of project and entity, before anything is imported that takes a while."""
    check_wandb_name("--project", given.project)
    if given.entity is not None:
        check_wandb_name("--entity", given.entity)


def _dashboard(given: argparse.Namespace, console: Console) -> int:
    """Save a dashboard for runs on Weights & Biases; requires the extra 'dashboard' and a login."""
    _check_owner(given)
    from spec_lab.analysis.tracking.dashboard import save

    say(console, save(given.project, given.entity))
    return 0


def _convert(given: argparse.Namespace, console: Console) -> int:
    """Write a Llama-like checkpoint as GGUF (requires the extra 'llamacpp'), or a drafter's .pt file as safetensors."""
    source, is_gguf = Path(given.checkpoint), given.out.suffix == ".gguf"
    nothing = (
        f"{given.checkpoint} has safetensors, or no pickled weights: there is nothing to convert, set "
        f"proposer.path={given.checkpoint}; to write a model as GGUF, let the name of OUT end in .gguf"
    )
    if not is_gguf and any(source.glob("model.safetensors*")):
        raise ValueError(nothing)
    from spec_lab.drafters.pickled import convert_pickled, fetched_pickles, pickled_files
    from spec_lab.models.checkpoint import PICKLES

    if not source.exists() and not is_gguf and source.suffix not in PICKLES:  # a hub name
        source = fetched_pickles(given.checkpoint, given.revision)
    whole = source.is_dir() and is_gguf  # a model, whatever its weights are saved as
    if files := [] if whole else pickled_files(source):
        if given.dtype is not None or given.force:
            raise ValueError("--dtype and --force are for GGUF files: a drafter keeps its data types, in a new folder")
        drafter = convert_pickled(files, given.out)
        sizes = f"{drafter.size / 2**20:.1f} MiB, {drafter.tensors} tensors"
        say(console, f"{given.out}: {drafter.layout}, {sizes}; SHA-256 of the source {drafter.sha256}")
        return 0
    if source.is_dir() and not is_gguf:
        raise ValueError(nothing)
    from spec_lab.models.gguf_export import convert

    made = convert(given.checkpoint, given.out, given.dtype, given.force, given.revision)
    sizes = f"{made.size / 2**20:.1f} MiB, {made.tensors} tensors, {made.parameters / 1e6:.1f} M parameters"
    say(console, f"{given.out}: {sizes}, {made.dtype}, architecture {made.architecture}; {made.tokenizer}")
    return 0


def _index(given: argparse.Namespace, console: Console) -> int:
    """Write a store of text, in which rest, suffix and sam look up what followed the last tokens."""
    from spec_lab.core.progress import Progress
    from spec_lab.models.loading import describe, read_texts
    from spec_lab.propose.suffix_build import build
    from spec_lab.text.prompts import texts

    tokenizer, _ = read_texts(given.tokenizer, describe(given.tokenizer))
    with Progress(desc=given.out.name, unit="text") as bar:

        def counted() -> Iterator[str]:
            for text in texts(given.corpus):
                yield text
                bar.update()
            bar.set_postfix_str("sorting their positions")

        made = build(counted(), tokenizer, given.out)
    size = f"{made.size / 2**20:.1f} MiB"
    say(console, f"{given.out}: {made.tokens} tokens of {made.documents} documents, {size}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "state": _state,
    "collect": _collect,
    "compare": _compare,
    "project": _project,
    "report": _report,
    "replay": _replay,
    "bounds": _bounds,
    "samples": _samples,
    "track": _track,
    "dashboard": _dashboard,
    "convert": _convert,
    "index": _index,
    "explain": explain.run,
    "new": new_part.run,
}
