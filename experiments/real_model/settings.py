"""Measure the real model in further settings: python -m experiments.real_model.settings [--eagle3 DIR --medusa DIR].

Code in chats, long prompts, second turns, JSON under a schema, batches, other data types, and both engines' own
speculative modes. The same command resumes; then it writes ``settings.csv`` and the README's table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments import runs
from experiments.plots import fill, kept, markdown, ordered, row_where, shown, swept
from spec_lab.models.gguf_checkpoint import dequantised
from spec_lab.models.smollm2 import smollm2_file

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "city": {"type": "string", "maxLength": 24},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "city", "skills"],
    "additionalProperties": False,
}
TRADES = ("baker", "nurse", "pilot", "teacher", "painter", "lawyer", "farmer", "tailor")

ENGINES = ("llama.cpp", "transformers")

LOOKUPS: dict[str, runs.Arm] = {
    "ngram_sure": ("ngram", {"depth": 4, "min_ngram": 3}),
    "ngram_goodput": ("ngram", {"depth": 8, "policy@policy": "goodput"}),
}
"""Arms of both engines, beside an n-gram of three tokens."""

PEERS = {
    "llama.cpp": {"loop": "peers_llama.LlamaLoop", "generate": "peers_llama.LlamaGenerate.plain",
                  "lookup": "peers_llama.LlamaGenerate.lookup"},
    "transformers": {"bare": "peers.Bare", "generate": "peers.Generate.plain", "lookup": "peers.Generate.lookup"},
}  # fmt: skip
"""What each engine's own library is measured by."""

MODES, TURNS = "its library's modes", "two turns, prefixes kept"
"""Settings in which some arms are left out."""

NAMES = {
    "ngram": "n-gram, 3",
    "ngram_sure": "n-gram, 4, after 3 or 4 equal tokens",
    "ngram_goodput": "n-gram of up to 8, goodput decides",
    "eagle3": "EAGLE-3, chain of 3",
    "medusa": "Medusa tree",
    "bare": "bare loop",
    "loop": "bare loop",
    "generate": "the library's generation",
    "lookup": "its prompt lookup",
}
"""Names of the arms in the tables, in their order."""


def write_prompts(folder: Path, limit: int) -> None:
    """Write prompts that no bundled file has: code in chats, long texts, questions for JSON; at most 8 of each."""
    bundled = [json.loads(line) for line in (runs.ZOO / "prompts" / "code.jsonl").read_text().splitlines()[:limit]]
    questions = [json.loads(line) for line in (runs.ZOO / "questions" / "spec_bench.jsonl").read_text().splitlines()]
    summarized = [question for question in questions if question["category"] == "summarization"]
    longest = sorted(summarized, key=lambda question: -len(question["turns"][0]))[:limit]
    files = {
        "code": {line["id"]: f"Continue this Python code:\n```python\n{line['prompt']}```" for line in bundled},
        "long": {str(question["question_id"]): question["turns"][0] for question in longest},
        "json": {
            trade: f"Describe a {trade} as JSON: name, age, city, and a list of three skills."
            for trade in TRADES[:limit]
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        texts = [json.dumps({"id": number, "prompt": prompt}) + "\n" for number, prompt in lines.items()]
        (folder / f"{name}.jsonl").write_text("".join(texts))
    (folder / "schema.json").write_text(json.dumps(SCHEMA))


def spec_bench(count: int) -> list[str]:
    """Return the options of at least so many of Spec-Bench's 480 questions, in chats."""
    every = f"prompts.every={480 // count}"  # a limit would leave out the questions of all but the first tasks
    return ["prompts=spec_bench", "prompts.template=checkpoint", "max_prompt_tokens=2000", every]


def settings(folder: Path, limit: int) -> dict[str, list[str]]:
    """Return the options of each setting; ``folder`` is that of the prompts, ``limit`` the number of groups."""
    code, long, asked = (["prompts=chat", f"prompts.path={folder / name}.jsonl"] for name in ("code", "long", "json"))
    return {
        "code": code,
        "prompts of 1 to 2 k tokens": long,
        TURNS: ["prompts=mt_bench", f"prompts.every={80 // limit}", "prefix_cache=4096"],
        "MT-Bench, all 80 questions, two turns": ["prompts=mt_bench"],
        "JSON under a schema": [*asked, "constraint=json_schema", f"constraint.path={folder / 'schema.json'}"],
        "batches of 4": [*spec_bench(4 * limit), "batch_size=4"],
        "batches of 8": [*spec_bench(8 * limit), "batch_size=8"],
        MODES: spec_bench(limit),
    }


def targets(folder: Path) -> dict[str, list[str]]:
    """Return the options of llama.cpp's targets with other data types; files that are missing are written."""
    source, made = dequantised(Path(smollm2_file())), dict[str, list[str]]()
    for dtype in ("q8_0", "bf16"):
        file = folder / f"smollm2-{dtype}.gguf"
        if not file.exists():
            spec_lab("convert", str(source), str(file), "--dtype", dtype)
        made[f"weights in {dtype}"] = ["target=gguf", f"target.path={file}"]
    return made


def spec_lab(*arguments: str) -> None:
    """Run the command.

    Raises:
        CalledProcessError: it failed; its message is on the terminal.
    """
    subprocess.run([sys.executable, "-m", "spec_lab", *arguments], check=True)


def measure(chosen: argparse.Namespace, heads: Mapping[str, runs.Arm]) -> None:
    """Run what is missing: a sweep of one run for each engine and setting, with ``heads`` by transformers."""
    out, limit = chosen.out, chosen.limit
    write_prompts(out / "prompts", limit)
    for engine in ENGINES:
        jobs = {
            name: ["target=smollm2", f"target.engine={engine}", *options]
            for name, options in settings(out / "prompts", limit).items()
        }
        if engine == "llama.cpp":
            jobs |= {name: [*target, *spec_bench(limit)] for name, target in targets(out).items()}
        for name, options in jobs.items():
            arms = LOOKUPS | (heads if engine == "transformers" and name != MODES else {})
            if name == TURNS:  # EAGLE-3 reads hidden states of the whole prompt, which kept prefixes do not have
                arms = {arm: options for arm, options in arms.items() if arm != "eagle3"}
            more = [f"+proposer@arms.{arm}={proposer}" for arm, (proposer, _) in arms.items()]
            more += [runs.option(arm, key, value) for arm, (_, given) in arms.items() for key, value in given.items()]
            if name == MODES:
                more += [f"+peers.{peer}._target_=spec_lab.tasks.{call}" for peer, call in PEERS[engine].items()]
            usual = ["proposer=ngram", "proposer.depth=3", f"threads={chosen.threads}", f"max_new_tokens={chosen.new}"]
            folder = out / engine / folder_name(name)
            spec_lab(
                "--multirun",
                *options,
                *more,
                *usual,
                "record=none",
                "seed=0",
                f"name={folder.name}",
                f"output_dir={folder}",
            )


def folder_name(setting: str) -> str:
    """Return the name of the folder of a setting's runs."""
    return setting.replace(" ", "_").replace("'", "").replace(",", "")


def results(out: Path) -> pd.DataFrame:
    """Return a row for each engine, setting and arm."""
    named = {folder_name(setting): setting for setting in settings(out, 1)}
    tables = [
        swept(folder).assign(engine=engine, setting=named.get(folder.name, folder.name.replace("_", " ")))
        for engine in ENGINES
        for folder in sorted((out / engine).iterdir())
    ]
    return kept(pd.concat(tables, ignore_index=True), "engine", "setting")


def written(table: pd.DataFrame) -> str:
    """Return the finding, and of each engine a table of speed-up and tau by setting and arm."""
    parts = []
    for engine in ENGINES:
        here = table[table["engine"] == engine]
        arms = ordered(list(here["arm"]), [*NAMES])
        lines = [["", "baseline, tokens/s", *(NAMES.get(arm, arm) for arm in arms)]]
        for setting, part in here.groupby("setting", sort=False):
            cells = [row_where(part, arm=arm) for arm in arms]
            rate = f"{part['baseline_tokens_per_second'].iloc[0]:.0f}"
            lines.append([str(setting), rate, *("-" if row is None else cell(row) for row in cells)])
        parts.append(f"By {engine}:\n\n{markdown(lines)}")
    return "\n\n".join([f"**{finding(table)}**", *parts])


def cell(row: Mapping[str, object]) -> str:
    """Return an arm's speed-up with its interval, and tau where it drafts."""
    tau = row["tau_macro"]
    return shown(row) + (f", {tau:.2f}" if isinstance(tau, float) and tau == tau else "")


def finding(table: pd.DataFrame) -> str:
    """Say of each engine in how many settings some draft is faster than the baseline with its whole interval."""
    drafts = table[~table["arm"].isin([peer for peers in PEERS.values() for peer in peers])]
    said = []
    for engine in ENGINES:
        here = drafts[drafts["engine"] == engine]
        faster = here[here["speedup_low"] > 1]
        best = here.loc[here["speedup"].idxmax()]
        said.append(
            f"by {engine} in {faster['setting'].nunique()} of {here['setting'].nunique()} "
            f"(at most {best['speedup']:.2f} times as fast: {NAMES.get(best['arm'], best['arm'])}, {best['setting']})"
        )
    return f"Some draft beats the baseline with its whole interval {', '.join(said)}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = runs.parser(__doc__, "outputs/real_model/settings", 8)
    parser.add_argument("--eagle3", type=Path, help="folder of the EAGLE-3 head")
    parser.add_argument("--medusa", type=Path, help="folder of the Medusa heads")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of settings.csv and the README")
    chosen = parser.parse_args(arguments)
    chain = {"depth": 3, "nodes": "null", "rerank": "false", "drawn": "iid"}
    heads: dict[str, runs.Arm] = {}
    if chosen.eagle3 is not None:
        heads["eagle3"] = ("eagle", {"path": chosen.eagle3.absolute(), **chain})
    if chosen.medusa is not None:
        heads["medusa"] = ("medusa", {"path": chosen.medusa.absolute()})
    measure(chosen, heads)
    table = results(chosen.out)
    table.to_csv(chosen.folder / "settings.csv", index=False, float_format="%.4g")
    fill(chosen.folder / "README.md", written(table), "settings")
    print(written(table))


if __name__ == "__main__":
    main()
