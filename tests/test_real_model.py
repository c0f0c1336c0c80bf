"""The study of a real model: conversations that a model holds with itself, and the tables of its README."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from experiments.real_model import conversations
from spec_lab.models.target import Target
from spec_lab.text.answers import read_answers
from spec_lab.text.chat_template import ChatTemplate
from tests import checkpoints

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% if message.role == 'assistant' %}a"
    "{% else %}. {% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = {"seed": 3, "block": 12, "question_tokens": 60, "answer_tokens": 20}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model that ends a text with the letter a, and chats."""
    folder = checkpoints.checkpoint(tmp_path_factory.mktemp("chat") / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return Target.load(str(folder), dtype="float32")


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_model_asks_and_answers_and_training_reads_it(target, tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = conversations.write(file, target, 8, SMALL, 5)
    assert lines_of(file) == lines and len(lines) >= 8
    assert len({line["messages"][0]["content"] for line in lines}) == len(lines)
    assert set(Counter(line["temperature"] for line in lines)) == {0, 1}
    assert {line["complete"] for line in lines} == {True, False}
    texts = read_answers(str(file), target.tokenizer, target.ends, ChatTemplate())
    for line, text in zip(lines, texts, strict=True):
        ((prompt, answer),) = text.each()
        question = line["messages"][0]["content"]
        assert len(question) >= conversations.SHORTEST
        assert target.tokenizer.decode(prompt) == f"user: {question}. assistant: "
        assert (answer[-1] == 0) == line["complete"]


def test_greedy_answers_are_those_of_the_model(target, tmp_path):
    lines = conversations.write(tmp_path / "chats.jsonl", target, 4, SMALL, 5)
    line = next(line for line in lines if line["temperature"] == 0)
    question, answer = (message["content"] for message in line["messages"])
    tokens = target.tokenizer.encode(f"user: {question}. assistant: ")
    for _ in range(line["tokens"]):
        with torch.inference_mode():
            tokens.append(int(target.lm.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    emitted = tokens[-line["tokens"] :]
    assert target.tokenizer.decode(emitted[:-1] if line["complete"] else emitted).strip() == answer


def test_a_resumed_file_is_the_one_of_a_single_run(target, tmp_path):
    resumed, once = tmp_path / "resumed.jsonl", tmp_path / "once.jsonl"
    first = conversations.write(resumed, target, 1, SMALL, 5)
    conversations.write(resumed, target, len(first) + 1, SMALL, 7)
    conversations.write(once, target, len(first) + 1, SMALL, 5)
    assert resumed.read_text() == once.read_text()
    assert {line["in_block"] for line in lines_of(once)} == {0, 1}


def test_the_command_states_what_it_wrote(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conversations, "load", lambda engine, device: target)
    file = tmp_path / "chats.jsonl"
    conversations.main([str(file), "--count", "2", *OPTIONS])
    tokens = sum(line["tokens"] for line in lines_of(file))
    assert f" {tokens} tokens of answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", ["--count", "0"], "--count"),
        ("{}\n", [], "line 1, is no conversation of this script"),
        (json.dumps({**SMALL, "seed": 4, "in_block": 0, "messages": [], "tokens": 0}), [], "written with --seed 4"),
    ],
)
def test_what_would_mix_files_is_refused_before_the_model_is_loaded(tmp_path, capsys, content, options, words):
    (tmp_path / "chats.jsonl").write_text(content)
    with pytest.raises(SystemExit):
        conversations.main([str(tmp_path / "chats.jsonl"), *OPTIONS, *options])
    assert words in capsys.readouterr().err


def test_a_model_without_a_template_is_refused(target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(target.tokenizer.name_or_path)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        conversations.write(tmp_path / "chats.jsonl", replace(target, tokenizer=tokenizer), 1, SMALL, 5)
