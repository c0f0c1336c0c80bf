"""A proposer: each drafted token is the one that most often followed the previous token in this text."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import whole
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer  # it has no state between steps
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Bigram(Proposer):
    """Drafts a chain of at most ``depth`` tokens per sequence; it ends where nothing has followed."""

    depth: int
    name: str = "bigram"
    drawn: Drawn = "deterministic"  # the same text always gets the same draft, so there is no q

    @staticmethod
    def load(target: Target, depth: int = 4) -> "Bigram":
        """The factory that the config names: live objects such as the target come by name, all else from the YAML."""
        return Bigram(whole("proposer.depth", depth))

    @property
    def nodes(self) -> int:
        """Most tokens drafted below one sequence."""
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        """One chain per sequence as one forest."""
        chains = [likely(sequence.tokens, self.depth) for sequence in batch.sequences]
        tokens = torch.tensor(
            [token for chain_tokens in chains for token in chain_tokens], dtype=torch.long, device=batch.device
        )
        return Draft(forest(tuple(chain(len(chain_tokens)) for chain_tokens in chains)), tokens)


def likely(tokens: list[int], count: int) -> list[int]:
    """The chain that follows ``tokens``, prompt and output so far: at most ``count`` tokens."""
    after: dict[int, Counter[int]] = defaultdict(Counter)
    for token, following in pairwise(tokens):
        after[token][following] += 1
    continuation = tokens[-1:]
    while len(continuation) <= count and continuation[-1] in after:
        continuation.append(after[continuation[-1]].most_common(1)[0][0])  # ties go to the one seen first
    return continuation[1:]
