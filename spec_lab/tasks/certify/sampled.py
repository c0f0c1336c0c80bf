"""The statistical layer: the real loop with real random numbers, tested against laws that are known.

``joint`` samples whole texts of a toy world, whose law is a table: a histogram of them is tested by chi-square.
``scores`` decodes with real models, where texts are too many to count, and tests martingales instead: whatever was
decided before a token was drawn, the token must follow its law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.protocol import full_mask, unpack
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.propose.trees import parse, write
from spec_lab.tasks.certify.enumerate import Watched
from spec_lab.tasks.certify.exact import PLAIN, Instance, toy
from spec_lab.tasks.certify.outputs import autoregressive
from spec_lab.tasks.certify.statistics import Score
from spec_lab.tasks.certify.worlds import PROMPT, Random, code
from spec_lab.verify import Verifier, chains_only

JOINT = Instance(Random(11, support=4, plain=True), "2x1", tokens=4)
"""The world whose texts of four tokens are sampled: 256 of them, all possible."""

WIDE = 256
"""Texts decoded at once."""


def joint(
    proposer: Proposer | Drawn,
    verifier: Verifier,
    samples: int,
    seed: int,
    sampling: Sampling = PLAIN,
    instance: Instance = JOINT,
    tick: Callable[[int], object] = lambda _: None,
    watched: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Texts that the real loop puts out in float32, and the law they should have.

    A proposer with a tree of its own drafts that, as far as the texts and the toy's vocabulary reach. For a verifier
    that verifies chains only a chain is drafted.

    Args:
        proposer: a proposer, or a way of drawing for the reference.
        verifier: decides.
        samples: texts.
        seed: of all choices.
        sampling: of the requests.
        instance: a world and how many tokens.
        tick: told how many texts were added.
        watched: whether a key that names two choices is an error.

    Raises:
        Reused: one key named two choices, which would share their noise.

    Returns:
        ``[samples]`` int64, each text's number; ``[V ** tokens]`` the law.
    """
    if chains_only(verifier):
        instance = replace(instance, tree="1x1")
    tree, deepest = getattr(proposer, "tree", ()), instance.tokens  # what lies deeper has no part in the texts
    own = [path for path in tree if len(path) <= deepest and max(path) < instance.world.v]
    parts = toy(replace(instance, tree=write(parse(own))) if own else instance, proposer, sampling, torch.float32)
    draws: Draws = CounterDraws(seed)
    v, texts = instance.world.v, np.empty(samples, dtype=np.int64)
    for start in range(0, samples, WIDE):
        numbers = range(start, min(start + WIDE, samples))
        requests = [Request(number, f"toy {number}", PROMPT, sampling, instance.tokens) for number in numbers]
        group = fixed_group(parts.target, parts.proposer, verifier, requests, Watched(draws) if watched else draws)
        for _ in group:
            pass
        for live in group.sequences:
            texts[live.request.id] = code(live.emitted, v)
        tick(len(numbers))
    return texts, autoregressive(parts.laws, instance.tokens, v).exactly[-1]


# Real models -------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What was fixed before a step's first token was drawn: its place in the output, and q there or what is drafted."""

    place: int
    q: Tensor | None  # [V]
    drafted: list[int]

    def function(self, p: Tensor) -> Tensor:
        """The f for the law p ``[V]``: sign(q - p), or whether a token is drafted."""
        if self.q is not None:
            return torch.sign(self.q.to(p) - p)
        return torch.zeros_like(p).index_fill_(0, torch.tensor(self.drafted), 1.0)


def scores(
    target: Target,
    proposer: Proposer,
    verifier: Verifier,
    requests: Sequence[Request],
    seed: int,
    batch_size: int = 16,
    tick: Callable[[int], object] = lambda _: None,
    binding: AppliedConstraint | None = None,
) -> dict[str, Score]:
    """Decode and test tokens against the laws of a plain forward over the finished text, which knows no cells.

    Three martingales. *Towards the draft*: the first token of each step, with f = sign(q - p) at the head, or, for
    deterministic drafts, whether a token is among those drafted there. Given the past, a step's first token follows p
    whatever the verifier; later ones need care, since where a step ends depends on them. *Mode*: every token, with f =
    whether it is p's likeliest. *Draft*: every drafted token, with f = whether it is the likeliest of the law the draft
    states for it, given its earlier siblings; a draft that states another law than it was drawn from is found here.

    Args:
        target: decodes, best in float32 or float64: the two ways of computing p must agree.
        proposer: drafts.
        verifier: decides.
        requests: decoded in groups of ``batch_size``.
        seed: of all choices.
        tick: told how many tokens were added.
        binding: the constraint; one that acts has no law of its tokens one by one.

    Raises:
        ValueError: a request broke; says why.
    """
    towards, mode, drafted = Score(1.0 if proposer.drawn == "point" else 2.0), Score(1.0), Score(1.0)
    for start in range(0, len(requests), batch_size):
        some = requests[start : start + batch_size]
        group = fixed_group(target, proposer, verifier, some, CounterDraws(seed), binding)
        known: dict[SequenceState, list[_Known]] = {}
        for done in group:
            for live, fixed in _fixed(done):
                known.setdefault(live, []).append(fixed)
            _score_draft(drafted, done.draft)
        if group.errors:
            raise ValueError(next(iter(group.errors.values())))
        for live in group.sequences:
            p = _plain_laws(target, live, binding)
            _add(mode, p, likeliest(p), live.emitted)
            if live in known:
                there = p[[one.place for one in known[live]]]
                f = torch.stack([one.function(law) for one, law in zip(known[live], there, strict=True)])
                _add(towards, there, f, [live.emitted[one.place] for one in known[live]])
            tick(len(live.emitted))
    found = {"towards the draft": towards, "mode": mode, "draft": drafted}
    return {name: score for name, score in found.items() if score.tokens}


def _fixed(done: StepInfo) -> list[tuple[SequenceState, _Known]]:
    """For each tree with children at its head: the draft's law there, or which tokens it holds."""
    draft, shape, found = done.draft, done.draft.shape, []
    for head, live in enumerate(done.sequences):
        children = shape.children[head] - shape.roots
        if len(children):
            q = None if draft.q is None or draft.q_row is None else draft.q[int(draft.q_row[head])].cpu()
            place = done.context[head] - len(live.request.tokens)
            found.append((live, _Known(place, q, [] if q is not None else draft.token[children].tolist())))
    return found


def likeliest(p: Tensor) -> Tensor:
    """Whether a token is the likeliest, as 0 and 1, ``[n, V]``."""
    return torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).double()


def _plain_laws(target: Target, live: SequenceState, binding: AppliedConstraint | None) -> Tensor:
    """The law each emitted token should have, by one forward over the whole text, ``[n, V]`` float64."""
    first = len(live.request.tokens)
    ids = torch.tensor([live.tokens], device=target.lm.device)
    with torch.inference_mode():
        logits = target.lm.model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    seen[:, list(live.request.tokens)] = True
    for row, token in enumerate(live.emitted[:-1], start=1):
        seen[row:, token] = True
    mask = None
    if binding is not None and binding.on_target:
        state, each = binding.constraint.start(live.request), []
        for token in live.emitted:
            own = state.mask()
            each.append(full_mask(logits.shape[-1]) if own is None else own)
            if token not in live.request.stop:
                state.advance(token)
        mask = torch.from_numpy(unpack(np.array(each), logits.shape[-1])).to(logits.device)
    return logits_to_probs(logits, [live.request.sampling], seen, mask).double().cpu()


def _add(score: Score, p: Tensor, f: Tensor, tokens: Sequence[int]) -> None:
    """Add f(x) of tokens ``[n]`` with laws p and functions f, both ``[n, V]``."""
    p = p / p.sum(-1, keepdim=True)  # float32 laws are off by rounding, always to one side
    mean = (p * f).sum(-1)
    variance = (p * (f - mean[:, None]) ** 2).sum(-1)
    score.add(f[range(len(tokens)), list(tokens)].numpy(), mean.numpy(), variance.numpy())


def _score_draft(score: Score, draft: Draft) -> None:
    """Whether each drafted token is the likeliest of its q given its earlier siblings; nothing where points occur."""
    if draft.q is None or draft.q_row is None or not draft.shape.nodes or "point" in draft.ways:
        return
    shape, token = draft.shape, draft.token.cpu()
    q = draft.q[torch.from_numpy(draft.q_row[shape.parent]).to(draft.q.device)].double().cpu()
    if draft.ways != {"iid"}:
        for children in shape.children:
            for rank, child in enumerate(children - shape.roots):
                q[child, token[torch.from_numpy(children[:rank] - shape.roots)]] = 0.0
        q /= q.sum(-1, keepdim=True)
    _add(score, q, likeliest(q), token.tolist())
