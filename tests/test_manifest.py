"""What the manifest says, and what it never says."""

import json
import subprocess

from spec_lab.manifest import commit, finite, machine, without_secrets, write_json


def test_secrets_are_blanked_and_nothing_else():
    config = {
        "api_key": "a", "tracker": {"wandb_api_key": "b", "password": "c", "token": None, "entity": "me"},
        "hf_token": "d", "max_new_tokens": 5, "tokens": 3, "list": [{"secret": "e"}, 1],
    }  # fmt: skip
    assert without_secrets(config) == {
        "api_key": "***", "tracker": {"wandb_api_key": "***", "password": "***", "token": None, "entity": "me"},
        "hf_token": "***", "max_new_tokens": 5, "tokens": 3, "list": [{"secret": "***"}, 1],
    }  # fmt: skip


def test_the_commit_is_that_of_the_code_with_a_mark_for_changes(tmp_path):
    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *command], capture_output=True, text=True)
        return done.stdout.strip()

    assert commit(tmp_path) is None
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init")
    assert commit(package) is None, "inside a repository that does not hold it"
    git("add", ".")
    git("commit", "-m", "one")
    assert commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert commit(package) == git("rev-parse", "HEAD") + "+"


def test_the_machine_has_cores_and_memory():
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    assert facts["processor"]


def test_json_has_no_nan_and_is_whole(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"x": float("nan"), "y": [float("inf"), 1.5], "z": (2,)})
    assert json.loads(file.read_text()) == {"x": None, "y": [None, 1.5], "z": [2]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert finite({"a": 1}) == {"a": 1}
