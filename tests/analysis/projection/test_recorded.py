"""Designs that a run's steps determine, with other draft lengths, and the command that projects them."""

import json
import re
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics, projection
from spec_lab.analysis.metrics.intervals import resampled_sums
from spec_lab.analysis.projection import (
    Deployment,
    break_even,
    measured_forwards,
    project,
    recorded,
    write,
)
from spec_lab.analysis.projection.acceptance import of_steps
from spec_lab.analysis.projection.drafting import Drafting
from spec_lab.analysis.projection.run_costs import forwards_of
from spec_lab.cli.commands import command
from spec_lab.tasks.benchmark import run
from tests.analysis.metrics.tables import steps
from tests.labs import Repeat, lab, settings

OPTIONS = ["--hardware", "h100-sxm,l4", "--model", "llama-3.1-8b", "--batch", "1,8,512", "--context", "256"]


def chains(*rows):
    """Steps of chains: request, drafted, accepted."""
    return steps(*({"request": r, "nodes": n, "depth": n, "accepted": a} for r, n, a in rows))


def test_tau_of_shorter_chains_counts_what_they_would_have_accepted():
    frame = chains((0, 3, 3), (0, 3, 1), (1, 3, 0), (1, 1, 1))
    design = of_steps(frame, "chain", "ngram", "token")
    acceptance = design.draws(0)
    cut = [1 + np.minimum(frame["accepted"], length).mean() for length in (1, 2, 3)]
    assert [acceptance.tau(length)[0] for length in design.lengths] == pytest.approx(cut)
    assert acceptance.tau(3)[0] == pytest.approx(metrics.tau_pooled_raw(frame))
    assert [acceptance.share[0] @ acceptance.nodes(length) for length in (1, 2, 3)] == [1.0, 1.75, 2.5]
    assert acceptance.survival[0] == pytest.approx(metrics.survival(frame))


def test_forced_tokens_do_not_count():
    frame = steps({"accepted": 3, "forced_accepted": 2}, {"accepted": 0})
    assert of_steps(frame, "chain", "ngram", "token").draws(0).tau(3)[0] == 1.5


def test_resamples_draw_whole_requests():
    frame = chains(
        *((request, 2, accepted) for request, accepted in enumerate((2, 1, 0, 2, 1, 1, 2, 0)) for _ in range(4))
    )
    taus = of_steps(frame, "chain", "ngram", "token").draws(999).tau(2)
    tau = np.array([[3.0, 2.0, 1.0, 3.0, 2.0, 2.0, 3.0, 1.0]]).T
    assert taus[0] == pytest.approx(tau.mean()) and taus[1:] == pytest.approx(resampled_sums(tau, 999)[:, 0] / 8)


@pytest.mark.parametrize(("requests", "draws"), [(1, 1), (7, 1), (8, 100)])
def test_below_eight_requests_there_are_no_resamples(requests, draws):
    frame = chains(*((request, 2, request % 3) for request in range(requests)))
    assert len(of_steps(frame, "chain", "ngram", "token").draws(99).tau(1)) == draws


def test_levels_of_a_fixed_tree():
    frame = steps({"nodes": 6, "depth": 2, "accepted": 2}, {"nodes": 6, "depth": 2, "accepted": 0})
    facts = {"tree": "0 1 2 0.0 0.1 1.0", "heads": 2}
    design = of_steps(frame, "tree", "medusa", "token", facts)
    assert design.draws(0).drafts.tolist() == [[3.0, 3.0]] and design.draws(0).share.tolist() == [[1.0]]
    assert design.any_length and design.heads == 2
    cut = steps({"nodes": 4, "depth": 2, "accepted": 2})  # by the context: what is left is spread alike
    assert of_steps(cut, "tree", "medusa", "token", facts).drafts.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("verifier", "facts", "why"),
    [
        ("traversal", {"tree": "0 1 2 0.0 0.1 1.0"}, r"may depend on deeper ones \(verifier traversal\)"),
        ("", {"tree": "0 1 2 0.0 0.1 1.0"}, "verifier not recorded"),
        ("token", {"tree": "reranked"}, "which nodes a shorter tree keeps was not recorded"),
    ],
)
def test_where_shorter_drafts_are_not_determined_only_the_recorded_length_is_projected(verifier, facts, why):
    design = of_steps(steps({"nodes": 6, "depth": 2, "accepted": 1}), "tree", "eagle3", verifier, facts)
    assert list(design.lengths) == [2]
    assert re.search(why, design.why_not)
    assert design.draws(0).nodes(2).tolist() == [6]


# Runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose arms draft chains under names of proposers that are modelled."""
    out = tmp_path_factory.mktemp("run")

    class Ngram(Repeat):
        name = "ngram"

    class Chain(Repeat):
        name = "draft_chain"

    run(lab(proposer=Ngram(2), more_proposers={"longer": Ngram(4), "model": Chain(3)}), settings(out), {})
    return out


@pytest.mark.nightly
def test_the_arms_of_a_run_are_designs(folder):
    designs, _ = recorded([folder])
    assert [(design.name, design.proposer, design.depth, design.any_length) for design in designs] == [
        ("ngram", "ngram", 2, True), ("longer", "ngram", 4, True), ("model", "draft_chain", 3, True),
    ]  # fmt: skip
    tables = metrics.load(folder)
    for design, arm in zip(designs, ("ngram", "longer", "model"), strict=True):
        steps = metrics.decode_steps(tables.steps, arm)
        assert design.draws(0).tau(design.depth)[0] == pytest.approx(metrics.tau_pooled_raw(steps))


@pytest.mark.nightly
def test_the_command_prints_and_writes_a_projection(folder, tmp_path, capsys):
    code = command(["project", str(folder), *OPTIONS, "--draft", "llama-3.2-1b", "--out", str(tmp_path / "out"), "-v"])
    said = capsys.readouterr().out
    assert code == 0 and "H100 SXM 80 GB: the fastest design" in said and "L4 24 GB: each design" in said
    cells = pd.read_csv(tmp_path / "out" / "projection.csv")
    assert len(cells) == 2 * 3 * (2 + 4 + 3) and set(cells["batch"]) == {1, 8, 512}
    assert not cells[(cells["hardware"] == "L4 24 GB") & (cells["batch"] == 512)]["fits"].any()
    even = pd.read_csv(tmp_path / "out" / "break_even.csv")
    assert len(even) == 2 * (2 + 4 + 3)
    names = {"best", "speedup_ngram", "speedup_longer", "speedup_model"}
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {f"{name}.png" for name in names}


def small_projection(name):
    """(cells, break-even) of one design at two lengths."""
    design = of_steps(chains((0, 2, 2), (1, 2, 0)), name, "ngram", "token")
    at = [Deployment("device", Rising(), {name: Drafting()})]
    return project([design], at, [1, 2], 64), break_even([design], at, 2, 64)


class Rising:
    """A forward whose seconds rise with its rows."""

    def seconds(self, rows, batch, context):
        return np.broadcast_to(1.0 + 0.01 * np.asarray(rows) * batch, np.broadcast(rows, batch, context).shape)


def test_files_of_an_interrupted_projection_are_removed_by_the_next(tmp_path, monkeypatch):
    write(*small_projection("one"), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(projection, "save", Mock(side_effect=OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            write(*small_projection("two"), tmp_path)
    assert (tmp_path / "speedup_one.png").exists(), "nothing is removed before the new files are there"
    last = write(*small_projection("three"), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in last} | {"projection.json"}


@pytest.mark.nightly
def test_measured_forwards_replace_the_roofline(folder, tmp_path, capsys):
    file = tmp_path / "mine.csv"
    rows = [("target", t, b, c, 0.01 + 1e-4 * t * b) for t in (1, 8) for b in (1, 4) for c in (0, 512)]
    pd.DataFrame(rows, columns=["model", "tokens", "batch", "context", "seconds"]).to_csv(file, index=False)
    args = ["project", str(folder), "--costs", str(file), "--batch", "1,4", "--context", "64", "--out", str(tmp_path)]
    assert command(args) == 0
    cells = pd.read_csv(tmp_path / "projection.csv")
    row = cells[(cells["design"] == "longer") & (cells["length"] == 4) & (cells["batch"] == 4)].iloc[0]
    nodes = row["nodes"]
    assert row["speedup"] == pytest.approx(row["tau"] * 0.0104 / (0.01 + 4e-4 * (1 + nodes)), rel=1e-5)
    args[args.index("1,4")] = "1,8"
    assert command(args) == 0  # the table ends at 4
    assert not pd.read_csv(tmp_path / "projection.csv").query("batch == 8")["fits"].any()
    args[args.index("64")] = "1024"
    capsys.readouterr()
    assert command(args) == 1
    assert "costs were measured for context from 0 to 512, not from 1024 to 1024" in capsys.readouterr().err


def test_a_run_s_own_steps_are_its_costs():
    """The target by nodes, drafting by arm, as medians; steps of smaller batches and of the prefill do not count."""

    def arm(name, *each):
        """Steps of two sequences: nodes, depth, seconds of drafting, of all else, and of a pause before."""
        start, rows = 0.0, []
        for number, (nodes, depth, drafting, rest, pause) in enumerate([(0, 0, 9.0, 9.0, 0.0), *each]):
            start += pause
            row = {"arm": name, "group": 0, "forward": number, "prefill": number == 0, "prefill_chunks": 0, "live": 2}
            row |= {"nodes": 2 * nodes, "depth": depth, "propose": 0.75 * drafting, "verify": 0.25 * drafting}
            rows.append(row | {"start": start, "whole": drafting + rest, "context": 50 + number})
            start += drafting + rest
        rows.append(rows[-1] | {"forward": len(rows), "live": 1, "start": start, "whole": 100.0})
        return rows

    rows = [
        *arm("baseline", *[(0, 0, 0.5, 2.0, 0.25)] * 3),
        *arm("chain", (3, 3, 3.5, 4.0, 0.0), (3, 3, 3.5, 5.0, 0.0), (3, 3, 12.5, 9.0, 0.0), (1, 1, 1.5, 2.5, 0.5)),
        *arm("words", (3, 3, 1.0, 4.0, 0.0), (0, 0, 0.625, 2.25, 0.0), (0, 0, 0.625, 2.25, 0.0)),
        *arm("idle", (0, 0, 0.5, 2.25, 0.0)),
    ]
    frame = pd.DataFrame(rows)
    tables = metrics.Tables(frame.drop(columns=["depth", "context"]), frame, frame[:0])
    forwards = forwards_of(tables, {"chain": "draft_chain", "words": "ngram", "idle": "draft_chain"})
    assert set(forwards["context"]) == {51, 54}
    proposers = dict(forwards[["model", "proposer"]].itertuples(index=False, name=None))
    assert proposers == {"target": "", "chain": "draft_chain", "words": "ngram"}
    batches = {model: set(rows["batch"]) for model, rows in forwards.groupby("model")}
    assert batches == {"target": {2}, "chain": {1, 2}, "words": {1, 2}}
    assert set(forwards[["model", "tokens", "seconds"]].itertuples(index=False, name=None)) == {
        *(("target", 1, 2.25 + 0.5), ("target", 2, 3.0 + 0.5), ("target", 4, 4.5 + 0.5)),
        *(("chain", tokens, (3 * 3.0 + 1.0) / 10) for tokens in (1, 4)),  # of each pass, one for each level
        *(("words", tokens, (0.5 + 2 * 0.125) / 3) for tokens in (1, 4)),  # of each step
    }


def test_a_run_is_projected_to_its_own_costs(folder, tmp_path, capsys):
    assert command(["project", str(folder), "--costs", str(folder), "--out", str(tmp_path)]) == 0
    cells = pd.read_csv(tmp_path / "projection.csv")
    assert set(cells["batch"]) == {2} and cells["fits"].all() and len(cells) == 2 + 4 + 3
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Measured forwards: {folder}, at a context of" in printed
    assert f"Verdict: {json.loads((folder / 'summary.json').read_text())['verdict']}" in printed
    tables = {name: (forward.seconds(1, 2, 10), forward.grid) for name, forward in measured_forwards(folder).items()}
    target, plain = tables["target"][1], tables["target"][0]
    (design,) = [design for design in recorded([folder])[0] if design.name == "longer"]
    drafts, share = design.drafts[:, :2].sum(1), design.draws(0).share[0]
    mean = share @ drafts
    rows = 1 + mean + (drafts - mean) / np.sqrt(2)
    step = share @ target(tokens=rows, batch=2, context=10) + tables["longer"][0]
    row = cells[(cells["design"] == "longer") & (cells["length"] == 2)].iloc[0]
    assert row["speedup"] == pytest.approx(row["tau"] * float(plain / step), rel=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--model is required"),
        (["--model", "llama-3.1-8b", "--batch", "1,x"], "--batch must be whole numbers from 1 on with commas"),
        (["--model", "llama-3.1-8b", "--lengths", "0"], "--lengths must be whole numbers from 1 on"),
        (["--model", "llama-3.1-8b", "--lengths", ""], "--lengths must be whole numbers from 1 on"),
        (["--model", "llama-3.1-8b", "--lengths", "9"], "recorded at a draft length of 9; recorded are 1, 2, 3, 4"),
        (["--model", "llama-3.1-8b", "--hardware", ","], "--hardware names no device"),
        (["--model", "llama-3.1-8b", "--hardware", "none.csv"], "none.csv: No such file or directory"),
        (["--model", "llama-3.1-8b", "--costs", "nowhere.csv"], "--costs replaces the roofline: leave out --model"),
        (["--model", "llama-3.1-8b", "--context", "0"], "--context must be at least 1 (got 0)"),
        (["--model", "llama-3.1-8b", "--prompt", "5"], "--prompt and --output go together"),
        (["--model", "llama-3.1-8b", "--lookup-ms", "-1"], "--lookup-ms must be at least 0 (got -1)"),
        (["--costs", "nowhere.csv"], "nowhere.csv: No such file or directory"),
    ],
)
def test_what_cannot_be_projected_is_refused_in_one_line(folder, tmp_path, capsys, more, message):
    assert command(["project", str(folder), "--out", str(tmp_path), *more]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
