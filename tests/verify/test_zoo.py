"""Every verifier equals the algorithm of its paper on random forests; properties of all verifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import chain, forest
from spec_lab.tasks.certify.enumeration import explore
from spec_lab.verify import (
    Cascade,
    KSeq,
    Lenient,
    Relaxed,
    Token,
    Traversal,
    Typical,
    aimed,
    choose,
    kseq,
    longest_path,
)
from spec_lab.verify.kseq import min_rho
from tests.distributions import twin, twin_zoo
from tests.verify.test_twins import PAIRS, alone, drafts, joint

CASES = [
    *PAIRS,
    (KSeq(), twin_zoo.kseq),
    (Lenient(0.7), lambda draft, p: twin.token(draft, p, 0.7)),
    (Typical(0.3, 0.9), lambda draft, p: twin_zoo.typical(draft, p, 0.3, 0.9)),
    (Relaxed(2, 0.3), lambda draft, p: twin_zoo.relaxed(draft, p, 2, 0.3)),
    *[
        (Cascade(alpha, rule), lambda draft, p, alpha=alpha, rule=rule: twin_zoo.cascade(draft, p, alpha, rule))
        for alpha, rule in [(0.3, "chow"), (0.1, "diff"), (0.5, "opt")]
    ],
]
NAMES = ["token", "traversal", "match", "kseq", "lenient", "typical", "relaxed", "chow", "diff", "opt"]
EACH = pytest.mark.parametrize(("verifier", "direct"), CASES, ids=NAMES)
ALL = tuple(sorted({"iid", "without_replacement", "deterministic"}))


@st.composite
def supported(draw: st.DrawFn, verifier) -> tuple[Draft, torch.Tensor]:
    """A draft that the verifier supports, with p."""
    mixed = ("mixed",) if verifier.accepts >= set(ALL) else ()
    return draw(drafts(tuple(how for how in ALL if how in verifier.accepts) + mixed))


def close(verifier) -> float:
    """K-SEQ's rho has half the digits where p is nearly q, in any algorithm; see the tests of ``kseq``."""
    return 1e-7 if isinstance(verifier, KSeq) else 1e-12


@EACH
@settings(max_examples=60)
@given(data=st.data())
def test_a_verifier_equals_its_paper_s_algorithm(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    stop, emit = direct(draft, p.numpy())
    verdict = verifier(draft, p)
    assert verdict.stop.dtype == np.float64
    np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=close(verifier))
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=close(verifier))
    np.testing.assert_allclose(np.bincount(draft.shape.root, weights=verdict.stop), 1.0, rtol=0, atol=1e-12)


@EACH
@settings(max_examples=30)
@given(data=st.data())
def test_no_path_ends_at_an_illegal_node(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    assert verifier(draft, p).stop[p.sum(-1).numpy() == 0].sum() == 0


@EACH
@settings(max_examples=25)
@given(data=st.data())
def test_trees_of_a_forest_are_independent(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    shape = draft.shape
    whole = joint(draft, verifier(draft, p))
    for rows in shape.trees:
        single = alone(draft, rows)
        np.testing.assert_allclose(joint(single, verifier(single, p[rows])), whole[rows], rtol=0, atol=1e-13)


@EACH
@settings(max_examples=30)
@given(data=st.data())
def test_a_verdict_changes_no_input_and_is_repeatable(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    kept = p.clone(), None if draft.q is None else draft.q.clone(), draft.token.clone()
    first, again = (joint(draft, verifier(draft, p)) for _ in range(2))
    assert (first == again).all()
    assert torch.equal(p, kept[0]) and torch.equal(draft.token, kept[2])
    assert draft.q is None or torch.equal(draft.q, kept[1])


@EACH
@settings(max_examples=30)
@given(data=st.data())
def test_residuals_are_returned_for_any_rows_in_any_order(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    verdict = verifier(draft, p)
    rows = np.array(data.draw(st.lists(st.integers(0, draft.shape.rows - 1), min_size=1, max_size=6)))
    every = verdict.residual(np.arange(draft.shape.rows))
    torch.testing.assert_close(verdict.residual(rows), every[torch.from_numpy(rows)], rtol=1e-12, atol=0)


def draws_from_target(draft, p):
    """Whether some children are drawn from p itself."""
    rows = np.flatnonzero(draft.q_row >= 0)
    return bool((draft.q[draft.q_row[rows]].double() - p[rows]).abs().amax(-1).min() < 1e-6)


def lossless_and_best(draft, p):
    """K-SEQ's condition 1 + d + .. + d^(k-1) <= rho, d = 1 - beta, and the acceptance 1 - d^k of the least rho."""
    rho, precise = min_rho(draft, p), min_rho(draft, p.double())
    for row in np.flatnonzero(draft.shape.count):
        k, q = int(draft.shape.count[row]), draft.q[draft.q_row[row]].double()
        d, best = (1 - float(torch.minimum(q, p[row].double() / tried_rho[row]).sum()) for tried_rho in (rho, precise))
        assert sum(d**i for i in range(k)) <= rho[row] + 1e-6
        assert 1 - d**k == pytest.approx(1 - best**k, abs=1e-6)


@pytest.mark.parametrize(
    ("verifier", "direct"), [c for c in CASES if not isinstance(c[0], Typical | Relaxed | Cascade)]
)
@settings(max_examples=30)
@given(data=st.data())
def test_single_precision_is_close_to_the_algorithm_in_double(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    if draft.q is not None:
        draft = Draft(draft.shape, draft.token, draft.drawn, draft.q.float(), draft.q_row)
    verdict = verifier(draft, p.float())
    assert verdict.residual(np.array([0])).dtype == torch.float32
    stop, emit = direct(draft, p.float().double().numpy())
    slack = 2e-3 if isinstance(verifier, KSeq) else 2e-5  # half of seven digits
    if isinstance(verifier, KSeq) and draft.shape.nodes and draws_from_target(draft, p):
        # With p = q of k siblings, rho = 1 is a root of order k, and rounding p moves it by a k-th root of a rounding
        # error. Which rho is taken does not matter, as long as it is lossless and accepts as much.
        lossless_and_best(draft, p.float())
        return
    np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=slack)
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=slack)


@pytest.mark.parametrize(
    ("verifier", "direct"), [c for c in CASES if isinstance(c[0], KSeq | Lenient | Token | Traversal)]
)
@settings(max_examples=30)
@given(data=st.data())
def test_a_draft_may_be_less_precise_than_the_target(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    if draft.q is not None:
        draft = Draft(draft.shape, draft.token, draft.drawn, draft.q.float(), draft.q_row)
    stop, emit = direct(draft, p.numpy())
    verdict = verifier(draft, p)
    slack = 2e-3 if isinstance(verifier, KSeq) else 2e-5
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=slack)


@pytest.mark.parametrize(("verifier", "direct"), [c for c in CASES if isinstance(c[0], Typical | Relaxed | Cascade)])
@settings(max_examples=30)
@given(data=st.data())
def test_in_single_precision_a_threshold_decides_as_in_double_unless_met_exactly(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    if draft.q is not None:
        draft = Draft(draft.shape, draft.token, draft.drawn, draft.q.float(), draft.q_row)
    p = p.float()
    nudged = [direct(draft, p.double().numpy() * (1 + nudge)) for nudge in (-1e-6, 0, 1e-6)]
    assume(all(np.allclose(nudged[1][0], stop, atol=1e-4) for stop, _ in nudged))
    verdict = verifier(draft, p)
    stop, emit = nudged[1]
    assert verdict.residual(np.array([0])).dtype == torch.float32
    np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=2e-5)
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=2e-5)


@EACH
@settings(max_examples=25)
@given(data=st.data())
def test_wide_vocabularies_are_processed_in_parts_with_the_same_result(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    whole = joint(draft, verifier(draft, p))
    with pytest.MonkeyPatch.context() as patch:
        for module in (kseq, longest_path, aimed):
            patch.setattr(module, "CHUNK", 2 * p.shape[-1])  # two rows at a time
        np.testing.assert_allclose(joint(draft, verifier(draft, p)), whole, rtol=0, atol=1e-14)


@EACH
def test_no_nodes_emits_from_the_target(verifier, direct):
    p = torch.softmax(torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)
    bare = Draft(forest((chain(0),) * 3), torch.empty(0, dtype=torch.long), "iid", p[:0], np.full(3, -1))
    for draft in [empty(3), bare] if "deterministic" in verifier.accepts else [bare]:
        verdict = verifier(draft, p)
        assert verdict.stop.tolist() == [1.0, 1.0, 1.0]
        assert torch.equal(verdict.residual(np.arange(3)), p)


@EACH
@settings(max_examples=25)
@given(data=st.data())
def test_every_step_can_be_sampled(verifier, direct, data):
    draft, p = data.draw(supported(verifier))
    verdict, who = verifier(draft, p), [(root, 0, 0) for root in range(draft.shape.roots)]
    assume(draft.shape.roots == 1)
    mass = sum(m for m, _ in explore(lambda draws: choose(verdict, draft.shape, p, draws, who)))
    assert mass == pytest.approx(1, abs=1e-12)


@EACH
def test_target_probabilities_of_other_rows_than_the_forest_are_refused(verifier, direct):
    q = torch.full((1, 4), 0.25)
    draft = Draft(chain(1), torch.tensor([0]), "iid", q, np.array([0, -1]))
    with pytest.raises(ValueError, match="2 rows"):
        verifier(draft, torch.full((3, 4), 0.25))
