"""A plugin package adds a proposer, a verifier and a constraint: found, composed with all others, certified.

``package`` is that package. Here it is put on the path; ``.ci/run`` installs it next to the wheel.
"""

import importlib
import json
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pandas as pd
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.applied import Placement
from spec_lab.core.draft import Draft
from spec_lab.core.shape import tree
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.exact import examine
from spec_lab.tasks.certify.instances import CONSTRAINED, END, QUICK, Instance, every_instance
from spec_lab.verify import Match, Token

PACKAGE = Path(__file__).parent / "package"
BY_NAME = ["hydra.searchpath=[pkg://toy_plugin.conf]"]
BY_FOLDER = ["--config-dir", str(PACKAGE / "toy_plugin" / "conf")]
SHORT = ["target.dtype=float32", "prompts.limit=2", "max_new_tokens=8", "warmup=0", "output_dir=here"]
CERTIFY = ["+experiment=certify", "prompts.limit=2", "task.samples=500", "task.tokens=0", "output_dir=here"]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    """This copy of the package and no other, whatever is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_plugin"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(PACKAGE)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_plugin"]:
        del sys.modules[name]


def part(module: str, name: str):
    return getattr(importlib.import_module(f"toy_plugin.{module}"), name)


@pytest.fixture
def left_behind(tmp_path):
    """The content of a file of the run's directory."""
    return lambda file: json.loads((tmp_path / "here" / file).read_text())


# In runs


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("error:provider=hydra.searchpath")  # Hydra reports a missing search path
@pytest.mark.parametrize(
    ("how_found", "proposer", "verifier", "constraint", "options"),
    [
        (BY_NAME, "bigram", "agree", "apart", []),
        (BY_FOLDER, "bigram", "traversal", "regex", ["constraint.pattern='[a-z ]+'"]),
        (BY_NAME, "medusa", "agree", "none", ["proposer.tree=2x1"]),
        pytest.param(
            BY_FOLDER, "draft_chain", "agree", "apart", ["constraint.placement=target"], marks=pytest.mark.nightly
        ),
    ],
)
def test_a_plugin_s_parts_compose_with_all_others(
    flat_cli, left_behind, how_found, proposer, verifier, constraint, options
):
    chosen = [f"proposer={proposer}", f"verifier={verifier}", f"constraint={constraint}", "sampling=temperature_1"]
    code, _, errors = flat_cli(*how_found, *SHORT, *chosen, *options, "baseline=false")
    assert code == 0, errors
    summary = left_behind("summary.json")
    assert (summary["proposer"], summary["verifier"], summary["constraint"]) == (proposer, verifier, constraint)
    assert summary["lossless"] is True and summary["certified"] == "quick" and summary["errors"] == []
    assert summary["nodes_per_step"] > 0 and summary["tokens"] > 10


@pytest.mark.nightly
def test_greedy_output_is_the_baseline_s_and_obeys_its_constraint(flat_cli, tmp_path):
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=bigram", "verifier=agree", "constraint=apart")
    assert code == 0, errors
    requests = pd.read_parquet(tmp_path / "here" / "requests.parquet")
    tokens = {arm: rows.sort_values("request")["tokens"].map(list).tolist() for arm, rows in requests.groupby("arm")}
    assert len(tokens["bigram"]) == 2 and tokens["bigram"] == tokens["baseline"]
    assert all(a != b for token in tokens["bigram"] for a, b in pairwise(token))


def test_a_verifier_that_does_not_support_the_drafts_is_refused_by_name(flat_cli):
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=bigram", "verifier=kseq")
    assert code == 1
    assert re.search("verifier 'kseq'.*iid.*proposer 'bigram'.*'deterministic'", errors)


def test_a_verifier_for_chains_and_a_proposer_of_trees_are_refused_by_name(flat_cli, tmp_path):
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=medusa", "proposer.tree=2x1", "verifier=straight")
    assert code == 1
    assert re.search("verifier 'straight'.*chains.*proposer 'medusa'.*trees", errors)
    assert not (tmp_path / "here").exists()


def test_a_tree_for_a_verifier_of_chains_is_refused_by_its_config_s_name_before_weights_are_read(flat_cli, tmp_path):
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=draft_tree", "verifier=straight", "target.path=.")
    assert code == 1
    message = errors.partition("spec_lab: ")[2]
    assert re.search("proposer: .*'straight'.*'draft_tree'", message) and "target.path" not in message
    assert not (tmp_path / "here").exists()


@pytest.mark.nightly
def test_a_proposer_that_lacks_a_member_is_refused_by_the_member_s_name(flat_cli, tmp_path):
    chosen = ["proposer=bigram", "~proposer.depth", "proposer._target_=toy_plugin.unfinished.Unfinished.load"]
    code, _, errors = flat_cli(*BY_NAME, *SHORT, *chosen)
    assert code == 1
    named = ["proposer._target_=toy_plugin.unfinished.Unfinished.load", "nodes", "spec_lab.decode.proposer.Proposer"]
    assert re.search(".*".join(rf"\b{re.escape(name)}\b" for name in named), errors)
    assert not (tmp_path / "here").exists()


def test_the_options_of_a_plugin_are_checked_at_start_up(flat_cli):
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=bigram", "proposer.depth=0")
    assert code == 1
    assert re.search(r"proposer\.depth\b.*\b1\b.*\b0\b", errors)


@pytest.mark.parametrize(
    ("failing", "options"),
    [("start", []), ("mask", []), ("mask", ["min_new_tokens=2"]), ("advance", ["constraint.placement=none"])],
)
@pytest.mark.each_value
def test_an_error_in_a_plugin_s_constraint_ends_the_run_with_one_message(flat_cli, monkeypatch, failing, options):
    def fails(self, *arguments):
        return {}["lost"]

    monkeypatch.setattr(part("apart", "Apart" if failing == "start" else "After"), failing, fails)
    code, _, errors = flat_cli(*BY_NAME, *SHORT, "proposer=bigram", "verifier=agree", "constraint=apart", *options)
    assert code == 1 and errors.count("constraint 'apart' raised KeyError: 'lost'") == 1, errors
    assert "Traceback" not in errors


# The plugin's parts


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 1, 3, 1, 2], [1, 2, 1]),  # 1 was followed by 2 twice, by 3 once
        ([1, 3, 1, 2, 5, 1], [3, 1, 3]),  # ties go to the first
        ([4, 5, 6, 4], [5, 6, 4]),
        ([7, 8], []),  # nothing has followed 8
        ([7], []),
    ],
)
def test_the_proposer_drafts_what_has_most_often_followed(text, drafted):
    assert part("bigram", "likely")(text, 3) == drafted


def test_the_verifier_has_the_distribution_of_sampling_and_matching():
    torch.manual_seed(1)
    shape = tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
    draft = Draft(
        shape, torch.tensor([2, 0, 2, 1, 3, 3]), "iid", torch.full((3, 4), 0.25), torch.zeros(7).long().numpy()
    )
    p = torch.rand(7, 4, dtype=torch.float64).softmax(-1)
    mine, known = part("agree", "Agree")()(draft, p), Match()(draft, p)
    assert mine.stop == pytest.approx(known.stop) and mine.stop.sum() == pytest.approx(1)
    rows = torch.arange(7).numpy()
    assert torch.allclose(mine.residual(rows), known.residual(rows))


# Certified


@pytest.mark.nightly
def test_a_lossless_pair_is_certified(flat_cli, left_behind):
    code, output, errors = flat_cli(*BY_NAME, *CERTIFY, "proposer=bigram", "verifier=agree")
    assert code == 0, errors
    (pair,) = left_behind("certificate.json")["pairs"]
    assert pair["certified"] == "exact" and pair["exact"]["drafts"] == "proposer" and pair["exact"]["drafted"] > 1000
    assert "bigram deterministic agree lossless, proved" in output


@pytest.mark.parametrize("instances", ["quick", pytest.param("every", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("verifier", ["token", "traversal"])
@pytest.mark.nightly
def test_points_and_sampled_siblings_below_one_parent_are_certified_exact(
    flat_cli, left_behind, monkeypatch, verifier, instances
):
    if instances == "quick":
        monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    code, _, errors = flat_cli(*BY_NAME, *CERTIFY, "proposer=two_ways", f"verifier={verifier}")
    assert code == 0, errors
    (pair,) = left_behind("certificate.json")["pairs"]
    exact = pair["exact"]
    assert pair["certified"] == "exact" and exact["drafts"] == "proposer" and exact["missing"] == []
    assert exact["worst_tv"] < 1e-12 and exact["worst_mass_error"] < 1e-12 and exact["drafted"] > 1000


@pytest.mark.nightly
def test_a_verifier_for_chains_is_certified_by_chains(flat_cli, left_behind):
    code, output, errors = flat_cli(*BY_NAME, *CERTIFY, "proposer=bigram", "verifier=straight")
    assert code == 0, errors
    (pair,) = left_behind("certificate.json")["pairs"]
    assert pair["certified"] == "exact" and pair["chains_only"] is True and pair["exact"]["drafts"] == "proposer"
    assert pair["exact"]["instances"] == sum(instance.chain for instance in every_instance())
    assert "bigram (deterministic), straight: chains only" in output


@pytest.mark.nightly
def test_a_verifier_that_wrongly_claims_to_be_lossless_fails(flat_cli, left_behind, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    code, output, errors = flat_cli(*BY_FOLDER, *CERTIFY, "proposer=bigram", "verifier=careless")
    assert code == 1, errors
    assert left_behind("certificate.json")["certified"] is False
    assert "FAILS: bigram (deterministic), careless: after [" in output


@pytest.mark.nightly
def test_its_constraint_is_enumerated_and_the_real_target_sampled_under_it(flat_cli, left_behind, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    options = ["proposer=bigram", "verifier=agree", "constraint=apart", "task.tokens=64", "max_new_tokens=16"]
    code, _, errors = flat_cli(*BY_NAME, *CERTIFY, *options)
    assert code == 0, errors
    files = left_behind("certificate.json")
    assert files["constraint"]["name"] == "apart" and files["constraint"]["enumerated"] is True
    toys = [name.rpartition(", ")[2] for name in files["instances"] if "apart on " in name]
    assert toys == 2 * [f"apart on {placement}" for placement in get_args(Placement)]
    assert files["pairs"][0]["exact"]["instances"] == len(QUICK) + len(toys)
    assert [check["name"] for check in files["pairs"][0]["sampled"]][1:] == ["towards the draft", "mode"]


@pytest.mark.nightly
def test_a_constraint_whose_states_share_data_fails_on_the_command_line(flat_cli, left_behind, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    monkeypatch.setattr(part("apart", "After"), "fork", lambda self: self)
    code, output, errors = flat_cli(*BY_NAME, *CERTIFY, "proposer=draft_chain", "verifier=agree", "constraint=apart")
    assert code == 1, errors
    assert "masks are wrong" in output and "FAILS: constraint 'apart': " in output
    (pair,) = left_behind("certificate.json")["pairs"]
    assert pair["exact"]["worst_tv"] > 0.1


@pytest.mark.parametrize("placement", get_args(Placement))
def test_the_output_under_the_plugin_s_constraint_has_the_masked_distribution(placement):
    assert enumerated(placement).wrong is None


def enumerated(placement: str):
    """Every text of a toy under the constraint, drafted by a tree, compared with autoregressive decoding by hand."""
    applied = AppliedConstraint(part("apart", "Apart")(SimpleNamespace(size=CONSTRAINED.v)), placement)
    return examine(Instance(CONSTRAINED, "2x1", 2, END, applied=applied), "iid", Token())


def test_a_constraint_whose_states_share_data_fails(monkeypatch):
    monkeypatch.setattr(part("apart", "After"), "fork", lambda self: self)
    assert enumerated("both").wrong is not None
