"""The recorded draft tree of one step, and why its accepted path ended where it did, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import numpy as np

from spec_lab.core.request import BROKEN, FINISHES

SAME = 1e-3
"""Probabilities that differ by a smaller share are called equal: columns are float32."""

KINDS = {"bonus": "bonus token", "recovered": "recovered token"}
"""Names of the token after an accepted path, by its origin."""

WHOLE = ("draft_tokens", "draft_parents", "emitted_tokens")
"""Columns of whole numbers that are needed for a tree."""

MAX_NAMED = 3
"""Most rejected tokens that a sentence names."""


@dataclass(frozen=True)
class Verification:
    """How an arm verifies.

    Args:
        verifier: its name; empty where it is not known.
        lossless: whether it is; None where it is not known.
        invalid_text: whether it accepts tokens whatever their probability.
    """

    verifier: str = ""
    lossless: bool | None = None
    temperature: float = 0.0
    invalid_text: bool = False


@dataclass(frozen=True)
class StepTree:
    """Values of ``schema.DRAFT_COLUMNS`` for one step, checked; nodes are numbered in draft order, -1 is the root.

    Args:
        tokens, parents, p, q, accept: of each node; a probability that the row lacks is None.
        illegal: nodes that the constraint does not allow; ``forced``: nodes whose token was the only allowed one.
        path: the accepted nodes, from the root down.
        emitted: the emitted tokens, accepted ones first; ``origins``: where each comes from.
        emitted_p: target probability of the token after the accepted path.
    """

    tokens: list[int]
    parents: list[int]
    p: list[float | None]
    q: list[float | None]
    accept: list[float | None]
    illegal: list[int]
    forced: list[int]
    path: list[int]
    emitted: list[int]
    origins: list[str]
    emitted_p: float | None

    @property
    def end(self) -> int:
        """Return the node where the accepted path ends."""
        return self.path[-1] if self.path else -1

    @property
    def last(self) -> int | None:
        """Return the index in ``emitted`` of the bonus, recovered or forced token after the path; None without one."""
        return len(self.path) if len(self.emitted) > len(self.path) else None

    def children(self, node: int) -> list[int]:
        """Return the children of a node, in the order drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


def read_tree(row: Mapping[str, Any]) -> StepTree | None:
    """Return the recorded tree of a row of ``steps``; None where it was not recorded, or does not fit together."""
    listed = {name: _values(row.get(name)) for name in ("draft_tokens", "draft_parents", "draft_p", "draft_q")}
    listed |= {name: _values(row.get(name)) for name in ("draft_accept", "emitted_tokens", "emitted_origins")}
    if any(values is None for values in listed.values()):
        return None
    nodes, emitted = listed["draft_tokens"] or [], listed["emitted_tokens"] or []
    lengths = [len(listed[name] or []) for name in listed if name.startswith("draft_")]
    if not all(isfinite(number) for name in WHOLE for number in listed[name] or []):  # a null is read as NaN
        return None
    parents = [int(parent) for parent in listed["draft_parents"] or []]
    if set(lengths) != {len(nodes)} or len(listed["emitted_origins"] or []) != len(emitted):
        return None
    if not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return None
    path = _path(parents, _values(row["path"]) or [])
    tokens, out = [int(token) for token in nodes], [int(token) for token in emitted]
    if path is None or (out and out[: len(path)] != [tokens[node] for node in path]):
        return None
    legal, forced = _values(row.get("draft_legal")), _values(row.get("draft_forced"))
    return StepTree(
        tokens,
        parents,
        p=[_number(number) for number in listed["draft_p"] or []],
        q=[_number(number) for number in listed["draft_q"] or []],
        accept=[_number(number) for number in listed["draft_accept"] or []],
        illegal=[node for node, allowed in enumerate(legal or []) if not allowed and node < len(tokens)],
        forced=[node for node, only in enumerate(forced or []) if only and node < len(tokens)],
        path=path,
        emitted=out,
        origins=[str(origin) for origin in listed["emitted_origins"] or []],
        emitted_p=_number(row.get("emitted_p")),
    )


def _values(value: Any) -> list[Any] | None:
    """Return a list of a row; None where the row has none."""
    return list(value) if isinstance(value, np.ndarray | list | tuple) else None


def _number(value: Any) -> float | None:
    return None if value is None or not isfinite(value) else float(value)


def _path(parents: Sequence[int], ranks: Sequence[Any]) -> list[int] | None:
    """Return the nodes of a path of child ranks; None where the tree has no such path."""
    path: list[int] = []
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    for rank in ranks:
        below = children.get(path[-1] if path else -1, [])
        if not 0 <= rank < len(below):
            return None
        path.append(below[int(rank)])
    return path


def reason(row: Mapping[str, Any], tree: StepTree, text: Callable[[int], str], how: Verification) -> str:
    """Return in words why the accepted path ended where it did, and where the next token comes from.

    It claims only what the rows show: the acceptance probability of a lossy verifier is stated and not explained.

    Args:
        row: of ``steps``.
        tree: its recorded tree.
        text: of a token.
        how: how the arm verifies.
    """
    if row["finish"] in BROKEN and not tree.emitted:
        return f"The step failed: {FINISHES[row['finish']]}."
    rejected = tree.children(tree.end)
    if rejected:
        first = _rejection(row, tree, rejected, text, how)
    elif tree.path:
        count = len(tree.path)
        what = f"All {count} drafted tokens of the path were" if count > 1 else "The drafted token was"
        first = f"{what} accepted, down to a leaf."
    else:
        first = "Nothing was drafted."
    if row["finish"] in BROKEN and tree.last is None:
        return f"{first} Then the step failed: {FINISHES[row['finish']]}."
    then = _emission(row, tree, text, how, bool(rejected))
    return " ".join(sentence for sentence in (first, then, *_afterwards(row, tree)) if sentence)


def _rejection(
    row: Mapping[str, Any], tree: StepTree, rejected: Sequence[int], text: Callable[[int], str], how: Verification
) -> str:
    """Return the sentence about the drafted tokens that were rejected."""
    illegal = set(tree.illegal)
    legal = [node for node in rejected if node not in illegal]
    named = _names([text(tree.tokens[node]) for node in rejected])
    single = len(rejected) == 1
    was, it = ("was", "it") if single else ("were", "them")
    if not legal:
        return f"{named} {was} rejected: the constraint does not allow {it}."
    p, accept = ([x for node in legal if (x := values[node]) is not None] for values in (tree.p, tree.accept))
    masked = f" ({len(rejected) - len(legal)} of them not allowed by the constraint)" * (len(legal) < len(rejected))
    start = f"{named} {was} rejected{masked}"
    last = None if tree.last is None else text(tree.emitted[tree.last])
    if how.temperature == 0 and tree.emitted_p == 1 and last is not None:
        return f"{start}: the target's arg max is {last}, the {KINDS.get(tree.origins[len(tree.path)], 'next token')}."
    if row["expected_kind"] == "noise" and last is not None and how.lossless:
        return f"{start}: under the noise that draft and target share, the target's token here is {last}."
    if len(p) < len(legal) or len(accept) < len(legal):
        return f"{start}."
    chance = _shown(min(1.0, sum(accept)))
    if not how.lossless:
        by = f"the lossy verifier {how.verifier} accepts" if how.lossless is False else "the verifier accepts"
        return f"{start}: {by} {'it' if single else 'one of them'} with probability {chance}."
    if all(isclose(a, b, rel_tol=SAME) for a, b in zip(p, accept, strict=True)):
        if single:
            return f"{start}: it is accepted with its target probability, p {_shown(p[0])}."
        total = _shown(min(1.0, sum(p)))
        return f"{start}: one of them is accepted with the sum of their target probabilities, {total}."
    if not single:
        return f"{start}: one of them is accepted with probability {chance}."
    q = tree.q[legal[0]]
    if q is not None and p[0] < q and isclose(accept[0], p[0] / q, rel_tol=SAME):
        return f"{start}: target p {_shown(p[0])} < draft q {_shown(q)}, so its acceptance probability was {chance}."
    drafted = "" if q is None else f", draft q {_shown(q)}"
    by = f"{how.verifier or 'the verifier'} accepts it with probability {chance}, given the path above"
    return f"{start}: target p {_shown(p[0])}{drafted}; {by}."


def _emission(
    row: Mapping[str, Any], tree: StepTree, text: Callable[[int], str], how: Verification, rejected: bool
) -> str:
    """Return the sentence about the token after the accepted path."""
    if tree.last is None:
        return "No token follows: the constraint acts here."
    token, origin, p = text(tree.emitted[tree.last]), tree.origins[tree.last], tree.emitted_p
    if origin == "forced":
        return f"{token} is the only token that the constraint allows."
    kind = KINDS.get(origin, "next token") if tree.tokens else "next token"
    if how.temperature == 0 and p == 1:
        if rejected and any(node not in tree.illegal for node in tree.children(tree.end)):
            return ""  # said already
        return f"The {kind} {token} is the target's arg max."
    of = "" if p is None else f" (target p {_shown(p)})"
    if row["empty_residual"]:
        return f"The {kind} {token}{of} was drawn from p, since rounding left nothing of the residual distribution."
    if row["expected_kind"] == "noise" and rejected:
        return f"The {kind} is {token}{of}."
    if not rejected:
        return f"The {kind} {token}{of} was sampled from the target."
    if how.lossless:
        return f"The {kind} {token}{of} was drawn from the residual distribution."
    return f"The {kind} is {token}{of}."


def _afterwards(row: Mapping[str, Any], tree: StepTree) -> list[str]:
    """Return sentences about what happened after the verification."""
    appended = len(tree.emitted) - len(tree.path) - 1 if tree.last is not None else 0
    sentences = [f"{appended} forced tokens were appended." if appended > 1 else "One forced token was appended."]
    sentences = sentences * (appended > 0)
    if row["taken_back"]:
        sentences.append(f"The constraint then removed {row['taken_back']} of the text's tokens.")
    if row["emitted_kept"] < row["emitted"]:
        why = f", because of {FINISHES[row['finish']]}" if row["finish"] in FINISHES else ""
        sentences.append(f"Of {row['emitted']} emitted tokens {row['emitted_kept']} were kept{why}.")
    if row["forks"]:
        sentences.append(f"Sequences that the constraint forked off: {row['forks']}.")
    return sentences


def _names(names: Sequence[str]) -> str:
    """Return names joined as in a sentence."""
    if len(names) > MAX_NAMED:
        return f"{', '.join(names[: MAX_NAMED - 1])} and {len(names) - MAX_NAMED + 1} other drafted tokens"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shown(probability: float) -> str:
    """Return a probability as text: never 0 or 1 by rounding."""
    if 0 < probability < 0.001:
        return f"{probability:.1e}".replace("e-0", "e-")
    text = f"{probability:.2f}" if probability >= 0.1 else f"{probability:.2g}"
    if text == "1.00" and probability < 1:
        return f"{probability:.4f}" if probability < 0.99995 else ">0.9999"
    return text
