"""Loading constraints from configs."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from spec_lab.constrain import ConstraintError, load
from spec_lab.constrain.applied import AppliedConstraint
from spec_lab.constrain.protocol import ConstraintState, packed_mask, unpack
from spec_lab.core.options import WrongOption
from spec_lab.core.request import Request
from tests.constrain.parts import A, B, bundled, toy

PLACE = dict(placement="both", draft_budget=None, fast_forward=True, async_masks=False)


def first(constraint, source: str = "") -> list[int]:
    state = constraint.start(Request(0, "r", (1,), constraint=source))
    return unpack(state.mask(), toy().size).nonzero()[0].tolist()


def test_without_a_source_each_request_has_its_own():
    for made, source in (
        (load.regex(toy()), "b+"),
        (load.choice(toy()), '["b", "ba"]'),
        (load.lark(toy()), 'start: "b" "a"'),
    ):
        assert first(made, source) == [B]
        with pytest.raises(ConstraintError, match="r"):
            made.start(Request(0, "r", (1,)))


def test_a_requests_own_source_overrides_the_constraint_s():
    made = load.regex(toy(), "a")
    assert first(made) == [A] and first(made, "b") == [B]


def steered(vocabulary):
    return lambda request: None


def test_text_options_are_combined_with_the_constraint():
    assert load.combine(None, None, PLACE) is None
    alone = load.combine(load.regex(toy(), "a+"), toy(), PLACE)
    assert isinstance(alone, AppliedConstraint) and alone.constraint.name == "regex"
    whole = load.regex(toy(), "a+", prompt=True)
    all_of_them = load.combine(whole, toy(), PLACE, healing=True, banned=["aaa"], at_least=2)
    assert all_of_them.constraint.name == "regex + healing + banned + min_new_tokens"
    assert all_of_them.constraint.has_actions
    with pytest.raises(ValueError, match="only one constraint"):
        load.combine(load.controller(toy(), "tests.constrain.test_load.steered"), toy(), PLACE, banned=["a"])
    with pytest.raises(ValueError, match="bytes are known"):
        load.combine(None, None, PLACE, healing=True)


def test_text_options_that_cannot_be_met_are_refused():
    for placement in ("draft", "none"):
        options = PLACE | dict(placement=placement, fast_forward=None)
        for option in (dict(healing=True), dict(banned=["a"]), dict(at_least=2)):
            with pytest.raises(ValueError, match=f"placement={placement} "):
                load.combine(load.regex(toy(), "a+", prompt=True), toy(), options, **option)
    with pytest.raises(ValueError, match="'regex' .*token_healing=false"):
        load.combine(load.regex(toy(), "a+"), toy(), PLACE, healing=True)


def test_the_default_of_forcing_follows_the_placement():
    made = load.regex(toy(), "a+")
    for placement in ("target", "draft", "both", "none"):
        applied = AppliedConstraint(made, placement, fast_forward=None)
        assert applied.fast_forward is (placement in ("target", "both"))


def test_the_facts_of_a_run_change_with_the_source_in_a_file(tmp_path):
    file, facts = tmp_path / "schema.json", []
    for most in (300, 301):
        file.write_text(json.dumps({"enum": [1], "description": "x" * most}))
        facts.append(load.json_schema(toy(), path=str(file), whitespace_flexible=False).facts)
    assert facts[0]["source_sha256"] != facts[1]["source_sha256"]


@pytest.mark.parametrize("kind", [load.json_schema, load.lark])
def test_only_regular_files_of_a_bounded_size_are_read(kind, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"\xff")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path, tmp_path / "latin", tmp_path / "none", 5, ""):
        with pytest.raises(ValueError, match=r"path"):
            kind(toy(), path=path if path in (5, "") else str(path))
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(2**40)  # a sparse file
    with pytest.raises(ValueError, match=r"path=.*huge.* 16777216 bytes"):
        kind(toy(), path=str(tmp_path / "huge"))


def test_a_schema_of_lines_allows_further_values_each_on_one_line():
    made = load.json_schema(bundled(), {"type": "array", "items": {"type": "integer"}}, lines=True)
    encode = bundled().engine.tokenize_str

    def allowed(text: str) -> bool:
        state = made.start(Request(0, "r", (1,)))
        for token in encode(text):
            if not unpack(state.mask(), bundled().size)[token]:
                return False
            state.advance(token)
        return bool(unpack(state.mask(), bundled().size)[list(bundled().ends)].any())

    assert all(allowed(text) for text in ("[1, 2]", "[1,\n2]", "[1]\n[2, 3]", "[1]\n[2,3]\n", "[\n1]\n[2]"))
    assert not any(allowed(text) for text in ("[1][2]", "[1]\n[2,\n3]", "[1]\n\n[2]", "[1]\n1", "[1]\n\n"))
    assert made.facts["kind"] == "json_schema" and made.facts["schema_options"]["lines"] is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make(vocabulary):\n    pass\n", "returned None: it must return a Constraint .*, or a"),
        ("def make(vocabulary):\n    return [1]\n", r"returned \[1\]: it must return"),
        ("def make(vocabulary):\n    return {}['lost']\n", r"raised KeyError: 'lost' \(.*:2, in make\)"),
        ("def make(vocabulary):\n    raise SystemExit(0)\n", r"raised SystemExit: 0 \(.*:2, in make\)"),
        ("def make():\n    pass\n", r"cannot be called with \(vocabulary, \*\*options\)"),
        ("def make(:\n", r"cannot be imported: SyntaxError: .* \(.*:1\)"),
        ("\nLIMIT = {}['lost']\n", r"cannot be imported: KeyError: 'lost' \(.*:2, in <module>\)"),
        ("raise SystemExit(0)\n", r"cannot be imported: SystemExit: 0 \(.*:1, in <module>\)"),
    ],
)
def test_a_function_of_the_user_s_that_makes_no_constraint_is_refused_with_the_line(tmp_path, monkeypatch, text, said):
    (tmp_path / "of_a_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    with pytest.raises(ValueError, match=f"^make=of_a_user.make {said}"):
        load.controller(toy(), "of_a_user.make")


def test_a_constraint_that_acts_on_the_output_has_no_masks_in_a_thread():
    with pytest.raises(WrongOption, match="async_masks=true is not possible: .* set async_masks=false"):
        AppliedConstraint(SimpleNamespace(name="acts", has_actions=True), async_masks=True)


def test_a_mask_that_is_not_packed_is_refused_with_its_method():
    class Booleans(ConstraintState):
        def fork(self):
            return self

        def advance(self, token): ...

        def mask(self):
            return np.ones(5, dtype=bool)

    message = r"Booleans\.mask\(\) must return packed bits \[1\] .*, not bool \[5\] \(.*test_load\.py:\d+\)"
    with pytest.raises(TypeError, match=message):
        packed_mask(Booleans(), 5)
