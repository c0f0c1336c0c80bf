"""Configs of installed packages are found by their entry points; the package here is a folder on ``sys.path``."""

import sys
from pathlib import Path

import pytest

from spec_lab.cli.bundled import check_installed, choices, installed


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with one proposer as pip does, by its files and their metadata."""

    def write(name: str = "tiny", folder: str = "tiny_parts.conf") -> Path:
        package = tmp_path / "site" / "tiny_parts"
        (package / "conf" / "proposer").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('imported for its configs')\n")
        text = f"# One.\n_target_: spec_lab.propose.ngram.Ngram.load\ndepth: 3  # {name}\n"
        (package / "conf" / "proposer" / f"{name}.yaml").write_text(text)
        metadata = tmp_path / "site" / "tiny_parts-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-parts\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[spec_lab.conf]\ntiny_parts = {folder}\n")
        monkeypatch.syspath_prepend(package.parent)
        return package

    yield write
    sys.modules.pop("tiny_parts", None)


def test_the_configs_of_an_installed_package_are_found_without_importing_it(install):
    package = install()
    assert installed() == [package / "conf"]
    assert {"tiny", "medusa"} <= {*choices("proposer")}


def test_they_are_chosen_and_explained_as_the_bundled_ones(install, flat_cli):
    install()
    code, out, errors = flat_cli("proposer=tiny", "--cfg", "job", "--package", "proposer")
    assert (code, errors) == (0, "") and "depth: 3" in out
    code, out, _ = flat_cli("explain", "proposer=tiny")
    assert code == 0 and "proposer.depth" in out


def test_a_mistyped_name_of_theirs_is_answered_with_the_nearest(install, flat_cli):
    install("tiny_drafter")
    code, _, errors = flat_cli("proposer=tiny_draftre")
    assert code == 1 and "did you mean proposer=tiny_drafter" in errors


def test_an_entry_point_without_a_folder_names_its_package(install, flat_cli):
    install(folder="tiny_parts.configs")
    code, _, errors = flat_cli("proposer=none")
    assert code == 1 and "tiny-parts names tiny_parts.configs" in errors


def test_a_config_that_another_hides_is_refused(install):
    install("medusa")
    with pytest.raises(ValueError, match=r"tiny_parts/conf/proposer/medusa\.yaml has the name of .*rename it"):
        check_installed()
