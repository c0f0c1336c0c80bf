"""Progress on a terminal and in a log."""

import io
import re
import sys
from contextlib import suppress
from threading import Event

import pytest

from spec_lab.core import progress
from spec_lab.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def log(monkeypatch):
    """Make standard error a file, with a short time between lines; return it and an event that each line sets."""

    def start():
        monkeypatch.setattr(sys, "stderr", file := io.StringIO())
        monkeypatch.setattr(progress, "SECONDS", 0.001)
        printed, plain = Event(), Progress.print_line
        monkeypatch.setattr(Progress, "print_line", lambda bar: plain(bar) or printed.set())
        return file, printed

    return start


def test_a_log_has_a_line_with_what_is_done_of_how_much_the_rate_and_the_time_left(log):
    file, printed = log()
    with Progress(total=8, desc="run", unit="prompt") as bar:
        bar.update(2)
        bar.set_postfix_str("13 tokens/s")
        printed.clear()
        assert printed.wait(60)
    line = file.getvalue().splitlines()[-1]
    assert re.fullmatch(r"run: 2/8 prompts, .*prompt.*, [\d:]+ elapsed, [\d:]+ left, 13 tokens/s", line), line


def test_lines_come_while_one_unit_takes_long_and_end_with_the_work(log):
    file, printed = log()
    done = []
    for item in Progress(range(3), desc="study", unit="prompt"):
        printed.clear()
        assert printed.wait(60) and printed.clear() is None and printed.wait(60)
        done.append(item)
    assert done == [0, 1, 2]
    counts = [int(re.match(r"study: (\d)/3 prompts", line)[1]) for line in file.getvalue().splitlines()]
    assert sorted(counts) == counts and set(counts) >= {0, 1, 2} and counts.count(1) > 1


def test_work_without_a_known_end_is_counted(log):
    file, printed = log()
    with Progress(desc="train", unit="step") as bar:
        bar.update(5)
        printed.clear()
        assert printed.wait(60)
    assert re.match(r"train: 5/\? steps, ", file.getvalue().splitlines()[-1])


def test_short_work_leaves_nothing_in_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    for _ in Progress(range(3), desc="short"):
        pass
    assert file.getvalue() == ""


def test_a_bar_that_is_neither_entered_nor_iterated_prints_nothing(log):
    file, printed = log()
    with Progress(total=1, desc="running") as bar:
        made = Progress(range(3), desc="abandoned")
        printed.clear()
        assert printed.wait(60) and bar.repeated is not None
    assert made.repeated is None and "abandoned" not in file.getvalue()


def test_the_lines_end_where_the_work_raises(log):
    log()
    bar = Progress(range(3), desc="failed")
    with suppress(KeyError):
        for _ in bar:
            raise KeyError
    assert bar.repeated.ended.is_set()


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Progress(total=2, desc="run", unit="prompt") as bar:
        bar.update(2)
    assert bar.repeated is None and "100%" in screen.getvalue()


def test_neither_is_shown_where_it_is_switched_off(log):
    file, _ = log()
    with Progress(total=2, disable=True) as bar:
        bar.update(2)
    assert bar.repeated is None and file.getvalue() == ""
