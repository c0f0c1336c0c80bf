"""Tables of layouts: names are translated both ways; sizes are read off files or given by a network."""

import pytest

from spec_lab.drafters.eagle.files import EAGLE3
from spec_lab.drafters.layouts import Entry, Layout, misfits

TABLE = Layout("x", (
    Entry("head.{i}.{2k+3}.weight", "heads.{i}.block.weight", "H H"),
    Entry("head.{i}.1.weight", "heads.{i}.first.weight", "H {i+2}H"),
    Entry("out.{i}.{K}|last.{i}", "outs.{i}", "V H"),
    Entry("body.*|layers.0.*", "body.*", {"a": "?H", "b": "2H"}),
    Entry("table", "", "?T"),
))  # fmt: skip
HELD = {
    "head.0.1.weight": (4, 8), "head.1.1.weight": (4, 12), "head.0.3.weight": (4, 4), "head.1.3.weight": (4, 4),
    "head.0.5.weight": (4, 4), "head.1.5.weight": (4, 4), "last.0": (9, 4), "out.1.2": (9, 4), "layers.0.b": (8,),
    "table": (3,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "network_name"),
    [
        ("head.7.9.weight", "heads.7.block.weight"),
        ("head.7.1.weight", "heads.7.first.weight"),
        ("head.7.4.weight", None),  # no 2k + 3
        ("head.1234.1.weight", None),
        ("out.3.2", "outs.3"),
        ("layers.0.x.y", "body.x.y"),
        ("table", ""),
        ("other", None),
    ],
)
def test_our_name_of_a_published_one(published, network_name):
    assert TABLE.network_name(published) == network_name


def test_published_names_of_ours():
    assert TABLE.published("heads.2.block.weight", copies=3) == [f"head.2.{number}.weight" for number in (3, 5, 7)]
    assert TABLE.published("body.a", {"layers.0.a"}) == ["layers.0.a"]
    assert TABLE.published("body.a", {"layers.0.b"}) == ["layers.0.a"], "it is missing where the others are"
    assert TABLE.published("body.a") == ["body.a"]
    assert EAGLE3.published("body.layers.0.mlp.up_proj.weight", {"midlayer.x"}) == ["midlayer.mlp.up_proj.weight"]
    assert EAGLE3.published("body.layers.2.x", {"midlayer.x"}) == ["layers.2.x"]


def test_a_file_tells_numbers_and_sizes():
    layout = TABLE.of_file(HELD)
    assert layout.shapes == HELD and not misfits(layout.shapes, HELD)
    assert layout.sizes.items() >= {"I": 2, "K": 2, "H": 4, "V": 9, "T": 3}.items()
    assert layout.names["heads.1.block.weight"] == ["head.1.3.weight", "head.1.5.weight"]
    assert (layout.names["outs.0"], layout.names["outs.1"]) == (["last.0"], ["out.1.2"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.0.5.weight": None}, "head.0.5.weight is missing"),
        ({"head.1.1.weight": (4, 8)}, "head.1.1.weight is [4, 8], not [4, 12]"),
        ({"last.0": (9,)}, "last.0 is [9], not [V, 4]"),
        ({"layers.0.b": None}, "body.b is missing"),
        ({"layers.0.a": (5,)}, "layers.0.a is [5], not [4]"),
        ({"head.2.3.weight": (4, 4)}, "head.2.1.weight is missing"),
        ({"more": ()}, "'more' is in no layer of the model"),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    held = {name: shape for name, shape in (HELD | change).items() if shape is not None}
    assert said in misfits(TABLE.of_file(held).shapes, held)


def test_sizes_that_are_known_count():
    assert "table is [3], not [5]" in misfits(TABLE.of_file(HELD, T=5).shapes, HELD)


def test_a_network_tells_the_shapes_of_what_it_reads():
    network_shapes = {"heads.0.block.weight": (4, 4), "body.b": (6,)}
    held = {"head.0.3.weight": (4, 4), "head.0.5.weight": (4, 4), "layers.0.b": (8,), "table": (3,)}
    published_shapes = TABLE.of_network(network_shapes, held, copies=2, T=3)
    assert published_shapes.names["heads.0.block.weight"] == ["head.0.3.weight", "head.0.5.weight"]
    assert misfits(published_shapes.shapes, held) == ["layers.0.b is [8], not [6]"]
