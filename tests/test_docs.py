"""Documents are true: links lead somewhere, commands exist and compose, and options have the names that are written."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts import docs_site
from spec_lab.cli.commands import SHORT, TRAIN, parser, trainings
from spec_lab.cli.config_checks import check_options
from spec_lab.cli.explain.reference import ALIASES, EXPERIMENT, METRICS, canonical
from spec_lab.cli.explain.terminal import reference
from spec_lab.cli.main import check_overrides, conf, quote_prompt, replace_flags
from spec_lab.cli.subcommands import COMMANDS
from tests import documents
from tests.documents import ROOT, Command

FILES = ("md", "json", "jsonl", "csv", "py", "yaml", "yml", "gguf", "parquet", "png", "html", "txt", "toml", "ipynb")
FURTHER = {"constraint.threads"}
"""Options that no config lists: engines of constraints have them, +constraint.threads=2."""
known = cache(reference)


def texts() -> list[tuple[Path, str]]:
    return [(file, file.read_text(encoding="utf-8")) for file in documents.documents()]


def all_commands() -> list[Command]:
    return [command for file, text in texts() for command in documents.commands(file, text)]


def hydra_arguments(command: Command) -> list[str] | None:
    """The options of a run; None of a sub-command, another program, or a command with options of one's own."""
    given = documents.of_spec_lab(command)
    if given is None or (given and given[0] in COMMANDS):
        return None
    if given[:1] == [TRAIN] and (len(given) < 2 or given[1] not in trainings()):
        return None
    if given and given[0] in SHORT:
        given = SHORT[given[0]](given)
    given = [word for before, word in zip(["", *given], given, strict=False) if "--cfg" not in (before, word)]
    if "--config-dir" in given or any(word.startswith(("hydra.searchpath", "-sc")) for word in given):
        return None
    return [quote_prompt(word) for word in given if not documents.is_placeholder(word)]


RUNS = {str(command): arguments for command in all_commands() if (arguments := hydra_arguments(command)) is not None}


def test_every_link_leads_somewhere():
    broken = []
    for file, text in texts():
        for link in docs_site.links(text):
            target = file
            if link["target"]:
                path = docs_site.linked(file.relative_to(ROOT).as_posix(), link["target"])
                if path is None:
                    broken.append(f"{file.relative_to(ROOT)}: {link['target']}")
                    continue
                target = ROOT / path
            if (
                link["anchor"]
                and target.suffix == ".md"
                and link["anchor"] not in documents.anchors(target.read_text())
            ):
                broken.append(f"{file.relative_to(ROOT)}: {link['target']}#{link['anchor']}")
    assert broken == []


def test_blocks_inside_lists_are_indented_by_four_spaces():
    """Python-Markdown, which renders the site, ends a list at a block that is indented by less."""
    fences = [(file, fence) for file, text in texts() for fence in re.findall(r"^( +)(?:```|~~~)", text, re.MULTILINE)]
    assert [str(file.relative_to(ROOT)) for file, indent in fences if len(indent) % 4] == [] != fences


def test_sub_commands_parse():
    count = 0
    for command in all_commands():
        given = documents.of_spec_lab(command)
        if given and given[0].isidentifier():
            assert given[0] in (*COMMANDS, *SHORT), command
            try:
                parser()[0].parse_args([word for word in given if word != "..."])
            except SystemExit:
                if not any(word.isupper() for word in given[1:]):
                    pytest.fail(str(command))
            count += 1
    assert count > 10


def test_modules_and_scripts_exist_with_their_options():
    count = 0
    for command in all_commands():
        words = command.words
        if documents.of_spec_lab(command) is not None or not words[0].endswith(("python", "python3")) or len(words) < 2:
            continue
        if words[1] == "-m" and words[2].startswith(("experiments.", "scripts.")):
            path = ROOT / f"{words[2].replace('.', '/')}.py"
        elif words[1].startswith(("experiments/", "scripts/", "notebooks/")):
            path = ROOT / words[1]
        else:
            continue
        assert path.is_file(), command
        beside = [*path.parent.rglob("*.py"), *path.parent.parent.glob("*.py")]  # what it imports its options from
        sources = "".join(file.read_text() for file in beside)
        for word in (word for word in words[2:] if word.startswith("--")):
            assert f'"{word}"' in sources or f'"{word[2:]}"' in sources, f"{command}: {word}"
        count += 1
    assert count > 10


def options_of(name: str) -> set[str]:
    return {option.name for option in known().group(name).options} | (
        {"basic", "joblib"} if name == "hydra/launcher" else set()
    )


def is_known(name: str) -> bool:
    """Whether an option exists in some part; of an option that is a mapping or list, also what stands in it."""
    keys = {path for path, _, _ in known().each_key()}
    keys |= FURTHER | {
        key.name for option in known().group(EXPERIMENT).options for key in option.keys if "." in key.name
    }
    name = canonical(re.sub(r"\[\d+\]", "", name))
    parts = name.split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1)) or any(
        key.startswith(f"{name}.") for key in keys
    )


def wrong_option(written: str) -> str:
    """Why an override names nothing; empty if it is right, or a value of Hydra's."""
    name, equals, value = written.lstrip("+~").partition("=")
    group = name.partition("@")[0]
    if known().group(group) is not None and equals:
        lacking = [
            word
            for word in value.split(",")
            if re.fullmatch(r"[a-z][a-z0-9_]*", word) and word not in options_of(group)
        ]
        return f"{group} has no option {', '.join(lacking)}" if lacking else ""
    if name.startswith("hydra.") or known().group(group) is not None or is_known(name):
        return ""
    return f"there is no option {name}"


def test_runs_name_groups_and_options_that_exist():
    assert len(RUNS) > 60
    wrong = {
        name: why
        for name, given in RUNS.items()
        for option in given
        if option[0] != "-" and (why := wrong_option(option))
    }
    assert wrong == {}


def test_a_wrong_option_is_found():
    assert wrong_option("proposer=medusa2") and wrong_option("proposer.dept=3") and wrong_option("max_tokens=3")
    assert wrong_option("+proposer@arms.x=absent") and wrong_option("verifier=token,absent")
    for right in ("arms.x.depth=3", "proposer.costs={a: 1}", "+peers.x.path=a", "verifier=token,match", "seed=1,2"):
        assert not wrong_option(right), right


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_every_run_composes(name):
    given = replace_flags([word for word in RUNS[name] if word not in ("--multirun", "-m")])
    given = [word for word in given if not word.startswith("--")]
    check_overrides(given)
    swept = OverridesParser.create().parse_overrides(given)
    lists = [override.sweep_string_iterator() if override.is_discrete_sweep() else None for override in swept]
    values = [[*choices] if choices is not None else [None] for choices in lists]
    for job in range(max(map(len, values), default=1)):
        chosen = [
            text if choices[0] is None else f"{override.input_line.partition('=')[0]}={choices[job % len(choices)]}"
            for text, override, choices in zip(given, swept, values, strict=True)
        ]
        chosen = [text for text, override in zip(chosen, swept, strict=True) if not override.is_interval_sweep()]
        with initialize_config_dir(conf(), version_base="1.3"):
            config = compose("config", chosen)
        check_options(config)


def test_options_in_the_text_exist():
    heads = {group.name for group in known().groups if "/" not in group.name} | {*ALIASES} - {"parts", "inner"}
    heads.remove(METRICS)  # the names below it are a user's own
    wrong = []
    for file, text in texts():
        if re.search("docs/reference/(c|api/)", file.as_posix()):  # generated from the options, and from the sources
            continue
        for word in documents.inline_code(text):
            plain = word.strip("'\",;:()")
            name, equals, _ = plain.lstrip("+~").partition("=")
            if not re.fullmatch(r"[a-z_]+(@[a-z_.]+)?(\.[a-zA-Z_0-9]+)*", name) or name.rpartition(".")[2] in FILES:
                continue
            head = name.partition("@")[0].partition(".")[0]
            if (
                head in heads
                and (equals or "." in name)
                and not name.endswith(".NAME")
                and (why := wrong_option(plain))
            ):
                wrong.append(f"{file.relative_to(ROOT)}: `{word}`: {why}")
    assert wrong == []


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("replay.md", "bounds.md", "bounds.md"), ("replay.md", "../README.md", "index.md"),
        ("replay.md", "../experiments/projection", "experiments/projection/README.md"),
        ("reference/commands.md", "../../spec_lab/verify/token.py#L3", "../spec_lab/verify/token.py.md#L3"),
        ("replay.md", "../conf/verifier", "conf/verifier/index.md"),
        ("replay.md", "../notebooks/first_steps.ipynb", "notebooks/first_steps.ipynb"),
        ("experiments/projection/README.md", "../../docs/replay.md#reading", "../../replay.md#reading"),
        ("experiments/projection/README.md", "published.png", "published.png"),
        ("replay.md", "https://arxiv.org/abs/2402.05109", "https://arxiv.org/abs/2402.05109"),
        ("replay.md", "#reading", "#reading"), ("replay.md", "absent.md", "absent.md"),
    ],
)  # fmt: skip
def test_links_that_leave_the_documents_lead_to_pages_of_the_site(page, link, on_the_site):
    made = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    text = "[a `code`]({0}), `[b]({1})`\n\n```\n[c]({1})\n```\n"
    assert docs_site.on_page_markdown(text.format(link, link), made) == text.format(on_the_site, link)


def test_source_files_and_folders_are_shown_as_pages():
    shown = docs_site.page_of("spec_lab/verify/token.py")
    assert shown.startswith("# spec_lab/verify/token.py\n\n```python\n") and "class Token(Verifier):" in shown
    assert "- `token.yaml`\n" in docs_site.page_of("conf/verifier")


def test_a_repeated_heading_and_code_in_a_heading_have_the_anchors_of_a_forge():
    text = "# A `b.c` & d\n## Two\n```sh\n# no heading\n```\n## Two\n### [Link](x.md), 3.1\n"
    assert documents.anchors(text) == {"a-bc--d", "two", "two-1", "link-31"}


def test_commands_are_split_as_a_shell_does():
    text = "```sh\nA=1 python -m spec_lab 'a=\"x;y\"' \\\n  b=2 && spec-lab state DIR  # c; d\ncat x | python3 -\n```\n"
    commands = [command.words for command in documents.commands(ROOT / "README.md", text)]
    assert commands == [("python", "-m", "spec_lab", 'a="x;y"', "b=2"), ("spec-lab", "state", "DIR"), ("python3", "-")]
