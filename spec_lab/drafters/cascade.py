"""A draft model drafts a chain, and a smaller proposer speeds up the draft model's own decoding.

Source: staged speculation 2308.04623, cascades 2312.11462. The inner proposer (n-grams, a smaller draft model, any
other) drafts for the draft model, and a lossless verifier verifies these tokens against the draft model. The chain is
then distributed as if it was sampled from the draft model token by token: its q are the draft model's own rows.

The chain always has the same length; only the context makes it shorter. A chain that ended where an inner step ends
would be exact as well: given that a step goes on after a text, its next token is distributed as q, which is what
lossless means of a step. One that left out tokens that the inner proposer did not guess would not be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import BROKEN, Draft, Drawn
from spec_lab.core.inference import inference
from spec_lab.core.limit import Limit
from spec_lab.core.options import DraftModelPath, Filled, Temperature, WrongOption, checked
from spec_lab.core.probabilities import Sampling, one_hot_, probs_dtype
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.arm import Arm, Choose, Memory
from spec_lab.decode.capacity import max_at_once
from spec_lab.decode.proposer import Observation, Proposer, Requires, runner_kv_bytes
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.decode.step import StepInfo, step
from spec_lab.decode.step_info import CAPTURE
from spec_lab.drafters.draft_model.loading import check_same_tokens, load_draft
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices, TreeDepth, depth_of
from spec_lab.runners.runner import DraftRunner, KVSequence

INNER = -1
"""Marks the lineage of the draft model's sequences: forks of the target's have no negative number."""


@dataclass(eq=False)
class DraftedText:
    """States of the draft model and of the inner proposer for a sequence.

    Args:
        kv: in the draft model's runner.
        inner: the inner proposer's state.
        tokens: the text of the last step, and all that the draft model emitted after it.
        text: how many of them are the text.
    """

    kv: KVSequence
    inner: Any
    tokens: list[int] = field(default_factory=list)
    text: int = 0

    def follow(self, text: Sequence[int], inner: Proposer) -> None:
        """Go back to the longest common prefix with ``text``; its last token is computed again where it was."""
        old = self.tokens
        common = self.text if text[: self.text] == old[: self.text] else 0
        while common < min(len(old), len(text)) and old[common] == text[common]:
            common += 1
        if common < len(old):
            self.kv.truncate(min(common, len(text) - 1, len(self.kv)))
            inner.rewind(self.inner, len(self.kv))
        self.tokens, self.text = list(text), len(text)


@dataclass(eq=False)
class KeptRows:
    """Samples as a step does, and keeps its probabilities ``[R, V]``, which are valid until the next step.

    Args:
        choose: samples.
        p: of the last step.
    """

    choose: Choose
    p: Tensor | None = None

    def __call__(self, verdict: Any, shape: Shape, p: Tensor, draws: Draws, who: Sequence[tuple[int, int, int]]) -> Any:
        """See ``verify.choose``."""
        self.p = p
        return self.choose(verdict, shape, p, draws, who)


@dataclass(frozen=True, eq=False)
class WithinChain(Proposer):
    """The inner proposer in a step, with drafts that end before the chain does: a bonus token follows them.

    Args:
        inner: the proposer, which holds the states.
        ends: of each sequence, its tokens with the whole chain.
    """

    inner: Proposer
    ends: Mapping[SequenceState, int]

    @property
    def name(self) -> str:
        """The inner proposer's."""
        return self.inner.name

    @property
    def drawn(self) -> Drawn:
        """The inner proposer's."""
        return self.inner.drawn

    @property
    def nodes(self) -> int:
        """The inner proposer's."""
        return self.inner.nodes

    @property
    def requires(self) -> Requires:
        """The inner proposer's."""
        return self.inner.requires

    def propose(self, batch: Batch) -> Draft:
        """The inner proposer's draft."""
        left = [Limit(self.ends[sequence] - len(sequence.tokens) - 1) for sequence in batch.sequences]
        limited = replace(batch, limits=left, deferred=False)
        return self.inner.propose(limited).cut_nodes(limited.room())

    def observe(self, observed: Sequence[Observation]) -> None:
        """The inner proposer observes."""
        self.inner.observe(observed)


def check_lossless(verifier: Any) -> None:
    """Refuse a verifier of inner drafts that is lossy.

    Raises:
        WrongOption: it is.
    """
    if not verifier.lossless:
        raise WrongOption(
            f"verifier: the verifier '{verifier.name}' is lossy, so that the chain would not be distributed as the "
            "draft model's probabilities state: choose a lossless one, such as verifier@proposer.verifier=token"
        )


def inner_arm(model: Target, inner: Proposer, verifier: Any, model_name: str) -> Arm:
    """Return the arm of the draft model's decoding.

    Args:
        inner: the inner proposer, whose target it is.
        verifier: of inner drafts.
        model_name: for the message.

    Raises:
        WrongOption: the model lacks what the inner proposer requires, or the verifier does not support what it draws.
    """
    try:
        return Arm(model, inner, verifier, CounterDraws(0))
    except ValueError as error:
        raise WrongOption(f"inner, whose target is {model_name}: {error}") from error


@dataclass(eq=False)
class DraftCascade(Proposer):
    """Drafts the tokens that a draft model emits, decoded with an inner proposer.

    Every step of the target is a decoding of its own for the draft model. Its random choices are keyed as those of a
    fork of the target's sequence that no other step has, so that they are independent of all others.

    The draft probabilities q are the rows from which the inner steps sample, after temperature, truncation, penalties,
    biases and banned words. To keep them, the rows of the chain are copied twice, and inner steps at temperature 0
    compute their probabilities as others do where a batch mixes temperatures. Nothing is kept with ``drawn``
    "deterministic", or where every temperature is 0: inner steps then follow the arg max.

    Tokens are drafted without the masks of a constraint.

    Args:
        arm: of the draft model's decoding: ``target`` is the draft model, ``proposer`` the inner proposer.
        depth: tokens of the chain.
        drawn: "iid", sampled from the draft model; or "deterministic", its likeliest tokens.
        temperature: of the draft model; None uses each request's.
    """

    arm: Arm
    depth: int
    drawn: Drawn = "iid"
    temperature: float | None = None
    name: str = "cascade"
    branches: bool = False
    _chain: Callable[[int], Shape] = field(init=False, repr=False, default_factory=lambda: lru_cache(None)(chain))

    @staticmethod
    @checked
    def load(
        target: Target,
        path: DraftModelPath,
        inner: Callable[[Target], Proposer],
        verifier: Any,
        depth: TreeDepth = 6,
        revision: Filled | None = None,
        drawn: Literal["iid", "deterministic"] = "iid",
        temperature: Temperature | None = None,
    ) -> DraftCascade:
        """Load the draft model in the target's dtype and on its device, then the inner proposer for it.

        Args:
            target: whose tokens are drafted.
            path: a folder of a transformers checkpoint, or a hub name.
            revision: branch, tag or commit of a hub name; None: main.
            inner: loads the inner proposer for the draft model, which is its target.
            verifier: of inner drafts.
            depth: length of the chain.
            drawn: iid: sampled; deterministic: the likeliest token.
            temperature: of the draft model; None: each request's.

        Raises:
            ValueError: a wrong option; a lossy verifier, or one that does not support what the inner proposer draws;
                another tokenizer or vocabulary than the target's; an inner proposer that requires what the draft
                model does not have.
            OSError: no checkpoint there.
        """
        check_lossless(verifier)
        draft = load_draft(target, path, revision)
        check_same_tokens(target, draft.vocabulary, draft.tokenizer, path)
        lm = draft.runner(None)
        model = Target(lm, draft.tokenizer, path, draft.context, draft.sha256, 0.0, target.cache, frozenset(draft.ends))
        arm = inner_arm(model, inner(model), verifier, f"the draft model {path}")
        return DraftCascade(arm, depth, drawn, temperature)

    @property
    def nodes(self) -> int:
        """Tokens of the chain."""
        return self.depth

    @property
    def sha256(self) -> str | None:
        """Hash of the draft model's weights, with those of the inner proposer's files if it has any."""
        inner, model = self.arm.proposer.sha256, self.arm.target.sha256
        return sha256(f"{model} {inner}".encode()).hexdigest() if model and inner else model

    @property
    def facts(self) -> Mapping[str, Any]:
        """See ``Part``."""
        inner = self.arm.proposer
        of_inner = {"name": inner.name, "drawn": inner.drawn, **inner.facts}
        facts = {"depth": self.depth, "temperature": self.temperature, "verifier": self.arm.verifier.name}
        return facts | {"inner": of_inner}

    @property
    def shared_store(self) -> str:
        """See ``Proposer``."""
        return self.arm.proposer.shared_store

    def forget(self) -> None:
        """See ``Proposer``."""
        self.arm.proposer.forget()

    def sampling(self, request: Sampling) -> Sampling:
        """How the draft model samples for a request."""
        temperature = 0.0 if self.drawn == "deterministic" else self.temperature
        return request if temperature is None else request.at(temperature)

    def check_sampling(self, sampling: Sampling) -> None:
        """See ``Proposer``."""
        try:
            self.arm.proposer.check_sampling(self.sampling(sampling))
        except ValueError as error:
            raise ValueError(f"proposer.inner, which drafts for the draft model: {error}") from error

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> DraftCascade:
        """The same with another draft model, for which an inner draft model is the toy's target."""
        model = Target(draft, None, "toy draft", target.context, "", 0.0)
        inner = self.arm.proposer.toy(model, cast(DraftRunner, target.lm), tree)
        return replace(self, arm=replace(self.arm, target=model, proposer=inner, memory=Memory()), depth=depth_of(tree))

    # The life cycle ---------------------------------------------------------------------------------------------------

    def init(self, request: Request) -> DraftedText:
        """An empty KV cache of the draft model, and the inner proposer's state."""
        kv = self.arm.target.lm.open(self._reserve(request))
        try:
            return DraftedText(kv, self.arm.proposer.init(self._inner_request(request)))
        except BaseException:
            kv.close()
            raise

    def _reserve(self, request: Request) -> int:
        """Cells for a request in the draft model's KV cache."""
        most = len(request.tokens) + self._inner_request(request).max_new_tokens
        return min(most, self.arm.target.context + self.arm.proposer.nodes)

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """See ``Proposer``; with that of the inner proposer."""
        model, inner = self.arm.target, self.arm.proposer
        model_bytes = runner_kv_bytes(model.lm, [min(end, model.context + inner.nodes) for end in positions])
        return model_bytes + inner.kv_bytes(positions)

    def fork(self, state: DraftedText) -> DraftedText:
        """A copy that shares the KV cache of the tokens so far."""
        inner = self.arm.proposer.fork(state.inner)  # first: an error leaves no KV cache behind
        return replace(state, kv=state.kv.fork(), inner=inner, tokens=list(state.tokens))

    def close(self, state: DraftedText) -> None:
        """Free the KV cache, and close the inner proposer's state."""
        state.kv.close()
        self.arm.proposer.close(state.inner)

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Let the draft model emit a chain for every sequence that its context still holds.

        New prompts are computed on the way. What the target rejected is forgotten, what it accepted stays computed.
        """
        limits = [
            max(0, min(self.depth, room, self._room(sequence)))
            for room, sequence in zip(batch.room(), batch.sequences, strict=True)
        ]
        texts = [
            self._text(sequence) if limit else None for sequence, limit in zip(batch.sequences, limits, strict=True)
        ]
        ends = {text: len(text.tokens) + limit for text, limit in zip(texts, limits, strict=True) if text is not None}
        cold = all(text.request.sampling.temperature == 0 for text in ends)
        q, broken = self._decode(batch, ends, None if cold else KeptRows(self.arm.choose))
        chains = [
            [] if text is None or text in broken else text.tokens[len(sequence.tokens) :]
            for sequence, text in zip(batch.sequences, texts, strict=True)
        ]
        why = {tree: broken[text] for tree, text in enumerate(texts) if text is not None and text in broken}
        return self._draft(batch, chains, [part for text in ends if text not in broken for part in q[text]], why)

    def _room(self, sequence: SequenceState) -> int:
        """The longest chain that the draft model can draft after a sequence."""
        return self.arm.target.context - len(sequence.tokens)

    def _text(self, sequence: SequenceState) -> SequenceState:
        """The draft model's sequence for a step of the target's, as a fork of it: its choices are no other's."""
        state: DraftedText = sequence.state
        state.follow(sequence.tokens, self.arm.proposer)
        lineage = (*sequence.lineage, INNER, sequence.step)
        request = self._inner_request(sequence.request)
        return SequenceState(request, state.kv, state.tokens, lineage, state=state.inner)

    def _decode(
        self, batch: Batch, ends: Mapping[SequenceState, int], rows: KeptRows | None
    ) -> tuple[dict[SequenceState, list[Tensor]], dict[SequenceState, str]]:
        """Run inner steps until every sequence has as many tokens as its end states, or is broken.

        Returns:
            For each sequence the probabilities from which its tokens were sampled, ``[n, V]`` of each step, where
            ``rows`` keeps them; and why sequences are broken.
        """
        proposer = WithinChain(self.arm.proposer, ends)
        arm = self.arm.within(proposer, batch.draws, rows or self.arm.choose)
        q: dict[SequenceState, list[Tensor]] = {sequence: [] for sequence in ends}
        broken: dict[SequenceState, str] = {}
        left, most = list(ends), max_at_once(self.arm.proposer, self.arm.target)
        while left:
            before = {sequence: len(sequence.tokens) for sequence in left[:most]}
            info = step(list(before), arm)
            self._count(batch, info)
            for tree, (sequence, start) in enumerate(before.items()):
                if sequence in info.errors or len(sequence.tokens) == start:
                    inner = info.draft.broken.get(tree)
                    broken[sequence] = BROKEN if inner is None else f"in the inner proposer, {inner}"
                elif rows is not None and rows.p is not None:
                    computed = [tree, *info.committed[tree].path]
                    q[sequence].append(rows.p[upload(rows.p.device, np.array(computed))[0]])
            left = [sequence for sequence in left if sequence not in broken and len(sequence.tokens) < ends[sequence]]
        return q, broken

    def _draft(
        self, batch: Batch, chains: Sequence[Sequence[int]], q: Sequence[Tensor], broken: dict[int, str]
    ) -> Draft:
        """The draft of these chains, whose tokens were sampled from the rows of ``q``; none where q is one-hot."""
        shape = forest(tuple(self._chain(len(tokens)) for tokens in chains))
        token = upload_tokens(batch.device, [token for tokens in chains for token in tokens])
        if self.drawn == "deterministic":
            return Draft(shape, token, broken=broken)
        q_row = np.full(shape.rows, -1, dtype=np.int64)
        q_row[shape.parent] = np.arange(shape.nodes)
        if q:
            return Draft(shape, token, self.drawn, torch.cat([*q]), q_row, broken=broken)
        lm = self.arm.target.lm
        certain = torch.empty(shape.nodes, lm.vocabulary, dtype=probs_dtype(lm.dtype), device=batch.device)
        return Draft(shape, token, self.drawn, one_hot_(token, certain), q_row, broken=broken, one_hot=True)

    def _inner_request(self, request: Request) -> Request:
        """The request of the draft model's decoding, which never ends: only the chain's length counts."""
        most = request.max_new_tokens + self.depth
        return Request(request.id, request.name, request.tokens, self.sampling(request.sampling), most)

    def _count(self, batch: Batch, info: StepInfo) -> None:
        """Count the model calls and copies of an inner step as those of this proposer."""
        names = {"target_forward": "propose_forward", "propose_forward": "propose_forward", CAPTURE: CAPTURE}
        batch.clock.spans += [(names[name], start, end) for name, start, end in info.spans if name in names]
        batch.read.copies += info.copies_before + info.copies_after
