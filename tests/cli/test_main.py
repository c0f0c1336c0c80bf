"""The command line: every config composes and matches its target, and every error is one helpful line."""

import importlib.metadata
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from spec_lab.cli.main import conf, option_names, top_level_options, zoo
from spec_lab.cli.start import ONE_TURN
from spec_lab.constrain import AppliedConstraint
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from tests import checkpoints

ROOT = Path(__file__).parents[2]
RUNS = [
    "autoregressive", "draft_chain", "draft_tree", "eagle3", "hybrids", "ngram_chain", "ngram_tree", "peers",
    "medusa_tree", "proposers",
]  # fmt: skip
CERTIFY = ["task.samples=500", "task.tokens=12", "max_new_tokens=6"]
TASKS = {
    "certify": ("certificate.json", CERTIFY),
    "certify_all": ("certificate.json", CERTIFY),
    "serve_trace": ("summary.json", ["task.segment=2", "prompts.limit=3", "max_new_tokens=6"]),
    "verifier_zoo": ("summary.json", ["task.repeats=1", "task.every=3", "prompts.limit=2", "max_new_tokens=6"]),
}
"""Experiments of other tasks: a file that each writes, and overrides that keep it short."""
STUDIES = [
    "batch_size", "cost_of_nodes", "draft_length", "proposers_by_workload", "real_model", "real_model_heads",
    "spec_bench", "tree_shapes", "tune_tree", "verifier_vs_temperature",
]  # fmt: skip
"""They are run by their own tests."""
TRAIN = [f"train_{name}" for name in ("draft", "eagle1", "eagle3", "hydra", "kangaroo", "medusa", "mtp", "pard")]
"""They are run by tests/train."""
EXPERIMENTS = sorted(
    [*RUNS, *TASKS, *STUDIES, "constraint_distance", "constraint_placement", "llama_cpp_peers", "stream", *TRAIN]
)
GIVEN = {"target", "sampling", "seed", "proposer"}
"""Arguments that the command line passes at the call."""
LAB = {"lab", "settings", "config"}
"""Those that it passes to a task."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides that name a tiny checkpoint and its prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.checkpoint(folder / "target")
    file = checkpoints.prompts(folder / "prompts.jsonl")
    return [
        f"target.path={folder / 'target'}", "target.dtype=float32", "prompts=jsonl", f"prompts.path={file}",
        "proposer=ngram", "proposer.depth=3", "max_new_tokens=8", "warmup=0",
    ]  # fmt: skip


def options() -> list[Path]:
    return sorted(file for file in Path(conf()).glob("*/*.yaml") if file.parent.name != "experiment")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("file", options(), ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_option_fits_the_arguments_of_what_it_names(file):
    config = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    for default in config.pop(
        "defaults", ()
    ):  # a file of the same group; of a hybrid, its parts, which are given to it
        if isinstance(default, str) and default != "_self_":
            config = OmegaConf.to_container(OmegaConf.load(file.with_stem(default)), resolve=False) | config
    signature = inspect.signature(get_object(config.pop("_target_")))
    live = {
        "proposer": {*GIVEN, "parts", "inner", "verifier"} & set(signature.parameters),
        "constraint": {"vocabulary"},
        "policy": {"target", "proposer"} & set(signature.parameters),
        "metrics": {"tables", "arm"},
        "task": {"verifier"} if file.stem == "check" else LAB,
    }.get(file.parent.name, ())
    if file.parent.name == "constraint":
        config = {key: value for key, value in config.items() if key not in option_names(AppliedConstraint)}
        assert all(not value for value in config.values() if isinstance(value, dict | list)), "filled by the user"
    elif file.parent.name != "task":
        assert all(not isinstance(value, dict) for value in config.values()), "arguments are scalars, or lists of them"
    signature.bind(**config, **dict.fromkeys(live))


def test_how_a_constraint_applies_has_its_defaults_in_one_file():
    shared = {*option_names(AppliedConstraint)}
    assert {*OmegaConf.load(Path(conf(), "applied_constraint.yaml"))} == shared
    for file in (file for file in options() if file.parent.name == "constraint"):
        assert shared.isdisjoint(OmegaConf.load(file)), file


GIVEN_BY_USERS = {
    "choice": ['constraint.choices=["a","b"]'],
    "controller": [
        "constraint.make=spec_lab.constrain.controllers.choices.load",
        'constraint.options={choices: ["a"]}',
    ],
    "controller_banned": ['constraint.strings=["x"]'],
    "controller_choices": ['constraint.choices=["a","b"]'],
    "controller_pattern": ['constraint.pattern="a+"'],
    "controller_template": ['constraint.parts=["a",{max_tokens: 2},"b"]'],
    "json_schema": ["constraint.schema={type: integer}"],
    "lark": ["constraint.grammar='start: \"a\"'"],
    "regex": ['constraint.pattern="a+"'],
}
"""Options that a constraint requires."""
SHORT_RUN = ("regex", "records", "controller_choices", "controller_template")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[] if file.stem in SHORT_RUN else [pytest.mark.nightly])
        for file in options()
        if file.parent.name == "constraint"
    ],
)
def test_every_constraint_can_be_named_on_the_command_line(cli, file):
    given = [f"constraint={file.stem}", *GIVEN_BY_USERS.get(file.stem, ())]
    prompts = "prompts=json" if file.stem == "records" else "prompts=code"
    heal = "token_healing=false"
    command = [
        *given,
        prompts,
        heal,
        f"target.path={zoo('target')}",
        "proposer=ngram",
        "proposer.depth=3",
        "prompts.limit=1",
    ]
    code, _, errors = cli(*command, "max_new_tokens=2", "warmup=0", "baseline=false", "output_dir=here")
    assert code == 0, errors


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.one_in(9)
def test_every_experiment_composes_and_is_a_small_delta(cli, name):
    code, output, errors = cli(f"+experiment={name}", "--cfg", "job", "--resolve")
    assert code == 0, errors
    config = OmegaConf.create(output)
    assert config.name == name
    for peer in config.peers.values():
        signature = inspect.signature(get_object(peer.pop("_target_")))
        signature.bind(**peer, **dict.fromkeys({*GIVEN} & set(signature.parameters)))
    assert len(Path(conf(), "experiment", f"{name}.yaml").read_text().splitlines()) <= 24  # recipes list their options


@pytest.fixture(scope="module")
def tiny_zoo(tmp_path_factory):
    """Tiny models in the bundled models' place."""
    folder = checkpoints.zoo(tmp_path_factory.mktemp("zoo"))
    OmegaConf.register_new_resolver("zoo", lambda name: str(folder / name), replace=True)
    yield
    OmegaConf.register_new_resolver("zoo", zoo, replace=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in ("certify_all", "verifier_zoo") else [])
        for name in TASKS
    ],
)
@pytest.mark.usefixtures("tiny_zoo")
def test_every_other_task_writes_its_files(cli, name, tmp_path, monkeypatch):
    few = partial(prove, instances=QUICK[:1])  # tests/tasks/certify enumerates the others
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", few)
    file, short = TASKS[name]
    code, output, errors = cli(f"+experiment={name}", *short, "target.dtype=float64", "warmup=0", "output_dir=here")
    assert code == 0, errors
    assert output.rstrip().endswith("here")
    data = json.loads((tmp_path / "here" / file).read_text())
    if name == "certify_all":
        shipped = {file.stem for file in Path(conf()).glob("verifier/*.yaml")} - {"synthetic"}  # of invalid text
        assert {pair["verifier"] for pair in data["pairs"]} == shipped
    assert list(tmp_path.glob("here/figures/*.png"))
    assert {"arms", "config", "seed"} <= set(json.loads((tmp_path / "here" / "manifest.json").read_text()))


ALONE = {"draft_chain", "draft_tree", "medusa_tree", "ngram_chain", "ngram_tree", "peers"}
"""Experiments whose proposer is run by ``proposers`` as well; peers have a test file of their own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in ALONE else []) for name in RUNS]
)
@pytest.mark.usefixtures("tiny_zoo")
@pytest.mark.one_in(8)
def test_every_experiment_runs(cli, name, tmp_path):
    short = ["target.dtype=float64", "max_new_tokens=6", "warmup=0", "prompts.limit=2", "output_dir=here"]
    code, output, errors = cli(f"+experiment={name}", *short)
    assert code == 0, errors
    assert f"{name}: " in output
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    manifest = json.loads((tmp_path / "here" / "manifest.json").read_text())
    assert set(manifest["proposers"]) <= set(manifest["arms"])
    assert all(manifest["weights_sha256"].values()), "parts without weights are left out"
    assert summary["requests"] == 2
    assert all(arm["identical_outputs"] in (1, None) for arm in summary["arms"].values())
    if name == "peers":
        assert {"bare", "generate", "assisted", "assisted_same", "lookup"} <= set(summary["arms"])
    if name != "autoregressive":
        assert summary["speedup"]["mean"] > 0
        main = next(iter(manifest["proposers"].values()))
        tree = main.get("tree")  # calibrated: no nodes if no tree is faster on this machine
        assert summary["nodes_per_step"] > 0 or name.startswith("ngram") or tree == "none"


def test_composing_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; sys.argv = ['spec-lab', '--cfg', 'job']\n"
        "from spec_lab.cli.main import main; main()\n"
        "assert not {'torch', 'transformers', 'pandas', 'matplotlib', 'wandb'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"_target_: spec_lab.models.target.Target.load" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_a_reader_that_ends_first_is_no_error(flags, tmp_path):
    end, pipe = os.pipe()
    os.close(end)
    done = subprocess.run(
        [sys.executable, "-m", "spec_lab", *flags], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        stdout=pipe, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(pipe)
    assert done.returncode == -signal.SIGPIPE and not done.stderr


def test_training_on_a_gguf_file_is_refused_before_torch_is_imported(tmp_path):
    code = (
        "import sys; sys.argv = ['spec-lab', 'train', 'medusa', 'target=gguf', 'target.path=none.gguf']\n"
        "from spec_lab.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "hidden states of a model of transformers" in done.stderr, done.stderr
    assert "Assertion" not in done.stderr


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("report runs/frist", "spec_lab.analysis.report"), ("compare sweeps/dept", "spec_lab.analysis.compare"),
        ("replay runs/frist", "spec_lab.replay.designs"), ("bounds runs/frist", "spec_lab.replay.bounds"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_exist_is_refused_before_anything_heavy_is_imported(cli, monkeypatch, words, module):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, errors = cli(*words.split())
    assert code == 1 and errors.startswith(f"spec_lab: {words.split()[1]} does not exist: ")


def test_a_folder_that_does_not_exist_is_answered_with_the_nearest_beside_it(cli, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first.txt").touch()
    assert "; did you mean runs/first?" in cli("report", "runs/frist")[2]
    assert "did you mean" not in cli("report", "runs/zzz")[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["prompts=jsonl", "prompts.path=none.jsonl"], "prompts file none.jsonl does not exist; set prompts.path"),
        (["prompts=chat", "prompts.path=none.jsonl"], "prompts file none.jsonl does not exist; set prompts.path"),
        (["target.path=nowhere"], "target.path=nowhere: there is no folder nowhere, and it is not a hub name"),
    ],
)
def test_files_that_are_not_there_are_refused_before_torch_is_imported(cli, monkeypatch, given, message):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, errors = cli(*given, "output_dir=here")
    assert code == 1 and f"spec_lab: {message}" in errors


def test_prompts_of_several_turns_are_refused_before_the_target_is_loaded(cli, caplog):
    given = ["task=check_drafter", "proposer=ngram", "prompts=mt_bench", "prompts.limit=1"]
    code, _, errors = cli(*given, "target.path=.", "output_dir=here")
    assert code == 1 and "task=check_drafter decodes one answer" in errors and "set prompts.turns=1" in errors
    said = [record.getMessage() for record in caplog.records if record.name.startswith("spec_lab")]
    assert said == ["Importing torch", "Importing transformers"]


def test_tasks_that_decode_one_turn_are_those_of_the_configs():
    files = {name: Path(conf(), "task", f"{name}.yaml") for name in ONE_TURN.values()}
    assert {OmegaConf.load(file)._target_: name for name, file in files.items()} == ONE_TURN


@pytest.mark.figures
def test_a_run_from_any_directory_writes_to_output_dir(cli, tiny, tmp_path):
    code, output, errors = cli(*tiny, "output_dir=here", "sampling.temperature=1", "name=mine")
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "mine: proposer ngram" in output
    assert {"forwards.parquet", "summary.json", "manifest.json", "figures"} <= {p.name for p in tmp_path.glob("here/*")}
    manifest = json.loads((tmp_path / "here" / "manifest.json").read_text())
    assert manifest["config"]["sampling"]["temperature"] == 1
    assert manifest["weights_sha256"]["target"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["proposer.depth=abc"], "proposer.depth ... 'abc'"),
        (["batch_size=1.5"], "batch_size ... 1.5"),
        (["max_new_tokens=-3"], "max_new_tokens ... -3"),
        (["sampling.temperature=hot"], "sampling.temperature ... 'hot'"),
        (["sampling.top_p=2"], "sampling.top_p must be a number above 0 and at most 1, not 2"),
        (["prompts.limit=some"], "prompts.limit ... 'some'"),
        (["prompts.path=nowhere.jsonl"], "nowhere.jsonl ... prompts.path"),
        (["target.dtype=int8"], "'int8' ... bfloat16"),
        (["target.device=tpu"], "'tpu' ... cpu, cuda or cuda:N"),
        (["tracker=wandb", "tracker.mode=on"], "tracker.mode ... auto, online, offline, disabled"),
        (["arms=3"], "arms ... mapping ... 3"),
        (["peers=3"], "peers ... mapping ... 3"),
        (["+peers.mine=3"], "peers.mine ... _target_ ... 3"),
        (["+arms.mine={depth: 2}"], "arms.mine ... _target_ ... {'depth'"),
        (["~proposer"], "proposer ... _target_ ... null"),
        (
            ["proposer=medusa", "proposer.path=/nowhere"],
            "proposer.path=/nowhere: ... no folder",
        ),
        (["proposer=medusa", "proposer.path=3"], "proposer.path ... 3"),
        (
            ["proposer=draft_tree", "proposer.drawn=iid"],
            "temperature 0 ... siblings drawn",
        ),
        (["proposer=draft_chain", "proposer.path=/nowhere"], "proposer.path=/nowhere: "),
        (["target.path=/nowhere"], "target.path=/nowhere: "),
        (["target.path=.", "verifier=gumbel"], "proposer: verifier 'gumbel' "),
        (
            ["target.path=.", "proposer=draft_chain", "+proposer@arms.tree=draft_tree", "verifier=kseq"],
            "arms.tree: verifier 'kseq' ... iid",
        ),
        (["sampling.logit_bias={99999: 1.0}"], "sampling.logit_bias names token 99999 ... tokens 0 to"),
    ],
)
@pytest.mark.usefixtures("tiny_zoo")
@pytest.mark.one_in(27)
def test_wrong_values_are_refused_in_one_line(cli, tiny, tmp_path, overrides, message):
    of_any_proposer = [option for option in tiny if option != "proposer.depth=3"]
    code, _, errors = cli(*of_any_proposer, *overrides, "output_dir=here")
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("spec_lab: ")]
    assert all(fact in line for fact in message.split(" ... "))
    assert "Traceback" not in errors
    assert not (tmp_path / "here").exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("part", "overrides"),
    [
        ("target", []),
        ("proposer", ["proposer=draft_chain"]),
        ("arms.mine", ["+proposer@arms.mine=draft_chain"]),
        ("proposer", ["proposer=medusa", "proposer.tree='2'"]),
    ],
)
@pytest.mark.usefixtures("tiny_zoo")
def test_a_truncated_weight_file_is_refused_by_its_name(cli, tmp_path, part, overrides):
    folder = "medusa" if "proposer=medusa" in overrides else "draft"
    shutil.copytree(OmegaConf.create({"path": f"${{zoo:{folder}}}"}).path, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    code, _, errors = cli("proposer=ngram", "target.dtype=float32", *overrides, f"{part}.path={tmp_path / 'copy'}")
    assert code == 1
    assert f"spec_lab: {part}" in errors
    assert f"{file} " in errors
    assert "truncated or corrupt" in errors
    assert "copy or download it again" in errors
    assert "Traceback" not in errors


def test_an_unknown_option_is_refused_in_one_line(cli):
    code, _, errors = cli("batchsize=2")
    assert code == 1
    assert errors == "spec_lab: there is no option batchsize; did you mean batch_size=2?\n"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("+batchsize=2", "batchsize ... batch_size=2?"),
        ("+qqq=2", "there is no option qqq; spec-lab explain lists all"),
        ("~seed", "seed ... ~seed"),
    ],
)
def test_options_that_nothing_reads_and_removed_ones_are_refused(cli, tiny, option, message):
    code, _, errors = cli(*tiny, option)
    assert code == 1
    assert all(fact in errors for fact in message.split(" ... "))
    assert "Traceback" not in errors


def test_version_is_that_of_the_package(cli):
    assert cli("--version") == (0, f"spec_lab {importlib.metadata.version('spec-lab')}\n", "")


@pytest.mark.each_value
@pytest.mark.parametrize(("option", "new"), [
    ("out=here", "output_dir"), ("beside.mine.depth=2", "arms.mine.depth"), ("~beside", "arms"),
    ("+proposer@beside.mine=ngram", "arms.mine"), ("stop=[x]", "stop_strings"), ("banned=[x]", "banned_strings"),
    ("heal=true", "token_healing"), ("constraint.beside=true", "constraint.async_masks"), ("prompt=x", "task.prompt"),
    ("objective=tau", "hydra.sweeper.objective"), ("task.turns=2", "task.repeats"),
    ("task.rounds=2", "task.steps"), ("policy.most=2", "policy.max_depth"),
])  # fmt: skip
def test_a_former_name_of_an_option_is_refused_with_the_new_one(cli, tmp_path, option, new):
    for many in ([], ["--multirun"]):
        code, _, errors = cli(option, *many)
        assert code == 1 and f" is now called {new}\n" in errors
        assert not list(tmp_path.iterdir())


ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{below}: &{below} [{', '.join([f'*{above}'] * 10)}]\n"
    for above, below in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A YAML file whose aliases stand for 10**9 values."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "given",
    [
        ["--config-dir=own", "proposer=bomb"],
        ["--config-dir=own", "proposer=includes"],
        ["--config-dir=own", "+group=bomb"],
        ["--config-dir=own", "--config-name=bomb"],
        ["hydra.searchpath=[file://own]", "proposer=bomb"],
        ["--config-dir=own", "--multirun", "proposer=ngram,bomb"],
        ["explain", "proposer=bomb", "--config-dir=own"],
    ],
    ids=" ".join,
)
def test_aliases_that_stand_for_too_many_values_are_refused_before_they_are_expanded(cli, tiny, tmp_path, given):
    bomb = f"_target_: spec_lab.propose.ngram.Ngram.load\n{ALIASES}"
    for name in ("proposer/bomb", "group/bomb", "bomb", "proposer/includes"):
        file = tmp_path / "own" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(bomb if file.stem == "bomb" else "defaults: [bomb]")
    flags = [argument for argument in given if argument.startswith("--")]
    chosen = [argument for argument in given if not argument.startswith("--")]
    code, _, errors = cli(*(given if "explain" in given else [*flags, *tiny, "output_dir=here", *chosen]))
    assert code == 1 and "bomb.yaml is not read: its aliases stand for more than 20000 values" in errors
    assert errors.count("spec_lab: ") == 1 and not (tmp_path / "here").exists()


def test_the_known_options_are_those_of_the_default_config(cli):
    chosen = set(OmegaConf.create(cli("--cfg", "job")[1]))
    assert top_level_options() == chosen | {"metrics"}, "a group of which nothing is chosen"


@pytest.mark.parametrize("many", [[], ["--multirun"]])
def test_an_unwritable_directory_is_refused(cli, tiny, tmp_path, many):
    (tmp_path / "file").write_text("")
    code, _, errors = cli(*tiny, "output_dir=file/run", *many)
    assert code == 1
    assert (
        f"cannot write to output_dir=file/run: {tmp_path / 'file'} is not a directory; choose another output_dir=DIR"
        in errors
    )
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("proposer=null", "proposer ... null ... conf/proposer"),
        ("sampling=null", "sampling ... null ... conf/sampling"),
        ("tracker=null", "tracker ... null ... conf/tracker"),
        ("proposer=3", "proposer=3 ... conf/proposer"),
        ("verifier=true", "verifier=true ... conf/verifier ... cascade, "),
        ("constraint=", "constraint=  ... conf/constraint ... choice, "),
        ("tracker=" + "x" * 5000, "conf/tracker ... files, wandb"),
        ("target=[[]]", "target=[] ... conf/target ... zoo"),
        ("sampling=[1,a,null]", "sampling=1 ... conf/sampling ... greedy, "),
        ("prompts=2024", "prompts=2024 ... conf/prompts ... bundled, "),
        ("name=ключ", "name=ключ"),
        ("name='a/../b'", "name ... 1 to 100 ... '/'"),
        ("name=" + "x" * 101, "name ... 1 to 100"),
        ("name='..'", "name ... '..'"),
        ("stop_strings=[" + "x" * 4097 + "]", "stop_strings[0] ... 4097 bytes"),
        ("stop_strings=[" + ",".join(["a"] * 257) + "]", "stop_strings ... 257 strings"),
        ("banned_strings=[a," + "x" * 4097 + "]", "banned_strings[1] ... 4097 bytes"),
        ("output_dir=/dev/null", "output_dir=/dev/null ... directory"),
        ("output_dir=null", "output_dir ... directory"),
        ("output_dir=", "output_dir ... ''"),
        ("~output_dir", "output_dir ... directory"),
        ("output_dir=/proc/foo", "output_dir=/proc/foo ... /proc "),
        ("threads=100000", f"threads ... at most {4 * os.cpu_count()}"),
        (
            "verifier._target_=builtins.int",
            "verifier ... int ... Verifier",
        ),
        ("sampling._target_=builtins.dict", "sampling._target_=builtins.dict ... temperature, top_k, "),
    ],
)
@pytest.mark.one_in(27)
def test_an_invalid_part_or_directory_is_refused_in_one_line(cli, tiny, tmp_path, option, message):
    code, _, errors = cli(*tiny, *([] if "output_dir" in option else ["output_dir=here"]), option)
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("spec_lab: ")]
    assert all(fact in line for fact in message.split(" ... "))
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_loading_is_reported(cli, tiny, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_lab.models.target.Target.load", interrupted)
    code, _, errors = cli(*tiny)
    assert code == 130
    assert "Interrupted before anything was decoded" in errors


@pytest.mark.nightly
def test_decisions_of_a_policy_are_written_and_repeated_by_another_run(cli, tiny, tmp_path):
    warm = ["proposer.depth=4", "sampling=temperature_1", "prompts.limit=3", "max_new_tokens=12"]
    assert cli(*tiny, *warm, "policy=heuristic", "policy.start=1", "output_dir=first")[0] == 0
    first = pd.read_parquet(tmp_path / "first" / "steps.parquet").sort_values("id", ignore_index=True)
    decisions = first.loc[first["arm"] == "ngram", "policy"].map(json.loads)
    assert {decision["depth"] for decision in decisions} > {1}
    assert first.loc[first["arm"] == "baseline", "policy"].isna().all()
    assert json.loads((tmp_path / "first" / "manifest.json").read_text())["proposers"]["ngram"]["policy"] == {
        "name": "heuristic", "start": 1.0, "up": 2.0, "down": 1.0, "max_depth": 20,
    }  # fmt: skip
    decided = json.loads((tmp_path / "first" / "summary.json").read_text())["arms"]["ngram"]["decisions"]
    counts = Counter(decision["depth"] for decision in decisions[~first.loc[first["arm"] == "ngram", "prefill"]])
    most, times = counts.most_common(1)[0]
    assert decided.startswith(f"heuristic, depth {most} in {times} of {counts.total()} steps")
    code, _, errors = cli(*tiny, *warm, "policy=recorded", "policy.path=first", "output_dir=second")
    assert code == 0, errors
    second = pd.read_parquet(tmp_path / "second" / "steps.parquet").sort_values("id", ignore_index=True)
    pd.testing.assert_frame_equal(first, second)
    assert cli(*tiny, *warm, "output_dir=plain")[0] == 0
    for path, arm, why in (
        ("nowhere", "ngram", "no folder of a run"),
        ("plain", "ngram", "holds no decisions"),
        ("first", "baseline", "holds no decisions"),
        ("first", "x", "holds no decisions"),
    ):
        given = [f"policy.path={path}", f"policy.arm={arm}", "output_dir=third"]
        code, _, errors = cli(*tiny, *warm, "policy=recorded", *given)
        assert code == 1 and why in errors, errors
    code, _, errors = cli(*tiny, *warm, "policy=recorded", "policy.path=first", "prompts.limit=4", "output_dir=more")
    assert code == 1 and "holds no decision for step 0 of request 3" in errors, errors
