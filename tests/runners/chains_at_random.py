"""Sequences of a runner that decodes chains: drafted, accepted, cut, forked and closed at random."""

import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape


def chains(counts, generator, vocabulary):
    """A draft with so many nodes below each root, in any order."""
    order = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    last, parents = [*range(len(counts))], []
    for node, root in enumerate(order.tolist()):
        parents.append(last[root])
        last[root] = len(counts) + node
    token = torch.from_numpy(generator.integers(0, vocabulary, len(order)))
    return Draft(Shape(len(counts), np.array(parents, dtype=np.int64)), token)


@torch.inference_mode()
def decode_at_random(
    lm, seed, vocabulary, assert_logits, *, steps, max_open, long_text, max_nodes, reserves=(0,)
):  # fmt: skip
    """Decode, and return the sequences that are open in the end, with their texts.

    Args:
        lm: the runner.
        seed: of what happens.
        vocabulary: V.
        assert_logits: called with each draft, the texts before it and the logits of its rows.
        steps: forwards.
        max_open: sequences at once.
        long_text: most pending tokens.
        max_nodes: of each chain.
        reserves: positions for which room is reserved, chosen at random.
    """
    generator = np.random.default_rng(seed)
    sequences, texts = [], []

    def tokens(count):
        return generator.integers(0, vocabulary, count).tolist()

    def any_sequence():
        return int(generator.integers(0, len(sequences)))

    for _ in range(steps):
        while len(sequences) < 2 or (len(sequences) < max_open and generator.random() < 0.3):
            sequences.append(lm.open(int(generator.choice(reserves))))
            texts.append([])
        chosen = generator.permutation(len(sequences))[: int(generator.integers(1, len(sequences) + 1))].tolist()
        ahead = chosen.pop() if len(chosen) > 1 and generator.random() < 0.3 else None
        pending = [tokens(generator.choice([1, 1, 1, 2, long_text])) for _ in chosen]
        counts = generator.integers(0, max_nodes + 1, len(chosen)) * generator.integers(0, 2)
        draft = chains(counts, generator, vocabulary)
        prefill = [] if ahead is None else [(sequences[ahead], tokens(4))]
        output = lm.run(lm.prepare([sequences[number] for number in chosen], pending, draft, prefill))
        for number, more in zip(chosen, pending, strict=True):
            texts[number] = texts[number] + more
        if ahead is not None:
            texts[ahead] = texts[ahead] + prefill[0][1]
        assert_logits(draft, [texts[number] for number in chosen], output.logits)
        for root, number in enumerate(chosen):
            nodes = draft.shape.trees[root][1:]
            accepted = int(generator.integers(0, len(nodes) + 1))
            if generator.random() < 0.9:  # else it holds the nodes during further forwards
                sequences[number].accept(range(accepted))
                texts[number] = texts[number] + draft.token[nodes[:accepted] - len(chosen)].tolist()
            if generator.random() < 0.2:
                length = max(0, len(sequences[number]) - int(generator.integers(0, 4)))
                sequences[number].truncate(length)
                texts[number] = texts[number][:length]
        if generator.random() < 0.3:
            number = any_sequence()
            sequences.append(sequences[number].fork())
            texts.append(list(texts[number]))
        if len(sequences) > 2 and generator.random() < 0.3:
            number = any_sequence()
            sequences.pop(number).close()
            del texts[number]
        assert [len(sequence) for sequence in sequences] == [len(text) for text in texts]
    return sequences, texts
