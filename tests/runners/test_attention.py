"""Attention masks as a function of layer and position: against plain loops, and models with windows and chunks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.runners.attention import (
    FULL,
    AttentionKind,
    Pack,
    attention_mask,
    cell_attention,
    counting_layers,
    layer_kinds,
)
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import Cells
from spec_lab.runners.prepare import Packer
from tests.tiny import VOCABULARY, tiny_model

CPU = torch.device("cpu")
KINDS = [FULL, AttentionKind(sliding_window=1), AttentionKind(sliding_window=4), AttentionKind(chunk=3)]
TREE = tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
HIDDEN = np.float32(-np.inf)


def reaches(kind, query, key):
    """Whether a layer of this kind lets a token attend to an earlier one, by their positions."""
    if kind.sliding_window is not None and query - key >= kind.sliding_window:
        return False
    return kind.chunk is None or query // kind.chunk == key // kind.chunk


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mask_hides_what_the_kind_of_the_layer_does_not_reach_and_what_full_attention_hides(kind):
    generator = np.random.default_rng(0)
    query, key = generator.integers(0, 20, 30), generator.integers(0, 20, 40)
    full = np.where((generator.random((30, 40)) < 0.7) & (key <= query[:, None]), np.float32(0), HIDDEN)
    mask = attention_mask(kind, query, key, full)
    for i, j in np.ndindex(mask.shape):
        assert mask[i, j] == (0 if full[i, j] == 0 and reaches(kind, int(query[i]), int(key[j])) else HIDDEN)


def attended(segment):
    """The set of cells that each row of a segment attends to."""
    cells = range(segment.first, segment.end)
    if segment.causal:
        return [set(cells[: row + 1]) for row in range(segment.stop - segment.start)]
    if segment.mask is None:
        return [set(cells)] * (segment.stop - segment.start)
    return [{cells[column] for column in row.nonzero()[:, 0].tolist()} for row in segment.mask == 0]


def expected(kind, sequence, computed, shape, number):
    """The same by loops over positions and paths: for each pending token, then for each node."""
    length, slots = len(sequence), []
    for query in range(computed, length):
        slots.append({int(sequence.slots[key]) for key in range(query + 1) if reaches(kind, query, key)})
    for row in shape.trees[number][1:].tolist():
        query = length - 1 + int(shape.depth[row])
        held = {int(sequence.slots[key]) for key in range(length) if reaches(kind, query, key)}
        for node in shape.path(row):
            if reaches(kind, query, length - 1 + int(shape.depth[node])):
                held.add(int(sequence.held[shape.places[node]]))
        slots.append(held)
    return slots


class Layers:
    """Forwards without a model: a layer of each kind, and the sequences that are prepared for them."""

    def __init__(self):
        self.cells = Cells()
        kinds = {number: kind for number, kind in enumerate(KINDS) if kind != FULL}
        self.packer = Packer(self.cells, kinds, len(KINDS), CPU, torch.float32)
        self.sequences = [self.cells.open()]

    def prepare(self, counts, shape):
        """Prepare ``counts`` pending tokens of every sequence, and a forest; compare every mask."""
        before = [len(sequence) for sequence in self.sequences]
        pending = [[1] * count for count in counts]
        draft = Draft(shape, torch.zeros(shape.nodes, dtype=torch.long))
        prepared = self.packer.prepare(self.sequences, pending, draft)
        assert list(prepared.pack.segments) == KINDS
        for kind, segments in prepared.pack.segments.items():
            for number, (segment, sequence) in enumerate(zip(segments, self.sequences, strict=True)):
                wanted = expected(kind, sequence, before[number], shape, number)
                assert attended(segment) == wanted, f"sequence {number}, {kind}"
        return prepared


def test_trees_forks_and_holes_have_the_masks_of_plain_loops():
    layers = Layers()
    layers.prepare([7], TREE)
    layers.sequences[0].accept([0, 2])
    layers.sequences.append(layers.sequences[0].fork())
    layers.prepare([1, 2], forest((TREE, chain(2))))
    layers.sequences[0].accept([1])
    layers.sequences[1].accept([0, 1])
    layers.sequences[0].truncate(5)
    layers.prepare([3, 1], forest((chain(0), TREE)))
    for sequence in layers.sequences:
        sequence.accept()
    layers.prepare([1, 1], forest((chain(0), chain(0))))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["step", "step", "fork", "truncate"]), max_size=6), st.integers(0, 2**31))
def test_random_forests_have_the_masks_of_plain_loops(actions, seed):
    generator, layers = np.random.default_rng(seed), Layers()
    for action in [*actions, "step"]:
        seq = layers.sequences[int(generator.integers(len(layers.sequences)))]
        if action == "fork":
            layers.sequences.append(seq.fork())
        elif action == "truncate":
            seq.truncate(int(generator.integers(len(seq) + 1)))
        else:
            count = len(layers.sequences)
            trees = [
                Shape(1, np.array([generator.integers(row) for row in range(1, nodes + 1)], dtype=np.int64))
                for nodes in generator.integers(0, 6, count)
            ]
            layers.prepare(generator.integers(1, 4, count).tolist(), forest(tuple(trees)))
            for sequence, shape in zip(layers.sequences, trees, strict=True):
                path = shape.path(int(generator.integers(shape.rows)))
                sequence.accept([row - 1 for row in path])


def test_full_attention_and_what_a_window_leaves_whole_have_no_mask():
    """A prompt is causal; one new token sees the last cells of its window, wherever the prompt began."""
    layers = Layers()
    segments = layers.prepare([3], chain(0)).pack.segments
    assert [segments[kind][0].causal for kind in KINDS] == [True, False, True, True]
    layers.prepare([4], chain(0))
    segments = layers.prepare([1], chain(0)).pack.segments  # position 7
    assert all(segment.mask is None and not segment.causal for (segment,) in segments.values())
    assert [(segment.first, segment.end) for (segment,) in segments.values()] == [(0, 8), (7, 8), (4, 8), (6, 8)]


def test_kinds_are_read_from_the_config_of_the_model():
    def kinds(family, **changes):
        return layer_kinds(tiny_model(family, **changes).config)

    window = AttentionKind(sliding_window=5)
    assert kinds("llama") == kinds("mistral") == kinds("gpt2") == {}
    assert kinds("mistral", sliding_window=5) == {0: window, 1: window}
    mixed = dict(sliding_window=5, use_sliding_window=True, max_window_layers=1)
    assert kinds("qwen2", **mixed) == {1: window} and kinds("qwen2", **mixed | dict(use_sliding_window=False)) == {}
    chunked = SimpleNamespace(
        layer_types=["chunked_attention", "full_attention"], attention_chunk_size=8, num_hidden_layers=2
    )
    assert layer_kinds(chunked) == {0: AttentionKind(chunk=8)}
    with pytest.raises(NotImplementedError, match="indexed_attention"):
        layer_kinds(SimpleNamespace(layer_types=["indexed_attention"], num_hidden_layers=1))


@pytest.mark.parametrize("asked", [{"sliding_window": 4}, {"position_bias": 0}, {"head_mask": 0}], ids=str)
def test_attention_that_the_config_does_not_name_is_refused(asked):
    query = key = value = torch.ones(1, 1, 1, 2)
    layers = Layers()
    prepared = layers.prepare([1], chain(0))
    cells = Pack(layers.cells, {}, prepared.pack.segments, CPU, prepared.positions).update(key, value, 0)
    with pytest.raises(NotImplementedError, match=next(iter(asked))):
        cell_attention(torch.nn.Identity(), query, *cells, None, **asked)
    if "sliding_window" not in asked:
        with pytest.raises(NotImplementedError, match=next(iter(asked))):
            cell_attention(torch.nn.Identity(), query, key, value, None, **asked)


SOFTMAXES = {
    "softcap": dict(softcap=1.5),
    "sinks": dict(s_aux=torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)),
    "both": dict(softcap=0.7, scaling=0.9, s_aux=torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)),
}


def by_loops(query, keys, values, sees, scaling=None, softcap=None, s_aux=None):
    """Attention ``[heads, n, dim]`` by loops over heads and rows; ``sees[i]`` are the keys of row i."""
    out = torch.zeros_like(query)
    for head, row in np.ndindex(query.shape[:2]):
        kv = keys[head // (len(query) // len(keys)), sees[row]], values[head // (len(query) // len(keys)), sees[row]]
        scores = kv[0] @ query[head, row] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        sink = 0.0 if s_aux is None else s_aux[head].exp()
        out[head, row] = (scores.exp() / (scores.exp().sum() + sink)) @ kv[1]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("asked", SOFTMAXES.values(), ids=SOFTMAXES)
def test_soft_caps_and_sinks_are_those_of_plain_loops(asked, kv_heads):
    """A prompt, then a tree over cells of two sequences, and a forward without cells; in layers of every kind."""
    layers, generator = Layers(), torch.Generator().manual_seed(0)
    layers.sequences.append(layers.cells.open())
    for counts, shape in (([7, 3], forest((chain(0), chain(0)))), ([1, 2], forest((TREE, chain(2))))):
        prepared = layers.prepare(counts, shape)
        rows = prepared.ids.shape[1]
        query, key, value = (
            torch.randn(1, heads, rows, 4, dtype=torch.float64, generator=generator)
            for heads in (4, kv_heads, kv_heads)
        )
        for number, kind in enumerate(KINDS):
            layer, _ = prepared.pack.update(key, value, number)
            more = asked | dict(sliding_window=kind.sliding_window)
            output = cell_attention(torch.nn.Identity(), query, layer, layer, None, **more)[0][0].transpose(0, 1)
            for segment in prepared.pack.segments[kind]:
                sees = [sorted(cells) for cells in attended(segment)]
                views = [store[segment.stream][0] for store in layers.cells.views[number]]
                expected = by_loops(query[0, :, segment.start : segment.stop], *views, sees, **asked)
                torch.testing.assert_close(output[:, segment.start : segment.stop], expected)
    for kind in KINDS:
        config = SimpleNamespace(
            attention_chunk_size=kind.chunk, num_hidden_layers=1, layer_types=[kind.layer_type],
            sliding_window=kind.sliding_window,
        )  # fmt: skip
        module, more = SimpleNamespace(config=config, layer_idx=0), asked | dict(sliding_window=kind.sliding_window)
        output = cell_attention(module, query, key, value, None, **more)[0][0].transpose(0, 1)
        sees = [[column for column in range(row + 1) if reaches(kind, row, column)] for row in range(rows)]
        torch.testing.assert_close(output, by_loops(query[0], key[0], value[0], sees, **asked))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_first_position_that_a_query_attends_to(kind):
    for query in range(12):
        assert kind.first(query) == min(key for key in range(query + 1) if reaches(kind, query, key))


def test_layers_that_count_their_rows_get_the_positions_of_the_rows_on_their_device():
    positions = torch.tensor([[5, 6, 6, 9]])
    pack = Pack(Cells(), {}, {}, CPU, positions=positions, counting={2: CPU, 3: torch.device("meta")})
    assert (pack.get_seq_length(2) + torch.arange(4)).tolist() == positions[0].tolist()
    assert pack.get_seq_length(3).is_meta and pack.get_seq_length(3).shape == (4,)
    assert pack.get_seq_length() == pack.get_seq_length(1) == 0
    model = tiny_model("llama4_text")
    assert counting_layers(model) == {3: CPU} and counting_layers(tiny_model()) == {}
    assert counting_layers(tiny_model("llama4_text", attn_temperature_tuning=False)) == {}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_new_token_in_bfloat16_attends_as_in_a_plain_forward(heads):
    """Whether its key-value heads are shared or not; alone, and beside another sequence."""
    plain = tiny_model(dtype=torch.bfloat16, num_key_value_heads=heads)
    plain.set_attn_implementation("sdpa")
    lm = CausalLM(tiny_model(dtype=torch.bfloat16, num_key_value_heads=heads))
    texts = [[5, 9, 2, 8, 1], [3, 1, 22]]
    caches = [lm.open() for _ in texts]
    lm.forward(caches, texts, empty(2))
    for count in (1, 2):
        texts[0].append(7)
        logits = lm.forward(caches[:count], [[7]] * count, empty(count)).logits
        with torch.inference_mode():
            expected = plain(input_ids=torch.tensor([texts[0]])).logits[0, -1]
        assert float((logits[0] - expected).abs().max() / expected.std()) < 0.1


def greedy(lm, prompts, futures, shape, new):
    """Greedy tokens of a batch; below each root ``shape`` is drafted, with what will come on its first path.

    In every third step the path breaks off after its first token.
    """
    caches, tokens = [lm.open() for _ in prompts], [list(prompt) for prompt in prompts]
    joined, steps = forest((shape,) * len(prompts)), 0
    while any(len(text) - len(prompt) < new for text, prompt in zip(tokens, prompts, strict=True)):
        drafted = np.zeros(joined.nodes, dtype=np.int64)
        for number, rows in enumerate(joined.trees):
            coming = [*futures[number][len(tokens[number]) :], *[0] * shape.nodes]
            for row in rows[1:].tolist():
                depth, right = int(joined.depth[row]), not any(joined.ranks(row))
                spoiled = not right or (steps % 3 == 2 and depth > 1)
                drafted[row - joined.roots] = (coming[depth - 1] + spoiled) % VOCABULARY
        pending = [text[len(cache) :] for text, cache in zip(tokens, caches, strict=True)]
        logits = lm.forward(caches, pending, Draft(joined, torch.from_numpy(drafted))).logits.argmax(-1).tolist()
        for number, cache in enumerate(caches):
            row, kept = number, []
            while True:
                tokens[number].append(logits[row])
                below = [node for node in joined.children[row] if drafted[node - joined.roots] == logits[row]]
                if not below:
                    break
                row = int(below[0])
                kept.append(int(joined.places[row]))
            cache.accept(kept)
        steps += 1
    return [text[: len(prompt) + new] for text, prompt in zip(tokens, prompts, strict=True)], steps


@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize("shape", [chain(0), chain(3), TREE], ids=["nothing", "chain", "tree"])
@pytest.mark.parametrize("family", ["mistral-windows", "qwen2-windows"])
@pytest.mark.each_value
def test_greedy_decoding_beyond_a_sliding_window_equals_generate(family, shape, attention):
    new, prompts = 20, [[5, 9, 2, 8, 1, 7, 4, 4, 6], [3, 1, 22]]
    plain = tiny_model(family)
    plain.set_attn_implementation("sdpa")
    truth = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        truth.append(plain.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)[0].tolist())
    lm = CausalLM(tiny_model(family), attention, chunk=4)
    texts, steps = greedy(lm, prompts, truth, shape, new)
    assert texts == truth
    assert steps < new if shape.nodes else steps == new
    full = CausalLM(tiny_model(family, sliding_window=None), attention)
    assert greedy(full, prompts, truth, chain(0), new)[0] != truth, "the window matters"
