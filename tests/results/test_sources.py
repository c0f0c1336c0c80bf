"""The code of parts from other packages identifies a run: edited code is another run."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from spec_lab.cli import start
from spec_lab.core.process_cache import ProcessCache
from spec_lab.results import sources, sweep
from spec_lab.results.manifest import claim
from spec_lab.tasks.lab import Loop
from tests import checkpoints

PACKAGE = Path(__file__).parents[1] / "extension" / "package" / "toy_plugin"


@pytest.fixture
def anew(monkeypatch):
    """Restore the state of a new process: nothing of these packages is imported, and no hash is cached."""

    def forget(*packages: str) -> None:
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        start.REUSED.sources.clear()

    yield forget
    forget("toy_plugin", "lone_module", "broken_package")


@pytest.fixture
def plugin(tmp_path, monkeypatch, anew):
    """A copy of the toy package, on the path."""
    anew("toy_plugin")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return Path(shutil.copytree(PACKAGE, tmp_path / "packages" / "toy_plugin"))


@pytest.fixture
def arguments(tmp_path):
    return [
        "hydra.searchpath=[pkg://toy_plugin.conf]",
        *checkpoints.short_runs(tmp_path, checkpoints.TEXTS[:2]),
        "proposer=bigram",
        "verifier=agree",
    ]


@pytest.fixture
def interrupted(quick_cli, plugin, arguments, tmp_path):
    """A run that was interrupted in its second group."""
    plain = Loop.decode

    def decode(self, requests):
        if requests[0].id == 1:
            raise KeyboardInterrupt
        return plain(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "decode", decode)
        assert quick_cli(*arguments)[0] == 130
    return tmp_path / "swept"


def edit(plugin: Path) -> None:
    file = plugin / "agree.py"
    file.write_text(file.read_text() + "\nEDITED = True\n")


@pytest.mark.nightly
def test_a_run_is_not_resumed_with_edited_code_of_its_parts(quick_cli, interrupted, arguments, plugin, anew):
    before = {file: file.read_bytes() for file in interrupted.rglob("*") if file.is_file()}
    edit(plugin)
    anew("toy_plugin")
    code, _, errors = quick_cli(*arguments)
    assert code == 1
    assert "already holds another run (code.toy_plugin.sha256: " in errors and "choose another output_dir=DIR" in errors
    assert {file: file.read_bytes() for file in interrupted.rglob("*") if file.is_file()} == before


@pytest.mark.nightly
def test_a_run_is_resumed_with_the_same_code(quick_cli, interrupted, arguments, anew):
    anew("toy_plugin")
    code, _, errors = quick_cli(*arguments)
    assert code == 0, errors
    known = json.loads((interrupted / "manifest.json").read_text())["code"]
    assert known.keys() == {"toy_plugin", "spec_lab"} and len(known["toy_plugin"]["sha256"]) == 64


@pytest.mark.nightly
def test_a_failed_run_is_retried_with_mended_code(quick_cli, plugin, arguments, tmp_path, anew, monkeypatch):
    plain = Loop.decode

    def decode(self, requests):
        if requests[0].id == 1:
            raise RuntimeError("a bug")
        return plain(self, requests)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "decode", decode)
        code, _, errors = quick_cli("--multirun", *arguments, "seed=1")
        assert code == 1 and "a bug" in errors
    edit(plugin)
    anew("toy_plugin")
    code, _, errors = quick_cli("--multirun", *arguments, "seed=1", "retry=true")
    assert code == 0, errors


@pytest.mark.nightly
def test_a_run_of_other_code_is_overwritten_on_request(quick_cli, interrupted, arguments, plugin, anew):
    edit(plugin)
    anew("toy_plugin")
    code, _, errors = quick_cli(*arguments, "overwrite=true")
    assert code == 0, errors
    assert (interrupted / "summary.json").is_file()
    code, _, errors = quick_cli("--multirun", *arguments, "overwrite=true", "seed=1")
    assert code == 1 and "overwrite=true is for single runs" in errors


@pytest.mark.nightly
def test_a_finished_run_of_other_code_is_not_skipped(quick_cli, plugin, arguments, tmp_path, anew):
    assert quick_cli("--multirun", *arguments, "seed=1")[0] == 0
    anew("toy_plugin")
    code, _, errors = quick_cli("--multirun", *arguments, "seed=1")
    assert code == 0 and "done before" in errors
    edit(plugin)
    anew("toy_plugin")
    code, _, errors = quick_cli("--multirun", *arguments, "seed=1")
    assert code == 1 and "done before" not in errors and "code.toy_plugin.sha256" in errors
    assert [run.state for run in sweep.runs(tmp_path / "swept")] == ["done"]


def test_files_named_by_options_are_identified_by_content(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.bin").write_bytes(b"1")
    part = {"_target_": "elsewhere.Heads", "path": str(weights), "size": 3, "more": {"extra_path": "nowhere"}}
    before = sources.data({"proposer": part}, ProcessCache())
    assert before.keys() == {"proposer.path"}
    (weights / "model.bin").write_bytes(b"22")
    assert sources.data({"proposer": part}, ProcessCache()) != before
    config = {"target": part | {"_target_": "spec_lab.models.target.Target.load"}}
    assert not sources.data(config, ProcessCache()), "it hashes its own"


@pytest.mark.parametrize("option", ["path", "weights", "model_path", "checkpoint_dir", "vocab_file", "prompts_path"])
def test_options_that_name_input_files_are_recognized(tmp_path, option):
    (tmp_path / "file").write_text("1")
    part = {"_target_": "elsewhere.Part", "more": {option: str(tmp_path / "file")}}
    assert sources.data({"verifier": part}, ProcessCache()).keys() == {f"verifier.more.{option}"}


def test_contents_are_read_once_in_a_process_and_again_once_a_file_changes(tmp_path, monkeypatch):
    file, opened, plain = tmp_path / "weights", [], Path.open
    file.write_text("1")
    monkeypatch.setattr(Path, "open", lambda self, *mode: opened.append(self) or plain(self, *mode))
    config = {"proposer": {"_target_": "elsewhere.Part", "path": str(file)}}
    cache = ProcessCache()
    first = sources.data(config, cache)
    assert sources.data(config, cache) == first and opened == [file]
    with plain(file, "w") as stream:
        stream.write("22")
    assert sources.data(config, cache) != first and opened == [file, file]


def test_folders_of_too_many_files_are_left_out(tmp_path, monkeypatch):
    config = {"proposer": {"_target_": "elsewhere.Part", "path": str(tmp_path)}}
    for name in "abc":
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sources, "MAX_FILES", 3)
    assert sources.data(config, ProcessCache())
    (tmp_path / "d").write_text("d")
    assert not sources.data(config, ProcessCache())


def test_the_source_of_a_controller_s_function_is_recorded(anew, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "lone_module.py"
    file.write_text("def make(vocabulary): ...\n")
    config = {"constraint": {"_target_": "spec_lab.constrain.load.controller", "make": "lone_module.make"}}
    anew("lone_module")
    before = sources.code(config, (), ProcessCache())
    assert before.keys() == {"lone_module"}
    file.write_text("def make(vocabulary): return None\n")
    anew("lone_module")
    assert sources.code(config, (), ProcessCache())["lone_module"]["sha256"] != before["lone_module"]["sha256"]


def test_installed_packages_are_identified_by_version():
    import numpy

    assert sources.source("numpy", ProcessCache())["versions"]["numpy"] == numpy.__version__


@pytest.mark.parametrize("commits", [("abc", None), (None, "abc"), (None, None)], ids=str)
def test_where_git_tells_no_commit_the_source_decides(tmp_path, monkeypatch, commits):
    from tests.results.test_manifest import facts

    cache = ProcessCache()
    there, here = (facts(cache=cache) | {"commit": commit} for commit in commits)
    assert len(there["code"]["spec_lab"]["sha256"]) == 64
    assert claim(tmp_path, there) == claim(tmp_path, here)
    here["code"] = here["code"] | {"spec_lab": {"versions": {}, "sha256": "edited"}}
    with pytest.raises(ValueError, match=r"\(code\.spec_lab\.sha256: '.*' there, 'edited' here\)"):
        claim(tmp_path, here)
