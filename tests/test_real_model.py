"""The study of a real model: conversations that a model holds with itself, and the tables of its README."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

from experiments.real_model import conversations, figure, heads, settings
from spec_lab.cli.bundled import conf
from spec_lab.models import smollm2
from spec_lab.models.gguf_export import convert
from spec_lab.models.target import Target
from spec_lab.text.answers import read_answers
from spec_lab.text.chat_template import ChatTemplate
from tests import checkpoints
from tests.gguf_files import with_zoo_tokenizer

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "tests" / "data" / "questions.jsonl"

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
    loaded = []
    monkeypatch.setattr(conversations, "load", lambda engine, device: loaded.append((engine, device)) or target)
    file = tmp_path / "chats.jsonl"
    conversations.main([str(file), "--count", "2", *OPTIONS])
    tokens = sum(line["tokens"] for line in lines_of(file))
    assert f" {tokens} tokens of answers" in capsys.readouterr().out
    assert loaded == [("transformers", "cpu")]


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


# Figure and tables


def results(**changes):
    """Results of two arms without training on both engines, and of a head."""
    kept = {"tau_macro": 1.5, "baseline_tokens_per_second": 100.0, "baseline_roofline_share": 0.3, "temperature": 0.0}
    arms = [("llama.cpp", "ngram_3", 0.9), ("llama.cpp", "suffix", 0.8), ("transformers", "ngram_3", 1.2)]
    rows = [
        kept | {"engine": engine, "arm": arm, "speedup": speed, "speedup_low": speed - 0.1, "speedup_high": speed + 0.1}
        for engine, arm, speed in [*arms, ("transformers", "medusa", 1.5)]
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_the_finding_counts_drafts_that_are_faster_with_their_whole_interval():
    counted = "none of 2 by llama.cpp; 2 of 2 by transformers, at most 1.50 times as fast"
    assert counted in figure.finding(results())
    assert "none of 2 by transformers." in figure.finding(results(speedup_low=0.99))


def test_the_title_of_the_figure_is_its_finding():
    only = "Drafts are shown to be faster than the baseline in transformers only: 2 of 4, at most 1.50 times"
    assert figure.claim(results()) == only
    assert "in llama.cpp and transformers: 4 of 4, " in figure.claim(results(speedup_low=1.1))
    assert figure.claim(results(speedup_low=0.99)) == "No draft is shown to be faster than its engine's baseline"


def test_the_readme_s_table_has_the_fastest_of_each_kind_on_each_engine():
    rows = [line.split(" | ") for line in figure.headline(results()).splitlines() if line.startswith("| ")]
    assert rows[1] == ["| llama.cpp", "0", "100", "30 %", "n-gram, 3: 0.90 [0.80, 1.00], 1.50", "- |"]
    assert rows[2][-2:] == ["n-gram, 3: 1.20 [1.10, 1.30], 1.50", "Medusa tree: 1.50 [1.40, 1.60], 1.50 |"]


def test_each_arm_has_a_row_with_a_cell_for_each_engine():
    rows = [line.strip("| ").split(" | ") for line in figure.written(results()).splitlines() if line.startswith("| ")]
    cells = {name: rest for name, *rest in rows[2:]}
    assert cells["Medusa tree"] == ["-", "1.50 [1.40, 1.60], 1.50"]
    assert cells["suffix"][1] == "-" and len(figure.draw(results()).axes) == 2


def test_the_readme_of_the_repository_has_a_place_for_the_table(tmp_path):
    text = (ROOT / "README.md").read_text()
    assert "<!-- real model -->" in text and "<!-- end of real model -->" in text


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A tiny model in place of the package's."""
    pytest.importorskip("gguf", reason="requires the extra llamacpp")
    folder = tmp_path / "a_package_of_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    convert(str(with_zoo_tokenizer(tmp_path / "tiny")), folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_of_smollm2")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.nightly
def test_the_experiment_is_swept_on_a_tiny_model_and_drawn(tmp_path, installed, quick_cli):
    short = [f"prompts.path={QUESTIONS}", "prompts.every=1", "max_new_tokens=6", "warmup=0", "threads=1"]
    given = ["+experiment=real_model", "target.engine=transformers", "target.dtype=float32", *short]
    code, _, errors = quick_cli("--multirun", *given, "sampling.temperature=0,1", "output_dir=runs/transformers")
    assert code == 0, errors
    for page in ("README.md", "experiments/real_model/README.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    folder = tmp_path / "experiments" / "real_model"
    options = ["--folder", str(folder), "--readme", str(tmp_path / "README.md")]
    table = figure.main([str(tmp_path / "runs"), *options])
    assert len(table) == 2 * 6 and (table["tau_macro"] >= 1).all() and set(table["engine"]) == {"transformers"}
    assert (folder / "real_model.png").stat().st_size and "lookahead" in (folder / "README.md").read_text()
    assert "| transformers | 0 |" in (tmp_path / "README.md").read_text()


def test_every_setting_composes_and_has_prompts_of_its_own(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(settings, "spec_lab", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(settings, "targets", lambda folder: {"weights in q8_0": ["target=gguf", "target.path=a.gguf"]})
    chosen = SimpleNamespace(out=tmp_path, limit=2, new=4, threads=1)
    settings.measure(chosen, {"medusa": ("medusa", {"path": tmp_path})})
    assert len(commands) == 2 * len(settings.settings(tmp_path, 2)) + 1
    with initialize_config_dir(conf(), version_base="1.3"):
        for command in commands:
            config = compose("config", [text for text in command if text != "--multirun"])
            assert config.max_new_tokens == 4 and {"ngram_sure", "ngram_goodput"} <= set(config.arms)
            assert ("medusa" in config.arms) == (config.target.get("engine") == "transformers" and not config.peers)
    assert not any(text.startswith("prompts.limit") for command in commands for text in command)
    every = ["prompts.every=40" in command for command in commands if "prompts=mt_bench" in command]
    assert every == 2 * [True, False], "a part of the conversations with kept prefixes, all of them without"
    for name in ("code", "long", "json"):
        assert len(lines_of(tmp_path / "prompts" / f"{name}.jsonl")) == 2


def test_the_finding_names_the_fastest_draft_of_each_engine():
    table = results(setting="code")
    assert "by llama.cpp in 0 of 1 (at most 0.90 times as fast: " in settings.finding(table)
    assert "by transformers in 1 of 1 (at most 1.50 times as fast: Medusa tree, code)" in settings.finding(table)
    assert "1.50 [1.40, 1.60], 1.50" in settings.written(table)


# Heads


@pytest.fixture
def run(tmp_path):
    """A training that has ended."""
    facts = {"drafter": "medusa", "sha256": "ab", "texts": 32, "steps": 2, "parameters": 2_500_000, "temperature": 1.0}
    lengths = {"accepted": [0.5, 0.25], "agreed": [0.6, 0.3], "estimated_length": 0.625, "measured_length": 0.75}
    shares = {"loss": [1.0, 2.0], "accepted": [0.5, 0.2], "agreed": [0.5, 0.2]}
    line = {"step": 2, "texts": 32, "seconds": 5400.0, **shares, "length_at_1": 0.6, "length_greedy": 0.6}
    hashes = {"weights_sha256": {}, "prompts_sha256": "", "commit": None, "versions": {}}
    made = {
        "seed": 0,
        "arms": ["medusa"],
        "threads": 1,
        "proposers": {},
        "machine": {"processor": "EPYC", "gpus": [], "cores": 2},
    }
    manifest = {"config": {"task": {"passes": 2.0}}, **hashes, **made}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**facts, **lengths, "learning": [line]}))
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "run"


def test_the_table_of_heads_states_what_a_training_left(run, tmp_path):
    shutil.copy(ROOT / "experiments" / "real_model" / "README.md", tmp_path)
    heads.main([str(run), "--folder", str(tmp_path)])
    cells = "| medusa | 2.5 | 32 x 2 | 2 | 1.50 | EPYC, 1 of 2 cores | 0.50 0.25 (T = 1) | 0.62 | 0.75 | `ab` |"
    assert cells in (tmp_path / "README.md").read_text()


def test_a_training_that_has_not_ended_has_no_row(run, capsys):
    (run / "summary.json").unlink()
    with pytest.raises(SystemExit):
        heads.main([str(run)])
    assert "has not ended" in capsys.readouterr().err
