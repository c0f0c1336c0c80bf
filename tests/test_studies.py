"""The studies: each command runs on tiny models with tiny settings, and its figure and tables read what it wrote."""

import importlib
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import save_file

from experiments import plots, runs
from experiments.exactness.published import on_chains, on_toys
from experiments.projection import measured, published
from experiments.proposers import lookup
from scripts.zoo import repetitive, workloads
from spec_lab.analysis import figures, metrics
from spec_lab.cli.main import conf, main, zoo
from spec_lab.drafters.draft_model.train import DraftRecipe
from spec_lab.drafters.hydra.train import HydraRecipe
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.step_costs import StepCosts
from spec_lab.text.conversations import chat
from spec_lab.text.prompts import jsonl
from tests import checkpoints
from tests.drafters.eagle_heads import eagle3, written
from tests.propose.lab import decode, draft_model, requests
from tests.tiny import tiny_target

ROOT = Path(__file__).parents[1]
SHORT = ["target.dtype=float32", "max_new_tokens=6", "warmup=0", "threads=1"]

SWEEPS = {
    "verifier_vs_temperature": (["verifier=token,typical", "sampling.temperature=0.3,1"], 2 * 2 * 2),
    "tree_shapes": (["arms.calibrated.max_nodes=2", "prompts=code"], 12),
    "draft_length": (["prompts=code", "arms.chain.depth=1,4"], 2 * 3),
    "batch_size": (["batch_size=2,4", "arms.medusa.max_nodes=2"], 2 * 3),
    "proposers": (["prompts=code", "proposer.max_nodes=2"], 2 * 5),
}
"""Studies that are an experiment: overrides that keep it small, and the number of rows of its results."""

COMMANDS = {
    "proposers.training_free": ("--texts code --store store --limit 2 --new 8", 2 * 11),  # temperatures, arms
    "proposers.hybrids": ("--texts code --limit 2 --new 8", 2 * 12),
    "proposers.workloads": ("--texts code --arms ngram medusa union --limit 2 --new 8", 2 * 3),
    "policies": ("--texts code --sizes 1 2 --limit 2 --new 8", 2 * 3 * 16),  # temperatures, workloads, arms
    "drafters": ("--texts code --drafters trained --depth 2 --limit 2 --new 8", 2 * 2 * 2),  # ..., positions
    "drafters.length": ("--heads heads --limit 2 --new 8", 2 * 2),
    "tree_shapes.eagle": ("--nodes 4 8 --head heads/0.25 --limit 2 --new 8", None),
    "engines": (
        "--texts code --nodes 0 2 --batches 1 --context 8 --repeats 1 --engines transformers-float32 --limit 2 --new 6",
        None,
    ),
}
"""Studies with a command: its options, and the number of rows of its results where it is always the same."""

PARTS = {
    "tree_shapes.eagle": "eagle_trees",
    "drafters.length": "training_length",
    **{f"proposers.{part}": part for part in ("training_free", "hybrids", "workloads")},
}
"""Names of the files of a study's second question."""

EXPERIMENT = {name: name for name in SWEEPS} | {"proposers": "proposers_by_workload"}


def study(name, part="measure"):
    return importlib.import_module(f"experiments.{name}.{part}")


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
        patch.setattr(runs, "ZOO", folder)
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


def drawn(name, folder):
    """The table of a study whose results are in ``here``, after its figure and the table of its page are written."""
    study_name, _, part = name.partition(".")
    page, published_page = folder / "README.md", (ROOT / "experiments" / study_name / "README.md").read_text()
    page.write_text(re.sub(r"^\|.*\n", "", published_page, flags=re.MULTILINE))
    table = study(study_name, f"{part}_figure" if part else "figure").main(["here", "--folder", str(folder)])
    assert list(pd.read_csv(folder / f"{PARTS.get(name, 'results')}.csv").columns) == list(table.columns)
    assert (table["tau_pooled"].dropna() >= 1).all() and (table["speedup"].dropna() > 0).all()
    assert (folder / f"{PARTS.get(name, name)}.png").read_bytes().startswith(b"\x89PNG")
    begin = f"<!-- {PARTS.get(name, 'results')} -->"
    assert re.search(rf"{begin}\n\|.*\n<!-- end of ", page.read_text(), re.DOTALL), "the table of the page is written"
    return table


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "batch_size" else [pytest.mark.nightly]) for name in SWEEPS]
)
def test_an_experiment_is_swept_and_drawn(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    small, rows = SWEEPS[name]
    limit = [] if name == "batch_size" else ["prompts.limit=2"]
    given = (f"+experiment={EXPERIMENT[name]}", *SHORT, *small, *limit, "output_dir=here")
    assert command(monkeypatch, *given) == 0, capfd.readouterr().err
    assert len(drawn(name, tmp_path)) == rows


def trained(folder, number, write, texts):
    """A drafter that ``write`` writes, and the log of its training."""
    write(folder)
    (folder / "training" / "0").mkdir(parents=True)
    line = {"texts": texts, "seconds": 90.0 * (number + 1), "step": 1}
    (folder / "training" / "0" / "learning.jsonl").write_text(json.dumps(line) + "\n")


def drafters(tiny_zoo):
    """Files that the commands read: trained drafters, EAGLE heads after two lengths of training, a corpus."""
    target = Target.load(str(tiny_zoo / "target"), dtype="float32")
    recipes = {"hydra": HydraRecipe(heads=2), "draft": DraftRecipe(hidden_size=16, layers=1, heads=2)}
    for name, recipe in recipes.items():
        module = recipe.begin(target, [], 0).module
        trained(Path("trained", name), 0, lambda folder, r=recipe, m=module: r.write(m, target, folder, {}), 8)
    for number, name in enumerate(("0.25", "0.0625")):
        seeded = eagle3(32, 61, seed=number)
        trained(Path("heads", name), number, lambda folder, head=seeded: written(folder, *head), int(64 * float(name)))
    lines = (tiny_zoo / "prompts" / "code.jsonl").read_text().splitlines()
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": json.loads(line)["prompt"]}) + "\n" for line in lines))


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_a_study_measures_and_draws(name, tiny_zoo, tmp_path, monkeypatch, capfd):
    def run(arguments, check):
        more = [] if name == "engines" else ["target.dtype=float32"]
        assert check and command(monkeypatch, *arguments[3:], *more) == 0, capfd.readouterr().err

    study_name, _, part = name.partition(".")
    measure, (options, rows) = study(study_name, part or "measure"), COMMANDS[name]
    monkeypatch.setenv("SPEC_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    drafters(tiny_zoo)
    for module in (runs, measure):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run), raising=False)
    monkeypatch.setattr(measure, "ZOO", tiny_zoo, raising=False)
    if name == "proposers.training_free":  # a search finds nothing to skip in a model of two layers
        monkeypatch.setitem(measure.ARMS, "skip", ("skip", {"skipped": "attn 1"}))
        assert command(monkeypatch, "index", "corpus.jsonl", "store", "--tokenizer", str(tiny_zoo / "target")) == 0
    measure.main(f"{options} --threads 1 --out here".split())
    table = drawn(name, tmp_path)
    assert rows in (None, len(table))


@pytest.mark.parametrize("name", ["draft_length", "verifier_vs_temperature"])
def test_a_figure_is_redrawn_from_the_results_without_the_runs(name, tmp_path):
    kept = ROOT / "experiments" / name / "results.csv"
    shutil.copy(kept, tmp_path)
    assert len(study(name, "figure").main(["--redraw", "--folder", str(tmp_path)])) > 1
    assert {file.name for file in tmp_path.iterdir()} == {"results.csv", f"{name}.png"}
    assert (tmp_path / "results.csv").read_bytes() == kept.read_bytes()


def test_the_title_of_the_policies_names_those_that_are_faster():
    claim, table = study("policies", "figure").claim, pd.read_csv(ROOT / "experiments" / "policies" / "results.csv")
    assert claim(table) == "No policy is shown to be faster than the best fixed depth on any of 7 workloads"
    table.loc[table["arm"] == "svip", "speed_over_best_fixed_low"] = 1.1
    assert claim(table) == "Faster than the best fixed depth in 7 of 70 comparisons: SVIP"


@pytest.mark.parametrize("name", SWEEPS)
def test_a_study_names_its_command_and_is_a_small_delta(name):
    text = (ROOT / "experiments" / name / "README.md").read_text()
    assert f"python -m spec_lab +experiment={EXPERIMENT[name]}" in text
    assert f"python -m experiments.{name}.figure" in text
    config = Path(conf(), "experiment", f"{EXPERIMENT[name]}.yaml")
    assert len(config.read_text().splitlines()) <= 15
    assert OmegaConf.load(config).name == EXPERIMENT[name]


def test_every_engine_has_the_same_proposers(tmp_path):
    engines, arms = study("engines"), set()
    chosen = SimpleNamespace(out=tmp_path, threads=1, limit=1, new=4, texts=["code"])
    for engine in engines.ENGINES:
        with initialize_config_dir(conf(), version_base=None):
            config = compose("config", overrides=engines.options("proposers", engine, chosen))
        of_engine = {name: {**arm, "path": ""} for name, arm in config.arms.items()}
        arms.add(json.dumps(OmegaConf.to_container(OmegaConf.create(of_engine)), sort_keys=True))
    assert len(arms) == 1


# Studies that measure without the command line


@pytest.mark.nightly
def test_gpu_times_both_ways_of_running_a_step_on_the_same_model(tmp_path, monkeypatch):
    """On the CPU, where nothing is captured."""
    given = "--device cpu --shapes tiny --dtype float32 --batches 1 2 --contexts 20 --nodes 0 5 --steps 8 --repeats 2"
    monkeypatch.setattr("sys.argv", ["measure.py", *given.split(), "--out", str(tmp_path)])
    study("gpu").main()
    results = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "forward.png").stat().st_size and not results["left_out"]
    decoding, forwards = pd.DataFrame(results["decoding"]), pd.DataFrame(results["forwards"])
    assert len(decoding) == 4 and (decoding["tokens_per_second"] > 0).all() and decoding["overhead"].between(0, 1).all()
    assert len(forwards) == 8 and (forwards["seconds"] > 0).all() and set(forwards["nodes"]) == {0, 5}


def test_host_work_is_the_time_of_a_step_outside_module_calls():
    host = study("overhead", "host")
    target, proposer = tiny_target(), draft_model("1x1")
    table = host.measure(target, {"baseline": Null(), "chain": proposer}, [(1, 2, 3), (4, 5)], 6)
    assert list(table.index) == ["baseline", "chain"] and (table > 0).all().all()
    _, steps = decode(target, proposer, requests(new=6))
    for info, following in pairwise(steps):
        host_seconds, seconds = host.host_seconds(info, following), info.seconds()
        outside = seconds["whole"] - seconds["target_forward"] - seconds["propose_forward"]
        assert host_seconds["whole"] == pytest.approx(outside + following.began - info.ended, abs=1e-4)


@pytest.mark.nightly
def test_long_context_measures_every_way_at_every_length(monkeypatch):
    module = study("overhead", "context")
    monkeypatch.setattr(module, "LENGTHS", (20, 700))
    ways = ("autoregressive", f"tree of {module.TREE.nodes}", "n-grams, 4", "draft model, 4")
    options = dict(layers=1, hidden=64, vocabulary=61, dtype="float32", steps=4, longest=700, cpu=True, ways=ways)
    frame = module.measure(SimpleNamespace(**options))
    assert list(frame["way"]) == [*ways, *ways] and (frame[["step", "forward"]] > 0).all(axis=None)


@pytest.mark.parametrize(("kind", "words", "right"), [("quiet", "rrd", 2), ("loaded", "rdn", 2)])
def test_the_study_of_the_verdict_counts_which_are_right(tmp_path, monkeypatch, capsys, kind, words, right):
    verdict, names = study("overhead", "verdict"), {"r": "reliable", "d": "doubtful", "n": "not reliable"}
    remaining = iter(words)

    def measure(out, way, prompts, seed, seconds, options):
        return {"run": out.name, "way": way, "verdict": names[next(remaining)], "speedup": 1.5, "reasons": "why"}

    monkeypatch.setattr(verdict, "measure", measure)
    table = verdict.main([f"--{kind}", "--runs", "3", "--ways", "all", "stop", "--out", str(tmp_path)])
    assert table["way"].tolist() == (["quiet"] * 3 if kind == "quiet" else ["all", "stop", "all"])
    assert f"right: {right} of 3" in capsys.readouterr().out and len(pd.read_csv(tmp_path / "verdict.csv")) == 3


@pytest.mark.parametrize(("threads", "cores"), [(1, 1), (2, 2), (1, 8), (6, 8), (16, 16)])
def test_some_busy_processes_are_enough_that_a_run_is_not_reliable(threads, cores):
    machine = metrics.Resources(threads, cores)
    groups = pd.DataFrame({"tokens": 1, "seconds": 1.0, "slowness": 0.0, "same_forwards": True}, index=range(8))
    other = float(study("overhead", "verdict").few(threads, cores))
    assert metrics.timing_verdict({"a": groups.assign(other_cores=other)}, machine).word != "reliable"


def test_lookups_are_measured_with_and_without_a_store(tmp_path):
    for folder, functions in (("text", 40), ("packages", 20)):
        (tmp_path / folder).mkdir()
        text = "".join(
            f"def function_{number}(argument):\n    return argument + {number}\n\n\n" for number in range(functions)
        )
        (tmp_path / folder / "module.py").write_text(text)
    given = ["--own", "40", "80", "--store", "150", "--steps", "5", "--evict", "1", "--out", str(tmp_path)]
    table = lookup.main([*given, "--text", str(tmp_path / "text"), "--packages", str(tmp_path / "packages")])
    assert len(table) == 9 and (table["p10"] > 0).all()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "lookup.csv"), table)


@pytest.mark.nightly
def test_enumeration_finds_which_published_rules_are_lossless():
    largest = on_toys(0.5).set_index("rule")["largest"]
    assert largest[["token verification", "sample and match"]].max() < 1e-12
    assert largest[["typical acceptance", "paths drawn apart", "bonus from raw logits"]].min() > 0.1


@pytest.mark.nightly
def test_what_hsd_accepts_more_than_block_verification_is_bias():
    frame = on_chains().set_index("rule")
    block, hsd, capped = (frame.loc[name] for name in list(frame.index)[1:])
    assert max(block["largest"], capped["largest"]) < 1e-12 < 0.05 < hsd["largest"]
    assert capped["accepted"] == pytest.approx(block["accepted"], abs=1e-12)
    assert hsd["accepted"] > block["accepted"] + 0.01


# Tables that follow from recorded results, and prompts that follow from scripts


def test_the_tables_of_projections_are_recomputed():
    readme, frame = (published.HERE / "README.md").read_text(), published.results()
    kept = pd.read_csv(published.HERE / "published_results.csv", keep_default_na=False)
    for name in ("projected", "error", "unexplained"):
        assert pd.to_numeric(kept[name]).to_numpy() == pytest.approx(frame[name].to_numpy(), rel=1e-3, abs=1e-3)
    assert (frame["projected"] <= frame["bound"] * (1 + 1e-9)).all()
    texts = published.by_table(frame), measured.by_run(pd.read_csv(measured.HERE / "measured.csv"))
    assert [text for text in texts if text not in readme] == []


@pytest.mark.parametrize("name", ["repetitive", *workloads.WORKLOADS])
def test_the_bundled_workloads_are_those_that_their_scripts_write(name):
    if name == "repetitive":
        assert repetitive.FILE.read_text() == repetitive.text()
        return
    file = workloads.FOLDER / f"{name}.jsonl"
    assert file.read_text() == workloads.text(name)
    prompts = chat(str(file), template="none") if name == "dialogue" else jsonl(zoo(f"workloads/{name}.jsonl"))
    assert len(prompts) == workloads.COUNT and {prompt.workload for prompt in prompts} == {name}


# All pages


STUDIES = sorted(page.parent.name for page in (ROOT / "experiments").glob("*/README.md"))


def test_studies_are_few_and_short():
    words = sum(len((ROOT / "experiments" / name / "README.md").read_text().split()) for name in STUDIES)
    assert len(STUDIES) <= 20 and words < 20_000


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_begins_with_its_answer_and_names_the_commit_that_was_measured(name):
    lines = [line for line in (ROOT / "experiments" / name / "README.md").read_text().splitlines() if line]
    assert lines[0].startswith("# ") and lines[0].endswith("?") and lines[1].startswith("**")
    text = " ".join(lines)
    measured_at = re.search(r"([Mm]easured|certified)[^.]* at commits? `[0-9a-f]{8}`", text)
    assert measured_at or lines[1].startswith("**Not measured yet")


def test_colours_of_studies_come_from_one_table():
    sources = {file: file.read_text() for file in (ROOT / "experiments").rglob("*.py")}
    wrong = re.compile(r"#[0-9a-fA-F]{6}\b|colormaps|viridis|\bC\d\b|tab:")
    assert [file.name for file, text in sources.items() if wrong.search(text)] == []
    for name in figures.PROPOSERS:
        assert plots.colours([name]) == {name: figures.PROPOSERS[name]}
    assert set(plots.colours([*plots.COLOURED_AS]).values()) <= set(figures.PROPOSERS.values())
