"""Declarations of options: which values they have, and what is said of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack

import pytest
from omegaconf import OmegaConf

from spec_lab.core.options import (
    MAX_CHARACTERS,
    MAX_STRINGS,
    Folder,
    Form,
    Number,
    OneOf,
    Share,
    Texts,
    Whole,
    WrongOption,
    accept,
    bounds,
    check_fields,
    checked,
    hints,
    whole,
    words,
)
from spec_lab.decode.proposer import Proposer
from spec_lab.tasks.lab import MAX_NODES, Lab
from tests.labs import lab, settings

HUGE = 10**5000
Size = Annotated[int, Whole(1, 64)]
TABLE = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("hint", "fitting", "other", "stated"),
    [
        (int, [0, -3, HUGE], [1.0, True, "1", None], "a whole number"),
        (Size, [1, 64], [0, 65, 1.5, True, "many", HUGE, None], "a whole number from 1 to 64"),
        (Size | None, [1, None], [0, "null"], "a whole number from 1 to 64 or null"),
        (Annotated[int, Whole(0)], [0, HUGE], [-1], "a whole number of 0 or more"),
        (float, [1, 2.5, -1e9], [float("inf"), float("nan"), HUGE, True, "1"], "a number"),
        (Share, [0, 1, 0.5], [-0.1, 1.1, float("nan"), "half", None], "a number from 0 to 1"),
        (Annotated[float, Number(0.01)], [0.01, 1e9], [0, float("inf")], "a number of 0.01 or more"),
        (Annotated[float, Number(0, 1, above=True)], [1, 1e-9], [0, 2], "a number above 0 and at most 1"),
        (bool, [True, False], [1, "yes", None], "true or false"),
        (str, ["", "a"], [3, None, ["a"]], "a text"),
        (Annotated[str, Folder()], ["a.b", "a" * 100], ["", "a/b", "..", "a" * 101, "a\n", 3], "a text of 1 to 100"),
        (Literal["a", "b"], ["a"], ["c", 1, None], "one of a, b"),
        (Literal[32, 64] | None, [32, None], [True, "32", 48], "one of 32, 64, null"),
        (Annotated[str, OneOf(TABLE)], ["b"], ["c", None, 1], "one of a, b"),
        (Sequence[int], [[], [1, 2], (3,), OmegaConf.create([4])], [1, "12", {}], "a list of whole numbers"),
        (Mapping[str, int] | str, [{}, {"a": 1}, "x"], [3, [1]], "a mapping of names to whole numbers or a text"),
        (Texts, [[], ["a"]], ["a", [""], ["\ud800"], ["a"] * (MAX_STRINGS + 1), ["a" * (MAX_CHARACTERS + 1)]],
         "a list of"),
        (Annotated[int, Whole(0)] | str | None, [0, "a", None], [-1, 0.5],
         "a whole number of 0 or more, a text, or null"),
        (Annotated[str, Form("a time", r"\d+ us")], ["3 us"], ["3", 3], "a time, not"),
        (Lab | None, [None, 3, "anything that only Python has"], [], ""),
    ],
)  # fmt: skip
def test_a_value_fits_its_declaration_or_is_refused_by_name(hint, fitting, other, stated):
    for value in fitting:
        accept("x", value, hint)
    for value in other:
        with pytest.raises(WrongOption) as error:
            accept("x", value, hint)
        assert str(error.value).startswith(f"x must be {stated}") and len(str(error.value)) < 300


def test_a_value_inside_a_list_or_mapping_is_named():
    with pytest.raises(WrongOption, match=r"^x\[1\] must be a whole number from 1 to 64, not 65$"):
        accept("x", [1, 65], Sequence[Size])
    with pytest.raises(WrongOption, match=r"^x\.heads\[0\] must be a whole number from 1 to 64, not 'a'$"):
        accept("x", {"heads": ["a"]}, Mapping[str, Sequence[Size]] | None)


def test_types_are_stated_for_the_reference_and_bounds_for_comments():
    assert words(Size | None, 0) == "int from 1 to 64 or null" and words(Literal["a", "b"], 0) == "a or b"
    assert words(Sequence[Literal["a", "b"]], 0) == "list of a or b" and words(Any, 0) == ""
    assert (bounds(Size, "levels"), bounds(Share, "part"), bounds(bool, "whether")) == ("from 1 to 64", "", "")
    assert bounds(Literal["a", "b"], "a: one; b: two") == "" and bounds(Literal["a", "b"], "how: by c") == "a, b"


class Options(TypedDict, total=False):
    width: Size


@dataclass(frozen=True)
class Part:
    depth: Size
    kind: ClassVar[str] = "part"

    def __post_init__(self) -> None:
        check_fields(self)


@checked
def load(target: "Unknown", depth: Size = 3, **options: Unpack[Options]) -> int:  # noqa: F821
    return depth


def test_functions_and_dataclasses_are_checked_for_callers_in_python():
    assert load(None, 64, width=2) == 64 and Part(1).depth == 1
    assert hints(load) == {"target": Any, "depth": Size, "width": Size} and hints(Part) == {"depth": Size}
    for make, name in (
        (lambda: load(None, 0), "depth"),
        (lambda: load(1, width=65), "width"),
        (lambda: Part(0), "depth"),
    ):
        with pytest.raises(WrongOption, match=f"^{name} must be a whole number from 1 to 64"):
            make()


def test_a_whole_number_of_a_file_may_have_an_upper_bound():
    assert whole("x", 3, maximum=3) == 3 and whole("x", HUGE) == HUGE
    with pytest.raises(ValueError, match="x .*at most 3.* 4"):
        whole("x", 4, otherwise=", or null", maximum=3)
    with pytest.raises(ValueError, match="x .*at most 3.* 16610 bits"):
        whole("x", HUGE, maximum=3)


def test_the_nodes_of_a_step_are_bounded(tmp_path):
    made = lab()
    wide = replace(made, proposer=Many())
    assert isinstance(wide, Lab)
    wide.arms(replace(settings(tmp_path), batch_size=MAX_NODES // Many.nodes))
    with pytest.raises(ValueError, match="batch_size=17 .*1024 nodes"):
        wide.arms(replace(settings(tmp_path), batch_size=17))


class Many(Proposer):
    name, drawn, nodes = "many", "deterministic", 1024

    def propose(self, batch):
        raise AssertionError("nothing is decoded")


def test_a_former_value_is_refused_by_its_name_of_today():
    with pytest.raises(WrongOption, match="drawn must be .* not 'point': 'point' is now called 'deterministic'"):
        accept("drawn", "point", Literal["iid", "deterministic"])
    with pytest.raises(WrongOption, match="one of iid, other, not 'point'$"):
        accept("drawn", "point", Literal["iid", "other"])
