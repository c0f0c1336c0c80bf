"""Messages of a run on a terminal before its first token."""

import io
import logging
import re
import sys
from threading import Event

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


def test_on_a_terminal_the_seconds_of_a_long_step_are_shown_and_nothing_after_it(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm._instances", ())
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    with Status() as status:
        LOG.info("Self-check %s", "x" * 50)
        status.began -= 75
        status.redraw()
    status.redraw()
    _, again, end = screen.getvalue().split(CLEAR)[1:]
    assert again == f"Self-check {'x' * 7} ... (75 s)" and len(again) < 30 and end == ""


def test_without_a_terminal_the_last_message_is_printed_again_and_again(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    printed = Event()
    monkeypatch.setattr("spec_lab.core.progress.SECONDS", 0.001)
    monkeypatch.setattr(Status, "print_line", lambda self, plain=Status.print_line: plain(self) or printed.set())
    with Status() as status:
        assert printed.wait(60) and file.getvalue() == "", "nothing is known yet"
        LOG.info("Loading %s", "x")
        printed.clear()
        assert printed.wait(60) and printed.clear() is None and printed.wait(60)
    status.repeated.thread.join(60)
    lines = file.getvalue().splitlines()
    assert len(lines) > 1 and all(re.fullmatch(r"Loading x \.\.\. \(\d+ s\)", line) for line in lines)
