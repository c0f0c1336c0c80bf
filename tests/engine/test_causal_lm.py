"""The logits of every node equal those of a plain forward over its path, whatever happened to the cells before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, Shape, chain, empty, forest, tree
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.kv_cache import SpanFull
from tests.tiny import DENSE_ONLY, FAMILIES, VOCABULARY, tiny_model

TREE = tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def plain(model, tokens):
    """Logits after the last token, by a forward that knows nothing of cells."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def random_draft(shape, generator):
    return Draft(shape, torch.from_numpy(generator.integers(0, VOCABULARY, shape.nodes)))


def assert_rows_match(model, sequences, draft, logits, within=1e-10):
    for row in range(draft.shape.rows):
        path = [int(draft.token[node - draft.shape.roots]) for node in draft.shape.path(row)]
        expected = plain(model, sequences[int(draft.shape.root[row])] + path)
        scale = float(expected.std())
        assert float((logits[row] - expected).abs().max()) / scale < within, f"row {row}"


class World:
    """Sequences as plain lists beside the cells that should hold them."""

    def __init__(self, lm, generator):
        self.lm, self.generator = lm, generator
        self.tokens, self.paths = [], []

    def add(self, length):
        self.tokens.append(self.generator.integers(0, VOCABULARY, length).tolist())
        self.paths.append(self.lm.cells.open())

    def step(self, shapes, accept):
        """One forward below every sequence; tree b's path of child ranks ``accept[b]`` is accepted."""
        draft = random_draft(forest(tuple(shapes)), self.generator)
        pending = [tokens[len(path) :] for tokens, path in zip(self.tokens, self.paths, strict=True)]
        output = self.lm.forward(self.paths, pending, draft)
        assert_rows_match(self.lm.model, self.tokens, draft, output.logits)
        for b, (path, slots) in enumerate(zip(self.paths, output.slots, strict=True)):
            row, kept = b, []
            for rank in accept[b]:
                row = int(draft.shape.children[row][rank])
                kept.append(int(draft.shape.places[row]))
                self.tokens[b].append(int(draft.token[row - draft.shape.roots]))
            self.lm.cells.keep(path, slots[kept])
            self.lm.cells.drop(path, np.delete(slots, kept))
            self.tokens[b].append(int(self.generator.integers(VOCABULARY)))

    def backtrack(self, b, length):
        self.lm.cells.backtrack(self.paths[b], min(length - 1, len(self.paths[b])))
        del self.tokens[b][length:]

    def fork(self, b):
        self.paths.append(self.lm.cells.fork(self.paths[b]))
        self.tokens.append(list(self.tokens[b]))

    def close(self, b):
        self.lm.cells.close(self.paths.pop(b))
        self.tokens.pop(b)


def life(lm):
    """Accept, reject, backtrack, fork, free and reuse, in batches of unequal sequences."""
    world = World(lm, np.random.default_rng(1))
    world.add(9)
    world.step([TREE], [(0, 1)])
    world.add(4)
    world.add(13)
    world.step([TREE, chain(3), chain(0)], [(1, 0), (0, 0), ()])
    world.backtrack(0, 7)
    world.fork(0)
    world.fork(2)
    world.step([chain(2), TREE, chain(1), TREE, chain(2)], [(), (2,), (0,), (0, 0, 0), (0, 0)])
    world.close(1)
    world.add(5)
    world.step([TREE] * 5, [(0,), (), (1,), (2,), (0, 1)])
    world.step([TREE] * 5, [()] * 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_scattered_forests_exactly(family):
    life(CausalLM(tiny_model(family)))


@pytest.mark.parametrize("family", ["llama", "gpt2", *DENSE_ONLY])
def test_the_dense_mask_is_a_second_oracle(family):
    within = 1e-7 if family == "gptj" else 1e-10  # GPT-J computes attention scores in float32
    world = World(CausalLM(tiny_model(family), "dense"), np.random.default_rng(1))
    world.add(6)
    world.add(3)
    draft = random_draft(forest((TREE, chain(2))), world.generator)
    output = world.lm.forward(world.paths, world.tokens, draft)
    assert_rows_match(world.lm.model, world.tokens, draft, output.logits, within)


def test_spans_and_the_dense_mask_agree_on_holes_and_forks():
    model = tiny_model()
    logits = {}
    for attention in ("spans", "dense"):
        world = World(CausalLM(model, attention), np.random.default_rng(3))
        world.add(8)
        world.step([TREE], [(1,)])
        world.fork(0)
        world.step([TREE, chain(2)], [(0, 0), ()])
        draft = random_draft(forest((TREE, TREE)), world.generator)
        pending = [tokens[len(path) :] for tokens, path in zip(world.tokens, world.paths, strict=True)]
        logits[attention] = world.lm.forward(world.paths, pending, draft).logits
    torch.testing.assert_close(logits["spans"], logits["dense"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_long_prompts_are_prefilled_in_chunks_with_the_same_logits(chunk):
    model = tiny_model()
    tokens = [list(range(1, 23)), list(range(3, 8))]
    lm = CausalLM(model, chunk=chunk)
    output = lm.forward([lm.cells.open(), lm.cells.open()], tokens, empty(2))
    assert output.logits.shape == (2, VOCABULARY)
    assert_rows_match(model, tokens, empty(2), output.logits)


def test_accepting_rejecting_forking_and_backtracking_move_no_key():
    lm = CausalLM(tiny_model())
    world = World(lm, np.random.default_rng(0))
    world.add(9)
    world.step([TREE], [(0, 0)])
    before = [store.clone() for layer in (*lm.cells.keys, *lm.cells.values) for store in layer]
    addresses = [store.data_ptr() for layer in (*lm.cells.keys, *lm.cells.values) for store in layer]
    world.fork(0)
    world.backtrack(0, 4)
    world.close(0)
    after = [store for layer in (*lm.cells.keys, *lm.cells.values) for store in layer]
    assert addresses == [store.data_ptr() for store in after]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_span_grows_beyond_its_reserve_without_changing_a_logit():
    lm = CausalLM(tiny_model())
    tokens = list(np.random.default_rng(0).integers(0, VOCABULARY, 250))
    path = lm.cells.open(16)
    lm.forward([path], [tokens[:240]], empty(1))
    capacity = lm.cells.capacity
    draft = random_draft(chain(20), np.random.default_rng(1))
    output = lm.forward([path], [tokens[240:]], draft)
    assert lm.cells.capacity > capacity
    assert_rows_match(lm.model, [tokens], draft, output.logits)


def test_a_span_at_its_limit_refuses_and_keeps_what_it_holds():
    lm = CausalLM(tiny_model(), limit=16)
    path = lm.cells.open(16)
    lm.forward([path], [list(range(14))], empty(1))
    held = path.slots.copy()
    with pytest.raises(SpanFull, match="limited to 16"):
        lm.forward([path], [[3]], random_draft(chain(4), np.random.default_rng(0)))
    assert (path.slots == held).all()
    assert_rows_match(lm.model, [[*range(14), 5]], empty(1), lm.forward([path], [[5]], empty(1)).logits)


def test_hidden_states_are_kept_in_their_cells_when_wanted():
    model = tiny_model()
    lm = CausalLM(model, chunk=4)
    lm.keep_hidden(True)
    path = lm.cells.open()
    tokens = [5, 9, 2, 8, 1, 7]
    lm.forward([path], [tokens], empty(1))
    with torch.inference_mode():
        expected = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(lm.cells.hidden[path.span, path.slots], expected, rtol=0, atol=1e-10)
    lm.cells.backtrack(path, 3)
    torch.testing.assert_close(lm.cells.last_hidden(path), expected[2], rtol=0, atol=1e-10)


@st.composite
def lives(draw):
    """A random sequence of steps, backtracks, forks and frees."""
    actions = draw(st.lists(st.sampled_from(["step", "step", "add", "backtrack", "fork", "close"]), max_size=7))
    return actions, draw(st.integers(0, 2**31))


@settings(max_examples=25)
@given(lives())
def test_random_lives_leave_the_cells_as_the_plain_lists_say(script):
    actions, seed = script
    generator = np.random.default_rng(seed)
    world = World(CausalLM(MODEL, chunk=6), generator)
    world.add(int(generator.integers(1, 9)))
    for action in [*actions, "step"]:
        b = int(generator.integers(len(world.tokens))) if world.tokens else None
        if action == "add" or b is None:
            world.add(int(generator.integers(1, 9)))
        elif action == "backtrack":
            world.backtrack(b, int(generator.integers(1, len(world.tokens[b]) + 1)))
        elif action == "fork" and len(world.paths[b]):
            world.fork(b)
        elif action == "close" and len(world.tokens) > 1:
            world.close(b)
        elif action == "step":
            shapes = [random_shape(generator) for _ in world.tokens]
            world.step(shapes, [random_accept(shape, generator) for shape in shapes])


MODEL = tiny_model()


def random_shape(generator):
    nodes = int(generator.integers(0, 7))
    return Shape(1, np.array([generator.integers(0, row) for row in range(1, nodes + 1)], dtype=np.int64))


def random_accept(shape, generator):
    row, ranks = 0, []
    while len(shape.children[row]) and generator.random() < 0.7:
        ranks.append(int(generator.integers(len(shape.children[row]))))
        row = int(shape.children[row][ranks[-1]])
    return tuple(ranks)
