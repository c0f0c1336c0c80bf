"""No input gives a bare traceback, hangs, or touches files outside; see ``fuzzing/harness.py``."""

import json
from pathlib import Path

import pytest

from tests.nightly.fuzzing.harness import BUDGET, SAVED, Worker, corpus, explore
from tests.nightly.fuzzing.targets import TARGETS


@pytest.fixture(scope="module")
def worker(request, tmp_path_factory):
    """The worker of a target, with its valid files; each is made once."""
    made: dict[str, Worker] = {}

    def of(name: str) -> Worker:
        if name not in made:
            valid, folder = tmp_path_factory.mktemp("valid") / name, tmp_path_factory.mktemp("place")
            valid.mkdir()
            TARGETS[name].make(valid)
            made[name] = Worker(TARGETS[name], valid, folder)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_DISABLE_GIT", "true")  # it would run git
        patch.setattr("spec_lab.results.manifest.commit", lambda _: "here")
        patch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
        patch.setattr("spec_lab.tasks.benchmark.DRAWN", ())
        yield of
    for each in made.values():
        each.close()


@pytest.mark.parametrize(("name", "file"), corpus(), ids=lambda path: path.stem if isinstance(path, Path) else path)
@pytest.mark.one_in(10)
def test_corpus(worker, name, file):
    how, output = worker(name).try_out(json.loads(file.read_text()))
    assert not how, f"{how}\n{output[-3000:]}"


@pytest.mark.nightly
@pytest.mark.skipif(not BUDGET, reason="SPEC_LAB_FUZZ_SECONDS=0")
@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs(worker, tmp_path, name):
    faults, tried = explore(name, worker(name), BUDGET, Path(SAVED or tmp_path))
    assert not faults, "\n\n".join(faults)
    assert tried > BUDGET / 20  # it did not wait for one input
