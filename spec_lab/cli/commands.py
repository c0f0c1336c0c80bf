"""Commands: ``spec-lab state``, ``collect``, ``compare``, ``report``, ``replay``, ``bounds``, ``project``, ``samples``,
``track`` read runs; ``convert`` weights; ``index`` text; ``explain`` explains options.

``spec-lab train NAME`` is short for an experiment (``experiment``).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from spec_lab.cli.build import conf
from spec_lab.cli.explain import terminal as explain
from spec_lab.cli.sweep_tables import print_results as print_results
from spec_lab.cli.sweep_tables import print_sweep as print_sweep
from spec_lab.cli.sweep_tables import say
from spec_lab.core.files import replacing, write_text
from spec_lab.core.terminal import visible
from spec_lab.results import sweep


def command(arguments: Sequence[str], console: Console | None = None) -> int:
    """Run a sub-command; return the exit code. Errors are printed in one line."""
    console = console or Console(markup=False)
    if arguments[0] not in COMMANDS:
        known = ", ".join((*COMMANDS, TRAIN))
        print(
            f"spec_lab: unknown command {arguments[0]}; commands are {known}; "
            "+experiment=NAME runs an experiment, NAME=VALUE sets an option",
            file=sys.stderr,
        )
        return 2
    given = parser()[0].parse_args(arguments)
    try:
        return COMMANDS[given.command](given, console)
    except (OSError, ValueError, sweep.Locked) as error:
        return _refuse(error)


def complete(line: str) -> tuple[list[str], bool]:
    """Complete a command line.

    Args:
        line: the typed line, beginning with the program's name.

    Returns:
        The completions of the last word: sub-commands for the first word, options and directories after a sub-command;
        and whether Hydra's completions are to be added.
    """
    first, *others = [*line.split()[1:], *([""] if line[-1:].isspace() or len(line.split()) < 2 else [])]
    if not others:
        return [name for name in (*COMMANDS, TRAIN) if name.startswith(first)], True
    if first == TRAIN:
        return [name for name in trainings() if name.startswith(others[-1])], False
    if first not in COMMANDS:
        return [], True
    if others[-1].startswith("-"):
        known = re.findall(r"--[\w-]+", parser()[1][first].format_usage())
        return [name for name in known if name.startswith(others[-1])], False
    if first == "explain":
        return explain.complete(others[-1]), False
    folder, _, begins = others[-1].rpartition("/")
    above = f"{folder}/" if folder or others[-1].startswith("/") else ""
    found = sorted(one.name for one in Path(above or ".").glob("*/") if one.name.startswith(begins))
    return [f"{above}{name}/" for name in found if name[0] != "." or begins], False


TRAIN, PREFIX = "train", "train_"


def trainings() -> list[str]:
    """Return the names of the experiments that train a drafter, without ``PREFIX``."""
    return sorted(file.stem.removeprefix(PREFIX) for file in Path(conf(), "experiment").glob(f"{PREFIX}*.yaml"))


def experiment(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that ``train NAME OVERRIDES...`` is short for.

    Raises:
        SystemExit: ``--help`` is printed; there is no name.
    """
    given = parser()[1][TRAIN].parse_args(arguments[1:])
    return [f"+experiment={PREFIX}{given.name}", *given.overrides]


def training_line(line: str) -> str:
    """Return a command line with the experiment in place of ``train NAME``, for completions of its options."""
    return re.sub(rf"^(\s*\S+\s+){TRAIN}\s+(\w+)(?=\s)", rf"\1+experiment={PREFIX}\2", line)


def _training(name: str) -> str:
    """Check the name of an experiment that trains."""
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name} is not a name: choose among {', '.join(trainings())}")
    return name


def _refuse(error: object) -> int:
    """Print an error in one line; return the exit code."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        error = f"{error.filename}: {error.strerror}"
    print(f"spec_lab: {visible(' '.join(str(error).split()))}", file=sys.stderr)
    return 1


def _each(folders: Sequence[Path], what: Callable[[Path], int]) -> int:
    """Call ``what`` for each folder; print errors and continue with the next folder. Return the largest exit code."""
    code = 0
    for folder in folders:
        try:
            with sweep.reading(folder):
                code = max(code, what(folder))
        except (OSError, ValueError, sweep.Locked) as error:
            code = _refuse(error)
    return code


def _unreadable(folder: Path) -> int:
    """Print the runs of a sweep whose files are not readable; return the exit code."""
    broken = [one.unreadable for one in sweep.runs(folder) if one.unreadable]
    return max((_refuse(f"unreadable: {one}") for one in broken), default=0)


def parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of the sub-commands by name."""
    top = argparse.ArgumentParser(prog="spec-lab", description=__doc__)
    which = top.add_subparsers(dest="command", required=True)

    def add(name: str) -> argparse.ArgumentParser:
        what = (COMMANDS[name].__doc__ or "").strip()
        return which.add_parser(name, help=what, description=what)

    collect = add("collect")
    for one in (add("state"), collect):
        one.add_argument("folder", type=Path, metavar="SWEEP", help="a sweep's directory")
    compare = add("compare")
    for one, what in ((collect, "print the figures as well, with all columns"), (compare, "print further tables")):
        one.add_argument("-v", "--verbose", action="store_true", help=what)
    collect.add_argument("--latex", type=Path, metavar="FILE", help="also write the main figures as a LaTeX table")
    compare.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="runs or sweeps; the first is the reference"
    )
    compare.add_argument("--level", type=float, default=0.95, help="confidence of all intervals together (0.95)")
    compare.add_argument("--csv", type=Path, metavar="FILE", help="also write the comparison to a CSV file")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page with filters and figures")
    _add_project(add("project"))
    add("report").add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs of any task, or sweeps")
    replay = add("replay")
    what = "a run with record=replay; or a file: a trace of another system (--format)"
    replay.add_argument("folder", type=Path, metavar="DIR", help=what)
    own = replay.add_argument
    own("--arms", nargs="+", default=[], metavar="ARM", help="arms of the run (all)")
    own("--verifiers", nargs="+", default=[], metavar="NAME", help="such as token lenient:lenience=0.5 (all that fit)")
    more = "all, depth=3,children=2,nodes=8, 3x2x1, or shares: 0.5*1x1+0.5*3x2x1 (all limits of depth and children)"
    own("--shapes", nargs="+", default=[], metavar="SHAPE", help=more)
    own("--temperatures", nargs="+", type=float, default=[], metavar="T", help="of the drafter (as recorded)")
    own("--top-k", nargs="+", type=int, default=[], metavar="K", help="tokens that the drafter draws from (all)")
    own("--confidence", nargs="+", type=float, default=[], metavar="C", help="below which a draft ends (as recorded)")
    own("--drawn", nargs="+", choices=("iid", "point"), default=[], help="how trees are drawn (as recorded)")
    formats = "of a file: jsonl (docs/replay.md), vllm (the text of /metrics), sglang (JSON lines of responses)"
    own("--format", choices=("jsonl", "vllm", "sglang"), default="jsonl", help=formats)
    own("--csv", type=Path, metavar="FILE", help="also write all designs to a CSV file")
    bounds = add("bounds")
    bounds.add_argument("folder", type=Path, metavar="DIR", help="a run with record=replay")
    bounds.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="arms of the run (all)")
    bounds.add_argument("--csv", type=Path, metavar="FILE", help="also write all numbers to a CSV file")
    add("samples").add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs")
    track = add("track")
    track.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs or sweeps")
    dashboard = add("dashboard")
    for one, default in ((track, None), (dashboard, ...)):
        one.add_argument("--project", default="spec_lab", help="project on Weights & Biases (spec_lab)")
        one.add_argument("--entity", required=default is ..., help="user or team that owns the project")
    track.add_argument(
        "--mode", choices=("auto", "online", "offline"), default="auto", help="auto: online with a login, else offline"
    )
    convert = add("convert")
    convert.add_argument(
        "checkpoint",
        metavar="SOURCE",
        help="a folder with safetensors, or a hub name; or a drafter's .pt, .bin or .pth file, or a folder with one",
    )
    convert.add_argument("out", type=Path, metavar="OUT", help="the GGUF file to write; or the folder of the drafter")
    convert.add_argument("--dtype", help="of a GGUF file's matrices: f32, bf16, f16, q8_0 or q4_0 (the checkpoint's)")
    convert.add_argument("--force", action="store_true", help="overwrite an existing GGUF file")
    index = add("index")
    index.add_argument("corpus", metavar="CORPUS", help='a JSONL file with lines {"text": "..."}')
    index.add_argument("out", type=Path, metavar="OUT", help="the folder of the store, for proposer.store=OUT")
    index.add_argument("--tokenizer", required=True, metavar="TARGET", help="the target's folder or hub name")
    explain.add_arguments(add("explain"))
    train = which.add_parser(
        TRAIN,
        usage=f"spec-lab {TRAIN} NAME [OVERRIDE ...]",
        description=f"Train a drafter for a target: short for python -m spec_lab +experiment={PREFIX}NAME OVERRIDE...",
    )
    names = ", ".join(trainings())
    train.add_argument("name", type=_training, metavar="NAME", help=f"one of {names}; NAME --help prints its options")
    more = "options, such as target.path=DIR output_dir=DIR"
    train.add_argument("overrides", nargs=argparse.REMAINDER, metavar="OVERRIDE", help=more)
    return top, which.choices


def _add_project(project: argparse.ArgumentParser) -> None:
    """Add the options of ``project``."""
    add = project.add_argument
    add("folders", type=Path, nargs="+", metavar="DIR", help="runs or sweeps, whose acceptance is read")
    add("--hardware", metavar="NAMES", help="devices, with commas, or a CSV file (h100-sxm)")
    add("--model", help="the target's size: a name, or the folder of a checkpoint; required without --costs")
    add("--draft", help="the draft model's size, likewise; required by proposers that draft with a model")
    add("--dtype", help="of weights: bf16, fp16, fp32, fp8, int8 or int4 (bf16)")
    add("--runtime", help="what adds to the roofline: graphs, eager or nominal (graphs)")
    add("--batch", metavar="SIZES", default="1,2,4,8,16,32,64,128", help="batch sizes, with commas")
    add("--context", type=int, default=1024, help="tokens of each sequence (1024)")
    add("--lengths", help="draft lengths, with commas (all that were recorded)")
    add("--prompt", type=int, help="tokens of a prompt: speed-ups include the prefill; with --output")
    add("--output", type=int, help="tokens of an output; with --prompt")
    add("--lookup-ms", type=float, default=0.0, help="milliseconds of an n-gram or suffix lookup in each step (0)")
    add("--costs", type=Path, metavar="FILE", help="a CSV file of measured forwards in place of the roofline")
    add("--out", type=Path, metavar="DIR", help="where tables and figures go (the first DIR's folder 'projection')")
    add("-v", "--verbose", action="store_true", help="print every cell")


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
        if given.latex:
            from spec_lab.analysis.latex import latex_table

            keys = dict.fromkeys(sweep.key(one) for run in sweep.runs(given.folder) for one in run.overrides)
            _write_table(given.latex, latex_table(table, list(keys)))
            say(console, f"LaTeX table: {given.latex}")
        if given.verbose:
            print_results(given.folder, console, verbose=True)
        return code


def _collect_into(folder: Path, table: pd.DataFrame, console: Console) -> int:
    code = _unreadable(folder)
    if table.empty:
        raise ValueError(f"no run of {folder} is done; spec-lab state {folder} prints the state of each")
    left = sum(one.state != "done" for one in sweep.runs(folder))
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
    from spec_lab.analysis.compare import as_frame, compare, show
    from spec_lab.analysis.report import write_comparison

    if not 0 < given.level < 1:
        raise ValueError(f"--level must be between 0 and 1, not {given.level:g}")
    with sweep.reading(*given.folders):
        found = compare(given.folders, given.level)
        show(found, console, given.verbose)
    if given.csv:
        _write_table(given.csv, as_frame(found).to_csv(index=False))
        say(console, f"Table: {given.csv}")
    if given.html:
        say(console, f"Page: {write_comparison(found, given.html)}, and figures beside it")
    return max((_refuse(f"unreadable: {one}") for one in found.unreadable), default=0)


def _project(given: argparse.Namespace, console: Console) -> int:
    """Project the speed-up of recorded designs to other hardware; write tables and heat maps."""
    from spec_lab.analysis import projection

    batches = _numbers("--batch", given.batch)
    lengths = None if given.lengths is None else _numbers("--lengths", given.lengths)
    for option, value in (("context", given.context), ("prompt", given.prompt), ("output", given.output)):
        if value is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1 (got {value})")
    if (given.prompt is None) != (given.output is None):
        raise ValueError("--prompt and --output go together: the share of the prefill depends on both")
    if not 0 <= given.lookup_ms < float("inf"):
        raise ValueError(f"--lookup-ms must be at least 0 (got {given.lookup_ms:g})")
    prefill = None if given.prompt is None else projection.Prefill(given.prompt, given.output)
    with sweep.reading(*given.folders):
        designs, idle = projection.recorded(given.folders)
    lookup = given.lookup_ms / 1e3
    options = {name: value for name, value in vars(given).items() if name in ROOFLINE and value is not None}
    if given.costs is not None:
        if options:
            raise ValueError(f"--costs replaces the roofline: leave out --{next(iter(options))}")
        deployments = [projection.measured_deployment(designs, given.costs, given.costs.stem, lookup)]
    elif given.model is None:
        raise ValueError("--model is required: name the target's size, or give measured forwards with --costs FILE")
    else:
        names = [one.strip() for one in options.pop("hardware", "h100-sxm").split(",") if one.strip()]
        deployments = projection.deployments_of(designs, names, context=given.context, lookup=lookup, **options)
    cells = projection.project(designs, deployments, batches, given.context, lengths, prefill)
    even = projection.break_even(designs, deployments, max(batches), given.context, lengths, prefill)
    projection.show(cells, even, projection.notes(designs, deployments, idle), console, given.verbose)
    out = given.out or given.folders[0] / "projection"
    for file in projection.write(cells, even, out):
        say(console, str(file))
    return 0


ROOFLINE = ("hardware", "model", "draft", "dtype", "runtime")
"""Options of ``project`` that describe a roofline."""


def _numbers(option: str, text: str) -> list[int]:
    """Return whole numbers from 1 on that are written with commas, ascending.

    Raises:
        ValueError: something else is written; names the option.
    """
    parts = [one.strip() for one in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,6}", one, re.ASCII) for one in parts):
        raise ValueError(f"{option} must be whole numbers from 1 on with commas, such as 1,2,4 (got {text})")
    return sorted({int(one) for one in parts})


def _write_table(file: Path, text: str) -> None:
    """Write a table to ``file``: a regular file is replaced atomically; /dev/stdout is possible.

    Raises:
        OSError: it cannot be written; names the file.
    """
    if file.exists() and not file.is_file():
        file.write_text(text)
    else:
        write_text(file, text)


def _report(given: argparse.Namespace, console: Console) -> int:
    """Write report.html and figures (PNG, SVG) into the directory of a run of any task, or of a sweep."""
    from spec_lab.analysis.report import write

    def one(folder: Path) -> int:
        say(console, f"{write(folder)}, and figures in the same folder")
        return 0 if sweep.is_run(folder) else _unreadable(folder)

    return _each(given.folders, one)


def _replay(given: argparse.Namespace, console: Console) -> int:
    """Evaluate verifiers, draft trees and draft temperatures on the distributions that a run has recorded."""
    from spec_lab.replay.designs import Options
    from spec_lab.replay.show import print_table, print_trace, replay, trace

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
    from spec_lab.replay.bounds import of_run, table
    from spec_lab.replay.show import print_bounds

    with sweep.reading(given.folder):
        found = of_run(given.folder, given.arms)
    print_bounds(found, console)
    if given.csv:
        _write_table(given.csv, table(found).to_csv(index=False))
        say(console, f"Table: {given.csv}")
    return 0


def _samples(given: argparse.Namespace, console: Console) -> int:
    """Write a run's answers to HumanEval or LiveCodeBench for their own evaluators; nothing is executed."""
    from spec_lab.analysis.samples import write_samples

    def one(folder: Path) -> int:
        for file in write_samples(folder):
            say(console, str(file))
        return 0

    return _each(given.folders, one)


def _track(given: argparse.Namespace, console: Console) -> int:
    """Upload runs to Weights & Biases from their files, in any state."""
    from spec_lab.analysis.tracking import track_all

    _check_owner(given)

    def one(folder: Path) -> int:
        for line in track_all(folder, given.project, given.entity, given.mode):
            say(console, line)
        return 0

    return _each(given.folders, one)


def _check_owner(given: argparse.Namespace) -> None:
    """Check the names of project and entity."""
    from spec_lab.analysis.tracking.client import check_name

    check_name("--project", given.project)
    if given.entity is not None:
        check_name("--entity", given.entity)


def _dashboard(given: argparse.Namespace, console: Console) -> int:
    """Save a dashboard for runs on Weights & Biases; requires the extra 'dashboard' and a login."""
    from spec_lab.analysis.tracking.dashboard import save

    _check_owner(given)
    say(console, save(given.project, given.entity))
    return 0


def _convert(given: argparse.Namespace, console: Console) -> int:
    """Write a Llama-like checkpoint as GGUF (requires the extra 'llamacpp'), or a drafter's .pt file as safetensors."""
    from spec_lab.models.pickled import convert_pickled, pickled_files

    source = Path(given.checkpoint)
    whole = source.is_dir() and given.out.suffix == ".gguf"  # a model, whatever its weights are saved as
    if files := [] if whole else pickled_files(source):
        if given.dtype is not None or given.force:
            raise ValueError("--dtype and --force are for GGUF files: a drafter keeps its data types, in a new folder")
        drafter = convert_pickled(files, given.out)
        sizes = f"{drafter.size / 2**20:.1f} MiB, {drafter.tensors} tensors"
        say(console, f"{given.out}: {drafter.layout}, {sizes}; SHA-256 of the source {drafter.sha256}")
        return 0
    from spec_lab.models.gguf_export import convert

    made = convert(given.checkpoint, given.out, given.dtype, given.force)
    sizes = f"{made.size / 2**20:.1f} MiB, {made.tensors} tensors, {made.parameters / 1e6:.1f} M parameters"
    say(console, f"{given.out}: {sizes}, {made.dtype}, architecture {made.architecture}; {made.tokenizer}")
    return 0


def _index(given: argparse.Namespace, console: Console) -> int:
    """Write a store of text, in which rest, suffix and sam look up what followed the last tokens."""
    from spec_lab.models.loading import describe, read_texts
    from spec_lab.propose.suffix_build import build
    from spec_lab.text.prompts import texts

    tokenizer, _ = read_texts(given.tokenizer, describe(given.tokenizer))
    made = build(texts(given.corpus), tokenizer, given.out)
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
}
