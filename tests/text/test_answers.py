"""Answers that exist already: which tokens of a conversation or of a run are the model's."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_lab.core.files import Unreadable
from spec_lab.text.answers import AnsweredText, read_answers
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.run_answers import COLUMNS
from tests.text.test_conversations import tokenizer, write

CHATML = (
    "{% for sent in messages %}<{{ sent.role }}>{{ sent.content | trim }}?/{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Each message ends with the end-of-text token "?", and "/" follows it."""
FORGETS = (
    "{% for sent in messages %}<{{ sent.role }}>{% if loop.last or sent.role == 'user' %}{{ sent.content }}{% endif %}?"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows no earlier answers."""
THINKS = CHATML.replace("<assistant>{% endif %}", "<assistant>##{% endif %}")
"""The prompt ends with an empty thought that is not kept with the answer."""

HELLO = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
MORE = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "ef"}]


def read(tmp_path, *lines, template=CHATML, **options):
    reads = tokenizer(template)
    ends = {reads.convert_tokens_to_ids("?")}
    texts = read_answers(write(tmp_path, *lines), reads, ends, ChatTemplate(), **options)
    return [
        (text.name, reads.decode(text.tokens), [reads.decode(answer) for _, answer in text.each()]) for text in texts
    ]


@pytest.mark.parametrize(
    ("record", "template", "expected"),
    [
        ({"messages": HELLO}, CHATML, [("<user>a?/<assistant>bc?/", ["bc?"])]),
        ({"messages": HELLO, "complete": False}, CHATML, [("<user>a?/<assistant>bc?/", ["bc"])]),
        ({"messages": HELLO, "system": "s"}, CHATML, [("<system>s?/<user>a?/<assistant>bc?/", ["bc?"])]),
        (
            {"messages": HELLO + MORE, "complete": False}, CHATML,
            [("<user>a?/<assistant>bc?/<user>d?/<assistant>ef?/", ["bc?", "ef"])],
        ),
        (
            {"messages": HELLO + MORE}, FORGETS,
            [("<user>a?<assistant>bc?", ["bc?"]), ("<user>a?<assistant>?<user>d?<assistant>ef?", ["ef?"])],
        ),
        ({"messages": HELLO}, THINKS, [("<user>a?/<assistant>##bc?/", ["bc?"])]),
        ({"messages": HELLO}, None, [("[B]abc", ["bc"])]),
    ],
)  # fmt: skip
def test_only_the_models_tokens_are_answers(tmp_path, record, template, expected):
    assert [text[1:] for text in read(tmp_path, record, template=template)] == expected


def test_texts_have_the_names_of_their_lines(tmp_path):
    assert [text[0] for text in read(tmp_path, {"messages": HELLO}, {"id": 7, "messages": MORE})] == ["chat-1", "7"]


@pytest.mark.parametrize(
    ("record", "template", "why"),
    [
        ({"messages": HELLO[:1]}, CHATML, "no message of the role assistant"),
        ({"messages": HELLO[1:]}, CHATML, "begins with an answer"),
        ({"prompt": "a"}, CHATML, "'messages' must be a list"),
        ({"messages": [*HELLO[:1], {"role": "assistant", "content": 5}]}, CHATML, "must be text"),
        ({"messages": HELLO, "complete": False}, CHATML.replace("trim", "upper"), "its end is not known"),
        (
            {"messages": HELLO},
            "<{{ messages[0].content }}>{% if add_generation_prompt %}?{% endif %}",
            "does not write",
        ),
    ],
)
def test_a_conversation_without_an_answer_that_can_be_found_is_refused(tmp_path, record, template, why):
    with pytest.raises(ValueError, match=rf"chat\.jsonl:1.*{why}"):
        read(tmp_path, record, template=template)


def test_two_conversations_with_the_same_id_are_refused(tmp_path):
    with pytest.raises(Unreadable, match=r"chat\.jsonl:2: the id '7' is also that of line 1"):
        read(tmp_path, {"id": 7, "messages": HELLO}, {"id": "7", "messages": MORE})


@pytest.mark.parametrize(
    ("answered", "whole", "expected"),
    [
        (9, 99, ((2, 4), (6, 9))),
        (4, 99, ((2, 4), (6, 8))),
        (2, 99, ((2, 4),)),
        (9, 7, ((2, 4), (6, 7))),
        (9, 6, ((2, 4),)),
        (9, 2, ()),
    ],
)
def test_a_text_is_cut_after_so_many_tokens(answered, whole, expected):
    text = AnsweredText("a", tuple(range(10)), ((2, 4), (6, 9))).cut(answered, whole)
    assert text.answers == expected
    assert text.tokens == tuple(range(expected[-1][1] if expected else 0))


def run(tmp_path, *changes, arms=("medusa", "baseline"), weights="ab", source=None):
    """A run's folder with two prompts, answered by each arm."""
    reads = tokenizer()
    rows = []
    for arm in arms:
        for number, (prompt, answer) in enumerate([("abc", "de"), ("f", "gh")]):
            tokens = reads.encode(answer, add_special_tokens=False)
            row = {
                "request": number, "arm": arm, "sequence": 0, "name": f"p{number}", "prompt": prompt,
                "prompt_tokens": len(prompt) + 1, "text": answer, "tokens": tokens, "error": "",
            }  # fmt: skip
            rows.append(row)
    for number, change in changes:
        rows[number] |= change
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "requests.parquet")
    facts = {"weights_sha256": {"target": weights}, "target": {"source_sha256": source}}
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    return reads


@pytest.mark.parametrize("name", ["", "requests.parquet"])
def test_answers_of_a_run_are_its_baselines(tmp_path, name):
    reads = run(tmp_path, (0, {"tokens": [0]}), (3, {"error": "broken"}))
    (text,) = read_answers(str(tmp_path / name), reads, set(), weights={"ab"})
    assert (text.name, reads.decode(text.tokens), text.answers) == ("p0", "[B]abcde", ((4, 6),))


def test_a_run_without_a_baseline_has_its_first_arms_answers(tmp_path):
    reads = run(tmp_path, arms=("medusa",))
    assert [text.name for text in read_answers(str(tmp_path), reads, set())] == ["p0", "p1"]


def test_answers_of_one_conversation_and_to_one_prompt_follow_each_other(tmp_path):
    names = ({"name": "a", "conversation": "a"}, {"name": "b", "conversation": None})
    again = (
        {"name": "a, turn 2", "conversation": "a", "request": 2},
        {"name": "b", "conversation": None, "request": 3},
    )
    reads = run(tmp_path, *enumerate((*names, *again)), arms=("baseline", "baseline"))
    assert [text.name for text in read_answers(str(tmp_path), reads, set())] == ["a", "a", "b", "b"]


def test_answers_of_a_lossy_verifier_are_refused(tmp_path):
    reads = run(tmp_path, arms=("medusa",))
    arms = {"medusa": {"lossless": False, "verifier": "typical"}, "baseline": {"lossless": True}}
    (tmp_path / "summary.json").write_text(json.dumps({"arms": arms}))
    with pytest.raises(Unreadable, match=r"its verifier \(typical\) is lossy"):
        read_answers(str(tmp_path), reads, set())
    assert len(read_answers(str(tmp_path), run(tmp_path), set())) == 2


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        ("tokens", [[-1], [1]], "-1 not in range"),
        ("tokens", [["a"], ["b"]], "Failed to parse"),
        ("tokens", [[None], [1]], "row 1 has no tokens"),
        ("prompt", ["a", None], "row 2 has no prompt"),
        ("request", ["a", "b"], "Failed to parse"),
    ],
)
def test_a_table_with_other_values_is_refused(tmp_path, column, values, why):
    reads = run(tmp_path, arms=("baseline",))
    table = pq.read_table(tmp_path / "requests.parquet")
    table = table.set_column(table.column_names.index(column), column, [values])
    pq.write_table(table, tmp_path / "requests.parquet")
    with pytest.raises(Unreadable, match=f"is no table of a run's answers.*{why}"):
        read_answers(str(tmp_path), reads, set())


@pytest.mark.parametrize(
    ("weights", "source", "known"), [("ab", None, {"ab"}), ("cd", "ab", {"ab"}), ("ab", "cd", {"ab", "ef"})]
)
def test_a_run_of_the_same_weights_in_another_file_is_read(tmp_path, weights, source, known):
    reads = run(tmp_path, weights=weights, source=source)
    assert len(read_answers(str(tmp_path), reads, set(), weights=known)) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [({"prompt_tokens": 9}, "'p0' has 4 tokens, and had 9"), ({"text": "xy"}, "'p0' is of another tokenizer")],
)
def test_a_run_whose_tokens_are_others_is_refused(tmp_path, change, why):
    reads = run(tmp_path, (2, change))
    with pytest.raises(Unreadable, match=why):
        read_answers(str(tmp_path), reads, set())


def test_a_run_of_another_target_or_without_a_table_is_refused(tmp_path):
    reads = run(tmp_path)
    with pytest.raises(Unreadable, match="another target"):
        read_answers(str(tmp_path), reads, set(), weights={"cd"})
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(Unreadable, match=r"no manifest\.json beside it states"):
        read_answers(str(tmp_path), reads, set(), weights={"ab"})
    run(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "requests.parquet")
    with pytest.raises(Unreadable, match="no table of a run's answers"):
        read_answers(str(tmp_path), reads, set(), weights={"ab"})
    (tmp_path / "requests.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_answers(str(tmp_path), reads, set(), weights={"ab"})


def test_a_run_without_answers_is_refused(tmp_path):
    reads = run(tmp_path, (0, {"tokens": []}), arms=("medusa",))
    rows = pq.read_table(tmp_path / "requests.parquet", columns=list(COLUMNS)).slice(0, 1)
    pq.write_table(rows, tmp_path / "requests.parquet")
    with pytest.raises(Unreadable, match="holds no answers"):
        read_answers(str(tmp_path), reads, set())
