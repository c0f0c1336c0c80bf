"""Lookahead decoding: its window against plain forwards, its pool, and that the window never changes the output."""

from dataclasses import replace

import pytest

from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.policy.adaptive import Adaptive
from spec_lab.policy.depths import FixedDepth
from spec_lab.propose.lookahead import Lookahead, Window
from spec_lab.verify import Token, Traversal
from tests.propose.lab import PROMPTS, WARM, decode, emitted, plain_logits, requests


def argmax(target, text):
    return int(plain_logits(target.lm.model, text).argmax())


def test_the_window_grows_and_moves_as_a_naive_one_and_fills_the_pool(target):
    """Every likeliest token by a forward of the whole text without a KV cache."""
    w, n = 3, 3
    text, levels, pool = list(PROMPTS[0]), None, []
    for info in fixed_group(Arm(target, Lookahead(w, n, 4), Token(), CounterDraws(0)), requests(prompts=PROMPTS[:1])):
        if levels is None:
            levels = [[text[-1 - column % len(text)] for column in range(w)]]
        computed = info.draft.computed_only
        assert computed.token.tolist() == [token for level in levels for token in level]
        drafted = {tuple(int(info.draft.token[row - 1]) for row in info.draft.shape.path(int(row)))
                   for row in info.draft.shape.trees[0][1:]}  # fmt: skip
        assert {gram[1:] for gram in pool if gram[0] == text[-1]} == {
            drafted_gram for drafted_gram in drafted if len(drafted_gram) == n - 1
        }
        above = [text + levels[0][: column + 1] + [level[column] for level in levels[1:]] for column in range(w)]
        last = [argmax(target, prefix) for prefix in above]
        if len(levels) < n - 1:
            levels.append(last)
        else:
            for gram in zip(*levels, last, strict=True):
                pool = [entry for entry in pool if entry != gram] + [gram]
                same = [entry for entry in pool if entry[0] == gram[0]]
                pool = [entry for entry in pool if entry not in same[:-4]]
            levels = [*levels[1:], last]
        text = list(info.sequences[0].tokens)
    assert len(pool) >= 4


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
def test_greedy_output_is_the_target_s_and_n_grams_are_drafted(target, truth, verifier):
    group, steps = decode(target, Lookahead(5, 3, 4), requests(), verifier)
    assert emitted(group) == truth
    assert any(step.draft.shape.nodes for step in steps)


def test_rows_of_the_window_never_change_a_sampled_output(target):
    """The pool's n-grams are deterministic drafts: without the window's rows the same draft gives the same tokens."""

    class Blind(Lookahead):
        def propose(self, batch):
            return replace(super().propose(batch), computed_only=None)

    kept, _ = decode(target, Lookahead(4, 3, 3), requests(WARM, new=1))
    blind, _ = decode(target, Blind(4, 3, 3), requests(WARM, new=1))
    assert emitted(kept) == emitted(blind)


def test_the_window_is_left_out_where_the_context_ends(target):
    group, steps = decode(replace(target, context=16), Lookahead(4, 3, 3), requests(new=12, prompts=PROMPTS[:1]))
    assert steps[0].draft.computed_only is not None and steps[-1].draft.computed_only is None
    assert len(group.sequences[0].tokens) == 16


def test_a_limit_of_the_depth_leaves_the_window(target):
    limited = Adaptive({"lookahead": Lookahead(4, 3, 3)}, FixedDepth(1))
    _, steps = decode(target, limited, requests(new=12, prompts=PROMPTS[:1]))
    assert all(step.draft.computed_only is not None and step.draft.shape.deepest <= 1 for step in steps[:5])


def test_the_pool_forgets_the_least_recently_found_n_gram():
    window = Window()
    for followers in ((1, 2), (3, 4), (1, 2), (5, 6)):
        window.keep(9, followers, 2)
    assert list(window.pool[9]) == [(1, 2), (5, 6)]


def test_a_fork_has_a_pool_of_its_own():
    proposer = Lookahead(2, 2, 2)
    state = proposer.init(None)
    state.keep(1, (2,), 2)
    copy = proposer.fork(state)
    copy.keep(1, (3,), 2)
    assert list(state.pool[1]) == [(2,)]
