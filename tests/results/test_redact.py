"""No secret of the command line or the environment is in any file, name or output of a run."""

import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.redaction import InvalidSecret, moved, without_values, written
from spec_lab.results import run_state, sweep
from spec_lab.results.redact import BLANK, VOCABULARY, redacted, without_secrets
from tests import checkpoints

ROOT = Path(__file__).parents[2]
CANARY, NESTED, HIDDEN = "sk-canary-1", "pw-canary-2", "env-canary-3"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A folder with tiny models, and overrides of a run whose prompts need an API key."""
    folder = tmp_path_factory.mktemp(HIDDEN)
    options = [option.replace(str(folder), "${oc.env:WHERE}") for option in checkpoints.short_runs(folder)]
    options += ["prompts._target_=tests.keyed.load"]
    return folder, [*options, f"+prompts.api_key={CANARY}", f"+prompts.service={{user: me, password: {NESTED}}}"]


@pytest.fixture
def command(quick_cli, keyed, monkeypatch):
    """Run the command line with these overrides and more; returns its output."""
    folder, options = keyed
    monkeypatch.setenv("WHERE", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes of joblib

    def call(*more: str) -> str:
        _, output, errors = quick_cli(*more, *options)
        return output + errors

    return call


def assert_nowhere(folder: Path, output: str) -> None:
    """Check that no secret is in the output, in any file's name, or in any file."""
    for secret in (CANARY, NESTED, HIDDEN):
        assert secret not in output
        for file in folder.rglob("*"):
            assert secret not in str(file.relative_to(folder))
            assert not file.is_file() or secret.encode() not in file.read_bytes(), f"{secret} in {file}"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["hydra.output_subdir=.hydra"],
        ["--multirun", "seed=0,1", "hydra.output_subdir=.hydra"],
        pytest.param(  # slow: the workers import everything
            ["--multirun", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], marks=pytest.mark.nightly
        ),
        [
            "--multirun",
            "hydra/sweeper=search",
            "seed=range(0,9)",
            "hydra.sweeper.n_trials=1",
            "hydra.sweeper.objective=tau_pooled",
        ],
    ],
    ids=["run", "hydra", "multirun", "joblib", "search"],
)
def test_no_secret_is_written_or_printed(command, tmp_path, more):
    output = command(*more)
    assert list(tmp_path.rglob("summary.json")), output
    assert_nowhere(tmp_path, output)
    for file in tmp_path.rglob("manifest.json"):
        config = json.loads(file.read_text())["config"]
        assert config["prompts"]["path"] == "${oc.env:WHERE}/prompts.jsonl"
    if "hydra/sweeper=search" in more:
        assert "SPEC_LAB_SECRET" in (tmp_path / "swept" / "study.jsonl").read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("more", [[], ["--multirun"]])
def test_no_secret_is_in_the_message_or_the_traceback_of_a_run_that_fails(command, tmp_path, more):
    output = command(*more, "+prompts.accepted=false")
    assert "is not accepted" in output
    assert_nowhere(tmp_path, output)
    if more:
        (run,) = sweep.runs(tmp_path / "swept")
        assert "is not accepted" in run_state.ended(run.folder)["traceback"]


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
    code, output, errors = cli("--multirun", "proposer=ngram", "output_dir=swept", override)
    assert code == 1
    assert "tracker" in errors and "Traceback" not in errors
    assert "sk-first" not in output + errors
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
        ("a={auth: {user: bob, pass: word}, n: 3}", "a={auth: {user: ***, pass: ***}, n: 3}"),
        ("a.auth.user=bob", "a.auth.user=***"),
        ("a.auth={_target_: b.c, user: bob}", "a.auth={_target_: b.c, user: ***}"),
        ("a={api_keys: [x, 'y,z'], n: [1]}", "a={api_keys: [***, ***], n: [1]}"),
        ("a.secrets=[x,y]", "a.secrets=[***,***]"),
        ("a={passwords: {me: x}}", "a={passwords: {me: ***}}"),
        ("a.credentials=[x]", "a.credentials=[***]"),
        ("a.tokens=[x,y]", "a.tokens=[x,y]"),
        ("a={password: ${oc.env:NAME}, n: 3}", "a={password: ${oc.env:NAME}, n: 3}"),
        ("a.api_key='Bearer ${oc.env:NAME}'", "a.api_key='Bearer ${oc.env:NAME}'"),
        ("+verifiers.token={_target_: a.b, depth: 3}", "+verifiers.token={_target_: a.b, depth: 3}"),
        ("+verifiers.token={_target_: a.b, password: x}", "+verifiers.token={_target_: a.b, password: ***}"),
        ("a={url: db://me:pa$$w@host/b}", "a={url: db://me:***@host/b}"),
        *((f"a.{name}_token='</s>'",) * 2 for name in VOCABULARY.split("|")),
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


@pytest.mark.parametrize(
    ("url", "blanked"),
    [
        ("postgresql://u:pa$$w@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p@ss@w@h/db?mail=me@here", "postgresql://u:***@h/db?mail=me@here"),
        ("postgresql://u:$p@h and then me@here", "postgresql://u:***@h and then me@here"),
        ("db://u:${oc.env:P}x@h/db", "db://u:***@h/db"),
        ("db://u:${oc.env:P}@word@h/db", "db://u:***@h/db"),
        ("db://${oc.env:U}:word@h/db", "db://${oc.env:U}:***@h/db"),
        ("db://${oc.env:U}:${oc.decode:${oc.env:P}}@h/db", None),
        ("db://${oc.env:U}@h/db", None),
        ("http://h:80/me@here", None),
        ("http://u@h/db", None),
    ],
)
def test_the_password_of_a_url_ends_at_the_last_at_sign_before_the_path(url, blanked):
    assert without_secrets({"u": url}) == {"u": blanked or url}


@pytest.mark.parametrize("secret", ["pa$$w@h", r"a\${b", "p@ss:word", "'a,b'", "3"])
def test_a_moved_secret_is_read_back_as_it_was_given(monkeypatch, secret):
    monkeypatch.setattr("os.environ", {})
    quoted = secret.replace("'", r"\'")
    (option,) = moved([f"+tracker.api_key='{quoted}'"])
    assert secret not in option
    (value,) = os.environ.values()
    assert OmegaConf.create({"key": "${oc.env:SPEC_LAB_SECRET_TRACKER_API_KEY}"}).key == value
    assert value == OmegaConf.create([secret])[0]


@pytest.mark.parametrize("text", ["db://${oc.env:U}:hunter2@h/b", "db://u:hunter2${oc.env:P}@h/b"])
def test_a_password_next_to_an_interpolation_is_refused_by_name(monkeypatch, text):
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(InvalidSecret, match=r"hydra\.sweeper\.storage") as error:
        moved([f"hydra.sweeper.storage='{text}'"])
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        "+tracker.auth={user: bob, pass: hunter2}",
        "+tracker={auth: {user: bob, pass: hunter2}}",
        "+tracker.auth.pass=hunter2",
        "+tracker.secrets=[hunter2]",
        "+tracker.passwords={bob: hunter2}",
    ],
)
def test_the_command_line_moves_what_configs_blank(monkeypatch, option):
    monkeypatch.setattr("os.environ", {})
    (override,) = moved([option])
    assert "hunter2" not in override
    assert "hunter2" in os.environ.values()


def test_a_choice_among_secrets_is_refused_wherever_they_stand():
    with pytest.raises(InvalidSecret, match="cannot be swept"):
        moved(["+tracker=choice({password: sk-first},{password: sk-second})"])


@pytest.mark.parametrize("name", VOCABULARY.split("|"))
def test_special_tokens_of_a_vocabulary_are_no_secrets(name):
    assert without_secrets({f"{name}_token": "</s>"}) == {f"{name}_token": "</s>"}


def test_lists_of_secrets_are_blanked():
    assert without_secrets({"api_keys": ["a"], "passwords": {"me": "b"}, "secrets": ["c"], "tokens": ["d"]}) == {
        "api_keys": [BLANK], "passwords": {"me": BLANK}, "secrets": [BLANK], "tokens": ["d"],
    }  # fmt: skip


def test_values_read_from_the_environment_are_not_written_whatever_their_type(monkeypatch):
    monkeypatch.setenv("PIN", "123456")
    monkeypatch.setenv("WORD", "word-1")
    raw = {
        "pin": "${oc.decode:${oc.env:PIN}}", "mapping": "${m}", "list": "${l}", "m": {"word": "${oc.env:WORD}"},
        "l": ["${oc.env:WORD}"], "seed": 3, "again": "${seed}", "plain": "${p}", "p": {"depth": "${seed}"},
        "hidden": "${tracker.password}", "tracker": {"password": "hunter2"}, "sampling": {"top_k": "${pin}"},
    }  # fmt: skip
    config = OmegaConf.create(raw)
    assert config.pin == 123456 and config.mapping.word == "word-1"
    assert written(config) == raw | {
        "again": 3, "plain": {"depth": 3}, "p": {"depth": 3}, "sampling": {"top_k": 123456},
    }  # fmt: skip
    assert "123456" not in without_values(config, "there is no 123456")


def test_all_below_credentials_is_secret():
    assert without_secrets({"credentials": {"_target_": "a.b", "user": "me", "key": ["x", 3]}}) == {
        "credentials": {"_target_": "a.b", "user": "***", "key": ["***", "***"]}
    }


@pytest.mark.nightly
def test_a_run_notices_that_an_environment_variable_has_another_value(quick_cli, tmp_path, monkeypatch):
    options = [*checkpoints.short_runs(tmp_path), "name=${oc.env:NAMED}"]
    options += ["batch_size='${oc.decode:${oc.env:SIZE}}'", "sampling.temperature='${oc.decode:${oc.env:HEAT}}'"]
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("HEAT", "0.5")
    monkeypatch.setenv("NAMED", "one")
    assert quick_cli(*options)[0] == 0
    assert quick_cli(*options)[0] == 0
    monkeypatch.setenv("NAMED", "two")
    code, _, errors = quick_cli(*options)
    assert code == 1
    assert "already holds another run" in errors and "environment variable" in errors


@pytest.mark.parametrize(
    "key", ["openai_key", "WANDB_API_KEY", "private_key_pem", "github_pat", "bearer", "cookies", "sshKey", "hf_token"]
)
def test_the_services_names_of_secrets_are_secrets(key):
    assert without_secrets({"a": {key: "canary"}}) == {"a": {key: BLANK}}
