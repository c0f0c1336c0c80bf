"""The check of a drafter: figures along texts against plain forwards and real runs, readings tried, and the command."""

import io
import json
from dataclasses import replace
from itertools import product
from types import MappingProxyType

import numpy as np
import pytest
import torch
from rich.console import Console

from spec_lab.analysis import report
from spec_lab.cli.commands import drafter_check
from spec_lab.core.faults import PartError, attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.reading import Convention, Reading
from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.hydra.network import HydraHeads, HydraSettings
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.tasks.check_drafter import check
from spec_lab.tasks.check_drafter.acceptance import by_range, calibration, expected_steps, tau
from spec_lab.tasks.check_drafter.along_text import Answer, Predicted, predicted
from spec_lab.tasks.check_drafter.kept_texts import KeptTexts
from spec_lab.tasks.check_drafter.readings import alike, prompt_variants, try_readings
from spec_lab.tasks.check_drafter.task import explained, given
from spec_lab.text.answers import AnsweredText
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.prompts import Prompt
from tests.drafters.block_drafters import dspark
from tests.drafters.eagle_heads import written
from tests.labs import Repeat, lab, settings
from tests.propose.lab import COLD, decode, draft_model, plain_logits, plain_probabilities, requests
from tests.tiny import CONTEXT, tiny_target

WARM = Sampling(0.8)
DEPTH = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def answers_of(target, sampling, new=12):
    group, _ = decode(target, Null(), requests(sampling, new))
    return [Answer(sequence.request, sequence.tokens) for sequence in group.sequences]


# Along texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampling", "batch", "temperature"), [(WARM, 2, None), (COLD, 3, None), (COLD, 3, 1.0)])
def test_figures_of_a_draft_model_are_those_of_plain_forwards_over_the_text(target, sampling, batch, temperature):
    drafter, answers = draft_model("1x1x1", temperature=temperature), answers_of(target, sampling)
    measured = predicted(target, drafter, answers, batch, sampling, DEPTH)
    warm = replace(sampling, temperature=sampling.temperature or 1.0)
    for answer, text in zip(answers, measured, strict=True):
        first = len(answer.request.tokens)
        for position, depth in product(range(len(text.accepted)), range(DEPTH)):
            end = first + position + depth + 1
            if end >= len(answer.tokens):
                assert np.isnan(text.accepted[position, depth])
                continue
            before, token = answer.tokens[:end], answer.tokens[end]
            p_logits, q_logits = plain_logits(target.lm.model, before), plain_logits(drafter.lm.model, before)
            p, q = p_logits.div(warm.temperature).softmax(-1), q_logits.div(warm.temperature).softmax(-1)
            agreed = p_logits.argmax() == q_logits.argmax()
            if sampling.temperature:
                accepted = min(1.0, float(q[token] / p[token]))
            else:  # p is one-hot
                accepted = float(q[token]) if temperature else float(q.argmax() == token)
            assert text.agreed[position, depth] == float(agreed)
            np.testing.assert_allclose(text.alpha[position, depth], float(torch.minimum(p, q).sum()), rtol=1e-9)
            np.testing.assert_allclose(text.accepted[position, depth], accepted, rtol=1e-9)
            np.testing.assert_allclose(text.confidence[position, depth], float(q_logits.softmax(-1).max()), rtol=1e-9)


def test_a_repetition_penalty_counts_the_text_before_each_token(target):
    sampling = Sampling(0.8, repetition_penalty=1.5)
    (answer, *_), drafter = answers_of(target, sampling, 4), draft_model("1")
    (text,) = predicted(target, drafter, [answer], 1, sampling, 1)
    p, q = (plain_probabilities(model, answer.tokens[:-1], sampling) for model in (target.lm.model, drafter.lm.model))
    np.testing.assert_allclose(text.alpha[-1, 0], float(torch.minimum(p, q).sum()), rtol=1e-9)


PROPOSERS = {
    "draft model": lambda target: draft_model("1x1x1"),
    "draft model, deterministic": lambda target: draft_model("1x1x1", drawn="deterministic"),
    "a tree": lambda target: draft_model("3x2x1", drawn="deterministic"),
    "the target itself": lambda target: draft_model("1x1x1", lm=target.lm),
    "the target itself, unsure": lambda target: DraftModel(
        target.lm, CONTEXT, TreePlan(parse("1x1x1"), "deterministic", confidence=0.04)
    ),
    "Hydra heads": lambda target: Hydra(
        random_network(HydraHeads(HydraSettings(32, 61, 3)), target), target, TreePlan(parse("1x1x1"))
    ),
    "an adapter of Kangaroo": lambda target: KangarooDrafter(
        random_network(Kangaroo(KangarooSettings(small_layer(32), 32, 1)), target), target, TreePlan(parse("1x1x1"))
    ),
    "n-gram": lambda target: Ngram(3, 2, 1),
    "repeat": lambda target: Repeat(2),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_the_expected_steps_of_greedy_decoding_are_those_of_a_run(target, name):
    for answer in answers_of(target, COLD, 20):
        begun = tuple(answer.tokens[: len(answer.request.tokens) + 1])
        begun = replace(answer.request, tokens=begun, max_new_tokens=19)
        group, steps = decode(target, PROPOSERS[name](target), [begun])
        assert group.sequences[0].tokens == answer.tokens
        (text,) = predicted(target, PROPOSERS[name](target), [answer], 1, COLD, 3)
        assert expected_steps(text.accepted) == pytest.approx(len(steps))


def test_the_expected_steps_of_a_tree_of_heads_are_those_of_a_run(target):
    heads = Heads.random(target, 2, trunk=False)
    for answer in answers_of(target, COLD, 20):
        _, steps = decode(target, Medusa(heads, parse("20x8")), [answer.request])
        (text,) = predicted(target, Medusa(heads, parse("20x8")), [answer], 1, COLD, 160)
        assert expected_steps(text.accepted) == pytest.approx(len(steps) - 1), "the first step computes the prompt"
        assert np.nansum(text.accepted) > 0 and np.isnan(text.confidence).all()


def test_expected_steps_are_the_mean_over_all_ways_to_accept():
    accepted = np.array([[0.5, 0.25], [0.75, 0.5], [0.125, 0.5], [1.0, np.nan]])

    def steps(start):
        if start >= len(accepted):
            return 0.0
        a, b = np.nan_to_num(accepted[start])
        return 1 + (1 - a) * steps(start + 1) + a * (1 - b) * steps(start + 2) + a * b * steps(start + 3)

    assert expected_steps(accepted) == pytest.approx(steps(0))
    assert expected_steps(np.zeros((0, 2))) == 0 and expected_steps(np.ones((6, 2))) == 2


def test_sampled_drafts_of_a_proposer_without_a_plan_are_refused(target):
    class Sampled(Repeat):
        drawn = "iid"

        def propose(self, batch):
            draft = super().propose(batch)
            q = torch.full((draft.shape.rows, target.vocabulary), 1 / target.vocabulary)
            return replace(draft, drawn="iid", q=q, q_row=np.arange(draft.shape.rows))

    with pytest.raises(
        ValueError, match="cannot read q from 'repeat', whose drafts are sampled: set drawn=deterministic"
    ):
        predicted(target, Sampled(), answers_of(target, WARM, 4), 1, WARM, 2)


def test_a_confidence_head_is_read_along_the_text(target, tmp_path):
    path = written(tmp_path / "head", *dspark(32, 61, ids=(0, 1), mask=61))
    drafter, (answer, *_) = BlockDrafter.load(target, path, depth=DEPTH), answers_of(target, WARM, 6)
    (text,) = predicted(target, drafter, [answer], 1, WARM, DEPTH)
    assert np.array_equal(np.isnan(text.predicted), np.isnan(text.alpha)) and (text.predicted[0] > 0).all()
    (other,) = predicted(target, draft_model("1x1"), [answer], 1, WARM, DEPTH)
    assert np.isnan(other.predicted).all()


# Figures -------------------------------------------------------------------------------------------------------------


def text_of(accepted, prompt=5, **more):
    accepted = np.asarray(accepted, dtype=float)
    figures = dict.fromkeys(("agreed", "alpha", "confidence", "predicted"), accepted) | more
    return Predicted(prompt, accepted=accepted, **figures)


def test_ranges_of_positions_double_and_end_at_the_trained_context():
    texts = [text_of(np.ones((40, 1))), text_of(np.zeros((40, 1)))]
    rows = by_range(texts, False)
    assert [(row["first"], row["last"], row["steps"]) for row in rows] == [(1, 16, 32), (17, 32, 32), (33, 40, 16)]
    assert {row["tokens"]["mean"] for row in rows} == {1.5}
    rows = by_range(texts, True, trained=20)
    assert [(row["first"], row["last"], row["beyond"]) for row in rows] == [
        (1, 16, False), (17, 20, False), (21, 32, True), (33, 45, True),
    ]  # fmt: skip


def test_the_calibration_error_is_the_mean_distance_of_confidence_and_agreement():
    agreed, confidence = np.array([[1.0], [0.0], [1.0], [np.nan]]), np.array([[0.9], [0.95], [0.25], [np.nan]])
    facts = calibration([text_of(agreed, confidence=confidence)])
    assert facts["ece"] == pytest.approx((2 * abs(0.925 - 0.5) + 0.75) / 3)
    assert [entry["tokens"] for entry in facts["bins"]] == [1, 2]
    assert calibration([text_of(agreed, confidence=np.full((4, 1), np.nan))]) is None
    alpha = np.array([[0.5], [0.75], [0.25], [np.nan]])
    head = calibration([text_of(agreed, alpha=alpha, predicted=confidence)], head=True)
    assert head["ece"] == pytest.approx(2 * abs(0.925 - 0.625) / 3) and head["agreed"] == pytest.approx(0.5)


# Readings ------------------------------------------------------------------------------------------------------------


class Read(Repeat):
    """A drafter that accepts more for each convention that is read rightly."""

    def __init__(self, **values):
        super().__init__()
        self.values = {"taps": "a", "window": 0} | values

    @property
    def reading(self):
        return Reading({
            name: Convention(self.values[name], "guess", "", {f"{name} {value}": value for value in values[1:]})
            for name, values in (("taps", ("a", "b", "c")), ("window", (0, 8)))
        })  # fmt: skip


def tried(right, build=lambda changed: Read(**changed), prompts=None, tick=lambda *_: None):
    def measure(drafter, read):
        rate = 0.25 + 0.25 * sum(drafter.values[name] == value for name, value in right.items())
        rates = rate + np.random.default_rng(0).normal(0, 0.01, 10)
        return [text_of(np.full((30, 2), rate)) for rate in rates + 0.1 * (read is not None)]

    prompts = prompts or [Prompt("one", "text")]
    return try_readings(Read(), prompts, lab().target, build, measure, tick)


@pytest.mark.parametrize(("right", "best"), [
    ({"taps": "b"}, {"taps": "b"}), ({"taps": "c", "window": 8}, {"taps": "c", "window": 8}), ({"taps": "a"}, {}),
])  # fmt: skip
def test_the_best_reading_is_named_and_those_that_help_are_combined(right, best):
    counts = []
    readings, chosen = tried(right, tick=lambda *count: counts.append(count))
    assert counts[0] == (0, 4) and sum(done for done, _ in counts) == counts[-1][1] == len(readings)
    assert chosen.changed == best and chosen.reading.values == {"taps": "a", "window": 0} | best
    assert [reading.changed for reading in readings[:4]] == [{}, {"taps": "b"}, {"taps": "c"}, {"window": 8}]
    assert [reading.helps for reading in readings[1:4]] == [
        name in right and right[name] == value for name, value in (("taps", "b"), ("taps", "c"), ("window", 8))
    ]


def test_of_readings_that_cannot_be_told_apart_by_tau_the_one_with_the_largest_alpha_is_the_best():
    def measure(drafter, read):
        taps = drafter.values["taps"]
        accepted = np.random.default_rng(ord(taps)).random((10, 30, 2)) < (0.2 if taps == "a" else 0.6)
        alpha = {"a": 0.2, "b": 0.6, "c": 0.61}[taps]
        return [text_of(rows, alpha=np.full(rows.shape, alpha)) for rows in accepted]

    readings, chosen = try_readings(Read(), [Prompt("one", "text")], lab().target, lambda new: Read(**new), measure)
    assert chosen.changed == {"taps": "c"} and [other.changed for other in alike(chosen, readings)] == [
        {"taps": "b"}, {"taps": "c"},
    ]  # fmt: skip


def test_a_reading_that_cannot_be_built_is_shown_with_the_reason():
    def build(changed):
        if changed == {"taps": "b"}:
            raise ValueError("no such taps")
        return Read(**changed)

    readings, chosen = tried({"window": 8}, build)
    assert readings[1].facts() == {"changed": {"taps": "b"}, "label": "taps b", "helps": False, "error": "no such taps"}
    assert chosen.changed == {"window": 8}


def test_a_drafter_that_breaks_ends_the_check():
    def measure(drafter, read):
        with attributed("proposer", drafter):
            return [text_of(np.full((3, 1), 1 / drafter.values["window"]))] * 4

    with pytest.raises(PartError, match="'repeat' raised ZeroDivisionError"):
        try_readings(Read(window=8), [Prompt("one", "text")], lab().target, lambda _: Read(window=0), measure)


def test_the_levels_of_readings_and_combinations_add_up_to_those_of_all():
    readings, best = tried({"taps": "c", "window": 8})
    assert [len(reading.changed) for reading in readings] == [0, 1, 1, 1, 2]
    errors = [(1 - reading.level) / 2 * max(1, 2 * len(reading.changed) - 2) for reading in readings[1:]]
    assert sum(errors) == pytest.approx(0.025 + 0.0125) and best is readings[-1]
    assert best.tau == tau(best.texts, best.level) and best.tau.low < tau(best.texts).low


class WithTemplate:
    name_or_path = "toy"
    chat_template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    special_tokens_map = MappingProxyType({})

    def get_chat_template(self, chat_template=None, tools=None):
        return self.chat_template


def test_prompts_are_sent_with_and_without_the_template_and_thinking():
    target = replace(tiny_target(), tokenizer=WithTemplate())
    plain, chat = [Prompt("one", "text")], [Prompt("one", "text", template=ChatTemplate())]
    assert [changed for changed, *_ in prompt_variants(plain, target)] == [{"prompts.template": "checkpoint"}]
    variants = prompt_variants(chat, target)
    assert [changed for changed, *_ in variants] == [
        {"prompts.template": "none"}, {"prompts.thinking": True}, {"prompts.thinking": False},
    ]  # fmt: skip
    assert variants[0][2][0].template is None and variants[2][2][0].template.options == {"enable_thinking": False}
    on = [Prompt("one", "text", template=ChatTemplate(options={"enable_thinking": True, "thinking": True}))]
    assert {"prompts.thinking": True} not in [changed for changed, *_ in prompt_variants(on, target)]
    assert prompt_variants(plain, tiny_target()) == []


@pytest.mark.parametrize(("expect", "right", "by", "whole"), [
    ("in use", {}, "sampling", True), ("best", {"taps": "b"}, "reading", True), (3.0, {"taps": "b"}, "reading", False),
    (2.5, {}, "nothing", False),
])  # fmt: skip
def test_an_expected_tau_is_explained_by_sampling_or_a_reading(expect, right, by, whole):
    readings, chosen = tried(right or {"taps": "none"})
    taus = {"in use": tau(readings[0].texts).mean, "best": tau(chosen.texts).mean}
    facts = explained(taus.get(expect, expect), readings, chosen)
    assert (facts["by"], facts["whole"]) == (by, whole) and facts["changed"] == (right if by == "reading" else {})


# The task ------------------------------------------------------------------------------------------------------------


def checked(out, expect=None, answers_from=None, **parts):
    screen = io.StringIO()
    changes = {"batch_size": 2, "max_new_tokens": 8}
    code = check(
        lab(**parts),
        settings(out, **changes),
        {"name": "toy", "task": {"_target_": "spec_lab.tasks.check_drafter.check"}},
        Console(file=screen, width=150),
        expect=expect,
        answers_from=answers_from,
    )
    return code, " ".join(screen.getvalue().split()), json.loads((out / "summary.json").read_text())


def test_a_check_leaves_a_summary_and_says_that_nothing_is_open(tmp_path):
    code, shown, summary = checked(tmp_path / "run", expect=9.0, proposer=draft_model("1x1"))
    assert code == 0 and (summary["reading"], summary["best_reading"], summary["gain"]) == ({}, {}, 0)
    assert "The files and prompts leave no other reading open." in shown and "Expected 9, measured" in shown
    assert len(summary["readings"][0]["alpha"]) == summary["depth"] == 2 and summary["expected"]["by"] == "nothing"
    assert {file.stem for file in (tmp_path / "run" / "figures").iterdir()} == {
        "readings", "depths", "positions", "reliability",
    }  # fmt: skip


def test_the_depth_is_that_of_the_drafts_not_the_number_of_their_nodes(tmp_path):
    heads = Heads.random(lab().target, 2, trunk=False)
    _, shown, summary = checked(tmp_path / "run", proposer=Medusa(heads, parse("2x1")))
    assert summary["depth"] == 2 and "of depth 2," in shown and "depth 3" not in shown


def test_a_check_names_the_best_reading_and_its_options(tmp_path):
    class Right(Read):
        """Drafts the right token where its taps are "b"."""

        def propose(self, batch):
            draft = super().propose(batch)
            texts = [answers[sequence.request.id] for sequence in batch.sequences]
            if self.values["taps"] != "b":
                return draft
            following = [text[len(s.tokens) :][:2] for text, s in zip(texts, batch.sequences, strict=True)]
            return replace(draft, token=torch.tensor([(tokens * 2)[n] for tokens in following for n in range(2)]))

    used = lab(proposer=Right(), rebuild=lambda changed: Right(**changed))
    group, _ = decode(used.target, Null(), used.requests(settings(tmp_path, max_new_tokens=8)))
    answers = {sequence.request.id: sequence.tokens for sequence in group.sequences}
    _, shown, summary = checked(tmp_path / "run", proposer=used.proposer, rebuild=used.rebuild)
    assert "Best reading: proposer.taps=b (taps b): expected tau" in shown
    assert summary["reading"] == {"taps": "a", "window": 0} and summary["best_reading"] == {"taps": "b", "window": 0}
    assert summary["gain"] == pytest.approx(
        summary["readings"][1]["tau"]["mean"] - summary["readings"][0]["tau"]["mean"]
    )
    assert "Best reading" in report.write(tmp_path / "run").read_text()


def test_a_check_that_was_ended_measures_only_the_readings_that_are_not_there(tmp_path, monkeypatch):
    measured = []

    def rebuild(changed):
        if len(measured) == 2 and not changed.get("resumed"):
            raise KeyboardInterrupt
        return Read(**changed)

    def counted(target, drafter, *more):
        measured.append(drafter.values)
        return predicted(target, drafter, *more)

    monkeypatch.setattr("spec_lab.tasks.check_drafter.task.predicted", counted)
    with pytest.raises(FileNotFoundError):  # no summary
        checked(tmp_path / "run", proposer=Read(), rebuild=rebuild)
    assert [reading["taps"] for reading in measured] == ["a", "b"]
    _, _, summary = checked(tmp_path / "run", proposer=Read(), rebuild=lambda changed: Read(**changed))
    assert [reading["taps"] for reading in measured] == ["a", "b", "c", "a"]
    _, _, whole = checked(tmp_path / "whole", proposer=Read(), rebuild=lambda changed: Read(**changed))
    assert summary == whole and len(summary["readings"]) == 4


def test_a_kept_reading_of_other_tensors_is_named(tmp_path):
    kept = KeptTexts(tmp_path)
    kept.of(Reading(), None, lambda: [text_of(np.full((4, 1), 0.5))])
    (file,) = tmp_path.iterdir()
    for tensors in ({"a": torch.zeros(2)}, read_tensors(file)[0] | {"lengths": torch.tensor([9])}):
        save_tensors(tensors, file)
        with pytest.raises(OSError, match=f"{file.name} is damaged"):
            kept.of(Reading(), None, list)


def chat_file(tmp_path):
    say = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cdefgh"}]
    more = [{"role": "user", "content": "ij"}, {"role": "assistant", "content": "klmn"}]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": say + more * number}) + "\n" for number in (0, 1, 1)))
    return str(file)


def test_answers_that_exist_already_are_checked_along_and_conversations_are_the_texts_of_intervals(tmp_path):
    _, _, summary = checked(tmp_path / "run", proposer=draft_model("1x1"), answers_from=chat_file(tmp_path))
    assert summary["texts"] == 5 and summary["tokens"] == 3 * 5 + 2  # max_new_tokens=8 cuts the second answers
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["prompt_tokens_sha256"]
    texts = [text_of(np.full((4, 1), rate)) for rate in (0.5, 0.25, 1.0, 0.0)]
    pairs = [replace(text, conversation=number // 2) for number, text in enumerate(texts)]
    assert tau(pairs).mean == tau(texts).mean and tau(pairs).low != tau(texts).low


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature=0.7, and this run has 0"),
        ({"config": {"constraint": {"_target_": "spec_lab.constrain.load.regex"}}}, "a constraint"),
        ({"config": {"min_new_tokens": 4}}, "min_new_tokens=4, and this run has none"),
    ],
)
def test_answers_of_a_run_must_be_sampled_as_this_run_samples(tmp_path, facts, why):
    folder = tmp_path / "earlier"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=rf"holds answers of {why}"):
        checked(tmp_path / "run", proposer=draft_model("1x1"), answers_from=str(folder))


def test_answers_of_one_conversation_are_one_text_of_intervals(tmp_path):
    texts = [AnsweredText(name, (1, 2, 3, 4), ((1, 4),)) for name in ("a", "a", "b")]
    assert [answer.conversation for answer in given(texts, lab(), settings(tmp_path))] == [0, 0, 1]


def test_readings_that_could_not_be_measured_are_named_with_the_reason(tmp_path):
    def rebuild(changed):
        raise ValueError(f"no {next(iter(changed))}")

    _, shown, _ = checked(tmp_path / "run", proposer=Read(), rebuild=rebuild)
    assert "leave no other reading open" not in shown and "3 of 4 readings could not be measured: " in shown
    assert "proposer.taps=b (no taps); proposer.taps=c (no taps); proposer.window=8 (no window)." in shown


@pytest.mark.parametrize(("parts", "message"), [
    ({"proposer": Null()}, "no proposer drafts"), ({"texts": ("one",)}, "requires two prompts or conversations"),
])  # fmt: skip
def test_what_cannot_be_checked_is_refused(tmp_path, parts, message):
    with pytest.raises(ValueError, match=message):
        checked(tmp_path / "run", **parts)


def test_the_command_is_short_for_the_task():
    assert drafter_check(["check-drafter", "proposer=eagle", "--expect", "2.77", "-m"]) == [
        "task=check_drafter", "task.expect=2.77", "proposer=eagle", "-m",
    ]  # fmt: skip
