"""Files of the project beside its code: what they name exists, and the container's commands work."""

import json
import re
import shutil
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line]


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_the_workflow_runs_the_scripts_that_contributors_run():
    steps = [step for job in workflow("ci.yml")["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run", ".ci/nightly"]


def test_hooks_before_a_commit_are_the_tools_of_the_development_environment():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {"lint-imports": "import-linter"}
    dependencies = " ".join(PROJECT["optional-dependencies"]["dev"])
    for hook in repository["hooks"]:
        name = hook["entry"].split()[0]
        assert hook["language"] == "system" and tools.get(name, name) in dependencies


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")), ids=lambda file: file.stem)
def test_templates_of_issues_have_a_name(file):
    front = yaml.safe_load(file.read_text().split("---\n")[1])
    assert front["name"] and front["about"]


def test_the_citation_is_of_the_format_1_2_0_and_agrees_with_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] in ("software", "dataset")
    assert citation["message"] and citation["title"] and citation["authors"]
    assert all(set(author) & {"name", "family-names", "alias"} for author in citation["authors"])
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert isinstance(citation["date-released"], date)
    assert f"Version {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_states_its_types_authors_and_versions_of_python():
    assert (ROOT / "spec_lab" / "py.typed").is_file()
    assert PROJECT["authors"] and PROJECT["keywords"] and "Typing :: Typed" in PROJECT["classifiers"]
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License")]  # license has the expression


def test_the_container_copies_what_exists_and_what_the_build_may_see():
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name, arguments in instructions():
        if name == "COPY":
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in allowed, source


@pytest.mark.nightly
def test_the_commands_of_the_container_work_without_one(tmp_path):
    variables, folder = {}, tmp_path
    for name, arguments in instructions():
        if name == "ARG":
            key, _, variables[key] = arguments.partition("=")
        elif name == "WORKDIR":
            folder = tmp_path / arguments.removeprefix("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, to = arguments.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, folder / to)
        elif name == "RUN":
            command = re.sub(r"\$\{(\w+)\}", lambda used: variables[used[1]], arguments)
            subprocess.run(["sh", "-ec", command.replace("--no-cache-dir ", "")], cwd=folder, check=True, timeout=1800)
        elif name == "ENTRYPOINT":
            (program,) = json.loads(arguments)
            said = subprocess.check_output([f"{tmp_path}{program}", "--version"], cwd=folder, text=True)
            assert said.split() == ["spec_lab", PROJECT["version"]]
