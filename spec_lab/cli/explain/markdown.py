"""docs/reference/configuration.md and commands.md: everything on one page each."""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator, Mapping, Sequence

from spec_lab.cli.explain.reference import EXPERIMENT, ConfigGroup, ConfigKey, ConfigOption, Reference

GENERATED = "<!-- Generated: python scripts/render_reference.py -->"


def configuration(reference: Reference) -> str:
    """Return the page that explains every option."""
    return "\n".join(_configuration(reference)) + "\n"


def _configuration(reference: Reference) -> Iterator[str]:
    yield from (GENERATED, "", "# Configuration", "")
    yield (
        "Options are given as `OPTION=VALUE`; of each group one part is chosen as `GROUP=PART`, whose own options are "
        "`GROUP.OPTION=VALUE`. A default `???` must be given; `${...}` is the value of another option. "
        "`spec-lab explain NAME` prints the same on a terminal, and `python -m spec_lab --cfg job` what would run. "
        "The files are in `conf/`: a part is one file, `conf/GROUP/PART.yaml`."
    )
    yield from ("", "| group | what it chooses | default |", "|---|---|---|")
    for group in reference.groups:
        default = code(group.default) if group.default else ""
        yield f"| [{code(group.name)}](#{slug(group.name)}) | {text(group.summary)} | {default} |"
    yield from ("", "## Options of every run", "")
    yield from _keys(reference.top)
    for group in reference.groups:
        yield from _group(group)


def _group(group: ConfigGroup) -> Iterator[str]:
    default = f" Default: {code(f'{group.name}={group.default}')}." if group.default else ""
    yield from ("", f"## {group.name}", "", f"{sentence(group.summary)}{default}", "", "| | |", "|---|---|")
    for option in group.options:
        yield f"| {_linked(option)} | {text(option.summary)} |"
    for option in (documented for documented in group.options if documented.keys):
        plus = "+" if group.name == EXPERIMENT else ""
        yield from ("", f"### {plus}{group.name}={option.name}", "", sentence(option.summary), "")
        yield from _keys(option)


def _linked(option: ConfigOption) -> str:
    return f"[{code(option.name)}](#{slug(f'{option.group}={option.name}')})" if option.keys else code(option.name)


def _keys(option: ConfigOption) -> Iterator[str]:
    """Yield a table of an option's keys."""
    sets = option.group == EXPERIMENT
    yield from ("| sets | to | meaning |", "|---|---|---|") if sets else (
        "| option | type | default | meaning |", "|---|---|---|---|",
    )  # fmt: skip
    for key in option.keys:
        name = code(option.path(key))
        if sets:
            yield f"| {name} | {_value(key)} | {text(key.meaning)} |"
        else:
            yield f"| {name} | {text(key.type)} | {code(key.default)} | {text(key.meaning)} |"


def _value(key: ConfigKey) -> str:
    return f"{code(key.default)} (a sweep)" if key.type == "sweep" else code(key.default)


def commands(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the page that explains every sub-command."""
    return "\n".join(_commands(parsers)) + "\n"


def _commands(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    yield from (GENERATED, "", "# Commands", "")
    yield (
        "`spec-lab` is the same command as `python -m spec_lab`. Without a sub-command it runs what its options say "
        "([Configuration](configuration.md)):"
    )
    yield from ("", "```sh", "spec-lab OPTION=VALUE ...              # a run")
    yield from ("spec-lab +experiment=NAME OPTION=VALUE ...", "spec-lab --multirun OPTION=VALUE,VALUE # a sweep")
    yield from ("spec-lab --cfg job OPTION=VALUE ...    # prints the configuration, and runs nothing", "```", "")
    yield (
        "`-v` is short for `verbose=true`; `--version` prints the version; `--config-dir DIR` adds options of your "
        "own; `--hydra-help` explains completion and plugins. Sub-commands read runs and prepare files:"
    )
    yield from ("", "| | |", "|---|---|")
    for name, parser in parsers.items():
        yield f"| [{code(f'spec-lab {name}')}](#spec-lab-{name}) | {text(parser.description or '')} |"
    for name, parser in parsers.items():
        yield from ("", f"## spec-lab {name}", "", sentence(parser.description or ""), "")
        yield from ("| argument | meaning |", "|---|---|")
        for action in _arguments(parser):
            yield f"| {_argument(action)} | {text(action.help or '')}{_choices(action)} |"


def _arguments(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return the arguments of a parser, which argparse lists nowhere else; positional ones first."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return sorted(actions, key=lambda action: bool(action.option_strings))


def _argument(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    value += " ..." if action.nargs in ("+", "*", argparse.REMAINDER) else ""
    required = " (required)" if action.required and action.option_strings else ""
    return code(" ".join(filter(None, (", ".join(action.option_strings), value)))) + required


def _choices(action: argparse.Action) -> str:
    return f"; {', '.join(map(str, action.choices))}" if action.choices else ""


def slug(heading: str) -> str:
    """Return the anchor that a forge gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def code(value: str) -> str:
    """Return a value as code, also in a table."""
    if re.search(r"[|`]", value):
        return f"<code>{html.escape(value, quote=False).replace('|', '&#124;').replace('`', '&#96;')}</code>"
    return f"`{value}`"


def text(value: str) -> str:
    """Return plain text as Markdown, also in a table; numbers of papers are links."""
    shown = re.sub(r"[<|$*`\[]", lambda character: f"&#{ord(character[0])};", value)
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", shown)


def sentence(value: str) -> str:
    """Return plain text as a sentence in Markdown."""
    return text(value[:1].upper() + value[1:] + ("" if value[-1:] in ("", ".", "?", "!") else "."))
