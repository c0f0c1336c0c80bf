"""The distribution of a model's outputs given that they are valid, by a potential.

Masking and renormalising at every token (``distribution: local``) samples from

    p_local(x) = prod_i p(x_i | x_<i) / A(x_<i),   A(s) = sum of p(t | s) over the tokens t allowed after s,

which is not the model's distribution given that the output is valid (Park et al. 2024, arXiv:2405.21047):

    p(x | valid) = p(x) 1[x in L] / Z,   Z = p(L).

L are the texts that the constraint allows token by token and that end with a stop token within ``max_new_tokens``. With
the potential h(s), the probability under the model that the text s is completed to one of them,

    h(s) = sum_t p(t | s) h(s t),   h(x) = 1 for x in L,   h(root) = Z,

the next token of p(x | valid) has probability p(t | s) h(s t) / h(s) (a Doob h-transform): every factor but the first
and the last cancels in the product over a text. So a verifier that is lossless for any p is lossless for this one.

``explore`` finds the texts from which L can be reached, which are a trie, and ``log_potential`` computes h by dynamic
programming from its leaves to its root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_lab.constrain.protocol import ConstraintError, ConstraintState, TokenWeights, mask_of, tokens_of
from spec_lab.core.faults import Passing

END = -1
"""In place of a child: the text ends here, and is valid."""

Text = tuple[int, ...]
"""Tokens after the prompt."""


class TooManyPrefixes(Passing, ValueError):
    """Valid outputs have more prefixes than may be explored."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The prefixes of valid outputs, a trie; node 0 is the empty text. Children come after their parents.

    Args:
        vocabulary: V.
        texts: ``[N]`` the text of each node.
        tokens: ``[N]`` for each node the tokens ``[n]`` after which a valid output can be reached, in ascending order.
        children: ``[N]`` the nodes ``[n]`` that these tokens lead to; ``END`` where the text ends.
        allowed: ``[N]`` for each node all tokens that the constraint allows, also those after which no valid output can
            be reached within the length.
    """

    vocabulary: int
    texts: Sequence[Text]
    tokens: Sequence[np.ndarray]
    children: Sequence[np.ndarray]
    allowed: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.texts)

    def child(self, node: int, token: int) -> int:
        """Return the node that a token leads to.

        Raises:
            ValueError: no valid output can be reached after the token, or it ends the text.
        """
        index = int(np.searchsorted(self.tokens[node], token))
        if index == len(self.tokens[node]) or self.tokens[node][index] != token or self.children[node][index] == END:
            raise ValueError(f"no valid output goes on after token {token}")
        return int(self.children[node][index])

    @cached_property
    def masks(self) -> list[np.ndarray]:
        """For each node the packed mask ``[W]`` of its tokens."""
        return [mask_of(tokens.tolist(), self.vocabulary) for tokens in self.tokens]

    @cached_property
    def outputs(self) -> list[tuple[int, int]]:
        """Every valid output: the last node on its path, and the place of its stop token among the node's tokens."""
        return [(node, index) for node, to in enumerate(self.children) for index in np.flatnonzero(to == END).tolist()]

    def path_sums(self, x: Sequence[np.ndarray]) -> np.ndarray:  # [K]
        """Return the sum of ``x`` along the path of each output, with a number for every token ``[n]`` of each node."""
        before = np.zeros(len(self))
        for node, to in enumerate(self.children):
            inner = to != END
            before[to[inner]] = before[node] + x[node][inner]
        return np.array([before[node] + x[node][index] for node, index in self.outputs])


def explore(
    state: ConstraintState,
    stop: frozenset[int],
    vocabulary: int,
    length: int,
    max_nodes: int,
) -> Prefixes:
    """Return the prefixes of all valid outputs.

    Args:
        state: the constraint's after the prompt; it is not changed.
        stop: tokens that end a text.
        vocabulary: V.
        length: most tokens of an output, the stop token included.
        max_nodes: largest number.

    Raises:
        TooManyPrefixes: more than ``max_nodes`` nodes.
        ConstraintError: no valid output exists; or as the constraint's state.
    """
    texts: list[Text] = [()]
    allowed: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    children: list[np.ndarray] = []
    ahead = deque([state.fork()])
    while ahead:
        here, text = ahead.popleft(), texts[len(allowed)]
        try:
            may = tokens_of(here.mask(), vocabulary)
        except ConstraintError:
            if not text:
                raise
            may = NO_TOKENS  # a dead end
        ends, to = np.isin(may, list(stop)), np.full(len(may), END)
        for index in np.flatnonzero(~ends).tolist() if len(text) + 1 < length else ():
            if len(texts) >= max_nodes:
                raise TooManyPrefixes(f"valid outputs have more than {max_nodes} prefixes")
            after, token = here.fork(), int(may[index])
            with suppress(ConstraintError):  # a dead end as well
                after.advance(token)
                to[index] = len(texts)
                texts.append((*text, token))
                ahead.append(after)
        leads = ends | (to != END)
        allowed.append(may)
        tokens.append(may[leads])
        children.append(to[leads])
    return _alive(Prefixes(vocabulary, texts, tokens, children, allowed))


NO_TOKENS = np.empty(0, dtype=np.int64)


def _alive(prefixes: Prefixes) -> Prefixes:
    """The same without the nodes from which no valid output is reached."""
    alive = np.zeros(len(prefixes) + 1, dtype=bool)
    alive[END] = True
    for node in reversed(range(len(prefixes))):
        alive[node] = bool(alive[prefixes.children[node]].any())
    if not alive[0]:
        raise ConstraintError("no output that the constraint allows ends within max_new_tokens")
    number = np.append(np.cumsum(alive[:-1]) - 1, END)
    kept = np.flatnonzero(alive[:-1]).tolist()
    leads = [alive[prefixes.children[node]] for node in kept]
    return Prefixes(
        prefixes.vocabulary,
        [prefixes.texts[node] for node in kept],
        [prefixes.tokens[node][to] for node, to in zip(kept, leads, strict=True)],
        [number[prefixes.children[node][to]] for node, to in zip(kept, leads, strict=True)],
        [prefixes.allowed[node] for node in kept],
    )


def log_potential(prefixes: Prefixes, log_p: Sequence[np.ndarray]) -> np.ndarray:  # [N]
    """Return log h of every node; log Z is that of node 0, -inf where no valid output has any probability.

    Args:
        prefixes: of the valid outputs.
        log_p: ``[N]`` for each node log p of its tokens ``[n]``.
    """
    log_h = np.zeros(len(prefixes) + 1)  # the last entry, found by END, is log 1
    for node in reversed(range(len(prefixes))):
        log_h[node] = _log_sum(log_p[node] + log_h[prefixes.children[node]])
    return log_h[:-1]


def _log_sum(x: np.ndarray) -> float:
    largest = x.max(initial=-np.inf)
    return float(largest) if largest == -np.inf else float(largest + np.log(np.exp(x - largest).sum()))


@dataclass(frozen=True, eq=False)
class Potential:
    """The potential h of one request.

    Args:
        prefixes: of its valid outputs.
        log_h: ``[N]`` log h of every node.
    """

    prefixes: Prefixes
    log_h: np.ndarray

    @cached_property
    def weights(self) -> list[TokenWeights]:
        """For each node the potentials of its children, relative to the largest of them."""
        padded = np.append(self.log_h, 0.0)  # END
        each = [padded[children] for children in self.prefixes.children]
        return [
            TokenWeights(tokens, np.exp(logs - logs.max()) if logs.max() > -np.inf else np.zeros(len(logs)))
            for tokens, logs in zip(self.prefixes.tokens, each, strict=True)
        ]


class PotentialState(ConstraintState):
    """A node of the prefixes of valid outputs, with the potentials of what may follow. See ``ConstraintState``.

    Its mask allows the tokens after which a valid output can be reached: fewer than the constraint's own mask where
    the length does not suffice.
    """

    def __init__(self, potential: Potential, node: int = 0) -> None:
        self.of, self.node = potential, node

    def fork(self) -> PotentialState:
        """See ``ConstraintState``."""
        return PotentialState(self.of, self.node)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        try:
            self.node = self.of.prefixes.child(self.node, token)
        except ValueError as error:
            raise ConstraintError(str(error)) from None

    def mask(self) -> np.ndarray:  # [W]
        """See ``ConstraintState``."""
        return self.of.prefixes.masks[self.node]

    def potential(self) -> TokenWeights:
        """See ``ConstraintState``."""
        return self.of.weights[self.node]
