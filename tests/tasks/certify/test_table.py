"""The table model: through cells, masks and positions of the real path each row gets the law after its own text."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft, Shape, chain, empty, forest, tree
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import Parts, step
from spec_lab.engine.study import Capture, choose_nothing, commit_nothing
from spec_lab.propose.heads import Heads
from spec_lab.propose.medusa import Medusa
from spec_lab.tasks.certify.exact import Instance, toy
from spec_lab.tasks.certify.table import table_models
from spec_lab.tasks.certify.worlds import IMPOSSIBLE, PROMPT, Random, code, logits, text_of, warped

WORLD = Random(1)  # laws of every kind
LONGEST = 6
RAGGED = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))


@pytest.fixture(params=["target", "draft"])
def side(request):
    """One of a world's two models, and a function from a text after the prompt to the logits of its law."""
    target, draft = table_models(WORLD, LONGEST)
    number = ["target", "draft"].index(request.param)
    return (target.lm, draft)[number], lambda text: logits(WORLD.laws(len(text))[number])[code(text, WORLD.v)]


computed: dict = {}
"""What was computed into each path."""


@pytest.fixture(autouse=True)
def forget():
    yield
    computed.clear()


def random_tokens(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, WORLD.v, count))


def require_own_laws(lm, law_after, paths, pending, draft):
    """Run the forest; every row's logits are those of the text that leads to it, bit for bit. Returns the output."""
    texts = [[*computed[path], *tokens] for path, tokens in zip(paths, pending, strict=True)]
    output = lm.forward(paths, pending, draft)
    for row in range(draft.shape.rows):
        down = [int(draft.token[node - draft.shape.roots]) for node in draft.shape.path(row)]
        text = (texts[draft.shape.root[row]] + down)[len(PROMPT) :]
        np.testing.assert_array_equal(output.logits[row].numpy(), law_after(text), err_msg=f"after {text}")
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
    lm, law_after = side
    require_own_laws(lm, law_after, [opened(lm)], [list(PROMPT)], Draft(RAGGED, random_tokens(7)))


def test_many_pending_tokens_and_a_tree(side):
    lm, law_after = side
    path = opened(lm)
    require_own_laws(lm, law_after, [path], [list(PROMPT[:4])], empty(1))
    long = [*PROMPT[4:], 3, 0, 2]
    require_own_laws(lm, law_after, [path], [long], Draft(RAGGED, random_tokens(7)))


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_computed_in_parts(side, chunk):
    lm, law_after = side
    lm.chunk = chunk
    require_own_laws(lm, law_after, [opened(lm)], [[*PROMPT, 1, 3, 3]], Draft(RAGGED, random_tokens(7)))


def test_cells_scattered_by_partial_rejection(side):
    """The accepted path is not the first in the span, and the next tree fills the holes around it."""
    lm, law_after = side
    path = opened(lm)
    first = Draft(RAGGED, random_tokens(7, 1))
    require_own_laws(lm, law_after, [path], [list(PROMPT)], first)
    accept(path, first, [2, 5])  # the second child and the one below it
    assert not (np.diff(path.slots) == 1).all(), "this test needs holes"
    again = Draft(tree(((0,), (1,), (0, 0))), random_tokens(3, 2))
    require_own_laws(lm, law_after, [path], [[3]], again)


def test_forks_see_their_prefix_and_not_each_other(side):
    lm, law_after = side
    path = opened(lm)
    require_own_laws(lm, law_after, [path], [[*PROMPT, 2]], empty(1))
    twin = path.fork()
    computed[twin] = list(computed[path])
    both = forest((RAGGED, chain(2)))
    require_own_laws(lm, law_after, [path, twin], [[1], [3, 0]], Draft(both, random_tokens(9)))
    require_own_laws(lm, law_after, [twin, path], [[2], [0]], empty(2))


def test_a_batch_of_unlike_sequences(side):
    lm, law_after = side
    paths = [opened(lm) for _ in range(3)]
    pending = [[*PROMPT], [*PROMPT, 1], [*PROMPT, 3, 2]]
    draft = Draft(forest((chain(3), chain(0), RAGGED)), random_tokens(10))
    require_own_laws(lm, law_after, paths, pending, draft)


def test_a_plain_forward_without_cells(side):
    lm, law_after = side
    text = [3, 1, 0, 2]
    with torch.inference_mode():
        plain = lm.model(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, len(PROMPT) - 1 :]
    for length, row in enumerate(plain):
        np.testing.assert_array_equal(row.numpy(), law_after(text[:length]))


def test_the_hidden_state_is_the_law_which_heads_read(side):
    lm, law_after = side
    path = opened(lm)
    lm.capture((-1,))
    draft = Draft(RAGGED, random_tokens(7))
    output = require_own_laws(lm, law_after, [path], [[*PROMPT, 3, 1]], draft)
    np.testing.assert_array_equal(output.pending[0][-1].numpy(), law_after([3, 1]))
    np.testing.assert_array_equal(output.nodes[0].numpy(), output.logits[1:].numpy())


def test_medusa_drafts_from_it():
    """Heads of the table's width fit, and what they draft depends on the text."""
    heads = Heads.random(table_models(WORLD, 2)[0], 1, trunk=True)
    parts = toy(Instance(WORLD, "2x1"), Medusa(heads, ((0,),)))
    capture, draws, drafted = Capture(), CounterDraws(0), set()
    study = Parts(parts.target, parts.proposer, capture, draws, None, choose_nothing, commit_nothing)
    for text in ((), (0,), (1,), (2,), (3,)):
        request = Request(0, "toy", (*PROMPT, *text))
        live = SequenceState(request, parts.target.lm.open(), list(request.tokens), state=parts.proposer.init(request))
        step([], study, [(live, len(request.tokens) - 1)])
        step([live], study)
        drafted.add(tuple(capture.draft.token.tolist()))
    assert len(drafted) > 1


def test_a_row_that_sees_a_sibling_finds_another_law(side, monkeypatch):
    """Negative control: siblings are visible, as under a causal mask over the pack."""

    def causal(shape):
        return [np.triu(np.full((len(rows),) * 2, -np.inf, dtype=np.float32), 1) for rows in shape.trees]

    monkeypatch.setattr(Shape, "tree_masks", property(causal))
    lm, law_after = side
    with pytest.raises(AssertionError, match=r"after \[1\]"):  # the head's second child; the first sees nothing new
        require_own_laws(
            lm, law_after, [opened(lm)], [list(PROMPT)], Draft(RAGGED, torch.tensor([2, 1, 3, 1, 2, 3, 1]))
        )


# Worlds


def test_texts_and_their_numbers():
    assert code((), 4) == 0 and text_of(0, 0, 4) == ()
    assert code((2, 0, 3), 4) == 2 * 16 + 3
    assert [text_of(number, 2, 3) for number in range(9)] == [(a, b) for a in range(3) for b in range(3)]
    assert all(code(text_of(number, 3, 5), 5) == number for number in range(125))


@pytest.mark.parametrize("world", [WORLD, Random(12, v=5), Random(4, plain=True)], ids=lambda w: f"world{w.seed}")
def test_a_world_is_laws_after_every_text_and_the_same_each_time(world):
    for length in range(4):
        for mine, again in zip(world.laws(length), Random(**vars(world)).laws(length), strict=True):
            assert mine.shape == (world.v**length, world.v)
            np.testing.assert_allclose(mine.sum(-1), 1, rtol=1e-12)
            assert (mine >= 0).all()
            np.testing.assert_array_equal(mine, again)
    assert not (world.laws(1)[0][0] == world.laws(1)[0][1]).all()


def test_logits_give_the_law_back_and_nothing_to_what_is_impossible():
    laws = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert logits(laws)[0, 2] == IMPOSSIBLE
    np.testing.assert_array_equal(torch.softmax(torch.from_numpy(logits(laws)), -1).numpy(), laws)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.0), Sampling(0.7, top_k=2), Sampling(1.3, repetition_penalty=1.7)],
    ids=["plain", "greedy", "top-k", "penalty"],
)
def test_warped_is_the_law_of_each_text_with_its_history(sampling):
    prompt = (0, 1)
    found = warped(WORLD, 2, sampling, prompt)
    for length in range(3):
        for number in range(WORLD.v**length):
            seen = torch.zeros(1, WORLD.v, dtype=torch.bool)
            seen[0, [*prompt, *text_of(number, length, WORLD.v)]] = True
            raw = torch.from_numpy(logits(WORLD.laws(length)[0]))[number][None]
            np.testing.assert_allclose(
                found[length][number], logits_to_probs(raw, [sampling], seen)[0].numpy(), atol=1e-15
            )


def test_the_prompt_ends_as_it_once_went_on():
    """So that prompt lookup has something to draft at the very first step."""
    assert PROMPT[-2:] in pairwise(PROMPT[:-1])
