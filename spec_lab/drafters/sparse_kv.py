"""The target drafts for itself on a small KV cache, which holds some positions of the text (self-speculation).

Sources: MagicDec (2408.11049) with the caches of StreamingLLM (2309.17453) and SnapKV (2404.14469); TriForce
(2404.11912). The draft runs all of the target's layers, so that at short texts it costs as much as the target. At long
texts, and in large batches, a forward of the target mostly reads keys and values, of which the draft reads few.

Or all positions in few bits, as in QuantSpec (2502.10424), whose two caches share the upper 4 bits, while here the
draft has a copy of its own. It is dequantised by torch in every forward of the draft, which takes more time than it
saves: acceptance and memory are those of a kernel that would read it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict, Unpack, cast

from spec_lab.core.options import Count, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Requires, runner_kv_bytes
from spec_lab.decode.sequence import SequenceState
from spec_lab.drafters.draft_model.cache import DraftCache
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.propose.trees import Choices
from spec_lab.runners.causal_lm import why_no_kv_dtype
from spec_lab.runners.runner import DraftRunner
from spec_lab.runners.sparse_kv import OF_METHOD, Method, Selection, SparseLM


class SelectionOptions(TypedDict, total=False):
    """Options of proposers that draft on a small KV cache.

    Args:
        selection: streaming_llm: the first sinks and the last budget - sinks positions; snapkv: positions of the
            prompt that its end attends to, and all after it; int8, int4: all positions, in 8 or 4 bits a number.
        budget: positions in the small cache; of snapkv, those of the prompt; not of int8 and int4.
        sinks: of streaming_llm: first positions that are kept; None: 4.
        window: of snapkv: last tokens of the prompt, whose attention ranks the others for each head; None: 32.
        kernel: of snapkv: positions over which ranks are averaged, an odd number; None: 5.
        group: of int8 and int4: most neighbouring numbers of a head that share a scale; None: 32.
    """

    selection: Method
    budget: Annotated[int, Whole(2)]
    sinks: Count | None
    window: Count | None
    kernel: Count | None
    group: Count | None


class SparseTreeOptions(SelectionOptions, TreeOptions, total=False):
    """Options of the small KV cache and of the trees."""


def sparse_lm(target: Target, proposer: str, **options: Unpack[SelectionOptions]) -> SparseLM:
    """Return the target's model on small KV caches.

    Args:
        proposer: that drafts with it, for messages.
        options: of the small caches.

    Raises:
        WrongOption: one that the selection does not read; a selection that leaves no positions; an even kernel.
        Unsupported: a target whose KV cache cannot be read, or has layers without full attention.
    """
    method = options.get("selection", "streaming_llm")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.pop("selection", None)
    for name, value in given.items():
        readers = [other for other, names in OF_METHOD.items() if name in names]
        if readers and method not in readers:
            raise WrongOption(
                f"{name} is read with selection={' or '.join(readers)} only, not with {method} (got {value}): leave it "
                f"null, or set selection={readers[0]}"
            )
    selection = Selection(method, **given)
    if not selection.bits and not 0 < selection.fixed < selection.budget:
        option = OF_METHOD[method][0]
        raise WrongOption(
            f"{option} must be less than proposer.budget={selection.budget}, of which it is a part (got "
            f"{getattr(selection, option)})"
        )
    if selection.kernel % 2 == 0:
        raise WrongOption(f"kernel must be odd, so that a position is its middle (got {selection.kernel})")
    if why := target.lm.why_no_sparse_kv:
        raise Unsupported(
            f"proposer '{proposer}' copies cells of the target's KV cache, which target '{target.name}' does not "
            f"allow: {why}"
        )
    if selection.bits and (why := why_no_kv_dtype(target.lm.hf_model)):
        raise Unsupported(f"selection={method} does not support {why}, which keys hold: set selection=streaming_llm")
    return target.lm.sparse(selection)


@dataclass(eq=False, kw_only=True)
class TargetCopies:
    """How far the small cache of a sequence has followed the target's.

    Args:
        lm: of the small cache.
        prompt: tokens of the prompt.
        source: the target's KV cache of the sequence, as of this step.
        copied: positions of the text that the small cache has followed so far.
    """

    lm: SparseLM
    prompt: tuple[int, ...]
    source: Any = None
    copied: int = 0

    def copy_to(self, kv: Any) -> None:
        """Remove what was drafted from the small cache, and copy what the target has computed."""
        kv.truncate(min(self.copied, len(kv)))
        self.lm.follow(kv, self.source, self.prompt)


@dataclass(eq=False, kw_only=True)
class SparseCache(TargetCopies, DraftCache):
    """A small cache of a sequence, which is brought in line with the target's in each step."""

    def follow(self, tokens: list[int]) -> list[int]:
        """Copy what the target has computed; return the tokens that it has not."""
        self.copy_to(self.kv)
        self.copied = len(self.source)
        return tokens[self.copied :]

    def fork(self) -> SparseCache:
        """See ``DraftCache``."""
        return replace(self, kv=self.kv.fork())


class SparseKV(DraftModel):
    """Drafts with the target on a small KV cache. A sequence gets its first draft when its prompt is computed.

    Args:
        lm: the target's model on small caches.
        context: most positions of the target.
        plan: the trees, and how their tokens are drawn.
    """

    lm: SparseLM
    text_only = False  # copies, and what the target computed, differ from what the draft computes of the same tokens

    def __init__(self, lm: SparseLM, context: int, plan: TreePlan) -> None:
        super().__init__(lm, context, plan, "sparse_kv")
        self.sha256, self.requires = None, Requires(abilities=frozenset({"sparse_kv"}))

    @staticmethod
    @checked
    def load(  # type: ignore[override]
        target: Target,
        **options: Unpack[SparseTreeOptions],
    ) -> SparseKV:
        """Check that the target's cells can be copied.

        Args:
            target: drafts and verifies.
            options: of the small caches and the trees.

        Raises:
            ValueError: a wrong option; a tree wider than the vocabulary.
            Unsupported: a target whose KV cache cannot be read, or has layers without full attention.
        """
        of_cache = SelectionOptions.__optional_keys__
        trees, caches = ({name: value for name, value in options.items() if (name in of_cache) == small}
                         for small in (False, True))  # fmt: skip
        plan = TreePlan.read(**cast(TreeOptions, trees))
        lm = sparse_lm(target, "sparse_kv", **cast(SelectionOptions, caches))
        plan.check_width(target.vocabulary)
        return SparseKV(lm, target.context, plan)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> SparseKV:
        """The same proposer on caches of a few positions. See ``Proposer``."""
        return SparseKV(target.lm.sparse(self.lm.selection.few), target.context, self.plan.toy(tree))

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return super().facts | self.lm.selection.facts

    @property
    def target_cells(self) -> int:
        """See ``Proposer``."""
        return self.lm.selection.target_cells

    def init(self, request: Request) -> SparseCache:
        """See ``CachedDrafter``."""
        length = min(len(request.tokens) + request.max_new_tokens, self.context)
        cells = self.lm.selection.cells(len(request.tokens), length)
        return SparseCache(self.lm.open(cells + self.reserve), lm=self.lm, prompt=request.tokens)

    def kv_bytes(self, positions: Any) -> int:
        """See ``Proposer``; of texts that are prompts but for their last positions."""
        cells = [self.lm.selection.cells(end, min(end, self.context)) for end in positions]
        return runner_kv_bytes(self.lm, [count + self.reserve for count in cells])

    def levels(self, sequence: SequenceState, room: int) -> int:
        """See ``TreeProposer``."""
        cache: SparseCache = sequence.state
        cache.source, cache.text = sequence.kv, sequence.tokens
        return room if len(sequence.kv) >= len(cache.prompt) else 0

    def rewind(self, state: SparseCache, length: int) -> None:
        """See ``Proposer``: the positions that are left stay copied."""
        state.copied = min(state.copied, length)
