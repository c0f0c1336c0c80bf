"""The section of a run along its texts."""

import pytest

from spec_lab.analysis.results.ranges import along_text
from tests.analysis.drawn import drawn_of, faults


def ranges(*means: float, width: float = 0.1) -> list[dict]:
    """Ranges with these means of every figure."""
    rows = []
    for number, mean in enumerate(means):
        value = {"mean": mean, "low": mean - width, "high": mean + width}
        rows.append({
            "first": 16 * number + 1, "last": 16 * number + 16, "steps": 9, "tau_pooled": value, "expected_tau": value,
            "draft_token_rate": value,
        })  # fmt: skip
    return rows


def test_a_change_along_the_text_is_said_and_drawn():
    (section,) = along_text({
        "medusa": {"by_position": ranges(0.9, 0.7, 0.4), "by_context": ranges(0.9), "by_turn": []},
        "ngram": {"by_position": ranges(0.5, 0.6), "by_turn": ranges(0.2, 0.2)}, "baseline": {},
    })  # fmt: skip
    assert section.notes == [
        "Expected tau of medusa changes by position in the output: 0.90 [0.80, 1.00] at tokens 1 to 16, "
        "0.40 [0.30, 0.50] at tokens 33 to 48."
    ]
    assert [[cell.text for cell in row[:4]] for row in section.table.rows[-3:]] == [
        ["position in the output", "ngram", "17 to 32", "9"], ["turn", "ngram", "1 to 16", "9"],
        ["turn", "ngram", "17 to 32", "9"],
    ]  # fmt: skip
    drawn = drawn_of([section])
    assert list(drawn) == ["tau_along", "acceptance_along"]
    for figure in drawn.values():
        assert [axes.get_xlabel() for axes in figure.axes] == ["tokens of the output before the step", "turn"]
    assert [faults(figure) for figure in drawn.values()] == [[], []]


@pytest.mark.parametrize("arms", [{}, {"medusa": {}}, {"medusa": {"by_position": ranges(0.9), "by_turn": []}}])
def test_a_single_range_is_not_shown(arms):
    assert along_text(arms) == []


def test_intervals_that_are_not_known_say_nothing():
    rows = [row | {"expected_tau": {"mean": 1.0, "low": None, "high": None}} for row in ranges(0.9, 0.1)]
    (section,) = along_text({"medusa": {"by_position": rows}})
    assert section.notes == []
