"""Every option of every config has the values that its declaration allows; others are refused by the option's name."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.build import conf
from spec_lab.cli.declarations import SETTINGS, check_values, declared, package_sources
from spec_lab.cli.explain import comments
from spec_lab.cli.explain.reference import target_of
from spec_lab.core import options
from spec_lab.core.options import Number, OneOf, Whole, WrongOption, words


def parts():
    """Each part of conf/: its group, what it builds and its declared options; settings have no group."""
    sources, named = package_sources(), {("", SETTINGS)}
    for group in sorted(path for path in Path(conf()).iterdir() if path.is_dir() and path.name != "hydra"):
        files = {path.stem: comments.read(path, flat=group.name == "experiment") for path in group.glob("*.yaml")}
        for name, file in files.items():
            if group.name != "experiment":
                named.add((group.name, target_of(name, files)))
            else:
                named |= {
                    (key.name.removesuffix("._target_"), key.value) for key in file.settings if "_target_" in key.name
                }
    return [(group, target, declared(sources, group, target)[0]) for group, target in sorted(named)]


PARTS = parts()
DECLARED = [
    pytest.param(group, target, name, argument.hint, id=f"{target.removeprefix('spec_lab.')}.{name}")
    for group, target, arguments in PARTS
    for name, argument in arguments.items()
    if words(argument.hint) and Any not in options._alternatives(argument.hint)
]


def outside(hint):
    """Values that a declaration excludes."""
    alternatives = [options._parts(alternative) for alternative in options._alternatives(hint)]
    kinds = {kind for kind, _, _ in alternatives}
    numbers = [bound for _, _, bounds in alternatives for bound in bounds if isinstance(bound, Whole | Number)]
    yield from (bound.least - 1 for bound in numbers)
    yield from (bound.least for bound in numbers if getattr(bound, "above", False))
    yield from (bound.most + 1 for bound in numbers if bound.most not in (None, float("inf")))
    named = any(isinstance(bound, OneOf) for _, _, bounds in alternatives for bound in bounds)
    if not kinds & {str, Path} or (named and kinds <= {str, NoneType}):
        yield "no such value"
    if not kinds & {int, float}:
        yield 12345
    if NoneType not in kinds:
        yield None
    if not kinds & {list, tuple, *options.LISTS}:
        yield [object.__name__]


@pytest.mark.parametrize(("group", "target", "name", "hint"), DECLARED)
def test_values_out_of_bounds_are_refused_by_the_name_of_the_option(group, target, name, hint):
    path = f"{group}.{name}" if group else name
    for value in outside(hint):
        config = {group: {"_target_": target, name: value}} if group else {name: value}
        with pytest.raises(WrongOption) as error:
            check_values(OmegaConf.create(config), ())
        assert str(error.value).startswith(f"{path} must be "), str(error.value)


@pytest.mark.parametrize(("group", "target", "arguments"), [pytest.param(*part, id=part[1]) for part in PARTS])
def test_the_source_declares_what_python_sees(group, target, arguments):
    module, _, name = target.rpartition(".")
    while module:
        try:
            made = importlib.import_module(module)
            break
        except ImportError:
            module, _, above = module.rpartition(".")
            name = f"{above}.{name}"
    for part in name.split("."):
        made = getattr(made, part)
    seen = {name: words(hint, 0) for name, hint in options.hints(made).items() if name in arguments}
    assert seen == {name: words(arguments[name].hint, 0) for name in seen}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"arms": {"mine": {"_target_": "spec_lab.verify.Relaxed", "top": 0}}}, "arms.mine.top must be a whole number"),
        ({"proposer": {"_target_": "spec_lab.propose.union.Union.load", "parts": {"a": {
            "_target_": "spec_lab.propose.ngram.Ngram.load", "depth": "x"}}}}, "proposer.parts.a.depth must be"),
        ({"verifier": {"_target_": "spec_lab.verify.Relaxed", "tops": 3}},
         "there is no option verifier.tops: did you mean verifier.top?"),
        ({"verifier": {"_target_": "spec_lab.verify.Token", "zzz": 3}},
         "there is no option verifier.zzz: spec_lab.verify.Token does not have it"),
        ({"proposer": {"_target_": "spec_lab.propose.ngram.Ngram.load", "depth": "${verifier.top}"},
          "verifier": {"_target_": "spec_lab.verify.Relaxed", "top": 0}}, "verifier.top must be a whole number"),
    ],
)  # fmt: skip
def test_the_message_has_the_full_path(config, message):
    with pytest.raises(WrongOption) as error:
        check_values(OmegaConf.create(config), ())
    assert str(error.value).startswith(message)


def test_an_option_of_every_run_is_not_left_out():
    with pytest.raises(WrongOption, match=r"^seed is missing: leave ~seed out"):
        check_values(OmegaConf.create({}), ("seed",))


def test_parts_of_other_packages_are_checked_as_far_as_they_are_declared(tmp_path):
    (tmp_path / "elsewhere.py").write_text("def load(depth: int, more, *, live: 'Unknown' = None): raise SystemExit\n")
    sources = type(package_sources())([tmp_path])
    arguments, others = declared(sources, "proposer", "elsewhere.load")
    assert (words(arguments["depth"].hint), words(arguments["more"].hint), others) == ("a whole number", "", False)
    assert declared(sources, "proposer", "not.there") == ({}, True)
    check_values(OmegaConf.create({"proposer": {"_target_": "not.there", "x": 1}}), ())


def test_names_and_bounds_are_checked_before_torch_is_imported():
    code = """
import sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from spec_lab.cli.main import conf
from spec_lab.cli.build import start
with initialize_config_dir(conf(), version_base="1.3"):
    config = compose("config", ["verifier=relaxed", "verifier.top=0"])
try:
    start(config, Path("nowhere"))
except Exception as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "verifier.top must be" in done.stdout and done.stdout.endswith("False\n"), done.stderr
