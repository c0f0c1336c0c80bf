"""CITATION.cff is a valid file of Citation File Format 1.2.0, and agrees with the package."""

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
REQUIRED = ("cff-version", "message", "title", "authors")  # by the schema of version 1.2.0


@pytest.fixture
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_has_what_the_format_requires(citation):
    assert all(citation.get(key) for key in REQUIRED)
    assert citation["cff-version"] == "1.2.0" and citation["type"] in ("software", "dataset")
    assert all(set(author) & {"name", "family-names", "alias"} for author in citation["authors"])


def test_the_citation_agrees_with_the_package(citation):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert f"Version {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()
