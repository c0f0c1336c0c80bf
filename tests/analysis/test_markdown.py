"""Results and tables as Markdown."""

import pytest

from spec_lab.analysis import markdown
from spec_lab.results.result import Cell, DataTable, Result, Section

SHOWN = DataTable(
    [("arm", False), ("speed-up", True), ("overhead", True)],
    [[Cell("draft_chain"), Cell("1.50", 1.5, "[1.40, 1.60]"), Cell("3%", 3)]],
    more=("overhead",),
    meanings={"speed-up": "Over the baseline.", "overhead": "Outside of modules."},
)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("draft_chain, depth=2", "draft_chain, depth=2"),
        ("1.50 [1.40, 1.60]", "1.50 [1.40, 1.60]"),
        ("a|b", r"a\|b"),
        ("<script>", r"\<script>"),
        ("*a* `b` ~~c~~ _d_", r"\*a\* \`b\` \~\~c\~\~ \_d\_"),
        ("![x](http://a)", r"![x]\(http://a)"),
        ("# no\nheading", r"\# no heading"),
        ("1. foo", r"1\. foo"),
        ("12) foo", r"12\) foo"),
        ("R&D &lt;b&gt; &#60;", r"R&D \&lt;b\&gt; \&#60;"),
        ("\x1b[31m", "\u241b[31m"),
    ],
)
def test_texts_are_shown_as_they_are(text, written):
    assert markdown.escaped(text) == written


def test_a_table_has_intervals_and_leaves_out_the_columns_of_a_wide_terminal():
    assert markdown.table(SHOWN).splitlines() == [
        "| arm | speed-up |", "| --- | ---: |", "| draft_chain | 1.50 [1.40, 1.60] |",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "fence"), [("a", "```"), ("```x", "````")])
def test_a_block_of_code_ends_where_it_should(text, fence):
    assert markdown.code(text) == f"{fence}\n{text}\n{fence}"


def test_a_page_has_table_verdict_notes_failures_command_and_facts():
    wide = DataTable([("x", True)], [[Cell("1")]], more=("x",))
    sections = [
        Section("Arms", table=SHOWN, notes=["Equal outputs."]), Section("Figures", how="drawn"),
        Section("Wide", "with -v", wide), Section("Checked", failures=["a pair"]),
    ]  # fmt: skip
    result = Result("first", "greedy, 8 prompts", sections, ["Verdict: usable."], ["Left out: x"])
    page = markdown.document(result, {"seed": 0, "GPUs": ""}, ["prompts.path=my file.jsonl"])
    blocks = page.split("\n\n")
    assert blocks[:4] == ["# first", "greedy, 8 prompts", "**Left out: x**", "## Arms"]
    assert blocks[5:8] == ["Verdict: usable.", "Equal outputs.", "Over the baseline."]
    assert blocks[8:10] == ["## Checked", "**FAILS: a pair**"]
    assert "```sh\nspec-lab 'prompts.path=my file.jsonl'\n```" in page and "| seed | 0 |" in page and "GPUs" not in page
