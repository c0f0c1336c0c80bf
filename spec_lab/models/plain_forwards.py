"""Compares what the engine decodes of a model with transformers' plain forwards of it.

Whether masks, positions and cells are right is decided in float32, with the same weights, where the logits agree up to
1e-3 standard deviations. In the model's own data type, and with its quantization, logits differ by rounding, which
grows with the depth of the model: there the error of the decoded rows may be at most ``forests.RATIO`` times that of
plain forwards in the same data type, both against the plain forwards in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.own_attention import own_attention
from spec_lab.models.float32_copy import comparable
from spec_lab.models.forests import Checked, Rows, largest_error, rounding_error
from spec_lab.models.fused import unfused
from spec_lab.models.support import FAILURES
from spec_lab.runners.attention import SPANS, recurrent_layers
from spec_lab.runners.quantized import recorded
from spec_lab.runners.runner import Runner

LOG = logging.getLogger(__name__)

EXACT = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference of a logit where rounding is negligible, in standard deviations of the plain forward's logits.

In float64 too some models compute norms, rotations, softmax or recurrent layers in float32; recurrent layers that do
are allowed as much as in float32.
"""


class Mismatch(Exception):
    """Logits that differ by more than is allowed, or that cannot be compared. The message is a clause.

    Args:
        why: in words.
        works: another data type in which the same model passed.
        plain: whether it is the plain forward that is wrong.
        packed: whether the packed layers of the model may be the reason (``models.packed``).
    """

    def __init__(self, why: str, works: str = "", plain: bool = False, packed: bool = True) -> None:
        super().__init__(why)
        self.works, self.plain, self.packed = works, plain, packed


@dataclass(frozen=True, eq=False)
class PlainForwards:
    """A model, and plain forwards that say what its logits are.

    Args:
        model: the model, or its first layers where it is large.
        exact: the same weights in float32; the model itself in float32 or float64. None where there is no such copy:
            then the model is compared with its own plain forwards, and their rounding is how far they differ from plain
            forwards by transformers' eager attention.
    """

    model: Any
    exact: Any
    _plain: dict[tuple[int, bool, str], list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, whole: bool = False) -> PlainForwards:
        """Return what to compare a model with.

        Args:
            whole: whether its first layers cannot represent it.
        """
        if model.dtype in EXACT and not (recorded(model) or {}).get("rounds"):
            return PlainForwards(model, model)
        try:
            if (getattr(model, "tp_size", None) or 1) > 1:
                raise ValueError("the model is split over processes")
            compared, exact = comparable(model, whole)
            plain_forward(exact, [[0]])
            return PlainForwards(compared, exact)
        except (MemoryError, *FAILURES) as failure:
            LOG.log(
                logging.INFO if whole else logging.WARNING,
                "The self-check compares in %s only, which finds fewer faults: there is no copy in float32 (%s: %s)",
                model.dtype, type(failure).__name__, failure,
            )  # fmt: skip
            return PlainForwards(model, None)

    def check(
        self,
        runner: Callable[[Any, torch.dtype | None], Runner],
        decode: Callable[[Runner], Sequence[Rows]],
        kv_dtype: torch.dtype | None,
    ) -> Checked:
        """Compare the logits of decoded rows with those of plain forwards.

        Args:
            runner: returns what computes a model, with keys and values in a data type (None: the model's).
            decode: returns the rows.
            kv_dtype: in which keys and values are stored; None for the model's.

        Raises:
            Mismatch: they differ by more than is allowed, or cannot be compared.
        """
        if self.exact is not None:
            checked = self._check_exact(decode(runner(self.exact, None)))
            if self.exact is self.model and kv_dtype is None:
                return checked
        lm, robust = runner(self.model, kv_dtype), self.exact is not None
        rows, works = decode(lm), self._other_dtype if kv_dtype is None else ""
        expected = self._logits(self.exact if robust else self.model, rows)
        if kv_dtype is None:
            others = self._logits(self.model, rows, not robust, works)
        else:
            others = [_finite(row.plain(lm.plain_logits), self.model.dtype) for row in rows]
        floor = torch.finfo(self.model.dtype).eps * (1 if robust else 4)
        checked = rounding_error(rows, expected, others, floor, robust)  # float32 has shown that all rows are right
        stored = "" if kv_dtype is None else f" with keys and values in {kv_dtype}"
        than = f"a plain forward in {self.exact.dtype}" if robust else "a plain forward"
        _refuse(checked, expected, f"{stored} in {self._dtype}", than, works)
        return checked._replace(in_float32=robust)

    def _check_exact(self, rows: Sequence[Rows]) -> Checked:
        try:
            expected = self._logits(self.exact, rows)
            dtype = torch.float32 if recurrent_layers(self.model.config) else self.exact.dtype
            checked = Checked(largest_error(rows, expected), EXACT[dtype], True)
            _refuse(checked, expected, f" in {self.exact.dtype}", "a plain forward")
        except Mismatch as wrong:
            wrong.packed = self.exact is self.model  # a copy has plain layers
            raise
        return checked

    @property
    def _dtype(self) -> str:
        """The data type and the quantization, for messages."""
        method = "" if (facts := recorded(self.model)) is None else f" with quantization {facts['method']}"
        return f"{self.model.dtype}{method}"

    @property
    def _other_dtype(self) -> str:
        """The data type of the copy, where ``target.dtype`` can choose it."""
        return "float32" if self.exact not in (None, self.model) and recorded(self.model) is None else ""

    def _logits(self, model: Any, rows: Sequence[Rows], eager: bool = False, works: str = "") -> list[Tensor]:
        """Return the logits of rows by a plain forward, computed once.

        Raises:
            Mismatch: they are not finite.
        """
        texts = [row.text for row in rows]
        key = (id(model), eager, str(texts))
        if key not in self._plain:
            apart = recurrent_layers(model.config)  # whose sums over parts of a text include what follows a shorter one
            batches = [[text] for text in texts] if apart else [texts]
            self._plain[key] = [logits for batch in batches for logits in plain_forward(model, batch, eager)]
        ends = [(len(row.text) - len(row.logits), len(row.text)) for row in rows]
        logits = [text[first:end] for text, (first, end) in zip(self._plain[key], ends, strict=True)]
        return [_finite(text_logits, model.dtype, works) for text_logits in logits]


def _finite(logits: Tensor, dtype: torch.dtype, works: str = "") -> Tensor:
    """Return logits of a plain forward in a data type.

    Raises:
        Mismatch: they are not finite.
    """
    if not logits.isfinite().all():
        raise Mismatch(f" in {dtype}: a plain forward returns logits that are NaN or infinite", works, plain=True)
    return logits


@torch.inference_mode()
def plain_forward(model: Any, texts: Sequence[list[int]], eager: bool = False) -> Tensor:  # [texts, longest, V]
    """Return the logits of a plain forward over some texts, with transformers' own attention and norms.

    Shorter texts are followed by other tokens, which no row before them attends to.

    Args:
        model: a causal LM of transformers.
        eager: by matrix products instead of torch's fused attention.
    """
    before = model.config._attn_implementation
    wanted = "eager" if eager else own_attention(model) if before == SPANS else before
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=model.device)
    try:
        if wanted != before:
            model.set_attn_implementation(wanted)
        with unfused(model):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        if wanted != before:
            model.set_attn_implementation(before)
    return logits


def _refuse(checked: Checked, expected: Sequence[Tensor], where: str, than: str, works: str = "") -> None:
    """Refuse an error that is larger than allowed; warn where there is nothing to compare.

    Args:
        expected: the logits of plain forwards.
        where: the data type and setting, for messages.
        than: whose logits these are.
        works: see ``Mismatch``.

    Raises:
        Mismatch: it is larger.
    """
    constant = any(bool((logits == logits[:, :1]).all(-1).any()) for logits in expected)
    if constant and not checked.passed:
        raise Mismatch(
            f"{where}: {than} gives every token the same logit, the decoded forest does not: are the weights zero or "
            "damaged?",
            plain=True,
        )
    if not checked.passed:
        raise Mismatch(
            f"{where}: its logits differ from those of {than} by {checked.error:.2g} standard deviations, allowed are "
            f"{checked.allowed:.2g}",
            works,
        )
    if constant:
        LOG.warning("A plain forward gives every token the same logit: are the weights zero or damaged?")
