"""One step function: nothing else runs the target, or turns its logits into probabilities."""

import ast
from pathlib import Path

import pytest

import spec_lab

ROOT = Path(spec_lab.__file__).parent

COMPUTES = {"prepare", "run", "forward", "extend"}
"""Methods of a runner that compute, or prepare it."""

RUNS = {
    "decode/step.py",
    "decode/text_logits.py",  # all valid outputs, before a request under constraint.distribution=global is decoded
    "models/forests.py",  # compares a model with itself before anything is decoded
    "models/self_check.py",  # one token, in windows that are not shortened
    "models/layer_checks.py",  # the same of ranges of layers
}
"""Modules that may run the target. Proposers may run a draft model of their own, ``self.lm``, besides."""

PROBABILITIES = {
    "decode/rows.py",  # called by the step
    "decode/text_logits.py",
    "propose/grower.py",  # a draft model's own q
    "propose/device_levels.py",  # likewise
    "tasks/certify/toy_models.py",  # what the outputs of steps are compared with: exact distributions of a table,
    "tasks/certify/ground_truth.py",
    "tasks/certify/sampled.py",  # and those of plain forwards without a KV cache
}
"""Modules that may turn logits into probabilities."""


def called(source: str) -> set[str]:
    """Every function and method that a module calls, without arguments; other names for a runner are replaced."""
    tree, aliases = list(ast.walk(ast.parse(source))), {}
    for node in tree:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            value = ast.unparse(node.value)
            if value.split(".")[-1] in RUNNERS:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                aliases |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    calls = {ast.unparse(node.func) for node in tree if isinstance(node, ast.Call)}
    return {
        f"{aliases.get(owner, owner)}.{name}" if owner else name
        for owner, _, name in (c.rpartition(".") for c in calls)
    }


RUNNERS = {"lm", "runner"}


def runs(calls: set[str], itself: str | None = None) -> set[str]:
    """Those that compute with a runner; ``own`` is one that may."""
    distinct = set()
    for call in calls:
        runner, _, method = call.rpartition(".")
        if method in COMPUTES and runner.split(".")[-1] in RUNNERS and runner != itself:
            distinct.add(call)
    return distinct


def probabilities(calls: set[str]) -> set[str]:
    """Those that turn logits into probabilities."""
    return {call for call in calls if call.split(".")[-1] == "logits_to_probs"}


def plain(calls: set[str]) -> set[str]:
    """Those that call a runner's model, around its KV cache."""
    return {call for call in calls if call.endswith("lm.model")}


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    """The calls of every module, by its path in the package."""
    return {str(file.relative_to(ROOT)): called(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}


def test_only_the_step_and_the_self_check_run_the_target(modules):
    running = {
        name: runs(calls, "self.lm" if name.startswith(("propose/", "drafters/")) else None)
        for name, calls in modules.items()
    }
    assert {name for name, some in running.items() if some} == RUNS


def test_only_the_step_turns_the_targets_logits_into_probabilities(modules):
    assert {name for name, calls in modules.items() if probabilities(calls)} == PROBABILITIES


def test_a_runners_model_is_called_by_the_runner_only(modules):
    assert not {name for name, calls in modules.items() if plain(calls)}
    assert "self.model" in modules["runners/causal_lm.py"]


@pytest.mark.parametrize(
    "code",
    [
        "output = target.lm.forward(paths, pending, draft)",
        "lm = target.lm\noutput = lm.run(lm.prepare(paths, pending, draft))",
        "def look(self):\n    return self.lab.target.lm.run(pack)",
        "if batch.target.lm.extend(*rows)[0]: pass",
        "output = runner.run(prepared)",
        "self.lm.forward(paths, pending, draft)",
        "model = target.lm\noutput = model.run(pack)",
        "if (model := lab.target.lm): model.forward(kvs, pending, draft)",
    ],
)
def test_a_module_that_runs_the_target_is_found(code):
    assert runs(called(code))


def test_a_draft_model_of_the_proposers_own_is_not_the_target():
    code = "self.lm.forward(caches, pending, draft)\nself.target.lm.forward(paths, pending, draft)"
    assert runs(called(code), "self.lm") == {"self.target.lm.forward"}


@pytest.mark.parametrize(
    "code", ["p = logits_to_probs(logits, rows)", "p = probabilities.logits_to_probs(logits, rows)"]
)
def test_a_module_that_turns_logits_into_probabilities_is_found(code):
    assert probabilities(called(code))


def test_a_plain_forward_is_found():
    assert plain(called("hidden = batch.target.lm.model.base_model(ids)\nlogits = target.lm.model(ids).logits"))
