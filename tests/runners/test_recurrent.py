"""Chains of models with recurrent layers: states and logits are a text's after any acceptance, rewind and fork."""

from collections import deque
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.draft import Draft, empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import Shape, chain, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.capacity import check_requires
from spec_lab.decode.engine import Engine, Limits
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.trees import parse
from spec_lab.runners import recurrent
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.layer_ranges import find_layers
from spec_lab.runners.mixers import Mixer
from spec_lab.runners.recurrent import MAX_AGAIN, Advance, RecurrentStates
from spec_lab.verify import Token
from tests.constrain.scripted import Scripted, after
from tests.propose.lab import COLD, draft_model, requests
from tests.recurrent import FAMILIES
from tests.runners.chains_at_random import chains, decode_at_random
from tests.tiny import CONTEXT, VOCABULARY

ERROR = {"lfm2": 1e-9, "qwen3_next": 2e-3, "falcon_h1": 2e-3, "mamba": 2e-3}


@pytest.fixture(scope="module", params=["lfm2", pytest.param("mamba", marks=pytest.mark.nightly)])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return FAMILIES[family]()


def runner(model, chunk=512):
    return CausalLM(model, chunk=chunk)


def target(lm):
    return Target(lm, None, "recurrent", CONTEXT, "", 0.0)


def tokens_of(generator, count):
    return generator.integers(0, VOCABULARY, count).tolist()


@torch.inference_mode()
def forward(lm, sequences, pending, draft=None, prefill=()):
    return lm.run(lm.prepare(sequences, pending, draft or empty(len(sequences)), prefill))


@torch.inference_mode()
def plain(lm, text):
    return lm.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def assert_near(values, expected, most):
    torch.testing.assert_close(values.double(), expected.double(), rtol=most, atol=most)


def assert_logits(lm, draft, texts, logits, most):
    """Those of every row are those of its path's text."""
    for root, text in enumerate(texts):
        rows = draft.shape.trees[root]
        path = (draft.token[rows[1:] - len(texts)]).tolist()
        assert_near(logits[rows], plain(lm, text + path)[len(text) - 1 :], most)


def assert_states(lm, sequence, text, most):
    """After one more token the states are those of a new sequence with the same text."""
    other = lm.open()
    forward(lm, [sequence, other], [[7], [*text, 7]])
    for mine, new in zip(sequence.states.cache.layers, other.states.cache.layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for number, state in vars(new).get(name, {}).items():
                assert (state is None) == (vars(mine)[name][number] is None)
                if state is not None:
                    assert_near(vars(mine)[name][number], state, most)
    other.close()


def history(lm, seed, error=2e-3):
    """Decode at random, and assert on the logits of every row, and on the states in the end."""

    def logits_are_the_texts(draft, texts, logits):
        assert_logits(lm, draft, texts, logits, error)

    sequences, texts = decode_at_random(
        lm, seed, VOCABULARY, logits_are_the_texts, steps=8, max_open=4, long_text=25, max_nodes=5
    )
    for sequence, text in zip(sequences, texts, strict=True):
        assert_states(lm, sequence, text, error)
        sequence.close()
        sequence.close()
    assert not lm.cells.references.any()


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([6, 512]))
def test_any_chains_have_the_logits_and_states_of_plain_texts(model, family, seed, chunk):
    """Sequences have different lengths; a forward leaves some of them out; prompts come in parts, or whole."""
    history(runner(model, chunk), seed, error=ERROR[family])


def test_drafts_on_a_device_need_no_copy_to_the_host(monkeypatch):
    """Their tokens are read when a sequence is computed again."""
    monkeypatch.setattr(Draft, "array", None)
    for seed in range(3):
        history(runner(FAMILIES["lfm2"]()), seed, error=ERROR["lfm2"])


def keep_rejected_tokens(monkeypatch):
    original = RecurrentStates.accept

    def accept(self, nodes=()):
        original(self, nodes)
        self.live = True

    monkeypatch.setattr(RecurrentStates, "accept", accept)


def begin_with_the_last_states(monkeypatch):
    """Not with the copies."""
    original = Advance.__call__

    def run(self, mixer, rows):
        object.__setattr__(self, "restore", False)
        return original(self, mixer, rows)

    monkeypatch.setattr(Advance, "__call__", run)


def fork_the_states_after_held_nodes(monkeypatch):
    original = RecurrentStates.fork

    def fork(self):
        twin = original(self)
        twin.live = self.live
        return twin

    monkeypatch.setattr(RecurrentStates, "fork", fork)


def share_states_between_forks(monkeypatch):
    monkeypatch.setattr(recurrent, "_copied", lambda state: state)


def trust_states_after_a_truncation(monkeypatch):
    original = RecurrentStates.truncate

    def truncate(self, length):
        original(self, length)
        self.lost = False

    monkeypatch.setattr(RecurrentStates, "truncate", truncate)


def advance_several_tokens(monkeypatch):
    """Also of mixers that then begin with an empty state."""
    monkeypatch.setattr(Mixer, "advance", lambda self, rows, cache: self.inner(rows, cache=cache))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("lfm2", keep_rejected_tokens), ("lfm2", begin_with_the_last_states), ("lfm2", share_states_between_forks),
        ("lfm2", fork_the_states_after_held_nodes), ("lfm2", trust_states_after_a_truncation),
        ("mamba", advance_several_tokens),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_a_runner_that_trusts_wrong_states_has_wrong_logits(name, mutant, monkeypatch):
    mutant(monkeypatch)
    lm = runner(FAMILIES[name]())
    with pytest.raises((AssertionError, KeyError)):
        deque((history(lm, seed, error=ERROR[name]) for seed in range(40)), maxlen=0)


@pytest.mark.each_value
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("accepted", range(5))
def test_after_any_number_of_accepted_tokens_the_states_are_those_of_the_text(model, family, accepted, long):
    lm, generator = runner(model), np.random.default_rng(accepted)
    text, sequence = tokens_of(generator, 40 if long else 3), lm.open()
    pending = text
    for _ in range(6):
        draft = chains([4], generator, VOCABULARY)
        assert_logits(lm, draft, [text], forward(lm, [sequence], [pending], draft).logits, ERROR[family])
        sequence.accept(range(accepted))
        pending = tokens_of(generator, 1)
        text = text + draft.token[:accepted].tolist() + pending
        states = sequence.states
        assert states.live == (accepted == 4) and states.length == len(text) - 1 == states.base + (
            next(iter(states.inputs.values())).shape[1] - 4 + accepted
        )
        assert states.length - states.base <= states.max_again + accepted
    assert_states(lm, sequence, text[:-1], ERROR[family])


def test_only_mixers_compute_rows_again(model, family):
    lm, generator = runner(model), np.random.default_rng(0)
    rows = []
    layer = find_layers(model)[2][0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    sequence = lm.open()
    forward(lm, [sequence], [tokens_of(generator, 30)])
    for accepted in (0, 1, 2, 0, 3, 1, 0, 0):
        forward(lm, [sequence], [[3]], chains([4], generator, VOCABULARY))
        sequence.accept(range(accepted))
        assert len(sequence.states.inputs) == len(lm.recurrence.mixers)
        assert next(iter(sequence.states.inputs.values())).shape[1] <= MAX_AGAIN + 4
    hook.remove()
    assert rows == [30] + [5] * 8 and lm.forwards == 9


def test_a_sequence_from_which_more_is_removed_is_computed_again_with_its_next_forward(model, family):
    lm, generator = runner(model), np.random.default_rng(0)
    lm.capture((-1,) if lm.capabilities.hidden_layers else ())
    text, other = tokens_of(generator, 9), lm.open()
    kv = lm.open()
    forward(lm, [kv, other], [text, [5]])
    kv.truncate(4)
    assert len(kv) == 4 and lm.forwards == 1
    forward(lm, [other], [[6]])
    assert lm.forwards == 2
    output = forward(lm, [kv, other], [[7, 8], [9]])
    assert lm.forwards == 4 and len(kv) == 6
    assert_near(output.logits[0], plain(lm, [*text[:4], 7, 8])[-1], ERROR[family])
    assert_near(output.logits[1], plain(lm, [5, 6, 9])[-1], ERROR[family])
    assert [len(rows) for rows in output.pending] == ([2, 1] if lm.capabilities.hidden_layers else [])
    for length in (5, 3, 0):
        kv.truncate(length)
    assert_near(forward(lm, [kv], [[1, 2]]).logits[0], plain(lm, [1, 2])[-1], ERROR[family])
    assert lm.forwards == 5


def test_a_truncation_that_the_kept_inputs_cover_computes_nothing_again(model, family):
    lm, generator = runner(model), np.random.default_rng(0)
    sequence, text, draft = lm.open(), tokens_of(generator, 20), chains([4], generator, VOCABULARY)
    forward(lm, [sequence], [text], draft)
    sequence.accept(range(4))
    sequence.truncate(21)
    output = forward(lm, [sequence], [[2]])
    assert lm.forwards == 2
    assert_near(output.logits[0], plain(lm, [*text, int(draft.token[0]), 2])[-1], ERROR[family])


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_hidden_states_are_those_of_a_plain_forward(name):
    lm, generator = runner(FAMILIES[name](), chunk=8), np.random.default_rng(0)
    layers = (*range(lm.capabilities.hidden_layers), -1)
    assert layers == (0, 1, 2, 3, -1)
    text, sequence, draft = tokens_of(generator, 21), lm.open(), chains([3], generator, VOCABULARY)
    for wanted in (layers, (-1,)):
        lm.capture(wanted)
        sequence.truncate(0)
        output = forward(lm, [sequence], [text], draft)
        with torch.inference_mode():
            ids = torch.tensor([[*text, *draft.token.tolist()]])
            states = lm.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in wanted], -1)
        assert_near(output.observed(0, (0, 1, 2)), expected, ERROR[name])


def test_a_draft_model_extends_chains_node_by_node(model, family):
    """As ``DraftModel`` does: roots first, then level by level, and some of the nodes are accepted."""
    lm, generator = runner(model), np.random.default_rng(0)
    sequences, texts = [lm.open(), lm.open()], [tokens_of(generator, 19), tokens_of(generator, 3)]
    pending = list(texts)
    for accepted in (3, 0, 2, 1):
        forward(lm, sequences, pending)
        draft = chains([3, 2], generator, VOCABULARY)
        computed = []
        with torch.inference_mode():
            for depth in (1, 2, 3):
                rows = np.flatnonzero(draft.shape.depth == depth)
                active = [
                    sequence if (draft.shape.root[rows] == n).any() else None for n, sequence in enumerate(sequences)
                ]
                rows = rows[np.argsort(draft.shape.root[rows], kind="stable")]
                logits = lm.extend(active, draft.shape, rows, draft.token[rows - 2]).logits
                computed += zip(rows.tolist(), logits, strict=True)
        for row, logits in computed:
            root = int(draft.shape.root[row])
            path = draft.token[np.array(draft.shape.path(row)) - 2].tolist()
            assert_near(logits, plain(lm, texts[root] + path)[-1], ERROR[family])
        sequences[0].accept(range(accepted))
        sequences[1].accept(range(min(accepted, 2)))
        more = [tokens_of(generator, 1), tokens_of(generator, 2)]
        for root, count in enumerate((accepted, min(accepted, 2))):
            nodes = draft.shape.trees[root][1 : 1 + count] - 2
            texts[root] = texts[root] + draft.token[nodes].tolist() + more[root]
        pending = more
    with pytest.raises(ValueError, match="recurrent .*branches"):
        lm.extend(sequences, Shape(2, np.array([0, 0])), np.array([2, 3]), np.array([1, 2]))


def test_a_copy_of_a_model_has_mixers_of_its_own(model):
    lm = runner(model)
    twin = deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not plain(runner(twin), [1, 2, 3]).any() and plain(lm, [1, 2, 3]).any()
    output = forward(lm, [lm.open()], [[1, 2, 3]])
    assert_near(output.logits[0], plain(lm, [1, 2, 3])[-1], 2e-3)


def test_layers_without_attention_have_no_cells():
    lm = runner(FAMILIES["lfm2"]())
    forward(lm, [lm.open()], [[1, 2, 3]])
    assert [keys[0].shape[1] for keys, _ in lm.cells.views] == [0, 2, 0, 2]


# What is refused -----------------------------------------------------------------------------------------------------


def test_proposers_that_recurrent_layers_rule_out_are_refused_by_name(model, family):
    recurrent_target = target(runner(model))
    check_requires(Ngram(5, 2, 1), recurrent_target)
    check_requires(Null(), recurrent_target)
    with pytest.raises(ValueError, match="'ngram_tree' drafts trees, .*recurrent"):
        check_requires(NgramTree(2, 2, 2, 1), recurrent_target)
    with pytest.raises(ValueError, match="recurrent layers"):
        EarlyExit.load(recurrent_target, depth=2)


def test_a_draft_that_branches_and_wrong_nodes_are_refused(model):
    lm = runner(model)
    kv = lm.open()
    with pytest.raises(ValueError, match="recurrent .*branches"):
        lm.prepare([kv], [[1]], Draft(tree(parse("0 1")), torch.arange(2)))
    forward(lm, [kv], [[1]], Draft(chain(2), torch.arange(2)))
    for wrong in ([1], [0, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="are no path"):
            kv.accept(wrong)


@pytest.mark.parametrize("how", [{"attention": "dense_mask"}, {"fixed": True}], ids=str)
def test_dense_attention_and_fixed_shapes_are_refused(how):
    with pytest.raises(ValueError, match="recurrent layers require attention=per_sequence"):
        CausalLM(FAMILIES["lfm2"](), **how)


# The whole engine ----------------------------------------------------------------------------------------------------


def decoded(model, proposer, sampling, limits=None, applied=None):
    """Return each sequence's tokens, and how many drafted tokens were accepted."""
    engine = Engine(Arm(target(runner(model)), proposer, Token(), CounterDraws(3), applied), limits=limits or Limits())
    for request in requests(sampling):
        engine.add(request)
    accepted = sum(len(done.path) for info in engine for done in info.committed)
    assert not engine.errors
    return {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }, accepted


def test_forks_and_removed_tokens_decode_as_without_drafts(model):
    def forked(proposer):
        script = after(2, [Branch(), Branch(1), Branch()])
        applied = AppliedConstraint(ControllerConstraint(lambda _: Scripted(script), VOCABULARY, "scripted"))
        return decoded(model, proposer, COLD, applied=applied)

    expected, _ = forked(Null())
    texts, accepted = forked(draft_model(lm=runner(deepcopy(model))))
    assert len(expected) > 3 and texts == expected and accepted
