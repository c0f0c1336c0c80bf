"""``--help``: one page for everything, and what given options mean."""

from spec_lab.cli import help as pages
from spec_lab.cli.commands import SHORT
from spec_lab.cli.config_checks import groups
from spec_lab.cli.main import check_composition, check_overrides
from spec_lab.cli.subcommands import COMMANDS


def test_the_page_has_all_commands_and_groups_in_80_columns():
    lines = list(pages.page())
    assert max(map(len, lines)) <= 80
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {*COMMANDS, *SHORT, *groups()} <= named


def test_its_examples_compose():
    for arguments, _ in pages.EXAMPLES:
        words = arguments.split()
        runs = SHORT[words[0]](words) if words[0] in SHORT else words
        check_overrides(runs)
        check_composition(runs)


def test_help_after_options_explains_them(cli):
    code, output, _ = cli("proposer=ngram", "--help")
    assert code == 0 and "proposer.max_ngram" in output and "proposer.tree" not in output
    assert cli("help", "proposer=ngram") == (0, output, "")
    code, _, errors = cli("proposer=ngrm", "--help")
    assert code == 1 and "did you mean proposer=ngram" in errors
