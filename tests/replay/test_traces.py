"""Traces of other systems: the schema, what is judged from them, and the converters."""

import json

import numpy as np
import pytest

from spec_lab.cli.commands import command
from spec_lab.replay.traces import RecordedCandidates, checked, from_sglang, from_vllm, judge, read_trace
from tests.tiny import tiny_model

STEPS = [
    {"request": "a", "position": 5, "drafted": [1, 2], "accepted": 2, "p": [0.5, 0.4], "q": [0.4, 0.8]},
    {"request": "b", "position": 7, "drafted": [3, 4], "accepted": 0, "p": [0.1, 0.9], "q": [0.2, 0.3]},
]

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


def taus(frame):
    return {(one.rule, one.depth): one.tau for one in frame.itertuples()}


def test_steps_with_probabilities_are_judged_exactly():
    found = taus(judge(STEPS, lenience=[0.5]))
    assert found["observed", "all"] == 2 and found["observed", "1"] == 1.5
    assert found["token", "1"] == pytest.approx(1 + (1 + 0.5) / 2)
    assert found["token", "2"] == pytest.approx(1 + (1 + 0.5 + 0.5 + 0.5) / 2)
    assert found["match", "2"] == pytest.approx(1 + (0.5 + 0.2 + 0.1 + 0.09) / 2)
    assert found["lenient:lenience=0.5", "1"] == pytest.approx(2)
    unsampled = [{**STEPS[0], "q": None}]
    assert taus(judge(unsampled))["token", "2"] == pytest.approx(1 + 0.5 + 0.2)


def test_vllm_s_counters_are_judged_by_depth():
    (line,) = from_vllm(METRICS)
    assert line["at_least"] == [80, 55, 35] and line["steps"] == 100
    found = taus(judge([line]))
    expected = {("observed", "all"): 2.7, ("observed", "1"): 1.8, ("observed", "2"): 2.35, ("observed", "3"): 2.7}
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="is speculative decoding on"):
        from_vllm("vllm:num_requests_running{} 1.0")


def test_sglang_s_responses_are_judged_as_a_whole():
    meta = [
        {"id": "x", "spec_verify_ct": 10, "completion_tokens": 31},
        {"spec_verify_ct": 5, "spec_accept_token_num": 9},
    ]
    frame = judge(from_sglang({"meta_info": one} for one in meta))
    assert taus(frame) == pytest.approx({("observed", "all"): (31 + 14) / 15})
    with pytest.raises(ValueError, match="response 0 has no meta_info.spec_verify_ct"):
        from_sglang([{"meta_info": {}}])


def test_a_command_judges_a_file_and_converts(tmp_path, capsys):
    from io import StringIO

    from rich.console import Console

    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, STEPS)) + "\n")
    (tmp_path / "metrics.txt").write_text(METRICS)
    assert read_trace(tmp_path / "trace.jsonl") == STEPS
    console = Console(file=StringIO(), width=120)
    own = ["--csv", str(tmp_path / "out.csv"), "--verifiers", "lenient:lenience=0.5"]
    assert command(["replay", str(tmp_path / "trace.jsonl"), *own], console) == 0
    assert "lenient:lenience=0.5" in console.file.getvalue() and "lenient" in (tmp_path / "out.csv").read_text()
    assert command(["replay", str(tmp_path / "metrics.txt"), "--format", "vllm"], console) == 0
    assert "2.350" in console.file.getvalue()
    (tmp_path / "trace.jsonl").write_text('{"request": 1}\n')
    assert command(["replay", str(tmp_path / "trace.jsonl")], console) == 1
    assert "line 1: a line is an object with 'request'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"accepted": 3}, "of which there are 2"), ({"p": [0.5]}, "p has a probability"), ({"q": [2.0, 0.1]}, "q has")],
)
def test_a_wrong_line_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        checked({**STEPS[0], **changes})


@pytest.mark.nightly
def test_transformers_assisted_decoding_leaves_a_trace():
    import torch

    target, assistant, trace = tiny_model().float(), tiny_model(seed=1, num_hidden_layers=1).float(), []
    made = target._get_candidate_generator
    target._get_candidate_generator = lambda **options: RecordedCandidates(made(**options), trace, "p")
    torch.manual_seed(0)
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "top_k": 0}
    tokens = target.generate(torch.tensor([[3, 14, 15]]), assistant_model=assistant, **options)
    assert len(trace) > 2 and all(len(one["p"]) == len(one["q"]) == len(one["drafted"]) for one in trace)
    assert sum(one["accepted"] + 1 for one in trace) >= tokens.shape[1] - 3
    for one in trace:
        with torch.no_grad():
            text = tokens[:, : one["position"]]
            expected = target(text).logits[0, -1].softmax(-1)[one["drafted"][0]].item()
        np.testing.assert_allclose(one["p"][0], expected, rtol=1e-3)
