"""Runs of a tiny lab: arms, pairing, resumption, interruption, and refusals before anything is decoded."""

import json
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.analysis import metrics, report
from spec_lab.analysis.tracking import Tracker
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.roofline import Roofline
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.propose import Null
from spec_lab.results.schema import DRAFT_COLUMNS
from spec_lab.results.writer import load_token_texts
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks.benchmark import margins, run
from spec_lab.tasks.lab import Decoded, Loop
from spec_lab.verify import Gumbel, Match
from tests.drafters.block_drafters import dspark
from tests.drafters.eagle_heads import written
from tests.labs import TEXTS, Letters, Repeat, lab, settings
from tests.propose.lab import draft_model

CONFIG = {"target": {"path": "tiny"}, "tracker": {"api_key": "hush"}, "max_new_tokens": 12}


def quiet() -> Console:
    return Console(file=StringIO(), width=100)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(directory, output) of one finished run."""
    out, console = tmp_path_factory.mktemp("run") / "out", quiet()
    assert run(lab(), settings(out, warmup=4), CONFIG, console) == 0
    return out, console.file.getvalue()


class Broken(Tracker):
    """Fails at the first group."""

    closed = 0

    def group(self, number, figures):
        raise IndexError("no such chart")

    def close(self):
        self.closed += 1


def test_a_tracker_that_fails_is_named_and_the_run_continues(tmp_path, capsys):
    tracker = Broken()
    assert run(lab(TEXTS[:2], tracker=tracker), settings(tmp_path, batch_size=1), CONFIG, quiet()) == 0
    errors = capsys.readouterr().err
    assert errors.count("tracker 'Broken' raised IndexError: no such chart (") == 1 and "in group)" in errors
    assert (tmp_path / "summary.json").is_file() and tracker.closed == 1


def test_a_run_writes_every_file(done):
    out, _ = done
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    tables = {f"{name}.parquet" for name in ("forwards", "steps", "requests")}
    drawn = {f"figures/{name}.png" for name in ("acceptance", "throughput", "phases")}
    assert names == tables | drawn | {"summary.json", "summary.md", "manifest.json"}


def test_the_markdown_summary_has_the_table_of_arms_and_the_configuration(done):
    lines = (done[0] / "summary.md").read_text().splitlines()
    rows = {line.split(" | ")[0] for line in lines if line.startswith("| ")}
    assert lines[0] == "# run" and rows >= {"| arm", "| repeat", "| baseline", "| seed"}


@pytest.mark.nightly
def test_a_prefix_cache_of_each_arm_changes_no_token_and_is_recorded(done, tmp_path):
    """Texts kept by the warm-up are forgotten, and the prompts are decoded one after the other."""
    texts, console = tuple(f"a long and common beginning of {end}" for end in ("one", "two", "three")), quiet()
    for name, more in (("plain", {}), ("cached", {"prefix_cache": 4096, "verbose": True})):
        assert run(lab(texts), settings(tmp_path / name, batch_size=1, warmup=2, **more), CONFIG, console) == 0
    plain, cached = (metrics.load(tmp_path / name).requests.set_index("id") for name in ("plain", "cached"))
    assert plain["text"].to_dict() == cached["text"].to_dict() and "cached_tokens" not in plain
    for _, arm in cached.groupby("arm"):
        assert arm["cached_tokens"].tolist() == [0, 31, 32], "the second and the third both begin with t"
    shares = json.loads((tmp_path / "cached" / "summary.json").read_text())["cached_prompt_shares"]
    assert shares == dict.fromkeys(("repeat", "baseline"), pytest.approx(63 / sum(map(len, texts))))
    assert "Prompt tokens from the prefix cache: repeat 61%, baseline 61%" in " ".join(console.file.getvalue().split())


def test_arms_alternate_on_every_prompt(done):
    requests = metrics.load(done[0]).requests
    assert sorted(requests["arm"].unique()) == ["baseline", "repeat"]
    for _, arm in requests.groupby("arm"):
        assert sorted(arm["name"]) == [f"p{number}" for number in range(len(TEXTS))]
    assert requests["group"].nunique() == 3
    first = requests[requests["order"] == 0].groupby("group")["arm"].first()
    assert first.tolist() == ["repeat", "baseline", "repeat"]


def test_rows_count_the_text_each_token_releases(done):
    for row in metrics.load(done[0]).requests.itertuples():
        assert len(row.ends) == len(row.tokens) == len(row.text) and list(row.ends) == list(range(1, len(row.text) + 1))


def test_record_drafts_adds_the_drafted_tokens_of_every_arm_and_changes_nothing_else(done, tmp_path):
    assert run(lab(), settings(tmp_path / "out", warmup=4, record="drafts"), CONFIG, quiet()) == 0
    plain, recorded = metrics.load(done[0]), metrics.load(tmp_path / "out")
    assert [*recorded.steps.columns] == [*plain.steps.columns, *DRAFT_COLUMNS]
    for name in ("draft_tokens", "draft_parents", "draft_p", "draft_q", "draft_accept"):
        assert (recorded.steps[name].map(len) == recorded.steps["nodes"]).all()
    for name in ("emitted_tokens", "emitted_origins"):
        assert (recorded.steps[name].map(len) == recorded.steps["emitted"]).all()
    texts = load_token_texts(tmp_path / "out")
    occurring = {*recorded.steps["draft_tokens"].explode().dropna(), *recorded.steps["emitted_tokens"].explode()}
    assert texts == {token: Letters().decode([token]) for token in occurring} and load_token_texts(done[0]) == {}
    assert recorded.steps["nodes"].sum() > 0
    pd.testing.assert_frame_equal(recorded.steps[[*plain.steps.columns]], plain.steps)


@pytest.mark.nightly
def test_a_confidence_head_is_recorded_and_its_calibration_is_in_summary_and_page(tmp_path):
    made = lab()
    path = written(tmp_path / "head", *dspark(32, 61, ids=(0, 1), mask=61))
    drafter = BlockDrafter.load(made.target, path, depth=3)
    assert run(replace(made, proposer=drafter), settings(tmp_path / "out", record="drafts"), CONFIG, quiet()) == 0
    facts = json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]["block"]["confidence"]["head"]
    steps = metrics.load(tmp_path / "out").steps
    drafted = steps[(steps["arm"] == "block") & (steps["nodes"] > 0)]
    assert (drafted["draft_confidence"].map(len) == drafted["nodes"]).all() and 0 < facts["ece"] < 1
    page = report.write(tmp_path / "out").read_text()
    assert "Calibration of the confidence" in page and "block, confidence head" in page


def test_greedy_arms_agree(done):
    tables = metrics.load(done[0])
    assert metrics.identical_outputs(tables.requests, "repeat") == 1.0
    assert (tables.requests["prefill_tokens"] + tables.requests["decode_tokens"] == 12).all()


def test_outputs_that_differ_from_the_baselines_have_the_margin_of_the_targets_logits(done):
    tables = metrics.load(done[0])
    assert json.loads((done[0] / "summary.json").read_text())["output_margins"] == {}
    requests = tables.requests.copy()
    changed = requests.index[requests["arm"] == "repeat"][:2]
    other = {}
    for number in changed:
        tokens = list(requests.at[number, "tokens"])
        other[requests.at[number, "request"]] = (tokens[:3], tokens[3], (tokens[3] + 1) % 128)
        tokens[3] = (tokens[3] + 1) % 128
        requests.at[number, "tokens"] = np.array(tokens)
    laboratory, expected = lab(), []
    prompts = laboratory.requests(settings(done[0], warmup=4))
    output_margins = margins(laboratory, prompts, replace(tables, requests=requests))["output_margins"]
    for number, (before, expected_token, token) in other.items():
        text = [*prompts[number].tokens, *before]
        logits = laboratory.target.plain_logits(text, len(text))[0].float()
        expected.append(abs(float(logits[token] - logits[expected_token])))
    assert output_margins == {"repeat": {"outputs": 2, "median": pytest.approx(np.mean(expected)),
                                     "largest": pytest.approx(max(expected))}}  # fmt: skip


def test_the_summary_has_the_design_s_keys(done):
    summary = json.loads((done[0] / "summary.json").read_text())
    assert {
        "experiment", "proposer", "verifier", "constraint", "lossless", "certified", "requests", "tokens", "steps",
        "tau_pooled", "tau_macro", "expected_tau", "draft_token_rate", "survival", "conditional", "tokens_per_second",
        "baseline_tokens_per_second", "speedup", "speedup_with_prefill", "prefill_seconds", "phase_seconds", "overhead",
        "repeated_8gram_share",
    } <= set(summary)  # fmt: skip
    assert summary["proposer"] == "repeat"
    assert summary["lossless"] is True
    assert summary["requests"] == 5
    assert summary["tokens"] == 60
    assert set(summary["speedup"]) == set(summary["speedup_with_prefill"]) == {"mean", "low", "high"}
    assert summary["overhead"] == pytest.approx(summary["arms"]["repeat"]["overhead"])


def certified(tmp_path, **parts):
    """The certificates of a run's arms, and its output joined into one line."""
    console = quiet()
    assert run(lab(texts=TEXTS[:2], temperature=1.0, **parts), settings(tmp_path), CONFIG, console) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens"] == 24, "whatever the certificate says, the run is whole"
    return {name: arm["certified"] for name, arm in summary["arms"].items()}, " ".join(console.file.getvalue().split())


def test_each_pair_is_enumerated_once_in_a_process(tmp_path, monkeypatch):
    pairs = []
    monkeypatch.setattr("tests.labs.CERTIFICATES", {})

    def counted(proposer, *_):
        pairs.append((proposer.name, proposer.drawn))
        return {"certified": None}

    monkeypatch.setattr("spec_lab.tasks.benchmark.in_short", counted)
    for number, drawn in enumerate(["iid", "iid", "without_replacement"]):
        certified(tmp_path / str(number), proposer=draft_model("2", drawn))
    assert pairs == [("draft_model", "iid"), ("none", "deterministic"), ("draft_model", "without_replacement")]


def test_a_pair_that_cannot_be_enumerated_is_not_certified(tmp_path):
    exact, printed = certified(tmp_path, proposer=draft_model("1x1", "gumbel"), verifier=Gumbel())
    assert exact == {"draft_model": None, "baseline": "quick"}
    assert "not certified: draft_model;" in printed and "Gumbel noise cannot be enumerated" in printed


def test_the_manifest_records_the_run_and_hides_secrets(done):
    manifest = json.loads((done[0] / "manifest.json").read_text())
    assert manifest["config"]["tracker"]["api_key"] == "***"
    assert manifest["config"]["max_new_tokens"] == 12
    assert {"seed", "commit", "versions", "weights_sha256", "prompts_sha256", "machine", "threads"} <= set(manifest)


def test_time_inside_and_outside_the_phases_adds_up(done):
    tables = metrics.load(done[0])
    for arm in metrics.arms(tables):
        phases = metrics.phase_seconds(tables.forwards, arm)
        assert min(phases.values()) >= 0
        assert 0 < metrics.overhead(tables.forwards, arm) < 1
        groups = tables.requests[tables.requests["arm"] == arm].groupby("group")["decode_seconds"].max()
        assert metrics.decode_seconds(tables.forwards, arm) == pytest.approx(groups.sum())


def test_an_interrupted_run_is_resumed(done, tmp_path, capsys):
    """Ctrl-C in the second group keeps the first; the same run then decodes only the others."""
    plain, decoded = Loop.decode, []

    class Interrupting(Loop):
        def decode(self, requests):
            decoded.append([request.name for request in requests])
            if limit is not None and len(decoded) > limit:
                raise KeyboardInterrupt
            return plain(self, requests)

    laboratory, out = lab(), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_lab.tasks.lab.Loop", Interrupting)
        limit = 3
        assert run(laboratory, settings(out), CONFIG, quiet()) == 130
        output = capsys.readouterr().err
        assert f"the rows of 1 finished groups of 3 are in {out}" in output
        assert metrics.load(out).requests["group"].unique().tolist() == [0]
        assert not (out / "summary.json").exists()
        limit = None
        decoded.clear()
        assert run(laboratory, settings(out), CONFIG, quiet()) == 0
    assert decoded == [["p2", "p3"], ["p2", "p3"], ["p4"], ["p4"]]
    whole, resumed = (metrics.load(folder).requests.sort_values("id") for folder in (done[0], out))
    assert resumed["id"].tolist() == whole["id"].tolist()
    assert all(map(np.array_equal, resumed["tokens"], whole["tokens"]))


class Shares(Repeat):
    """Remembers requests, and notes what it knows when each of the prompts is admitted."""

    shared_store = "the requests of the run"

    def __init__(self):
        super().__init__()
        self.known, self.seen = [], []

    def init(self, request):
        if request.name.startswith("p"):  # no toy of a certificate
            self.seen.append(list(self.known))
            self.known.append(request.id)

    def forget(self):
        self.known.clear()


def test_what_a_proposer_learned_in_the_warm_up_is_forgotten_and_its_shared_store_is_recorded(tmp_path):
    sharing = Shares()
    options = settings(tmp_path, warmup=4, batch_size=1, baseline=False)
    assert run(lab(texts=("one", "two", "six"), proposer=sharing), options, CONFIG, quiet()) == 0
    assert sharing.seen == [[], [], [0], [0, 1]]
    facts = json.loads((tmp_path / "manifest.json").read_text())["proposers"]
    assert facts["repeat"]["shared_store"] == sharing.shared_store


@pytest.mark.one_in(2)
@pytest.mark.parametrize("warmup", [0, 5])
def test_warm_up_decodes_a_little_with_every_arm_and_leaves_no_rows(tmp_path, monkeypatch, warmup):
    plain, decoded = Loop.decode, []

    def decode(self, requests):
        done = plain(self, requests)
        decoded.append((self.proposer.name, [request.id for request in requests], len(done.outcomes[0].tokens)))
        return done

    monkeypatch.setattr(Loop, "decode", decode)
    assert run(lab(texts=("one", "two")), settings(tmp_path, warmup=warmup), CONFIG, quiet()) == 0
    measured = [("repeat", [0, 1], 12), ("none", [0, 1], 12)]
    warm = [("repeat", [0, 1], 5), ("none", [0, 1], 5)] if warmup else []
    assert decoded == warm + measured
    tables = metrics.load(tmp_path)
    assert len(tables.requests) == 4
    assert tables.steps.groupby(["arm", "request"])["emitted_kept"].sum().tolist() == [12] * 4


def test_a_killed_run_keeps_its_finished_groups(tmp_path, monkeypatch):
    class Killed(BaseException):
        """Not caught, like a kill."""

    class Dying(Loop):
        def decode(self, requests):
            if requests[0].name == "p2":
                raise Killed
            return Loop.decode(self, requests)

    monkeypatch.setattr("spec_lab.tasks.lab.Loop", Dying)
    with pytest.raises(Killed):
        run(lab(), settings(tmp_path), CONFIG, quiet())
    tables = metrics.load(tmp_path)
    assert set(tables.requests["name"]) == {"p0", "p1"}
    assert metrics.tokens_per_second(tables.requests, "repeat") > 0


class Breaks(Repeat):
    """Raises in the second group."""

    broken = True

    def propose(self, batch):
        if self.broken and batch.sequences[0].request.id >= 2:
            raise KeyError("lost")
        return super().propose(batch)


def test_a_proposer_that_raises_is_named_and_the_finished_groups_are_kept(tmp_path):
    proposer, config = Breaks(), {"name": "toy"}
    with pytest.raises(ValueError) as error:
        run(lab(proposer=proposer), settings(tmp_path / "here"), config, quiet())
    message = str(error.value)
    assert message.startswith(f"proposer 'repeat' raised KeyError: 'lost' ({__file__}:") and "in propose)" in message
    assert "the rows of 1 finished groups of 3 are in" in message and "resumes" in message
    proposer.broken = False
    assert run(lab(proposer=proposer), settings(tmp_path / "here"), config, quiet()) == 0
    assert metrics.load(tmp_path / "here").requests["group"].nunique() == 3


def test_another_run_in_the_same_directory_is_refused(done):
    out, _ = done
    with pytest.raises(ValueError, match=r"config\.max_new_tokens: 12 there, 13 here"):
        run(lab(), settings(out), CONFIG | {"max_new_tokens": 13}, quiet())
    with pytest.raises(ValueError, match=r"\(prompts_sha256: "):
        run(lab(texts=("other",)), settings(out), CONFIG, quiet())
    with pytest.raises(ValueError, match=r"\(arms: "):
        run(lab(), settings(out, baseline=False), CONFIG, quiet())


def test_a_finished_run_is_not_decoded_again(done, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.lab.Loop.decode", lambda *_: pytest.fail("decoded again"))
    assert run(lab(), settings(done[0], warmup=4), CONFIG, quiet()) == 0


def test_the_null_proposer_runs_alone(tmp_path):
    console = quiet()
    assert run(lab(proposer=Null()), settings(tmp_path, batch_size=5), CONFIG, console) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["arms"]) == ["baseline"]
    assert summary["tau_pooled"] == 1.0
    assert summary["speedup"] == {"mean": None, "low": None, "high": None}
    assert summary["tokens_per_second"] == summary["baseline_tokens_per_second"] > 0
    assert "no speed-up was measured" in console.file.getvalue()


def test_one_token_a_prompt_is_all_prefill_and_still_leaves_a_run(tmp_path):
    console = quiet()
    assert run(lab(), settings(tmp_path, max_new_tokens=1), CONFIG, console) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0


def test_the_baseline_can_be_left_out(tmp_path):
    assert run(lab(), settings(tmp_path, baseline=False), CONFIG, quiet()) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["arms"]) == ["repeat"]
    assert summary["speedup"]["mean"] is summary["baseline_tokens_per_second"] is None


def test_further_proposers_are_arms_of_their_own(tmp_path):
    assert run(lab(more_proposers={"longer": Repeat(4)}), settings(tmp_path), CONFIG, quiet()) == 0
    tables = metrics.load(tmp_path)
    assert metrics.arms(tables) == ["repeat", "longer", "baseline"]
    assert tables.requests.groupby("arm")["order"].agg(set).tolist() == [{0, 1, 2}] * 3
    assert tables.steps.groupby("arm")["depth"].max().to_dict() == {"repeat": 2, "longer": 4, "baseline": 0}


def test_three_arms_rotate_and_every_second_rotation_runs_backwards(tmp_path):
    parts = lab(texts=TEXTS[:1] + tuple("abcde"), more_proposers={"longer": Repeat(4)})
    assert run(parts, settings(tmp_path, batch_size=1, max_new_tokens=2), CONFIG, quiet()) == 0
    requests = metrics.load(tmp_path).requests.sort_values(["group", "order"])
    orders = requests.groupby("group")["arm"].agg(lambda arms: "".join(arm[0] for arm in arms)).tolist()
    first = orders[0]
    turned = [first[shift:] + first[:shift] for shift in range(3)]
    assert orders == turned + [order[::-1] for order in turned]


def test_every_arm_names_its_own_proposer_and_verifier_and_the_summary_the_main_ones(tmp_path):
    class Other:
        """A peer, which only returns its output."""

        def decode(self, requests):
            return Decoded([], Loop(parts.target, Null(), Match(), CounterDraws(0)).decode(requests).outcomes)

    parts = lab(proposer=Null(), more_proposers={"repeating": Repeat(4)}, peers={"other": Other()})
    console = quiet()
    assert run(parts, settings(tmp_path, batch_size=1, max_new_tokens=4), CONFIG, console) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    names = {name: (arm["proposer"], arm["verifier"], arm["lossless"]) for name, arm in summary["arms"].items()}
    assert names == {
        "repeating": ("repeat", "token", True), "other": (None, None, None), "baseline": ("none", "match", True),
    }  # fmt: skip
    assert (summary["proposer"], summary["verifier"]) == ("repeat", "token")
    assert {peer: list(ratios) for peer, ratios in summary["against"].items()} == {"other": ["repeating", "baseline"]}
    assert summary["against"]["other"]["baseline"]["mean"] > 0
    assert "Speed-up over peers" in " ".join(console.file.getvalue().split())
    assert "proposer repeat, verifier token" in console.file.getvalue()


def test_tokens_do_not_depend_on_the_batch(tmp_path):
    laboratory = lab(temperature=1.0)
    for size in (1, 5):
        run(laboratory, settings(tmp_path / str(size), batch_size=size, baseline=False), CONFIG, quiet())
    alone, together = (metrics.load(tmp_path / size).requests.sort_values("id") for size in ("1", "5"))
    assert all(map(np.array_equal, alone["tokens"], together["tokens"]))


def test_a_request_with_nan_logits_is_named_and_the_others_finish(tmp_path, capsys):
    laboratory = lab()
    poison = 60
    with torch.no_grad():
        laboratory.target.lm.model.get_input_embeddings().weight[poison] = float("nan")
    prompts = [laboratory.prompts[0], replace(laboratory.prompts[1], text="n" + chr(poison))]
    assert run(replace(laboratory, prompts=prompts), settings(tmp_path), CONFIG, quiet()) == 0
    requests = metrics.load(tmp_path).requests
    assert set(requests[requests["name"] == "p1"]["finish"]) == {"nan"}
    assert set(requests[requests["name"] == "p0"]["finish"]) == {"length"}
    assert "request 'p1', step" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "summary.json").read_text())["errors"]) == 2


def test_a_prompt_longer_than_the_context_is_named_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="prompt 'p1' .*300 tokens .*256"):
        run(lab(texts=("x", "y" * 300)), settings(tmp_path / "out"), CONFIG, quiet())
    assert not (tmp_path / "out").exists()


def test_incompatible_parts_are_refused_before_anything_runs(tmp_path):
    picky = SimpleNamespace(name="picky", accepts=frozenset({"iid"}), lossless=True)
    with pytest.raises(ValueError, match="proposer 'repeat' draws 'deterministic'"):
        run(lab(verifier=picky), settings(tmp_path / "out"), CONFIG, quiet())
    with pytest.raises(ValueError, match="'baseline'"):
        run(lab(more_proposers={"baseline": Repeat()}), settings(tmp_path / "out"), CONFIG, quiet())
    with pytest.raises(ValueError, match="batch_size=1, not 2"):
        run(lab(peers={"greedy": None}), settings(tmp_path / "out"), CONFIG, quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1.5}, "batch_size .*from 1.* 1.5"),
        ({"batch_size": 0}, "batch_size "),
        ({"max_new_tokens": "many"}, "max_new_tokens .*from 1.*'many'"),
        ({"warmup": -1}, "warmup .*from 0"),
        ({"seed": None}, "seed "),
        ({"seed": 2**63}, r"seed .* 9223372036854775808"),
        ({"threads": 0}, "threads .*1 or more"),
        ({"baseline": "maybe"}, "baseline "),
        ({"name": ""}, "name "),
    ],
)
def test_wrong_types_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **change)


# The roofline --------------------------------------------------------------------------------------------------------


def test_a_run_measures_the_limits_of_the_machine_and_every_arm_s_share_of_them(done):
    out, printed = done
    manifest, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary"))
    assert manifest["roofline"] == summary["roofline"]
    assert Roofline.of(manifest["roofline"]).work == lab().target.lm.work
    limits = manifest["roofline"]["limits"]
    assert limits["bandwidth"] > 0 and limits["peak"] > 0 and limits["seconds"] < 10
    tables, roofline = metrics.of_timed_groups(metrics.load(out)), Roofline.of(manifest["roofline"])
    for arm, arm_summary in summary["arms"].items():
        expected = metrics.roofline_figures(tables, arm, roofline)
        assert arm_summary["roofline_share"]["mean"] == pytest.approx(expected["roofline_share"]["mean"])
        assert 0 < arm_summary["roofline_share_end_to_end"]["mean"] < arm_summary["roofline_share"]["mean"]
        assert arm_summary["baseline_roofline_share"] == summary["arms"]["baseline"]["roofline_share"]["mean"]
    assert "The baseline is at " in printed and "this machine's" in printed


def test_where_the_runner_does_not_state_its_work_the_share_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(CausalLM, "work", None)
    console = quiet()
    assert run(lab(TEXTS[:2]), settings(tmp_path), CONFIG, console) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["roofline"] is summary["baseline_roofline_share"] is None
    assert "roofline is unknown" in console.file.getvalue()
    (tmp_path / "summary.json").unlink()
    assert run(lab(TEXTS[:2]), settings(tmp_path), CONFIG, quiet()) == 0, "resumed without"


@pytest.mark.parametrize(("new", "drafts"), [(2**15 // 10, True), (2**15 // 10 + 1, False)])
def test_a_small_run_records_its_drafts_by_itself(tmp_path, new, drafts):
    """Five prompts and two arms."""
    auto = settings(tmp_path, record="auto", max_new_tokens=new)
    assert auto.with_record(lab().max_tokens(auto)).recording.drafts is drafts and not auto.recording.drafts
    assert settings(tmp_path, record="none").with_record(0).record == "none"
