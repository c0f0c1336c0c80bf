"""Contracts and pages of the API are read from source files."""

from io import StringIO

import pytest
from rich.console import Console

from spec_lab.cli.declarations import package_sources
from spec_lab.cli.explain import api_page, contracts
from spec_lab.cli.explain.api import describe, sections
from spec_lab.cli.explain.sources import Sources
from spec_lab.cli.explain.terminal import show_contract

SOURCE = '''
"""A module."""

LIMITS = {"a": (int, "the first"), "b": (str, "the second")}
"""What there is."""
HIDDEN = 1


class Part:
    """A part."""

    @default
    def name(self) -> str:
        """Its name."""
        return "part"


class Mine(Part):
    """A part with members.

    Args:
        depth: levels ``[n]``.
    """

    depth: int = 3
    open: bool

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """Return a draft.

        Raises:
            ValueError: none
                is possible.
        """

    def _own(self): ...
'''


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "mine_for_docs.py").write_text(SOURCE)
    return Sources([tmp_path])


def test_a_class_has_its_members_with_defaults_and_those_of_its_bases(sources):
    mine = describe(sources, "mine_for_docs.Mine", inherited=True)
    assert mine.signature == "class Mine(Part)"
    assert {member.signature: member.required for member in mine.members} == {
        "name: str = 'part'": False, "open: bool": True, "propose(batch: Batch) -> Draft": True,
    }  # fmt: skip


def test_a_module_has_what_it_documents(sources):
    module = describe(sources, "mine_for_docs")
    assert [entry.name for entry in module.members] == ["LIMITS", "Part", "Mine"]
    assert module.members[0].rows == (("a", "int", "the first"), ("b", "str", "the second"))


def test_what_does_not_exist_is_refused(sources):
    with pytest.raises(ValueError, match="there is no mine_for_docs.Other"):
        describe(sources, "mine_for_docs.Other")


def test_a_docstring_is_split_into_sections():
    text = "First\nline.\n\n- a\n  b\n- c\n\nArgs:\n    x: one\n        two\n    y: three\nReturns:\n    A\n    b."
    assert [*sections(text)] == [
        ("", ["First line."]), ("", ["- a b", "- c"]), ("Args", ["x: one two", "y: three"]), ("Returns", ["A b."]),
    ]  # fmt: skip


def test_a_page_is_rewritten_between_its_comments(sources):
    page = "# P\n<!-- ::: mine_for_docs.Part -->\nold\n<!-- end -->\nkept\n"
    written = api_page.page(page, sources)
    assert "old" not in written and written.endswith("kept\n") and "- `name: str = 'part'`" in written
    assert api_page.page(written, sources) == written
    assert "- `open: bool` (no default)" in api_page.page(page.replace("Part", "Mine"), sources)


def shown(name: str) -> str:
    console = Console(file=StringIO(), width=100, markup=False)
    show_contract(name, console)
    return console.file.getvalue()


@pytest.mark.parametrize("contract", contracts.CONTRACTS, ids=lambda contract: contract.name)
def test_every_contract_is_explained(contract):
    assert contract.example in " ".join(shown(contract.name).split())
    for path in contract.further:
        assert describe(package_sources(), path).docstring


def test_a_contract_states_members_defaults_and_shapes():
    text = shown("proposer")
    assert text.index("Without a default") < text.index("propose(batch: Batch) -> Draft") < text.index("With a default")
    assert "requires: Requires = Requires()" in text
    assert "token [n]" in " ".join(shown("spec_lab.propose.expansion.Expand").split())


def test_an_unknown_contract_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="there is no contract propser: the parts are proposer, drafter, verifier"):
        shown("propser")
