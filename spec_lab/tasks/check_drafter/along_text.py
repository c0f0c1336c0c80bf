"""A drafter's distributions along the target's texts, beside the target's.

One forward of the target computes each text, its logits and the hidden states that the drafter requires. At every
position of the text the drafter then observes what it would have observed while decoding, and drafts with its ordinary
``propose``:

- a drafter with a plan of trees (``TreeProposer``) is given the text itself as its chain (``ChainOfText``): q at each
  depth is that after the true tokens (teacher forcing), whatever it would have drafted;
- any other proposer drafts as it does, deterministic tokens only; its tree is followed along the text as far as it
  holds it, so that figures of a depth are of the positions where all tokens before were drafted. So are trees of
  deterministic tokens of a plan, to know what they accept.

Given the text x, which the target has sampled, token verification accepts the drafted x_t with probability
``min(1, q(x_t) / p(x_t))``, which is q(x_t) at temperature 0, where p is one-hot; a deterministic token if it is x_t.
See ``replay.steps_along_texts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.faults import attributed
from spec_lab.core.history import TextHistories
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.decode.proposer import Observation, Proposer
from spec_lab.decode.rows import constrained_probs
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.decode.text_logits import compute_text
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, Expand
from spec_lab.propose.tree_plan import Grown, TreePlan
from spec_lab.propose.tree_proposer import TreeProposer
from spec_lab.propose.trees import widths

FIGURES = ("agreed", "alpha", "accepted", "confidence")


@dataclass(frozen=True)
class Answer:
    """A text of the target.

    Args:
        tokens: prompt and answer.
        conversation: number of the conversation of which it is an answer; None: it is alone in its own.
    """

    request: Request
    tokens: Sequence[int]
    conversation: int | None = None


@dataclass(frozen=True, eq=False)
class Predicted:
    """How well a drafter predicted one answer of n + 1 tokens, of which it could draft n.

    Row s is of the step that begins when s + 1 tokens are emitted, column d of the token at depth d + 1; NaN where
    nothing was drafted, and beyond the end of the text.

    Args:
        prompt: tokens of the prompt.
        agreed: ``[n, K]`` whether the likeliest tokens of p and q are the same.
        alpha: ``[n, K]`` sum min(p, q), of the sampling's temperature; of temperature 1 where that is 0.
        accepted: ``[n, K]`` the probability that the text's token is accepted, once those before it are: by the
            drafter's own tree where that has deterministic tokens, else by a chain; NaN also where the plan's
            ``confidence`` has ended the draft.
        confidence: ``[n, K]`` the largest probability of q at temperature 1; NaN without a q.
        predicted: ``[n, K]`` what the drafter's confidence head predicts of alpha; NaN without one.
        conversation: as in ``Answer``.
    """

    prompt: int
    agreed: np.ndarray
    alpha: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray
    predicted: np.ndarray
    conversation: int | None = None


@dataclass(frozen=True, eq=False)
class ChainOfText(TreePlan):
    """A chain of the tokens that follow in a known text, of which the drafter's logits are kept.

    Args:
        texts: tokens by request.
        levels: after ``draft``, of each level its trees ``[n]`` and the logits ``[n, V]`` after their rows.
    """

    texts: dict[int, Sequence[int]] = field(default_factory=dict)
    levels: list[tuple[np.ndarray, Tensor]] = field(default_factory=list)

    def draft(
        self,
        batch: Batch,
        depths: Sequence[int],
        roots: Computed | None,
        expand: Expand | None,
        lenient: bool = False,
        forced: Sequence[int] | None = None,
    ) -> Grown:
        """See ``TreePlan``."""
        begun = [(self.texts[sequence.request.id], len(sequence.tokens)) for sequence in batch.sequences]
        following = [tokens[start : start + depth] for (tokens, start), depth in zip(begun, depths, strict=True)]
        lengths = np.array([len(tokens) for tokens in following])
        shape, first = forest(tuple(map(chain, lengths.tolist()))), len(following) + lengths.cumsum() - lengths
        token = np.array([token for tokens in following for token in tokens], dtype=np.int64)
        self.levels.clear()
        computed, level = roots, 0
        while computed is not None and expand is not None and len(trees := np.flatnonzero(lengths > level)):
            if level:
                rows = first[trees] + level - 1
                computed = expand(shape, rows, token[rows - shape.roots])
            self.levels.append((trees, computed.logits))
            level += 1
        return Grown(Draft(shape, torch.from_numpy(token).to(batch.device)), shape, token, token)


@dataclass(eq=False)
class _DraftedText:
    """A text while a drafter drafts along it.

    Args:
        figures: to fill, by name.
        logits: ``[n + 1, V]`` of the target, from which each token of the answer was chosen.
        hidden: ``[tokens - 1, layers * H]`` what the drafter requires; None for nothing.
        sequence: as the drafter sees it, with the KV cache of the whole text.
    """

    answer: Answer
    figures: Mapping[str, np.ndarray]
    logits: Tensor
    hidden: Tensor | None
    sequence: SequenceState

    @property
    def first(self) -> int:
        """The number of the answer's first token."""
        return len(self.answer.request.tokens)


def predicted(
    target: Target, proposer: Proposer, answers: Sequence[Answer], batch: int, sampling: Sampling, depth: int
) -> list[Predicted]:
    """Return how well a drafter predicts answers of the target.

    Args:
        answers: of two tokens or more each.
        batch: answers along which it drafts together.
        depth: K, most tokens of a draft.

    Raises:
        PartError: the proposer raised an error; names it.
        ValueError: a proposer without a plan that samples its drafts.
    """

    def along(drafter: AlongText) -> list[Predicted]:
        starts = range(0, len(answers), batch)
        return [text for start in starts for text in drafter.along(answers[start : start + batch])]

    texts = along(AlongText(target, proposer, sampling, depth, teaches=isinstance(proposer, TreeProposer)))
    if not follows_tree(proposer):
        return texts
    trees = along(AlongText(target, proposer, sampling, depth, teaches=False))
    return [replace(text, accepted=tree.accepted) for text, tree in zip(texts, trees, strict=True)]


def follows_tree(proposer: Proposer) -> bool:
    """Return whether the accepted tokens of a drafter with a plan are those of its own tree, not of a chain."""
    return isinstance(proposer, TreeProposer) and proposer.plan.branches and proposer.plan.drawn == "deterministic"


class AlongText:
    """A drafter that drafts along texts. Further arguments as in ``predicted``.

    Args:
        teaches: whether the text is its chain, not what it drafts; only of a ``TreeProposer``.
    """

    def __init__(self, target: Target, proposer: Proposer, sampling: Sampling, depth: int, teaches: bool) -> None:
        self.target, self.proposer, self.sampling, self.depth = target, proposer, sampling, depth
        self.plan: ChainOfText | None = None
        self.draft_sampling, self.deterministic, self.confidence = sampling, True, 0.0
        if teaches and isinstance(proposer, TreeProposer):
            plan = proposer.plan
            self.plan = ChainOfText(widths([1] * depth), temperature=plan.temperature)
            self.proposer = copy(proposer)  # it shares the network
            self.proposer.plan = self.plan
            self.draft_sampling, self.confidence = plan.sampling(sampling), plan.confidence
            self.deterministic = plan.drawn == "deterministic" or self.draft_sampling.temperature == 0

    @torch.inference_mode()
    def along(self, answers: Sequence[Answer]) -> list[Predicted]:
        """Return the figures of answers, along which is drafted together."""
        if self.plan is not None:
            self.plan.texts.clear()
            self.plan.texts.update({answer.request.id: answer.tokens for answer in answers})
        texts: list[_DraftedText] = []
        try:
            for answer in answers:
                texts.append(self._computed(answer))
            for position in range(max(len(text.logits) for text in texts) - 1):
                self._step([text for text in texts if position < len(text.logits) - 1], position)
            for text in texts:
                self._stop(text.figures)
        finally:
            for text in texts:
                self.proposer.close(text.sequence.state)
                text.sequence.kv.close()
            self.target.lm.clock.take()
        return [Predicted(text.first, conversation=text.answer.conversation, **text.figures) for text in texts]

    def _computed(self, answer: Answer) -> _DraftedText:
        """Compute a text by one forward of the target."""
        request, drafter = answer.request, self.proposer
        emitted = list(answer.tokens[len(request.tokens) :])
        kv, logits, hidden = compute_text(self.target, request.tokens, emitted, drafter.requires.hidden, drafter.nodes)
        with attributed("proposer", drafter):
            state = drafter.init(request)
        figures = {name: np.full((len(emitted) - 1, self.depth), np.nan) for name in (*FIGURES, "predicted")}
        return _DraftedText(answer, figures, logits, hidden, SequenceState(request, kv, [], state=state))

    def _step(self, texts: Sequence[_DraftedText], position: int) -> None:
        """Draft when ``position + 1`` tokens of each answer are emitted, and note the figures."""
        whole = [text.sequence.kv for text in texts]
        try:
            for text, kv in zip(texts, whole, strict=True):
                computed, sequence = text.first + position, text.sequence
                sequence.kv = kv.fork()
                sequence.kv.truncate(computed)
                sequence.tokens, sequence.step = list(text.answer.tokens[: computed + 1]), computed
            batch = Batch(self.target, [text.sequence for text in texts], CounterDraws(0), self.target.lm.clock)
            with attributed("proposer", self.proposer):
                self.proposer.observe([self._observation(text, position) for text in texts])
                draft = self.proposer.propose(batch)
                predicted = None
                if draft.predict is not None and self.plan is not None and draft.shape.nodes:
                    predicted = draft.predict(draft).float().cpu().numpy()
        finally:
            for text, kv in zip(texts, whole, strict=True):
                if text.sequence.kv is not kv:
                    text.sequence.kv.close()
                text.sequence.kv = kv
        if self.plan is None:
            self._follow(texts, position, draft)
            return
        for depth, (trees, logits) in enumerate(self.plan.levels):
            self._note([texts[tree] for tree in trees], position, depth, logits)
        if predicted is not None:
            for tree, text in enumerate(texts):
                levels = predicted[draft.shape.trees[tree][1:] - draft.shape.roots]
                text.figures["predicted"][position, : len(levels)] = levels

    def _observation(self, text: _DraftedText, position: int) -> Observation:
        """Return the observation of a decoding step: the prompt, and then the token before the pending one."""
        end, requires = text.first + position, self.proposer.requires
        start, logits = end - 1 if position else 0, text.logits[position : position + 1]
        rows = [text.answer.tokens[end - 1]] if requires.logits or requires.top_k else []
        top_k = logits.topk(requires.top_k, -1).indices.cpu().numpy() if requires.top_k else None
        return Observation(
            text.sequence, start, text.answer.tokens[start : end + 1],
            None if text.hidden is None else text.hidden[start:end].clone(),
            rows, logits if requires.logits else None, top_k,
        )  # fmt: skip

    def _distributions(self, texts: Sequence[_DraftedText], row: int, *logits: tuple[Tensor, Sampling]) -> list[Tensor]:
        """Return distributions ``[n, V]`` of logits before token ``row`` of the answers, none of temperature 0."""
        before = [text.answer.tokens[: text.first + row] for text in texts]
        prompts, device = [text.first for text in texts], logits[0][0].device
        histories = TextHistories.of(before, prompts, [self.sampling], self.target.vocabulary, device)
        history = None if histories is None else histories.here()
        return [
            constrained_probs(values, [replace(sampling, temperature=sampling.temperature or 1.0)], history, None, None)
            for values, sampling in logits
        ]

    def _note(self, texts: Sequence[_DraftedText], position: int, depth: int, logits: Tensor) -> None:
        """Note the figures of one depth, of which q has ``logits`` ``[n, V]``."""
        row = position + depth + 1  # of the predicted token in the answer
        targets = torch.stack([text.logits[row] for text in texts])
        token = torch.tensor([text.answer.tokens[text.first + row] for text in texts], device=logits.device)[:, None]
        p, q = self._distributions(texts, row, (targets, self.sampling), (logits, self.draft_sampling))
        likeliest = logits.argmax(-1)
        if self.deterministic:
            accepted = (likeliest == token[:, 0]).to(q.dtype)
        elif self.sampling.temperature == 0:
            accepted = q.gather(1, token)[:, 0]
        else:
            accepted = (q.gather(1, token) / p.gather(1, token).clamp_min(1e-30)).clamp_max(1.0)[:, 0]
        noted = torch.stack([
            (likeliest == targets.argmax(-1)).to(q.dtype),
            torch.minimum(p, q.to(p.dtype)).sum(-1).to(q.dtype),
            accepted,
            logits.to(q.dtype).softmax(-1).amax(-1),
        ]).cpu().numpy()  # fmt: skip
        for number, text in enumerate(texts):
            for name, values in zip(FIGURES, noted, strict=True):
                text.figures[name][position, depth] = values[number]

    def _stop(self, figures: Mapping[str, np.ndarray]) -> None:
        """End drafts after a token drawn with less than the plan's confidence (``stop_rules.Confidence``)."""
        unsure = figures["confidence"][:, :-1] < self.confidence
        figures["accepted"][:, 1:][np.logical_or.accumulate(unsure, axis=1)] = np.nan

    def _follow(self, texts: Sequence[_DraftedText], position: int, draft: Draft) -> None:
        """Note the figures of a drafted forest of deterministic tokens along the texts."""
        if draft.shape.nodes and draft.ways != {"deterministic"}:
            raise ValueError(
                f"check-drafter cannot read q from '{self.proposer.name}', whose drafts are sampled: set "
                "drawn=deterministic, or check each of its parts"
            )
        shape, tokens = draft.shape, draft.token.cpu().numpy()
        for root, text in enumerate(texts):
            self._follow_tree(text, position, shape, tokens, root)

    def _follow_tree(self, text: _DraftedText, position: int, shape: Shape, tokens: np.ndarray, row: int) -> None:
        """Note the figures of one tree down from ``row``, as long as it holds the text."""
        for depth in range(min(self.depth, len(text.logits) - 1 - position)):
            children = shape.children[row]
            if not len(children):
                return
            answer_row = position + depth + 1
            logits, drafted = text.logits[answer_row][None], tokens[children - shape.roots]
            (p,) = self._distributions([text], answer_row, (logits, self.sampling))
            token = text.answer.tokens[text.first + answer_row]
            held = token in drafted
            text.figures["agreed"][position, depth] = drafted[0] == int(logits.argmax())
            text.figures["alpha"][position, depth] = float(p[0].cpu().numpy()[np.unique(drafted)].sum())
            text.figures["accepted"][position, depth] = held
            if not held:
                return
            row = int(children[np.flatnonzero(drafted == token)[0]])


def draft_depth(proposer: Proposer) -> int:
    """Return the depth of a proposer's plan; of a proposer without one, most nodes of its drafts."""
    return proposer.plan.depth if isinstance(proposer, TreeProposer) else proposer.nodes
