"""Costs of drafting, by measured forwards."""

import numpy as np
import pytest

from spec_lab.analysis.projection import catalogue, measured_deployment, notes
from spec_lab.analysis.projection.costs import measured
from spec_lab.analysis.projection.drafting import by_roofline, by_table
from tests.analysis.projection.test_catalogue import GRID, design

HEAD = "model,tokens,batch,context,seconds,proposer\n"


def tables(tmp_path, model=None, proposer="", seconds=0.002):
    """A table with forwards of the target, and of what drafts under a name."""
    rows = [(*row, "") for row in GRID] + [(model, *row[1:4], seconds, proposer) for row in GRID if model]
    file = tmp_path / "costs.csv"
    file.write_text(HEAD + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return measured(file)


@pytest.mark.parametrize("model", [None, "words"])
def test_lookups_that_no_row_measures_are_free_and_a_note_says_so(tmp_path, model):
    lookups = design(np.ones((2, 2)), "lookups", "ngram")
    deployment = measured_deployment([lookups], tables(tmp_path, model), "mine")
    (note,) = notes([lookups], [deployment])
    assert all(word in note for word in ("lookups", "ngram", "free", "--lookup-ms"))
    assert notes([lookups], [measured_deployment([lookups], tables(tmp_path, model), "mine", lookup=1e-3)]) == []


@pytest.mark.parametrize(("measures", "seconds"), [("ngram", 0.002), ("", 0.002), ("suffix", 0.0)])
def test_rows_of_another_proposer_under_the_same_name_do_not_count(tmp_path, measures, seconds):
    drafting = by_table("mine", "ngram", tables(tmp_path, "mine", measures))
    assert drafting.step.seconds(2, 1, 50) == pytest.approx(seconds)
    assert bool(drafting.assumed) == (measures == "suffix") and ("suffix" in drafting.assumed) == bool(drafting.assumed)


def test_a_draft_model_is_not_projected_with_the_costs_of_a_lookup(tmp_path):
    with pytest.raises(ValueError, match=r"draft_chain.*the rows of mine measure ngram"):
        by_table("mine", "draft_chain", tables(tmp_path, "mine", "ngram"))


def test_rows_of_one_name_measure_one_proposer(tmp_path):
    file = tmp_path / "costs.csv"
    tables(tmp_path, "mine", "ngram")
    file.write_text(file.read_text().replace("ngram", "suffix", 1))
    with pytest.raises(ValueError, match="rows of mine name the proposers suffix and ngram"):
        measured(file)


class Counted:
    """A forward whose seconds are its rows."""

    def __init__(self, work, layers):
        self.work, self.layers = work, layers

    def seconds(self, rows, batch, context):
        return np.asarray(rows, dtype=float) * np.ones_like(np.asarray(batch, dtype=float))


@pytest.mark.parametrize(
    ("proposer", "layers", "rows", "computed", "pass_rows"),
    [("peagle", 0, 0, 4, 1 + 2), ("peagle", 2, 0, 2, 1 + 2), ("block", 0, 0, 5, 3 + 1), ("block", 2, 8, 2, 8)],
)
def test_drafters_of_all_levels_compute_their_layers_once(proposer, layers, rows, computed, pass_rows):
    """Three levels of which no token is accepted: one committed token, and two mask rows or a block."""
    target, precision = catalogue.model("--model", "llama-3.1-8b"), catalogue.precision("bf16")
    drafting = by_roofline(proposer, target, None, Counted, precision, 3, layers=layers, rows=rows)
    eagle = by_roofline("eagle", target, None, Counted, precision, 3).forward
    assert drafting.forward.layers == computed and eagle.layers == 1
    assert drafting.forward.work.attention[0].kv_bytes == computed * eagle.work.attention[0].kv_bytes
    assert computed - 0.9 < drafting.forward.work.row_flops / (2 * target.layer_weights) < computed + 0.9
    rejected = design(np.zeros((2, 3))).draws(0)
    assert drafting.seconds(rejected, 3, 1, 0).tolist() == [pass_rows]
