"""The logits of every node equal those of a plain forward over its path, whatever happened to the cells before."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import GRAIN
from tests.tiny import DENSE_ONLY, FAMILIES, VOCABULARY, WINDOWED, tiny_model

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
    """Sequences as plain lists beside the cells that should hold them; ``oracle`` is the model without cells."""

    def __init__(self, lm, generator, oracle=None):
        self.lm, self.generator, self.oracle = lm, generator, oracle or lm.model
        self.tokens, self.caches = [], []

    def add(self, length):
        self.tokens.append(self.generator.integers(0, VOCABULARY, length).tolist())
        self.caches.append(self.lm.cells.open())

    def step(self, shapes, accept):
        """One forward below every sequence; tree b's path of child ranks ``accept[b]`` is accepted."""
        draft = random_draft(forest(tuple(shapes)), self.generator)
        pending = [tokens[len(cache) :] for tokens, cache in zip(self.tokens, self.caches, strict=True)]
        output = self.lm.forward(self.caches, pending, draft)
        assert_rows_match(self.oracle, self.tokens, draft, output.logits)
        for b, sequence in enumerate(self.caches):
            row, kept = b, []
            for rank in accept[b]:
                row = int(draft.shape.children[row][rank])
                kept.append(int(draft.shape.places[row]))
                self.tokens[b].append(int(draft.token[row - draft.shape.roots]))
            sequence.accept(kept)
            self.tokens[b].append(int(self.generator.integers(VOCABULARY)))

    def backtrack(self, b, length):
        self.caches[b].truncate(min(length - 1, len(self.caches[b])))
        del self.tokens[b][length:]

    def fork(self, b):
        self.caches.append(self.caches[b].fork())
        self.tokens.append(list(self.tokens[b]))

    def close(self, b):
        self.caches.pop(b).close()
        self.tokens.pop(b)


def life(lm, oracle=None):
    """Accept, reject, backtrack, fork, free and reuse, in batches of unequal sequences."""
    world = World(lm, np.random.default_rng(1), oracle)
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
@pytest.mark.one_in(9)
def test_every_family_decodes_scattered_forests_exactly(family):
    life(CausalLM(tiny_model(family)))


@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.each_value
def test_layers_with_windows_and_chunks_decode_scattered_forests_exactly(family, attention):
    """Against transformers' own masks; some families have layers of two kinds."""
    oracle = tiny_model(family)
    oracle.set_attn_implementation("sdpa")
    life(CausalLM(tiny_model(family), attention), oracle)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "falcon", *DENSE_ONLY])
def test_the_dense_mask_is_a_second_oracle(family):
    within = 1e-7 if family == "gptj" else 1e-10  # before transformers 5.24 GPT-J computes scores in float32
    world = World(CausalLM(tiny_model(family), "dense_mask"), np.random.default_rng(1))
    world.add(6)
    world.add(3)
    draft = random_draft(forest((TREE, chain(2))), world.generator)
    output = world.lm.forward(world.caches, world.tokens, draft)
    assert_rows_match(world.lm.model, world.tokens, draft, output.logits, within)


def test_spans_and_the_dense_mask_agree_on_holes_and_forks():
    model = tiny_model()
    logits = {}
    for attention in ("per_sequence", "dense_mask"):
        world = World(CausalLM(model, attention), np.random.default_rng(3))
        world.add(8)
        world.step([TREE], [(1,)])
        world.fork(0)
        world.step([TREE, chain(2)], [(0, 0), ()])
        draft = random_draft(forest((TREE, TREE)), world.generator)
        pending = [tokens[len(cache) :] for tokens, cache in zip(world.tokens, world.caches, strict=True)]
        logits[attention] = world.lm.forward(world.caches, pending, draft).logits
    torch.testing.assert_close(logits["per_sequence"], logits["dense_mask"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_long_prompts_are_prefilled_in_chunks_with_the_same_logits(chunk):
    model = tiny_model()
    tokens = [list(range(1, 23)), list(range(3, 8))]
    lm = CausalLM(model, chunk=chunk)
    output = lm.forward([lm.cells.open(), lm.cells.open()], tokens, empty(2))
    assert output.logits.shape == (2, VOCABULARY)
    assert_rows_match(model, tokens, empty(2), output.logits)


def stores(lm):
    return [span for layer in lm.cells.views for store in layer for span in store]


def test_accepting_rejecting_forking_and_backtracking_move_no_key():
    lm = CausalLM(tiny_model())
    world = World(lm, np.random.default_rng(0))
    world.add(9)
    world.step([TREE], [(0, 0)])
    before = [store.clone() for store in stores(lm)]
    addresses = [store.data_ptr() for store in stores(lm)]
    world.fork(0)
    world.backtrack(0, 4)
    world.close(0)
    after = stores(lm)
    assert addresses == [store.data_ptr() for store in after]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_span_grows_beyond_its_reserve_without_changing_a_logit():
    lm = CausalLM(tiny_model())
    tokens = list(np.random.default_rng(0).integers(0, VOCABULARY, 250))
    cache = lm.cells.open(16)
    lm.forward([cache], [tokens[:240]], empty(1))
    capacity = lm.cells.capacity
    draft = random_draft(chain(20), np.random.default_rng(1))
    output = lm.forward([cache], [tokens[240:]], draft)
    assert lm.cells.capacity > capacity
    assert_rows_match(lm.model, [tokens], draft, output.logits)


def test_a_forward_for_which_memory_runs_out_changes_no_sequence(monkeypatch):
    """The second sequence needs more cells than there are; the first one's are taken already."""
    lm = CausalLM(tiny_model())
    caches = [lm.cells.open(16), lm.cells.open(16)]
    prompts = [list(range(14)), [7] * GRAIN]
    lm.forward(caches, prompts, empty(2))
    held = [cache.slots.copy() for cache in caches]
    draft = random_draft(forest((chain(4), chain(4))), np.random.default_rng(0))
    with monkeypatch.context() as full:
        full.setattr(lm.cells, "_grow", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            lm.forward(caches, [[3], [4]], draft)
    assert all((cache.slots == before).all() for cache, before in zip(caches, held, strict=True))
    tokens = [[*prompt, 5] for prompt in prompts]
    assert_rows_match(lm.model, tokens, empty(2), lm.forward(caches, [[5], [5]], empty(2)).logits)


def test_forks_serve_other_requests_with_the_same_prefix():
    """The ability ``shared_prefix``, whichever of the requests ends first."""
    lm = CausalLM(tiny_model())
    assert "shared_prefix" in lm.capabilities.abilities
    prefix, first = [5, 9, 2, 8, 1, 7], lm.open()
    lm.forward([first], [prefix], empty(1))
    second = first.fork()
    cells = lm.cells.references.astype(bool).sum()
    draft = random_draft(forest((TREE, chain(2))), np.random.default_rng(1))
    output = lm.forward([first, second], [[3], [4, 6]], draft)
    assert_rows_match(lm.model, [[*prefix, 3], [*prefix, 4, 6]], draft, output.logits)
    first.close()
    second.accept()
    assert_rows_match(lm.model, [[*prefix, 4, 6, 8]], empty(1), lm.forward([second], [[8]], empty(1)).logits)
    assert lm.cells.references.sum() == cells + 3, "the prefix is held once"


def plain_hidden(model, tokens, layers):
    """Hidden states ``[n, layers * H]`` by a plain forward; 2 and -1 are those before and after the final norm."""
    before = []
    with torch.inference_mode(), model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0])):
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([(before[0] if layer == 2 else states[layer])[0] for layer in layers], -1)


LAYERS = pytest.mark.parametrize(
    "layers", [(-1,), (2,), (0,), (1,), (2, 0), (0, 1, -1), (2, -1), (-1, 0, 2), (-2, 2)], ids=str
)


@pytest.mark.each_value
@LAYERS
@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
def test_captured_hidden_states_are_those_of_a_plain_forward(layers, attention):
    """Rows are pending tokens in chunks of 4, nodes, and sequences that only prefill; a step after it as well."""
    model = tiny_model()
    lm = CausalLM(model, attention, chunk=4)
    lm.capture(layers)
    tokens = [[5, 9, 2, 8, 1, 7], [3], [4, 4, 6, 2, 1, 9, 9, 2, 30]]
    caches = [lm.open() for _ in tokens]
    for more in ([], [11]):
        pending = [all_[len(cache) :] + more for all_, cache in zip(tokens, caches, strict=True)]
        tokens = [all_ + more for all_ in tokens]
        draft = random_draft(forest((TREE, chain(2))), np.random.default_rng(1))
        output = lm.forward(caches[:2], pending[:2], draft, [(caches[2], pending[2])])
        assert len(output.pending) == 3 and len(output.nodes) == 2 and len(output.logits) == draft.shape.rows
        for all_, new, hidden in zip(tokens, pending, output.pending, strict=True):
            expected = plain_hidden(model, all_, layers)[len(all_) - len(new) :]
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10)
        for text, rows, hidden in zip(tokens, draft.shape.trees, output.nodes, strict=False):
            for node, row in enumerate(rows[1:].tolist()):
                path = [int(draft.token[at - draft.shape.roots]) for at in draft.shape.path(row)]
                expected = plain_hidden(model, text + path, layers)[-1]
                torch.testing.assert_close(hidden[node], expected, rtol=0, atol=1e-10)
        for cache in caches:
            cache.accept()
    lm.capture(())
    assert not lm.forward(caches[:1], [[1]], empty(1)).pending, "nothing is captured any more"


@pytest.mark.parametrize("nodes", [[], [0], [0, 2]], ids=str)
def test_observed_hidden_states_keep_no_memory_of_other_rows(nodes):
    """Rows are the pending tokens, those of earlier chunks too, then the nodes asked for."""
    lm = CausalLM(tiny_model(), chunk=4)
    lm.capture((-1,))
    draft = random_draft(forest((TREE, TREE)), np.random.default_rng(1))
    output = lm.forward([lm.open(), lm.open()], [[5, 9, 2, 8, 1, 7], [3]], draft)
    for number, count in enumerate([6, 1]):
        hidden = output.observed(number, nodes)
        assert hidden is not None and len(hidden) == count + len(nodes)
        expected = torch.cat([output.pending[number], output.nodes[number][nodes]])
        assert torch.equal(hidden, expected)
        assert hidden.untyped_storage().nbytes() == hidden.numel() * hidden.element_size()


@pytest.mark.parametrize("layers", [(3,), (-4,), (0, 7)])
def test_a_hidden_state_that_the_model_does_not_have_is_refused(layers):
    lm = CausalLM(tiny_model())
    with pytest.raises(ValueError, match=rf"hidden state {layers[-1]} .* states 0 to 2"):
        lm.capture(layers)
    lm.forward([lm.open()], [[1, 2]], empty(1))


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "biogpt"])
def test_the_final_state_of_other_families_enters_the_language_modelling_head(family):
    """Whatever the family calls its parts: the captured state times the head's weights is the logits."""
    lm = CausalLM(tiny_model(family))
    lm.capture((-1,))
    output = lm.forward([lm.open()], [[5, 9, 2]], empty(1))
    with torch.inference_mode():
        logits = lm.model.get_output_embeddings()(output.pending[0][-1])
    torch.testing.assert_close(logits, output.logits[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize("trees", [0, 1, 2])
def test_sequences_that_only_prefill_share_a_forward_and_get_no_logits(attention, trees):
    """Afterwards all of them continue as after a plain prefill."""
    lm = CausalLM(tiny_model(), attention, chunk=5)
    tokens = [[5, 9, 2, 8, 1, 7], [3, 1], [4, 4, 6, 2, 1, 9, 9, 2, 30], [8]]
    caches = [lm.open() for _ in tokens]
    draft = random_draft(forest((TREE, chain(2))[:trees]), np.random.default_rng(2)) if trees else empty(0)
    rest = list(zip(caches[trees:], tokens[trees:], strict=True))
    output = lm.forward(caches[:trees], tokens[:trees], draft, rest)
    if trees:
        assert_rows_match(lm.model, tokens, draft, output.logits)
    assert [len(cache) for cache in caches] == list(map(len, tokens))
    for cache in caches:
        cache.accept()
    draft = random_draft(forest((chain(2),) * 4), np.random.default_rng(3))
    output = lm.forward(caches, [[7]] * 4, draft)
    assert_rows_match(lm.model, [[*text, 7] for text in tokens], draft, output.logits)


def assert_levels_match(lm):
    """Nodes computed level by level have the logits of plain forwards; no cell is in use afterwards but the texts'."""
    caches, tokens = [lm.open(), lm.open()], [[5, 9, 2], [8, 1, 7, 3]]
    lm.forward(caches, tokens, empty(2))
    draft = random_draft(forest((TREE, chain(3))), np.random.default_rng(4))
    shape = draft.shape
    for level in range(1, shape.deepest + 1):
        rows = np.concatenate([tree[shape.depth[tree] == level] for tree in shape.trees])
        logits = lm.extend(caches, shape, rows, draft.token[torch.from_numpy(rows - shape.roots)]).logits
        for row, row_logits in zip(rows.tolist(), logits, strict=True):
            path = [int(draft.token[at - shape.roots]) for at in shape.path(row)]
            expected = plain(lm.model, tokens[int(shape.root[row])] + path)
            torch.testing.assert_close(row_logits, expected, rtol=0, atol=1e-10)
    for cache in caches:
        cache.accept()
    assert [len(cache) for cache in caches] == [3, 4]
    assert int(lm.cells.references.sum()) == 7, "the cells of nodes are free again"
    for cache in caches:
        cache.close()


def test_nodes_computed_level_by_level_have_the_logits_of_one_forward():
    assert_levels_match(CausalLM(tiny_model()))


@st.composite
def histories(draw):
    """A random sequence of steps, backtracks, forks and frees."""
    actions = draw(st.lists(st.sampled_from(["step", "step", "add", "backtrack", "fork", "close"]), max_size=7))
    return actions, draw(st.integers(0, 2**31))


@settings(max_examples=25)
@given(histories())
def test_random_histories_leave_the_cells_that_plain_lists_give(script):
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
        elif action == "fork" and len(world.caches[b]):
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
