"""Models with recurrent layers in llama.cpp, on a fake that keeps states and snapshots, and loses them, as it does."""

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.draft import Draft, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.capacity import check_requires
from spec_lab.decode.engine import Engine, Limits
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners import llama_recurrent
from spec_lab.runners.llama_context import MAX_IDS, LlamaSettings
from spec_lab.runners.llama_library import Model
from spec_lab.runners.llama_recurrent import LlamaRecurrent, RecurrentSequence, calls_of
from spec_lab.verify import Token
from tests.constrain.scripted import Scripted, after
from tests.runners import test_llama_cpp
from tests.runners.chains_at_random import chains, decode_at_random
from tests.runners.fake_llama import FakeLlama, logits_of
from tests.runners.fake_recurrent import FakeRecurrent, RecurrentMemory

V, SNAPSHOTS = 11, 4
COLD, WARM = Sampling(0.0), Sampling(1.0)


def runner(library=None, **more):
    llama_settings = LlamaSettings(**{"batch": 64, "snapshots": SNAPSHOTS, **more})
    return LlamaRecurrent(Model(library or FakeRecurrent(V), "fake.gguf"), llama_settings)


def forward(lm, sequences, pending, draft, prefill=()):
    return lm.run(lm.prepare(sequences, pending, draft, prefill))


def computed(library):
    """How many rows each call has computed."""
    return [len(rows) for rows in library.decoded]


def history(seed, batch=64, cells=None):
    """Decode at random, and assert on the logits of every row."""

    def assert_logits(draft, texts, logits):
        for row, text in zip(logits, test_llama_cpp.texts(draft, texts), strict=True):
            np.testing.assert_array_equal(row, logits_of(text, V))

    sequences, _ = decode_at_random(
        runner(batch=batch, cells=cells), seed, V, assert_logits, steps=12, max_open=6, long_text=7,
        max_nodes=SNAPSHOTS + 1, reserves=(0, 40),
    )  # fmt: skip
    for sequence in sequences:
        sequence.close()
        sequence.close()


@pytest.mark.nightly
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([6, 9, 64]))
def test_any_chains_have_the_logits_of_plain_texts_after_any_acceptance_rewind_and_fork(seed, batch):
    """Sequences have different lengths; a forward leaves some of them out; the KV cache grows."""
    history(seed, batch)


def trust_snapshots(monkeypatch):
    """Trust snapshots of tokens that the last call did not compute."""
    original = RecurrentSequence.append
    monkeypatch.setattr(
        RecurrentSequence, "append", lambda self, new, nodes, back: original(self, new, nodes, SNAPSHOTS)
    )


def trust_after_other_forwards(monkeypatch):
    original = RecurrentSequence.settle

    def settle(self):
        back = self.back
        original(self)
        self.back = back

    monkeypatch.setattr(RecurrentSequence, "settle", settle)


def compute_all_together(monkeypatch):
    monkeypatch.setattr(llama_recurrent, "calls_of", lambda counts, most: [[*range(len(counts))]])


def keep_states_of_a_smaller_cache(monkeypatch):
    monkeypatch.setattr(RecurrentSequence, "lost", property(lambda self: bool(self.tokens) and not self.computed))


@pytest.mark.parametrize(
    "mutant",
    [trust_snapshots, trust_after_other_forwards, compute_all_together, keep_states_of_a_smaller_cache],
    ids=lambda function: function.__name__,
)
def test_a_runner_that_trusts_stale_or_moved_snapshots_has_wrong_logits(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        deque(map(history, range(40)), maxlen=0)


def test_a_removal_that_reaches_snapshots_of_an_earlier_call_is_not_refused_and_wrong():
    """Why the runner counts what the last call computed."""
    memory = RecurrentMemory(1, SNAPSHOTS)
    memory.decode([0] * 5, range(5), "abcde", 256)
    memory.decode([0], [5], "f", 256)
    assert memory.remove(0, 4)
    assert memory.decode([0], [4], "x", 256) != [tuple("abcdx")]


def test_a_call_of_sequences_with_different_numbers_of_tokens_loses_snapshots():
    """Why they are computed in calls of their own."""
    memory = RecurrentMemory(4, SNAPSHOTS)
    for number in (1, 0, 2):
        memory.decode([number], [0], [str(number)], 256)
    ids = [0] * 5 + [1] * 3 + [2] * 3
    memory.decode(ids, [1, 2, 3, 4, 5, 1, 2, 3, 1, 2, 3], "abcdefghijk", 256)
    assert memory.remove(0, 3)
    assert memory.decode([0], [3], "x", 256) != [tuple("0abx")]


def test_tokens_that_a_step_rejects_are_taken_back_without_computing_anything_again():
    library = FakeRecurrent(V)
    lm, generator = runner(library), np.random.default_rng(0)
    sequences, texts = [lm.open(100) for _ in range(4)], [[number] for number in range(4)]
    forward(lm, sequences, texts, empty(4))
    for step in range(10):
        draft = chains([4, 2, step % 3, 2], generator, V)
        output = forward(lm, sequences, [[1]] * 4, draft)
        for root, sequence in enumerate(sequences):
            nodes, accepted = draft.shape.trees[root][1:] - 4, min(root, draft.shape.sizes[root] - 1)
            sequence.accept([*range(accepted)])
            texts[root] += [1]
            np.testing.assert_array_equal(output.logits[root], logits_of(texts[root], V))
            texts[root] += draft.token[nodes[:accepted]].tolist()
    assert sum(computed(library)) == 4 + sum(4 + 4 + 2 + step % 3 + 2 for step in range(10))
    assert [context.n_ctx for context in library.made] == [512]


def test_a_sequence_from_which_more_is_removed_is_computed_again_with_its_next_forward():
    library = FakeRecurrent(V)
    lm = runner(library)
    kv, other = lm.open(), lm.open()
    forward(lm, [kv, other], [[1, 2, 3, 4], [5]], empty(2))
    kv.truncate(2)
    assert len(kv) == 2
    forward(lm, [other], [[6]], empty(1))
    assert computed(library) == [5, 1]
    output = forward(lm, [kv], [[7]], empty(1))
    assert computed(library) == [5, 1, 2, 1] and lm.forwards == 4
    np.testing.assert_array_equal(output.logits[0], logits_of([1, 2, 7], V))


def test_sequences_are_computed_again_when_the_cache_has_grown():
    library = FakeRecurrent(V)
    lm = runner(library, batch=512)
    kv = lm.open()
    forward(lm, [kv], [[1] * 200], Draft(chain(3), torch.tensor([2, 3, 4])))
    kv.accept([0, 1])
    output = forward(lm, [kv], [[5] * 100], empty(1))
    np.testing.assert_array_equal(output.logits[0], logits_of([1] * 200 + [2, 3] + [5] * 100, V))
    output = forward(lm, [kv, lm.open()], [[6], [7]], empty(2))
    np.testing.assert_array_equal(output.logits[0], logits_of([1] * 200 + [2, 3] + [5] * 100 + [6], V))
    assert [(made.n_seq_max, made.n_rs_seq) for made in library.made] == [(1, 4), (2, 4)]


def test_a_cache_that_cannot_grow_is_made_again():
    library = FakeRecurrent(V)
    lm = runner(library, batch=256)
    kv = lm.open()
    forward(lm, [kv], [[1] * 200], empty(1))
    library.most = 256
    other = lm.open()
    with pytest.raises(MemoryError, match=r"target\.cells.* target\.snapshots to fewer than 4"):
        lm.prepare([other], [[1] * 100], empty(1))
    other.close()
    output = forward(lm, [kv], [[2]], empty(1))
    np.testing.assert_array_equal(output.logits[0], logits_of([1] * 200 + [2], V))


@pytest.mark.parametrize(
    ("counts", "calls"),
    [
        ([2], [[0]]), ([0, 0], [[0, 1]]), ([3, 3, 3], [[0, 1, 2]]), ([3, 0, 2, 2, 0], [[1, 4], [2, 3], [0]]),
        ([4] * 5 + [1], [[0, 1, 2], [3], [4], [5]]),
    ],
    ids=str,
)  # fmt: skip
def test_chains_of_one_length_are_computed_together_and_the_others_alone(counts, calls):
    assert calls_of(counts, 16) == calls


# What is refused -----------------------------------------------------------------------------------------------------


def target(lm, context=60):
    return Target(lm, None, "fake", context, "", 0.0)


def test_proposers_of_trees_and_of_more_tokens_than_snapshots_are_refused_by_name():
    recurrent_target = target(runner())
    check_requires(Ngram(SNAPSHOTS, 2, 1), recurrent_target)
    check_requires(Null(), recurrent_target)
    with pytest.raises(ValueError, match=r"'ngram' .* 5 tokens.* proposer\.depth .* 4, .*target\.snapshots to 5"):
        check_requires(Ngram(SNAPSHOTS + 1, 2, 1), recurrent_target)
    with pytest.raises(ValueError, match="'ngram_tree' drafts trees, .*recurrent"):
        check_requires(NgramTree(2, 2, 2, 1), recurrent_target)


def test_a_draft_that_branches_hidden_states_and_wrong_nodes_are_refused():
    lm = runner()
    kv = lm.open()
    with pytest.raises(ValueError, match="recurrent .*branches"):
        lm.prepare([kv], [[1]], Draft(tree(parse("0 1")), torch.arange(2)))
    with pytest.raises(ValueError, match=r"\(-1,\)"):
        lm.capture((-1,))
    lm.capture()
    forward(lm, [kv], [[1]], Draft(chain(2), torch.arange(2)))
    for wrong in ([1], [0, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="are no path"):
            kv.accept(wrong)
    with pytest.raises(ValueError, match="1 tokens to 2"):
        kv.truncate(2)
    first = lm.prepare([kv], [[1]], empty(1))
    lm.run(lm.prepare([lm.open()], [[1]], empty(1)))
    with pytest.raises(RuntimeError, match="before the next one is prepared"):
        lm.run(first)
    for _ in range(MAX_IDS - 2):
        lm.open()
    with pytest.raises(ValueError, match="257 sequences"):
        lm.open()


def test_architectures_whose_state_cannot_be_rolled_back_and_windows_are_refused():
    library = FakeRecurrent(V, rolls=False)
    lm = runner(library)
    with pytest.raises(ValueError, match="cannot roll back .*llama 1B F32"):
        forward(lm, [lm.open()], [[1]], empty(1))
    assert library.freed == ["context"]
    with pytest.raises(ValueError, match=r"fake\.gguf is recurrent with sliding windows"):
        runner(FakeRecurrent(V, window=8))


# The whole engine ----------------------------------------------------------------------------------------------------


def decoded(lm, sampling, limits=None, applied=None):
    """Return each sequence's tokens with chains of a draft model that is the target, and those accepted."""
    draft = test_llama_cpp.runner(FakeLlama(V))
    proposer = DraftModel(draft, 60, TreePlan(parse("1x1x1"), "iid", 1.0))
    engine = Engine(Arm(target(lm), proposer, Token(), CounterDraws(3), applied), limits=limits or Limits())
    for number, start in enumerate(((1,), (2, 3, 4, 5, 6, 7, 8, 9, 10), (3, 1), (4, 4, 4))):
        engine.add(Request(number, f"p{number}", start, sampling, 12))
    steps = [(info.draft.token.tolist(), [done.path for done in info.committed]) for info in engine]
    assert not engine.errors and not getattr(lm, "sequences", None)
    return {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }, steps


@pytest.mark.each_value
@pytest.mark.parametrize("limits", [Limits(), Limits(2, 4), Limits(None, None, 60)], ids=["all", "chunks", "memory"])
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "warm"])
def test_the_engine_decodes_as_with_a_runner_without_a_cache(sampling, limits):
    outputs = decoded(runner(), sampling, limits)
    assert any(path for _, paths in outputs[1] for path in paths)
    assert outputs == decoded(test_llama_cpp.Plain(), sampling, limits)


def test_forks_and_removed_tokens_decode_as_without_a_cache():
    def forked(lm):
        script = after(2, [Branch(), Branch(1), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), V, "scripted"))
        return decoded(lm, WARM, applied=applied)

    copies = forked(runner())
    assert len(copies[0]) == 12 and copies == forked(test_llama_cpp.Plain())
