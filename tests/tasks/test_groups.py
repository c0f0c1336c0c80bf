"""Groups that were disturbed are decoded again; what is recorded of other processes."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.core.randomness import CounterDraws
from spec_lab.propose import Null
from spec_lab.tasks import groups
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.lab import Decoded, Loop
from spec_lab.verify import Match
from tests.labs import lab, settings

TEXTS = tuple(f"prompt {number}" for number in range(10))


class Timed:
    """A peer that decodes a group in 1 s; a disturbed one, for its first ``slow`` attempts, in 9 s."""

    def __init__(self, disturbed=(), slow=1, interrupt=None) -> None:
        self.disturbed, self.slow, self.interrupt, self.calls = disturbed, slow, interrupt, Counter()

    def decode(self, requests) -> Decoded:
        (request,) = requests
        self.calls[request.id] += 1
        if (request.id, self.calls[request.id]) == self.interrupt:
            raise KeyboardInterrupt
        slow = request.id in self.disturbed and self.calls[request.id] <= self.slow
        loop = Loop(lab().target, Null(), Match(), CounterDraws(0))
        outcomes = [replace(outcome, decode_seconds=9.0 if slow else 1.0) for outcome in loop.decode(requests).outcomes]
        return Decoded([], outcomes)


def measured(out, peer, monkeypatch, load=0.0, **options):
    """The exit code of a run of one peer, beside other processes that use ``load`` cores, and what it printed."""
    monkeypatch.setattr(groups, "other_load", lambda began, ended: load(peer) if callable(load) else load)
    console = Console(file=StringIO(), width=100)
    parts = lab(TEXTS, proposer=Null(), peers={"timed": peer})
    config = {"target": {"path": "tiny"}}
    code = run(parts, settings(out, batch_size=1, baseline=False, max_new_tokens=4), config, console, **options)
    return code, " ".join(console.file.getvalue().split())


def written(out) -> tuple[dict, dict, pd.DataFrame]:
    summary, manifest = (json.loads((out / f"{name}.json").read_text()) for name in ("summary", "manifest"))
    return summary, manifest, metrics.load(out).requests.set_index("request")


def test_a_disturbed_group_is_named_below_the_table_and_stays_without_the_option(tmp_path, monkeypatch):
    code, printed = measured(tmp_path, Timed([3]), monkeypatch)
    summary, manifest, requests = written(tmp_path)
    assert code == 0 and requests["decode_seconds"].max() == 9.0 and (requests["attempt"] == 0).all()
    assert summary["verdict"] == manifest["verdict"] == "not reliable" and summary["repeated_groups"] == {}
    assert manifest["device"] == "cpu", "by which the verdict judges the load"
    assert any("group 3" in reason for reason in summary["verdict_reasons"])
    assert summary["verdict_reasons"] == manifest["verdict_reasons"]
    assert printed.index("tokens/s") < printed.index("Verdict: not reliable")


def test_disturbed_groups_are_decoded_again_and_counted(tmp_path, monkeypatch):
    peer = Timed([3, 7])
    code, printed = measured(tmp_path, peer, monkeypatch, repeat_disturbed=True)
    summary, manifest, requests = written(tmp_path)
    assert code == 0 and peer.calls == Counter(range(10)) + Counter([3, 7])
    assert (requests["decode_seconds"] == 1.0).all() and len(requests) == 10
    assert requests["attempt"].to_dict() == {number: int(number in (3, 7)) for number in range(10)}
    assert summary["verdict"] == "reliable" and summary["verdict_reasons"] == []
    assert summary["repeated_groups"] == manifest["repeated_groups"] == {"3": 1, "7": 1}
    assert "disturbed: groups 3, 7" in printed


def test_a_group_that_stays_disturbed_is_decoded_three_times(tmp_path, monkeypatch):
    peer = Timed([3], slow=9)
    measured(tmp_path, peer, monkeypatch, repeat_disturbed=True)
    summary, _, requests = written(tmp_path)
    assert peer.calls[3] == groups.MAX_ATTEMPTS == 3 and sum(peer.calls.values()) == 12
    assert requests.loc[3, "attempt"] == 2 and summary["verdict"] == "not reliable"
    again = Timed()
    assert measured(tmp_path, again, monkeypatch, repeat_disturbed=True)[0] == 0
    assert not again.calls, "a run that has ended repeats no group once more"


def test_a_group_that_lost_its_cores_to_others_is_decoded_again_however_long_it_took(tmp_path, monkeypatch):
    peer = Timed()
    measured(
        tmp_path, peer, monkeypatch, lambda peer: 64.0 if peer.calls[5] == 1 and not peer.calls[6] else 0.0,
        repeat_disturbed=True,
    )  # fmt: skip
    summary, _, requests = written(tmp_path)
    assert summary["repeated_groups"] == {"5": 1} and (requests["other_cores"] == 0).all()


@pytest.mark.parametrize("load", [0.5, None])
def test_what_other_processes_used_stands_in_every_row(tmp_path, monkeypatch, load):
    measured(tmp_path, Timed(), monkeypatch, load)
    summary, _, requests = written(tmp_path)
    assert requests["other_cores"].isna().all() if load is None else (requests["other_cores"] == load).all()
    assert any("not recorded" in reason for reason in summary["verdict_reasons"]) == (load is None)


def test_a_run_that_was_interrupted_while_it_repeated_a_group_resumes(tmp_path, monkeypatch):
    """The rows of the attempt before stay until the next one is written, and both are still repeated."""
    first = Timed([3, 7], interrupt=(3, 2))
    assert measured(tmp_path, first, monkeypatch, repeat_disturbed=True)[0] == 130
    kept = metrics.load(tmp_path).requests
    assert sorted(kept["request"]) == list(range(10))
    assert (kept.set_index("request").loc[[3, 7], "decode_seconds"] == 9.0).all()
    second = Timed()
    assert measured(tmp_path, second, monkeypatch, repeat_disturbed=True)[0] == 0
    assert second.calls == Counter([3, 7])
    summary, _, requests = written(tmp_path)
    assert (requests["decode_seconds"] == 1.0).all() and summary["verdict"] == "reliable"
    assert summary["repeated_groups"] == {"3": 1, "7": 1}


def test_rows_of_every_table_are_those_of_the_last_attempt(tmp_path, monkeypatch):
    """A real arm's forwards are counted once, and none of the first attempt is left."""
    monkeypatch.setattr(groups, "other_load", lambda began, ended: 0.0)
    parts, console = lab(TEXTS[:4]), Console(file=StringIO())
    options = settings(tmp_path, batch_size=1, max_new_tokens=4)
    monkeypatch.setattr("spec_lab.analysis.metrics.disturbed", lambda arms, resources: [2])
    assert run(parts, options, {}, console, repeat_disturbed=True) == 0
    tables = metrics.load(tmp_path)
    assert set(tables.requests.loc[tables.requests["group"] == 2, "attempt"]) == {2}
    for name, frame in (("forwards", tables.forwards), ("steps", tables.steps), ("requests", tables.requests)):
        assert frame["id"].is_unique and set(frame["group"]) == {0, 1, 2, 3}, name
    spans = (
        tables.forwards[tables.forwards["group"] == 2]
        .groupby("arm")
        .apply(lambda forwards: (forwards["start"] + forwards["whole"]).max())
    )
    took = tables.requests[tables.requests["group"] == 2].set_index("arm")
    assert (took["prefill_seconds"] + took["decode_seconds"]).to_dict() == pytest.approx(spans.to_dict())
