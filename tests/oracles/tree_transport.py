"""The most tokens that any lossless verifier accepts of random draft trees: a linear programme over all drafts.

A verifier of one step is a joint distribution of the draft X and the accepted path s, a node of X. With a(s) = P(the
accepted path passes s) it is lossless if and only if

    a(s x) <= a(s) p(x | s)    for every text s and token x,

as what is missing is emitted after s by the residual. So the optimum is the largest sum of a over all texts but the
empty one, subject to this and to the drafts' own distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from spec_lab.core.draft import Draft
from tests.distributions.tabular import paths_of

Text = tuple[int, ...]


def most_accepted(draft: Draft, probability: np.ndarray, p: Callable[[Text], np.ndarray]) -> float:
    """Return the largest expected number of accepted tokens.

    Args:
        draft: every draft, as the trees of a forest.
        probability: ``[B]`` of each.
        p: the target distribution after a text.
    """
    texts, root = paths_of(draft), draft.shape.root
    pairs = sorted({(int(tree), text) for tree, text in zip(root, texts, strict=True) if probability[tree] > 0})
    number = {text: index for index, text in enumerate(sorted({text for _, text in pairs}, key=len))}
    gain = -np.array([float(len(text)) for _, text in pairs])
    trees, tree = np.unique([tree for tree, _ in pairs], return_inverse=True)
    marginals = csr_array((np.ones(len(pairs)), (tree, np.arange(len(pairs)))), shape=(len(trees), len(pairs)))
    places = [
        (number[text[:length]], column) for column, (_, text) in enumerate(pairs) for length in range(len(text) + 1)
    ]
    rows, columns = np.array(places).T
    passes = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(number), len(pairs)))  # [texts, pairs] a
    longer = [text for text in number if text]
    if not longer:
        return 0.0
    passed = passes[[number[text] for text in longer]]
    above = passes[[number[text[:-1]] for text in longer]]
    chance = np.array([p(text[:-1])[text[-1]] for text in longer])
    lossless = passed - above.multiply(chance[:, None]).tocsr()
    solved = linprog(gain, A_ub=vstack([lossless]), b_ub=np.zeros(len(longer)), A_eq=marginals, b_eq=probability[trees],
                     method="highs")  # fmt: skip
    assert solved.status == 0, solved.message
    return -float(solved.fun)
