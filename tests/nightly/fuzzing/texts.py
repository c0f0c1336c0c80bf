"""Targets that read text: prompts with chat templates, constraints, traces of other systems."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from spec_lab.constrain import AppliedConstraint, ConstraintError, load
from spec_lab.constrain.controllers import banned, choices, pattern, template
from spec_lab.text import conversations, datasets
from spec_lab.text import prompts as plain
from spec_lab.text.checkers import check
from tests.constrain.parts import bundled
from tests.nightly.fuzzing.edits import BOMBS, VALUES, edits
from tests.nightly.fuzzing.harness import Input, Target
from tests.nightly.fuzzing.shared import WORDS, command_line, decode, inputs, joined, refusing, sound
from tests.tiny import tiny_target

Inputs = st.SearchStrategy[Input]


def write_lines(folder: Path, records: dict[str, Any]) -> None:
    """Write JSON Lines files by their names without an ending."""
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# Prompts and chat templates ------------------------------------------------------------------------------------------

OPTIONS = ("limit", "system", "thinking", "options", "turns", "checker", "template", "tools")
BEGUN, SAID = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ["(B) \\boxed{1/2}", "```python\nx = 1\n```"],
)


def make_prompts(folder: Path) -> None:
    sound()
    write_lines(folder, WORDS["records"])
    pd.DataFrame(WORDS["records"]["mmlu"]).to_parquet(folder / "mmlu.parquet")
    (folder / "tools.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    (folder / "template.jinja").write_text(BEGUN)


def prompt_inputs(folder: Path) -> Inputs:
    def of(file: str) -> Inputs:
        name = Path(file).stem
        options = st.sampled_from(OPTIONS).flatmap(lambda key: VALUES.map(lambda value: {key: value}))
        templated = {} if name == "jsonl" else {"template": "template.jinja"}
        usual = st.sampled_from([{}, templated, templated and {"template": "none"}])
        tools = templated | {"tools": "tools.json"} if name == "chat" else {}
        jinja = joined("template").map(lambda text: [["text", "template.jinja", text, 1]])
        return st.one_of(
            inputs(edits(folder, file, WORDS["prompt"]), usual.map(lambda given: [name, file, given])),
            inputs(edits(folder, file, WORDS["prompt"]), usual.map(lambda given: [name, file, given])),
            inputs(st.just([]), options.map(lambda given: [name, file, given])),
            inputs(jinja, st.just([name, file, templated])),
            inputs(BOMBS.map(lambda bomb: [["gzip", f"{file}.gz", *bomb]]), st.just([name, f"{file}.gz", {}])),
            inputs(edits(folder, "tools.json"), st.just([name, file, tools])),
        )

    return st.sampled_from([*(f"{name}.jsonl" for name in WORDS["records"]), "mmlu.parquet"]).flatmap(of)


def read_prompts(name: str, file: str, options: dict[str, Any]) -> None:
    """Read a file, and encode the turns of its prompts as a run does."""
    if name == "jsonl":
        prompts = plain.jsonl(file, **{key: value for key, value in options.items() if key == "limit"})
    elif name == "chat":
        prompts = conversations.chat(file, **options)
    else:
        prompts = datasets.load(name, file, **{key: value for key, value in options.items() if key != "tools"})
    plain.digest(prompts)
    for prompt in prompts[:20]:
        for turn in range(min(prompt.turns, 3)):
            plain.encode_turn(prompt, sound().tokenizer, sound().context, 100, SAID[:turn])
            if prompt.checker:
                check(prompt.checker, SAID[turn % 2], prompt.answer, prompt.text)


# Constraints ---------------------------------------------------------------------------------------------------------

KINDS = {
    "regex": load.regex, "json_schema": load.json_schema, "lark": load.lark, "choice": load.choice,
    "lines": lambda *of: load.json_schema(*of, lines=True), "pattern": pattern.load, "template": template.load,
    "banned": banned.load, "choices": choices.load,
}  # fmt: skip
PARTS = st.fixed_dictionaries(
    {}, optional={"max_tokens": VALUES | st.integers(1, 4), "stop": st.text(max_size=3) | VALUES}
)
SCHEMAS = st.recursive(
    VALUES | st.sampled_from(WORDS["subschema"]),
    lambda inner: st.dictionaries(st.sampled_from(WORDS["schema"]), inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)
SCHEMA = st.dictionaries(st.sampled_from(WORDS["schema"]), SCHEMAS, max_size=5)
TEXTS = st.lists(st.text("ab1é\0", max_size=5), max_size=5)
SOURCES: dict[str, st.SearchStrategy[Any]] = {
    "regex": joined("regex"), "json_schema": SCHEMA, "lark": joined("lark").map(lambda rules: f"start: {rules}"),
    "choice": TEXTS, "lines": SCHEMA, "pattern": joined("regex"), "banned": TEXTS, "choices": TEXTS,
    "template": st.lists(st.text("ab", max_size=3) | PARTS | VALUES, max_size=4),
}  # fmt: skip


def constraint_inputs(_: Path) -> Inputs:
    def of(kind: str) -> Inputs:
        return inputs(st.just([]), (SOURCES[kind] | SOURCES[kind] | VALUES).map(lambda source: [kind, source]))

    return st.sampled_from(sorted(KINDS)).flatmap(of)


def constrained(kind: str, source: Any) -> None:
    """Decode below a constraint, which may find out later that nothing can follow."""
    try:
        made = AppliedConstraint(KINDS[kind](bundled(), source))
        decode(tiny_target(vocab_size=bundled().size), constraint=made)
    except ConstraintError as error:
        raise ValueError(str(error)) from error


# Traces --------------------------------------------------------------------------------------------------------------


def make_traces(folder: Path) -> None:
    sound()
    write_lines(folder, WORDS["traces"])
    (folder / "vllm.txt").write_text("\n".join(WORDS["counters"]))


def trace_inputs(folder: Path) -> Inputs:
    def of(file: str, form: str) -> Inputs:
        changed = edits(folder, file, WORDS["trace"])
        if form == "vllm":
            changed |= joined("counters").map(lambda text: [["text", file, text, 1]])
        forms = st.sampled_from([form] * 8 + ["jsonl", "vllm", "sglang"])
        more = st.sampled_from(WORDS["replay"])
        return inputs(changed, st.tuples(forms, more).map(lambda two: ["replay", file, "--format", two[0], *two[1]]))

    return st.one_of(
        of("jsonl.jsonl", "jsonl"), of("counts.jsonl", "jsonl"), of("sglang.jsonl", "sglang"), of("vllm.txt", "vllm")
    )


TARGETS = {
    "prompts": Target(make_prompts, prompt_inputs, refusing(read_prompts)),
    "constraints": Target(lambda _: constrained("regex", "a"), constraint_inputs, refusing(constrained)),
    "traces": Target(make_traces, trace_inputs, command_line),
}
