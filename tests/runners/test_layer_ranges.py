"""A forward that continues from a draft pass returns what one that computes everything does, whatever was drafted."""

from collections import Counter

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.runners.causal_draft_pass import Continued
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Route, Sublayer
from tests.tiny import FAMILIES, VOCABULARY, WINDOWED, tiny_model

TREE = tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DEPTH = {"gpt2": "n_layer", "gpt_bigcode": "n_layer"}


def model_of(family="llama", layers=3, **changes):
    return tiny_model(family, **{DEPTH.get(family, "num_hidden_layers"): layers} | changes)


class Pair:
    """Sequences of two runners of one model: one continues from draft passes, the other computes everything."""

    def __init__(self, model, end=1, states=(), chunk=512):
        self.lm, self.oracle, self.end = CausalLM(model, chunk=chunk), CausalLM(model, chunk=chunk), end
        for lm in (self.lm, self.oracle):
            lm.capture(states)
        self.generator = np.random.default_rng(3)
        self.tokens, self.own, self.other = [], [], []

    def add(self, length):
        self.tokens.append(self.generator.integers(0, VOCABULARY, length).tolist())
        self.own.append(self.lm.open())
        self.other.append(self.oracle.open())

    @property
    def pending(self):
        return [tokens[len(kv) :] for tokens, kv in zip(self.tokens, self.own, strict=True)]

    def random(self, shape):
        return Draft(shape, torch.from_numpy(self.generator.integers(0, VOCABULARY, shape.nodes)))

    def ahead(self, draft, levels=(1,), trees=None):
        """A draft pass over the roots of ``trees`` and some levels of the draft below them."""
        shape, timed = draft.shape, self.lm.clock.phase("propose_forward")
        trees = range(shape.roots) if trees is None else trees
        kvs = [kv if n in trees else None for n, kv in enumerate(self.own)]
        draft_pass = self.lm.draft_pass(Route(0, self.end))
        pending = self.pending
        got = draft_pass.forward([kv for kv in kvs if kv is not None], [pending[n] for n in trees], timed)
        assert got.logits.shape == (len(trees), VOCABULARY)
        assert len(got.exits) == sum(len(pending[n]) for n in trees)
        for level in levels:
            rows = np.flatnonzero((shape.depth == level) & np.isin(shape.root, trees))
            if len(rows):
                draft_pass.extend(kvs, shape, rows, draft.array[rows - shape.roots], timed)
        return draft_pass

    @torch.inference_mode()
    def compare(self, draft, prefill=(), continued=True):
        """The target's forward, against the oracle's; returns what was prepared."""
        pending = self.pending
        more = [[(kvs[n], pending[n]) for n in prefill] for kvs in (self.own, self.other)]
        trees = [n for n in range(len(self.own)) if n not in prefill]
        wanted = self.oracle.forward([self.other[n] for n in trees], [pending[n] for n in trees], draft, more[1])
        prepared = self.lm.prepare([self.own[n] for n in trees], [pending[n] for n in trees], draft, more[0])
        assert isinstance(prepared, Continued) == continued
        outputs = self.lm.run(prepared)
        torch.testing.assert_close(outputs.logits, wanted.logits, rtol=0, atol=1e-10)
        assert outputs.attended == wanted.attended
        for mine, theirs in zip(outputs.pending, wanted.pending, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        for mine, theirs in zip(outputs.nodes, wanted.nodes, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        return prepared

    def accept(self, draft, paths):
        """Accept a path of child ranks of each tree, and append one more token."""
        for n, ranks in enumerate(paths):
            row, kept = n, []
            for rank in ranks:
                row = int(draft.shape.children[row][rank])
                kept.append(int(draft.shape.places[row]))
                self.tokens[n].append(int(draft.token[row - draft.shape.roots]))
            self.own[n].accept(kept)
            self.other[n].accept(kept)
            self.tokens[n].append(int(self.generator.integers(VOCABULARY)))

    def close(self):
        for kv in (*self.own, *self.other):
            kv.close()
        assert not self.lm.cells.references.any()


def life(pair):
    """Draft passes over batches of unequal sequences, with accepted and rejected nodes, forks and shorter texts."""
    pair.add(6)
    pair.add(3)
    for step, (levels, trees) in enumerate([((1,), (0, 1)), ((1, 2), (0, 1)), ((), (1,)), ((1, 2, 3), (0,))]):
        draft = pair.random(forest((TREE, chain(2))))
        pair.ahead(draft, levels, trees).finish(draft.token)
        pair.compare(draft)
        pair.accept(draft, [((0, 1), ()), ((1,), (0, 0)), ((), (0,)), ((0, 0, 0), ())][step])
    for kvs in (pair.own, pair.other):
        kvs.append(kvs[0].fork())
        kvs[1].truncate(4)
    pair.tokens.append(list(pair.tokens[0]))
    del pair.tokens[1][6:]
    draft = pair.random(forest((chain(1), TREE, TREE)))
    pair.ahead(draft, (1,)).finish(draft.token)
    pair.compare(draft)
    pair.accept(draft, [(0,), (2,), (1, 0)])
    pair.compare(pair.random(forest((chain(1), chain(0), TREE))), continued=False)
    pair.close()


@pytest.mark.parametrize("end", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.each_value
def test_every_family_continues_from_a_draft_pass(family, end):
    life(Pair(model_of(family), end, (0, 1, 2, 3)))


@pytest.mark.parametrize("family", WINDOWED)
def test_layers_with_windows_and_chunks_continue_from_a_draft_pass(family):
    life(Pair(model_of(family, 4), 2, (1, 2, 3)))


@pytest.mark.each_value
@pytest.mark.parametrize("states", [(), (0,), (1,), (3,), (2, 0), (-1, 1)])
@pytest.mark.parametrize("end", [1, 2])
def test_any_hidden_states_are_captured(states, end):
    life(Pair(model_of(), end, states))


def calls_of_layers(model):
    """Rows that each layer has computed."""
    rows = Counter()
    for number, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(lambda _, args, __, number=number: rows.update({number: args[0].shape[1]}))
    return rows


def test_no_layer_computes_a_row_twice():
    pair = Pair(model_of(layers=4), 2)
    pair.add(5)
    pair.add(2)
    draft = pair.random(forest((TREE, chain(3))))
    assert len(pair.lm.sublayers) == 8  # found by a forward of one token
    rows = calls_of_layers(pair.lm.model)
    pair.ahead(draft, (1, 2)).finish(draft.token)
    total, early = 7 + 10, 7 + 3 + 1 + 3 + 1  # the last level of each tree is left: two nodes
    assert rows == {0: early, 1: early}
    prepared = pair.lm.prepare(pair.own, pair.pending, draft)
    with torch.inference_mode():
        pair.lm.run(prepared)
    assert rows == dict.fromkeys(range(4), total)
    assert prepared.rest.ids.shape[1] == 2


def test_a_draft_that_changed_after_it_was_drafted_reuses_what_it_still_has():
    """Cut, with other tokens, with more nodes, with repeated siblings."""
    pair = Pair(model_of(), 1, (0, -1))
    pair.add(4)
    shape = TREE
    token = torch.tensor([7, 7, 9, 4, 5, 4, 6])  # two siblings repeat a token, and what is below them
    draft = Draft(shape, token)
    cut = draft.cut([1])
    changed = Draft(shape, torch.tensor([7, 8, 9, 4, 5, 4, 6]))
    larger = Draft(Shape(1, np.array([0, 1, 1, 0, 2])), torch.tensor([7, 3, 5, 7, 9]))
    turned = Draft(Shape(1, np.array([0, 0, 1, 0, 2])), torch.tensor([9, 7, 1, 7, 5]))
    for other, computed_again in ((draft, 0), (cut, 0), (changed, 2), (larger, 2), (turned, 1)):
        pair.ahead(draft, (1, 2, 3)).finish(draft.token)
        rest = pair.compare(other).rest
        assert (0 if rest is None else rest.ids.shape[1]) == computed_again
        pair.accept(other, [(0,)])
    pair.close()


def test_a_draft_in_the_memory_of_a_device_needs_its_tokens_on_the_host(monkeypatch):
    pair = Pair(model_of())
    pair.add(4)
    draft = pair.random(chain(2))
    monkeypatch.setattr(Draft, "array", None)
    host = draft.token.numpy().copy()
    for token, known in ((draft.token, host), (draft.token, None), (draft.token.clone(), host)):
        draft_pass = pair.lm.draft_pass(Route(0, 1))
        timed = pair.lm.clock.phase("propose_forward")
        draft_pass.forward(pair.own, pair.pending, timed)
        draft_pass.extend(pair.own, draft.shape, np.array([1]), host[:1], timed)
        draft_pass.finish(token, known)
        outputs = pair.compare(draft)  # the row of the pending token is known in any case
        assert outputs.rest.ids.shape[1] == (1 if token is draft.token and known is not None else 2)
        pair.accept(draft, [(0,)])
    pair.close()


def test_prompts_and_their_chunks_share_the_forward():
    pair = Pair(model_of(), 1, (0, 2), chunk=4)
    pair.add(3)
    pair.add(11)  # without a draft pass, computed in chunks
    pair.add(6)
    draft = pair.random(forest((TREE, chain(0))))
    pair.ahead(draft, (1,), (0,)).finish(draft.token)
    prepared = pair.compare(draft, prefill=(2,))
    assert prepared.rest is not None and len(prepared.early) == 2
    pair.close()


@pytest.mark.parametrize("what", ["truncate", "close", "again", "drop", "unfinished", "other pending", "other states"])
def test_the_cells_of_a_draft_pass_are_given_back(what):
    pair = Pair(model_of())
    pair.add(6)
    pair.compare(empty(1), continued=False)
    pair.tokens[0] += [5, 8]
    draft = pair.random(TREE)
    before = pair.lm.cells.references.sum()
    draft_pass = pair.ahead(draft, (1,))
    assert pair.lm.cells.references.sum() == before + 2 + 3
    if what != "unfinished":
        draft_pass.finish(draft.token)
    if what == "truncate":
        pair.own[0].truncate(5)
        pair.other[0].truncate(5)
        pair.tokens[0] = pair.tokens[0][:5] + [1]
    elif what == "close":
        pair.own[0].close()
        assert not pair.lm.cells.references.any()
        return
    elif what == "again":
        pair.ahead(draft, ())
        assert pair.lm.cells.references.sum() == before + 2
    elif what == "drop":
        draft_pass.drop()
        draft_pass.drop()
        assert pair.lm.cells.references.sum() == before
    elif what == "other pending":
        pair.tokens[0][-1] = 9
    elif what == "other states":
        pair.lm.capture((0,))
        pair.oracle.capture((0,))
    pair.compare(draft, continued=False)
    pair.accept(draft, [()])
    pair.close()


def test_a_fork_leaves_the_draft_pass_to_its_sequence():
    pair = Pair(model_of())
    pair.add(6)
    pair.compare(empty(1), continued=False)
    pair.tokens[0] += [5]
    draft = pair.random(forest((TREE,)))
    pair.ahead(draft, (1,)).finish(draft.token)
    for kvs in (pair.own, pair.other):
        kvs.append(kvs[0].fork())
    pair.tokens.append([*pair.tokens[0][:-1], 9, 2])
    both = Draft(forest((TREE, chain(0))), draft.token)
    assert pair.compare(both).rest.ids.shape[1] == 4 + 2  # the deeper nodes, and the fork's tokens
    pair.close()


@pytest.mark.parametrize("skipped", [{("attn", 1)}, {("mlp", 1), ("attn", 2)}, {("attn", 1), ("mlp", 1)}])
@torch.inference_mode()
def test_skipped_sublayers_add_nothing_to_the_residual_stream(skipped):
    """The same model with output projections of zero computes the same."""
    pair = Pair(model_of(layers=4))
    pair.add(6)
    pair.add(4)
    other = model_of(layers=4)
    with torch.no_grad():
        for kind, layer in skipped:
            block = other.model.layers[layer]
            (block.self_attn.o_proj if kind == "attn" else block.mlp.down_proj).weight.zero_()
    prefix = CausalLM(other)  # its past is the whole model's, as for a draft pass
    draft, timed = pair.random(forest((TREE, chain(2)))), pair.lm.clock.phase("propose_forward")
    pair.compare(empty(2), continued=False)
    pair.tokens = [[*text, 3, 1] for text in pair.tokens]
    theirs = [prefix.open() for _ in pair.own]
    prefix.forward(theirs, [text[:-2] for text in pair.tokens], empty(2))
    for mine, their in zip(prefix.cells.views, pair.lm.cells.views, strict=True):
        for spans, other_spans in zip(mine, their, strict=True):
            for span, other_span in zip(spans, other_spans, strict=True):
                span.copy_(other_span)
    wanted = prefix.forward(theirs, pair.pending, draft).logits
    draft_pass = pair.lm.draft_pass(Route(skipped=frozenset(Sublayer(*each) for each in skipped)))
    before = pair.lm.cells.references.sum()
    roots = draft_pass.forward(pair.own, pair.pending, timed)
    assert roots.exits is None
    torch.testing.assert_close(roots.logits, wanted[:2], rtol=0, atol=1e-10)
    for level in (1, 2):
        rows = np.flatnonzero(draft.shape.depth == level)
        nodes = draft_pass.extend(pair.own, draft.shape, rows, draft.array[rows - 2], timed)
        torch.testing.assert_close(nodes.logits, wanted[rows], rtol=0, atol=1e-10)
    draft_pass.drop()
    assert pair.lm.cells.references.sum() == before
    pair.compare(draft, continued=False)
    pair.close()


def test_runners_say_whether_they_run_ranges_of_layers():
    assert "layer_ranges" in CausalLM(model_of()).capabilities.abilities
    for runner, why in (
        (CausalLM(model_of(), "dense_mask"), "attention=dense_mask"),
        (CausalLM(model_of(), fixed=True), "graphs"),
    ):
        assert "layer_ranges" not in runner.capabilities.abilities
        assert why in runner.why_no_layer_ranges
    unknown = model_of()
    unknown.model.layers = torch.nn.Sequential(*unknown.model.layers)
    assert "not one list of modules" in CausalLM(unknown).why_no_layer_ranges


def test_a_route_that_the_model_does_not_have_is_refused():
    lm = CausalLM(model_of())
    for route in (Route(0, 3), Route(1), Route(0, 0), Route(skipped=frozenset({Sublayer("mlp", 3)}))):
        with pytest.raises(ValueError, match="the model has 3 layers"):
            lm.draft_pass(route)
    assert not {
        sublayer for sublayer in CausalLM(model_of("opt")).sublayers if sublayer.kind == "mlp"
    }  # in no module of their own


def test_a_loop_over_the_layers_may_read_their_attributes():
    pair = Pair(model_of())
    model = pair.lm.model.model
    for layer in model.layers:
        layer.attention_type = "full"
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append([layer.attention_type for layer in module.layers]))
    pair.add(4)
    draft = pair.random(chain(2))
    pair.ahead(draft).finish(draft.token)
    pair.compare(draft)
    timed = pair.lm.clock.phase("propose_forward")
    skipped = frozenset({Sublayer("attn", 1), Sublayer("mlp", 1), Sublayer("mlp", 0)})
    draft_pass = pair.lm.draft_pass(Route(skipped=skipped))
    pair.accept(draft, [()])
    draft_pass.forward(pair.own, pair.pending, timed)
    draft_pass.drop()
    assert seen and all(kinds == ["full"] * 3 for kinds in seen)
    pair.close()


@pytest.mark.parametrize("where", ["rest", "continued", "skipped"])
def test_a_failure_leaves_hooks_layers_and_cells_as_they_were(where):
    pair = Pair(model_of(), states=(0, 2))
    pair.add(4)
    model = pair.lm.model.model
    before = model.layers, [dict(layer._modules) for layer in model.layers], len(model._forward_hooks)
    draft, timed = pair.random(chain(3)), pair.lm.clock.phase("propose_forward")
    assert pair.lm.sublayers
    if where == "skipped":
        draft_pass = pair.lm.draft_pass(Route(skipped=frozenset({Sublayer("attn", 1), Sublayer("mlp", 2)})))
    else:
        pair.ahead(draft).finish(draft.token)
    handle = before[0][0 if where == "rest" else 2].register_forward_pre_hook(lambda *_: 1 / 0)
    if where == "skipped":
        fails = lambda: draft_pass.forward(pair.own, pair.pending, timed)  # noqa: E731
    else:
        fails = torch.inference_mode()(lambda: pair.lm.run(pair.lm.prepare(pair.own, pair.pending, draft)))
    with pytest.raises(ZeroDivisionError):
        fails()
    handle.remove()
    assert model.layers is before[0] and len(model._forward_hooks) == before[2]
    assert [dict(layer._modules) for layer in model.layers] == before[1]
    pair.own[0].truncate(0)
    pair.ahead(draft).finish(draft.token)
    pair.compare(draft)
    pair.close()


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    pair = Pair(model_of())
    pair.add(4)
    layers = pair.lm.model.model.layers
    handle = layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.ahead(pair.random(chain(1)))
    handle.remove()
    assert pair.lm.model.model.layers is layers
    pair.compare(empty(1), continued=False)
    pair.close()
