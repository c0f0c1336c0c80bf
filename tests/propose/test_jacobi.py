"""Jacobi decoding: the arg max of the rows behind the accepted ones are the next guesses."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Observation
from spec_lab.propose.jacobi import Guesses, Jacobi
from spec_lab.verify import Token
from tests.propose.lab import PROMPTS, decode, emitted, plain_logits, requests
from tests.tiny import CONTEXT


def test_guesses_are_the_target_s_arg_max_below_the_wrong_guesses(target):
    """Against forwards of the whole text without a KV cache."""
    texts, before, compared = {}, {}, 0
    for info in fixed_group(Arm(target, Jacobi(5), Token(), CounterDraws(0)), requests()):
        for tree, sequence in enumerate(info.sequences):
            number = sequence.request.id
            text = texts.get(number, list(sequence.request.tokens))
            draft = info.draft.token[info.draft.shape.trees[tree][1:] - info.draft.shape.roots].tolist()
            if number in before:
                old_text, old_draft, accepted = before[number]
                behind = range(accepted + 1, len(old_draft) + 1)
                expected = [int(plain_logits(target.lm.model, old_text + old_draft[:n]).argmax()) for n in behind]
                filled = [text[n % len(text)] for n in range(5)]
                assert draft == (expected + filled)[:5]
                compared += len(expected)
            before[number] = text, draft, len(info.committed[tree].path)
            texts[number] = list(sequence.tokens)
    assert compared > 20


def test_the_first_guesses_are_the_text_from_its_beginning(target):
    _, steps = decode(target, Jacobi(8), requests(prompts=PROMPTS[:2]))
    first = steps[0].draft.token.tolist()
    assert first == [3, 14, 15, 9, 26, 5, 3, 14, 2, 7, 18, 2, 7, 18, 2, 7]


def test_greedy_output_is_the_target_s(target, truth):
    group, _ = decode(target, Jacobi(6), requests())
    assert emitted(group) == truth


def test_no_guess_is_beyond_the_context(target):
    short = replace(target, context=12)
    group, steps = decode(short, Jacobi(6), requests(prompts=PROMPTS[:1]))
    assert [step.draft.shape.nodes for step in steps][-1] < 6 and len(group.sequences[0].tokens) == 12 < CONTEXT


def test_nothing_is_guessed_from_parts_of_prompts_or_from_removed_tokens():
    state = Guesses([1, 2])
    sequence = SimpleNamespace(state=state)
    proposer = Jacobi(3)
    proposer.observe([Observation(sequence, 0, [4, 5])])
    assert state.tokens == []
    proposer.observe([Observation(sequence, 0, [4], rows=[4, 7, 8], top_k=np.array([[6], [9], [3]]), accepted=[0])])
    assert state.tokens == [3]
    copy = proposer.fork(state)
    proposer.rewind(state, 1)
    assert (state.tokens, copy.tokens) == ([], [3])
