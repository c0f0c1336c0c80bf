"""One thread per test process (tests run side by side, and tiny models are fastest so), fixed seeds, no network."""

import gc
import os
import sys
from collections import Counter, defaultdict
from functools import cache
from uuid import uuid4
from zlib import crc32

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("spec_lab", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("spec_lab")
settings.register_profile("short", settings.get_profile("spec_lab"), max_examples=20)


def pytest_configure(config):
    """The short run tries a fifth of the examples of a property, the nightly run all."""
    settings.load_profile("short" if "not nightly" in config.option.markexpr else "spec_lab")
    gc.disable()  # until everything is collected


def pytest_collection_finish():
    """Modules and thousands of collected tests stay to the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # libraries report what is never freed


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Which cases of a grid there are, by a hash of their names.

    ``each_value``: of every value of every parameter one case at least; no other exists, in any run. ``one_in(n)``: the
    short run has one case in n, and every value that several cases share; the others are nightly. Tests with the marker
    ``cuda`` are skipped without a GPU.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="it requires a CUDA GPU"))
    grids, thinned = defaultdict(list), defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("each_value"):
            grids[name, bool(item.get_closest_marker("nightly"))].append(item)
        elif item.get_closest_marker("one_in") and not item.get_closest_marker("nightly"):
            thinned[name].append(item)
    left_out = {case for cases in grids.values() for case in _surplus(cases, len(cases))}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for cases in thinned.values():
        for case in _surplus(cases, *cases[0].get_closest_marker("one_in").args):
            case.add_marker("nightly")


def _surplus(cases, n):
    """All cases of a test but one in n, and but one for each value that several cases share."""
    values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
    uses = Counter(value for argument_values in values.values() for value in argument_values)
    seen = {value for value, count in uses.items() if count == 1}
    for number, case in enumerate(sorted(cases, key=lambda case: crc32(case.nodeid.encode()))):
        if number * n >= len(cases) and values[case] <= seen:
            yield case
        else:
            seen |= values[case]


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def every_test_starts_without_a_process_cache():
    """The command line reuses nothing that an earlier test found (``ProcessCache``)."""
    if start := sys.modules.get("spec_lab.cli.start"):
        for facts in vars(start.REUSED).values():
            facts.clear()


@pytest.fixture(autouse=True, scope="session")
def a_cache_of_their_own(tmp_path_factory):
    """The tests, and the processes that they start, leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SPEC_LAB_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def an_empty_cache(a_cache_of_their_own, monkeypatch):
    """No test reads step costs that another has measured."""
    monkeypatch.setenv("SPEC_LAB_CACHE", str(a_cache_of_their_own / uuid4().hex))


@pytest.fixture(autouse=True, scope="session")
def limits_of_the_machine_in_milliseconds():
    """Runs measure bandwidth and peak by fewer and smaller passes: no test is about the machine."""
    from spec_lab.core import machine_limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_limits, "SIZES", {"cpu": (64,), "cuda": (64,)})
        patch.setattr(machine_limits, "MAX_PASSES", 2)
        yield


@pytest.fixture(autouse=True, scope="session")
def steps_are_timed_briefly():
    """Runs with depths or trees of measured costs time few steps; ``propose/test_step_costs`` is about timing."""
    from spec_lab.policy import costs
    from spec_lab.propose import calibrate, step_costs

    def measure(visit, tokens, seconds=0.0, threads=1):
        with pytest.MonkeyPatch.context() as patch:
            for name, passes in {"WARM_UP": 1, "PASSES": 2, "BLOCKS": 1}.items():
                patch.setattr(step_costs, name, passes)
            return step_costs.measure(visit, tokens, 0.0, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "measure", measure)
        patch.setattr(costs, "measure", measure)
        yield


@pytest.fixture(autouse=True, scope="session")
def distributions_are_listed_once():
    """Every run looks for those of its parts' packages; reading the metadata of all takes half a second."""
    from spec_lab.results import sources

    find = cache(lambda _path: sources_of())
    with pytest.MonkeyPatch.context() as patch:
        sources_of = sources.packages_distributions
        patch.setattr(sources, "packages_distributions", lambda: find(tuple(sys.path)))
        yield


@pytest.fixture(autouse=True)
def figures_are_drawn_where_a_test_is_about_them(request, monkeypatch):
    """The mark ``figures``: runs draw at their end, as they do for a user. Half of a tiny run's time goes there."""
    if not request.node.get_closest_marker("figures"):
        monkeypatch.setattr("spec_lab.tasks.benchmark.DRAWN", ())


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub, which holds nothing, and an empty cache."""
    from huggingface_hub import constants

    from tests.hub_server import serving, use_hub

    with serving() as stand_in:
        use_hub(monkeypatch, stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield stand_in


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command line in this process, in a directory of its own: (exit code, stdout, stderr)."""
    from spec_lab.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["spec-lab", *arguments])
        try:
            main()
            code = 0
        except SystemExit as left:
            if isinstance(left.code, str):  # as the interpreter prints it
                print(left.code, file=sys.stderr)
            code = 1 if isinstance(left.code, str) else left.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def quick_cli(cli, monkeypatch, tmp_path):
    """As ``cli``, on a wide terminal and without slow parts that have tests of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("spec_lab.results.manifest.commit", lambda _: "here")
    monkeypatch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
    return cli


@pytest.fixture
def flat_cli(cli, monkeypatch):
    """As ``cli``, on a wide terminal, with each output joined into one line."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        code, *said = cli(*arguments)
        out, errors = (" ".join(stream.split()) for stream in said)
        return code, out, errors

    return call
