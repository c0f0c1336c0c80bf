"""The pictures of the documentation: what they draw is what the run recorded."""

import numpy as np
import pandas as pd
import pytest

from scripts.docs_pictures import (
    draw_acceptance,
    draw_tree,
    read_step,
    residual,
    tree_mask,
)


def test_rows_attend_to_their_ancestors_and_themselves_only():
    mask = tree_mask([-1, 0, 0, 1, 3])
    assert [set(np.flatnonzero(row)) for row in mask] == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}]


def test_accepted_and_recovered_probabilities_add_up_to_p():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])
    rejected = 1 - np.minimum(p, q).sum()
    assert np.minimum(p, q) + rejected * residual(p, q) == pytest.approx(p)


def ids(*tokens):
    return b"".join(int(token).to_bytes(3, "little") for token in tokens)


@pytest.fixture
def run(tmp_path):
    """A run with one step: of two siblings 70000 is accepted, below it 7 is rejected and 8 recovered."""
    q = np.array([0.25, 0.75], np.float32).tobytes()
    p = np.array([0.5, 0.5], np.float32).tobytes()
    rows = [
        (0, -1, 5, ids(70000, 6), q),
        (1, 0, 70000, ids(7, 8), q),
        (2, 0, 6, ids(1, 2), b""),
        (3, 1, 7, ids(1, 2), b""),
    ]
    recorded = [
        {
            "request": 0,
            "forward": 4,
            "position": 3,
            "row": row,
            "parent": parent,
            "token": token,
            "ids": kept_ids,
            "p": p,
            "q": q,
        }
        for row, parent, token, kept_ids, q in rows
    ]
    other = [row | {"forward": 5} for row in recorded]
    pd.DataFrame([*other, *recorded[::-1]]).to_parquet(tmp_path / "replay.parquet")
    pd.DataFrame([{"request": 0, "forward": 4, "path": [0], "emitted": 2}]).to_parquet(tmp_path / "steps.parquet")
    output = {"request": 0, "prompt_tokens": 2, "tokens": [5, 70000, 8, 9]}
    pd.DataFrame([output]).to_parquet(tmp_path / "requests.parquet")
    return tmp_path


def test_a_step_is_read_as_it_was_recorded(run):
    step = read_step(run, 0, 4, [1, 2])
    assert [row.parent for row in step.rows] == [-1, 0, 0, 1] and step.path == [1]
    assert step.before == [1, 2] and step.emitted == [70000, 8]
    assert step.rows[0].of(70000) == pytest.approx((0.5, 0.25)) and step.rows[3].q.size == 0


def test_pictures_show_tokens_with_their_probabilities(run):
    step = read_step(run, 0, 4, [1, 2])
    texts = {text.get_text() for text in draw_tree(step, ["root", "a", "b", "c"]).axes[0].texts}
    assert {"root", "a", "p 0.50  q 0.25", "p 0.50  q 0.75"} <= texts
    title = draw_acceptance(step, str, [(0, 1, "it was accepted")]).axes[0].get_title(loc="left")
    centre = draw_acceptance(step, str, [(0, 1, "it was accepted")]).axes[0].get_title()
    assert "min(1, 0.50 / 0.25) = 1.00" in title + centre
