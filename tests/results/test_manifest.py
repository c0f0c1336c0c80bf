"""The manifest: its contents, redaction, and what identifies a run."""

import json
import re
import subprocess

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.start import with_trees
from spec_lab.results.manifest import (
    begun,
    begun_dtype,
    begun_trees,
    claim,
    commit,
    digest,
    manifest,
    unclaim,
)
from spec_lab.results.old_names import target_dtype

CONFIG = {"output_dir": "here", "tracker": {"mode": "offline"}, "proposer": {"tree": "calibrated", "api_key": "hush"}}


def facts(**changes) -> dict:
    tree = {"name": "medusa", "drawn": "deterministic", "tree": "0 0.0", "verify_seconds": {0: 0.5}}
    usual = dict(
        config=CONFIG, seed=3, weights={"target": "a"}, prompts="b", arms=["medusa", "baseline"],
        proposers={"medusa": tree, "arms": {"name": "ngram", "drawn": "deterministic"}},
    )  # fmt: skip
    return manifest(**(usual | changes))


def test_the_commit_is_that_of_the_code_with_a_mark_for_changes(tmp_path):
    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *command], capture_output=True, text=True)
        return done.stdout.strip()

    assert commit(tmp_path) is None
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init")
    assert commit(package) is None, "inside a repository that does not hold it"
    git("add", ".")
    git("commit", "-m", "one")
    assert commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    changed = commit(package)
    assert re.fullmatch(git("rev-parse", "HEAD") + r"\+[0-9a-f]{8}", changed)
    assert commit(package) == changed
    (package / "__init__.py").write_bytes(b"changed \xff otherwise")
    assert commit(package) not in (changed, git("rev-parse", "HEAD"))


def test_the_same_run_is_claimed_again_and_keeps_its_manifest(tmp_path):
    """The output directory, the tracker and measurements for the choice of a tree do not identify a run."""
    first = claim(tmp_path / "out", facts())
    again = facts(config=CONFIG | {"output_dir": "there", "tracker": {"mode": "online"}})
    again["proposers"]["medusa"]["verify_seconds"] = {0: 0.7}
    again["machine"]["memory_gib"] += 1
    assert claim(tmp_path / "out", again) == first == begun(tmp_path / "out")
    assert first["proposers"]["medusa"]["verify_seconds"] == {"0": 0.5}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == first


@pytest.mark.parametrize(
    "path",
    [
        "config.proposer.tree", "seed", "arms", "weights_sha256.target", "prompts_sha256", "commit", "versions.torch",
        "threads", "machine.processor", "machine.gpus", "proposers.medusa.tree",
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_whatever_may_change_a_token_or_a_second_makes_another_run(tmp_path, path):
    claim(tmp_path, facts())
    other = json.loads(json.dumps(facts()))
    *parts, last = path.split(".")
    inner = other
    for part in parts:
        inner = inner[part]
    inner[last] = "other"
    with pytest.raises(ValueError, match=rf"\({path}: .* there, 'other' here\)"):
        claim(tmp_path, other)


def test_a_run_in_the_way_is_removed_on_request_and_other_files_stay(tmp_path):
    claim(tmp_path, facts())
    for name in ("summary.json", "summary.md", "parts/steps-000.parquet", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    again = facts()
    claim(tmp_path, again, "if another")
    assert (tmp_path / "summary.json").exists(), "the same run is resumed"
    claim(tmp_path, again | {"commit": "other"}, "if another")
    assert {file.name for file in tmp_path.iterdir()} == {"manifest.json", "notes.txt"}
    (tmp_path / "summary.json").write_text("")
    claim(tmp_path, again | {"commit": "other"}, "always")
    assert {file.name for file in tmp_path.iterdir()} == {"manifest.json", "notes.txt"}


def test_rows_without_a_manifest_are_never_removed(tmp_path):
    (tmp_path / "steps.parquet").write_text("")
    with pytest.raises(ValueError, match="no manifest"):
        claim(tmp_path, facts(), "always")
    assert (tmp_path / "steps.parquet").exists()


def test_a_commit_with_local_changes_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr("spec_lab.results.manifest.commit", lambda _: "abc")
    claim(tmp_path, facts())
    monkeypatch.setattr("spec_lab.results.manifest.commit", lambda _: "abc+")
    with pytest.raises(ValueError, match=r"commit: 'abc' there, 'abc\+' here"):
        claim(tmp_path, facts())


@pytest.mark.parametrize("text", ["half a fi", "[]", "{}", '{"config": 3}'])
def test_a_file_that_is_not_a_manifest_is_refused_by_name(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    for ask in (lambda: claim(tmp_path, facts()), lambda: begun_trees(tmp_path, CONFIG)):
        with pytest.raises(ValueError, match=r"manifest\.json .*output_dir=DIR"):
            ask()


def test_trees_of_a_hybrid_s_parts_are_named_by_part_and_part_of_the_run_s_identity(tmp_path):
    def hybrid(tree):
        parts = {"heads": {"name": "medusa", "tree": tree}, "chain": {"name": "ngram"}}
        return facts() | {"proposers": {"medusa": {"name": "union", "drawn": "deterministic", "parts": parts}}}

    claim(tmp_path, hybrid("0 1"))
    assert begun_trees(tmp_path, CONFIG) == {"medusa.parts.heads": "0 1"}
    with pytest.raises(ValueError, match="tree"):
        claim(tmp_path, hybrid("0 1 2"))


def test_the_tree_of_a_cascade_s_inner_proposer_is_named_and_part_of_the_run_s_identity(tmp_path):
    def cascade(tree):
        inner = {"name": "draft_tree", "tree": tree}
        return facts() | {"proposers": {"medusa": {"name": "cascade", "drawn": "iid", "inner": inner}}}

    claim(tmp_path, cascade("0 1"))
    assert begun_trees(tmp_path, CONFIG) == {"medusa.inner": "0 1"}
    with pytest.raises(ValueError, match="tree"):
        claim(tmp_path, cascade("0 1 2"))


def test_a_depth_that_was_chosen_by_timing_is_that_of_the_run_that_began(tmp_path):
    proposer = {"name": "ngram", "drawn": "deterministic", "auto_depth": {"depth": 4, "acceptance": 0.7}}
    claim(tmp_path, facts() | {"proposers": {"medusa": proposer}})
    assert begun_trees(tmp_path, CONFIG) == {"medusa": 4}
    config = OmegaConf.create({"proposer": {"depth": "auto"}, "arms": {"other": {"depth": "auto"}}})
    resumed = with_trees(config, {"medusa": 4, "other": 0})
    assert resumed == {"proposer": {"depth": 4}, "arms": {"other": {"depth": 0}}}


def test_a_data_type_that_was_chosen_by_timing_is_that_of_the_run_that_began(tmp_path):
    assert begun_dtype(tmp_path, CONFIG) is None
    claim(tmp_path, facts() | {"target": {"dtype": "float32"}})
    assert begun_dtype(tmp_path, CONFIG | {"output_dir": "elsewhere"}) == "float32"
    assert begun_dtype(tmp_path, CONFIG | {"batch_size": 2}) is None
    with pytest.raises(ValueError, match="dtype"):
        claim(tmp_path, facts() | {"target": {"dtype": "bfloat16"}})


@pytest.mark.parametrize(
    ("known", "dtype"),
    [
        ({"target": {"dtype": "float32"}, "config": {"target": {"dtype": "auto"}}}, "float32"),
        ({"config": {"target": {"dtype": "bfloat16"}}}, "bfloat16"),
        ({"config": {"target": {"dtype": "auto"}}}, None),
    ],
)
def test_the_data_type_of_a_run_is_that_of_its_target(known, dtype):
    assert target_dtype(known) == dtype


def test_trees_are_those_of_a_run_of_the_same_configuration(tmp_path):
    assert begun_trees(tmp_path, CONFIG) == {}
    claim(tmp_path, facts())
    assert begun_trees(tmp_path, CONFIG | {"output_dir": "elsewhere"}) == {"medusa": "0 0.0"}
    assert begun_trees(tmp_path, CONFIG | {"batch_size": 2}) == {}


@pytest.mark.parametrize("name", ["requests.parquet", "parts/forwards-000000.parquet"])
def test_rows_without_a_manifest_belong_to_no_run(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with pytest.raises(ValueError, match=f"{name}.* manifest.json"):
        claim(tmp_path, facts())
    assert not (tmp_path / "manifest.json").exists()


MEDUSA = {"_target_": "spec_lab.drafters.medusa.propose.Medusa.load", "tree": "calibrated"}
MEASURED = {"recalibrate": True, "cache": "elsewhere"}


def test_how_a_tree_is_measured_does_not_identify_a_run(tmp_path):
    config = CONFIG | {"proposer": MEDUSA, "arms": {"one": MEDUSA}}
    otherwise = CONFIG | {"proposer": MEDUSA | MEASURED, "arms": {"one": MEDUSA | MEASURED}}
    claim(tmp_path, facts(config=config))
    assert claim(tmp_path, facts(config=otherwise)) == begun(tmp_path)
    assert begun_trees(tmp_path, otherwise) == {"medusa": "0 0.0"}
    assert digest(config) == digest(otherwise)


def test_the_same_options_of_other_proposers_identify_a_run():
    other = {"_target_": "elsewhere.Cached.load"}
    assert digest({"proposer": other}) != digest({"proposer": other | {"cache": "a"}})
    assert digest({"proposer": MEDUSA}) != digest({"proposer": MEDUSA | {"max_nodes": 3}})


# Removal of claims

REFUSED = ValueError("refused")


def test_a_claim_without_results_is_removed_with_its_folder(tmp_path):
    out, mine = tmp_path / "out", facts()
    claim(out, mine)
    (out / "parts").mkdir()
    unclaim(out, mine, REFUSED, decoded=False)
    assert not out.exists()
    unclaim(out, mine, REFUSED, decoded=False)  # nothing is there


@pytest.mark.parametrize("name", ["certificate.json", "summary.json", "forwards.parquet", "parts/forwards-0.parquet"])
def test_results_keep_their_manifest(tmp_path, name):
    mine = facts()
    claim(tmp_path, mine)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    unclaim(tmp_path, mine, REFUSED, decoded=False)
    assert (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(("error", "decoded"), [(REFUSED, True), (RuntimeError("out of memory"), False)])
def test_a_run_that_has_decoded_or_failed_otherwise_keeps_its_manifest(tmp_path, error, decoded):
    claim(tmp_path, mine := facts())
    unclaim(tmp_path, mine, error, decoded)
    assert begun_trees(tmp_path, CONFIG) == {"medusa": "0 0.0"}
