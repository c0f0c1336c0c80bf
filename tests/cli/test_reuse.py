"""Runs of a sweep that share a process write the same rows as each in a process of its own."""

import json
import locale
import os
import random
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal

from spec_lab.analysis import metrics
from spec_lab.results import sweep
from tests import checkpoints
from tests.cli.composing import compose, remember_compositions
from tests.cli.test_killed import TIMES

pytestmark = pytest.mark.nightly

RUNS = {
    "plain": ["override /proposer: ngram", "proposer: {depth: 4}"],
    "wide": ["override /proposer: ngram_tree", "proposer: {depth: 4}", "threads: 2", "target: {dtype: float64}"],
    "half": ["override /proposer: draft_chain", "target: {dtype: bfloat16}", "batch_size: 3"],
    "drawn": ["override /proposer: draft_chain", "override /sampling: temperature_1", "override /verifier: traversal"],
    "heads": ["override /proposer: medusa", "proposer: {tree: 0 1 0.0}", "sampling: {repetition_penalty: 1.5}"],
    "bound": [
        "override /proposer: ngram", "override /constraint: controller_banned", "proposer: {depth: 4}",
        "constraint: {strings: [a, bc]}",
    ],
    "match": [
        "override /proposer: draft_tree", "override /sampling: temperature_1", "override /verifier: match", "seed: 7",
    ],
    "fails": ["override /proposer: draft_chain", "threads: 2", "proposer: {path: nowhere}"],
}  # fmt: skip
"""Runs that differ in everything that could leak through a process; one of them fails."""
COMMON = [
    "target.dtype=float32",
    "prompts=prose",
    "prompts.limit=2",
    "max_new_tokens=5",
    "warmup=2",
    "output_dir=swept",
]
LEFT = {  # state that a run might change for the next ones
    "threads": torch.get_num_threads,
    "dtype": lambda: str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "random of torch": lambda: hash(tuple(torch.random.get_rng_state().tolist())),
    "random of numpy": lambda: hash(tuple(np.random.get_state()[1].tolist())),
    "random of python": lambda: crc32(repr(random.getstate()).encode()),
    "folder": lambda: Path("output.txt").is_file(),
    "locale": lambda: locale.setlocale(locale.LC_ALL),
}


ALONE = {name: [name] for name in RUNS}
ORDERS = ["forth", pytest.param("back", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The runs' folders: each run alone in a fresh process, and all in one process."""
    folder = tmp_path_factory.mktemp("reuse")
    checkpoints.zoo(folder / "zoo")
    (folder / "conf" / "experiment").mkdir(parents=True)
    for name, lines in RUNS.items():
        chosen, values = ([line for line in lines if line.startswith("override") == first] for first in (True, False))
        text = ["# @package _global_", "defaults:", *(f"  - {line}" for line in chosen), *values]
        (folder / "conf" / "experiment" / f"{name}.yaml").write_text("\n".join(text) + "\n")
    in_forks(folder, ALONE | {"forth": [*RUNS]})
    return folder


@pytest.fixture(scope="module")
def backwards(places):
    """All runs in one process, in reverse order."""
    in_forks(places, {"back": [*reversed(RUNS)]})


def in_forks(folder: Path, orders: dict[str, list[str]]) -> None:
    process = get_context("spawn").Process(target=_each_in_a_fork, args=(folder, orders))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # two threads that spin on one core take minutes
        process.start()
    process.join(600)
    assert process.exitcode == 0


def _each_in_a_fork(folder: Path, orders: dict[str, list[str]]) -> None:
    """Import everything without running anything; then fork a process for each sweep."""
    from omegaconf import OmegaConf

    import spec_lab.cli.commands
    import spec_lab.results.manifest
    import spec_lab.tasks.benchmark

    spec_lab.tasks.benchmark.in_short = lambda *_: {"certified": None}  # slow, and has tests of its own
    spec_lab.results.manifest.commit = lambda _: None
    OmegaConf.register_new_resolver("zoo", lambda name: str(folder / "zoo" / name), replace=True)
    options = ["--multirun", *COMMON, f"hydra.searchpath=[file://{folder / 'conf'}]"]
    remember_compositions()
    compose(folder / f"composed-{'-'.join(orders)}", [*options, f"+experiment={','.join(RUNS)}"])
    for name, order in orders.items():
        if not (child := os.fork()):
            try:
                (folder / name).mkdir()
                os.chdir(folder / name)
                _sweep(options, order)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _sweep(options: list[str], order: list[str]) -> None:
    """Run a sweep with the basic launcher in this process, and record the process's state after each run."""
    from spec_lab.cli import jobs, main

    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    notes, plain = [{what: look() for what, look in LEFT.items()}], jobs.run_of_sweep

    def run_of_sweep(config):
        plain(config)
        notes.append({what: look() for what, look in LEFT.items()})

    jobs.run_of_sweep = run_of_sweep
    sys.argv = ["spec-lab", *options, f"+experiment={','.join(order)}"]
    with suppress(SystemExit):
        main.main()
    Path("left.json").write_text(json.dumps(dict(zip(["nothing", *order], notes, strict=True))))


def rows(folder: Path, name: str) -> metrics.Tables:
    (run,) = [run for run in sweep.runs(folder / "swept") if f"+experiment={name}" in run.overrides]
    assert run.state == "done", run.error
    return metrics.load(run.folder)


def left(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "left.json").read_text())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [name for name in RUNS if name != "fails"])
def test_a_run_writes_the_same_rows_whatever_ran_before_it(places, name, order, request):
    if order == "back":
        request.getfixturevalue("backwards")
    alone, shared = rows(places / name, name), rows(places / order, name)
    assert len(alone.requests) == 4
    for table, times in TIMES.items():
        expected, shared_rows = getattr(alone, table).drop(columns=times), getattr(shared, table).drop(columns=times)
        assert_frame_equal(shared_rows, expected, check_exact=True)


def test_the_runs_are_not_all_alike(places):
    """Otherwise a leak would not be visible."""
    tables = [rows(places / name, name) for name in RUNS if name != "fails"]
    assert len({str(table.requests["tokens"].tolist()) for table in tables}) >= 5
    assert len({len(table.steps) for table in tables}) >= 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_changes_the_process_no_more_than_a_fresh_one(places, name, order, request):
    if order == "back":
        request.getfixturevalue("backwards")
    before, alone, shared = left(places / name)["nothing"], left(places / name)[name], left(places / order)[name]
    assert shared == alone
    assert alone == before


def test_a_failed_run_is_reported_and_the_next_ones_run(places):
    for name in ("fails", "forth"):
        states = {run.overrides[0]: run.state for run in sweep.runs(places / name / "swept")}
        assert states.pop("+experiment=fails") == "failed"
        assert set(states.values()) <= {"done"}
