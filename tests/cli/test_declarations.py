"""Every option of every config has the values that its declaration allows; others are refused by the option's name."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from spec_lab.cli.bundled import conf
from spec_lab.cli.config_checks import check_options
from spec_lab.cli.declarations import SETTINGS, check_values, declared, package_sources, qualified
from spec_lab.cli.explain import comments
from spec_lab.cli.explain.reference import target_of
from spec_lab.cli.main import check_overrides
from spec_lab.cli.refusals import Refused
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
    yield from (bound.minimum - 1 for bound in numbers)
    yield from (bound.minimum for bound in numbers if getattr(bound, "above", False))
    yield from (bound.maximum + 1 for bound in numbers if bound.maximum not in (None, float("inf")))
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
@pytest.mark.one_in(8)
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
        ({"proposer": {"_target_": "spec_lab.drafters.draft_model.propose.DraftModel.load", "tree": 0.0}},
         "proposer.tree must be widths such as 3x2x1, ranks such as '0 1 0.0' or the name of a published tree, a list "
         "of lists of whole numbers, or null, not 0.0: quote a text that looks like another value, "
         "\"proposer.tree='0.0'\""),
        ({"proposer": {"_target_": "spec_lab.drafters.draft_model.propose.DraftModel.load", "tree": [3, 2, 1]}},
         "proposer.tree must be widths such as 3x2x1"),
        ({"proposer": {"_target_": "spec_lab.drafters.medusa.propose.Medusa.load", "path": 3}},
         "proposer.path must be a text, not 3: quote a text that looks like another value, \"proposer.path='3'\""),
        ({"proposer": {"_target_": "spec_lab.propose.best_of.BestOf.load", "costs": 3}},
         "proposer.costs must be a mapping of names to numbers of 0 or more, or null, not 3"),
        ({"constraint": {"_target_": "spec_lab.constrain.load.regex", "draft_budget": "5 ms"}},
         "constraint.draft_budget must be a whole number of 0 or more, a time such as 200us, or null, not '5 ms'"),
        ({"constraint": {"_target_": "spec_lab.constrain.controllers.template.load", "parts": [None]}},
         "constraint.parts[0] must be a text or {max_tokens: TOKENS, stop: TEXT}, not null"),
        ({"constraint": {"_target_": "spec_lab.constrain.load.lark", "engine": "xgrammar"}},
         "constraint.engine must be one of llguidance, not 'xgrammar'"),
        ({"sampling": {"_target_": "spec_lab.core.probabilities.Sampling", "repetition_penalty": True}},
         "sampling.repetition_penalty must be a number from 0.01 to 100, not true"),
    ],
)  # fmt: skip
def test_the_message_has_the_full_path(config, message):
    with pytest.raises(WrongOption) as error:
        check_values(OmegaConf.create(config), ())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("before", "hint"),
    [
        ("propose.medusa.Medusa.load", "it is called spec_lab.drafters.medusa.propose.Medusa.load now"),
        ("train.eagle1.Eagle1Recipe", "it is called spec_lab.drafters.eagle.train_eagle1.Eagle1Recipe now"),
        ("propose.early_exit.EarlyExit.load", "it is called spec_lab.drafters.early_exit.EarlyExit.load now"),
        ("policy.depths.Fixed.load", "it is called spec_lab.policy.depths.FixedDepth.load now"),
        ("run.run", "it is called spec_lab.tasks.benchmark.run now"),
        ("propose.nothing.Nothing.load", "see spec-lab explain proposer"),
    ],
)
def test_a_target_of_this_package_that_does_not_exist_is_refused_with_its_name_of_today(before, hint):
    message = rf"^proposer\._target_=spec_lab\.{re.escape(before)} names no .*: {re.escape(hint)}$"
    with pytest.raises(WrongOption, match=message):
        check_values(OmegaConf.create({"proposer": {"_target_": f"spec_lab.{before}"}}), ())


def test_other_options_that_a_part_names_get_their_full_path():
    part = {"_target_": "spec_lab.propose.ngram.Ngram.load", "max_ngram": 3}
    text = "min_ngram is 5, above max_ngram: give depth=5, or set depth to more than arms.x.depth=3"
    assert qualified(text, "arms.a", part) == (
        "arms.a.min_ngram is 5, above arms.a.max_ngram: give arms.a.depth=5, "
        "or set arms.a.depth to more than arms.x.depth=3"
    )


def test_an_option_of_one_s_own_part_may_have_a_former_name(tmp_path, monkeypatch):
    (tmp_path / "own_limits.py").write_text("class Mine:\n    def __init__(self, most: int = 2): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_overrides(["policy.most=3"])
    with initialize_config_dir(conf(), version_base="1.3"):
        config = compose("config", ["+policy.most=3"])
    with pytest.raises(Refused, match=r"policy\.most is now called policy\.max_depth"):
        check_options(config)
    config.policy._target_ = "own_limits.Mine"
    check_options(config)


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
from spec_lab.cli.start import start
with initialize_config_dir(conf(), version_base="1.3"):
    config = compose("config", ["verifier=relaxed", "verifier.top=0"])
try:
    start(config, Path("nowhere"))
except Exception as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "verifier.top must be" in done.stdout and done.stdout.endswith("False\n"), done.stderr
