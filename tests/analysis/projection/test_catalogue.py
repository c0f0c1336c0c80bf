"""Named hardware and models, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from spec_lab.analysis.projection import RecordedDesign, catalogue, deployments_of, measured_deployment
from spec_lab.analysis.projection.catalogue import HERE, models, precision, read
from spec_lab.analysis.projection.costs import measured
from spec_lab.analysis.projection.model_shapes import of_config
from tests.analysis.projection.test_project import design


def nominal(row):
    return row["name"], float(row["parameters"])


@pytest.mark.parametrize(("name", "parameters"), read(HERE / "models.csv", nominal))
def test_a_model_has_its_nominal_number_of_parameters(name, parameters):
    assert models()[name].weights == pytest.approx(parameters, rel=0.02)


def test_the_hardware_of_the_command_line_is_known():
    names = [
        "a100-40", "a100-80", "h100-sxm", "h100-pcie", "h200", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "mi300x",
        "b200", "laptop-cpu",
    ]  # fmt: skip
    devices = catalogue.hardware(names)
    assert [device.name for device in devices] == names
    assert all(device.source and device.peaks["bf16"] >= device.peaks["fp32"] for device in devices)


DEVICES = "name,label,bandwidth_gb_s,fp32,bf16,fp8,memory_gb,source\n"


def test_devices_of_one_s_own_come_from_a_file(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(DEVICES + "box,Box,100,1,2,,64,measured\n")
    box, l4 = catalogue.hardware([str(file), "l4"])
    assert (box.bandwidth, box.memory, l4.name) == (100e9, 64e9, "l4") and dict(box.peaks) == {
        "fp32": 1e12,
        "bf16": 2e12,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.csv has no rows"),
        ("name,label\n", "mine.csv has no rows"),
        ("name,label\nbox,Box\n", "mine.csv has no column fp32"),
        (DEVICES + "box,Box,-5,1,1,,64,me\n", r"mine.csv, line 2: bandwidth_gb_s must be a positive number \(got -5\)"),
        (DEVICES + "box,Box,,1,1,,64,me\n", r"line 2: bandwidth_gb_s must be a positive number \(got nothing\)"),
        (DEVICES + "box,Box,5,1,fast,,64,me\n", r"line 2: bf16 must be a positive number \(got fast\)"),
        (
            DEVICES + "box,Box,5,1,1,,1e300,me\n",
            r"line 2: memory_gb must be a number from 1e-09 to 1e\+09 \(got 1e300\)",
        ),
        (DEVICES + "box,Box,1e-300,1,1,,5,me\n", r"line 2: bandwidth_gb_s must be a number from 1e-09 to 1e\+09"),
        (DEVICES + "box,Box,5,1,1,,inf,me\n", r"line 2: memory_gb must be a positive number \(got inf\)"),
        (
            DEVICES + "box,Box,5,1,1,,64,me,more,x\n",
            "line 2: it has 10 cells, but the table 8 columns; quote values",
        ),
        (DEVICES + "box,Box,5,1,1\n", r"line 2: memory_gb must be a positive number \(got nothing\)"),
    ],
)
def test_a_file_that_is_no_table_of_devices_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        catalogue.hardware([str(file)])


def test_a_checkpoint_s_config_is_a_model(tmp_path):
    config = {
        "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1280, "num_attention_heads": 8,
        "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = catalogue.model("--model", str(tmp_path))
    assert (described.layers, described.kv_heads, described.head_dim, described.tied) == (6, 8, 64, True)
    assert described.weights == 6 * (4 * 512 * 512 + 3 * 512 * 1280) + 512 * 4096
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        of_config("other", {"num_attention_heads": 8})
    with pytest.raises(
        ValueError, match="other/config.json: vocab_size must be a whole number of 1 or more, not 'many'"
    ):
        of_config("other", config | {"vocab_size": "many"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not readable"):
        catalogue.model("--model", str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hardware": ["tpu"]}, "--hardware tpu is not known; known are a100-40"),
        ({"hardware": []}, "--hardware names no device; known are a100-40"),
        ({"model": "gpt-5"}, "--model gpt-5 is not known; known are llama-68m"),
        ({"draft": "tiny"}, "--draft tiny is not known"),
        ({"draft": None}, "the size of the draft model is required; choose it with --draft MODEL"),
        ({"dtype": "fp64"}, "--dtype fp64 is not known; known are bf16"),
        ({"runtime": "magic"}, "--runtime magic is not known; known are nominal, graphs, eager"),
        ({"dtype": "fp8", "hardware": ["a100-80"]}, "--hardware a100-80 has no peak of fp8 products"),
        (
            {"hardware": ["l4"], "model": "llama-3.1-70b"},
            r"70b fits on no --hardware: l4 has 24 GB, the weights in bf16 take 14\d",
        ),
    ],
)
def test_what_is_not_known_is_refused(changed, message):
    options = {"hardware": ["h100-sxm"], "model": "llama-3.1-8b", "context": 1024, "draft": "llama-3.2-1b"} | changed
    with pytest.raises(ValueError, match=message):
        deployments_of([design(np.ones((2, 2)))], **options)


def test_so_many_sequences_fit_beside_the_weights():
    deployments = deployments_of([design(np.ones((2, 2)), proposer="ngram")], ["l4", "b200"], "llama-3.1-70b", 1024)
    assert [deployment.label for deployment in deployments] == ["L4 24 GB", "B200 180 GB"] and deployments[
        0
    ].largest_batch == 0
    shape, bytes_left = models()["llama-3.1-70b"], 180e9 - 70.55e9 * 2
    each = 2 * 80 * 8 * 128 * precision("bf16").kv_bytes * 1024
    assert deployments[1].largest_batch == pytest.approx(bytes_left / each, rel=0.01) and shape.layers == 80


def test_a_draft_model_on_a_device_of_its_own_takes_no_memory_of_the_target_s():
    designs, lookups = ([design(np.ones((2, 2)), proposer=name)] for name in ("draft_chain", "ngram"))
    options = {"hardware": ["h100-sxm"], "model": "llama-3.1-8b", "context": 1024}
    (alone,) = deployments_of(lookups, **options)
    beside, apart = (deployments_of(designs, **options, draft="llama-3.2-1b", apart=way)[0] for way in (False, True))
    assert beside.largest_batch < apart.largest_batch == alone.largest_batch


def test_proposers_whose_drafting_is_not_modelled_are_left_out_by_name():
    designs = [design(np.ones((2, 2)), "a", "ngram"), design(np.ones((2, 2)), "b", "lookahead")]
    (deployment,) = deployments_of(designs, ["h100-sxm"], "llama-3.1-8b", 1024)
    assert set(deployment.drafting) == {"a"}
    assert deployment.left_out == {"b": "the cost of drafting with lookahead is not modelled"}
    with pytest.raises(ValueError, match="drafting with lookahead is not modelled"):
        deployments_of(designs[1:], ["h100-sxm"], "llama-3.1-8b", 1024)


# Measured tables ---------------------------------------------------------------------------------------------------


def table(rows) -> str:
    return "model,tokens,batch,context,seconds\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"


GRID = [("target", t, b, c, 0.01 + 0.001 * t * b) for t in (1, 5) for b in (1, 4) for c in (0, 100)]


def test_measured_forwards_are_interpolated_within_and_refused_outside(tmp_path):
    file = tmp_path / "costs.csv"
    file.write_text(table([*GRID, *GRID, ("target", 1, 1, 0, 5.0)]))  # of equal points the median
    forward = measured(file)["target"]
    assert forward.seconds(3, 1, 50) == pytest.approx(0.013)
    assert forward.seconds(1, 4, 100) == pytest.approx(0.014)
    with pytest.raises(ValueError, match="costs were measured for batch from 1 to 4, not from 8 to 8"):
        forward.seconds(1, 8, 50)


def test_one_context_is_a_grid_too(tmp_path):
    file = tmp_path / "costs.csv"
    file.write_text(table(row for row in GRID if row[3] == 0))
    assert measured(file)["target"].seconds(2, 2, 0) == pytest.approx(0.01475, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,batch\n1,1\n", "has no column model"),
        (table(GRID[:-1]), "the rows of target cover 7 of the 8 points"),
        (table([*GRID, ("target", 1, 1, 0, "slow")]), r"line 10: seconds must be a number above 0 \(got slow\)"),
        (
            table([*GRID, ("target", 1, 1, 0, "1e308")]),
            r"line 10: seconds must be a number from 1e-12 to 100000 \(got 1e308",
        ),
        (table([("target", 1, 1, 0, "1e-300")]), r"line 2: seconds must be a number from 1e-12 to 100000"),
        (table([("target", 1, "1e300", 0, 0.1)]), r"line 2: batch must be a number from 1e-12 to 1e\+09"),
        (table([("target", 1, 1, 0, 0.1, 7)]), "costs.csv, line 2: it has 6 cells, but the table 5 columns"),
        (table([("target", 1, 1, 0, -0.1)]), r"line 2: seconds must be a number above 0 \(got -0.1\)"),
        (table([("target", 1, 1, -1, 0.1)]), r"line 2: context must be a number 0 or more \(got -1\)"),
        (table([("target", 1, "", 0, 0.1)]), r"line 2: batch must be a number above 0 \(got nothing\)"),
        (table([]), "has no rows; a table has a line of column names"),
        (table([("draft", *row[1:]) for row in GRID]), "has no rows whose model is target"),
        (table(GRID), "--costs has no rows whose model is draft_chain or draft; measure what drafts, too"),
    ],
)
def test_a_table_that_does_not_suffice_is_refused(tmp_path, text, message):
    file = tmp_path / "costs.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        measured_deployment([design(np.ones((2, 2)))], measured(file), "mine")


def test_a_measured_place_drafts_with_the_rows_of_the_proposer(tmp_path):
    file = tmp_path / "costs.csv"
    rows = [*GRID, *(("draft", *row[1:4], 0.002) for row in GRID)]
    file.write_text(table(rows))
    deployment = measured_deployment([design(np.ones((2, 2)))], measured(file), "mine")
    chain = design(np.full((2, 2), 5.0)).draws(10)
    assert deployment.largest_batch == 4
    assert deployment.drafting["chain"].seconds(chain, 2, 1, 50) == pytest.approx(0.004)
    assert isinstance(design(np.ones((1, 1))), RecordedDesign)


def test_each_design_drafts_with_heads_of_its_own_number():
    designs = [design(np.ones((2, 2)), "two", "medusa"), design(np.ones((2, 4)), "four", "medusa")]
    (deployment,) = deployments_of(designs, ["h100-sxm"], "llama-3.1-8b", 1024, runtime="nominal")
    two, four = (deployment.drafting[name].forward.seconds(1, 1, 0) for name in ("two", "four"))
    assert four == pytest.approx(2 * two)


@pytest.mark.parametrize("proposer", ["draft_chain", "eagle", "hydra", "medusa", "block"])
def test_a_trimmed_lm_head_costs_its_share(proposer):
    whole = design(np.ones((2, 2)), "whole", proposer)
    designs = [whole, replace(whole, name="half", drafted_share=0.5), replace(whole, name="none", drafted_share=0.0)]
    (deployment,) = deployments_of(designs, ["h100-sxm"], "llama-3.1-8b", 1024, runtime="nominal", draft="llama-3.2-1b")
    full, half, none = (deployment.drafting[part.name].forward.seconds(1, 1, 0) for part in designs)
    assert full > half > none
    assert full - half == pytest.approx(half - none)
