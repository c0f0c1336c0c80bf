"""Config files are read with their comments."""

from typing import Annotated

import pytest

from spec_lab.cli.explain.comments import Chosen, Setting, read, write
from spec_lab.cli.explain.sources import Argument
from spec_lab.core.options import OneOf, Whole

TEXT = """\
# @package _global_
# What it is,
# in two lines.
defaults:
  - base                   # same group
  - override /proposer: none
  - /verifier@verifiers.one: token   # a further one
  - _self_

_target_: package.Class.load
plain: 1                   # a number
quoted: "# no comment"     # a text
empty: ""                  # nothing
null_one:                  # without a value
uncommented: 2
long: abc                  # the first line
                           # and the second
nested:                    # not shown
  deep: {a: [1, 2], b: x}  # a mapping
  none: {}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(TEXT)
    return path


def test_comments_belong_to_the_keys_before_them(file):
    loaded = read(file)
    assert loaded.head == "What it is, in two lines."
    assert loaded.target == "package.Class.load"
    assert loaded.settings == (
        Setting("plain", "1", "a number"),
        Setting("quoted", '"# no comment"', "a text"),
        Setting("empty", '""', "nothing"),
        Setting("null_one", "", "without a value"),
        Setting("uncommented", "2", ""),
        Setting("long", "abc", "the first line and the second"),
        Setting("nested.deep", "{a: [1, 2], b: x}", "a mapping"),
        Setting("nested.none", "{}", ""),
    )


def test_defaults_are_read_with_their_comments(file):
    assert read(file).defaults == (
        Chosen("", "base", "same group"),
        Chosen("proposer", "none", ""),
        Chosen("verifier@verifiers.one", "token", "a further one"),
    )


def test_mappings_in_flow_style_are_taken_apart_on_request(file):
    flat = {setting.name: (setting.value, setting.comment) for setting in read(file, flat=True).settings}
    assert flat["nested.deep.a"] == ("[1, 2]", "") and flat["nested.deep.b"] == ("x", "a mapping")


@pytest.mark.parametrize(
    ("argument", "value", "given", "comment"),
    [
        (Argument(str, "how: a, b; unless nodes: c"), "a", {"nodes"}, "how: a, b"),
        (Argument(str, "how: a, b; unless nodes: c"), "a", {"tree"}, "how: a, b; c"),
        (Argument(str | None, "a file; None: from the hub; here"), "???", (), "a file; here"),
        (Argument(str | None, "a file; None: from the hub"), "null", (), "a file; null: from the hub"),
        (Argument(Annotated[str, OneOf(("this", "that"))], "which one"), "this", (), "which one"),
        (Argument(Annotated[str, OneOf(("this", "that"))], "which one"), "that", (), "which one; this, that"),
    ],
)
def test_a_comment_states_what_its_file_accepts(argument, value, given, comment):
    assert argument.comment(value, given, "this") == comment


@pytest.mark.parametrize(("text", "message"), [("- a\n- b\n", "must hold a mapping"), ("a: [\n", "not readable YAML")])
def test_other_files_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "two.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_comments_are_written_from_declarations(file):
    options = {
        "plain": Argument(Annotated[int, Whole(1, 9)], "``how`` many; None: none. Details."),
        "long": Argument(str, " ".join(["words"] * 20)), "nested": Argument(),
        "uncommented": Argument(int, "now it has one"),
    }  # fmt: skip
    file.write_text(TEXT.replace("# a number", "# an old text; here: a note"))
    lines = write(file, options).splitlines()
    assert "plain: 1                   # how many; null: none; from 1 to 9; here: a note" in lines
    assert "uncommented: 2             # now it has one" in lines and 'quoted: "# no comment"     # a text' in lines
    start = lines.index("long: abc                  # " + " ".join(["words"] * 15))
    assert lines[start + 1] == " " * 27 + "# " + " ".join(["words"] * 5) and lines[start + 2].startswith("nested:")
    file.write_text("\n".join(lines) + "\n")
    assert write(file, options).splitlines() == lines


def test_an_empty_file_has_no_keys(tmp_path):
    (tmp_path / "none.yaml").write_text("# nothing\n")
    assert read(tmp_path / "none.yaml").settings == ()
