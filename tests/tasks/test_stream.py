"""``task=stream``: a text, a message, a conversation, or the run's prompts turn by turn."""

import json

import pytest

from tests import checkpoints

TEMPLATE = (
    "{% for sent in messages %}{{ sent.role[0] }}: {{ sent.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture
def streamed(quick_cli, tmp_path):
    """Return what a run prints to both streams, for a target with a chat template."""
    folder = checkpoints.checkpoint(tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    def call(*options):
        few = [
            f"target.path={folder}",
            "target.dtype=float32",
            "proposer=ngram",
            "proposer.depth=3",
            "max_new_tokens=12",
        ]
        return quick_cli("+experiment=stream", *few, *options)

    return call


def test_a_message_is_answered_by_the_chat_template(streamed):
    answers = {
        streamed("task.prompt=Hi", "task.chat=true")[1],
        streamed('task.messages=[{role: user, content: "Hi"}]')[1],
        streamed("task.prompt=u: Hi.a: ")[1],
    }
    assert len(answers) == 1 and answers != {""}
    assert streamed("task.prompt=Hi")[1] not in answers


def test_each_turn_of_the_prompts_follows_the_answer_to_the_one_before(streamed, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"turns": ["Hi", "And"]}) + "\n" + json.dumps({"prompt": "Ho"}))
    code, printed, errors = streamed("prompts=chat", f"prompts.path={tmp_path / 'chats.jsonl'}")
    assert code == 0 and len([line for line in errors.splitlines() if " tokens/s" in line]) == 3
    first = streamed("task.prompt=Hi", "task.chat=true")[1]
    said = f"[{{role: user, content: Hi}}, {{role: assistant, content: {first}}}, {{role: user, content: And}}]"
    second, third = streamed(f"task.messages={said}")[1], streamed("task.prompt=Ho", "task.chat=true")[1]
    assert printed == first + second + third


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["task.prompt=a", 'task.messages=[{role: user, content: "Hi"}]'], ["task.messages", "prompt"]),
        (["task.chat=true"], ["task.chat", "prompt"]),
        (["task.chat=true", 'task.messages=[{role: user, content: "Hi"}]'], ["task.messages", "task.chat=true"]),
        (["task.messages=[{role: user}]"], ["messages[0]", "content"]),
        (["task.messages=[3]"], ["task.messages"]),
    ],
)
def test_what_cannot_be_streamed_is_refused(streamed, options, words):
    code, _, errors = streamed(*options)
    assert code == 1 and all(word in errors for word in words), errors
