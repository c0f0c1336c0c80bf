"""The pages of the reference are those of the configs and of argparse."""

import argparse
import re

import pytest

from scripts.render_reference import pages
from spec_lab.cli.commands import SHORT
from spec_lab.cli.explain import markdown
from spec_lab.cli.subcommands import COMMANDS


@pytest.fixture(scope="module")
def written():
    return pages()


def test_the_pages_are_current(written):
    for file, text in written.items():
        assert file.read_text() == text, "run python scripts/render_reference.py"


def test_every_link_has_a_heading(written):
    for text in written.values():
        headings = {markdown.slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert {*re.findall(r"\]\(#([^)]*)\)", text)} <= headings


def test_every_command_has_a_section(written):
    text = next(text for file, text in written.items() if file.name == "commands.md")
    assert re.findall(r"^## spec-lab ([\w-]+)$", text, re.MULTILINE) == [*COMMANDS, *SHORT]


def test_values_do_not_end_a_cell_of_a_table():
    assert markdown.code("a|b") == "<code>a&#124;b</code>" and markdown.code("a") == "`a`"
    assert markdown.text("a|b <c> 2402.05109") == "a&#124;b &#60;c> [2402.05109](https://arxiv.org/abs/2402.05109)"


def test_arguments_are_listed_with_their_values():
    parser = argparse.ArgumentParser(description="Do it.")
    parser.add_argument("--mode", choices=("a", "b"), required=True, help="how")
    parser.add_argument("files", nargs="+", metavar="FILE", help="which")
    parser.add_argument("-f", "--force", action="store_true", help="whether")
    lines = markdown.commands({"do": parser}).splitlines()
    assert lines[-3:] == [
        "| `FILE ...` | which |", "| `--mode MODE` (required) | how; a, b |", "| `-f, --force` | whether |",
    ]  # fmt: skip
