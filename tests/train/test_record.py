"""Answers are kept between runs, and hidden states along them are those of the target, wherever its answers lie."""

from dataclasses import replace

import pytest
import torch

from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.models.target import Target
from spec_lab.text.answers import AnsweredText
from spec_lab.train import record as recording
from spec_lab.train.record import answer, record
from spec_lab.train.texts import Texts
from tests import checkpoints
from tests.propose.lab import COLD, WARM, requests

PROMPTS = [(3, 1, 4), (1, 5), (9, 2)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = checkpoints.checkpoint(tmp_path_factory.mktemp("target"), torch.float64)
    return Target.load(str(folder), dtype="float64")


def test_answers_are_asked_for_once(target, tmp_path, monkeypatch):
    wanted, ticks = requests(WARM, new=4, prompts=PROMPTS), []
    first = answer(target, wanted, 2, 0, kept=tmp_path / "answers")
    monkeypatch.setattr(recording, "fixed_group", None)  # nothing can be decoded now
    assert answer(target, wanted, 2, 0, kept=tmp_path / "answers", tick=lambda *done: ticks.append(done)) == first
    assert ticks == [(2, True), (1, True)] and [text.answers[0][0] for text in first] == [3, 2, 2]


def test_kept_answers_that_are_damaged_are_named(target, tmp_path):
    wanted = requests(WARM, new=4, prompts=PROMPTS[:2])
    answer(target, wanted, 2, 0, kept=tmp_path)
    (file,) = tmp_path.iterdir()
    save_tensors(read_tensors(file)[0] | {"lengths": torch.tensor([99])}, file)
    with pytest.raises(OSError, match=f"{file.name} is damaged"):
        answer(target, wanted, 2, 0, kept=tmp_path)


@pytest.mark.parametrize("change", ["seed", "sampling", "prompts", "length"])
def test_other_answers_are_not_those_that_were_kept(target, tmp_path, change):
    answer(target, requests(WARM, new=4, prompts=PROMPTS), 2, 0, kept=tmp_path)
    before = set(tmp_path.iterdir())
    sampling, new = COLD if change == "sampling" else WARM, 5 if change == "length" else 4
    wanted = requests(sampling, new=new, prompts=PROMPTS[::-1] if change == "prompts" else PROMPTS)
    answer(target, wanted, 2, int(change == "seed"), kept=tmp_path)
    assert len(set(tmp_path.iterdir()) - before) == 2


def test_a_folder_that_cannot_be_written_keeps_no_answers(target, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    wanted = requests(WARM, new=4, prompts=PROMPTS)
    assert answer(target, wanted, 2, 0, kept=tmp_path / "file" / "answers") == answer(target, wanted, 2, 0)
    assert "SPEC_LAB_CACHE" in caplog.text


def test_a_text_that_fills_the_context_is_cut_by_its_last_token(target, tmp_path, caplog):
    texts = [AnsweredText("a", (3, 1, 4, 1, 5), ((2, 5),)), AnsweredText("b", (1, 5, 9, 2, 6), ((4, 5),))]
    (path,) = record(replace(target, context=5), texts, (-1,), tmp_path, 1, 2)
    text = Texts.read(path)
    assert text.ids.tolist() == [[3, 1, 4, 1]] and text.counts(0).nonzero().tolist() == [[0, 2], [0, 3]]
    assert "1 of 2 texts are left out: their prompts fill the context of 5 tokens" in caplog.text


def test_the_states_along_a_conversation_are_the_targets_and_only_its_answers_are_learned(target, tmp_path):
    tokens = (3, 1, 4, 1, 5, 9, 2, 6, 5)
    texts = [AnsweredText("a", tokens, ((2, 4), (6, 8))), AnsweredText("b", tokens[:5], ((1, 5),))]
    ticks = []
    for _ in range(2):  # the second time the file is there
        (path,) = record(target, texts, (1, -1), tmp_path, 2, 2, tick=lambda *done: ticks.append(done))
    assert ticks == [(2, False), (2, True)]
    text = Texts.read(path)
    with torch.no_grad():
        states = target.model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[-1]], -1)[0]
    torch.testing.assert_close(text.hidden[0].double(), expected, atol=0.02, rtol=0.02)
    assert text.counts(0).nonzero().tolist() == [[0, 2], [0, 3], [0, 6], [0, 7], [1, 1], [1, 2], [1, 3], [1, 4]]
    assert text.counts(1).nonzero().tolist() == [[row, place - 1] for row, place in text.counts(0).nonzero().tolist()]
    answers = [(ids.tolist(), hidden) for hidden, ids in text.answers()]
    assert [ids for ids, _ in answers] == [[4, 1], [2, 6], [1, 4, 1, 5]]
    assert torch.equal(answers[1][1], text.hidden[0, 5:7])
    for part in (text.rows(slice(0, 1)), text.padded(12), text.to(torch.device("cpu"))):
        assert part.counts(0).nonzero().tolist()[:4] == [[0, 2], [0, 3], [0, 6], [0, 7]]
