"""PLD+: prompt lookup that chooses among the occurrences of the last token by the target's hidden states.

Source: 2412.01447, section 3, the variant that ranks by hidden states; the one that ranks by the attention of induction
heads is not here. The paper looks the prompt up; here the output is looked up as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.inference import inference
from spec_lab.core.options import Count, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.auto_depth import Acceptance, AutoDepth, Depth, resolved
from spec_lab.propose.continuations import continuation
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner

SCAN = 256
"""Maximum number of occurrences that are compared, the most recent first: comparing them costs time in every step."""


@dataclass(eq=False)
class ComputedText:
    """The computed tokens of one sequence, where each token occurs, and the hidden states scaled to length 1.

    Args:
        begin: the first position that is known; 0 unless earlier ones were not observed.
        tokens: from there on.
        places: for each token its positions after ``begin``, in ascending order.
        states: ``[>= len(tokens), H]`` by position, counted from ``begin``; grows by doubling.
    """

    begin: int = 0
    tokens: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)
    states: Tensor | None = None

    @property
    def end(self) -> int:
        """The position after the last one that is known."""
        return self.begin + len(self.tokens)

    def add(self, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        """Add tokens ``[n]`` and states ``[n, H]`` from position ``start`` on. Earlier ones that do not join go."""
        self.rewind(start)
        if self.end < start:
            self.rewind(0)
            self.begin = start
        first, rows = len(self.tokens), len(self.tokens) + len(tokens)
        if self.states is None or len(self.states) < rows:
            grown = hidden.new_empty(max(rows, 2 * first), hidden.shape[1])
            if self.states is not None:
                grown[:first] = self.states[:first]
            self.states = grown
        self.states[first:rows] = normalize(hidden.float(), dim=-1)
        self.tokens += tokens
        for position, token in enumerate(tokens, start):
            if position > self.begin:
                self.places.setdefault(token, []).append(position)

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        while self.end > length and self.tokens:
            token = self.tokens.pop()
            if self.tokens:  # the first position is not among the places: nothing is known before it
                self.places[token].pop()
        self.begin = min(self.begin, length)

    def occurrences(self, token: int) -> list[int]:
        """Return the positions of a token, the most recent first, where the state one position earlier is known."""
        return self.places.get(token, [])[: -SCAN - 1 : -1]

    def most_similar(self, places: Sequence[int]) -> Tensor:
        """Return the place ``[1]`` that follows the state most similar to the last one; of equals the first."""
        assert self.states is not None
        (position,) = upload(self.states.device, np.array(places))
        before = self.states.index_select(0, position - (self.begin + 1))
        last = self.states[len(self.tokens) - 1]
        return position.index_select(0, (before.float() @ last.float()).argmax().view(1))

    def copy(self) -> ComputedText:
        """Return an independent copy."""
        states = None if self.states is None else self.states[: len(self.tokens)].clone()
        return ComputedText(
            self.begin, list(self.tokens), {t: list(positions) for t, positions in self.places.items()}, states
        )


@dataclass(eq=False)
class PldPlus(Proposer):
    """Drafts what followed the occurrence of the last token whose context is most similar to the present one.

    Contexts are compared by the cosine of the hidden states one token earlier, since the last token is not computed
    yet; of equal ones the most recent counts. At the end of the text the continuation repeats. Nothing is drafted where
    several tokens are pending, as in the first step of a prompt: the hidden state before the last is not known.

    Args:
        depth: number of drafted tokens, k; at most ``auto_depth.MAX_DEPTH``; 0 drafts nothing.
        layer: number of the hidden state, as in ``Requires``.
        chosen: why the depth was chosen; None where it was given.
    """

    depth: int
    layer: int
    chosen: AutoDepth | None = None
    name: str = "pld_plus"
    drawn: Drawn = "deterministic"
    branches: bool = False
    requires: Requires = field(init=False)
    _chain: Callable[[int], Shape] = field(init=False, repr=False, default_factory=lambda: lru_cache(None)(chain))

    def __post_init__(self) -> None:
        self.requires = Requires(hidden=(self.layer,))

    @staticmethod
    @checked
    def load(
        target: Target,
        depth: Depth = "auto",
        layer: Annotated[int, Whole(-1)] | None = None,
        acceptance: Acceptance = 0.7,
        batch_size: Count = 1,
    ) -> PldPlus:
        """Return the proposer with valid options.

        Args:
            target: whose hidden states are compared. One without any is refused later (``check_requires``).
            depth: tokens drafted; 0: none; auto: as many as are fastest by measured costs and the acceptance.
            layer: hidden state that ranks occurrences (i: input of layer i, -1: final norm); None: the middle.
            acceptance: probability of each drafted token, given those before it, with depth=auto.
            batch_size: sequences decoded together, with depth=auto.

        Raises:
            ValueError: an option of the wrong type or range; names it.
        """
        last = target.lm.capabilities.hidden_layers
        if last and (layer or 0) > last:
            raise WrongOption(f"layer must be at most {last}, or null for the middle layer, not {layer}")
        tokens, chosen = resolved(depth, target, acceptance, batch_size)
        return PldPlus(tokens, last // 2 if layer is None else layer, chosen)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> PldPlus:
        """Return the same proposer with the toy's last hidden state. See ``Proposer``."""
        return replace(self, layer=-1)

    @property
    def nodes(self) -> int:
        """Maximum number of nodes below one root."""
        return self.depth

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts: dict[str, Any] = {"layer": self.layer}
        return facts if self.chosen is None else facts | {"auto_depth": self.chosen.facts}

    def init(self, request: Request) -> ComputedText:
        """Return an empty text."""
        return ComputedText()

    @inference
    def fork(self, state: ComputedText) -> ComputedText:
        """Return a copy."""
        return state.copy()

    def rewind(self, state: ComputedText, length: int) -> None:
        """Forget the positions from ``length`` on."""
        state.rewind(length)

    @inference
    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the tokens and the hidden states of all computed positions."""
        for observation in observed:
            if observation.hidden is not None and len(observation.hidden):
                state: ComputedText = observation.sequence.state
                state.add(observation.start, observation.tokens[: len(observation.hidden)], observation.hidden)

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Draft one chain per sequence, an empty one where nothing matches or where the context is not known."""
        candidates: list[list[int]] = []
        compared: dict[int, Tensor] = {}
        for number, (room, sequence) in enumerate(zip(batch.room(), batch.sequences, strict=True)):
            state: ComputedText = sequence.state
            known = room and self.depth and state.end == len(sequence.tokens) - 1
            places = state.occurrences(sequence.tokens[-1]) if known else []
            if len(places) > 1:
                compared[number] = state.most_similar(places)
            candidates.append(places)
        if compared:
            (chosen,) = batch.read(torch.cat(list(compared.values())))
            for number, position in zip(compared, chosen.tolist(), strict=True):
                candidates[number] = [position]
        drafted: list[int] = []
        shapes = []
        for sequence, places in zip(batch.sequences, candidates, strict=True):
            text = continuation(sequence.tokens, places[0] + 1, self.depth) if places else []
            drafted += text
            shapes.append(self._chain(len(text)))
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, drafted))
