"""``spec-lab new``: what it writes works as it is, and it writes nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_lab.cli.new_part import GROUPS, write

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_tests_of_what_it_writes_pass(tmp_path):
    folders = [tmp_path / kind for kind in GROUPS]
    for kind, folder in zip(GROUPS, folders, strict=True):
        write(kind, f"my_{kind}", folder)
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", folders[0] / "pyproject.toml", *folders],
        env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout


@pytest.mark.parametrize("kind", GROUPS)
def test_what_it_writes_is_found_and_explained(flat_cli, tmp_path, kind):
    code, out, errors = flat_cli("new", kind, "my_part")
    assert (code, errors) == (0, "") and "python -m pytest" in out
    assert [file.name for file in tmp_path.iterdir()] == ["my_part"]
    group = GROUPS[kind]
    trains = (tmp_path / "my_part/my_part/conf/experiment/train_my_part.yaml").is_file()
    assert trains == (kind == "drafter")
    code, out, errors = flat_cli("explain", f"{group}=my_part", "--config-dir", "my_part/my_part/conf")
    assert code == 0 and f"my_part.part.{'my_part' if kind == 'metric' else 'MyPart'}" in out, errors


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My-Part", "cannot be the name of a package"), ("lambda", "cannot be the name of a package"),
        ("../part", "cannot be the name of a package"), ("medusa", "proposer=medusa exists"),
        ("json", "there is a module json already"), ("draft", "would be Draft, which it imports"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_possible_is_refused_and_nothing_is_written(flat_cli, tmp_path, name, why):
    code, _, errors = flat_cli("new", "proposer", name)
    assert code == 1 and why in errors and ("choose another" in errors or "such as my_drafter" in errors)
    assert [*tmp_path.iterdir()] == []


def test_an_existing_folder_is_left_alone(flat_cli, tmp_path):
    (tmp_path / "my_part").mkdir()
    code, _, errors = flat_cli("new", "policy", "my_part")
    assert code == 1 and "my_part exists: choose another name" in errors
    assert [*(tmp_path / "my_part").iterdir()] == []
