"""Checkers: what they find correct; code is parsed and never executed."""

import pytest

from spec_lab.text.checkers import CHECKERS, MAX_CODE, check, completion


@pytest.mark.parametrize(
    ("checker", "text", "answer", "correct"),
    [
        ("exact", " Paris. ", "paris", True),
        ("exact", "It is Paris", "Paris", False),
        ("contains", "It is  PARIS, France", "paris", True),
        ("contains", "Parisian", "Paris", False),
        ("contains", "a.b", "a+b", False),
        ("number", "5 + 7 = 12\n#### 12", "12", True),
        ("number", "#### 12\n\nQuestion: 3 and 4", "12", True),
        ("number", "so she pays $1,200.00.", "1200", True),
        ("number", "first 12, then 13", "12", False),
        ("number", "-3", "3", False),
        ("number", "-3", "-3", True),
        ("number", "none", "3", False),
        ("number", "", "3", False),
        ("choice", "B", "B", True),
        ("choice", " (B) because A is wrong", "B", True),
        ("choice", "A is tempting. The answer is (C).", "C", True),
        ("choice", "Answer: A. No, answer: B", "B", True),
        ("choice", r"thus \boxed{D}", "D", True),
        ("choice", "The answer is a matter of taste", "A", False),
        ("choice", "Because", "B", False),
        ("choice", "", "A", False),
        ("number", "<think>it is 3</think>it is 4", "4", True),
        ("number", "<think>it is 4", "4", False),
        ("python_syntax", "    return a\n\nprint(", "def f(a):\n", True),
        ("python_syntax", "    return (a\n", "def f(a):\n", False),
        ("python_syntax", "", "def f(a):\n    'doc'\n", False),
        ("python_syntax", "Here:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n", True),
        ("python_syntax", "```\nx = (\n```", "", False),
        ("python_syntax", "```\n\n```", "", False),
        ("python_syntax", "```python\ndef f():", "", False),
    ],
)
def test_what_is_correct(checker, text, answer, correct):
    assert check(checker, text, answer) is correct


@pytest.mark.parametrize(
    "code", ["(" * 10_000, "-" * 100_000 + "1", "a" + ".b" * 50_000, "\0", "x" * (MAX_CODE + 1), "[" * 99]
)
def test_hostile_code_is_not_correct_and_breaks_nothing(code):
    assert check("python_syntax", f"```\n{code}\n```", "") in (True, False)


def test_code_is_not_executed(tmp_path):
    file = tmp_path / "written"
    assert check("python_syntax", f"```python\nopen({str(file)!r}, 'w')\n```", "")
    assert not file.exists()


def test_hostile_texts_take_no_time():
    for text in ("9" * 200_000, "#### " * 50_000, "answer is (" * 20_000, "```" * 50_000, "9," * 5_000):
        for checker in CHECKERS:
            assert check(checker, text, "1") in (True, False)


def test_a_completion_ends_before_the_next_statement():
    assert completion("    return 1\n\n\ndef g():\n    pass\n") == "    return 1\n\n"
    assert completion("    x = 1\n    return x") == "    x = 1\n    return x"
