"""Messages of a run on a terminal before its first token."""

import io
import logging
import sys

from spec_lab.cli.status import CLEAR, Status

LOG = logging.getLogger("spec_lab.somewhere")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_each_message_replaces_the_previous_one_and_none_remains(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    with Status():
        LOG.info("Loading %s", "x" * 50)
        LOG.info("Self-check")
    LOG.info("later")
    assert screen.getvalue() == f"{CLEAR}Loading {'x' * 17} ...{CLEAR}Self-check ...{CLEAR}"


def test_a_warning_remains_on_the_screen(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Status():
        LOG.info("Loading")
        LOG.warning("busy")
    assert screen.getvalue() == f"{CLEAR}Loading ...{CLEAR}busy\n{CLEAR}"


def test_without_a_terminal_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with Status():
        LOG.info("Loading")
    assert file.getvalue() == ""
