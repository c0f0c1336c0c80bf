"""Rows of a decoded group: their columns, and how they are stored."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits, fixed_group
from spec_lab.decode.step_info import EXPERT_COLUMNS
from spec_lab.propose import Null
from spec_lab.results import old_names, schema, writer
from spec_lab.results.writer import Recorder, load
from spec_lab.tasks.lab import Loop
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Match
from tests.labs import Repeat, lab, settings
from tests.runners.replays import LONG, slow_target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """Two requests decoded by a proposer that drafts two tokens: (requests, Decoded, round rows, step rows)."""
    laboratory = lab(temperature=1.0)
    requests = laboratory.requests(settings(tmp_path_factory.mktemp("out"), max_new_tokens=20))[:2]
    done = Loop(laboratory.target, Repeat(2), Match(), CounterDraws(3)).decode(requests)
    return requests, done, *writer.rows_of(done.steps, group=7, arm="medusa")


def test_columns_are_those_of_the_schema(decoded):
    _, _, forwards, steps = decoded
    assert set(forwards[0]) == {*schema.FORWARDS, *schema.OPTIONAL["forwards"]} - {*EXPERT_COLUMNS}
    assert set(steps[0]) == set(schema.STEPS)


def test_steps_contain_the_whole_output(decoded):
    requests, done, _, steps = decoded
    for request, outcome in zip(requests, done.outcomes, strict=True):
        request_steps = [step for step in steps if step["request"] == request.id]
        assert sum(step["emitted_kept"] for step in request_steps) == len(outcome.tokens) == 20
        assert [step["finish"] for step in request_steps] == [""] * (len(request_steps) - 1) + ["length"]
        assert request_steps[0]["prefill"] and not any(step["prefill"] for step in request_steps[1:])
        assert request_steps[0]["pending"] == request_steps[0]["context"] == len(request.tokens)
        length = len(request.tokens)
        for number, step in enumerate(request_steps):
            assert step["id"] == f"{request.id}/medusa/0/{number}"
            assert step["forward"] == number
            assert step["context"] == length
            assert (step["nodes"], step["depth"]) == (2, 2)
            assert step["path"] == [0] * step["accepted"]
            assert step["emitted"] == step["accepted"] + 1
            assert step["stop_had_children"] == (step["accepted"] < 2)
            assert 0 <= step["expected_accepted"] <= 2
            length += step["emitted_kept"]
        assert outcome.prefill_tokens == request_steps[0]["emitted_kept"]


def test_truncation_appears_in_the_last_step_only(decoded):
    _, _, _, steps = decoded
    for step in steps:
        whole = step["emitted"] == step["emitted_kept"] and step["accepted"] == step["accepted_kept"]
        assert whole or step["finish"] == "length"


def test_rounds_hold_the_batch(decoded):
    _, done, forwards, steps = decoded
    for number, row in enumerate(forwards):
        live_steps = [step for step in steps if step["forward"] == number]
        assert row["live"] == len(live_steps)
        assert row["nodes"] == sum(step["nodes"] for step in live_steps)
        assert row["prefill"] == (number == 0)
        phases = sum(row[phase] for phase in ("propose", "mask_wait", "target", "probabilities", "verify", "commit"))
        assert phases == pytest.approx(row["whole"])
        assert 0 < row["target_forward"] <= row["target"]
    starts = [row["start"] for row in forwards]
    assert starts[0] == 0
    assert starts == sorted(starts)
    ends = {outcome.decode_seconds + outcome.prefill_seconds for outcome in done.outcomes}
    assert max(ends) == pytest.approx(forwards[-1]["start"] + forwards[-1]["whole"])


def test_a_fixed_group_s_prefill_is_divided_by_the_tokens_computed_for_each_request(decoded):
    requests, done, forwards, _ = decoded
    computed = [len(request.tokens) + 2 for request in requests]  # the prompt, and two drafted tokens
    for outcome, tokens in zip(done.outcomes, computed, strict=True):
        assert outcome.queue_seconds == 0 and outcome.prefill_seconds == pytest.approx(forwards[0]["whole"])
        share = tokens / sum(computed)
        assert outcome.prefill_compute_seconds == pytest.approx(share * forwards[0]["whole"])


def test_prompts_in_chunks_share_each_step_with_those_that_decode():
    """Prompts of 3, 11 and 2 tokens, four a step: 3 + 1 of the second; then 1 decoded + 4; 1 + 4; 1 + 2 + 2."""
    lengths, shares = (3, 11, 2), [[3 / 4], [1 / 4, 4 / 5, 4 / 5, 2 / 5], [2 / 5]]
    target = tiny_target()
    engine = Engine(Arm(target, Null(), Match(), CounterDraws(0)), limits=Limits(max_prefill_tokens=4))
    for number, length in enumerate(lengths):
        engine.add(Request(number, f"r{number}", tuple(range(1, length + 1)), max_new_tokens=6))
    infos = list(engine)
    spent = [info.clock.seconds(info.began, info.ended) for info in infos]
    done = writer.outcomes(engine.sequences, infos, {})
    for outcome, first, share in zip(done, (0, 0, 3), shares, strict=True):
        expected = sum(share * seconds for share, seconds in zip(share, spent[first:], strict=False))
        assert outcome.prefill_compute_seconds == pytest.approx(expected)
    assert done[1].prefill_seconds >= sum(spent[:4]) > done[1].prefill_compute_seconds


def test_seconds_of_requests_leave_out_captures():
    arm = Arm(slow_target(), Repeat(2), Match(), CounterDraws(0))
    engine = fixed_group(arm, [Request(number, "", (1, 2, 3), max_new_tokens=12) for number in range(2)])
    infos = list(engine)
    forwards, _ = writer.rows_of(infos, 0, "")
    assert sum(row["captures"] for row in forwards[1:]) > 0
    last = forwards[-1]["start"] + forwards[-1]["whole"]
    outcomes = writer.outcomes(engine.sequences, infos, {})
    assert max(outcome.prefill_seconds + outcome.decode_seconds for outcome in outcomes) == last < LONG
    computed = sum(outcome.prefill_compute_seconds for outcome in outcomes)
    assert computed == pytest.approx(forwards[0]["whole"])


def rows(group: int, tag: str = "") -> tuple[list, list, list]:
    """One row per table, with only the columns that storing reads."""

    def row(name: str) -> dict:
        empty = {pa.string(): tag, pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}
        kinds = writer.SCHEMAS[name].items()
        return {column: empty.get(kind, []) for column, (kind, _) in kinds} | {"id": f"{group}/a", "group": group}

    return [row("forwards")], [row("steps")], [row("requests")]


def test_groups_are_on_disk_as_soon_as_written(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *rows(0))
    recorder.write(1, *rows(1))
    assert recorder.finished() == {0, 1}
    assert load(tmp_path).steps["id"].tolist() == ["0/a", "1/a"]
    assert not list(tmp_path.glob("*.parquet"))


def test_gathering_leaves_one_file_a_table(tmp_path):
    recorder = Recorder(tmp_path)
    for group in (0, 1):
        recorder.write(group, *rows(group))
    before = load(tmp_path)
    gathered = recorder.gather()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forwards.parquet", "requests.parquet", "steps.parquet"]
    for name in writer.SCHEMAS:
        pd.testing.assert_frame_equal(getattr(gathered, name), getattr(before, name))
        pd.testing.assert_frame_equal(getattr(load(tmp_path), name), getattr(before, name))
        kept = pq.read_schema(tmp_path / f"{name}.parquet")
        assert kept.field("id").metadata[b"is"]


def test_duplicates_are_dropped_by_id_and_the_later_wins(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *rows(0, tag="first"))
    recorder.gather()
    recorder.write(0, *rows(0, tag="second"))
    assert recorder.gather().requests["arm"].tolist() == ["second"]


def under_old_names(folder: Path) -> None:
    """Give files and columns the names of the version before; see ``results.old_names``."""
    for file in [*folder.glob("*.parquet"), *folder.glob("parts/*.parquet")]:
        table = pq.read_table(file)
        names = ["round" if name == "forward" else name for name in table.column_names]
        file.unlink()
        pq.write_table(table.rename_columns(names), file.parent / file.name.replace("forwards", "rounds"))


def test_columns_of_older_versions_have_their_names_of_today():
    assert old_names.with_columns(pa.table({"round": [1], "least_seconds": [0.5]}), Path()).column_names == [
        "forward", "lower_bound_seconds",
    ]  # fmt: skip


def test_values_of_older_versions_have_their_names_of_today():
    table = old_names.with_columns(pa.table({"way": ["root", "point", "without"], "token": [1, 2, 3]}), Path())
    assert table["way"].to_pylist() == ["root", "deterministic", "without_replacement"]


def test_what_older_versions_did_not_count_of_forwards_is_0():
    table = old_names.with_columns(pa.table({"copies_after": [1]}), Path())
    assert table.to_pylist() == [{"copies_after": 1, "uploads": 0, "captures": 0, "capture": 0.0}]


@pytest.mark.parametrize("gathered", [False, True])
def test_a_run_of_the_version_before_is_read_and_resumed(tmp_path, gathered):
    recorder = Recorder(tmp_path)
    for group in (0, 1):
        recorder.write(group, *rows(group))
    if gathered:
        recorder.gather()
    before = load(tmp_path)
    under_old_names(tmp_path)
    for name in writer.SCHEMAS:
        pd.testing.assert_frame_equal(getattr(load(tmp_path), name), getattr(before, name))
    recorder.discard(1)
    recorder.write(1, *rows(1, tag="again"))
    recorder.write(2, *rows(2))
    assert recorder.gather().forwards["arm"].tolist() == ["", "again", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forwards.parquet", "requests.parquet", "steps.parquet"]
    assert load(tmp_path).steps["id"].tolist() == ["0/a", "1/a", "2/a"]


def test_a_group_without_its_requests_never_finished(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *rows(0))
    forwards, steps, _ = rows(1)
    recorder.write(1, forwards, steps, [])  # killed before the requests were written
    (tmp_path / "parts" / ".forwards-000002.parquet.tmp").write_bytes(b"half")
    assert recorder.finished() == {0}
    assert load(tmp_path).forwards["group"].tolist() == [0]


DRAFTED = {"draft_tokens": [[4, 5]], "draft_p": [[0.5, 0.25]], "draft_q": [[0.125, None]]}


def with_drafts(group: int) -> tuple[list, list, list]:
    forwards, steps, requests = rows(group)
    return forwards, [steps[0] | {name: values for name, (values,) in DRAFTED.items()}], requests


@pytest.mark.parametrize("gathered", [False, True])
def test_optional_columns_are_written_where_the_recorder_is_made_for_them(tmp_path, gathered):
    recorder = Recorder(tmp_path, schema.DRAFT_COLUMNS)
    for group in (0, 1):
        recorder.write(group, *with_drafts(group))
    if gathered:
        recorder.gather()
        assert pq.read_schema(tmp_path / "steps.parquet").field("draft_q").metadata[b"is"]
    steps = load(tmp_path).steps
    assert list(steps.columns) == [*schema.STEPS, *schema.DRAFT_COLUMNS]
    assert steps["draft_tokens"].map(list).tolist() == [[4, 5]] * 2
    assert steps["draft_p"].map(list).tolist() == [[0.5, 0.25]] * 2
    for q in steps["draft_q"]:
        assert q[0] == 0.125 and pd.isna(q[1])


def test_an_optional_column_may_hold_nulls_and_a_required_one_may_not(tmp_path):
    recorder = Recorder(tmp_path, ["policy"])
    recorder.write(0, *rows(0))
    assert recorder.gather().steps["policy"].isna().all() and load(tmp_path).steps["policy"].isna().all()
    forwards, steps, requests = rows(1)
    recorder.write(1, forwards, [steps[0] | {"path": None}], requests)
    with pytest.raises(ValueError, match="column path"):
        load(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "steps.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"steps\.parquet "):
        load(tmp_path)


def test_gathering_removes_what_a_killed_write_left(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / ".forwards-000003.parquet.tmp").write_text("half a ta")
    Recorder(tmp_path).gather()
    assert not (tmp_path / "parts").exists()


def test_answers_are_checked_as_the_end_of_the_prompt_and_its_template_demand(decoded):
    outcome = decoded[1].outcomes[0]

    def correct(shown: str, text: str = "how many?", template: ChatTemplate | None = None) -> bool | None:
        prompt = Prompt("p", text, template=template, checker="number", answer="3")
        return writer.request_row(outcome, prompt, shown, [], 0, 0, "medusa", 0)["correct"]

    assert correct("3\n\nQuestion: 4?") and not correct("3\n\nQuestion: 4?", template=ChatTemplate())
    assert correct("4</think>3", "how many?<think>\n") and not correct("3", "how many?<think>\n")
    unchecked = writer.request_row(outcome, Prompt("p", "x"), "3", [], 0, 0, "medusa", 0)
    assert unchecked["correct"] is None
