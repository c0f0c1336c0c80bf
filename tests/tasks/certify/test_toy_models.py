"""Toy models: through KV cache, masks and positions each row gets the logits after its own text."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.tasks.certify.toy_models import IMPOSSIBLE, PROMPT, RandomToy, code, logits, table_models, text_of, warped

TOY = RandomToy(1)  # with all special cases
LONGEST = 6
RAGGED = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))


@pytest.fixture(params=["target", "draft"])
def side(request):
    """One of a toy's two models, and a function from a text after the prompt to its logits."""
    target, draft = table_models(TOY, LONGEST)
    number = ["target", "draft"].index(request.param)
    return (target.lm, draft)[number], lambda text: logits(TOY.probabilities(len(text))[number])[code(text, TOY.v)]


computed: dict = {}
"""The tokens computed for each sequence."""


@pytest.fixture(autouse=True)
def forget():
    yield
    computed.clear()


def random_tokens(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, TOY.v, count))


def require_own_logits(lm, logits_after, paths, pending, draft):
    """Run the forest; every row's logits are those of the text that leads to it, bit for bit. Returns the output."""
    texts = [[*computed[path], *tokens] for path, tokens in zip(paths, pending, strict=True)]
    output = lm.forward(paths, pending, draft)
    for row in range(draft.shape.rows):
        down = [int(draft.token[node - draft.shape.roots]) for node in draft.shape.path(row)]
        text = (texts[draft.shape.root[row]] + down)[len(PROMPT) :]
        np.testing.assert_array_equal(output.logits[row].numpy(), logits_after(text), err_msg=f"after {text}")
    for path, text in zip(paths, texts, strict=True):
        computed[path] = text
    return output


def opened(lm):
    path = lm.open()
    computed[path] = []
    return path


def accept(path, draft, rows):
    """Commit some nodes of a one-tree draft, as ``commit`` does; the others' cells are given back."""
    places = np.array(rows) - 1
    path.accept(places)
    computed[path] += draft.token[places].tolist()


def test_a_tree_below_the_prompt(side):
    lm, logits_after = side
    require_own_logits(lm, logits_after, [opened(lm)], [list(PROMPT)], Draft(RAGGED, random_tokens(7)))


def test_many_pending_tokens_and_a_tree(side):
    lm, logits_after = side
    path = opened(lm)
    require_own_logits(lm, logits_after, [path], [list(PROMPT[:4])], empty(1))
    long = [*PROMPT[4:], 3, 0, 2]
    require_own_logits(lm, logits_after, [path], [long], Draft(RAGGED, random_tokens(7)))


def test_cells_scattered_by_partial_rejection(side):
    """The accepted path is not the first in the span, and the next tree fills the holes around it."""
    lm, logits_after = side
    path = opened(lm)
    first = Draft(RAGGED, random_tokens(7, 1))
    require_own_logits(lm, logits_after, [path], [list(PROMPT)], first)
    accept(path, first, [2, 5])  # the second child and the one below it
    assert not (np.diff(path.slots) == 1).all(), "this test needs holes"
    again = Draft(tree(((0,), (1,), (0, 0))), random_tokens(3, 2))
    require_own_logits(lm, logits_after, [path], [[3]], again)


def test_forks_attend_to_their_prefix_and_not_to_each_other(side):
    lm, logits_after = side
    path = opened(lm)
    require_own_logits(lm, logits_after, [path], [[*PROMPT, 2]], empty(1))
    twin = path.fork()
    computed[twin] = list(computed[path])
    both = forest((RAGGED, chain(2)))
    require_own_logits(lm, logits_after, [path, twin], [[1], [3, 0]], Draft(both, random_tokens(9)))
    require_own_logits(lm, logits_after, [twin, path], [[2], [0]], empty(2))


def test_a_batch_of_unlike_sequences(side):
    lm, logits_after = side
    paths = [opened(lm) for _ in range(3)]
    pending = [[*PROMPT], [*PROMPT, 1], [*PROMPT, 3, 2]]
    draft = Draft(forest((chain(3), chain(0), RAGGED)), random_tokens(10))
    require_own_logits(lm, logits_after, paths, pending, draft)


def test_the_hidden_state_that_heads_read_is_the_logits(side):
    lm, logits_after = side
    path = opened(lm)
    lm.capture((-1,))
    draft = Draft(RAGGED, random_tokens(7))
    output = require_own_logits(lm, logits_after, [path], [[*PROMPT, 3, 1]], draft)
    np.testing.assert_array_equal(output.pending[0][-1].numpy(), logits_after([3, 1]))
    np.testing.assert_array_equal(output.nodes[0].numpy(), output.logits[1:].numpy())


def test_a_row_that_attends_to_a_sibling_gets_other_logits(side, monkeypatch):
    """Negative control: siblings are visible, as under a causal mask over the pack."""

    def causal(shape):
        return [np.triu(np.full((len(rows),) * 2, -np.inf, dtype=np.float32), 1) for rows in shape.trees]

    monkeypatch.setattr(Shape, "tree_masks", property(causal))
    lm, logits_after = side
    with pytest.raises(
        AssertionError, match=r"after \[1\]"
    ):  # the root's second child; the first attends to nothing new
        require_own_logits(
            lm, logits_after, [opened(lm)], [list(PROMPT)], Draft(RAGGED, torch.tensor([2, 1, 3, 1, 2, 3, 1]))
        )


# Tables


def test_texts_and_their_numbers():
    assert code((), 4) == 0 and text_of(0, 0, 4) == ()
    assert code((2, 0, 3), 4) == 2 * 16 + 3
    assert [text_of(number, 2, 3) for number in range(9)] == [(a, b) for a in range(3) for b in range(3)]
    assert all(code(text_of(number, 3, 5), 5) == number for number in range(125))


@pytest.mark.parametrize("toy", [TOY, RandomToy(12, v=5), RandomToy(4, plain=True)], ids=lambda w: f"toy{w.seed}")
def test_tables_have_probabilities_after_every_text_and_are_reproducible(toy):
    for length in range(4):
        for mine, again in zip(toy.probabilities(length), replace(toy).probabilities(length), strict=True):
            assert mine.shape == (toy.v**length, toy.v)
            np.testing.assert_allclose(mine.sum(-1), 1, rtol=1e-12)
            assert (mine >= 0).all()
            np.testing.assert_array_equal(mine, again)
    assert not (toy.probabilities(1)[0][0] == toy.probabilities(1)[0][1]).all()


def test_softmax_of_logits_is_exact_and_zero_where_impossible():
    p = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert logits(p)[0, 2] == IMPOSSIBLE
    np.testing.assert_array_equal(torch.softmax(torch.from_numpy(logits(p)), -1).numpy(), p)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.0), Sampling(0.7, top_k=2), Sampling(1.3, repetition_penalty=1.7)],
    ids=["plain", "greedy", "top-k", "penalty"],
)
def test_warped_counts_each_text_s_own_tokens(sampling):
    prompt = (0, 1)
    probabilities = warped(TOY, 2, sampling, prompt)
    for length in range(3):
        for number in range(TOY.v**length):
            seen = torch.zeros(1, TOY.v, dtype=torch.bool)
            seen[0, [*prompt, *text_of(number, length, TOY.v)]] = True
            raw = torch.from_numpy(logits(TOY.probabilities(length)[0]))[number][None]
            np.testing.assert_allclose(
                probabilities[length][number], logits_to_probs(raw, [sampling], History(seen))[0].numpy(), atol=1e-15
            )
