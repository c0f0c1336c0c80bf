"""``spec-lab --help``: what to type first, the commands, and where the options are explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from spec_lab.cli.bundled import conf, installed
from spec_lab.cli.commands import CHECK, PARTS, RECOMMEND, TRAIN, parser
from spec_lab.cli.explain import terminal as explain
from spec_lab.cli.subcommands import COMMANDS, refuse

EXAMPLES = (
    ("+experiment=medusa_tree", "measure Medusa heads against their target; all of it is bundled"),
    (
        "target=smollm2 proposer=ngram proposer.depth=3 prompts=mt_bench",
        "prompt lookup on a real model (extra smollm2)",
    ),
    ("--multirun +experiment=draft_length", "a sweep; spec-lab state DIR shows how far it is"),
    ("recommend target.path=MODEL prompts=chat prompts.path=FILE", "which speculative mode is fastest here, or none"),
    ("+experiment=certify", "prove that an output distribution is unchanged"),
)
"""Commands to begin with, each with what it does."""

RUNS = {
    TRAIN: "Train a drafter for a target: train NAME OVERRIDE...",
    PARTS: "Check parts of your own on toy models, in seconds: check verifier=mine.",
    CHECK: "Measure a drafter under every reading of its files.",
    RECOMMEND: "Say which speculative mode is fastest, or none.",
}
"""Commands that are short for a run."""

FLAGS = {
    "-m, --multirun": "Run every combination of values: proposer=ngram,medusa seed=0,1.",
    "-c job, --cfg job": "Print the composed configuration, and run nothing.",
    "--config-dir DIR": "Add options of your own.",
    "-v": "Print every column of the tables.",
    "--version": "Print the version.",
    "--hydra-help": "Explain shell completion and Hydra's other flags.",
}


def show(overrides: Sequence[str], console: Console, folders: Sequence[str] = ()) -> int:
    """Print the page, or what the given overrides mean, those of folders of configs too; return the exit code."""
    if not overrides:
        for line in page():
            console.print(line, soft_wrap=True, highlight=False)
        return 0
    try:
        known = explain.reference([*map(str, installed()), *folders])
        for number, override in enumerate(overrides):
            console.print("\n" * bool(number), end="")
            explain.answer(known, override, console)
    except (OSError, ValueError) as error:
        return refuse(error)
    return 0


def page() -> Iterator[str]:
    """Yield the lines, of 80 columns at most."""
    yield "spec_lab: a laboratory for speculative decoding. A run has a target, a proposer"
    yield "that drafts, a verifier, a constraint and prompts, and measures them against"
    yield "decoding without drafts."
    yield from ("", "usage: spec-lab [OPTION=VALUE ...]    or    spec-lab COMMAND ...", "", "Examples")
    for arguments, what in EXAMPLES:
        yield f"  spec-lab {arguments}"
        yield f"      {what}"
    yield from ("", "Options: what a run consists of (spec-lab explain GROUP lists the choices)")
    for name, what in groups():
        yield from _row(name, what)
    yield from ("", "Look an option up", "  spec-lab explain proposer.depth      (or a group, or +experiment=NAME)")
    yield from ("", "Commands (COMMAND --help explains one)")
    for name, what in RUNS.items():
        yield from _row(name, what)
    which = parser()[1]
    for name in COMMANDS:
        yield from _row(name, (which[name].description or "").partition("\n")[0])
    yield from ("", "Flags")
    for name, what in FLAGS.items():
        yield from _row(name, what)


def groups() -> Iterator[tuple[str, str]]:
    """Yield the groups with their comments in ``conf/config.yaml``."""
    for line in Path(conf(), "config.yaml").read_text().splitlines():
        name, colon, rest = line.strip().removeprefix("- ").partition(":")
        if line.startswith("  - ") and colon and "#" in rest:
            yield name, rest.partition("#")[2].strip()
    yield "+experiment", "values for other options, under one name"


def _row(name: str, what: str) -> Iterator[str]:
    first, *rest = explain.wrapped(what, 80 - 20)
    yield f"  {name:<17} {first}"
    yield from (" " * 20 + line for line in rest)
