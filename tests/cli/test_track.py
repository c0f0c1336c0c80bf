"""``spec-lab track`` and ``dashboard`` check names and folders before they import what they need."""

import sys

import pytest

from spec_lab.cli.commands import command


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["track", "absent"], "absent does not exist: name the output directory"),
        (["track", "absent", "--project", "a/b"], "--project must be a text of 1 to 128"),
        (["dashboard", "--entity", "a b#"], "--entity must be a text of 1 to 128"),
    ],
)
def test_names_and_folders_are_checked_before_anything_is_imported(monkeypatch, capsys, given, why):
    monkeypatch.setitem(sys.modules, "spec_lab.analysis.tracking", None)
    monkeypatch.setitem(sys.modules, "spec_lab.analysis.tracking.dashboard", None)
    assert command(given) == 1
    assert why in capsys.readouterr().err
