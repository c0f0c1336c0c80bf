"""Conversations on the command line: a checkpoint with a chat template and recommended sampling."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from spec_lab.analysis import metrics
from spec_lab.cli.bundled import conf
from spec_lab.cli.start import plain_text
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt
from tests import checkpoints

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
NO_PENALTIES = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None,
    "bad_words_ids": [],
}  # fmt: skip
ANSWERS = {"do_sample": True, "temperature": 0.5, "top_k": 9, "eos_token_id": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that chats, and files of questions."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoints.checkpoint(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    (folder / "target" / "generation_config.json").write_text(json.dumps(ANSWERS))
    lines = [
        {"question_id": n, "category": "toy", "turns": [f"say {word}", "again"]} for n, word in enumerate(("a", "b"))
    ]
    (folder / "question.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [{"question": "how many", "answer": "#### 3"}, {"question": "and now", "answer": "#### 4"}]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def options(folder) -> list[str]:
    return [
        f"target.path={folder / 'target'}", "target.dtype=float32", "proposer=ngram", "proposer.depth=3",
        "max_new_tokens=6", "warmup=0", f"prompts.path={folder}", "output_dir=out",
    ]  # fmt: skip


def test_a_dataset_by_name_with_the_checkpoints_template_and_sampling(quick_cli, folder, tmp_path):
    code, _, errors = quick_cli("prompts=mt_bench", "sampling=checkpoint", "sampling.top_k=5", *options(folder))
    assert code == 0, errors
    facts = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert facts["sampling"] == {"temperature": 0.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0, **NO_PENALTIES}
    assert facts["chat"]["template"] == "checkpoint" and facts["chat"]["turns"] == 2
    table = metrics.load(tmp_path / "out").requests
    assert set(table["prompt"][table["turn"] == 1]) == {f"user: say {word}\nassistant:" for word in "ab"}
    for row in table[table["turn"] == 2].to_dict("records"):
        assert row["prompt"].startswith("user: say ") and row["prompt"].endswith("\nuser: again\nassistant:")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["temperature"] == 0.5 and summary["sampling"] == facts["sampling"]


@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        ("spec_bench", "set prompts.template=checkpoint"),
        ("jsonl", "choose prompts=chat"),
        ("spec_bench", None),
    ],
)
def test_plain_text_for_a_model_with_a_chat_template_is_named_with_the_option(folder, chosen, change):
    prompts = [Prompt("a", "text", template=None if change else ChatTemplate())]
    config = OmegaConf.load(Path(conf(), "prompts", f"{chosen}.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    said = plain_text(OmegaConf.create({"prompts": config}), prompts, SimpleNamespace(tokenizer=tokenizer))
    assert said == "" if change is None else said.startswith("1 of 1 prompts are plain text") and change in said
    tokenizer.chat_template = None
    assert plain_text(OmegaConf.create({"prompts": config}), prompts, SimpleNamespace(tokenizer=tokenizer)) == ""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["prompts=mt_bench", "prompts.thinking=true"], "prompts.thinking=true has no effect: the chat template"),
        (["prompts=gsm8k", "prompts.checker=oracle"], "prompts.checker must be one of exact"),
        (["prompts=humaneval"], "holds no HumanEval.jsonl.gz or HumanEval.jsonl"),
        (["prompts=mt_bench", "task.history=mine"], "task.history must be one of own, baseline"),
        (["prompts=mt_bench", "sampling=checkpoint", "sampling.top_p=3"], "sampling.top_p must be a number above 0"),
        (["prompts=mt_bench", "task=serve_trace"], "set prompts.turns=1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(cli, folder, given, message):
    code, _, errors = cli(*given, *options(folder))
    assert code == 1 and message in errors and errors.count("spec_lab:") == 1
