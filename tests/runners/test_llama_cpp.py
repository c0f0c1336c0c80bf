"""llama.cpp behind the runner's Protocol, on a small fake of its library: forests, KV caches, hidden states, growth."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.pard.propose import Pard
from spec_lab.models.target import Target
from spec_lab.propose.best_first import Budget
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners import llama_library
from spec_lab.runners.llama_context import MAX_IDS, LlamaSettings
from spec_lab.runners.llama_cpp import LlamaCpp
from spec_lab.runners.llama_library import SIZES, Model, check_layout, load_library
from spec_lab.runners.runner import Capabilities, Output
from spec_lab.verify import Token, Traversal
from tests.constrain.scripted import Scripted, after
from tests.runners.fake_llama import FakeLlama, logits_of, numbers
from tests.runners.test_runner import Lookup

V, H, LAYERS = 11, 3, 2
COLD, WARM = Sampling(0.0), Sampling(1.0)


def runner(library=None, **more):
    return LlamaCpp(Model(library or FakeLlama(V, H, LAYERS), "fake.gguf"), LlamaSettings(**{"batch": 7, **more}))


def used(lm):
    """Cells in use."""
    return lm.context._handle.used


def draft_of(parent, roots=1, generator=None):
    tokens = (generator or np.random.default_rng(0)).integers(0, V, len(parent))
    return Draft(Shape(roots, np.array(parent, dtype=np.int64)), torch.from_numpy(tokens))


def texts(draft, tokens):
    """The text that each row of a forest ends, given those that its roots end."""
    shape = draft.shape
    return [
        tokens[shape.root[row]] + [int(draft.token[node - shape.roots]) for node in shape.path(row)]
        for row in range(shape.rows)
    ]


# Forests -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([3, 7, 64]), st.sampled_from([0, 0, 12]))
def test_any_forests_have_the_logits_of_plain_texts_after_any_acceptance_rewind_and_fork(seed, roots, batch, window):
    """With sliding windows as well, where no cell may be lost."""
    generator = np.random.default_rng(seed)
    lm = runner(FakeLlama(V, H, LAYERS, window=window), batch=batch)
    open_, tokens = [lm.open() for _ in range(roots)], [[] for _ in range(roots)]
    for _ in range(5):
        pending = [generator.integers(0, V, generator.integers(1, 9)).tolist() for _ in open_]
        parents = [int(generator.integers(0, len(open_) + node)) for node in range(generator.integers(0, 12))]
        draft = draft_of(parents, len(open_), generator)
        prefill = [(lm.open(), generator.integers(0, V, 4).tolist())]
        output = lm.forward(open_, pending, draft, prefill)
        tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
        for row_logits, text in zip(output.logits, texts(draft, tokens), strict=True):
            np.testing.assert_array_equal(row_logits, logits_of(text, V))
        for number, sequence in enumerate(open_):
            path = draft.shape.path(int(generator.choice(draft.shape.trees[number])))
            path = path[: int(generator.integers(0, len(path) + 1))]
            sequence.accept(draft.shape.places[np.array(path, dtype=np.int64)])
            tokens[number] = tokens[number] + [int(draft.token[node - len(open_)]) for node in path]
            if generator.random() < 0.4:
                length = int(generator.integers(0, len(sequence) + 1))
                sequence.truncate(length)
                tokens[number] = tokens[number][:length]
            assert len(sequence) == len(tokens[number])
        open_.append(prefill[0][0])
        tokens.append(prefill[0][1])
        chosen = int(generator.integers(0, len(open_)))
        open_.append(open_[chosen].fork())
        tokens.append(list(tokens[chosen]))
        gone = int(generator.integers(0, len(open_)))
        open_.pop(gone).close()
        del tokens[gone]
        assert used(lm) <= sum(map(len, tokens))
    for sequence in open_:
        sequence.close()
        sequence.close()
    assert not used(lm) and not lm.sequences
    assert sorted(lm.context._free_ids) == list(range(MAX_IDS))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_forest_that_grows_level_by_level_has_the_logits_of_plain_texts(seed, roots):
    """Nodes that are never computed, several generations in one call, trees without new nodes, and a grown shape."""
    generator = np.random.default_rng(seed)
    lm = runner()
    sequences, tokens = [lm.open() for _ in range(roots)], [[] for _ in range(roots)]
    for _ in range(3):
        pending = [generator.integers(0, V, 3).tolist() for _ in sequences]
        lm.forward(sequences, pending, empty(roots))
        tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
        parents, computed = [], set(range(roots))
        for _ in range(4):
            parents += [int(generator.integers(0, roots + len(parents))) for _ in range(generator.integers(1, 5))]
            draft = draft_of(parents, roots, np.random.default_rng(1))  # the same tokens for nodes of earlier calls
            shape, rows = draft.shape, []
            for row in range(roots, shape.rows):
                above = shape.parent[row - roots]
                if row not in computed and above in computed and generator.random() < 0.7:
                    rows.append(row)
                    computed.add(row)
            rows = np.array(sorted(rows, key=lambda row: (shape.root[row], row)), dtype=np.int64)
            if not len(rows):
                continue
            given_ = [sequence if tree in shape.root[rows] else None for tree, sequence in enumerate(sequences)]
            output = lm.extend(given_, shape, rows, draft.token[torch.from_numpy(rows - roots)])
            assert output.hidden is None
            every = texts(draft, tokens)
            for row, logits in zip(rows.tolist(), output.logits, strict=True):
                np.testing.assert_array_equal(logits, logits_of(every[row], V))
        for number, sequence in enumerate(sequences):
            row = int(generator.choice([row for row in computed if shape.root[row] == number]))
            sequence.accept(shape.places[np.array(shape.path(row), dtype=np.int64)])
            tokens[number] = every[row]
            assert len(sequence) == len(tokens[number])
    for sequence in sequences:
        sequence.close()
    assert not used(lm)


def test_a_chain_requires_no_other_ids_and_a_tree_one_for_each_further_leaf():
    library = FakeLlama(V)
    lm = runner(library)
    sequence = lm.open()
    lm.forward([sequence], [[1, 2]], Draft(chain(4), torch.arange(4)))
    assert {number for row in library.decoded[-1] for number in row[2]} == {0}
    sequence.accept([0, 1])
    lm.forward([sequence], [[3]], Draft(tree(parse("0 1 2 0.0")), torch.arange(4)))
    assert [len(ids) for _, _, ids, _ in library.decoded[-1]] == [3, 1, 1, 1, 1]


def test_nodes_that_are_no_path_of_the_held_tree_are_refused():
    lm = runner()
    sequence = lm.open()
    lm.forward([sequence], [[1]], draft_of([0, 0, 1]))
    with pytest.raises(ValueError, match=r"nodes \[1, 2\] are no path"):
        sequence.accept([1, 2])
    with pytest.raises(ValueError, match="1 tokens to 2"):
        sequence.truncate(2)


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_the_cache_grows_with_its_sequences_and_keeps_what_it_holds():
    library = FakeLlama(V)
    lm = runner(library, batch=64)
    sequences, tokens = [], []
    for number in range(6):
        sequences.append(lm.open())
        tokens.append([number] * 90)
        lm.forward(sequences[-1:], tokens[-1:], empty(1))
    output = lm.forward(sequences, [[3]] * 6, draft_of([0, 0, 1, 1, 2, 3, 4, 5, 5, 5, 5, 5] * 2, 6))
    for row_logits, text in zip(output.logits[:6], tokens, strict=True):
        np.testing.assert_array_equal(row_logits, logits_of([*text, 3], V))
    assert [context.n_ctx for context in library.made] == [256, 512, 1024, 1024] and library.made[-1].n_seq_max == 64


def test_a_cache_of_limited_size_that_is_full_says_which_limits_to_change():
    lm = runner(cells=256)
    lm.forward([lm.open()], [[1] * 250], empty(1))
    with pytest.raises(MemoryError, match=r"target\.cells.* max_kv_tokens to at most 256"):
        lm.forward([lm.open()], [[1] * 7], empty(1))


def test_a_cache_that_cannot_grow_keeps_what_it_holds():
    library = FakeLlama(V)
    lm = runner(library)
    sequence = lm.open()
    lm.forward([sequence], [[1] * 200], empty(1))
    library.most = 256
    with pytest.raises(MemoryError, match=r"512 cells .*target\.cells"):
        lm.forward([lm.open()], [[1] * 100], empty(1))
    output = lm.forward([sequence], [[2]], empty(1))
    np.testing.assert_array_equal(output.logits[0], logits_of([1] * 200 + [2], V))
    library.most = 0
    with pytest.raises(MemoryError, match=r"target\.cells"):
        lm.forward([lm.open()], [[1] * 100], empty(1))
    library.most = 2**31
    with pytest.raises(MemoryError, match="is lost"):
        lm.forward([sequence], [[3]], empty(1))
    sequence.close()


def test_trees_with_more_leaves_than_ids_are_refused_by_number():
    lm = runner(batch=64)
    sequences = [lm.open() for _ in range(8)]
    wide = Shape(8, np.repeat(np.arange(8), 32))
    lm.forward(sequences, [[1]] * 8, Draft(wide, torch.zeros(256, dtype=torch.long)))
    for sequence in sequences:
        sequence.accept()
    wider = Shape(8, np.repeat(np.arange(8), 33))
    with pytest.raises(ValueError, match=r"8 sequences with trees of 33 leaves .* 256 sequence ids.*max_batch_size"):
        lm.forward(sequences, [[1]] * 8, Draft(wider, torch.zeros(264, dtype=torch.long)))
    assert [len(sequence) for sequence in sequences] == [1] * 8, "what cannot be computed is not appended"


def test_ids_that_leaves_no_longer_need_serve_other_sequences():
    lm = runner(batch=64)
    kv = lm.open()
    lm.forward([kv], [[1]], Draft(Shape(1, np.zeros(MAX_IDS, dtype=np.int64)), torch.zeros(MAX_IDS).long()))
    kv.accept([3])
    others = [lm.open() for _ in range(MAX_IDS - 1)]
    with pytest.raises(ValueError, match="256 sequences require more"):
        lm.open()
    output = lm.forward([kv, others[-1]], [[2], [5]], empty(2))
    np.testing.assert_array_equal(output.logits[0], logits_of([1, 0, 2], V))


@pytest.mark.parametrize(("code", "error"), [(1, MemoryError), (-1, RuntimeError), (-3, RuntimeError)])
def test_a_forward_that_fails_raises_and_its_sequences_can_be_closed(code, error):
    library = FakeLlama(V)
    lm = runner(library)
    sequence = lm.open()
    lm.forward([sequence], [[1]], empty(1))
    library.fails = code
    with pytest.raises(error):
        lm.forward([sequence], [[2]], draft_of([0, 0]))
    sequence.close()
    assert not used(lm)


# Hidden states -------------------------------------------------------------------------------------------------------


def state(text, layer):
    return numbers([*enumerate(map(int, text))], H, layer)


@pytest.mark.parametrize("layers", [(-1,), (2,), (0, 1), (1, 0), (1, 1), (1, -1), (-1, 0), (-1, 0, 2), (2, -1)])
@pytest.mark.parametrize("batch", [4, 64])
def test_hidden_states_of_all_computed_rows_are_returned_in_the_order_asked_for(layers, batch):
    lm = runner(batch=batch)
    lm.capture(layers)
    sequences, parts = [lm.open(), lm.open()], (lm.open(), [4, 5, 6])
    pending, draft = [[1, 2, 3, 1, 2, 3], [7]], draft_of([0, 1, 2, 0, 3], 2)
    output = lm.forward(sequences, pending, draft, [parts])
    every = texts(draft, pending)
    for row_logits, row in zip(output.logits, every, strict=True):
        np.testing.assert_array_equal(row_logits, logits_of(row, V))
    for hidden, tokens in zip(output.pending, [*pending, parts[1]], strict=True):
        rows = [np.concatenate([state(tokens[: n + 1], layer % 4) for layer in layers]) for n in range(len(tokens))]
        np.testing.assert_array_equal(hidden, np.array(rows))
    for hidden, rows in zip(output.nodes, draft.shape.trees, strict=True):
        texts_ = [every[row] for row in rows[1:]]
        np.testing.assert_array_equal(hidden, [np.concatenate([state(t, n % 4) for n in layers]) for t in texts_])
    sequences[0].accept([0])
    one_each = lm.forward(sequences[:1], [[8]], empty(1))
    text = [*every[2], 8]
    np.testing.assert_array_equal(one_each.pending[0], [np.concatenate([state(text, n % 4) for n in layers])])
    assert one_each.nodes[0].shape == (0, H * len(layers))


def test_a_hidden_state_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="hidden state 3 does not exist: the model has states 0 to 2, and -1"):
        runner().capture((3,))
    library = FakeLlama(V, H, LAYERS)
    lm = runner(library)
    lm.capture((1,))
    library.ggml_get_name = lambda tensor: b"another"
    with pytest.raises(RuntimeError, match=r"no tensor l_out-0 .* llama 1B F32"):
        lm.forward([lm.open()], [[1]], empty(1))


@pytest.mark.parametrize("opened", [0, 1, MAX_IDS - 1])
def test_a_tensor_that_the_architecture_does_not_compute_is_refused_when_it_is_captured(opened):
    library = FakeLlama(V, H, LAYERS)
    name, lm = library.ggml_get_name, runner(library)
    sequences = [lm.open() for _ in range(opened)]
    library.ggml_get_name = lambda tensor: b"another" if name(tensor) == b"l_out-0" else name(tensor)
    lm.capture((0,))
    rows = len(library.decoded)
    with pytest.raises(ValueError, match=r"no tensor l_out-0 .* llama 1B F32"):
        lm.capture((0, 1))
    lm.capture((0,))
    assert len(library.decoded) == rows + 1 and not used(lm) and len(lm.sequences) == opened
    output = lm.forward([*sequences[:1], lm.open()][:1], [[3]], empty(1))
    np.testing.assert_array_equal(output.pending[0], [state([3], 0)])


def test_embeddings_are_returned_only_of_architectures_whose_first_layer_reads_them_unchanged():
    library = FakeLlama(V, H, LAYERS)
    library.llama_model_desc = lambda model, text, size: setattr(text, "value", b"gemma3 1B F32")
    lm = runner(library)
    with pytest.raises(ValueError, match="hidden state 0 of a gemma3 model"):
        lm.capture((0,))
    lm.capture((1,))
    assert lm.forward([lm.open()], [[3]], empty(1)).hidden is not None


def test_prompts_whose_rows_all_have_outputs_keep_the_logits_of_those_that_are_asked_for():
    """Hidden states after the final norm require outputs for every row: logits of a prompt are not kept."""
    lm = runner(FakeLlama(V, H, LAYERS), batch=8)
    lm.capture((LAYERS,))
    text, sequence = [1 + number % (V - 1) for number in range(30)], lm.open()
    output = lm.forward([sequence], [text], empty(1))
    assert output.logits.shape == output.array.shape == (1, V) and output.hidden.shape[0] == len(text)
    np.testing.assert_array_equal(output.logits[0], logits_of(text, V))


def test_a_cache_that_cannot_be_doubled_grows_as_far_as_is_needed():
    library = FakeLlama(V, H, LAYERS)
    make = library.llama_init_from_model
    library.llama_init_from_model = lambda model, params: make(model, params) if params.n_ctx <= 768 else None
    lm, text = runner(library), [1 + number % (V - 1) for number in range(500)]
    sequence = lm.open()
    for tokens in (text, text[:100]):
        output = lm.forward([sequence], [tokens], empty(1))
    assert lm.context.cells == 768
    np.testing.assert_array_equal(output.logits[0], logits_of(text + text[:100], V))


# The whole engine ----------------------------------------------------------------------------------------------------


class Plain(Lookup):
    """The model of the fake library, without a KV cache."""

    vocabulary, dtype = V, torch.float32

    def __init__(self):
        self.clock, self.forwards, self.opened, self.capabilities = Clock(), 0, [], Capabilities()

    def row(self, tokens):
        return torch.from_numpy(logits_of(tokens, V))

    def run(self, prepared):
        self.forwards += 1
        rows = [self.row(text) for text in prepared]
        return Output(torch.stack(rows) if rows else torch.empty(0, V), 0)


DRAFTS = {
    "chain": ("1x1x1", "iid", Token()),
    "tree of the likeliest": ("0 1 0.0 0.1 1.0 0.0.0", "deterministic", Token()),
    "tree without replacement": ("0 1 0.0 1.0", "without_replacement", Traversal()),
    "best first": (Budget(6, 2, 3, 2), "iid", Token()),
    "mask tokens": ("0 1 0.0 0.1 0.0.0", "without_replacement", Token()),
}


def decoded(lm, kind, sampling, limits=None, applied=None):
    """Return each sequence's tokens with a draft model that is the target, and those accepted in each step."""
    target, (shape, drawn, verifier) = Target(lm, None, "fake", 60, "", 0.0), DRAFTS[kind]
    draft = Plain() if isinstance(lm, Plain) else runner()
    budget = shape if isinstance(shape, Budget) else None
    plan = TreePlan(() if budget else parse(shape), drawn, 1.0, budget=budget)
    proposer = Pard(draft, 60, V - 1, plan) if kind == "mask tokens" else DraftModel(draft, 60, plan)
    engine = Engine(Arm(target, proposer, verifier, CounterDraws(3), applied), limits=limits or Limits())
    for number, start in enumerate(((1,), (2, 3, 4, 5, 6, 7, 8, 9, 10), (3, 1), (4, 4, 4))):
        engine.add(Request(number, f"p{number}", start, sampling, 12))
    steps = [(info.draft.token.tolist(), [done.path for done in info.committed]) for info in engine]
    assert not engine.errors
    for model in (lm, draft):
        assert model.freed() if isinstance(model, Plain) else not used(model) and not model.sequences
    return {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }, steps


@pytest.mark.parametrize("limits", [Limits(), Limits(2, 4), Limits(None, None, 60)], ids=["all", "chunks", "memory"])
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.each_value
def test_the_engine_decodes_as_with_a_runner_without_a_cache(kind, sampling, limits):
    outputs = decoded(runner(), kind, sampling, limits)
    assert any(path for _, paths in outputs[1] for path in paths)
    assert outputs == decoded(Plain(), kind, sampling, limits)


def test_forks_and_removed_tokens_decode_as_without_a_cache():
    def forked(lm):
        script = after(2, [Branch(), Branch(1), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), V, "scripted"))
        return decoded(lm, "tree of the likeliest", WARM, applied=applied)

    copies = forked(runner())
    assert len(copies[0]) == 12 and copies == forked(Plain())


# The library ---------------------------------------------------------------------------------------------------------


def test_the_last_warnings_and_errors_of_the_library_s_log_are_part_of_the_message():
    class Says(FakeLlama):
        def llama_model_load_from_file(self, path, params):
            for level, line in ((2, b"loading"), (3, b"odd key\n"), (4, b"bad tensor " + b"x" * 999), (4, b"failed\n")):
                llama_library._log(level, line, None)
            return super().llama_model_load_from_file(path, params)

    with pytest.raises(ValueError, match=r"broken\.gguf \(odd key; bad tensor x+; failed\)") as refused:
        Model(Says(), "broken.gguf")
    assert len(str(refused.value)) < 400
    lm = runner(Says(V))
    lm.context.library.fails = -3
    with pytest.raises(RuntimeError, match="code -3 for 1 rows$"):
        lm.forward([lm.open()], [[1]], empty(1))


def test_a_missing_or_different_package_names_the_extra_and_how_long_it_builds(monkeypatch):
    monkeypatch.setattr(llama_library, "version", lambda _: "0.0.1")
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    with pytest.raises(ImportError, match=r"llama-cpp-python.*spec-lab\[llamacpp\].*ten minutes"):
        load_library()


def test_structs_of_another_layout_are_refused_by_name():
    defaults = SimpleNamespace(n_ctx=512, n_batch=2048, n_seq_max=1, type_k=1, type_v=1, embeddings=False,
                               offload_kqv=True, swa_full=True, n_samplers=0)  # fmt: skip
    check_layout(SIZES, defaults)
    with pytest.raises(ImportError, match="llama_batch"):
        check_layout(SIZES | {"llama_batch": 48}, defaults)
    defaults.type_v = 0
    with pytest.raises(ImportError, match="type_v"):
        check_layout(SIZES, defaults)


@pytest.mark.parametrize("closed", [True, False])
def test_the_model_is_freed_with_its_last_reference_after_its_contexts(closed):
    library = FakeLlama()
    lm = runner(library)
    lm.forward([lm.open()], [[1]], empty(1))  # an open sequence and its runner refer to each other
    if closed:
        lm.close()
    del lm
    gc.collect()
    assert library.freed == ["context", "model"]
