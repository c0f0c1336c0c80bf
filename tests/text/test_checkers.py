"""Checkers: what they find correct; code is parsed and never executed."""

import time

import pytest

from spec_lab.text.checkers import CHECKERS, STOPS, check, check_answer, completion, final, last_block, reply


@pytest.mark.parametrize(
    ("checker", "text", "answer", "correct"),
    [
        ("exact", " Paris. ", "paris", True),
        ("exact", "It is Paris", "Paris", False),
        ("contains", "It is  PARIS, France", "paris", True),
        ("contains", "Parisian", "Paris", False),
        ("contains", "a.b", "a+b", False),
        ("number", "5 + 7 = 12\n#### 12", "12", True),
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
        ("number", "<think>it is 3</think>or 4</think>it is 5", "5", True),
        ("python_syntax", "Here:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n", True),
        ("python_syntax", "```\nx = (\n```", "", False),
        ("python_syntax", "```\n\n```", "", False),
        ("python_syntax", "```python\ndef f():", "", False),
        ("python_syntax", "Sure", "", False),
        ("python_syntax", "Sure", "def f():\n    'doc'\n", False),
        ("python_syntax", "1. So:\n   ```python\n   def f():\n       return 1\n   ```\n", "", True),
        ("python_syntax", "```python\n    x = 1\n```", "", False),
    ],
)
def test_what_is_correct(checker, text, answer, correct):
    assert check(checker, text, answer) is correct


@pytest.mark.parametrize(
    ("checker", "text", "answer", "correct"),
    [
        ("number", " 72.\n\nQuestion: Bob has 3.\nAnswer: 3", "72", True),
        ("number", "#### 12\n\nQuestion: 3 and 4", "12", True),
        ("number", "#### 5\nThen:\n#### 6", "5", True),
        ("choice", " B\n\nQuestion: next\nAnswer: C", "B", True),
        ("choice", " B\n\nWhich?\nAnswer: C", "B", True),
        ("choice", " The answer is B.\n\nWhich?\nAnswer: C", "B", True),
        ("exact", " Paris\nQuestion: Rome", "Paris", True),
        ("contains", " Rome\nQuestion: Paris", "Paris", False),
        ("python_syntax", "    return a\n\nprint(", "def f(a):\n", True),
        ("python_syntax", "    return a\n```\nSo:\n```\n(\n```", "def f(a):\n", True),
        ("python_syntax", "    return (a\n", "def f(a):\n", False),
        ("python_syntax", " \n", "def f(a):\n    'doc'\n", False),
        ("python_syntax", "Sure", "", False),
        ("python_syntax", "```\nx = 1\n```", "", True),
    ],
)
def test_a_model_that_completes_a_text_is_checked_up_to_the_next_question(checker, text, answer, correct):
    assert check(checker, text, answer, completes=True) is correct


@pytest.mark.parametrize(
    "text",
    [
        "The correct answer is: B", "Answer is: **B**", "**Answer**: B", "The correct answer is option B",
        "The correct choice is B.", r"\boxed{\text{B}}", r"Answer: \text{B}", "Answer: `B`", "The answer is [B]",
        "answer: (b)", "Option B", "**B**", "B) this", "B: this", "B\nsince", "The answer is B because of A.",
        r"Answer: $\boxed{B}$", "Answer:\nB",
    ],
)  # fmt: skip
def test_forms_of_a_choice(text):
    assert check("choice", text, "B") and not check("choice", text, "A")


@pytest.mark.parametrize(
    "text",
    [
        "A common mistake is to choose B here, so C it must be", "The answer is A little subtle: C", "Answer: A-level",
        "The answer is a matter of taste", "A or B", "A, B and C are wrong",
    ],
)  # fmt: skip
def test_words_that_are_no_choice(text):
    assert not check("choice", text, "A")


STEPS = "#### 1. Add\n#### 2. Multiply\n#### 72"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (STEPS, "72"), (r"\boxed{72} as in step 3.", "72"), (r"\boxed{1{,}000}", "1000"), ("\u2212 5", "-5"),
        ("\u22125", "-5"), ("- 5", "-5"), (".5", "0.5"), ("1 000", "1000"), ("1\u202f000", "1000"), ("3-4", "4"),
        ("It takes 3-4", "4"), ("8 - 5", "5"), ("f(x) - 5", "5"), ("So:\n- 72", "72"), ("it is -5", "-5"),
        ("-$5", "-5"), ("$-5", "-5"), ("#### **72**", "72"), ("#### $72.\nin 3 steps", "72"), ("1/2", "0.5"),
        (r"\frac{1}{2}", "0.5"), ("#### 5\n#### 6", "6"), (r"\boxed{5} \boxed{6}", "6"), ("#### 12 dollars", "12"),
        (r"\boxed{\text{72}} 3", "72"), ("in 2020 100", "100"), ("#### .5", "0.5"),
    ],
)  # fmt: skip
def test_forms_of_a_number(text, answer):
    assert check("number", text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\u22125", "5"), (".5", "5"), ("1/2", "2"), ("10,50", "1050"), ("10,50", "50"), ("1,5", "15"), (STEPS, "1"),
        ("8 - 5", "-5"), (r"\frac{1}{2}", "2"), ("1/0", "1"), ("9" * 1000, "9" * 1000),
    ],
)  # fmt: skip
def test_other_numbers(text, answer):
    assert not check("number", text, answer)


R1, GPT_OSS = "<User>a<Assistant><think>\n", "<|start|>user<|message|>a<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "prompt", "answer"),
    [
        ("so 3", R1, ""),
        ("so 3</think>4", R1, "4"),
        ("<think>so 3", "", ""),
        ("a</think>b</think>c", "", "c"),
        ("it is 3", "Think inside <think> tags. User: a", "it is 3"),
        ("analysisIt is 3.assistantfinalIt is 4.", GPT_OSS, "It is 4."),
        ("analysisIt is 3.assistantcommentaryfinal", GPT_OSS, ""),
        ("finalIt is 4.", GPT_OSS, "It is 4."),
        ("analysis: 4", "a", "analysis: 4"),
        ("It is 4.", GPT_OSS, "It is 4."),
    ],
)
def test_the_final_answer_comes_after_the_thinking(text, prompt, answer):
    assert final(text, prompt) == answer
    assert check("exact", text, answer, prompt) is True


def test_the_next_turn_has_the_final_channel_and_other_answers_whole():
    assert reply("analysisIt is 3.assistantfinalIt is 4.", GPT_OSS) == "It is 4."
    assert reply("analysisIt is", GPT_OSS) == "analysisIt is"
    assert reply("so 3</think>4", R1) == "so 3</think>4"


@pytest.mark.parametrize(
    ("checker", "answer", "message"),
    [
        ("number", "four", "must be a number, not 'four'"),
        ("number", "1,5", "must be a number"),
        ("number", "4 apples", "must be a number"),
        ("choice", "BC", "must be one letter"),
        ("contains", " ", "must be a text that is not empty"),
        ("exact", ".", "must be a text that is not empty"),
    ],
)
def test_answers_that_nothing_equals_are_refused(checker, answer, message):
    with pytest.raises(ValueError, match=f"line 3: 'answer' {message}"):
        check_answer(checker, answer, "line 3")


def test_possible_answers_are_allowed():
    for checker, answer in (("number", "-1,000.5"), ("choice", " b"), ("contains", "x"), ("python_syntax", "")):
        check_answer(checker, answer, "line 3")


def test_code_is_not_executed(tmp_path):
    file = tmp_path / "written"
    assert check("python_syntax", f"```python\nopen({str(file)!r}, 'w')\n```", "")
    assert not file.exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_time_for_hostile_texts_grows_with_their_length(checker):
    """Quadratic time would be minutes."""
    parts = "9", "#### ", "answer is (", "```", "9,", "9 ", " ", "- ", r"\boxed{", "1/", r"\frac{1}", "```x\n", "( "
    for part in parts:
        begun = time.process_time()
        check(checker, part * (100_000 // len(part)), "1")
        assert time.process_time() - begun < 5


def test_a_completion_ends_before_the_next_statement():
    assert completion("    return 1\n\n\ndef g():\n    pass\n") == "    return 1\n\n"
    assert completion("    x = 1\n    return x") == "    x = 1\n    return x"
    for stop in STOPS:
        assert completion(f"    return 1\n{stop} x") == "    return 1\n"


def test_of_an_indented_fence_the_indentation_is_removed():
    assert last_block("- So:\n  ```\n  if a:\n      b\n  ```") == "if a:\n    b\n"
    assert last_block("```\n    b\n```") == "    b\n"
    assert last_block("none") is None
