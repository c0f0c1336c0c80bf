"""The target drafts on a small KV cache, and there a smaller proposer drafts for it: TriForce (2404.11912).

A cascade of drafts (``drafters.cascade``) whose draft model is the target itself on the cache of ``sparse_kv``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, cast

from spec_lab.core.options import Temperature, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.arm import Memory
from spec_lab.decode.proposer import Observation, Proposer, Requires, runner_kv_bytes
from spec_lab.decode.sequence import SequenceState
from spec_lab.drafters.cascade import DraftCascade, DraftedText, check_lossless, inner_arm
from spec_lab.drafters.sparse_kv import SelectionOptions, TargetCopies, sparse_lm
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices, TreeDepth, depth_of
from spec_lab.runners.runner import DraftRunner
from spec_lab.runners.sparse_kv import SparseLM


@dataclass(eq=False, kw_only=True)
class SparseText(TargetCopies, DraftedText):
    """States of the small cache and of the inner proposer for a sequence."""

    def follow(self, text: Sequence[int], inner: Proposer) -> None:
        """Copy what the target has computed."""
        if self.tokens:
            inner.rewind(self.inner, self.copied)
        self.copy_to(self.kv)
        self.tokens, self.text = list(text), len(text)


@dataclass(eq=False)
class TriForce(DraftCascade):
    """Drafts the tokens that the target emits on a small KV cache, decoded with an inner proposer.

    Arguments as of ``DraftCascade``; ``arm.target`` is the target on small caches. The inner proposer observes copied
    positions without hidden states, like those of a prefix cache.
    """

    name: str = "triforce"

    @staticmethod
    @checked
    def load(  # type: ignore[override]
        target: Target,
        inner: Callable[[Target], Proposer],
        verifier: Any,
        depth: TreeDepth = 6,
        drawn: Literal["iid", "deterministic"] = "iid",
        temperature: Temperature | None = None,
        **options: Unpack[SelectionOptions],
    ) -> TriForce:
        """Load the inner proposer for the target on a small KV cache.

        Args:
            target: drafts and verifies.
            inner: loads the inner proposer, whose target it is.
            verifier: of inner drafts.
            depth: length of the chain.
            drawn: iid: sampled; deterministic: the likeliest token.
            temperature: of the draft; None: each request's.
            options: of the small caches.

        Raises:
            ValueError: a wrong option; a lossy verifier; an inner proposer that reads hidden states of all positions.
            Unsupported: as of ``sparse_lm``.
        """
        check_lossless(verifier)
        model = replace(target, lm=sparse_lm(target, "triforce", **options))
        smaller = inner(model)
        if smaller.requires.hidden and smaller.requires.every_position:
            raise WrongOption(
                f"inner: the proposer '{smaller.name}' reads hidden states of all positions, but those of copied "
                "positions are not kept: choose another one, such as proposer@proposer.inner=draft_chain"
            )
        arm = inner_arm(model, smaller, verifier, "the target on a small KV cache")
        return TriForce(arm, depth, drawn, temperature)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> TriForce:
        """The same with caches of a few positions, and the toy's draft model for an inner one. See ``Proposer``."""
        model = replace(target, lm=target.lm.sparse(self._lm.selection.few))
        arm = replace(self.arm, target=model, proposer=self.arm.proposer.toy(model, draft, tree), memory=Memory())
        return replace(self, arm=arm, depth=depth_of(tree))

    @property
    def _lm(self) -> SparseLM:
        return cast(SparseLM, self.arm.target.lm)

    @property
    def requires(self) -> Requires:
        """See ``Proposer``."""
        return Requires(abilities=frozenset({"sparse_kv"}))

    @property
    def target_cells(self) -> int:
        """See ``Proposer``."""
        return self._lm.selection.target_cells

    @property
    def sha256(self) -> str | None:
        """Hash of the inner proposer's files."""
        return self.arm.proposer.sha256

    @property
    def facts(self) -> Mapping[str, Any]:
        """See ``Part``."""
        return {**super().facts, **self._lm.selection.facts}

    def init(self, request: Request) -> SparseText:
        """See ``DraftCascade``."""
        state = super().init(request)
        return SparseText(state.kv, state.inner, lm=self._lm, prompt=request.tokens)

    def _reserve(self, request: Request) -> int:
        return self._cells(len(request.tokens), super()._reserve(request))

    def _cells(self, prompt: int, length: int) -> int:
        return self._lm.selection.cells(prompt, length) + self.depth + self.arm.proposer.nodes

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """See ``Proposer``; of texts that are prompts but for their last positions."""
        cells = [self._cells(end, min(end, self.arm.target.context)) for end in positions]
        return runner_kv_bytes(self._lm, cells) + self.arm.proposer.kv_bytes(positions)

    def rewind(self, state: SparseText, length: int) -> None:
        """See ``Proposer``: the positions that are left stay copied."""
        state.copied = min(state.copied, length)

    def _room(self, sequence: SequenceState) -> int:
        computed = len(sequence.kv) >= len(sequence.request.tokens)
        return super()._room(sequence) if computed else 0

    def _text(self, sequence: SequenceState) -> SequenceState:
        state: SparseText = sequence.state
        state.source, start = sequence.kv, state.copied
        text = super()._text(sequence)
        state.copied = len(sequence.kv)
        if state.copied > start:
            copied = Observation(text, start, sequence.tokens[start : state.copied + 1])
            self.arm.proposer.observe([copied])
        return text
