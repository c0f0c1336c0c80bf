"""Every option of the command line with invalid values: it works, or one message names the option; no files are left.

Each option gets a few of the values, chosen by a fixed seed, so that the suite ends within about five minutes.
``SPEC_LAB_FUZZ=26`` tries every value with every option.
"""

import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.main import conf, top_level_options
from tests import checkpoints

JUNK = [
    "", "null", "true", "0", "-1", "3", "1e400", "-1e-300", "99999999999999999999999", "0.5", "nan", "inf", "abc",
    "'a b'", "/nowhere/at/all", "/dev/null", "[]", "[1,a,null]", "[[]]", "{}", "{a: {b: [1]}}", "ключ-語-🎉",
    "'\\u0000'", "'${nothing}'", "'${oc.env:NOT_SET_ANYWHERE}'", "x" * 5000,
]  # fmt: skip
"""Wrong types, bounds and beyond, empty and nested values, unsafe text for file names and terminals, interpolations."""

VALUES = int(os.environ.get("SPEC_LAB_FUZZ", "5"))
"""How many values each option gets."""

SECONDS = 20
"""Time limit of one command."""

GROUPS = {
    "target": ["zoo"],
    "proposer": ["ngram", "ngram_tree", "draft_chain", "draft_tree", "medusa", "none"],
    "verifier": ["token", "typical", "relaxed", "lenient", "cascade"],
    "constraint": ["none", "regex", "json_schema", "choice"],
    "sampling": ["greedy", "temperature_1"],
    "prompts": ["jsonl"],
    "tracker": ["files", "wandb"],
}
"""Options whose own options are tried, by group."""

GIVEN = {"regex": ['constraint.pattern="a+"'], "json_schema": ["constraint.schema={type: integer}"],
         "choice": ['constraint.choices=["a","b"]'], "wandb": ["tracker.mode=disabled"]}  # fmt: skip
"""Further options that an option requires."""


def leaves(group: str = "", name: str = "") -> list[tuple[str, str, str]]:
    """Each option of a file of a config group, or of the default config if none is named."""
    if not group:
        return [(key, "", "") for key in sorted(top_level_options())]
    config = OmegaConf.load(Path(conf(), group, f"{name}.yaml"))
    return [(f"{group}.{key}", group, name) for key in config]


OPTIONS = leaves() + [one for group, names in GROUPS.items() for name in names for one in leaves(group, name)]
SWEPT = ["hydra.launcher.n_jobs", "hydra.sweeper.n_trials", "hydra.sweeper.n_jobs", "hydra.sweeper.direction",
         "hydra.sweeper.study_name", "hydra.sweeper.sampler", "hydra.sweeper.objective"]  # fmt: skip


def sample(values: list[str], option: str) -> list[str]:
    """A sample of the values, a different one for each option."""
    return random.Random(option).sample(values, min(VALUES, len(values)))


@pytest.fixture
def junk_cli(quick_cli, monkeypatch):
    """As ``quick_cli``, without the figures of a run."""
    monkeypatch.setattr("spec_lab.tasks.benchmark._draw", lambda *_: [])
    return quick_cli


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.zoo(folder / "zoo")
    return folder, checkpoints.short_runs(folder, checkpoints.TEXTS[:1])


class Slow(BaseException):
    """A command exceeded the time limit."""


@contextmanager
def limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise Slow(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def faults(cli, place, option: str, base: list[str], junk: list[str]) -> list[str]:
    """The faults in the handling of each value."""
    found = []
    there = {one.name for one in place.iterdir()}
    for value in junk:
        shown = f"{option}={value[:40]}"
        try:
            with limited():
                code, output, errors = cli(*base, f"{option}={value}")
        except Slow:
            found.append(f"{shown}: hangs")
            continue
        except BaseException as error:
            found.append(f"{shown}: {type(error).__name__} escapes: {str(error)[:200]}")
            continue
        output += errors
        left = {one.name for one in place.iterdir()} - there
        last = re.split(r"[.]", option)[-1]
        named = option if last == "_target_" else last
        if code not in (0, 1, 2):
            found.append(f"{shown}: exit code {code}")
        if "Traceback" in output:
            found.append(f"{shown}: traceback, {output.strip().splitlines()[-1][:200]}")
        elif code and not re.search(rf"\b{re.escape(named.split('.')[0])}", output):
            found.append(f"{shown}: not named: {output.strip()[:300]}")
        if code and left and not any((place / one / "summary.json").exists() for one in left):
            found.append(f"{shown}: leaves {sorted(left)} {[str(f) for f in place.glob('here/*')][:4]}: {output[:160]}")
        for one in left:
            path = place / one
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("option", "group", "name"), OPTIONS, ids=[f"{name}:{one}" for one, _, name in OPTIONS])
def test_invalid_values_are_refused_in_one_line_that_names_the_option(junk_cli, tiny, tmp_path, option, group, name):
    folder, short = tiny
    base = [one for one in short if not one.startswith("output_dir=") and one.split("=")[0] != group]
    base += ["output_dir=here"] * (option != "output_dir") + (
        [f"{group}={name}"] if group and group != "prompts" else []
    )
    base += GIVEN.get(name, [])
    if name in ("draft_chain", "draft_tree"):
        base.append(f"proposer.path={folder / 'zoo' / 'draft'}")
    if name == "medusa":
        base.append(f"proposer.path={folder / 'zoo' / 'medusa'}")
    if option in ("task", "name"):
        base = [one for one in base if not one.startswith(f"{option}=")]
    assert faults(junk_cli, tmp_path, option, base, sample(JUNK, f"{name}:{option}")) == []


@pytest.mark.nightly
@pytest.mark.parametrize("option", SWEPT)
def test_invalid_values_of_a_sweep_are_refused_in_one_line(junk_cli, tiny, tmp_path, option):
    _, short = tiny
    kind = (
        ["hydra/launcher=joblib"]
        if "launcher" in option
        else ["hydra/sweeper=search", "hydra.sweeper.objective=tau_pooled"]
    )
    base = ["--multirun", *short, *kind, "seed=range(0,3)" if "launcher" not in option else "seed=1,2"]
    base = [one for one in base if one.split("=")[0] != option]
    # A search of so many trials is valid and takes too long, and so does the start of workers.
    valid = ("-1", "3") if "launcher" in option else ("3", "99999999999999999999999")
    junk = [one for one in JUNK if "n_" not in option or one not in valid]
    assert faults(junk_cli, tmp_path, option, base, sample(junk, option)) == []
