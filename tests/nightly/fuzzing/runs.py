"""Targets of the command line: options of a run, and run folders that are given to every command that reads them."""

import io
import re
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from matplotlib import font_manager
from omegaconf import OmegaConf

from spec_lab.cli.main import conf, top_level_options
from spec_lab.results import run_state
from tests import checkpoints
from tests.nightly.fuzzing.edits import CHARACTERS, edits
from tests.nightly.fuzzing.harness import Input, Target
from tests.nightly.fuzzing.shared import WORDS, command_line, exit_code, inputs, sound

SHORT = [
    "target.path=target", "target.dtype=float32", "prompts=jsonl", "prompts.path=prompts.jsonl", "proposer=ngram",
    "max_new_tokens=4", "warmup=0", "baseline=false", "output_dir=out",
]  # fmt: skip


def make_options(folder: Path) -> None:
    checkpoints.zoo(folder)
    checkpoints.prompts(folder / "prompts.jsonl", checkpoints.TEXTS[:1])
    (folder / "own" / "proposer").mkdir(parents=True)
    sound()


@cache
def leaves() -> list[tuple[str, str, str]]:
    """Every option: its group, the file of the group, and its name."""
    keys = [("", "", option) for option in sorted(top_level_options() - {"output_dir"})]
    for file in sorted(Path(conf()).glob("*/*.yaml")):
        if (group := file.parent.name) not in ("experiment", "hydra"):
            keys += [(group, file.stem, f"{group}.{key}") for key in OmegaConf.load(file) if key != "defaults"]
    return keys


@st.composite
def option_inputs(draw: Any, _: Path) -> Input:
    if draw(st.integers(0, 9)) == 0:
        text = draw(st.sampled_from(WORDS["yaml"]) | st.text(max_size=60))
        base = [option for option in SHORT if not option.startswith("proposer")]
        edits = [["text", "own/proposer/mine.yaml", text, 1]]
        if draw(st.booleans()):  # through another one, that includes it
            chosen = draw(st.sampled_from(WORDS["including"]))
            edits.append(["text", f"own/{chosen[0]}.yaml", chosen[1], 1])
            return {"edits": edits, "arguments": ["--config-dir=own", *base, *chosen[2:]]}
        return {"edits": edits, "arguments": ["--config-dir=own", *base, "proposer=mine"]}
    text = st.text(CHARACTERS.filter(lambda character: character != "\0"), max_size=20)
    values = st.sampled_from(WORDS["option"]) | text
    if draw(st.integers(0, 9)) == 0:  # whole numbers are valid and take too long, or start workers
        option, more = draw(st.sampled_from(WORDS["swept"]))
        value = draw(values.filter(lambda written: not re.fullmatch(r"-?\d+", written)))
        return {"edits": [], "arguments": ["--multirun", *SHORT, "seed=range(0,3)", *more, f"{option}={value}"]}
    group, name, option = draw(st.sampled_from(leaves()))
    base = [option for option in SHORT if option.split("=")[0] != group]
    base += [f"{group}={name}", *WORDS["required"].get(name, [])] if group else []
    value = draw(st.sampled_from(WORDS["called"]) if option.endswith("_target_") else values)
    return {"edits": [], "arguments": [*base, draw(st.sampled_from(WORDS["form"])).format(option, value)]}


def feed_options(arguments: list[str]) -> int:
    """A run that is refused leaves no files, and the message names the option."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = exit_code(arguments)
    print(said.getvalue())
    left = {path.name for path in Path("out").glob("*")}
    if code and left and not left & {"summary.json", "certificate.json", "parts"}:
        print(f"FAULT: files are left: {sorted(left)}")
    option = re.match(r"(?:\w+\.)*(\w+)=", arguments[-1]) if arguments[-1] not in SHORT else None  # which are right
    if code and option and option[1] not in said.getvalue():
        print(f"FAULT: {option[1]} is not named")
    return code


# Run folders ---------------------------------------------------------------------------------------------------------

SWEEP = ["--multirun", "--config-dir=own", "+experiment=mine", "seed=1,2", "output_dir=swept"]
ONE, TWO = "swept/seed=1", "swept/seed=2"


def make_runs(folder: Path) -> None:
    """A sweep of two finished runs, an unfinished one and a pending one."""
    assert font_manager.fontManager  # it looks for fonts, once
    checkpoints.zoo(folder)
    records = '{"task_id": "HumanEval/0", "prompt": "def f():"}\n{"task_id": "HumanEval/1", "prompt": "def g():"}\n'
    (folder / "HumanEval.jsonl").write_text(records)
    (folder / "own" / "experiment").mkdir(parents=True)
    (folder / "own" / "experiment" / "mine.yaml").write_text(WORDS["experiment"])
    with chdir(folder):
        assert exit_code(SWEEP) == 0
    half = Path(shutil.copytree(folder / ONE, folder / "swept" / "half"))
    (half / "parts").mkdir(exist_ok=True)
    for file in [*half.glob("*.parquet")]:
        file.rename(half / "parts" / f"{file.stem}-000000.parquet")
    for name in ("summary.json", "ended.json"):
        (half / name).unlink()
    run_state.queue(half, "Slurm", "12")


def run_inputs(folder: Path) -> st.SearchStrategy[Input]:
    model = ["--model", "llama-2-7b", "--draft", "llama-68m"]
    of_run = [
        ["compare", ONE, TWO], ["compare", TWO, ONE, "-v"], ["report", ONE], ["replay", ONE], ["bounds", ONE],
        ["replay", ONE, "--shapes", "1x1"], ["project", ONE, *model], ["samples", ONE],
        ["track", "--mode", "offline", ONE],
    ]  # fmt: skip
    of_sweep = [["state", "swept"], ["collect", "swept", "-v"], ["compare", "swept"], ["report", "swept"], SWEEP]
    of_sweep += [["project", "swept", *model]] + [["explain", "tau"]]
    owners = st.sampled_from(WORDS["owner"]) | st.text(CHARACTERS, max_size=20)
    named = st.tuples(owners, owners).map(lambda two: ["dashboard", f"--entity={two[0]}", f"--project={two[1]}"])
    return st.one_of(
        inputs(st.just([]), named),
        inputs(edits(folder, f"{ONE}/*.[jp]*", WORDS["run"]), st.sampled_from(of_run)),
        inputs(edits(folder, "swept/**/*.[jp]*", WORDS["run"]), st.sampled_from(of_sweep)),
    )


TARGETS = {
    "options": Target(make_options, option_inputs, feed_options),
    "runs": Target(make_runs, run_inputs, command_line),
}
