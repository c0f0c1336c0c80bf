"""Conversations: files of them, chat templates, and what reaches the tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spec_lab.text import conversations
from spec_lab.text.chat_template import ChatTemplate, template_facts
from spec_lab.text.conversations import chat, chat_options
from spec_lab.text.prompts import Prompt, digest, encode_turn
from tests.checkpoints import LETTERS

TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}</>{% endfor %}"
    "{% if tools %}<tools>{{ tools | map(attribute='name') | join(',') }}{% endif %}"
    "{% if enable_thinking is defined %}<think={{ enable_thinking }}>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOOSE = "{{ messages[-1].content }}"


def tokenizer(template: str | dict | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character, and a special token that plain texts begin with."""
    characters = dict.fromkeys(LETTERS + "<>/=#0123456789_?'!\"", None)
    model = Tokenizer(
        models.WordLevel({character: n for n, character in enumerate([*characters, "[B]"])}, unk_token=":")
    )
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    model.post_processor = processors.TemplateProcessing(
        single="[B] $A", special_tokens=[("[B]", model.token_to_id("[B]"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=model, unk_token=":", bos_token="[B]")
    made.chat_template = template
    return made


def write(tmp_path: Path, *lines: dict) -> str:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def text(prompt: Prompt, answers=(), template: str | None = TEMPLATE) -> str:
    return encode_turn(prompt, tokenizer(template), 10_000, answers=answers)[0]


def test_each_turn_is_sent_after_the_models_answer_to_the_one_before(tmp_path):
    (prompt,) = chat(write(tmp_path, {"id": 5, "turns": ["a", "b", "c"], "workload": "toy", "source": "here"}))
    assert (prompt.name, prompt.text, prompt.turns, prompt.workload, prompt.source) == ("5", "a", 3, "toy", "here")
    assert text(prompt) == "<user>a</><assistant>"
    assert text(prompt, ["x"]) == "<user>a</><assistant>x</><user>b</><assistant>"
    assert text(prompt, ["x", "y"]).endswith("<assistant>y</><user>c</><assistant>")
    (short,) = chat(write(tmp_path, {"turns": ["a", "b", "c"]}), turns=2)
    assert short.turns == 2


def test_a_template_writes_special_tokens_itself_and_plain_text_gets_the_tokenizers():
    backend = tokenizer()
    templated = encode_turn(Prompt("p", "a", template=ChatTemplate()), backend, 100)[1]
    assert backend.decode(templated) == "<user>a</><assistant>"
    assert encode_turn(Prompt("p", "a"), backend, 100) == ("a", tuple(backend.encode("a")))
    assert backend.bos_token_id not in templated and backend.encode("a")[0] == backend.bos_token_id


def test_without_a_template_messages_are_plain_text(tmp_path):
    lines = {"turns": ["a", "b"], "system": "s"}
    for (prompt,), template in (
        (chat(write(tmp_path, lines)), None),
        (chat(write(tmp_path, lines), template="none"), TEMPLATE),
    ):
        assert text(prompt, template=template) == "s\n\na"
        assert text(prompt, ["x"], template=template) == "s\n\nax\n\nb"


def test_recorded_messages_system_prompts_and_tools(tmp_path):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "r"}, {"role": "user", "content": "b"}]
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "find"}]))
    with_own, common = chat(
        write(tmp_path, {"messages": said, "system": "mine", "tools": [{"name": "look"}]}, {"prompt": "c"}),
        system="all", tools=str(tools),
    )  # fmt: skip
    assert text(with_own) == "<system>mine</><user>a</><assistant>r</><user>b</><tools>look<assistant>"
    assert text(common) == "<system>all</><user>c</><tools>find<assistant>"
    (kept,) = chat(write(tmp_path, {"messages": [{"role": "system", "content": "first"}, *said]}), system="all")
    assert text(kept).startswith("<system>first</><user>a")
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    (tool,) = chat(write(tmp_path, {"messages": [*said, calls, {"role": "tool", "content": "42"}]}))
    assert tool.text == "42" and text(tool).endswith("<tool>42</><assistant>")


def test_thinking_and_options_reach_the_template_and_are_refused_where_nothing_reads_them(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    (on,) = chat(path, thinking=True)
    assert text(on) == "<user>a</><think=True><assistant>"
    assert text(*chat(path, options={"enable_thinking": False})) == "<user>a</><think=False><assistant>"
    with pytest.raises(ValueError, match=r"'chat-1': prompts.thinking=true has no effect: the chat template"):
        text(on, template=LOOSE)
    with pytest.raises(ValueError, match=r"thinking=true has no effect: the prompt is plain text"):
        text(on, template=None)
    with pytest.raises(ValueError, match=r"options\.effort has no effect"):
        text(*chat(path, options={"effort": "low"}))
    with pytest.raises(ValueError, match="has tools, which have no effect"):
        text(*chat(write(tmp_path, {"prompt": "a", "tools": [{"name": "f"}]})), template=LOOSE)


def test_a_system_prompt_that_the_template_does_not_read_is_refused(tmp_path):
    (prompt,) = chat(write(tmp_path, {"prompt": "a"}), system="s")
    for template in (LOOSE, "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"):
        with pytest.raises(ValueError, match=r"'chat-1' has a system prompt, which has no effect.*system=null, or put"):
            text(prompt, template=template)
    default = "{{ messages[0].content if messages[0].role == 'system' else 's' }}"
    assert text(prompt, template=default) == "s"
    with pytest.raises(ValueError, match=r"System role not supported'\); set prompts.system=null, or put it into"):
        text(prompt, template="{{ raise_exception('System role not supported') }}")


def test_tool_calls_are_not_lost_in_plain_text(tmp_path):
    calls = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    said = [{"role": "user", "content": "a"}, calls, {"role": "tool", "content": "42"}]
    (prompt,) = chat(write(tmp_path, {"messages": said}), template="none")
    with pytest.raises(ValueError, match="'chat-1' has tool_calls, which plain text cannot show"):
        text(prompt)


def test_a_tokenizer_with_several_templates_and_no_default_is_refused():
    with pytest.raises(ValueError, match=r"several chat templates \(rag, tool_use\) and none .*set prompts.template"):
        text(Prompt("p", "a", template=ChatTemplate()), template={"rag": "a", "tool_use": "b"})


def test_a_file_replaces_the_tokenizers_template(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("[{{ messages[0].content }}]")
    (prompt,) = chat(write(tmp_path, {"prompt": "a"}), template=str(file))
    assert text(prompt) == text(prompt, template=None) == "[a]"
    assert template_facts([(prompt.template, False)], tokenizer())["template"] == "file"
    facts = template_facts([(ChatTemplate(), False)], tokenizer())
    assert facts["template"] == "checkpoint" and len(facts["template_sha256"]) == 64
    plain = template_facts([(ChatTemplate(), False)], tokenizer(None))
    assert plain == template_facts([(None, False)], tokenizer()) == {"template": "none"}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[0]['content'].__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_names_the_prompt(template):
    with pytest.raises(ValueError, match="prompt 'p': the chat template refuses its messages"):
        text(Prompt("p", "a", template=ChatTemplate()), template=template)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a"}, "'prompt', 'turns' or 'messages'"),
        ({"turns": []}, "'turns' must be a list"),
        ({"turns": "a"}, "'turns' must be a list"),
        ({"turns": ["a", ""]}, r"'turns\[1\]' is empty"),
        ({"turns": ["a", 3]}, r"'turns\[1\]' must be text"),
        ({"messages": []}, "'messages' must be a list"),
        ({"messages": ["a"]}, r"'messages\[0\]' must be an object"),
        ({"messages": [{"role": "boss", "content": "a"}]}, r"'messages\[0\]'\.role must be one of system"),
        ({"messages": [{"role": "user", "content": None}]}, r"'messages\[0\]'\.content must be text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "must end with"),
        ({"messages": [{"role": "user", "content": " "}]}, "is empty"),
        ({"messages": [{"role": "user", "content": "a", "x": json.loads("[" * 70 + "]" * 70)}]}, "nested deeper"),
        ({"prompt": "a", "tools": {}}, "'tools' must be a list"),
        ({"prompt": "a", "tools": []}, "'tools' is an empty list: leave it out"),
        ({"prompt": "a", "turns": ["b"]}, "the fields 'turns' and 'prompt' contradict each other"),
        ({"messages": [{"role": "user", "content": "a"}], "text": "b"}, "the fields 'messages' and 'text' contradict"),
        (
            {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}], "system": "b"},
            r"'system' and 'messages\[0\]' are both system prompts",
        ),
        ({"prompt": "a", "tools": ["f"]}, "'tools' must be a list"),
    ],
)
def test_malformed_lines_are_refused_with_file_and_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=rf"chat\.jsonl:1: .*{message}"):
        chat(write(tmp_path, line))


def test_files_of_tools_and_templates_are_bounded(tmp_path, monkeypatch):
    file = tmp_path / "tools.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"tools must be a list"):
        chat_options(tools=str(file))
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"tools is an empty list: leave it out"):
        chat_options(tools=str(file))
    for bad in ("[", "[" * 100_000, f"[{'1' * 5000}]"):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"tools=.* is no JSON that can be read"):
            chat_options(tools=str(file))
    file.write_text(" \n")
    with pytest.raises(ValueError, match=r"template=.* is empty: set template=none"):
        chat_options(template=str(file))
    monkeypatch.setattr(conversations, "MAX_SMALL", 3)
    file.write_text("[{}]")
    for option in ("tools", "template"):
        with pytest.raises(ValueError, match="larger than 3 bytes"):
            chat_options(**{option: str(file)})


def test_answers_are_checked_in_the_last_turn_and_only_where_they_are_known(tmp_path):
    path = write(tmp_path, {"prompt": "a", "answer": 4}, {"prompt": "b"}, {"turns": ["a", "b"], "answer": "5"})
    assert [(prompt.checker, prompt.answer) for prompt in chat(path, checker="number")] == [
        ("number", "4"),
        ("", ""),
        ("number", "5"),
    ]
    assert [prompt.checker for prompt in chat(path, checker="number", turns=1)] == ["number", "", ""]
    assert [prompt.checker for prompt in chat(path)] == ["", "", ""]


def test_answers_are_validated_when_the_file_is_read(tmp_path):
    path = write(tmp_path, {"prompt": "a", "answer": 4}, {"prompt": "b", "answer": "four"})
    with pytest.raises(ValueError, match=r"chat\.jsonl:2: 'answer' must be a number, not 'four', for prompts.checker"):
        chat(path, checker="number")
    path = write(tmp_path, {"prompt": "b"}, {"turns": ["a", "b"], "answer": "5"})
    with pytest.raises(ValueError, match=r"checker=number has nothing .*or none to .*turns=1: set checker=null"):
        chat(path, checker="number", turns=1)
    with pytest.raises(ValueError, match=r"chat\.jsonl has no answers: set"):
        chat(write(tmp_path, {"prompt": "b"}), checker="exact")


def test_numbers_of_messages_and_tools_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_MESSAGES", 3)
    monkeypatch.setattr(conversations, "MAX_TOOLS", 1)
    said = [{"role": "user", "content": "a"}] * 3
    lines = {"turns": ["a"] * 3, "tools": [{}]}, {"messages": said}
    assert len(chat(write(tmp_path, *lines))) == 2
    for line, message in (
        ({"turns": ["a"] * 4}, "'turns' has 4 messages, more than 3"),
        ({"messages": [*said, said[0]]}, "'messages' must be a list of 1 to 3 objects"),
        ({"prompt": "a", "tools": [{}, {}]}, "'tools' has 2 tools, more than 1"),
    ):
        with pytest.raises(ValueError, match=rf"chat\.jsonl:1: {message}"):
            chat(write(tmp_path, line))


def test_digest_depends_on_everything_that_a_conversation_is_made_of():
    plain = Prompt("p", "a")
    changed = [
        Prompt("p", "a", later=("b",)), Prompt("p", "a", template=ChatTemplate()),
        Prompt("p", "a", template=ChatTemplate("x")), Prompt("p", "a", template=ChatTemplate("", {"thinking": True})),
        Prompt("p", "a", messages=({"role": "user", "content": "a"},)), Prompt("p", "a", tools=({"name": "f"},)),
        Prompt("p", "a", checker="exact", answer="b"), Prompt("p", "a", checker="exact", answer="c"),
    ]  # fmt: skip
    assert len({digest([given]) for given in [plain, *changed]}) == 1 + len(changed)
