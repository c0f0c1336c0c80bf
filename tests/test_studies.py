"""The studies: on tiny models each command runs its sweep, and its figure reads the results."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_method
from omegaconf import OmegaConf
from safetensors.torch import save_file

from experiments import plots, runs
from spec_lab.analysis import metrics
from spec_lab.analysis.figures.palette import PROPOSERS, VERIFIERS
from spec_lab.cli.main import conf, main, zoo
from spec_lab.drafters.draft_model.train import DraftRecipe
from spec_lab.drafters.hydra.train import HydraRecipe
from spec_lab.models.target import Target
from spec_lab.propose.step_costs import StepCosts
from spec_lab.propose.trees import parse
from tests import checkpoints
from tests.drafters.eagle_heads import eagle3, written

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "tests" / "data" / "questions.jsonl"
SHORT = ["target.dtype=float32", "max_new_tokens=6", "warmup=0", "threads=1"]

STUDIES = {
    "verifier_vs_temperature": (["verifier=token,typical", "sampling.temperature=0.3,1"], 2 * 2 * 2),
    "tree_shapes": (["arms.calibrated.max_nodes=2", "prompts=code"], 12),
    "draft_length": (["prompts=code", "arms.chain.depth=1,4"], 2 * 3),
    "batch_size": (["batch_size=2,4", "arms.medusa.max_nodes=2"], 2 * 3),
    "proposers": (["prompts=code", "proposer.max_nodes=2"], 2 * 5),
    "spec_bench": ([f"prompts.path={QUESTIONS}", "proposer.max_nodes=2"], 5),
}
"""Overrides that keep its command small, and the number of rows of its results."""
SHORT_RUN = ("verifier_vs_temperature", "batch_size")

SHOWN = dict.fromkeys(STUDIES, "speedup") | {"batch_size": "block_speedup"}
"""The beginning of its table."""

PAIRED = {
    "verifier_vs_temperature": ("expected_tau_beyond_token", "tau_beyond_token", "speed_over_token"),
    "tree_shapes": ("tau_beyond_grown", "speed_over_grown"),
    "draft_length": ("tau_beyond_depth_4", "speed_over_depth_4", "speed_over_chain"),
    "batch_size": ("block_speedup_over_smallest", "tau_beyond_smallest"),
    "proposers": ("tau_beyond_draft_chain", "speed_over_draft_chain", "speed_over_best_other"),
    "spec_bench": ("speed_over_draft_chain",),
}
"""The comparison of A with B."""

EXPERIMENT = {name: name for name in STUDIES} | {"proposers": "proposers_by_workload"}


@pytest.mark.parametrize("name", ["draft_length", "verifier_vs_temperature"])
def test_a_figure_is_redrawn_from_the_results_without_the_runs(name, tmp_path, capsys):
    kept = ROOT / "experiments" / name / "results.csv"
    shutil.copy(kept, tmp_path)
    table = importlib.import_module(f"experiments.{name}.figure").main(["--redraw", "--folder", str(tmp_path)])
    assert len(table) > 1 and not capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert {one.name for one in tmp_path.iterdir()} == {"results.csv", f"{name}.png"}
    assert (tmp_path / "results.csv").read_bytes() == kept.read_bytes()


def test_proposers_and_verifiers_have_their_colours_and_other_lines_those_of_none():
    found = plots.colours(["chain", "token", "static", "best first"])
    assert found["chain"] == PROPOSERS["draft_chain"] and found["token"] == VERIFIERS["token"]
    others = {found["static"], found["best first"]}
    assert len({*found.values()}) == 4 and not others & {*PROPOSERS.values()}


@pytest.fixture(scope="module", autouse=True)
def tiny_zoo(tmp_path_factory):
    """Tiny models in the bundled models' place, with the four heads that published trees need; calibrated at once."""
    folder = checkpoints.zoo(tmp_path_factory.mktemp("zoo"))
    save_file({"weight": torch.randn(4, 1, 32, 32), "bias": torch.zeros(4, 1, 32)}, folder / "medusa/model.safetensors")
    for file, changes in (("config", {"num_heads": 4}), ("calibration", {"accuracy": [[0.5, 0.2, 0.1]] * 4})):
        path = folder / "medusa" / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    OmegaConf.register_new_resolver("zoo", lambda name: str(folder / name), replace=True)
    with pytest.MonkeyPatch.context() as patch:
        costs = StepCosts({0: 1.0, 1: 1.1, 2: 1.2}, dict.fromkeys(range(3), 0.0), 10)
        patch.setattr("spec_lab.propose.calibrate.time_steps", lambda *given: costs)
        patch.setattr("spec_lab.tasks.benchmark.in_short", lambda *given: {"certified": None})
        yield folder
    OmegaConf.register_new_resolver("zoo", zoo, replace=True)


def command(monkeypatch, *arguments):
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["spec-lab", *arguments])
    try:
        main()
    except SystemExit as left:
        return left.code or 0
    return 0


def figure_of(name):
    return importlib.import_module(f"experiments.{name}.figure")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT_RUN else [pytest.mark.nightly]) for name in STUDIES]
)
def test_a_study_sweeps_draws_and_writes_its_table(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    small, rows = STUDIES[name]
    limit = [] if name in ("batch_size", "spec_bench") else ["prompts.limit=2"]
    assert command(monkeypatch, f"+experiment={EXPERIMENT[name]}", *SHORT, *small, *limit, "output_dir=here") == 0, (
        capfd.readouterr().err
    )
    shutil.copy(ROOT / "experiments" / name / "README.md", tmp_path)
    table = figure_of(name).main(["here", "--folder", str(tmp_path)])
    assert list(pd.read_csv(tmp_path / "results.csv").columns) == list(table.columns)
    assert len(table) == (rows if name != "spec_bench" else rows * table["task"].nunique())
    assert (table["tau_pooled"] >= 1).all() and (table["speedup"].dropna() > 0).all() and table["speedup"].notna().any()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    shown = text.partition("<!-- results -->")[2].partition("<!-- end of results -->")[0]
    assert plots.shown(dict(table[table["speedup"].notna()].iloc[0]), SHOWN[name]) in shown
    assert "The baseline is at " in shown, "of the roofline"
    for column in PAIRED[name]:
        row = dict(table[table[column].notna()].iloc[0])
        assert {f"{column}_low", f"{column}_high"} <= row.keys()
        assert column.startswith(("tau", "speed_over_best")) or plots.shown(row, column) in shown


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_names_its_command_and_is_a_small_delta(name):
    text = (ROOT / "experiments" / name / "README.md").read_text()
    assert f"python -m spec_lab +experiment={EXPERIMENT[name]}" in text
    assert f"python -m experiments.{name}.figure" in text
    config = Path(conf(), "experiment", f"{EXPERIMENT[name]}.yaml")
    assert len(config.read_text().splitlines()) <= 15
    assert OmegaConf.load(config).name == EXPERIMENT[name]


@pytest.mark.nightly
def test_at_temperature_0_verifiers_are_swept_on_trees_of_the_likeliest_tokens(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    at_0 = ["sampling.temperature=0", "arms.tree.drawn=point", "verifier=token,traversal"]
    assert (
        command(monkeypatch, "+experiment=verifier_vs_temperature", *SHORT, *at_0, "prompts.limit=2", "output_dir=here")
        == 0
    )
    table = plots.swept(tmp_path / "here")
    assert set(table["temperature"]) == {0} and len(table) == 4
    assert (
        table.groupby("arm")["tau_pooled"].nunique() == 1
    ).all()  # one-hot distributions: all verifiers accept the same


def test_the_published_trees_of_the_study_have_as_many_nodes_as_the_grown_one():
    with initialize_config_dir(conf(), version_base=None):
        arms = compose("config", overrides=["+experiment=tree_shapes"]).arms
    published = {name: one.tree for name, one in arms.items() if one.tree not in ("calibrated", "likeliest")}
    assert [len(parse(tree)) for tree in published.values()] == [63] * 9
    assert {name: one.max_nodes for name, one in arms.items() if one.tree == "likeliest"} == {
        "grown_63": 63, "grown_25": 25,
    }  # fmt: skip


def test_all_proposers_by_workload_are_those_of_one_run():
    with initialize_config_dir(conf(), version_base=None):
        one, many = (
            compose("config", overrides=[f"+experiment={name}"]) for name in ("proposers", "proposers_by_workload")
        )
    assert one.arms == many.arms and one.proposer == many.proposer
    assert not any("experiment" in str(line) or line == "proposers" for line in defaults("proposers_by_workload"))


def defaults(experiment):
    """Its defaults list."""
    return OmegaConf.load(Path(conf(), "experiment", f"{experiment}.yaml")).defaults


# The same on several engines --------------------------------------------------------------------------------------


@pytest.fixture
def engines():
    return importlib.import_module("experiments.engines.measure")


@pytest.mark.nightly
def test_trained_drafters_are_compared_by_position(tiny_zoo, tmp_path, monkeypatch, capfd):
    measure = importlib.import_module("experiments.drafters.measure")

    def run(arguments, check):
        assert check and command(monkeypatch, *arguments[3:]) == 0, capfd.readouterr().err

    target = Target.load(str(tiny_zoo / "target"), dtype="float32")
    for name, recipe in {
        "hydra": HydraRecipe(heads=2),
        "draft": DraftRecipe(hidden_size=16, layers=1, heads=2),
    }.items():
        folder = tmp_path / "drafters" / name
        recipe.write(recipe.begin(target, [], 0).module, target, folder, {})
        (folder / "training" / "0").mkdir(parents=True)
        line = {"texts": 8, "seconds": 90.0, "step": 1}
        (folder / "training" / "0" / "learning.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    short = "--limit 2 --new 8 --depth 2 --threads 1 --texts code --drafters drafters --out here"
    measure.main(short.split())
    shutil.copy(ROOT / "experiments" / "drafters" / "README.md", tmp_path)
    table = figure_of("drafters").main(["here", "--folder", str(tmp_path)])
    assert len(table) == 2 * 2 * 2  # temperatures, drafters, positions
    assert table["accepted"].dropna().between(0, 1).all() and (table["seconds"] == 90).all()
    assert table["step_cost"].to_numpy() == pytest.approx((table["tau_pooled"] / table["speedup"]).to_numpy())
    assert (tmp_path / "drafters.png").read_bytes().startswith(b"\x89PNG")
    assert "| Hydra | 0.01 M | 8 | 2 min |" in (tmp_path / "README.md").read_text()


@pytest.mark.nightly
def test_accepted_length_is_measured_and_estimated_by_tokens_of_training(tiny_zoo, tmp_path, monkeypatch, capfd):
    measure = importlib.import_module("experiments.training_length.measure")

    def run(arguments, check):
        assert check and command(monkeypatch, *arguments[3:], "target.dtype=float32") == 0, capfd.readouterr().err

    for number, name in enumerate(("0.25", "0.0625")):
        folder = tmp_path / "heads" / name
        written(folder, *eagle3(32, 61, seed=number))
        (folder / "training" / "0").mkdir(parents=True)
        line = {"texts": int(64 * float(name)), "seconds": 600 * float(name), "step": 1}
        (folder / "training" / "0" / "learning.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(measure, "ZOO", tiny_zoo)
    monkeypatch.chdir(tmp_path)
    measure.main("--limit 2 --new 8 --threads 1 --heads heads --out here".split())
    shutil.copy(ROOT / "experiments" / "training_length" / "README.md", tmp_path)
    table = figure_of("training_length").main(["here", "--folder", str(tmp_path)])
    assert table["tokens_learned"].tolist() == [4 * 256, 16 * 256] * 2
    assert (table["accepted_length"] - table["tau_pooled_raw"]).to_numpy() == pytest.approx(-1)
    assert (table["estimated_length"] >= 0).all() and table["estimated_length"].max() > 0
    assert (tmp_path / "training_length.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "README.md").read_text().count(" min | ") == 2


@pytest.mark.nightly
def test_trees_of_equal_size_are_compared(tiny_zoo, tmp_path, monkeypatch, capfd):
    measure = importlib.import_module("experiments.eagle_trees.measure")

    def run(arguments, check):
        assert check and command(monkeypatch, *arguments[3:], "target.dtype=float32") == 0, capfd.readouterr().err

    head = written(tmp_path / "head", *eagle3(32, 61))
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    measure.main(f"--limit 2 --new 8 --threads 1 --nodes 4 8 --out here --head {head}".split())
    shutil.copy(ROOT / "experiments" / "eagle_trees" / "README.md", tmp_path)
    table = figure_of("eagle_trees").main(["here", "--folder", str(tmp_path)])
    assert len(table) == 2 * 2 * 2 * len(figure_of("eagle_trees").ARMS)  # temperatures, verifiers, sizes
    assert (table["nodes_per_step"] <= table["nodes"]).all()
    assert (table.loc[table["arm"] == "eagle2", "speed_over_eagle2"].isna()).all()
    assert (tmp_path / "eagle_trees.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    assert text.count("| 1 | traversal |") == 6 + 5 and "| 0 | all | chain |" in text


@pytest.mark.parametrize("nodes", [4, 8, 16, 32, 64])
def test_static_trees_have_the_size_that_they_are_compared_at(nodes):
    measure = importlib.import_module("experiments.eagle_trees.measure")
    assert len(parse(measure.STATIC[nodes])) == nodes


@pytest.mark.nightly
def test_engines_are_measured_and_its_tables_state_what_a_step_may_cost(engines, tmp_path, monkeypatch, capfd):
    def run(arguments, check):
        assert check and command(monkeypatch, *arguments[3:]) == 0, capfd.readouterr().err

    monkeypatch.setattr(engines, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    short = "--limit 2 --new 6 --threads 1 --texts code --nodes 0 2 --batches 1 --context 8 --repeats 1"
    engines.main([*short.split(), "--out", "here", "--engines", "transformers-float32"])
    shutil.copy(ROOT / "experiments" / "engines" / "README.md", tmp_path)
    table = figure_of("engines").main(["here", "--folder", str(tmp_path)])
    assert list(pd.read_csv(tmp_path / "results.csv").columns) == list(table.columns)
    assert (tmp_path / "engines.png").read_bytes().startswith(b"\x89PNG")
    nodes = table[table["part"] == "cost"]
    assert nodes["nodes"].tolist() == [0, 2] and nodes["over_no_nodes"].iloc[0] == 1
    ours = table[table["arm"].isin(figure_of("engines").OURS)]
    assert len(ours) == 5 + len(engines.SIZES)
    assert (
        ours["tau_pooled"] / (ours["step_over_baseline"] + ours["draft_over_baseline"])
    ).to_numpy() == pytest.approx(ours["speedup"].to_numpy(), rel=0.1)
    assert (ours["highest_step"] + ours["draft_over_baseline"]).to_numpy() == pytest.approx(ours["tau_pooled"])
    slow = ours[
        ~(ours["speedup_low"] > 1) & (ours["nodes_per_step"] > 0) & ours["arm"].isin(figure_of("engines").NEEDED)
    ]
    shown = (tmp_path / "README.md").read_text().partition("### Break-even")[2].partition("<!-- end")[0]
    assert shown.count("\n| transformers, float32 |") == len(slow)
    for row in slow.to_dict("records"):
        assert f"{plots.shown(row)} | {row['tau_pooled']:.2f} |" in shown


def test_every_engine_has_the_same_proposers_and_llama_cpp_its_own_decoding_too(engines, tmp_path):
    chosen = SimpleNamespace(out=tmp_path, threads=1, limit=1, new=4, texts=["code"])
    arms, peers = {}, {}
    for engine in engines.ENGINES:
        with initialize_config_dir(conf(), version_base=None):
            found = compose("config", overrides=engines.options("proposers", engine, chosen))
        arms[engine] = {name: {**one, "path": ""} for name, one in found.arms.items()}
        peers[engine] = set(found.peers)
        for peer in found.peers.values():
            get_method(peer._target_)
        if own := engines.files(engine, tmp_path / "files"):
            assert found.target.path == str(own["target"])
            assert {found.arms[name].path for name in engines.DRAFTING} == {str(own["draft"])}
    assert (
        len({json.dumps(OmegaConf.to_container(OmegaConf.create(one)), sort_keys=True) for one in arms.values()}) == 1
    )
    for engine, found in peers.items():
        own = {"generate", *engines.OWN} if engine.startswith(engines.LLAMA) else set()
        assert found == {"loop"} | own


# Inputs of figures -------------------------------------------------------------------------------------------------


def rows(arm, tokens, seconds, prompts_a_group=1):
    """Requests of an arm: their tokens, and the seconds of the groups that they were decoded in."""
    number = np.arange(len(tokens))
    group = number // prompts_a_group
    return pd.DataFrame({
        "arm": arm, "request": number, "group": group, "sequence": 0, "finish": "length", "prefill_tokens": 1,
        "prompt": [f"prompt {one}" for one in number], "decode_tokens": tokens, "prefill_seconds": 0.1,
        "decode_seconds": pd.Series(seconds).groupby(group).sum()[group].to_numpy(),
    })  # fmt: skip


def test_the_speed_up_of_a_block_does_not_depend_on_how_its_prompts_were_put_together():
    random = np.random.default_rng(0)
    tokens, plain = np.full(64, 32), np.full(64, 1.0)
    seconds = plain / random.choice(
        [0.8, 1.5, 8.0], 64
    )  # a few prompts repeat themselves, and prompt lookup makes them very fast
    every = {
        size: pd.concat([rows("ngram", tokens, seconds, size), rows("baseline", tokens, plain, size)])
        for size in (1, 2, 4, 8, 16)
    }
    of_blocks = [figure_of("batch_size").block_speedups(one, "ngram").tolist() for one in every.values()]
    expected = [16 / seconds[start : start + 16].sum() for start in range(0, 64, 16)]
    for found in of_blocks:
        assert found == pytest.approx(expected)
    of_groups = [metrics.walltime_speedup_paired(one, "ngram").mean() for one in every.values()]
    assert of_groups[0] > 1.3 * of_groups[-1]  # the same rows, and a "gain that falls with the batch"


def test_blocks_that_would_hold_other_prompts_are_refused_and_a_short_last_one_is_left_out():
    block_speedups = figure_of("batch_size").block_speedups
    ones = np.ones(20)
    both = [pd.concat([rows("ngram", ones, ones, size), rows("baseline", ones, ones, size)]) for size in (1, 5)]
    assert block_speedups(both[0], "ngram").index.tolist() == [0]
    with pytest.raises(ValueError, match="blocks of 16 prompts"):
        block_speedups(both[1], "ngram")
    with pytest.raises(ValueError, match=r"groups \[3\]"):
        block_speedups(both[0].assign(finish=np.where(both[0]["request"] == 3, "nan", "length")), "ngram")


def steps_of(arm, emitted):
    """Decode steps of an arm: for each prompt the tokens of each of its steps."""
    usual = {"arm": arm, "prefill": False, "finish": "", "nodes": 4, "forced": 0, "accepted": 0, "forced_accepted": 0}
    return pd.DataFrame([
        usual | {"request": number, "group": number, "emitted_kept": one, "emitted": one, "expected_emitted": one + 0.5}
        | {"forced_emitted": 0, "forced_emitted_kept": 0}
        for number, own in enumerate(emitted) for one in own
    ])  # fmt: skip


def run_of(arm, emitted, seconds):
    """A run of an arm and a baseline of one second per prompt."""
    tokens = [sum(own) for own in emitted]
    requests = pd.concat([rows(arm, tokens, seconds), rows("baseline", tokens, np.ones(len(tokens)))])
    return metrics.Tables(pd.DataFrame(), steps_of(arm, emitted), requests)


def test_arms_of_two_runs_are_paired_prompt_by_prompt():
    easy_and_hard = [[1, 1, 1, 1], [2, 2], [4], [8]]
    one = run_of("a", easy_and_hard, [0.5, 0.25, 0.125, 0.1])
    other = run_of("a", [[each + 1 for each in own] for own in easy_and_hard], [0.25, 0.125, 0.0625, 0.05])
    better = plots.tau_beyond((other, "a"), (one, "a"))
    assert better == pytest.approx((1, 1, 1))  # taus of prompts are 1 to 8, yet every one has one more
    assert plots.tau_beyond((one, "a"), (other, "a"), "expected_tau").mean == pytest.approx(-1)
    assert plots.speedup_over((other, "a"), (one, "a")) == pytest.approx((2, 2, 2))
    both = pd.concat([one.requests, other.requests.query("arm == 'a'").assign(arm="b", decode_tokens=8)])
    assert plots.speed_over(both, "a", "b").mean == pytest.approx(np.prod([4, 4, 4, 8]) ** 0.25 / 8 / 2)


def test_seconds_of_a_training_leave_its_pauses_out(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    (tmp_path / "training" / "0").mkdir(parents=True)
    times = {10: 30.0, 20: 50.0, 40: 1000.0, 50: 1020.0}  # slow at first, and paused between steps 20 and 40
    lines = [json.dumps({"step": step, "seconds": seconds, "tokens": 7 * step}) for step, seconds in times.items()]
    (tmp_path / "training" / "0" / "learning.jsonl").write_text("\n".join(lines[:1]))
    assert runs.trained(tmp_path)["seconds"] == 30
    (tmp_path / "training" / "0" / "learning.jsonl").write_text("\n".join(lines))
    found = runs.trained(tmp_path)
    assert (found["parameters"], found["tokens"], found["seconds"]) == (11, 350, 100)


def test_the_fastest_of_a_run_is_ahead_of_the_next(tmp_path, monkeypatch):
    seconds = {"speculative": [0.5, 0.5, 0.5], "draft_chain": [0.8, 1.0, 0.8], "ngram_chain": [0.05, 2.0, 2.0]}
    every = [rows(arm, [8, 8, 8], own) for arm, own in seconds.items()] + [rows("baseline", [8, 8, 8], [1.0] * 3)]
    steps = pd.concat([steps_of(arm, [[4, 4]] * 3) for arm in seconds])
    monkeypatch.setattr(metrics, "load", lambda run: metrics.Tables(pd.DataFrame(), steps, pd.concat(every)))
    table = pd.DataFrame({"arm": ["medusa", "draft_chain", "ngram_chain"], "recorded": list(seconds)})
    found = {row["arm"]: row for row in figure_of("proposers").versus_others(tmp_path, table)}
    assert [found[arm]["best_other"] for arm in found] == ["ngram_chain", "medusa", "medusa"]
    assert found["medusa"]["speed_over_best_other"] == pytest.approx((0.05 * 2 * 2) ** (1 / 3) / 0.5)
    assert found["medusa"]["speed_over_draft_chain"] == pytest.approx((0.8 * 1.0 * 0.8) ** (1 / 3) / 0.5)
    assert "speed_over_draft_chain" not in found["draft_chain"]


def test_an_invalid_pair_is_refused():
    one, other = (run_of("a", emitted, [1.0] * len(emitted)) for emitted in ([[1], [2]], [[1], [2], [3]]))
    for paired in (plots.tau_beyond, plots.speedup_over):
        with pytest.raises(ValueError, match="different prompts"):
            paired((one, "a"), (other, "a"))
    together = replace(one, requests=one.requests.assign(group=0))
    with pytest.raises(ValueError, match="batch_size"):
        plots.speedup_over((one, "a"), (together, "a"))


def test_a_missing_reference_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "load", lambda folder: None)
    table = pd.DataFrame(
        [{"run": "r", "arm": "chain", "recorded": "chain", "verifier_name": "match", "temperature": 1}]
    )
    with pytest.raises(ValueError, match="'verifier_name': 'token'"):
        plots.versus(tmp_path, table, ("temperature", "verifier_name"), {"verifier_name": "token"}, "token")


def test_spec_bench_refuses_groups_of_several_prompts_and_categories_it_does_not_know():
    check = figure_of("spec_bench").check
    requests = pd.DataFrame({"group": [0, 0, 1], "request": [0, 0, 1], "workload": ["qa", "qa", "humanities"]})
    check(requests)
    with pytest.raises(ValueError, match="group 0 .*2 prompts.*batch_size=1"):
        check(requests.assign(group=0))
    with pytest.raises(ValueError, match=r"\['trivia'\].*translation, "):
        check(requests.assign(workload=["qa", "qa", "trivia"]))
    with pytest.raises(ValueError, match="no finished prompt"):
        check(requests.iloc[:0])


def test_spec_bench_s_categories_are_six_tasks():
    study = figure_of("spec_bench")
    assert len(study.MT_BENCH) == 8 and len(study.TASK) == 13
    assert set(study.TASK.values()) == set(study.TASKS) - {"all"}


def test_spec_bench_reports_how_many_prompts_were_decoded():
    decoded = figure_of("spec_bench").decoded
    table = pd.DataFrame({"task": ["qa", "qa", "rag"], "prompts": [80, 80, 80], "decoded": [77, 78, 80]})
    assert decoded(table, "qa") == "77-78 of 80" and decoded(table, "rag") == "80 of 80"


def test_every_part_of_a_readme_has_marks_of_its_own(tmp_path):
    (tmp_path / "README.md").write_text(
        "<!-- cost -->\nold\n<!-- end of cost -->\n<!-- results -->\n<!-- end of results -->"
    )
    plots.fill(tmp_path / "README.md", "new", "cost")
    assert (
        (tmp_path / "README.md").read_text().startswith("<!-- cost -->\nnew\n<!-- end of cost -->\n<!-- results -->\n<")
    )


def test_figures_refuse_runs_that_do_not_belong_together(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        plots.swept(tmp_path / "none")
    with pytest.raises(ValueError, match="2 runs .*{'arm': 'a'}"):
        plots.row_where(pd.DataFrame({"arm": ["a", "a"]}), arm="a")
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="<!-- results -->"):
        plots.fill(tmp_path / "README.md", "table")


def test_a_study_states_the_baseline_s_share_of_the_roofline_over_all_its_runs(tmp_path):
    assert plots.baseline_share(tmp_path) == plots.NO_SHARE
    for number, (share, memory) in enumerate([(0.152, 1.0), (0.118, 0.9), (None, None)]):
        (tmp_path / str(number)).mkdir()
        baseline = {"memory_bound_steps": memory}
        summary = {"baseline_roofline_share": share, "arms": {"baseline": baseline}}
        (tmp_path / str(number) / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text('{"arms": {}}')
    assert plots.baseline_share(tmp_path) == "The baseline is at 12 to 15 % of its machine's memory roofline."
    assert "at 15 % of its machine's memory" in plots.baseline_share(tmp_path / "0")
