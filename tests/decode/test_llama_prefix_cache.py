"""The prefix cache on llama.cpp: the same tokens, cells that are shared and counted, copies that are given up."""

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import Shape
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.prefix_cache import BLOCK, PrefixCache
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import NgramTree
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.llama_context import MAX_IDS, LlamaSettings
from spec_lab.runners.llama_cpp import LlamaCpp
from spec_lab.runners.llama_library import Model
from spec_lab.verify import Token, Traversal
from tests.decode.test_prefix_cache import COMMON, wanted
from tests.propose.lab import COLD, WARM
from tests.runners.fake_llama import FakeLlama, logits_of

V = 40


def runner(window=0, **more):
    library = FakeLlama(V, window=window)
    return LlamaCpp(Model(library, "fake.gguf"), LlamaSettings(**{"batch": 64, **more}))


def used(lm):
    """Cells in use."""
    return lm.context._handle.used


def counted(lm):
    """Cells that the runner takes to be in use."""
    return sum(sequence.cells for sequence in lm.sequences)


def computed(lm, tokens):
    sequence = lm.open(len(tokens))
    lm.forward([sequence], [[*tokens]], empty(1))
    return sequence


def text(first, count=30):
    return [first, *(number % V for number in range(first // V, first // V + count - 1))]


PROPOSERS = {
    "none": (lambda: Null(), Token(), COLD),
    "ngram tree": (lambda: NgramTree(6, 3, 2, 1), Token(), WARM),
    "draft tree": (
        lambda: DraftModel(runner(), 60, TreePlan(parse("0 1 0.0 1.0"), "without_replacement", 1.0)),
        Traversal(),
        WARM,
    ),
}


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("limits", [Limits(1), Limits(3, 4), Limits(3, 5, 50)], ids=["alone", "chunks", "preemption"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_prefix_cache_changes_no_token_and_frees_every_cell(name, limits, window):
    make, verifier, sampling = PROPOSERS[name]
    outputs, reused = [], []
    for prefixes in (None, PrefixCache(4096, min_tokens=1)):
        lm = runner(window)
        target = Target(lm, None, "fake", 60, "", 0.0)
        engine = Engine(Arm(target, make(), verifier, CounterDraws(0), prefix_cache=prefixes), limits=limits)
        for request in wanted(sampling):
            engine.add(request)
        list(engine)
        assert not engine.errors
        if prefixes is not None:
            assert {*lm.sequences} == {kept.kv for kept in prefixes.texts}, "only kept texts hold cells"
            assert 0 < used(lm) <= counted(lm)
            prefixes.clear()
        assert not used(lm) and not lm.sequences and len(lm.context._free_ids) == MAX_IDS
        outputs.append({sequence.request.id: (sequence.emitted, sequence.finish) for sequence in engine.sequences})
        reused.append(sum(sequence.reused for sequence in engine.sequences))
    assert outputs[0] == outputs[1] and reused[0] == 0 and reused[1] > 2 * len(COMMON)


def test_a_copy_shares_the_cells_of_a_kept_text_which_are_counted_once():
    lm = runner()
    first = computed(lm, text(1, 200))
    kept = lm.open_copy(first, 200, 200, exact=True)
    assert used(lm) == 200
    first.close()
    assert used(lm) == counted(lm) == 200
    copies = [lm.open_copy(kept, 150, 180) for _ in range(5)]
    assert used(lm) == counted(lm) == 200 and [copy.reserve for copy in copies] == [30] * 5
    output = lm.forward(copies, [[7, 8], [9], [7], [1], [2]], empty(5))
    np.testing.assert_array_equal(output.logits[0], logits_of([*text(1, 200)[:150], 7, 8], V))
    assert used(lm) == counted(lm) == 206 and lm.context.cells == 256, "the KV cache need not grow"
    copies[0].truncate(100)
    lm.forward(copies[:1], [[3] * 50], empty(1))
    assert used(lm) == counted(lm) == 254
    kept.close()
    assert used(lm) == 254 - 50 <= counted(lm)
    for copy in copies:
        copy.close()
    assert used(lm) == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_cell_in_use_is_left_uncounted_after_any_copies_rewinds_and_trees(seed):
    generator = np.random.default_rng(seed)
    lm = runner(window=seed % 2 * 5)
    live, kept = [(lm.open(), [])], []
    for _ in range(40):
        sequence, tokens = live[int(generator.integers(len(live)))]
        tokens += (pending := generator.integers(0, V, generator.integers(1, 9)).tolist())
        parents = [int(generator.integers(0, 1 + node)) for node in range(generator.integers(0, 5))]
        nodes = torch.from_numpy(generator.integers(0, V, len(parents)))
        draft = Draft(Shape(1, np.array(parents, dtype=np.int64)), nodes)
        output = lm.forward([sequence], [pending], draft)
        np.testing.assert_array_equal(output.logits[0], logits_of(tokens, V))
        sequence.accept()
        what = int(generator.integers(5))
        if what == 0:
            kept.append((lm.open_copy(sequence, len(sequence), len(sequence), exact=True), list(tokens)))
        elif what == 1 and kept:
            source, kept_tokens = kept[int(generator.integers(len(kept)))]
            length = int(generator.integers(1, len(kept_tokens) + 1))
            live.append((lm.open_copy(source, length, 50), kept_tokens[:length]))
        elif what == 2:
            length = int(generator.integers(len(tokens)))
            sequence.truncate(length)
            del tokens[length:]
        elif what == 3 and len(kept) > 1:
            kept.pop(int(generator.integers(len(kept))))[0].close()
        elif len(live) > 1:
            live.remove((sequence, tokens))
            sequence.close()
        assert used(lm) <= counted(lm)
    for sequence, _ in live + kept:
        sequence.close()
    assert not used(lm) and not lm.sequences and len(lm.context._free_ids) == MAX_IDS


def test_kept_texts_give_their_ids_to_trees_and_requests_the_least_recently_used_first():
    lm, prefixes = runner(batch=256), PrefixCache(300 * BLOCK)
    for number in range(MAX_IDS - 1):
        sequence = computed(lm, text(number % V, 17 + number // V))
        prefixes.keep(lm, text(number % V, 17 + number // V), sequence)
        sequence.close()
    assert len(prefixes.texts) == V, "longer texts replace those that they begin with"
    wide = lm.open()
    lm.forward([wide], [[1]], Draft(Shape(1, np.zeros(240, dtype=np.int64)), torch.zeros(240).long()))
    assert sum(bool(len(text.kv)) for text in prefixes.texts) == MAX_IDS - 240
    wide.accept()
    kv = prefixes.open(lm, [*prefixes.texts[-1].tokens, 5], 99)
    assert len(kv) == len(prefixes.texts[-1].tokens) and len(prefixes.texts) == MAX_IDS - 240


def test_without_a_free_id_nothing_is_kept_and_the_source_itself_is_given_up():
    lm, prefixes = runner(), PrefixCache(BLOCK)
    live = [computed(lm, text(1, 20)), *(lm.open() for _ in range(MAX_IDS - 1))]
    prefixes.keep(lm, text(1, 20), live[0])
    assert not prefixes.texts
    live.pop().close()
    prefixes.keep(lm, text(1, 20), live[0])
    assert len(prefixes.texts) == 1
    kv = prefixes.open(lm, text(1, 30), 40)
    assert len(kv) == 0 and kv.open and not len(prefixes.texts[0].kv)


def test_kept_texts_are_given_up_where_cells_or_memory_run_short():
    for limit in ("cells", "memory"):
        lm, prefixes = runner(cells=256 if limit == "cells" else None), PrefixCache(8 * BLOCK)
        lm.context.library.most = 256
        for first in range(3):
            sequence = computed(lm, text(first, 80))
            prefixes.keep(lm, text(first, 80), sequence)
            sequence.close()
        assert used(lm) == 240
        output = lm.forward([lm.open()], [text(9, 90)], empty(1))
        np.testing.assert_array_equal(output.logits[0], logits_of(text(9, 90), V))
        assert [len(kept_text.kv) for kept_text in prefixes.texts] == [0, 80, 80], limit


class SixteenIds(FakeLlama):
    """There is no memory for a context with more ids than the first one has."""

    def llama_init_from_model(self, model, params):
        return None if params.n_seq_max > 16 else super().llama_init_from_model(model, params)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("kept", [0, 2])
def test_a_text_is_not_kept_or_takes_the_place_of_an_older_one_where_ids_cannot_grow(kept, window):
    library, prefixes = SixteenIds(V, window=window), PrefixCache(64 * BLOCK)
    lm = LlamaCpp(Model(library, "fake.gguf"), LlamaSettings(batch=512))
    for first in range(kept):
        sequence = computed(lm, text(first, 20))
        prefixes.keep(lm, text(first, 20), sequence)
        sequence.close()
    live = [computed(lm, text(9 + number, 20)) for number in range((8 if window else 16) - kept)]
    prefixes.keep(lm, text(9, 20), live[0])
    assert [kept_text.tokens[0] for kept_text in prefixes.texts if len(kept_text.kv)] == [1, 9][:kept]
    output = lm.forward(live, [[5]] * len(live), empty(len(live)))
    np.testing.assert_array_equal(output.logits[0], logits_of([*text(9, 20), 5], V))
    if kept:  # a copy of the kept text and a new request take the ids of the others
        kv = prefixes.open(lm, text(9, 30), 40)
        assert len(kv) == 20 and [len(kept_text.kv) for kept_text in prefixes.texts] == [0, 20]
        kv = prefixes.open(lm, text(9, 30), 40)
        assert len(kv) == 0 and not any(len(kept_text.kv) for kept_text in prefixes.texts)
        output = lm.forward([kv], [text(9, 30)], empty(1))
        np.testing.assert_array_equal(output.logits[0], logits_of(text(9, 30), V))
    assert used(lm) <= counted(lm) and lm.context.ids == 16
