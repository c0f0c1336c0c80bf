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

``explore`` finds the texts from which L can be reached, ``log_potential`` computes h from the last tokens to the first.
Texts after which the constraint's state, the model's state and the number of tokens are equal share one node: for a
Markov chain and a constraint with few states this is dynamic programming, for any other model the trie of L.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_lab.constrain.protocol import ConstraintError, ConstraintState, HasKey, TokenWeights, mask_of, unpack

END = -1
"""In place of a child: the text ends here, and is valid."""

Text = tuple[int, ...]
"""Tokens after the prompt."""


class TooManyPrefixes(ValueError):
    """Valid outputs have more prefixes than may be explored."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The prefixes of valid outputs, each a node; number 0 is the empty text. Children come after their parents.

    Args:
        vocabulary: V.
        texts: ``[N]`` one text of each node.
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
        place = int(np.searchsorted(self.tokens[node], token))
        if place == len(self.tokens[node]) or self.tokens[node][place] != token or self.children[node][place] == END:
            raise ValueError(f"no valid output goes on after token {token}")
        return int(self.children[node][place])

    @cached_property
    def masks(self) -> list[np.ndarray]:
        """For each node the packed mask ``[W]`` of its tokens."""
        return [mask_of(one.tolist(), self.vocabulary) for one in self.tokens]

    @cached_property
    def outputs(self) -> list[tuple[list[int], list[int], Text]]:
        """Every valid output: the nodes on its path, the places of its tokens among theirs, and the text.

        There are as many as texts, also where nodes are shared.
        """
        found: list[tuple[list[int], list[int], Text]] = []
        ahead: list[tuple[list[int], list[int], Text]] = [([0], [], ())]
        while ahead:
            path, places, text = ahead.pop()
            pairs = zip(self.tokens[path[-1]].tolist(), self.children[path[-1]].tolist(), strict=True)
            for place, (token, child) in enumerate(pairs):
                if child == END:
                    found.append((path, [*places, place], (*text, token)))
                else:
                    ahead.append(([*path, child], [*places, place], (*text, token)))
        return sorted(found, key=lambda one: one[2])


def explore(
    state: ConstraintState,
    stop: frozenset[int],
    vocabulary: int,
    length: int,
    most: int,
    model_state: Callable[[Text], Hashable] = lambda text: text,
) -> Prefixes:
    """Return the prefixes of all valid outputs.

    Args:
        state: the constraint's after the prompt; it is not changed.
        stop: tokens that end a text.
        vocabulary: V.
        length: most tokens of an output, the stop token included.
        most: largest number of nodes.
        model_state: what the model's probabilities after a text depend on; by default the text itself. Texts share a
            node only where the constraint's states also tell that they are equal (``HasKey``).

    Raises:
        TooManyPrefixes: more than ``most`` nodes.
        ConstraintError: no valid output exists; or as the constraint's states.
    """
    texts: list[Text] = [()]
    allowed: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    children: list[np.ndarray] = []
    level: list[ConstraintState] = [state.fork()]
    for depth in range(length):
        known: dict[Hashable, int] = {}
        below: list[ConstraintState] = []
        for here in level:
            text = texts[len(allowed)]
            mask = here.mask()
            may = np.arange(vocabulary) if mask is None else np.flatnonzero(unpack(mask, vocabulary))
            allowed.append(may)
            own, to = [], []
            for token in may.tolist():
                if token in stop:
                    own.append(token)
                    to.append(END)
                elif depth + 1 < length:
                    after = here.fork()
                    after.advance(token)
                    longer = (*text, token)
                    key = (_key(after, longer), model_state(longer))
                    if key not in known:
                        if len(texts) >= most:
                            raise TooManyPrefixes(f"valid outputs have more than {most} prefixes")
                        known[key] = len(texts)
                        texts.append(longer)
                        below.append(after)
                    own.append(token)
                    to.append(known[key])
            tokens.append(np.array(own, dtype=np.int64))
            children.append(np.array(to, dtype=np.int64))
        level = below
    return _alive(Prefixes(vocabulary, texts, tokens, children, allowed))


def _key(state: ConstraintState, text: Text) -> Hashable:
    known = state.key if isinstance(state, HasKey) else None
    return text if known is None else (known,)


def _alive(found: Prefixes) -> Prefixes:
    """The same without the nodes from which no valid output is reached.

    Raises:
        ConstraintError: none is left.
    """
    alive = np.zeros(len(found) + 1, dtype=bool)
    alive[END] = True
    for node in reversed(range(len(found))):
        alive[node] = bool(alive[found.children[node]].any())
    if not alive[0]:
        raise ConstraintError("no output that the constraint allows ends within max_new_tokens")
    number = np.append(np.cumsum(alive[:-1]) - 1, END)
    kept = np.flatnonzero(alive[:-1]).tolist()
    leads = [alive[found.children[node]] for node in kept]
    return Prefixes(
        found.vocabulary,
        [found.texts[node] for node in kept],
        [found.tokens[node][to] for node, to in zip(kept, leads, strict=True)],
        [number[found.children[node][to]] for node, to in zip(kept, leads, strict=True)],
        [found.allowed[node] for node in kept],
    )


def log_potential(prefixes: Prefixes, log_p: Sequence[np.ndarray]) -> np.ndarray:  # [N]
    """Return log h of every node; log Z is that of node 0, -inf where no valid output has any probability.

    Args:
        prefixes: of the valid outputs.
        log_p: ``[N]`` for each node log p of its tokens ``[n]``.
    """
    found = np.zeros(len(prefixes) + 1)  # the last entry, found by END, is log 1
    for node in reversed(range(len(prefixes))):
        found[node] = _log_sum(log_p[node] + found[prefixes.children[node]])
    return found[:-1]


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


class PotentialState:
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

    def action(self) -> None:
        """Return None: it has no actions."""
        return None

    def potential(self) -> TokenWeights:
        """See ``HasPotential``."""
        return self.of.weights[self.node]
