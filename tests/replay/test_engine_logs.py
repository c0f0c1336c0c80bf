"""Logs of other engines: counters and responses as the engines write them."""

import json
from io import StringIO

import pytest
from rich.console import Console

from spec_lab.cli.commands import command
from spec_lab.replay.engine_logs import from_responses, from_vllm, sglang, trtllm, vllm_requests
from spec_lab.replay.traces import taus

METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 170.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 55.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 35.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.7e+09
"""


def by_rule(frame):
    return {(row.rule, row.depth): row.tau for row in frame.itertuples()}


def test_vllm_s_counters_are_evaluated_by_depth():
    (line,) = from_vllm(METRICS)
    assert line["at_least"] == [80, 55, 35] and line["steps"] == 100
    rows = by_rule(taus([line]))
    expected = {("observed", "all"): 2.7, ("observed", "1"): 1.8, ("observed", "2"): 2.35, ("observed", "3"): 2.7}
    assert rows == pytest.approx(expected)
    with pytest.raises(ValueError, match="is speculative decoding on"):
        from_vllm("vllm:num_requests_running{} 1.0")


SUMMARY = {
    "mean_acceptance_length": 1.5, "draft_acceptance_rate": 1 / 6, "acceptance_histogram": [5, 2, 0, 1],
    "acceptance_histogram_by_draft_length": {"3": [5, 2, 0, 1]}, "num_spec_steps": 8, "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 24, "num_spec_tokens": 3,
}  # fmt: skip


def of_vllm(**changes) -> dict:
    return {"id": "a", "choices": [], "metrics": {"speculative_decoding": SUMMARY | changes}}


def test_vllm_s_responses_count_steps_or_list_them():
    (line,) = vllm_requests(0, of_vllm())
    assert line == {"request": "a", "steps": 8, "accepted_tokens": 5, "at_least": [3, 1, 1]}
    assert by_rule(taus([line]))["observed", "1"] == pytest.approx(1 + 3 / 8)
    steps = vllm_requests(0, of_vllm(per_step_accepted=[1, 0], per_step_drafted=[3, 2]))
    assert steps == [{"request": "a", "drafted": 3, "accepted": 1}, {"request": "a", "drafted": 2, "accepted": 0}]
    several = {"metrics": {"speculative_decoding": None}}
    assert from_responses([several, of_vllm()], vllm_requests) == [line]


def test_trtllm_s_choices_count_steps():
    counts = {"acceptance_histogram": [5, 2, 0, 1], "num_spec_steps": 8, "total_accepted_draft_tokens": 5,
              "total_draft_tokens": 24, "acceptance_rate": 5 / 24, "num_spec_tokens": 3}  # fmt: skip
    response = {"id": "a", "choices": [{"index": 0, "speculative_decoding": counts}, {"index": 1}]}
    assert trtllm(0, response) == vllm_requests(0, of_vllm())


@pytest.mark.parametrize("name", ["spec_correct_drafts_histogram", "spec_accept_histogram"])
def test_sglang_s_histogram_is_evaluated_by_depth(name):
    counts = {"id": "a", "spec_verify_ct": 8, name: [5, 2, 0, 1], "spec_num_correct_drafts": 5}
    for response in ({"text": "", "meta_info": counts}, {"choices": [{"meta_info": counts}]}):
        assert sglang(0, response) == vllm_requests(0, of_vllm())


def test_sglang_s_responses_without_one_are_evaluated_as_a_whole():
    meta = [
        {"id": "x", "spec_verify_ct": 10, "completion_tokens": 31},
        {"spec_verify_ct": 5, "spec_accept_token_num": 9},
        {"spec_verify_ct": 0, "completion_tokens": 1},
    ]
    frame = taus(from_responses(({"meta_info": counters} for counters in meta), sglang))
    assert by_rule(frame) == pytest.approx({("observed", "all"): (31 + 14) / 15})


@pytest.mark.parametrize(
    ("convert", "response", "why"),
    [
        (sglang, {"meta_info": {}}, "the response has no meta_info.spec_verify_ct"),
        (vllm_requests, {"id": "a"}, "no metrics.speculative_decoding: start the server with --per-request-spec"),
        (vllm_requests, of_vllm(num_spec_steps=9), "counts 8 steps, but metrics.*num_spec_steps is 9"),
        (vllm_requests, of_vllm(acceptance_histogram=None), "acceptance_histogram must be a list of at most 1001"),
        (vllm_requests, of_vllm(acceptance_histogram=[1, -1]), r"acceptance_histogram\[1\] must be a whole number"),
        (vllm_requests, of_vllm(per_step_accepted=[1], per_step_drafted=[]), "must be lists of one length"),
        (trtllm, [], "a response is a JSON object"),
        (trtllm, {"choices": [{}]}, "no response has a step"),
    ],
)  # fmt: skip
def test_a_response_that_is_none_is_refused(convert, response, why):
    with pytest.raises(ValueError, match=why):
        from_responses([response], convert)


def test_a_command_evaluates_logs(tmp_path, capsys):
    console = Console(file=StringIO(), width=120)
    (tmp_path / "metrics.txt").write_text(METRICS)
    (tmp_path / "responses.jsonl").write_text(json.dumps(of_vllm()) + "\n")
    assert command(["replay", str(tmp_path / "metrics.txt"), "--format", "vllm"], console) == 0
    assert command(["replay", str(tmp_path / "responses.jsonl"), "--format", "vllm_requests"], console) == 0
    assert "2.350" in console.file.getvalue() and "1.625" in console.file.getvalue()
    (tmp_path / "responses.jsonl").write_text('{"meta_info": {}}\n')
    assert command(["replay", str(tmp_path / "responses.jsonl"), "--format", "sglang"], console) == 1
    assert "line 1: the response has no meta_info.spec_verify_ct" in capsys.readouterr().err
