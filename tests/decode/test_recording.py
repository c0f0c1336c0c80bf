"""Records of ``record=drafts`` for every step: trees, acceptance probabilities, masks and emitted tokens."""

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.draft import Draft
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import Shape, forest, tree
from spec_lab.decode import step as engine_step
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.recording import Recording, conditional_acceptance
from spec_lab.results.schema import DRAFT_COLUMNS
from spec_lab.verify import Gumbel, KSeq, Lenient, Match, Token, Traversal, Typical
from tests.decode.test_copies import PROPOSERS, EvenTokens, MadeUp, target_on
from tests.decode.test_copies import requests as short_requests
from tests.propose.lab import COLD, WARM, draft_model, emitted, requests


def recorded(target, proposer, verifier, wanted, applied=None):
    """The engine after decoding, its steps, and the columns of each step's trees."""
    engine = fixed_group(
        Arm(target, proposer, verifier, CounterDraws(0), applied, record=Recording(drafts=True)), wanted
    )
    steps = list(engine)
    return engine, steps, [info.rows() for info in steps]


def random_draft(rng, drawn):
    """Two trees over five tokens with distributions of their own at every row."""
    shape = forest((tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))), tree(((0,), (1,), (2,)))))
    q = torch.from_numpy(rng.dirichlet(np.ones(5), shape.rows))
    token = []
    for node in range(shape.nodes):
        earlier = [token[n] for n in range(node) if shape.parent[n] == shape.parent[node]]
        weight = q[shape.parent[node]].numpy().copy()
        if drawn != "iid":
            weight[earlier] = 0
        token.append(int(rng.choice(5, p=weight / weight.sum())))
    tokens, p = torch.tensor(token), torch.from_numpy(rng.dirichlet(np.ones(5), shape.rows))
    if drawn == "deterministic":
        return Draft(shape, tokens), p
    return Draft(shape, tokens, drawn, q, np.arange(shape.rows)), p


def walked(draft, p):
    """Conditional acceptance by walking the siblings of every row: recursive rejection, as papers write it."""
    shape, probabilities = draft.shape, np.full(draft.shape.nodes, np.nan)
    for row in range(shape.rows):
        left, q_row, alive = p[row].numpy().copy(), None, 1.0
        if draft.q is not None:
            q_row = draft.q[row].numpy().copy()
        for child in shape.children[row]:
            token = int(draft.token[child - shape.roots])
            q = np.eye(5)[token] if q_row is None else q_row
            accept = min(1.0, left[token] / q[token])
            probabilities[child - shape.roots] = alive * accept
            alive *= 1 - accept
            if alive == 0:
                probabilities[[n - shape.roots for n in shape.children[row] if n > child]] = 0.0
                break
            left = np.maximum(left - q, 0)
            left /= left.sum()
            if draft.drawn == "without_replacement":
                q_row[token] = 0
                q_row /= q_row.sum()
    return probabilities


@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
def test_acceptance_given_the_parent_is_that_of_walking_the_siblings(drawn):
    rng = np.random.default_rng(3)
    for _ in range(20):
        draft, p = random_draft(rng, drawn)
        accept = conditional_acceptance(draft.shape, Token()(draft, p).stop)
        wanted = walked(draft, p)
        reached = ~np.isnan(accept)
        assert accept[reached] == pytest.approx(wanted[reached], abs=1e-9) and reached.any()
        parents = draft.shape.parent - draft.shape.roots
        assert all(wanted[parents[node]] == pytest.approx(0) for node in np.flatnonzero(~reached))


@pytest.mark.parametrize("verifier", [Token(), Traversal(), Match(), KSeq(), Lenient(0.5), Typical()])
def test_acceptance_along_a_path_multiplies_to_where_it_ends(verifier):
    rng = np.random.default_rng(4)
    for _ in range(10):
        draft, p = random_draft(rng, "iid")
        shape, stop = draft.shape, verifier(draft, p).stop
        accept = np.nan_to_num(conditional_acceptance(shape, stop))
        for row in range(shape.rows):
            reach = np.prod([accept[node - shape.roots] for node in shape.path(row)])
            ends = 1 - sum(accept[node - shape.roots] for node in shape.children[row])
            assert reach * ends == pytest.approx(stop[row], abs=1e-9)


@pytest.mark.parametrize(
    ("verifier", "drawn", "sampling"),
    [
        (Token(), "without_replacement", WARM),
        (Token(), "deterministic", COLD),
        (Traversal(), "iid", WARM),
        (Typical(), "deterministic", WARM),
        (Gumbel(), "gumbel", WARM),
    ],
)
def test_rows_hold_the_tree_the_path_and_the_emitted_tokens(target, verifier, drawn, sampling):
    proposer = draft_model("2x2x1", drawn)
    engine, steps, rows = recorded(target, proposer, verifier, requests(sampling, new=8))
    texts = {sequence.request.id: [] for sequence in engine.sequences}
    for info, of_step in zip(steps, rows, strict=True):
        for tree_number, row in enumerate(of_step):
            assert set(DRAFT_COLUMNS) <= row.keys()
            shape = Shape(1, np.array(row["draft_parents"], dtype=np.int64) + 1)
            end = 0
            for rank in row["path"]:
                end = int(shape.children[end][rank])
            path = [node - 1 for node in shape.path(end)]
            accepted = [row["draft_tokens"][node] for node in path]
            assert row["emitted_tokens"][: row["accepted"]] == accepted
            assert len(row["emitted_tokens"]) == len(row["emitted_origins"]) == row["emitted"] == len(path) + 1
            assert row["emitted_origins"][-1] == ("recovered" if shape.count[end] else "bonus")
            assert all(row["draft_accept"][node] > 0 for node in path)
            expected = sum(_reach(row["draft_accept"], row["draft_parents"]))
            assert expected == pytest.approx(row["expected_accepted"], abs=1e-9)
            assert row["draft_confidence"] is None, "there is no confidence head"
            assert 0 < row["emitted_p"] <= 1 and row["draft_legal"] is row["draft_forced"] is None
            texts[info.sequences[tree_number].request.id] += row["emitted_tokens"][: row["emitted_kept"]]
    assert list(texts.values()) == emitted(engine)
    assert sum(row["accepted"] for of_step in rows for row in of_step) > 0


def _reach(accept, parents):
    reach = []
    for chance, parent in zip(accept, parents, strict=True):
        reach.append((chance or 0.0) * (1.0 if parent < 0 else reach[parent]))
    return reach


def test_at_temperature_0_probabilities_are_those_of_the_arg_max_and_nothing_else_is_computed(target):
    wanted = requests(COLD, new=8)
    engine, steps, rows = recorded(target, draft_model("2x1", "deterministic"), Token(), wanted)
    plain = fixed_group(Arm(target, draft_model("2x1", "deterministic"), Token(), CounterDraws(0)), wanted)
    assert len(list(plain)) == len(steps) and emitted(plain) == emitted(engine)
    for info, of_step in zip(steps, rows, strict=True):
        assert info.recorded.p is None  # no softmax of every row
        for row in of_step:
            assert set(row["draft_p"]) <= {0.0, 1.0} and row["emitted_p"] == 1.0
            for p, accept, parent in zip(row["draft_p"], row["draft_accept"], row["draft_parents"], strict=True):
                above = 1.0 if parent < 0 else _reach(row["draft_accept"], row["draft_parents"])[parent]
                assert accept == (p if above else None)


def test_nodes_outside_the_constraint_are_marked_and_have_no_probability():
    target = target_on("cpu")
    proposer = PROPOSERS["draft_without"](target)
    _, _, rows = recorded(target, proposer, Token(), short_requests(0.8, 2), AppliedConstraint(EvenTokens()))
    nodes = [
        (token, legal, p, accept, row["draft_legal"][parent] if parent >= 0 else True)
        for entry in rows
        for row in entry
        for token, legal, p, accept, parent in zip(
            *(row[f"draft_{name}"] for name in ("tokens", "legal", "p", "accept", "parents")), strict=True
        )
    ]
    assert all(legal == (above and token % 2 == 0) for token, legal, _, _, above in nodes)
    assert all(not accept for _, legal, _, accept, _ in nodes if not legal)
    assert all(row["legal"] == sum(row["draft_legal"]) for entry in rows for row in entry)
    assert all(row["forced"] == sum(row["draft_forced"]) for entry in rows for row in entry)


@pytest.mark.parametrize("sampling", [COLD, WARM])
def test_what_was_not_verified_has_no_acceptance(target, monkeypatch, sampling):
    run, computed = target.lm.run, []

    def fails_at_the_third(*arguments, **options):
        output = run(*arguments, **options)
        computed.append(output)
        if len(computed) == 3:
            output.logits[0] = torch.nan
        return output

    monkeypatch.setattr(target.lm, "run", fails_at_the_third)
    _, _, rows = recorded(target, draft_model("2x1", "deterministic"), Token(), requests(sampling, new=8))
    failed = [row for entry in rows for row in entry if not row["expected_kind"]]
    assert len(failed) == 1 and len(failed[0]["draft_tokens"]) == 4 and set(failed[0]["draft_accept"]) == {None}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("null", 0.0),
        ("null", 0.8),
        ("medusa", 0.0),
        ("draft_points", 0.8),
        ("draft_without", 0.8),
        ("draft_chain", 0.8),
    ],
)
def test_recording_costs_no_further_copy(monkeypatch, name, temperature):
    """On the ``meta`` device everything that reads a tensor raises, except the counted copies."""
    monkeypatch.setattr(engine_step, "Readback", MadeUp)
    monkeypatch.setattr(MadeUp, "whole", 0 if name == "null" else 2)  # the row where all paths end: none is drafted
    target = target_on("meta")
    wanted = short_requests(temperature, 1)
    engine = fixed_group(
        Arm(target, PROPOSERS[name](target), Token(), CounterDraws(1), record=Recording(drafts=True)), wanted
    )
    steps = list(engine)
    assert len(steps) >= 2 and all(info.copies_after == 1 for info in steps)
    assert all(len(row["emitted_tokens"]) == row["emitted"] for info in steps for row in info.rows())
