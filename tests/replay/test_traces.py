"""Traces of other systems: the schema, what is evaluated from them, and the converters."""

import json
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.cli.commands import command
from spec_lab.replay.traces import RecordedCandidates, checked, read_trace, taus
from tests.tiny import tiny_model

STEPS = [
    {"request": "a", "position": 5, "drafted": [1, 2], "accepted": 2, "p": [0.5, 0.4], "q": [0.4, 0.8]},
    {"request": "b", "position": 7, "drafted": [3, 4], "accepted": 0, "p": [0.1, 0.9], "q": [0.2, 0.3]},
]


def quiet() -> Console:
    return Console(file=StringIO(), width=120)


def by_rule(frame):
    return {(row.rule, row.depth): row.tau for row in frame.itertuples()}


def test_steps_with_probabilities_are_evaluated_exactly():
    rows = by_rule(taus(STEPS, lenience=[0.5]))
    assert rows["observed", "all"] == 2 and rows["observed", "1"] == 1.5
    assert rows["token", "1"] == pytest.approx(1 + (1 + 0.5) / 2)
    assert rows["token", "2"] == pytest.approx(1 + (1 + 0.5 + 0.5 + 0.5) / 2)
    assert rows["match", "2"] == pytest.approx(1 + (0.5 + 0.2 + 0.1 + 0.09) / 2)
    assert rows["lenient:lenience=0.5", "1"] == pytest.approx(2)
    frame = taus(STEPS, lenience=[0.5, 1])
    known = dict(zip(frame["rule"], frame["lossless"], strict=True))
    assert known == {"token": True, "match": True, "lenient:lenience=1": True, "lenient:lenience=0.5": False,
                     "observed": None}  # fmt: skip
    first = frame["rule"].tolist().index("lenient:lenience=0.5")
    assert set(frame["rule"][first:]) == {"lenient:lenience=0.5"} and frame["tau"][:first].is_monotonic_decreasing
    unsampled = [{**STEPS[0], "q": None}]
    assert by_rule(taus(unsampled))["token", "2"] == pytest.approx(1 + 0.5 + 0.2)


def test_a_command_evaluates_a_file(tmp_path, capsys):
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, STEPS)) + "\n")
    assert read_trace(tmp_path / "trace.jsonl") == STEPS
    console = quiet()
    options = ["--csv", str(tmp_path / "out.csv"), "--verifiers", "lenient:lenience=0.5"]
    assert command(["replay", str(tmp_path / "trace.jsonl"), *options], console) == 0
    assert "lenient:lenience=0.5" in console.file.getvalue() and "lenient" in (tmp_path / "out.csv").read_text()
    (tmp_path / "trace.jsonl").write_text('{"request": 1}\n')
    assert command(["replay", str(tmp_path / "trace.jsonl")], console) == 1
    assert "line 1: a line is an object with 'request'" in capsys.readouterr().err


COUNTS = {"request": "a", "steps": 100, "accepted_tokens": 170, "at_least": [80, 55, 35]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"accepted": 3}, "accepted must be at most the number of drafted tokens, 2, not 3"),
        ({"accepted": 1.5}, "accepted must be a whole number of 0 or more, not 1.5"),
        ({"accepted": -1}, "accepted must be a whole number of 0 or more, not -1"),
        ({"accepted": True}, "accepted must be a whole number of 0 or more, not true"),
        ({"accepted": 10**400}, "accepted must be at most the number of drafted tokens, 2, not a number of 1329 bits"),
        ({"drafted": 10_000_000}, "drafted must be at most 1000 or a list of token ids, not 10000000"),
        ({"drafted": [1] * 1001}, "drafted must have at most 1000 token ids, not 1001"),
        ({"drafted": 2.0}, "drafted must be a whole number of 0 or more or a list of token ids, not 2.0"),
        ({"drafted": "abcdef"}, "drafted must be a whole number of 0 or more or a list of token ids, not 'abcdef'"),
        ({"drafted": {"a": 1}}, "drafted must be a whole number"),
        ({"drafted": True}, "drafted must be a whole number"),
        ({"drafted": [1, "b"]}, r"drafted\[1\] must be a whole number"),
        ({"position": "start"}, "position must be a whole number"),
        ({"p": [0.5]}, r"p must be a list with a probability for each of 2 drafted tokens, not \[0.5\]"),
        ({"p": 3}, "p must be a list with a probability for each of 2 drafted tokens, not 3"),
        ({"p": "ab"}, "p must be a list with a probability"),
        ({"p": [0.5, float("nan")]}, r"p\[1\] must be a probability from 0 to 1, not nan"),
        ({"p": [0.5, True]}, r"p\[1\] must be a probability from 0 to 1, not true"),
        ({"p": [0.5, None]}, r"p\[1\] must be a probability from 0 to 1, not null"),
        ({"q": [2.0, 0.1]}, r"q\[0\] must be a probability from 0 to 1, not 2.0"),
        ({"q": [0.5, 0.0]}, r"q\[1\] must be above 0: a token of draft probability 0 cannot have been drafted"),
        ({"drafted": None, "q": [0.1]}, "q must be a list with a probability for each of 2 drafted"),
        ({"request": None}, "request must be a text or a whole number, not null"),
        ({"request": ["a"]}, "request must be a text or a whole number"),
    ],
)
def test_a_wrong_step_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        checked({**STEPS[0], **changes})


def test_intervals_are_over_requests():
    rng = np.random.default_rng(0)
    trace = [{"request": int(n % 7), "drafted": 3, "accepted": int(rng.integers(4))} for n in range(40)]
    trace += [{**COUNTS, "request": "z"}]
    frame = taus(trace)
    top = [1.0 + min(step["accepted"], 2) for step in trace[:-1]] + [100 + 80 + 55]
    request = np.array([str(step["request"]) for step in trace])
    expected = cluster_interval(top, [1.0] * 40 + [100], request)
    (interval,) = frame[frame["depth"] == "2"][["tau", "low", "high"]].to_numpy()
    np.testing.assert_allclose(interval, expected)
    assert expected.low < expected.mean < expected.high
    assert taus(trace[:-1])[["low", "high"]].isna().all(axis=None), "seven requests have no interval"


@pytest.mark.nightly
def test_transformers_assisted_decoding_leaves_a_trace():
    import torch

    target, assistant, trace = tiny_model().float(), tiny_model(seed=1, num_hidden_layers=1).float(), []
    made = target._get_candidate_generator
    target._get_candidate_generator = lambda **options: RecordedCandidates(made(**options), trace, "p")
    torch.manual_seed(0)
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "top_k": 0}
    tokens = target.generate(torch.tensor([[3, 14, 15]]), assistant_model=assistant, **options)
    assert len(trace) > 2 and all(len(step["p"]) == len(step["q"]) == len(step["drafted"]) for step in trace)
    assert sum(step["accepted"] + 1 for step in trace) >= tokens.shape[1] - 3
    for step in trace:
        with torch.no_grad():
            text = tokens[:, : step["position"]]
            expected = target(text).logits[0, -1].softmax(-1)[step["drafted"][0]].item()
        np.testing.assert_allclose(step["p"][0], expected, rtol=1e-3)
