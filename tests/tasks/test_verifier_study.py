"""The verifier study: which drafts each verifier gets, the numbers computed from them, and the files of a run."""

import io
import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.proposer import Requires
from spec_lab.propose import Null
from spec_lab.results.study import load
from spec_lab.tasks.verifier_study import pooled, study_verifiers
from spec_lab.tasks.verifier_study.recorded import drafts_along, of_prompt, pairs, positions, proposers_of, sample
from spec_lab.verify import Gumbel, KSeq, Lenient, Match, Token, Traversal
from spec_lab.verify.transport import transport_bound
from tests.labs import Repeat, lab, settings
from tests.propose.lab import decode, draft_model, emitted, path_tokens, plain_probabilities

ONES = {"token": Token(), "traversal": Traversal(), "match": Match(), "kseq": KSeq(), "gumbel": Gumbel()}
TIMES = ["propose", "target", "target_forward", "probabilities", "verify"]
TREES = {"iid": "2x2", "without_replacement": "2x2", "deterministic": "2x1", "gumbel": "2x1"}


def proposers(**trees: str):
    return {drawn: draft_model(tree, drawn) for drawn, tree in (trees or TREES).items()}


def recorded_lab(**parts):
    usual = dict(temperature=1.0, proposer=Null(), more_proposers=proposers(), verifiers=ONES)
    return lab(**(usual | parts))


def one_at_a_time(out, **changes):
    return settings(out, **(dict(batch_size=1, max_new_tokens=9) | changes))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=80)


def steps_of(laboratory, request, every=3):
    """The request's text, and every step along it with its probabilities copied."""
    text = [*request.tokens, *sample(laboratory.target, request, 0).tokens]
    with closing(
        drafts_along(laboratory.target, proposers_of(laboratory), request, text, every, CounterDraws(0))
    ) as steps:
        return text, [replace(step, p=step.p.clone()) for step in steps]


def held(laboratory) -> int:
    """Cells in use, in the target and in all draft models."""
    models = [laboratory.target.lm, *(each.lm for each in laboratory.more_proposers.values() if hasattr(each, "lm"))]
    return sum(int(lm.cells.references.sum()) + sum(lm.cells._users) for lm in models)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run: its lab, its directory and what it printed."""
    torch.set_num_threads(1)
    laboratory, out, console = recorded_lab(), tmp_path_factory.mktemp("recorded") / "out", quiet()
    assert study_verifiers(laboratory, one_at_a_time(out), {}, console, every=3, repeats=1) == 0
    return laboratory, out, console.file.getvalue()


# Drafts ------------------------------------------------------------------------------------------------------------


def test_the_text_is_what_the_loop_decodes_without_a_draft():
    laboratory = recorded_lab()
    requests = laboratory.requests(one_at_a_time(Path()))
    group, _ = decode(laboratory.target, Null(), requests, Match())
    assert [sample(laboratory.target, request, 0).tokens for request in requests] == emitted(group)


def test_positions_begin_after_the_first_token_and_a_token_follows_each():
    request = recorded_lab().requests(one_at_a_time(Path()))[0]
    length = len(request.tokens)
    assert list(positions(request, range(length + 9), 4)) == [length + 1, length + 5]
    assert list(positions(request, range(length + 10), 4)) == [length + 1, length + 5, length + 9]
    assert not positions(request, range(length + 1), 1)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=9, repetition_penalty=1.3)])
def test_probabilities_equal_a_plain_forward_over_the_recorded_prefix(sampling):
    laboratory = recorded_lab(sampling=sampling)
    request = laboratory.requests(one_at_a_time(Path()))[1]
    text, steps = steps_of(laboratory, request)
    seen = {(step.position, step.proposer) for step in steps}
    assert seen == {(position, name) for position in positions(request, text, 3) for name in laboratory.more_proposers}
    for step in steps:
        shape = step.draft.shape
        for row in range(shape.rows):
            tokens = text[: step.position] + path_tokens(step.draft, row)
            assert torch.allclose(
                step.p[row], plain_probabilities(laboratory.target.lm.model, tokens, sampling), rtol=0, atol=1e-9
            )
    assert held(laboratory) == 0


def test_a_draft_is_what_a_proposer_without_a_past_draws():
    """Earlier drafts leave no trace: the draft at a position does not depend on how many positions come before it."""
    laboratory = recorded_lab()
    request = laboratory.requests(one_at_a_time(Path()))[0]
    _, often = steps_of(laboratory, request, every=1)
    fresh = recorded_lab()
    _, seldom = steps_of(fresh, request, every=4)
    drafts = {(step.position, step.proposer): step.draft for step in often}
    for step in seldom:
        same = drafts[step.position, step.proposer]
        assert np.array_equal(step.draft.shape.parent, same.shape.parent)
        assert step.draft.token.tolist() == same.token.tolist()
        if step.draft.q is not None:
            assert torch.allclose(step.draft.q, same.q, rtol=0, atol=1e-9)


def test_a_proposer_reads_the_hidden_state_before_the_pending_token():
    class Reads(Repeat):
        requires = Requires(hidden=(-1,))
        seen = ()

        def observe(self, observed):
            for observation in observed:
                self.last = observation.start + len(observation.hidden), observation.hidden[-1].clone()

        def propose(self, batch):
            (sequence,) = batch.sequences
            assert len(sequence.pending) == 1 and len(sequence.kv) == self.last[0]
            self.seen += ((len(sequence.tokens), self.last[1]),)
            return super().propose(batch)

    reads = Reads()
    laboratory = recorded_lab(proposer=reads, more_proposers={"deterministic": draft_model("2x1", "deterministic")})
    text, _ = steps_of(laboratory, laboratory.requests(one_at_a_time(Path()))[0])
    assert len(reads.seen) == 3
    for position, hidden in reads.seen:
        ids = torch.tensor([text[: position - 1]])
        with torch.no_grad():
            plain = laboratory.target.lm.model.base_model(input_ids=ids, use_cache=False)[0][0, -1]
        assert torch.allclose(hidden, plain, rtol=0, atol=1e-9)


def test_nothing_is_drafted_beyond_the_context():
    laboratory = recorded_lab(more_proposers={"deep": draft_model("1x1x1x1", "iid")}, verifiers={"token": Token()})
    request = laboratory.requests(one_at_a_time(Path()))[0]
    short = replace(laboratory.target, context=len(request.tokens) + 9)
    text = [*request.tokens, *sample(short, request, 0).tokens]
    with closing(drafts_along(short, laboratory.more_proposers, request, text, 2, CounterDraws(0))) as steps:
        depths = [step.draft.shape.nodes for step in steps]
    assert depths == [4, 4, 4, 2]
    assert held(laboratory) == 0


# The verdicts ------------------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """A verifier that records its arguments."""

    inner: object
    asked: list

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, draft, p):
        self.asked.append((draft, p.data_ptr(), p.clone()))
        return self.inner(draft, p)


def test_all_verifiers_get_the_same_draft_and_probabilities():
    asked = []
    laboratory = recorded_lab(verifiers={name: Spy(inner, asked) for name, inner in ONES.items()})
    drafting = proposers_of(laboratory)
    fitting, _ = pairs(drafting, laboratory.verifiers)
    request = laboratory.requests(one_at_a_time(Path()))[0]
    _, rows, _ = of_prompt(laboratory, drafting, fitting, request, seed=0, every=4, repeats=2)
    by_draft: dict = {}
    for draft, position, p in asked:
        by_draft.setdefault(id(draft), []).append((position, p))
    assert len(by_draft) == 2 * len(TREES)
    assert len(asked) == 2 * len(rows)
    for seen in by_draft.values():
        first_place, first = seen[0]
        assert all(position == first_place and torch.equal(p, first) for position, p in seen)


@pytest.mark.nightly
def test_rows_are_the_verdicts(done):
    laboratory, out, _ = done
    rows = load(out).set_index("id")
    counted = 0
    for request in laboratory.requests(one_at_a_time(out)):
        for step in steps_of(laboratory, request)[1]:
            bound = None
            if step.draft.drawn != "deterministic":
                q = step.draft.q[int(step.draft.q_row[0])]
                bound = transport_bound(step.p[:1], q[None], len(step.draft.shape.children[0]), step.draft.drawn)[0]
            for name, verifier in ONES.items():
                if step.draft.drawn not in verifier.accepts:
                    continue
                row = rows.loc[f"{request.id}/{step.position}/{step.proposer}/{name}"]
                verdict = verifier(step.draft, step.p)
                assert row["expected_accepted"] == pytest.approx(
                    verdict.expected_accepted(step.draft.shape)[0], abs=1e-12
                )
                assert row["first_level"] == pytest.approx(1 - verdict.stop[0], abs=1e-12)
                assert row["given"] == verdict.given == ("noise" if name == "gumbel" else "draft")
                assert row["lossless"] and row["nodes"] == step.draft.shape.nodes
                assert row["bound"] == pytest.approx(row["first_level"] if bound is None else bound, abs=1e-9)
                counted += 1
    assert counted == len(rows) == 5 * 3 * (4 + 3 + 3 + 2)
    assert (rows[TIMES] > 0).all(axis=None)
    assert (rows["target_forward"] <= rows["target"]).all()


@pytest.mark.nightly
def test_no_verifier_beats_the_bound_on_average_over_drafts():
    """The bound holds for the expectation over drafts, here over seeds; a single draft may exceed it."""
    laboratory = recorded_lab(more_proposers=proposers(iid="3", without_replacement="3"))
    request = laboratory.requests(one_at_a_time(Path(), max_new_tokens=2))[0]
    fitting, _ = pairs(laboratory.more_proposers, {"token": Token(), "match": Match()})
    text, exceeded = sample(laboratory.target, request, 0).tokens, False
    rows = []
    for seed in range(150):
        with pytest.MonkeyPatch.context() as patch:
            outcome = replace(sample(laboratory.target, request, 0), tokens=text)
            patch.setattr("spec_lab.tasks.verifier_study.recorded.sample", lambda *_, same=outcome: same)
            rows += of_prompt(laboratory, laboratory.more_proposers, fitting, request, seed, every=1, repeats=1)[1]
    frame = pd.DataFrame(rows)
    for _, cell in frame.groupby(["proposer", "verifier"]):
        assert cell["bound"].std() < 1e-9
        error = cell["first_level"].std() / np.sqrt(len(cell))
        assert cell["first_level"].mean() < cell["bound"].iloc[0] + 4 * error
        exceeded |= bool((cell["first_level"] > cell["bound"]).any())
    assert exceeded


# Pairs ------------------------------------------------------------------------------------------------------------


def test_a_verifier_that_supports_no_proposer_is_refused(tmp_path):
    laboratory = recorded_lab(more_proposers=proposers(without_replacement="2", deterministic="2"))
    with pytest.raises(ValueError, match=r"'kseq' .* iid, .* deterministic, without_replacement: .*~"):
        study_verifiers(laboratory, one_at_a_time(tmp_path / "out"), {}, quiet())
    assert not (tmp_path / "out").exists()


def test_without_more_parts_the_main_verifier_verifies_the_main_proposer(tmp_path):
    laboratory = lab(texts=("the cat",), temperature=1.0, verifier=Lenient(0.5))
    assert study_verifiers(laboratory, one_at_a_time(tmp_path), {}, quiet(), repeats=1) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    (only,) = summary["proposers"].values()
    assert list(summary["proposers"]) == ["repeat"] and list(only["verifiers"]) == ["lenient"]
    assert only["compared_with"] == "lenient" and only["verifiers"]["lenient"]["difference"]["mean"] == 0
    assert not only["verifiers"]["lenient"]["lossless"]
    assert only["verifiers"]["lenient"]["expected_accepted"]["low"] is None  # one prompt has no interval


# Files of a run ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_manifest_tables_and_figures(done):
    _, out, output = done
    manifest = json.loads((out / "manifest.json").read_text())
    assert list(manifest["proposers"]) == manifest["arms"] == list(TREES)
    assert str(out) in output.replace("\n", "")
    assert {file.name for file in out.iterdir()} == {
        "manifest.json", "summary.json", "summary.md", "recorded.parquet", "texts.parquet", "figures",
    }  # fmt: skip
    for name in ("accepted", "time"):
        assert (out / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_cells_are_given_back(done):
    assert held(done[0]) == 0


@pytest.mark.nightly
def test_a_run_goes_on_where_it_was_interrupted(done, tmp_path, monkeypatch, capsys):
    laboratory, asked = recorded_lab(), []

    def interrupting(target, request, seed):
        asked.append(request.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return sample(target, request, seed)

    monkeypatch.setattr("spec_lab.tasks.verifier_study.recorded.sample", interrupting)
    assert study_verifiers(laboratory, one_at_a_time(tmp_path), {}, quiet(), every=3, repeats=1) == 130
    assert f"the rows of 2 of 5 prompts are in {tmp_path}" in capsys.readouterr().err
    assert load(tmp_path)["request"].unique().tolist() == [0, 1] and held(laboratory) == 0
    assert not (tmp_path / "summary.json").exists()
    assert study_verifiers(laboratory, one_at_a_time(tmp_path), {}, quiet(), every=3, repeats=1) == 0
    assert asked == ["p0", "p1", "p2", "p2", "p3", "p4"]
    pd.testing.assert_frame_equal(load(tmp_path).drop(columns=TIMES), load(done[1]).drop(columns=TIMES))


# Figures -----------------------------------------------------------------------------------------------------------


def hand_made() -> pd.DataFrame:
    """Two prompts with two drafts and one, verified by two verifiers."""
    usual = {"proposer": "tree", "drawn": "iid", "lossless": True, "given": "draft", "nodes": 4, "propose": 1e-3}
    usual |= {"target": 3e-3, "probabilities": 1e-4}
    rows = []
    for request, position, bound, forward, token, other in [
        (0, 5, 0.8, 2e-3, (1.0, 0.5, 1e-5), (1.5, 0.6, 4e-5)),
        (0, 9, 0.6, 1e-3, (0.2, 0.2, 3e-5), (0.4, 0.3, 2e-5)),
        (1, 5, 0.4, 4e-3, (0.6, 0.5, 2e-5), (0.2, 0.1, 9e-5)),
    ]:
        shared = usual | {"request": request, "position": position, "bound": bound, "target_forward": forward}
        for name, (expected, first, seconds) in (("token", token), ("other", other)):
            of = {"verifier": name, "expected_accepted": expected, "first_level": first, "verify": seconds}
            rows.append(shared | of)
    return pd.DataFrame(rows)


def test_pooled_numbers_equal_those_by_hand():
    figures = pooled.of_proposer(hand_made(), ["other", "token"])
    assert list(figures["verifiers"]) == ["other", "token"] and figures["compared_with"] == "token"
    assert figures["drafts"] == 3 and figures["drafted_per_draft"] == 4
    assert figures["target_forward_us"] == pytest.approx(2000) and figures["probabilities_us"] == pytest.approx(100)
    assert figures["bound"]["mean"] == pytest.approx(0.6)
    token, other = figures["verifiers"]["token"], figures["verifiers"]["other"]
    assert token["expected_accepted"]["mean"] == pytest.approx(1.8 / 3)
    assert other["expected_accepted"]["mean"] == pytest.approx(2.1 / 3)
    assert np.isnan([other["expected_accepted"]["low"], other["expected_accepted"]["high"]]).all(), "two prompts"
    assert other["difference"]["mean"] == pytest.approx((0.5 + 0.2 - 0.4) / 3)
    assert token["difference"]["mean"] == 0
    assert other["share_of_bound"]["mean"] == pytest.approx(1.0 / 1.8)
    assert token["verify_us"] == pytest.approx({"median": 20, "low": 15, "high": 25})
    assert token["share_of_forward"] == pytest.approx(0.01)
