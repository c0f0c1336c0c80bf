"""Faults that engines have had with constraints, injected: enumeration finds every one."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import spec_lab.decode.commit
import spec_lab.decode.step
from spec_lab.constrain.applied import DraftTreeMasks
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.engines.grammar import Grammar
from spec_lab.constrain.protocol import Constraint, ConstraintState, Masks, allows, full_mask, masks_by_forking
from spec_lab.tasks.certify.enumeration import Reused
from spec_lab.tasks.certify.exact import examine
from spec_lab.tasks.certify.instances import constrained
from spec_lab.verify import Token


@contextmanager
def masks_changed(change):
    """Replace every forest's masks by ``change(masks, shape)``; the constraints' fast paths are off."""

    def changed(constraint, states: list[ConstraintState | None], shape, token) -> Masks:
        return change(masks_by_forking(states, shape, token, constraint.vocabulary), shape)

    with ExitStack() as patches:
        for kind in (Constraint, Combined, Grammar):
            patches.enter_context(mock.patch.object(kind, "masks", changed))
        yield


def leaves_are_free(masks, shape):
    """The bonus or recovered token is drawn without the mask: "trim the draft, then add a bonus"."""
    leaf = np.array([not len(children) for children in shape.children])
    return replace(masks, bits=np.where((leaf & masks.legal & ~masks.barrier)[:, None], full_mask(5), masks.bits))


def parents_mask(masks, shape):
    """Each node is masked by its parent's state: masks lag one token behind."""
    above = np.concatenate([np.arange(shape.roots), shape.parent])
    return replace(masks, bits=np.where(masks.bits.any(-1, keepdims=True), masks.bits[above], masks.bits))


def barriers_are_not_seen(masks, shape):
    """Nodes below a backtracking action are kept."""
    bits = np.where(masks.barrier[:, None], full_mask(5), masks.bits)
    return Masks(bits, masks.legal, np.zeros_like(masks.barrier))


def _first_allowed(state):
    mask = state.mask()
    return None if mask is None else next((token for token in range(5) if allows(mask, token)), None)


def _same_stream(sequence, number, fork_state, fork=spec_lab.decode.commit.fork):
    return replace(fork(sequence, number, fork_state), lineage=sequence.lineage)


def _one_less(sequence, count, remove=spec_lab.decode.commit.remove):
    return remove(sequence, max(count - 1, 0))


def _never_a_b(self, shape, rows, token, call=DraftTreeMasks.__call__):
    """The draft may not draw "b"; where nothing else is left it may draw anything."""
    allowed = call(self, shape, rows, token)
    allowed[:, 1] = False
    return allowed


MUTANTS = {
    "leaves are free": lambda: masks_changed(leaves_are_free),
    "masks lag behind": lambda: masks_changed(parents_mask),
    "barriers are not seen": lambda: masks_changed(barriers_are_not_seen),
    "the target is not masked": lambda: masks_changed(
        lambda masks, shape: replace(masks, bits=np.where(masks.barrier[:, None], masks.bits, full_mask(5)))
    ),
    "forced means first allowed": lambda: mock.patch.object(spec_lab.decode.commit, "forced_token", _first_allowed),
    "forks share their noise": lambda: mock.patch.object(spec_lab.decode.commit, "fork", _same_stream),
    "a token too few is removed": lambda: mock.patch.object(spec_lab.decode.commit, "remove", _one_less),
}


def found() -> list[str]:
    """The instances whose distribution, or whose keys, are wrong."""
    wrong = []
    for instance in constrained():
        try:
            if examine(instance, "iid", Token()).wrong:
                wrong.append(instance.name)
        except (Reused, AssertionError, ValueError, IndexError, KeyError) as error:
            wrong.append(f"{instance.name}: {error!r}")
    return wrong


@pytest.mark.nightly
def test_without_a_fault_no_difference_is_found():
    assert found() == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_is_found(name):
    with MUTANTS[name]():
        assert found()


@pytest.mark.nightly
def test_faults_in_the_draft_alone_change_no_distribution():
    """Masks on the draft are an aid: however wrong they are, the output distribution is the same."""
    with mock.patch.object(DraftTreeMasks, "__call__", _never_a_b):
        assert found() == []
