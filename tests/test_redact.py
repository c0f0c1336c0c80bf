"""No secret of the command line or the environment is in any file, name or output of a run."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from spec_lab import sweep
from spec_lab.entry.redaction import moved
from spec_lab.redact import redacted, without_secrets
from tests import checkpoints

ROOT = Path(__file__).parents[1]
CANARY, NESTED, HIDDEN = "sk-canary-1", "pw-canary-2", "env-canary-3"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A folder with tiny models, and overrides of a run whose prompts need an API key."""
    folder = tmp_path_factory.mktemp(HIDDEN)
    options = [one.replace(str(folder), "${oc.env:WHERE}") for one in checkpoints.short_runs(folder)]
    options += ["prompts._target_=tests.keyed.load"]
    return folder, [*options, f"+prompts.api_key={CANARY}", f"+prompts.service={{user: me, password: {NESTED}}}"]


@pytest.fixture
def command(quick_cli, keyed, monkeypatch):
    """Run the command line with these overrides and more; returns what it printed."""
    folder, options = keyed
    monkeypatch.setenv("WHERE", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes of joblib

    def call(*more: str) -> str:
        _, said, errors = quick_cli(*more, *options)
        return said + errors

    return call


def assert_nowhere(place: Path, said: str) -> None:
    """No secret is in what was printed, in any file's name, or in any file."""
    for secret in (CANARY, NESTED, HIDDEN):
        assert secret not in said
        for file in place.rglob("*"):
            assert secret not in str(file.relative_to(place))
            assert not file.is_file() or secret.encode() not in file.read_bytes(), f"{secret} in {file}"


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["hydra.output_subdir=.hydra"],
        ["--multirun", "seed=0,1", "hydra.output_subdir=.hydra"],
        pytest.param(  # slow: the workers import everything
            ["--multirun", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], marks=pytest.mark.nightly
        ),
        ["--multirun", "hydra/sweeper=search", "seed=range(0,9)", "hydra.sweeper.n_trials=1", "objective=tau_pooled"],
    ],
    ids=["run", "hydra", "multirun", "joblib", "search"],
)
def test_no_secret_is_written_or_printed(command, tmp_path, more):
    said = command(*more)
    assert list(tmp_path.rglob("summary.json")), said
    assert_nowhere(tmp_path, said)
    for file in tmp_path.rglob("manifest.json"):
        config = json.loads(file.read_text())["config"]
        assert config["prompts"]["path"] == "${oc.env:WHERE}/prompts.jsonl"
    if "hydra/sweeper=search" in more:
        assert "SPEC_LAB_SECRET" in str(list(sqlite3.connect(tmp_path / "swept" / "study.db").iterdump()))


@pytest.mark.parametrize("more", [[], ["--multirun"]])
def test_no_secret_is_in_the_message_or_the_traceback_of_a_run_that_fails(command, tmp_path, more):
    said = command(*more, "+prompts.accepted=false")
    assert "is not accepted" in said
    assert_nowhere(tmp_path, said)
    if more:
        (run,) = sweep.runs(tmp_path / "swept")
        assert "is not accepted" in sweep.ended(run.folder)["traceback"]


@pytest.mark.parametrize(
    "override",
    [
        "+tracker.api_key=sk-first,sk-second",
        "+tracker.api_key=choice(sk-first,sk-second)",
        "+tracker={password: sk-first},{password: sk-second}",
        "+tracker.api_key=sk-first{b",
    ],
)
def test_a_secret_that_is_swept_or_cannot_be_read_is_refused_without_being_shown(cli, tmp_path, override):
    code, said, errors = cli("--multirun", "proposer=ngram", "out=swept", override)
    assert code == 1
    assert "tracker" in errors and "Traceback" not in errors
    assert "sk-first" not in said + errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("+tracker.api_key=abc", "+tracker.api_key=***"),
        ("a={b: {api_key: 'x,y', n: 3}, token: 4}", "a={b: {api_key: ***, n: 3}, token: 4}"),
        ("a.password=123", "a.password=***"),
        ("a.apiKey=abc", "a.apiKey=***"),
        ("a.mask_token=3", "a.mask_token=3"),
        ("a.password=${oc.env:NAME}", "a.password=${oc.env:NAME}"),
        ("+verifier@verifiers.token=token", "+verifier@verifiers.token=token"),
        ("verifier=token", "verifier=token"),
        ("prompt=password: no", "prompt=password: no"),
        ("~tracker.token", "~tracker.token"),
    ],
)
def test_secrets_in_overrides_are_blanked_and_nothing_else(override, kept):
    assert redacted(override) == redacted(kept) == kept


def test_a_password_in_a_url_is_a_secret(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    assert without_secrets({"u": "db://me:word@host/x"}) == {"u": "db://me:***@host/x"}
    assert without_secrets({"u": "db://me:${oc.env:X}@host/x"}) == {"u": "db://me:${oc.env:X}@host/x"}
    (option,) = moved(["hydra.sweeper.storage=db://me:word@host/x"])
    assert option == 'hydra.sweeper.storage="${oc.env:SPEC_LAB_SECRET_HYDRA_SWEEPER_STORAGE}"'
    assert os.environ == {"SPEC_LAB_SECRET_HYDRA_SWEEPER_STORAGE": "db://me:word@host/x"}


def test_all_below_credentials_is_secret():
    assert without_secrets({"credentials": {"_target_": "a.b", "user": "me", "key": ["x", 3]}}) == {
        "credentials": {"_target_": "a.b", "user": "***", "key": ["***", "***"]}
    }


def test_a_run_notices_that_an_environment_variable_has_another_value(quick_cli, tmp_path, monkeypatch):
    options = [*checkpoints.short_runs(tmp_path), "sampling.temperature=0", "name=${oc.env:NAMED}"]
    monkeypatch.setenv("NAMED", "one")
    assert quick_cli(*options)[0] == 0
    assert quick_cli(*options)[0] == 0
    monkeypatch.setenv("NAMED", "two")
    code, _, errors = quick_cli(*options)
    assert code == 1
    assert "already holds another run" in errors and "environment variable" in errors
