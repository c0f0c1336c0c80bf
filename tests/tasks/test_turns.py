"""Conversations in a run: whose answers later turns continue, what rows record, and what is refused."""

import json
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.results.manifest import begun
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.lab import Lab
from spec_lab.tasks.serve import serve
from spec_lab.tasks.verifier_study.task import study_verifiers
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt
from tests.labs import lab, settings

CONFIG = {"target": {"path": "tiny"}, "max_new_tokens": 12}
CHATS = (
    Prompt("a", "the cat sat", "toy", later=("on the mat", "why"), template=ChatTemplate()),
    Prompt("b", "def f", "toy", template=ChatTemplate(), checker="contains", answer="e"),
    Prompt("c", "one two", "toy", later=("three",), checker="contains", answer="zz"),
    Prompt("d", "z z", "toy", later=("y",)),
)


def quiet() -> Console:
    return Console(file=StringIO(), width=300)


def chats(prompts=CHATS, **parts) -> Lab:
    return replace(lab(**parts), prompts=list(prompts))


def rows(out) -> dict[tuple[str, str, int], dict]:
    table = metrics.load(out).requests
    return {(row["arm"], row["conversation"], row["turn"]): row for row in table.to_dict("records")}


@pytest.fixture(scope="module", autouse=True)
def without_figures():
    """Figures and certificates take longer than everything else here, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_lab.tasks.benchmark.DRAWN", ())
        patch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
        patch.setattr("tests.labs.CERTIFICATES", {})  # others share theirs
        yield


@pytest.fixture(scope="module", params=[pytest.param(0.0, marks=pytest.mark.nightly), 1.0], ids=["greedy", "sampled"])
def done(request, tmp_path_factory):
    """(directory, what was printed) of a run in which each arm continues its own answers."""
    out, console = tmp_path_factory.mktemp("chats") / "out", quiet()
    assert run(chats(temperature=request.param), settings(out), CONFIG, console) == 0
    return out, console.file.getvalue()


@pytest.mark.nightly
def test_each_arm_continues_its_own_answers(done):
    table = rows(done[0])
    for arm in ("repeat", "baseline"):
        assert [key[1:] for key in table if key[0] == arm and key[2] == 1] == [(chat.name, 1) for chat in CHATS]
        for chat in CHATS:
            for turn in range(1, chat.turns):
                before, after = table[arm, chat.name, turn], table[arm, chat.name, turn + 1]
                assert after["prompt"] == f"{before['prompt']}{before['text']}\n\n{chat.later[turn - 1]}"
                assert after["name"] == f"{chat.name}, turn {turn + 1}" and after["group"] == before["group"]
                assert after["prompt_tokens"] == len(after["prompt"])
    assert len(table) == 2 * sum(chat.turns for chat in CHATS)


def test_requests_of_all_turns_have_numbers_of_their_own(done):
    table = metrics.load(done[0]).requests
    numbers = {name: number for number, name in enumerate(prompt.name for prompt in CHATS)}
    expected = table["conversation"].map(numbers) + (table["turn"] - 1) * len(CHATS)
    assert (table["request"] == expected).all() and table["id"].is_unique


def test_the_seconds_of_a_group_are_those_of_all_its_turns(done):
    tables = metrics.load(done[0])
    baseline = tables.requests[tables.requests["arm"] == "baseline"]
    per_turn = baseline.groupby(["group", "turn"])["decode_seconds"].max()
    tokens = baseline.groupby("group")["decode_tokens"].sum()
    assert metrics.group_speeds(tables.requests, "baseline").tolist() == pytest.approx(
        (tokens / per_turn.groupby("group").sum()).tolist()
    )
    assert metrics.decode_seconds(tables.forwards, "baseline") == pytest.approx(per_turn.sum())
    assert sum(metrics.phase_seconds(tables.forwards, "baseline").values()) == pytest.approx(per_turn.sum())
    assert metrics.short_groups(tables.requests) == set()
    forwards = tables.forwards[(tables.forwards["arm"] == "baseline") & (tables.forwards["group"] == 0)]
    assert forwards["forward"].tolist() == list(range(len(forwards))) and forwards["turn"].tolist() == sorted(
        forwards["turn"]
    )
    assert forwards.groupby("turn")["prefill"].sum().tolist() == [1, 1, 1]


def test_only_the_last_answer_of_a_conversation_is_checked(done):
    out, printed = done
    table = rows(out)
    for arm in ("repeat", "baseline"):
        assert table[arm, "b", 1]["checker"] == table[arm, "c", 2]["checker"] == "contains"
        assert table[arm, "c", 1]["checker"] == table[arm, "a", 3]["checker"] == ""
        assert pd.isna(table[arm, "c", 1]["correct"])
        assert table[arm, "b", 1]["correct"] == ("e" in table[arm, "b", 1]["text"].split())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["arms"]["baseline"]["accuracy"]["contains"]["answers"] == 2
    assert "by the checker contains" in printed


def test_the_manifest_records_what_a_conversation_became(done):
    facts = begun(done[0])
    assert facts["chat"] == {"conversations": 4, "turns": 3, "template": "none"}
    assert len(facts["prompt_tokens_sha256"]) == 64 and facts["sampling"]["top_p"] == 1.0


def test_all_arms_may_continue_the_baselines_answers(tmp_path):
    chat_prompts = chats(temperature=1.0)
    assert run(chat_prompts, settings(tmp_path), CONFIG, quiet(), history="baseline") == 0
    table = rows(tmp_path)
    assert table["repeat", "a", 1]["text"] != table["baseline", "a", 1]["text"]
    for arm in ("repeat", "baseline"):
        before = table["baseline", "a", 1]
        assert table[arm, "a", 2]["prompt"] == f"{before['prompt']}{before['text']}\n\non the mat"


def test_the_next_turn_continues_the_reply(tmp_path, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.groups.reply", lambda text, prompt: f"({len(text)}, {len(prompt)})")
    assert run(chats([CHATS[0]]), settings(tmp_path), CONFIG, quiet()) == 0
    table = rows(tmp_path)
    first = table["baseline", "a", 1]
    reply = f"({len(first['text'])}, {len(first['prompt'])})"
    assert table["baseline", "a", 2]["prompt"] == f"{first['prompt']}{reply}\n\non the mat"


@pytest.mark.nightly
def test_a_resumed_run_continues_with_the_next_group(tmp_path, monkeypatch):
    whole = chats(temperature=1.0)
    assert run(whole, settings(tmp_path / "whole"), CONFIG, quiet()) == 0
    calls = []

    def interrupted(self, number, *_):
        calls.append(number)
        if number == 1:
            raise KeyboardInterrupt
        return original(self, number, *_)

    from spec_lab.results.writer import Recorder

    original = Recorder.write
    monkeypatch.setattr(Recorder, "write", interrupted)
    assert run(whole, settings(tmp_path / "cut"), CONFIG, quiet()) == 130
    monkeypatch.undo()
    assert run(whole, settings(tmp_path / "cut"), CONFIG, quiet()) == 0
    table, other = rows(tmp_path / "whole"), rows(tmp_path / "cut")
    assert {key: row["text"] for key, row in table.items()} == {key: row["text"] for key, row in other.items()}


@pytest.mark.nightly
def test_a_broken_turn_has_no_next_one_and_its_group_is_left_out(tmp_path):
    chat_prompts = chats(CHATS[2:])
    poison = 60
    with torch.no_grad():
        chat_prompts.target.lm.model.get_input_embeddings().weight[poison] = float("nan")
    prompts = [chat_prompts.prompts[0], replace(chat_prompts.prompts[1], text="n" + chr(poison))]
    assert run(replace(chat_prompts, prompts=prompts), settings(tmp_path), CONFIG, quiet()) == 0
    table = rows(tmp_path)
    assert table["baseline", "d", 1]["finish"] == "nan" and ("baseline", "d", 2) not in table
    assert ("baseline", "c", 2) in table
    assert json.loads((tmp_path / "summary.json").read_text())["broken_groups"] == 1


def test_the_memory_of_a_run_is_that_of_the_last_turns(tmp_path):
    chat_prompts, options = chats(), settings(tmp_path)
    longest = chat_prompts.longest_prompts(options, chat_prompts.first_turns(options))
    assert run(chat_prompts, options, CONFIG, quiet()) == 0
    table = metrics.load(tmp_path).requests
    most = table.groupby("conversation")["prompt_tokens"].max()
    for number, prompt in enumerate(CHATS):
        assert most[prompt.name] <= longest[number] <= most[prompt.name] + options.max_new_tokens * len(prompt.later)
    short = settings(tmp_path, max_prompt_tokens=20)
    assert max(chat_prompts.longest_prompts(short, chat_prompts.first_turns(short))) == 20


def test_later_turns_reuse_the_kv_cache_of_earlier_ones(tmp_path):
    """At least that of the first prompt: an answer may be other tokens when its text is read again."""
    chat_prompts = chats([replace(CHATS[0], text="the cat sat on the mat", later=("why",))])
    for name, more in (("plain", {}), ("cached", {"prefix_cache": 4096})):
        assert run(chat_prompts, settings(tmp_path / name, **more), CONFIG, quiet()) == 0
    plain, cached = (rows(tmp_path / name) for name in ("plain", "cached"))
    assert {key: row["text"] for key, row in plain.items()} == {key: row["text"] for key, row in cached.items()}
    for arm in ("repeat", "baseline"):
        first, second = (cached[arm, "a", turn]["cached_tokens"] for turn in (1, 2))
        assert first == 0 and second >= len("the cat sat on the mat")


def test_turns_that_may_not_fit_the_context_are_refused_before_anything_runs(tmp_path):
    chat_prompts = chats()
    small = replace(chat_prompts, target=replace(chat_prompts.target, context=54))
    with pytest.raises(ValueError, match=r"prompt 'a': its 3 turns have up to \d+ tokens and the context holds 54"):
        run(small, settings(tmp_path), CONFIG, quiet())
    replace(small).check_later_turns(settings(tmp_path, max_prompt_tokens=40))


def test_other_tasks_refuse_several_turns(tmp_path):
    chat_prompts = chats(verifiers={})
    with pytest.raises(ValueError, match=r"task=serve_trace decodes one answer .*'a' has several turns: .*turns=1"):
        serve(chat_prompts, settings(tmp_path), CONFIG, quiet())
    with pytest.raises(ValueError, match="task=verifier_study decodes one answer"):
        study_verifiers(chat_prompts, settings(tmp_path, batch_size=1), CONFIG, quiet())


def test_the_baseline_s_answers_require_a_baseline(tmp_path):
    with pytest.raises(ValueError, match="history=baseline requires .*baseline=true"):
        run(chats(), settings(tmp_path, baseline=False), CONFIG, quiet(), history="baseline")
