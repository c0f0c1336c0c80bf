"""The self-check of deep models and in every data type: rounding passes, every fault of the engine is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from spec_lab.core.process_cache import ProcessCache
from spec_lab.models import float32_copy, self_check
from spec_lab.models import target as target_module
from spec_lab.models.forests import Checked, Rows, decode_forests, rounding_error
from spec_lab.models.layer_checks import check_exit
from spec_lab.models.packed import PackedLinear, pack, packed_dtypes
from spec_lab.models.plain_forwards import PlainForwards, plain_forward
from spec_lab.models.support import Unsupported
from spec_lab.runners import causal_lm, prepare
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import Cells, CellSequence
from spec_lab.runners.layer_ranges import find_layers
from spec_lab.runners.model_work import parameters_of
from spec_lab.runners.prepare import Packer
from tests.models.families import tiny_family
from tests.tiny import tiny_model

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEEP = dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
DEEPER = dict(num_hidden_layers=100, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("sizes", [
    DEEPER | dict(num_hidden_layers=30), pytest.param(DEEP, marks=pytest.mark.nightly),
    pytest.param(DEEPER, marks=pytest.mark.nightly),
], ids=["narrow", "deep", "deeper"])  # fmt: skip
def test_deep_models_pass_in_every_data_type(sizes, dtype):
    model = tiny_model(dtype=dtype, **sizes)
    check = self_check.self_check(model, "per_sequence")
    assert check.error < 0.75 * check.allowed
    pack(model)
    assert self_check.self_check(model, "per_sequence").passed


def sees_a_sibling(patch):
    mask = prepare.forest_mask

    def wrong(shape, tree, pending):
        bias = mask(shape, tree, pending).copy()
        if shape is not None and len(bias) > pending + 1:
            bias[pending + 1, pending] = 0
        return bias

    patch.setattr(prepare, "forest_mask", wrong)


def misses_an_ancestor(patch):
    mask = prepare.forest_mask

    def wrong(shape, tree, pending):
        bias = mask(shape, tree, pending).copy()
        if shape is not None:
            bias[-1, pending - 1] = -np.inf
        return bias

    patch.setattr(prepare, "forest_mask", wrong)


def counts_nodes_one_too_far(patch):
    plan = Packer.plan

    def wrong(packer, *args, **more):
        planned = plan(packer, *args, **more)
        for rows in planned.nodes:
            planned.numbers[1, rows] += 1
        return planned

    patch.setattr(Packer, "plan", wrong)


def keeps_another_cell(patch):
    """The cell of a rejected node, in place of the last accepted one's."""
    accept = CellSequence.accept

    def wrong(sequence, nodes=()):
        if len(nodes):
            sequence.held, other = sequence.held.copy(), min({*range(len(sequence.held))} - {*nodes})
            sequence.held[[nodes[-1], other]] = sequence.held[[other, nodes[-1]]]
        return accept(sequence, nodes)

    patch.setattr(CellSequence, "accept", wrong)


def writes_to_the_next_cell(patch):
    write = Cells.write

    def wrong(cells, layer, key, value, places):
        moved = [
            (span, start, stop, where.roll(1) if isinstance(where, torch.Tensor) and len(where) > 1 else where)
            for span, start, stop, where in places
        ]
        return write(cells, layer, key, value, moved)

    patch.setattr(Cells, "write", wrong)


MUTANTS = (
    sees_a_sibling, misses_an_ancestor, counts_nodes_one_too_far, keeps_another_cell, writes_to_the_next_cell,
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.float64], ids=str)
def test_every_fault_is_refused_in_every_data_type(mutant, dtype, monkeypatch):
    model = tiny_model(dtype=dtype, num_hidden_layers=4)
    self_check.self_check(model, "per_sequence")
    mutant(monkeypatch)
    with pytest.raises(Unsupported, match="decodes forests wrongly") as caught:
        self_check.self_check(model, "per_sequence")
    assert "target.dtype" not in str(caught.value)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.nightly)], ids=str)
def test_every_fault_is_refused_without_a_copy_in_float32(mutant, dtype, monkeypatch):
    """By the rounding of the model's own plain forwards."""
    monkeypatch.setattr(PlainForwards, "of", lambda model, whole=False: PlainForwards(model, None))
    model = tiny_model(dtype=dtype, num_hidden_layers=4)
    self_check.self_check(model, "per_sequence")
    mutant(monkeypatch)
    with pytest.raises(Unsupported, match="decodes forests wrongly"):
        self_check.self_check(model, "per_sequence")


def test_every_captured_shape_is_replayed_with_other_tokens(monkeypatch):
    replays = []

    def counting(forward):
        number = len(replays)
        replays.append(0)

        def replay():
            replays[number] += 1
            return forward()

        return replay

    monkeypatch.setattr(causal_lm, "uncaptured", counting)
    self_check.self_check(tiny_model(), "per_sequence", fixed=True)
    assert len(replays) > 2 and min(replays) >= 2


def test_kernels_that_are_wrong_in_one_data_type_are_refused_with_the_one_that_works(monkeypatch, caplog):
    """In forwards of one row only, which few of the check's rows are."""
    model, forward = tiny_model(dtype=BF16), nn.Linear.forward

    def wrong(layer, x):
        return forward(layer, x) * (1.1 if x.dtype == BF16 and x.shape[-2] == 1 and layer.out_features == 48 else 1)

    self_check.self_check(model, "per_sequence")
    monkeypatch.setattr(nn.Linear, "forward", wrong)
    says = r"in torch\.bfloat16: .* in torch\.float32 by .*; set target\.dtype=float32, which works$"
    with pytest.raises(Unsupported, match=says):
        self_check.self_check(model, "per_sequence")


def test_a_large_model_is_represented_by_layers_of_each_kind_that_share_its_weights(monkeypatch):
    monkeypatch.setattr(float32_copy, "MAX_COPIED", 0)
    model = tiny_family("gemma2", num_hidden_layers=12).to(BF16)
    pack(model)
    rounded, exact = float32_copy.comparable(model)
    assert (
        rounded.config.num_hidden_layers == exact.config.num_hidden_layers == 4 and model.config.num_hidden_layers == 12
    )
    assert len(rounded.config.layer_types) == 4 and {parameter.dtype for parameter in exact.parameters()} == {F32}
    for part, whole in zip(find_layers(rounded)[2], find_layers(model)[2], strict=False):
        assert part is not whole and part.mlp.up_proj.weight is whole.mlp.up_proj.weight
    assert self_check.self_check(model, "per_sequence").passed
    monkeypatch.setattr(causal_lm, "layer_kinds", lambda config: {})
    with pytest.raises(Unsupported):
        self_check.self_check(model, "per_sequence")
    assert float32_copy._needed(tiny_model("llama4_text", num_hidden_layers=12)) == 4
    assert float32_copy._needed(tiny_model(num_hidden_layers=3)) is None


def test_a_copy_in_float32_has_the_same_numbers_in_plain_layers():
    model = tiny_model(dtype=BF16, tie_word_embeddings=True)
    pack(model)
    copy = float32_copy.float32_copy(model)
    assert not any(isinstance(module, PackedLinear) for module in copy.modules())
    assert {parameter.dtype for parameter in copy.parameters()} == {F32} == {copy.config.dtype} and model.dtype == BF16
    torch.testing.assert_close(copy.model.embed_tokens.weight, model.model.embed_tokens.weight.float(), rtol=0, atol=0)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        expected = tiny_model(dtype=BF16, tie_word_embeddings=True).float()(tokens).logits
        torch.testing.assert_close(copy(tokens).logits, expected)


def test_first_layers_are_compared_on_any_device_where_a_copy_of_the_whole_does_not_fit(monkeypatch, caplog):
    model = tiny_model(dtype=BF16, num_hidden_layers=40, tie_word_embeddings=True)
    monkeypatch.setattr(float32_copy, "available", lambda device: 4 * 2 * parameters_of(model) - 8)
    rounded, exact = float32_copy.comparable(model)
    assert rounded.config.num_hidden_layers == exact.config.num_hidden_layers == 4
    check = self_check.self_check(model, "per_sequence")
    assert check.passed and check.in_float32 and not caplog.records
    with pytest.raises(MemoryError):
        float32_copy.comparable(model, whole=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_model_with_wrong_packed_kernels_is_unpacked_and_checked_again(dtype, monkeypatch, caplog):
    if dtype not in packed_dtypes():
        pytest.skip(f"no kernels of packed layers in {dtype} here")
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: forward(self, x) * (1.1 if x.shape[-2] == 1 else 1))
    model = tiny_model(dtype=dtype)
    check = target_module._pack_checked(model, "per_sequence", "", ProcessCache())
    assert check.passed and not any(isinstance(module, PackedLinear) for module in model.modules())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "without packed linear layers" in warning and "standard deviations" in warning


def test_a_fault_that_float32_shows_is_not_looked_for_in_packed_layers(monkeypatch):
    sees_a_sibling(monkeypatch)
    with pytest.raises(Unsupported) as caught:
        self_check.self_check(tiny_model(dtype=BF16), "per_sequence")
    assert type(caught.value) is Unsupported


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_layers_that_continue_from_a_draft_are_compared_in_the_same_way(dtype, monkeypatch):
    lm = CausalLM(tiny_model(dtype=dtype, **DEEPER | dict(num_hidden_layers=12)))
    check = check_exit(lm, 3, "deep")
    assert check.passed and (check.allowed == 1e-3) == (dtype == F32)
    sees_a_sibling(monkeypatch)
    with pytest.raises(Unsupported, match="continues wrongly after 3 layers"):
        check_exit(lm, 3, "deep")


def test_rows_that_jump_by_chance_do_not_decide_where_the_others_were_compared_exactly():
    model = tiny_model(dtype=BF16)
    rows = decode_forests(CausalLM(model))
    expected = [plain_forward(model, [row.text])[0, -len(row.logits) :].float() for row in rows]
    others = [right + 0.01 * torch.randn_like(right) for right in expected]
    one_jump = [rows[0]._replace(logits=rows[0].logits + 3 * torch.randn_like(rows[0].logits)), *rows[1:]]
    assert rounding_error(one_jump, expected, others, 0.0, robust=True).passed
    assert not rounding_error(one_jump, expected, others, 0.0, robust=False).passed
    every = [row._replace(logits=row.logits + 0.2 * torch.randn_like(row.logits)) for row in rows]
    assert not rounding_error(every, expected, others, 0.0, robust=True).passed


def rows_in_two_groups():
    generator = torch.Generator().manual_seed(0)
    expected = [torch.randn(1, 50, generator=generator) for _ in range(3)]
    rows = [Rows([1, number], right + 0.01, number == 0) for number, right in enumerate(expected)]
    return rows, expected, [right.clone() for right in expected]


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["row", "expected", "others"])
@pytest.mark.parametrize("group", [0, 2])
def test_a_number_that_is_not_finite_is_an_infinite_error_in_either_group(group, where, wrong, robust):
    rows, expected, others = rows_in_two_groups()
    assert rounding_error(rows, expected, others, 0.1, robust).passed
    {"row": rows[group].logits, "expected": expected[group], "others": others[group]}[where][0, 3] = wrong
    if where == "expected":
        others[group][:] = expected[group]
    error = rounding_error(rows, expected, others, 0.1, robust)
    assert error.error == float("inf") and not error.passed


def test_a_group_that_fails_decides_and_an_infinite_bound_admits_nothing_infinite():
    rows, expected, others = rows_in_two_groups()
    rows[0] = rows[0]._replace(logits=rows[0].logits + torch.linspace(0, 3, 50))
    others[1:] = [right + torch.linspace(0, 3, 50) for right in expected[1:]]
    assert not rounding_error(rows, expected, others, 0.0, robust=False).passed
    assert not Checked(float("inf"), float("inf")).passed


def test_a_model_whose_logits_are_all_equal_passes_where_the_decoded_ones_are_too(caplog):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert self_check.self_check(model, "per_sequence").error == 0 and "every token the same logit" in caplog.text
    model.lm_head.register_forward_hook(lambda _, args, logits: logits + args[0].shape[1])
    with pytest.raises(Unsupported, match="'llama' cannot be checked .*the same logit, the decoded forest does not"):
        self_check.self_check(model, "per_sequence")
