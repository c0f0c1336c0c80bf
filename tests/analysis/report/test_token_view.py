"""The token view: every step of every output can be opened, whatever the texts, with and without recorded trees."""

import json
import re
from dataclasses import replace
from shutil import copytree

import pandas as pd
import pytest
from markupsafe import escape

from spec_lab.analysis import metrics, report
from spec_lab.analysis.report import step_data as steps_of
from spec_lab.analysis.report.step_data import embedded, output_key, step_data
from spec_lab.analysis.report.step_tree import Verification
from spec_lab.analysis.report.token_view import prompt_end, token_view
from spec_lab.constrain import AppliedConstraint
from spec_lab.core.terminal import visible
from spec_lab.propose import Null
from spec_lab.results.writer import load_token_texts
from spec_lab.tasks.benchmark import run
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Match
from tests.analysis.report.test_report import HOSTILE, Parsed
from tests.decode.test_copies import EvenTokens
from tests.labs import Repeat, lab, settings
from tests.propose.lab import draft_model
from tests.tasks.test_serve import Forking
from tests.tiny import VOCABULARY

HOW = {
    **dict.fromkeys(("repeat", "draft_model"), Verification("token", True, 1.0)),
    "baseline": Verification("match", True, 1.0),
}


@pytest.fixture(scope="module", autouse=True)
def without_figures():
    """Figures and certificates take longer than everything else here, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_lab.tasks.benchmark.DRAWN", ())
        patch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
        patch.setattr("tests.labs.CERTIFICATES", {})
        yield


def forking() -> AppliedConstraint:
    from spec_lab.constrain.control import ControllerConstraint

    return AppliedConstraint(ControllerConstraint(lambda request: Forking(False), VOCABULARY))


def conversations():
    chat = Prompt("a", "the cat sat", "toy", later=("on the mat",), template=ChatTemplate())
    return replace(lab(temperature=1.0, proposer=Repeat(3)), prompts=[chat, Prompt("b", "z z", "toy")])


RUNS = {
    "greedy": lambda: lab(),
    "sampled": lambda: lab(temperature=1.0, proposer=draft_model("2x2", "without_replacement")),
    "constrained": lambda: lab(
        temperature=1.0, proposer=draft_model("2x1", "without_replacement"), applied=AppliedConstraint(EvenTokens())
    ),
    "forks": lambda: lab(temperature=1.0, proposer=Null(), verifier=Match(), applied=forking()),
    "turns": conversations,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function that decodes a run of ``RUNS`` once, and returns its directory."""
    done = {}

    def get(name):
        if name not in done:
            done[name] = tmp_path_factory.mktemp("view") / name
            assert run(RUNS[name](), settings(done[name], record="drafts"), {}) == 0
        return done[name]

    return get


def data_of(folder):
    """Return the data of all requests of a run that the script reads, and the note."""
    tables = metrics.load(folder)
    requests = list(dict.fromkeys(tables.requests["request"].tolist()))
    return tables, *step_data(tables, requests, metrics.arms(tables), HOW, load_token_texts(folder))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RUNS)
def test_every_step_has_its_accepted_tokens_and_its_texts(name, runs):
    tables, data, note = data_of(runs(name))
    by_key = {f"{key}/{step['forward']}": step for key, steps in data["outputs"].items() for step in steps}
    assert len(by_key) == len(tables.steps) and "record=drafts" not in note
    for row in tables.steps.to_dict("records"):
        step = by_key[f"{output_key(row['request'], row['arm'], row['sequence'])}/{row['forward']}"]
        tree = step["tree"]
        assert [tree["tokens"][node] for node in tree["path"]] == tree["emitted"][: row["accepted"]]
        ranks, above = [], -1
        for node in tree["path"]:
            ranks.append([n for n, parent in enumerate(tree["parents"]) if parent == above].index(node))
            above = node
        assert ranks == list(row["path"]) and tree["kept"] == row["emitted_kept"]
        assert len(tree["emitted"]) == row["emitted"] and len(tree["tokens"]) == row["nodes"]
        assert len(tree["illegal"]) == row["nodes"] - row["legal"] and len(tree["forced"]) == row["forced"]
        assert {str(token) for token in [*tree["tokens"], *tree["emitted"]]} <= data["texts"].keys()
        forward = tables.forwards[
            (tables.forwards["arm"] == row["arm"]) & (tables.forwards["forward"] == row["forward"])
        ]
        whole = forward[forward["group"] == row["group"]]["whole"].item()
        assert sum(step["ms"]) == pytest.approx(1e3 * whole, rel=0.05, abs=0.05)
        assert step["why"]
    assert json.loads(str(embedded(data))) == data


def test_each_arm_has_its_own_prompt_in_later_turns(runs):
    folder = runs("turns")
    tables = metrics.load(folder)
    view = token_view(folder, tables, arms := metrics.arms(tables), HOW)
    rows = tables.requests.set_index(["request", "arm"])["prompt"]
    shown = {
        (prompt["request"], arms[output["arm"]]): output["prompt"]
        for prompt in view.prompts
        for output in prompt["outputs"]
    }
    assert shown == {key: prompt_end(text) for key, text in rows.items()}
    assert any(shown[request, "repeat"] != shown[request, "baseline"] for request, _ in shown)
    raw = report.write(folder).read_text(encoding="utf-8")
    assert all(raw.count(str(escape(visible(prompt)))) for prompt in shown.values())


def test_a_run_recorded_for_replay_shows_its_draft_trees(tmp_path):
    for record in ("replay", "drafts"):
        assert run(lab(temperature=1.0), settings(tmp_path / record, record=record), {}) == 0
    trees = []
    for record in ("replay", "drafts"):
        _, data, note = data_of(tmp_path / record)
        trees.append([(step["tree"], step["why"]) for steps in data["outputs"].values() for step in steps])
        assert "record=drafts" not in note and not any(text.startswith("token ") for text in data["texts"].values())
    assert trees[0] == trees[1]


def test_forced_tokens_are_no_part_of_the_expected_number(runs):
    tables = metrics.load(runs("sampled"))
    row = tables.steps[(tables.steps["arm"] == "draft_model") & (tables.steps["accepted"] == 1)].iloc[:1]
    row = row.assign(expected_accepted=0.25)

    def facts(**changes):
        steps = step_data(replace(tables, steps=row.assign(**changes)), [0, 1, 2], ["draft_model"], HOW, {})[0]
        return next(iter(steps["outputs"].values()))[0]["facts"]

    assert ", 1 accepted (expected 0.25), " in facts()
    assert ", 1 accepted, 1 of them forced (expected of the others 0.25), " in facts(forced=1, forced_accepted=1)
    assert ", 1 accepted (expected of the others 0.25), " in facts(forced=1)
    assert ", 1 accepted, " in facts(expected_accepted=float("nan"))  # of a failed step
    assert ", 1 accepted, " in facts(expected_kind="noise")  # the expectation is what was accepted


def test_the_block_is_bounded_and_says_what_is_left_out(runs, monkeypatch):
    _, whole, _ = data_of(runs("sampled"))
    size = len(str(embedded(whole)))
    monkeypatch.setattr(steps_of, "MAX_DATA", size // 2)
    _, half, note = data_of(runs("sampled"))
    kept, every = (sum(map(len, view["outputs"].values())) for view in (half, whole))
    assert 0 < kept < every and len(str(embedded(half))) <= size // 2 + 1000
    assert f"{every - kept} later steps" in note
    monkeypatch.setattr(steps_of, "MAX_STEPS", 2)
    assert sum(map(len, data_of(runs("sampled"))[1]["outputs"].values())) == 2


@pytest.fixture(scope="module")
def hostile(runs, tmp_path_factory):
    """A page whose tokens are hostile texts, and the address of one of its steps."""
    out = tmp_path_factory.mktemp("hostile") / "run"
    copytree(runs("sampled"), out)
    tokens = pd.read_parquet(out / "tokens.parquet")
    tokens["text"] = HOSTILE
    tokens.to_parquet(out / "tokens.parquet")
    page = report.write(out)
    steps = metrics.load(out).steps
    row = steps[(steps["arm"] == "draft_model") & (steps["accepted"] == 1) & steps["stop_had_children"]].iloc[0]
    return page, row


@pytest.mark.nightly
def test_hostile_token_texts_stay_texts(hostile):
    raw = hostile[0].read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="steps">(.*?)</script>', raw, re.DOTALL)[1]
    data = json.loads(block)
    assert all(text.startswith("</script><script>document.title=") for text in data["texts"].values())
    assert "<" not in block and "&" not in block and not re.search("[\x00\u2028\u202e]", raw)
    assert not any("\u202e" in text for text in data["texts"].values())
    assert [tag for tag, _ in Parsed(hostile[0]).tags].count("script") == 3
