"""Arrivals: seeded, as the trace says, and refused where an idle arm would wait for more than a day."""

import re

import numpy as np
import pytest

from spec_lab.tasks.arrivals import MAX_WAIT, arrival_times, check_waits


def test_all_arrive_at_once():
    assert arrival_times("all", 3, 1.0, None, 0) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_are_seeded_rise_and_have_their_rate():
    times = arrival_times("poisson", 4000, 8.0, None, 5)
    assert times == arrival_times("poisson", 4000, 8.0, None, 5) != arrival_times("poisson", 4000, 8.0, None, 6)
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05) and gaps.std() == pytest.approx(1 / 8, rel=0.1)
    np.testing.assert_allclose(arrival_times("poisson", 4000, 16.0, None, 5), np.array(times) / 2)
    assert arrival_times("poisson", 10, 8.0, None, 5) == times[:10]


def test_a_trace_s_first_times_are_read(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("0\n0.5\n0.5\n1e1\n12\n")
    assert arrival_times("file", 4, 1.0, str(file), 0) == [0.0, 0.5, 0.5, 10.0]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"0\n1\n", "3 lines.*has 2"),
        (b"", "3 lines.*has 0"),
        (b"0\n2\n1\n3\n", "line 3 .* is 1, less .*2"),
        (b"-1\n0\n1\n", "line 1 .*-1"),
        (b"0\n1\ntwo\n", "line 3 .*'two'"),
        (b"0\n1 2\n3\n", "line 2 .*'1 2'"),
        (b"0\n\n1\n2\n", "line 2 .*''"),
        (b"0\n1\nnan\n", "line 3 .*finite"),
        (b"0\ninf\n1\n", "line 2 .*finite"),
        (b"0\n\xff\n1\n", "UTF-8"),
    ],
    ids=["too short", "empty", "not rising", "before the start", "no number", "two numbers in a line", "blank line",
         "nan", "infinite", "not UTF-8"],
)  # fmt: skip
def test_a_trace_that_cannot_be_used_is_refused_by_its_option_and_line(tmp_path, content, named):
    file = tmp_path / "trace.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"task\.trace.*trace\.txt") as refused:
        arrival_times("file", 3, 1.0, str(file), 0)
    assert re.search(named, str(refused.value))


def test_only_time_between_arrivals_of_one_segment_counts_as_waiting():
    day = MAX_WAIT
    check_waits([0.0, day, 1e12, 1e12], 2, "file", 1.0, "trace")  # one day within segments, and any time between them
    with pytest.raises(ValueError, match="line 4"):
        check_waits([0.0, day, 1e12, 1e12 + 1], 2, "file", 1.0, "trace")
