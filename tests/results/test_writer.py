"""Rows of a decoded group: their columns, and how they are stored."""

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_lab.results import schema, writer
from spec_lab.results.writer import Recorder, load
from spec_lab.tasks.lab import Loop
from spec_lab.verify import Match
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """Two requests decoded by a proposer that drafts two tokens: (requests, Decoded, round rows, step rows)."""
    one = lab(temperature=1.0)
    requests = one.requests(settings(tmp_path_factory.mktemp("out"), max_new_tokens=20))[:2]
    done = Loop(one.target, Repeat(2), Match(), seed=3).decode(requests)
    return requests, done, *writer.rows_of(done.steps, group=7, arm="speculative")


def test_columns_are_those_of_the_schema(decoded):
    _, _, rounds, steps = decoded
    assert set(rounds[0]) == set(schema.ROUNDS)
    assert set(steps[0]) == set(schema.STEPS)


def test_steps_contain_the_whole_output(decoded):
    requests, done, _, steps = decoded
    for request, outcome in zip(requests, done.outcomes, strict=True):
        own = [step for step in steps if step["request"] == request.id]
        assert sum(step["emitted_kept"] for step in own) == len(outcome.tokens) == 20
        assert [step["finish"] for step in own] == [""] * (len(own) - 1) + ["length"]
        assert own[0]["prefill"] and not any(step["prefill"] for step in own[1:])
        assert own[0]["pending"] == own[0]["context"] == len(request.tokens)
        length = len(request.tokens)
        for number, step in enumerate(own):
            assert step["id"] == f"{request.id}/speculative/0/{number}"
            assert step["round"] == number
            assert step["context"] == length
            assert (step["nodes"], step["depth"]) == (2, 2)
            assert step["path"] == [0] * step["accepted"]
            assert step["emitted"] == step["accepted"] + 1
            assert step["stop_had_children"] == (step["accepted"] < 2)
            assert 0 <= step["expected_accepted"] <= 2
            length += step["emitted_kept"]
        assert outcome.prefill_tokens == own[0]["emitted_kept"]


def test_truncation_appears_in_the_last_step_only(decoded):
    _, _, _, steps = decoded
    for step in steps:
        whole = step["emitted"] == step["emitted_kept"] and step["accepted"] == step["accepted_kept"]
        assert whole or step["finish"] == "length"


def test_rounds_hold_the_batch(decoded):
    _, done, rounds, steps = decoded
    for number, row in enumerate(rounds):
        own = [step for step in steps if step["round"] == number]
        assert row["live"] == len(own)
        assert row["nodes"] == sum(step["nodes"] for step in own)
        assert row["prefill"] == (number == 0)
        phases = sum(row[phase] for phase in ("propose", "mask_wait", "target", "probabilities", "verify", "commit"))
        assert phases == pytest.approx(row["whole"])
        assert 0 < row["target_forward"] <= row["target"]
    starts = [row["start"] for row in rounds]
    assert starts[0] == 0
    assert starts == sorted(starts)
    ends = {outcome.decode_seconds + outcome.prefill_seconds for outcome in done.outcomes}
    assert max(ends) == pytest.approx(rounds[-1]["start"] + rounds[-1]["whole"])


def test_slim_steps_keep_no_draft_distributions(decoded):
    _, done, *_ = decoded
    assert all(one.draft.q is None for one in done.steps)


def rows(group: int, tag: str = "") -> tuple[list, list, list]:
    """One row per table, with only the columns that storing reads."""

    def row(name: str) -> dict:
        empty = {pa.string(): tag, pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}
        kinds = writer.SCHEMAS[name].items()
        return {column: empty.get(kind, []) for column, (kind, _) in kinds} | {"id": f"{group}/a", "group": group}

    return [row("rounds")], [row("steps")], [row("requests")]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.parquet", "rounds.parquet", "steps.parquet"]
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


def test_a_group_without_its_requests_never_finished(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *rows(0))
    rounds, steps, _ = rows(1)
    recorder.write(1, rounds, steps, [])  # killed before the requests were written
    (tmp_path / "parts" / ".rounds-000002.parquet.tmp").write_bytes(b"half")
    assert recorder.finished() == {0}
    assert load(tmp_path).rounds["group"].tolist() == [0]


def test_a_folder_without_parts_is_empty_tables(tmp_path):
    tables = load(tmp_path / "nowhere")
    assert len(tables.rounds) == len(tables.steps) == len(tables.requests) == 0
    assert list(tables.steps.columns) == list(schema.STEPS)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "steps.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"steps\.parquet "):
        load(tmp_path)


def test_gathering_removes_what_a_killed_write_left(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / ".rounds-000003.parquet.tmp").write_text("half a ta")
    Recorder(tmp_path).gather()
    assert not (tmp_path / "parts").exists()
