"""``record=replay`` in runs and studies, and ``spec-lab replay`` on them."""

import json
import shutil
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.cli.commands import command
from spec_lab.replay import designs, recording_memory
from spec_lab.replay.designs import Options, verifier_of
from spec_lab.replay.recorded_trees import RunVerifier, read
from spec_lab.replay.replay_tables import replay
from spec_lab.results.run_state import INTERRUPTED
from spec_lab.tasks import benchmark
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.verifier_study import study_verifiers
from spec_lab.verify import Lenient, Token
from tests.labs import TEXTS, Repeat, lab, settings
from tests.propose.lab import draft_model

CONFIG = {"target": {"path": "tiny"}, "record": "replay"}


def quiet() -> Console:
    return Console(file=StringIO(), width=150)


def named(tree, drawn="iid"):
    proposer = draft_model(tree, drawn)
    proposer.name = f"draft_{proposer.plan.kind}"
    return proposer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished run with two arms and a baseline."""
    out = tmp_path_factory.mktemp("recorded") / "out"
    laboratory = lab(temperature=1.0, proposer=named("2x1"), more_proposers={"repeat": Repeat()})
    assert run(laboratory, settings(out, record="replay", record_top=8), CONFIG, quiet()) == 0
    return out


def test_a_run_records_every_step_of_its_proposers_but_not_the_baseline(recorded):
    steps = metrics.load(recorded).steps
    trees = read(recorded)
    assert sorted(trees) == ["draft_tree", "repeat"]
    for name, tree in trees.items():
        rows = steps[steps["arm"] == name].sort_values(["group", "request", "sequence", "forward"])
        assert tree.steps["forward"].tolist() == rows["forward"].tolist()
        assert (tree.shape.sizes - 1 == rows["nodes"].to_numpy()).all()
        assert tree.steps["position"].tolist() == rows["context"].tolist()
        assert tree.shape.sizes.min() > 1 and len(tree.texts) == len(TEXTS)
    assert trees["draft_tree"].ids.shape[1] == 8 and not (recorded / "parts").exists()


@pytest.mark.nightly
def test_a_resumed_run_records_what_an_uninterrupted_one_does(tmp_path, monkeypatch):
    """Also of a share of the steps; with other recorded tokens the run is another one, and refused."""
    config = {**CONFIG, "record_top": 8}
    facts = dict(record="replay", record_top=8, record_share=0.5, batch_size=1, max_new_tokens=8)

    def decode(name, **changed):
        laboratory = lab(TEXTS[:2], temperature=1.0, proposer=named("1x1"))
        return run(laboratory, settings(tmp_path / name, **facts | changed), config | changed, quiet())

    right, calls = benchmark.decode_group, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(benchmark, "decode_group", interrupted)
        assert decode("one") == INTERRUPTED
    first = pd.read_parquet(tmp_path / "one" / "replay.parquet")
    assert set(first["group"]) == {0} and set(read(tmp_path / "one")["draft_chain"].steps["request"]) == {0}
    for changed in ({"record_top": 16}, {"record_share": 1.0}):
        with pytest.raises(ValueError, match=f"already holds another run .*{next(iter(changed))}"):
            decode("one", **changed)
    assert decode("one") == decode("two") == 0
    tables = [pd.read_parquet(tmp_path / name / "replay.parquet") for name in ("one", "two")]
    pd.testing.assert_frame_equal(*tables)
    assert set(tables[0]["group"]) == {0, 1}
    summaries = [json.loads((tmp_path / name / "summary.json").read_text())["bounds"] for name in ("one", "two")]
    assert summaries[0] == summaries[1]


@pytest.mark.nightly
def test_a_share_of_the_steps_is_the_same_in_a_second_run(tmp_path):
    tables = []
    for name in ("one", "two"):
        laboratory = lab(temperature=1.0, proposer=named("1x1"))
        assert run(laboratory, settings(tmp_path / name, record="replay", record_share=0.4), CONFIG, quiet()) == 0
        tables.append(read(tmp_path / name)["draft_chain"].steps)
    pd.testing.assert_frame_equal(*tables)
    assert 0.2 < len(tables[0]) / (metrics.load(tmp_path / "one").steps["arm"] == "draft_chain").sum() < 0.6


@pytest.mark.nightly
def test_the_texts_of_a_lossy_run_are_not_followed_and_those_of_a_study_are(tmp_path):
    lenient, token = Lenient(0.5), Token()
    config = {**CONFIG, "verifier": {"_target_": "spec_lab.verify.Lenient", "lenience": 0.5}}
    run(lab(temperature=1.0, proposer=named("1x1"), verifier=lenient), settings(tmp_path / "run", record="replay"),
        config, quiet())  # fmt: skip
    options = settings(tmp_path / "study", record="replay", record_top=61, batch_size=1)
    verifiers = {"lenient": lenient, "token": token}
    study_verifiers(lab(temperature=1.0, proposer=named("1x1"), verifier=lenient, verifiers=verifiers), options, config,
                    quiet(), every=1, repeats=1)  # fmt: skip
    assert read(tmp_path / "run")["draft_chain"].verifier == RunVerifier("lenient", False, "lenient:lenience=0.5")
    methods = {
        name: replay(tmp_path / name, Options(["token"], ["all"], confidences=[0.3])) for name in ("run", "study")
    }
    assert "the recorded texts are those of the lossy verifier 'lenient'" in methods["run"]["needs"].item()
    assert methods["study"]["method"].tolist() == ["along"]


def test_whether_a_run_is_lossless_follows_from_its_manifest():
    for config, expected in (
        ({"_target_": "spec_lab.verify.Token"}, ("token", True, "token")),
        ({"_target_": "spec_lab.verify.Gumbel"}, ("gumbel", True, "")),
        ({"_target_": "spec_lab.verify.Lenient", "lenience": 1}, ("lenient", True, "lenient:lenience=1")),
        ({"_target_": "spec_lab.verify.Lenient", "lenience": 0.9}, ("lenient", False, "lenient:lenience=0.9")),
        (
            {"_target_": "spec_lab.verify.Typical", "epsilon": 0.1, "delta": 0.3},
            ("typical", False, "typical:epsilon=0.1,delta=0.3"),
        ),
        ({"_target_": "spec_lab.verify.Token", "gone": 1}, ("spec_lab.verify.Token", None, "")),
        ({"_target_": "mine.Token"}, ("mine.Token", None, "")),
        ({}, ("", None, "")),
    ):
        assert RunVerifier.of({"config": {"verifier": config}}) == RunVerifier(*expected)
    for manifest in ({}, {"config": None}, {"config": {"verifier": None}}):
        assert RunVerifier.of(manifest) is None


def test_the_command_prints_a_sorted_table_and_writes_all_designs(recorded, tmp_path):
    console = quiet()
    assert command(["replay", str(recorded), "--csv", str(tmp_path / "all.csv")], console) == 0
    shown = console.file.getvalue()
    assert "traversal" in shown and "needs the model" in shown and "Table:" in shown
    frame = pd.read_csv(tmp_path / "all.csv", keep_default_na=False, na_values=[""])
    known = frame[frame["needs"].isna()]
    groups = [known[known["lossless"]], known[~known["lossless"]]]
    assert known["lossless"].is_monotonic_decreasing and all(len(group) for group in groups)
    assert all(group["tau"].is_monotonic_decreasing for group in groups)
    assert known["low"].isna().all(), "fewer than eight requests have no interval"
    for verifier, rows in frame.groupby("verifier"):
        assert set(rows["lossless"]) == {verifier_of(verifier).lossless}
    narrow = Console(file=StringIO(), width=80)
    options = ["--drawn", "iid", "--temperatures", "0.7", "1", "--shapes", "all", "depth=1,children=2"]
    assert command(["replay", str(recorded), *options], narrow) == 0
    printed = narrow.file.getvalue()
    assert all(len(line) <= 80 for line in printed.splitlines() if "needs the model" not in line)
    assert {"children=2,", "traversal", "steps", "0.7"} <= set(printed.split())
    wanted = sum(len(designs.designs(recorded_arm, Options())) for recorded_arm in read(recorded).values())
    keys = ["arm", "verifier", "shape"]
    assert len(frame.drop_duplicates(keys)) == wanted


def floats(values) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


P = [0.5, 0.1, *[0.05] * 6]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("row", "changes", "why"),
    [
        (0, {"p": floats([np.nan, *P[1:]])}, "column p: a probability is negative or not finite"),
        (0, {"p": floats([-0.5, *P[1:]])}, "column p: a probability is negative or not finite"),
        (0, {"p": floats(P), "p_rest": 0.9, "p_most": 0.1}, "column p: with p_rest it does not sum to 1"),
        (0, {"q": floats(P), "q_rest": 0.9, "q_most": 0.1}, "column q: with q_rest it does not sum to 1"),
        (0, {"p_rest": np.inf}, "column p_rest: it is negative or not finite"),
        (0, {"q_most": -1.0}, "column q_most: it is negative or not finite"),
        (0, {"p": floats(P), "p_rest": 0.1, "p_most": 0.3}, "column p_most: it is larger than p_rest"),
        (0, {"p": b"abc"}, "column p: it is no list of float32"),
        (0, {"p": b""}, "column p: it is no list of float32"),
        (0, {"q": b"abcd"}, "column q: its length differs from that of p"),
        (0, {"ids": b"abc"}, "column ids: its length differs from that of p"),
        (0, {"ids": b""}, "column ids: it is empty, but p is not of all tokens"),
        (0, {"ids": bytes(24)}, "column ids: a token occurs twice"),
        (0, {"ids": b"".join(bytes([n, 1, 0]) for n in range(8))}, "column ids: a token is not below the vocabulary"),
        (0, {"vocabulary": 3}, "column vocabulary: it differs or is 0"),
        (0, {"sampling": "[]"}, "have different sampling parameters"),
        (1, {"way": "guess"}, "column way: it is none of deterministic, iid, without_replacement, gumbel"),
        (1, {"parent": 7}, "column parent: it is no earlier row of the tree"),
        (1, {"parent": -1}, "column parent: it is no earlier row of the tree"),
        (1, {"row": 9}, "lacks a row"),
        (1, {"row": -1}, "column row: it is negative"),
        (1, {"token": 4000}, "lacks the token of one of its children"),
        (1, {"p_rest": None}, "column p_rest has empty cells"),
    ],
)
def test_a_damaged_table_is_refused_by_row_and_column(recorded, tmp_path, capsys, row, changes, why):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    frame = pd.read_parquet(folder / "replay.parquet")
    index = frame.index[(frame["arm"] == "draft_tree") & (frame["row"] == row)][0]
    for column, value in changes.items():
        frame.at[index, column] = value
    frame.to_parquet(folder / "replay.parquet", index=False)
    for name in ("replay", "bounds"):
        assert command([name, str(folder)], quiet()) == 1
        shown = capsys.readouterr().err
        assert why in shown and str(folder) in shown
        if "column" in why and "cells" not in why:
            assert f"row {frame['id'][index]}" in shown


def test_a_missing_table_and_one_without_rows_are_named(recorded, tmp_path, capsys):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    frame = pd.read_parquet(folder / "replay.parquet")
    frame.iloc[:0].to_parquet(folder / "replay.parquet", index=False)
    for name in ("replay", "bounds"):
        assert command([name, str(folder)], quiet()) == 1
        assert "nothing was recorded: no recorded step has drafted; record_share" in capsys.readouterr().err
    (folder / "replay.parquet").unlink()
    for name in ("replay", "bounds"):
        assert command([name, str(folder)], quiet()) == 1
        assert "replay.parquet is missing" in capsys.readouterr().err


def test_a_recording_that_does_not_fit_into_memory_is_refused_before_it_is_read(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(recording_memory, "available", lambda device: 2**10)
    with pytest.raises(ValueError, match=r"\d+ rows, .* rough estimate.* 1 KiB are available: .*record_share"):
        read(recorded)
    monkeypatch.setattr(recording_memory, "available", lambda device: None)
    assert read(recorded)
    (tmp_path / "parts").mkdir()
    shutil.copy(recorded / "replay.parquet", tmp_path / "parts" / "replay-000000.parquet")
    (tmp_path / "parts" / "replay-000001.parquet").write_bytes(b"damaged")
    monkeypatch.setattr(recording_memory, "available", lambda device: 0)
    recording_memory.check_memory(tmp_path)  # whoever reads it says what is wrong
    (tmp_path / "parts" / "replay-000001.parquet").unlink()
    with pytest.raises(ValueError, match="of memory"):
        recording_memory.check_memory(tmp_path)


def test_distributions_under_constraints_are_not_recorded_yet(tmp_path):
    with pytest.raises(ValueError, match="record=replay supports no constraint yet"):
        lab(applied=object()).arms(settings(tmp_path, record="replay"))
