"""The training loop: what is seen when, checkpoints, learning curves."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from spec_lab.train.fit import CHECKPOINT, FitPlan, fit, order_of, saved_steps
from spec_lab.train.objectives import Measured
from spec_lab.train.texts import Texts, frequent
from spec_lab.train.trainer import Plan, Trainer

PLAN = FitPlan(2.0, rows=4, part=2, warmup=2, every=3, plan=Plan(muon_rate=1e-2, adamw_rate=1e-2))
FILES, ROWS = 3, 8
STEPS = 12


def trainer():
    torch.manual_seed(0)
    return Trainer(torch.nn.Linear(4, 4), PLAN.plan, 2, torch.float32)


class Objective:
    """Pulls the weights to a value that depends on the text; keeps the texts that it has seen."""

    def __init__(self, network):
        self.network, self.seen = network, []

    def __call__(self, text):
        self.seen += text.ids[:, 0].tolist()
        loss = (self.network(text.ids[:, :4].float()) - 1).square().mean()
        return loss, [Measured(loss, 0.5, 0.25, 8), Measured(loss, 0.5, 0.5, 8)]


@pytest.fixture
def paths(tmp_path):
    """Files of texts whose first token is the text's number."""
    files = []
    for number in range(FILES):
        ids = torch.arange(number * ROWS, (number + 1) * ROWS)[:, None].repeat(1, 5)
        files.append(tmp_path / f"{number}.safetensors")
        Texts(ids, torch.zeros(ROWS, dtype=torch.long), torch.full((ROWS,), 5)).write(files[-1])
    return files


def weights(trained):
    return {name: tensor.clone() for name, tensor in trained.tensors().items()}


def test_each_pass_sees_every_text_once_in_another_order():
    order = order_of(parts=5, rows=4, batch=8, passes=2.5)
    first, second, rest = order[:10], order[10:20], order[20:]
    assert sorted(first) == sorted(second) == [(part, row) for part in range(5) for row in (0, 4)]
    assert first != second and len(rest) == 5
    assert order == order_of(parts=5, rows=4, batch=8, passes=2.5)


def test_a_step_is_computed_on_its_texts_in_pieces(paths, tmp_path):
    training = trainer()
    objective = Objective(training.model)
    ticks = []
    fit(training, objective, paths, tmp_path / "out", PLAN, {}, tick=lambda *both: ticks.append(both))
    assert ticks == [(step + 1, STEPS) for step in range(STEPS)]
    expected = [
        number for part, row in order_of(FILES, 4, ROWS, 2.0) for number in range(part * 8 + row, part * 8 + row + 4)
    ]
    steps = [sorted(objective.seen[start : start + 4]) for start in range(0, len(objective.seen), 4)]
    assert steps == [expected[start : start + 4] for start in range(0, len(expected), 4)]


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_stopped_training_resumes_to_the_same_weights_and_curve(paths, tmp_path, stop):
    whole = trainer()
    fit(whole, Objective(whole.model), paths, tmp_path / "whole", PLAN, {"a": 1})
    first = trainer()
    fit(first, Objective(first.model), paths, tmp_path / "parts", PLAN, {"a": 1}, stop_after=stop)
    assert first.step == stop
    second = trainer()
    objective = Objective(second.model)
    fit(second, objective, paths, tmp_path / "parts", PLAN, {"a": 1})
    assert len(objective.seen) == (STEPS - stop) * 4
    assert weights(whole).keys() == weights(second).keys()
    assert all(torch.equal(weight, weights(second)[name]) for name, weight in weights(whole).items())
    last = [
        json.loads((tmp_path / kind / "learning.jsonl").read_text().splitlines()[-1]) for kind in ("whole", "parts")
    ]
    assert last[0]["step"] == last[1]["step"] == STEPS
    fit(second, Objective(second.model), paths, tmp_path / "parts", PLAN, {"a": 1})  # nothing is left to do
    assert all(torch.equal(weight, weights(second)[name]) for name, weight in weights(whole).items())


def test_the_curve_states_means_since_its_last_line_and_the_estimated_length(paths, tmp_path):
    training, written = trainer(), []
    fit(training, Objective(training.model), paths, tmp_path / "out", PLAN, {}, wrote=written.append)
    lines = [json.loads(line) for line in (tmp_path / "out" / "learning.jsonl").read_text().splitlines()]
    assert written == lines
    assert [line["step"] for line in lines] == [3, 6, 9, 12] and [line["texts"] for line in lines] == [12, 24, 36, 48]
    assert lines[0]["accepted"] == [0.5, 0.5] and lines[0]["agreed"] == [0.25, 0.5]
    assert lines[0]["length_at_1"] == 0.75 and lines[0]["length_greedy"] == 0.375
    assert len(lines[0]["loss"]) == 2


@pytest.mark.parametrize("stop", [None, 7])
def test_held_out_texts_are_measured_once_in_each_tenth_of_the_steps_and_at_the_end(paths, tmp_path, stop):
    plan, calls = replace(PLAN, every=1), []

    def measure():
        calls.append(len(calls))
        return {"accepted_length": float(len(calls))}

    for end in dict.fromkeys((stop, None)):
        training = trainer()
        fit(training, Objective(training.model), paths, tmp_path / "out", plan, {}, stop_after=end, measure=measure)
    lines = [json.loads(line) for line in (tmp_path / "out" / "learning.jsonl").read_text().splitlines()]
    measured = [line["step"] for line in lines if "held_out" in line]
    assert measured == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12] and len(calls) == len(measured)
    assert [line["held_out"]["accepted_length"] for line in lines if "held_out" in line][-1] == len(calls)


@pytest.mark.parametrize("changed", ["facts", "plan", "files"])
def test_a_checkpoint_of_another_training_is_refused(paths, tmp_path, changed):
    training = trainer()
    fit(training, Objective(training.model), paths, tmp_path / "out", PLAN, {"a": 1}, stop_after=2)
    plan = FitPlan(3.0, rows=4, part=2, warmup=2, every=3, plan=PLAN.plan) if changed == "plan" else PLAN
    others, facts = paths[:2] if changed == "files" else paths, {"a": 2 if changed == "facts" else 1}
    again = trainer()
    with pytest.raises(ValueError, match="output_dir"):
        fit(again, Objective(again.model), others, tmp_path / "out", plan, facts)


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_weights_and_the_checkpoint_change(
    paths, tmp_path, wrong
):
    training, plan = trainer(), replace(PLAN, save_seconds=1e-9)
    plain = Objective(training.model)
    kept = []

    def objective(text):
        loss, measured = plain(text)
        if training.step < 5:
            return loss, measured
        kept[:] = [weights(training), (tmp_path / "out" / CHECKPOINT).read_bytes()]
        # The square root of 0 has an infinite gradient.
        return loss + (loss.detach() * torch.nan if wrong == "loss" else (loss * 0).sqrt()), measured

    with pytest.raises(ValueError, match="step 6"):
        fit(training, objective, paths, tmp_path / "out", plan, {})
    assert all(torch.equal(tensor, weights(training)[name]) for name, tensor in kept[0].items())
    assert (tmp_path / "out" / CHECKPOINT).read_bytes() == kept[1] and saved_steps(tmp_path / "out") == 5


@pytest.mark.parametrize(("warmup", "rising"), [(30, 3), (2, 2)])
def test_the_rates_reach_their_peak_before_they_fall_however_short_the_training(
    paths, tmp_path, monkeypatch, warmup, rising
):
    factors, plain = [], Trainer.update
    monkeypatch.setattr(
        Trainer, "update", lambda self, losses, factor: (factors.append(factor), plain(self, losses, factor))[1]
    )
    training = trainer()
    fit(training, Objective(training.model), paths, tmp_path / "out", replace(PLAN, warmup=warmup), {})
    stable = int(STEPS * 0.6)
    assert factors[:stable] == pytest.approx([min(1, (step + 1) / rising) for step in range(stable)])
    assert factors[stable:] == sorted(factors[stable:], reverse=True) and factors[stable] < 1


def test_hidden_states_are_not_read_to_count_tokens(tmp_path, monkeypatch):
    ids = torch.tensor([[3, 1, 1, 2, 2], [3, 1, 1, 4, 0]])
    path, read = tmp_path / "texts.safetensors", []
    Texts(ids, torch.tensor([1, 1]), torch.tensor([5, 4]), torch.ones(2, 5, 8)).write(path)

    class Spied:
        def __init__(self, *arguments):
            self.file = safe_open(*arguments)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr("spec_lab.core.tensors.safe_open", Spied)
    assert frequent([path], 6, 2).tolist() == [1, 2]
    assert sorted(read) == ["first", "ids", "length"]
