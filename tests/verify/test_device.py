"""Verifiers and ``choose`` for p on a device: the same results, and nothing is read back before the one copy.

The ``meta`` device has shapes and no numbers: uploads and indexing work there, while ``.cpu()``, ``.item()``,
``bool()``, ``nonzero`` and boolean indexing raise.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core import shape as shape_module
from spec_lab.core.draft import WAYS, Draft
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.readback import Readback
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.core.upload import upload
from spec_lab.verify import (
    Cascade,
    Choice,
    Diversed,
    Gumbel,
    KSeq,
    Lenient,
    Match,
    Relaxed,
    Token,
    Traversal,
    Typical,
    arrays,
    choose,
)
from tests.verify.test_gumbel import races
from tests.verify.test_twins import drafts

VERIFIERS = [
    Token(), Traversal(), Match(), Lenient(0.7), KSeq(), Gumbel(), Typical(0.3, 0.9), Relaxed(2, 0.3),
    Cascade(0.3, "chow"), Cascade(0.1, "diff"), Cascade(0.5, "opt"), Diversed(0.4),
]  # fmt: skip
EACH = pytest.mark.parametrize("verifier", VERIFIERS, ids=[f"{v.name} {getattr(v, 'rule', '')}" for v in VERIFIERS])


def cases(verifier) -> st.SearchStrategy[tuple[Draft, torch.Tensor]]:
    """Drafts that the verifier supports, with p."""
    ways = tuple(way for way in ("iid", "without_replacement", "deterministic") if way in verifier.accepts)
    if len(ways) == 3:
        ways += ("mixed",)
    return drafts(ways) if ways else races()


def on_device(verifier, draft: Draft, p: torch.Tensor, rows: np.ndarray):
    """The results of the code for devices on CPU tensors: stop, residual at ``rows``, expected, a choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "on_host", lambda x: False)
        verdict = verifier(draft, p)
        assert isinstance(verdict.stop, torch.Tensor)
        who = [(root, 0, 0) for root in range(draft.shape.roots)]
        choice = choose(verdict, draft.shape, p, CounterDraws(0), who)
        assert all(isinstance(tensor, torch.Tensor) for tensor in choice)
        return verdict, verdict.residual(torch.from_numpy(rows)), verdict.expected_accepted(draft.shape), choice


@EACH
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.one_in(3)
def test_the_code_for_devices_has_the_results_of_the_code_for_the_cpu(verifier, data):
    draft, p = data.draw(cases(verifier))
    shape = draft.shape
    rows = np.array(data.draw(st.lists(st.integers(0, shape.rows - 1), min_size=1, max_size=6)))
    if not (p[: shape.roots].sum(-1) > 0).all():
        return
    host = verifier(draft, p)
    verdict, residual, expected, choice = on_device(verifier, draft, p, rows)
    slack = 1e-7 if isinstance(verifier, KSeq) else 1e-12  # K-SEQ's rho has half the digits where p is nearly q
    np.testing.assert_allclose(verdict.stop.numpy(), host.stop, rtol=0, atol=slack)
    ends = host.stop[rows] > slack  # what is left of rows where no path ends may differ
    np.testing.assert_allclose(residual.numpy()[ends], host.residual(rows).numpy()[ends], rtol=0, atol=slack)
    np.testing.assert_allclose(expected.numpy(), host.expected_accepted(shape), rtol=0, atol=10 * slack)
    assert residual.dtype == p.dtype
    if not isinstance(verifier, KSeq):
        wanted = choose(host, shape, p, CounterDraws(0), [(root, 0, 0) for root in range(shape.roots)])
        for mine, theirs in zip(Readback()(*choice), wanted, strict=True):
            assert mine.tolist() == theirs.tolist()


SHAPES = {
    "nothing": forest((chain(0), chain(0))),
    "chains": forest((chain(3), chain(0), chain(1))),
    "trees": forest((tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))), tree(((0,), (1,), (2,))), chain(2))),
}


def meta(shape: Shape, way: str, v: int = 50) -> tuple[Draft, torch.Tensor]:
    """A draft and p without numbers."""
    p = torch.empty(shape.rows, v, device="meta")
    token = torch.empty(shape.nodes, dtype=torch.long, device="meta")
    if way == "deterministic":
        return Draft(shape, token), p
    expanded = np.unique(shape.parent)
    q_row = np.full(shape.rows, -1)
    q_row[expanded] = np.arange(len(expanded))
    drawn = np.arange(shape.nodes, dtype=np.int8) % 3 if way == "mixed" else way
    q = torch.empty(len(expanded), v, device="meta")
    return Draft(shape, token, drawn, q, q_row, q.double() if way == "gumbel" else None), p


WAYS_OF = [
    (verifier, way)
    for verifier in VERIFIERS
    for way in (*WAYS, "mixed")
    if way in verifier.accepts or (way == "mixed" and verifier.accepts_mixed and "deterministic" in verifier.accepts)
]


@pytest.mark.parametrize(
    ("verifier", "way"), WAYS_OF, ids=[f"{v.name} {getattr(v, 'rule', '')}-{w}" for v, w in WAYS_OF]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.each_value
def test_a_step_reads_nothing_back(verifier, way, shape):
    draft, p = meta(shape, way)
    verdict = verifier(draft, p)
    assert verdict.stop.shape == (shape.rows,) and verdict.stop.dtype == torch.float64
    assert verdict.expected_accepted(shape).shape == (shape.roots,)
    rows = torch.arange(shape.roots, device="meta")
    assert verdict.residual(rows).shape == (shape.roots, p.shape[1])
    choice = choose(verdict, shape, p, CounterDraws(0), [(root, 0, 0) for root in range(shape.roots)])
    assert all(tensor.shape == (shape.roots,) and tensor.is_meta for tensor in choice)


SAMPLINGS = [
    Sampling(), Sampling(1.0), Sampling(1e-3), Sampling(0.7, top_k=5), Sampling(1.0, top_p=0.9),
    Sampling(1.0, min_p=0.1),
    Sampling(0.8, top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.2), Sampling(0.0, repetition_penalty=1.2),
]  # fmt: skip


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "samplings", [*([sampling] for sampling in SAMPLINGS), SAMPLINGS], ids=[*map(str, range(8)), "each"]
)
def test_target_probabilities_are_computed_without_reading_anything_back(samplings, masked, scratch):
    logits = torch.empty(8, 50, device="meta")
    seen = torch.empty(8, 50, dtype=torch.bool, device="meta")
    memory = torch.empty(9, 50, device="meta") if scratch else None
    p = logits_to_probs(logits, samplings, History(seen), seen if masked else None, scratch=memory)
    assert p.shape == (8, 50) and p.device.type == "meta"


def test_a_choice_that_could_not_be_sampled_is_reported_once_it_is_copied():
    with pytest.raises(ValueError, match=r"trees \[1\]"):
        Choice.check(np.array([3, -1]))
    Choice.check(np.array([3, 0]))


@EACH
@pytest.mark.one_in(3)
def test_a_shape_is_uploaded_once(verifier, monkeypatch):
    """Index arrays of a shape that comes again stay on the device."""
    uploads = []
    monkeypatch.setattr(shape_module, "upload", lambda *arrays: uploads.append(1) or upload(*arrays))
    shape = Shape(2, np.array([0, 0, 1, 2, 4]))
    for _ in range(3):
        way = next(iter(sorted(verifier.accepts)))
        draft, p = meta(shape, way)
        choose(verifier(draft, p), shape, p, CounterDraws(0), [(0, 0, 0), (1, 0, 0)])
    assert len(uploads) == 1
