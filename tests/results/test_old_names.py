"""Files of older versions, which call the arm of ``proposer`` ``speculative``, are read with today's names."""

import json

import pyarrow as pa
import pytest

from spec_lab.results.manifest import begun
from spec_lab.results.old_names import arm_names, read_summary, with_columns
from tests.results.test_manifest import facts

FACTS = {"name": "medusa", "drawn": "point"}


@pytest.mark.parametrize(
    ("proposers", "arms", "names"),
    [
        ({"speculative": FACTS}, ["speculative", "baseline"], {"speculative": "medusa"}),
        ({"speculative": FACTS, "medusa": FACTS}, ["speculative", "medusa"], {}),  # the name is taken
        ({"speculative": {"tree": "0"}}, ["speculative"], {}),  # it is not known
        ({"medusa": FACTS}, ["medusa", "baseline"], {}),
    ],
    ids=["alone", "taken", "unknown", "today"],
)
def test_the_main_arm_is_called_after_its_proposer_unless_the_name_is_taken_or_unknown(proposers, arms, names):
    assert arm_names({"proposers": proposers, "arms": arms}) == names


def test_rows_summary_and_manifest_of_an_older_run_have_todays_names(tmp_path):
    written = facts() | {"proposers": {"speculative": FACTS}, "arms": ["speculative", "baseline"]}
    written["config"] = written["config"] | {"target": {"attention": "spans"}}
    (tmp_path / "manifest.json").write_text(json.dumps(written))
    summary = {"arms": {"speculative": {"tau_pooled": 2.0}}, "against": {"peer": {"speculative": {"mean": 1.5}}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_summary(tmp_path / "summary.json") == {
        "arms": {"medusa": {"tau_pooled": 2.0}}, "against": {"peer": {"medusa": {"mean": 1.5}}},
    }  # fmt: skip
    manifest = begun(tmp_path)
    assert manifest["arms"] == ["medusa", "baseline"]
    assert manifest["proposers"] == {"medusa": {"name": "medusa", "drawn": "deterministic"}}
    assert manifest["config"]["target"]["attention"] == "per_sequence"
    arms = ["speculative", "baseline"]
    rows = with_columns(pa.table({"arm": arms, "proposer": arms}), tmp_path)  # the latter of a verifier study
    assert rows["arm"].to_pylist() == rows["proposer"].to_pylist() == ["medusa", "baseline"]
