"""Parts that the command line builds from a config have every member that their role in the run requires."""

import re
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import OmegaConf

from spec_lab.cli import config_checks
from spec_lab.cli.build import CONTRACTS, build, under_policy
from spec_lab.cli.bundled import conf
from spec_lab.cli.config_checks import check_drawing, check_gguf, check_texts, drop_unused
from spec_lab.cli.refusals import Refused, reason
from spec_lab.core.options import brief_repr
from spec_lab.core.protocols import Part, check_declared, members, required
from spec_lab.decode.proposer import DECLARED, Requires
from spec_lab.propose.ngram import Ngram
from spec_lab.verify import KSeq, Token

EVERY = [(group, name) for group, contract in CONTRACTS.items() for name in required(get_object(contract))]


VALUES = {
    "name": "mine", "drawn": "iid", "nodes": 3, "requires": Requires(), "accepts": frozenset({"iid"}), "lossless": True,
    "stop": None, "parts": (), "vocabulary": 5, "has_actions": False,
}  # fmt: skip
"""Right values of the attributes whose values are checked."""


def an_object(group, lacking="", **wrong):
    """Return an object with the members of ``group``."""
    values = {name: VALUES.get(name, 1) for member_group, name in EVERY if member_group == group and name != lacking}
    contract = get_object(CONTRACTS[group])
    if not issubclass(contract, Part):
        return SimpleNamespace(**values | wrong)
    made = type("Made", (contract,), dict.fromkeys(contract.__abstractmethods__))()
    vars(made).update(values | wrong)
    return made


def built(group, **options):
    """Build an object of ``group``."""
    named = {"_target_": f"{__name__}.an_object", "group": group, **options}
    return build(OmegaConf.create({group: named}), group)


def test_members_are_those_that_the_contracts_declare():
    of = {group: members(get_object(contract)) for group, contract in CONTRACTS.items()}
    assert {"name", "facts", "drawn", "nodes", "requires", "sha256", "propose", "close"} < set(of["proposer"])
    assert required(get_object(CONTRACTS["proposer"])) == ["drawn", "nodes", "name"]
    assert set(of["policy"]) == {
        *"name facts stop parts shared_store forget init decide measure admit learn toy toy_of_batch".split()
    }
    assert {"chains_only", "aim", "__call__"} < set(of["verifier"])
    assert required(get_object(CONTRACTS["verifier"])) == ["accepts", "lossless", "name"]
    assert {"lm", "tokenizer", "context"} < set(of["target"]) and "load" not in of["target"]
    assert required(get_object(CONTRACTS["prompts"])) == ["__getitem__", "__len__"]


@pytest.mark.parametrize("group", CONTRACTS)
def test_an_object_with_all_members_is_accepted(group):
    assert built(group)


@pytest.mark.parametrize(("group", "lacking"), EVERY)
def test_an_object_without_a_member_is_refused_by_the_member_s_name(group, lacking):
    with pytest.raises(
        Refused, match=f"{group}._target_={__name__}.an_object .* without {lacking}: .*{CONTRACTS[group]}"
    ):
        built(group, lacking=lacking)


@pytest.mark.parametrize(
    ("group", "name", "wrong"),
    [
        ("proposer", "name", 3), ("proposer", "drawn", "sampled"), ("proposer", "drawn", None),
        ("proposer", "nodes", "3"), ("proposer", "nodes", 2.0), ("proposer", "nodes", True), ("proposer", "nodes", -1),
        ("proposer", "requires", None), ("proposer", "branches", "no"), ("proposer", "draws", ["iid"]),
        ("proposer", "facts", [1]), ("proposer", "shared_store", 1), ("proposer", "forced_nodes", None),
        ("verifier", "accepts", "iid"), ("verifier", "lossless", "yes"), ("verifier", "name", None),
        ("policy", "parts", ["a"]), ("policy", "stop", 0.5), ("policy", "name", 1), ("constraint", "vocabulary", "5"),
        ("constraint", "has_actions", 1), ("constraint", "name", None),
    ],
)  # fmt: skip
def test_an_attribute_of_a_wrong_type_is_refused_by_its_name_and_value(group, name, wrong):
    with pytest.raises(Refused, match=rf"{group}\._target_=.*\.{name} must be .*, not {re.escape(brief_repr(wrong))}"):
        built(group, **{name: wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"hidden": [1]}, {"hidden": ("1",)}, {"logits": 1}, {"top_k": "5"}, {"abilities": frozenset({"fly"})}],
    ids=str,
)
def test_wrong_fields_of_what_a_proposer_requires_are_refused(wrong):
    with pytest.raises(ValueError, match=r"Made\.requires must be .*hidden="):
        check_declared(an_object("proposer", requires=Requires(**wrong)), DECLARED)


# Parts of another package


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Write a module; return what builds its ``make`` as a part: the message of the refusal."""
    monkeypatch.syspath_prepend(tmp_path)
    names = (f"plugin_{number}" for number in range(9))

    def refusal(text, part="proposer", **live):
        name = next(names)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(Refused) as refused:
            build(OmegaConf.create({part: {"_target_": f"{name}.make"}}), part, **live)
        said = str(refused.value).replace(str(tmp_path / name), "PLUGIN")
        assert said.startswith(f"spec_lab: {part}._target_={name}.make") and "\n" not in said
        return said

    return refusal


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return {}['lost']", "raised KeyError: 'lost'"),
        ("raise RuntimeError('it broke')", "raised RuntimeError: it broke"),
        ("return None.missing", "raised AttributeError: 'NoneType' object has no attribute 'missing'"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("raise ValueError('a depth of 3')", ": a depth of 3"),
        ("raise OSError('no such store')", ": no such store"),
    ],
)
def test_an_error_in_a_constructor_names_the_part_the_error_and_the_line(plugin, line, said):
    package = plugin(f"def make():\n    {line}\n")
    assert said in package and "(PLUGIN.py:2, in make)" in package


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make(:\n", "SyntaxError: invalid syntax (PLUGIN.py:1)"),
        ("x = 1\n  y = 2\n", "IndentationError: unexpected indent"),
        ("import no_such_module\n", "No module named 'no_such_module' (PLUGIN.py:1, in <module>)"),
        ("\nLIMIT = {}['lost']\n", "KeyError: 'lost' (PLUGIN.py:2, in <module>)"),
        ("raise SystemExit(0)\n", "SystemExit: 0 (PLUGIN.py:1, in <module>)"),
    ],
)
@pytest.mark.parametrize("part", ["proposer", "verifier"])
def test_a_module_that_cannot_be_imported_is_named_with_the_line(plugin, text, said, part):
    package = plugin(text, part)
    assert said in package and "PLUGIN.py:" in package


def test_a_factory_is_given_the_live_objects_that_it_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "from spec_lab.verify import Token\ndef none(): return Token()\ndef some(b, c=1): return Token()\n"
    (tmp_path / "named_live.py").write_text(f"{text}def every(**live): return Token() if len(live) == 2 else None\n")
    for name in ("none", "some", "every"):
        config = OmegaConf.create({"verifier": {"_target_": f"named_live.{name}"}})
        assert build(config, "verifier", a=1, b=2) == Token()


def test_an_argument_that_is_no_live_object_is_named_with_those_that_are(plugin):
    said = plugin("def make(tgt): ...\n", target=1)
    assert "tgt is required" in said and "live objects that can be named are target" in said


def test_a_property_that_raises_is_named_with_the_line(plugin):
    text = "from spec_lab.verify import Token\nclass make(Token):\n    @property\n    def name(self):\n"
    assert "KeyError: 'lost' (PLUGIN.py:5, in name)" in plugin(f"{text}        {{}}['lost']\n", "verifier")


def test_a_wrong_attribute_is_named_with_the_line_of_its_class(plugin):
    package = plugin("from spec_lab.verify import Token\n\n\nclass make(Token):\n    name = 3\n", "verifier")
    assert "make.name must be a string, not 3 (PLUGIN.py:4)" in package


def test_prompts_that_are_something_else_are_refused(plugin):
    assert "returns 'a text' as prompt 0" in plugin("def make():\n    return ['a text']\n", "prompts")


@pytest.mark.parametrize("part", ["constraint", "policy"])
def test_a_function_that_returns_no_part_is_refused(plugin, part):
    assert "NoneType" in plugin("def make():\n    pass\n", part)


class Chains(Token):
    """Verifies chains only."""

    name = "chains"
    chains_only = True


def drafted(**options):
    draft = {"_target_": "spec_lab.drafters.draft_model.propose.DraftModel.load", "drawn": "deterministic"}
    task = {"_target_": "spec_lab.tasks.benchmark.run"}
    none = {"_target_": "spec_lab.propose.Null.load"}
    return OmegaConf.create({"task": task, "proposer": none, "arms": {"other": draft | options}})


class SeveralWays:
    """A proposer that draws points and samples below one parent."""

    name = "several"
    drawn = "iid"
    draws = frozenset({"deterministic", "iid"})


def test_a_class_that_draws_several_ways_is_refused_for_a_verifier_of_one_before_anything_is_loaded():
    several = {"_target_": f"{__name__}.SeveralWays", "drawn": "iid"}
    with pytest.raises(Refused, match=r"arms\.other: .*'kseq'.*'several'"):
        check_drawing(drafted(**several), KSeq())
    check_drawing(drafted(**several), Token())


@pytest.mark.parametrize("options", [{"tree": "1x2"}, {"tree": "0 1 0.0"}, {"nodes": 4, "children": 2}], ids=str)
def test_options_of_a_tree_are_refused_for_a_verifier_of_chains_before_anything_is_loaded(options):
    with pytest.raises(Refused, match=r"arms\.other: verifier 'chains'"):
        check_drawing(drafted(**options), Chains())
    check_drawing(drafted(**options), Token())


@pytest.mark.parametrize(
    "options", [{"depth": 4}, {"tree": "1x1"}, {"tree": "calibrated"}, {"tree": None}, {"children": 1}], ids=str
)
def test_chains_and_trees_that_are_chosen_later_pass_for_a_verifier_of_chains(options):
    check_drawing(drafted(**options), Chains())


def test_an_error_inside_a_lazy_import_is_reported_in_place_of_the_module_that_it_kept_from_being_imported():
    cause = RuntimeError("Job not requeued because: timed-out too many times.")
    with pytest.raises(ModuleNotFoundError) as raised:
        raise ModuleNotFoundError("Could not import module 'AttentionInterface'.") from cause
    assert reason(raised.value) == str(cause)
    assert reason(ModuleNotFoundError("No module named 'absent'")) == "No module named 'absent'"


NGRAM = {"_target_": "spec_lab.propose.ngram.Ngram.load", "depth": 10}


def test_the_parts_of_a_hybrid_are_built_first_and_may_be_hybrids():
    inner = {"_target_": "spec_lab.propose.best_of.BestOf.load", "parts": {"c": NGRAM, "d": NGRAM | {"depth": 3}}}
    outer = {"_target_": "spec_lab.propose.union.Union.load", "parts": {"a": NGRAM, "b": inner}, "nodes": 8}
    made = build(OmegaConf.create({"proposer": outer}), "proposer", target=None)
    assert [part.name for part in made.proposers] == ["ngram", "best_of"]
    assert [part.depth for part in made.parts["b"].proposers] == [10, 3]
    assert made.facts["parts"]["b"]["costs"] == {"c": 0.0, "d": 0.0}


def passes_on(target, inner, verifier, **options):
    """A proposer with another inside, which is loaded for its own target."""
    made = inner(f"the draft of {target}")
    return an_object("proposer", **vars(made) | {"verifier": verifier} | options)


def loaded_for(target, depth):
    return an_object("proposer", loaded_for=target, depth=depth)


CASCADE = {
    "_target_": f"{__name__}.passes_on",
    "inner": {"_target_": f"{__name__}.loaded_for", "depth": 3},
    "verifier": {"_target_": "spec_lab.verify.Token"},
}


@pytest.mark.parametrize("part", ["proposer", "arms.verifiers"])
def test_the_inner_proposer_of_another_is_loaded_by_it_for_a_target_of_its_own(part):
    config = OmegaConf.create({"proposer": CASCADE | {"own": 1}, "arms": {"verifiers": CASCADE | {"own": 1}}})
    made = build(config, part, target="big")
    assert (made.loaded_for, made.depth, made.own) == ("the draft of big", 3, 1)
    assert isinstance(made.verifier, Token)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inner": NGRAM | {"depth": -1}}, r"proposer\.inner\.depth"),
        ({"inner": {"depth": 3}}, r"proposer\.inner must be a mapping whose _target_"),
        ({"verifier": NGRAM | {"target": None}}, r"proposer\.verifier\._target_=.*Verifier"),
        ({"verifier": None}, r"proposer\.verifier must be a mapping"),
    ],
)
def test_a_wrong_inner_proposer_or_verifier_is_refused_by_name(wrong, message):
    with pytest.raises(Refused, match=message):
        build(OmegaConf.create({"proposer": CASCADE | wrong}), "proposer", target=None)


def test_an_option_that_a_message_tells_to_set_is_that_of_the_arm():
    lossy = {"_target_": "spec_lab.verify.Typical"}
    cascade = {
        "_target_": "spec_lab.drafters.cascade.DraftCascade.load",
        "path": "x",
        "inner": NGRAM,
        "verifier": lossy,
    }
    with pytest.raises(
        Refused, match=r"^spec_lab: arms\.mine\.verifier: .* such as verifier@arms\.mine\.verifier=token$"
    ):
        build(OmegaConf.create({"arms": {"mine": cascade}}), "arms.mine", target=None)


FIXED = {"_target_": "spec_lab.policy.depths.FixedDepth.load", "depth": "${four}"}


def test_a_policy_of_an_arm_and_of_the_proposer_limits_it():
    arms = {"a": NGRAM | {"policy": FIXED}, "b": NGRAM | {"policy": {"_target_": "spec_lab.policy.none"}}}
    config = OmegaConf.create({"four": 4, "arms": arms, "proposer": NGRAM, "policy": FIXED})
    arm, plain = build(config, "arms.a", target=None), build(config, "arms.b", target=None)
    assert (arm.policy.depth, arm.proposer.name) == (4, "ngram")
    assert isinstance(plain, Ngram)
    assert under_policy(config, "policy", build(config, "proposer", target=None), target=None).policy.depth == 4


@pytest.mark.parametrize(
    ("proposer", "message"),
    [
        (NGRAM | {"policy": FIXED | {"depth": -1}}, r"policy\.depth"),
        (NGRAM | {"policy": FIXED | {"part": "x"}}, r"proposer\.policy: policy 'fixed' names the part x"),
        (NGRAM | {"policy": {"depth": 3}}, r"proposer\.policy must be a mapping whose _target_"),
        (NGRAM | {"policy": NGRAM}, r"proposer\.policy"),
        (
            {"_target_": "spec_lab.propose.best_of.BestOf.load", "parts": {"a": NGRAM | {"policy": FIXED}, "b": NGRAM}},
            r"proposer\.parts\.a\.policy: a policy limits a whole hybrid",
        ),
    ],
)
def test_a_wrong_policy_is_refused_by_name(proposer, message):
    with pytest.raises(Refused, match=message):
        build(OmegaConf.create({"four": 4, "proposer": proposer}), "proposer", target=None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": NGRAM, "b": NGRAM | {"depth": -1}}, "proposer.*depth"),
        (
            {"a": NGRAM, "b": {"_target_": "types.SimpleNamespace"}},
            r"proposer\.parts\.b\._target_=types.SimpleNamespace",
        ),
        ({"a": NGRAM, "b": {"depth": 3}}, r"proposer\.parts\.b must be a mapping whose _target_"),
        ({"a": NGRAM}, "at least two"),
        (None, "proposer"),
    ],
)
def test_wrong_parts_of_a_hybrid_are_refused_by_name(parts, message):
    wrong = {"_target_": "spec_lab.propose.union.Union.load", "parts": parts}
    with pytest.raises(Refused, match=message):
        build(OmegaConf.create({"proposer": wrong}), "proposer", target=None)


def composed(*overrides):
    with initialize_config_dir(conf(), version_base="1.3"):
        return compose("config", [*overrides])


GGUF_PARTS = {
    "train": (["+experiment=train_medusa"], r"task .*train.* target=gguf: .*hidden states"),
    "sampling": (["sampling=checkpoint"], r"sampling .* target=gguf: .*generation_config\.json.* sampling=greedy"),
    "peers": (["+experiment=peers", "~peers.bare"], r"peers\.generate .* target=gguf: .*llama_cpp_peers"),
}


@pytest.mark.parametrize("name", GGUF_PARTS)
def test_what_requires_transformers_is_refused_with_a_gguf_file_before_it_is_read(name):
    options, why = GGUF_PARTS[name]
    with pytest.raises(Refused, match=why):
        check_gguf(composed(*options, "target=gguf", "target.path=missing.gguf"))
    check_gguf(composed(*options))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["+experiment=stream", "task.prompt=a", "task.messages=[]"], r"task\.messages is a conversation .*prompt"),
        (["+experiment=train_medusa", "task.generate=no.gguf"], r"task\.generate=no\.gguf names no GGUF file"),
        (["+experiment=train_medusa", "task.answers_from=a", "task.answers=2"], r"task\.answers_from .*answers=2"),
        (["task=check_drafter", "task.answers_from=nowhere"], r"task\.answers_from=nowhere does not exist"),
    ],
)
def test_texts_that_a_task_cannot_have_are_refused_before_the_target_is_read(options, why):
    with pytest.raises(Refused, match=why):
        check_texts(composed(*options))
    check_texts(composed(*options[:1]))


@pytest.mark.parametrize("task", ["task=recommend", "+experiment=train_medusa"])
@pytest.mark.parametrize(
    "options",
    [["proposer=ngram"], ["policy=goodput"], ["+proposer@arms.other=ngram"], ["+verifier@verifiers.other=typical"]],
)
def test_parts_that_a_task_does_not_use_are_refused_before_they_are_built(task, options, monkeypatch):
    monkeypatch.setattr(HydraConfig, "initialized", lambda: False)  # nothing is known of what was typed
    part = options[0].partition("=")[0].partition("@")[2] or options[0].partition("=")[0]
    with pytest.raises(Refused, match=part):
        drop_unused(composed(task, "proposer=none", *options))
    drop_unused(composed(task, "proposer=none", "~verifier"))
    drop_unused(composed(*options))


@pytest.mark.parametrize(
    ("option", "named"),
    [("+proposer@arms.other=ngram", "arms.other"), ("+verifier@verifiers.other=typical", "verifiers.other")],
)
def test_further_arms_and_verifiers_are_not_left_unchecked(option, named):
    with pytest.raises(Refused, match=rf"one proposer with one verifier at a time, .*: leave out {named}$"):
        drop_unused(composed("task=check", "proposer=ngram", option))
    drop_unused(composed("task=check", "proposer=ngram", "policy=fixed"))


def test_what_only_the_defaults_name_is_left_out(monkeypatch):
    config = composed("task=train")
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(config_checks, "overrides_of", lambda _: ["task=train"])
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"runtime": {"choices": {}}}))
    drop_unused(config)
    assert config.proposer == {"_target_": "spec_lab.propose.Null.load"}
    monkeypatch.setattr(config_checks, "overrides_of", lambda _: ["task=train", "proposer.depth=3"])
    with pytest.raises(Refused, match="uses no proposer: set proposer=none"):
        drop_unused(composed("task=train"))


@pytest.mark.parametrize("experiment", ["certify", "llama_cpp_peers", "draft_tree"])
def test_what_a_gguf_file_supports_is_not_refused(experiment):
    check_gguf(composed(f"+experiment={experiment}", "target=gguf", "target.path=missing.gguf"))
