"""Commands: ``spec-lab state``, ``collect``, ``compare``, ``report``, ``replay``, ``bounds``, ``project``, ``samples``,
``track`` read runs; ``convert`` weights; ``index`` text; ``explain`` explains options; ``new`` begins a part.

``spec-lab train NAME``, ``check``, ``check-drafter`` and ``recommend`` are short for runs (``SHORT``).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from spec_lab.cli import new_part
from spec_lab.cli.bundled import choices
from spec_lab.cli.explain import terminal as explain
from spec_lab.cli.subcommands import COMMANDS, refuse
from spec_lab.core.terminal import visible
from spec_lab.results import run_state


def command(arguments: Sequence[str], console: Console | None = None) -> int:
    """Run a sub-command; return the exit code. Errors are printed in one line."""
    console = console or Console(markup=False)
    if arguments[0] not in COMMANDS:
        print(f"spec_lab: {visible(unknown(arguments))}", file=sys.stderr)
        return 2
    given = parser()[0].parse_args(arguments)
    try:
        return COMMANDS[given.command](given, console)
    except (OSError, ValueError, run_state.Locked) as error:
        return refuse(error)


def unknown(arguments: Sequence[str]) -> str:
    """Return that there is no such command, and what was probably meant."""
    name, *others = arguments
    if others and others[0].startswith("="):
        value = others[0].removeprefix("=") or "".join(others[1:2])
        return f"{name} is no command: write {name}={value} without spaces"
    known = (*COMMANDS, *SHORT)
    if near := get_close_matches(name, known, 1):
        return f"unknown command {name}; did you mean {near[0]}?"
    return (
        f"unknown command {name}; commands are {', '.join(known)}; +experiment=NAME runs an experiment, NAME=VALUE "
        "sets an option"
    )


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
        return [name for name in (*COMMANDS, *SHORT) if name.startswith(first)], True
    if first == TRAIN:
        return [name for name in trainings() if name.startswith(others[-1])], False
    if first not in COMMANDS:
        return [], True
    if others[-1].startswith("-"):
        known = re.findall(r"--[\w-]+", parser()[1][first].format_usage())
        return [name for name in known if name.startswith(others[-1])], False
    if first == "new":
        return [kind for kind in new_part.GROUPS if kind.startswith(others[-1])], False
    if first == "explain":
        return explain.complete(others[-1]), False
    folder, _, begins = others[-1].rpartition("/")
    above = f"{folder}/" if folder or others[-1].startswith("/") else ""
    folders = sorted(path.name for path in Path(above or ".").glob("*/") if path.name.startswith(begins))
    return [f"{above}{name}/" for name in folders if name[0] != "." or begins], False


TRAIN, PREFIX, PARTS, CHECK, RECOMMEND = "train", "train_", "check", "check-drafter", "recommend"
ONLINE = "--online"
"""The flag of ``train`` that chooses ``task=train_online``."""

OF_TASK = ("minutes", "drafters", "hardware", "model", "batches")
"""Options of ``task=recommend`` that ``recommend`` takes without ``task.``."""


def trainings() -> list[str]:
    """Return the names of the experiments that train a drafter, without ``PREFIX``."""
    return [name.removeprefix(PREFIX) for name in choices("experiment") if name.startswith(PREFIX)]


def experiment(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that ``train NAME OVERRIDES...`` is short for.

    Raises:
        SystemExit: ``--help`` is printed; there is no name.
    """
    given = parser()[1][TRAIN].parse_args(arguments[1:])
    overrides = [text for text in given.overrides if text != ONLINE]
    online = given.online or len(overrides) < len(given.overrides)
    return [f"+experiment={PREFIX}{given.name}", *["task=train_online"] * online, *overrides]


def parts_check(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that ``check OVERRIDES...`` is short for. Where no proposer is named, there is none.

    Raises:
        SystemExit: ``--help`` is printed.
    """
    given, further = parser()[1][PARTS].parse_known_args(arguments[1:])
    typed = [*further, *given.overrides]
    first = next((number for number, text in enumerate(typed) if re.match(r"[^-]+=|~", text)), len(typed))
    named = any(re.match(r"proposer\b|\+?experiment=", text) for text in typed)
    folder = ["--config-dir", given.config_dir] if given.config_dir else []
    return [*folder, *typed[:first], "task=check", *["proposer=none"] * (not named), *typed[first:]]


def drafter_check(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that ``check-drafter OVERRIDES...`` is short for.

    Raises:
        SystemExit: ``--help`` is printed; ``--expect`` without a number.
    """
    given, overrides = parser()[1][CHECK].parse_known_args(arguments[1:])
    expected = [] if given.expect is None else [f"task.expect={given.expect:g}"]
    return ["task=check_drafter", *expected, *overrides]


def recommendation(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that ``recommend OVERRIDES...`` is short for.

    Raises:
        SystemExit: ``--help`` is printed.
    """
    given, further = parser()[1][RECOMMEND].parse_known_args(arguments[1:])
    flags = {"hardware": given.hardware, "model": given.model, "batches": given.batch and f"[{given.batch}]"}
    typed = [*given.overrides, *further]
    overrides = [f"task.{text}" if text.partition("=")[0] in OF_TASK else text for text in typed]
    projected = [f"task.{name}={value}" for name, value in flags.items() if value]
    return ["task=recommend", "proposer=none", "name=recommend", *projected, *overrides]


SHORT: Mapping[str, Callable[[Sequence[str]], list[str]]] = {
    TRAIN: experiment, PARTS: parts_check, CHECK: drafter_check, RECOMMEND: recommendation,
}  # fmt: skip
"""Commands that are short for a run: each returns the arguments of the run."""


def training_line(line: str) -> str:
    """Return a command line with the experiment in place of ``train NAME``, for completions of its options."""
    return re.sub(rf"^(\s*\S+\s+){TRAIN}\s+(\w+)(?=\s)", rf"\1+experiment={PREFIX}\2", line)


def _training(name: str) -> str:
    """Check the name of an experiment that trains."""
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name} is not a name: choose among {', '.join(trainings())}")
    return name


def parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of the sub-commands by name."""
    top = argparse.ArgumentParser(prog="spec-lab", description=__doc__)
    which = top.add_subparsers(dest="command", required=True)

    def add(name: str) -> argparse.ArgumentParser:
        what = (COMMANDS[name].__doc__ or "").strip()
        return which.add_parser(name, help=what, description=what)

    collect = add("collect")
    for sub in (add("state"), collect):
        sub.add_argument("folder", type=Path, metavar="SWEEP", help="a sweep's directory")
    compare = add("compare")
    for sub, what in ((collect, "print the figures as well, with all columns"), (compare, "print further tables")):
        sub.add_argument("-v", "--verbose", action="store_true", help=what)
    for option, kind in (("--latex", "LaTeX"), ("--markdown", "Markdown")):
        what = f"also write the main figures as a {kind} table"
        collect.add_argument(option, type=Path, metavar="FILE", help=what)
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
    flag = replay.add_argument
    flag("--arms", nargs="+", default=[], metavar="ARM", help="arms of the run (all)")
    flag("--verifiers", nargs="+", default=[], metavar="NAME", help="such as token lenient:lenience=0.5 (all that fit)")
    more = "all, depth=3,children=2,nodes=8, 3x2x1, or shares: 0.5*1x1+0.5*3x2x1 (all limits of depth and children)"
    flag("--shapes", nargs="+", default=[], metavar="SHAPE", help=more)
    flag("--temperatures", nargs="+", type=float, default=[], metavar="T", help="of the drafter (as recorded)")
    flag("--top-k", nargs="+", type=int, default=[], metavar="K", help="tokens that the drafter draws from (all)")
    flag("--confidence", nargs="+", type=float, default=[], metavar="C", help="below which a draft ends (as recorded)")
    flag("--drawn", nargs="+", choices=("iid", "deterministic"), default=[], help="how trees are drawn (as recorded)")
    formats = "of a file: jsonl (docs/replay.md), vllm (the text of /metrics), or responses, one a line"
    flag("--format", choices=("jsonl", "vllm", "vllm_requests", "sglang", "trtllm"), default="jsonl", help=formats)
    flag("--csv", type=Path, metavar="FILE", help="also write all designs to a CSV file")
    bounds = add("bounds")
    bounds.add_argument("folder", type=Path, metavar="DIR", help="a run with record=replay")
    bounds.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="arms of the run (all)")
    bounds.add_argument("--csv", type=Path, metavar="FILE", help="also write all numbers to a CSV file")
    add("samples").add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs")
    track = add("track")
    track.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs or sweeps")
    dashboard = add("dashboard")
    for sub, default in ((track, None), (dashboard, ...)):
        sub.add_argument("--project", default="spec_lab", help="project on Weights & Biases (spec_lab)")
        sub.add_argument("--entity", required=default is ..., help="user or team that owns the project")
    track.add_argument(
        "--mode", choices=("auto", "online", "offline"), default="auto", help="auto: online with a login, else offline"
    )
    convert = add("convert")
    convert.add_argument(
        "checkpoint",
        metavar="SOURCE",
        help="folder or hub name of a model in safetensors, or of a drafter in a .pt, .bin or .pth file; or that file",
    )
    what = "of a model, the file to write, NAME.gguf; of a drafter, its new folder"
    convert.add_argument("out", type=Path, metavar="OUT", help=what)
    convert.add_argument("--dtype", help="of a GGUF file's matrices: f32, bf16, f16, q8_0 or q4_0 (the checkpoint's)")
    convert.add_argument("--revision", help="branch, tag or commit of a hub name (main)")
    convert.add_argument("--force", action="store_true", help="overwrite an existing GGUF file")
    index = add("index")
    index.add_argument("corpus", metavar="CORPUS", help='a JSONL file with lines {"text": "..."}')
    index.add_argument("out", type=Path, metavar="OUT", help="the folder of the store, for proposer.store=OUT")
    index.add_argument("--tokenizer", required=True, metavar="TARGET", help="the target's folder or hub name")
    explain.add_arguments(add("explain"))
    new_part.add_arguments(add("new"))
    _add_runs(which)
    return top, which.choices


def _add_runs(which: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that are short for a run."""
    train = which.add_parser(
        TRAIN,
        usage=f"spec-lab {TRAIN} NAME [{ONLINE}] [OVERRIDE ...]",
        description=f"Train a drafter for a target: short for python -m spec_lab +experiment={PREFIX}NAME OVERRIDE...",
    )
    what = "serve the prompts in rounds, and learn from what was served after each (task=train_online)"
    train.add_argument(ONLINE, action="store_true", help=what)
    names = ", ".join(trainings())
    train.add_argument("name", type=_training, metavar="NAME", help=f"one of {names}; NAME --help prints its options")
    more = "options, such as target.path=DIR output_dir=DIR"
    train.add_argument("overrides", nargs=argparse.REMAINDER, metavar="OVERRIDE", help=more)
    parts = which.add_parser(
        PARTS,
        usage=f"spec-lab {PARTS} [--config-dir DIR] [OVERRIDE ...]",
        description="Check parts of your own in seconds: every outcome on a few toy models is enumerated. A target is "
        "read only for a part that cannot be built without one, such as a trained drafter. Prints whether the output "
        "has the target's distribution, the total variation and the smallest counter-example; the exit code is 0 or 1. "
        "Short for python -m spec_lab task=check OVERRIDE..., such as proposer=mine verifier=token policy=fixed "
        "constraint=regex --config-dir my_parts/conf. Without proposer= a draft model drafts, in each way of drawing "
        "that the verifier accepts; a policy requires a proposer.",
    )
    parts.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="parts and their options")
    parts.add_argument("--config-dir", metavar="DIR", help="folder with options of your own")
    check = which.add_parser(
        CHECK,
        usage=f"spec-lab {CHECK} [--expect TAU] [OVERRIDE ...]",
        description="Measure a drafter under every reading of its files: short for python -m spec_lab "
        "task=check_drafter OVERRIDE..., such as target.path=DIR proposer=eagle proposer.path=DIR.",
    )
    check.add_argument("--expect", type=float, metavar="TAU", help="published tokens of a step to compare with")
    best = which.add_parser(
        RECOMMEND,
        usage=f"spec-lab {RECOMMEND} [--hardware NAME --model NAME --batch SIZES] [OVERRIDE ...]",
        description="Recommend a speculative mode, or none, for a target, prompts and this machine: short for python "
        "-m spec_lab task=recommend proposer=none OVERRIDE..., such as target.path=DIR prompts=chat prompts.path=FILE "
        "minutes=10 drafters=[eagle:DIR].",
    )
    best.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="options, such as prompts=code minutes=10")
    best.add_argument("--hardware", metavar="NAME", help="device that measured modes are projected to (h100-sxm)")
    best.add_argument("--model", metavar="NAME", help="the target's size there: a name, or the folder of a checkpoint")
    best.add_argument("--batch", metavar="SIZES", help="batch sizes of the projection, with commas (1,8,32)")


def _add_project(project: argparse.ArgumentParser) -> None:
    """Add the options of ``project``."""
    add = project.add_argument
    add("folders", type=Path, nargs="+", metavar="DIR", help="runs or sweeps, whose acceptance is read")
    add("--hardware", metavar="NAMES", help="devices, with commas, or a CSV file (h100-sxm)")
    add("--model", help="the target's size: a name, or the folder of a checkpoint; required without --costs")
    add("--draft", help="the draft model's size, likewise; required by proposers that draft with a model")
    add("--dtype", help="of weights: bf16, fp16, fp32, fp8, int8 or int4 (bf16)")
    add("--experts", type=float, help="experts of a layer among which rows choose, as a run counted them (all)")
    add("--runtime", help="what adds to the roofline: graphs, eager or nominal (graphs)")
    batches = "batch sizes, with commas (1,2,4 ... 128; of --costs, those measured)"
    add("--batch", metavar="SIZES", help=batches)
    add("--context", type=int, help="tokens of each sequence (1024; of --costs, the nearest measured)")
    add("--lengths", help="draft lengths, with commas (all that were recorded)")
    add("--prompt", type=int, help="tokens of a prompt: speed-ups include the prefill; with --output")
    add("--output", type=int, help="tokens of an output; with --prompt")
    lookups = "milliseconds of an n-gram or suffix lookup in each step (0; of --costs, those measured)"
    add("--lookup-ms", type=float, default=0.0, help=lookups)
    ahead = "drafting while the target verifies: pearl, or ssd:N with N foreseen tokens after each row (none)"
    add("--overlap", metavar="METHOD", help=ahead)
    costs = "measured forwards in place of the roofline: a CSV file, or the directory of a run or of task=cost"
    add("--costs", type=Path, metavar="PATH", help=costs)
    add("--out", type=Path, metavar="DIR", help="where tables and figures go (the first DIR's folder 'projection')")
    add("-v", "--verbose", action="store_true", help="print every cell")
