"""Steps of a design along the recorded texts: its own step boundaries, which differ from the recorded run's.

A lossless design emits the target's texts, whatever it drafts. So, given the text x that was recorded (by a lossless
run, or sampled from the target), a step that begins after x_1 .. x_s emits exactly the next k tokens with some
probability w_s(k), which sum to 1 over k, and

    u(t) = sum over s < t of u(s) w_s(t - s),  u = 1 where decoding begins

is the probability that a step begins after x_1 .. x_t: the expected number of steps is the sum of u over the text. This
weights what each position contributes by the probability of the path to it.

w needs the draft's distribution, not its draws. Given x, and with a q that follows from the text alone (a draft model),
the child of rank r is the accepted one and holds x_{t+1} = y with probability a_r = (the chance that a verifier accepts
child r with token y) / p(y), which is known in closed form for

- ``token`` with iid siblings: W_r = (p - theta_r q)+, S_r = sum W_r, theta_{r+1} = theta_r + S_r, P_r = W_r / S_r:
  prod over j < r of (1 - sum min(q, P_j)) times min(q(y), P_r(y)) / p(y); on chains min(1, q(y) / p(y));
- ``kseq`` with iid siblings: (1 - beta)^r min(q(y), p(y) / rho) / p(y);
- ``match`` with iid siblings: q(y) (1 - q(y))^r;
- deterministic tokens, the likeliest of q, with any lossless verifier: 1 if y is the r-th likeliest, else 0.

Deterministic trees that were recorded at every position need no q: each step accepts as long as the text was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.options import brief
from spec_lab.core.shape import Shape
from spec_lab.propose.trees import Choices, depth_of, parse
from spec_lab.replay import pseudo_tokens
from spec_lab.replay.pseudo_tokens import PSEUDO
from spec_lab.replay.recorded_steps import Sums
from spec_lab.replay.recorded_trees import NeedsModel, RecordedTrees
from spec_lab.replay.subtrees import UNLIMITED, Subtree, check_not_cut
from spec_lab.verify import KSeq, Match, Token, Verifier
from spec_lab.verify.kseq import min_rho

EVERY = "record every position: task=verifier_study task.every=1 record=replay"


@dataclass(frozen=True, eq=False)
class TextRows:
    """The rows of recorded trees that lie on the recorded texts.

    Args:
        requests: ``[N]`` whose texts are known and have a recorded tree.
        text: ``[N, L]`` their tokens; -1 fills up.
        row: ``[N, L]`` a row whose p, and where possible q, is that of each token; -1 for none.
        begins: ``[N, L]`` the root of the tree that was recorded before each token; -1 for none.
        on_text: ``[R]`` bool, rows whose path is the text's.
        prefill: whether the first recorded step of each text computed the prompt: it is not counted.
    """

    trees: RecordedTrees
    requests: np.ndarray
    text: np.ndarray
    row: np.ndarray
    begins: np.ndarray
    on_text: np.ndarray
    prefill: bool
    _made: dict[tuple[Any, ...], list[_Accept]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(trees: RecordedTrees) -> TextRows:
        """Find the rows on the texts.

        Raises:
            NeedsModel: no text is known.
        """
        shape, steps = trees.shape, trees.steps
        asked = steps["request"].to_numpy()
        known = {request for request, text in trees.texts.items() if len(text.tokens)}
        requests = np.array([request for request in np.unique(asked) if request in known])
        if not len(requests):
            raise NeedsModel("the recorded texts are not known")
        texts = [trees.texts[request] for request in requests]
        text = np.full((len(texts), max(len(output.tokens) for output in texts)), -1, dtype=np.int64)
        for index, output in enumerate(texts):
            text[index, : len(output.tokens)] = output.tokens
        of_tree = np.searchsorted(requests, asked).clip(max=len(requests) - 1)
        prompts = np.array([output.prompt for output in texts])
        start = steps["position"].to_numpy() - prompts[of_tree]  # the output's tokens before each tree
        followed = (requests[of_tree] == asked) & (steps["sequence"].to_numpy() == 0) & (start >= 0)
        index, position = of_tree[shape.root], start[shape.root] + shape.depth  # of each row: the token after it
        on_text = np.zeros(shape.rows, dtype=bool)
        on_text[: shape.roots] = followed
        padded = np.concatenate([text, np.full((len(text), 1), -1)], 1)
        for level in range(1, shape.deepest + 1):
            rows = shape.roots + np.flatnonzero(shape.depth[shape.roots :] == level)
            expected = padded[index[rows], (position[rows] - 1).clip(max=text.shape[1])]
            on_text[rows] = on_text[shape.parent[rows - shape.roots]] & (trees.token[rows] == expected)
        row, begins = (np.full(text.shape, -1, dtype=np.int64) for _ in range(2))
        within = np.flatnonzero(on_text & (position < text.shape[1]))
        for expanded in (False, True):
            rows = within[trees.expanded[within] == expanded][::-1]  # a root is written last
            row[index[rows], position[rows]] = rows
        roots = within[within < shape.roots]
        begins[index[roots], position[roots]] = roots
        prefill = bool(steps["prefill"].to_numpy(dtype=bool)[followed].any())
        return TextRows(trees, requests, text, row, begins, on_text, prefill)

    @cached_property
    def length(self) -> np.ndarray:  # [N]
        """Tokens of each text."""
        return (self.text >= 0).sum(1)

    @property
    def first(self) -> int:
        """Tokens before the first step."""
        return 0 if self.prefill else 1

    def accepting(self, verifier: Verifier, temperature: float | None, top_k: int) -> list[_Accept]:
        """Return the acceptance of drafts at this temperature and width, for every completion of the rows.

        Raises:
            NeedsModel: p or q does not follow from what is recorded.
        """
        key = verifier, temperature, top_k
        if key not in self._made:
            p, q = pseudo_tokens.target(self.trees), pseudo_tokens.drafted(self.trees, temperature, top_k)
            both = [pseudo_tokens.complete(p, q, variant) for variant in pseudo_tokens.variants(self.trees, p, q)]
            assumed = (0.0, 1.0) if _lacks(self) else (0.0,)
            self._made[key] = [_Accept(self, verifier, *masses, missing) for masses in both for missing in assumed]
        return self._made[key]

    def sums(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [N], [N]
        """Return the tokens and the expected steps of each text after the prefill.

        Args:
            weights: ``[N, L, D + 1]`` w, the probability that a step from each position emits 1 .. D + 1 tokens.
        """
        longest, max_emitted = weights.shape[1:]
        live = np.arange(longest) < self.length[:, None]
        u = np.zeros((len(self.text), longest + max_emitted + 1))
        u[:, self.first] = 1.0
        for t in range(self.first, longest):
            u[:, t + 1 : t + 1 + max_emitted] += (u[:, t] * live[:, t])[:, None] * weights[:, t]
        steps = (u[:, :longest] * live)[:, 1:].sum(1)
        if not self.prefill:
            return np.maximum(self.length - 1.0, 0.0), steps
        emitted = np.minimum(np.arange(1, max_emitted + 1), self.length[:, None])
        return self.length - (weights[:, 0] * emitted).sum(1), steps


@dataclass(frozen=True)
class Rule:
    """A drafting rule for a model whose q follows from the text alone.

    Args:
        choices: a static tree.
        drawn: "iid" or "deterministic".
        temperature: of the drafter; None for the recorded one.
        top_k: it draws from so many likeliest tokens; 0 for all.
        confidence: a token drawn where no token has this draft probability (at temperature 1) ends its path.
    """

    choices: Choices
    drawn: str = "iid"
    temperature: float | None = None
    top_k: int = 0
    confidence: float = 0.0


def static(trees: RecordedTrees, subtree: Subtree) -> Choices:
    """Return the static tree that a subtree's limits leave of its own tree, or of the recorded one.

    Raises:
        NeedsModel: the recorded trees are not static, or a policy has cut them.
    """
    choices = subtree.choices
    if choices is None:
        if trees.policy:
            raise _followed(trees)
        named = trees.proposer.get("tree")
        if not isinstance(named, str) or named in ("best first", "reranked", ""):
            raise NeedsModel("the recorded trees are not static; name a shape such as 1x1x1 or 3x2x1")
        choices = parse(named)
    kept = [path for path in choices if len(path) <= subtree.depth and max(path) < subtree.children]
    if subtree.nodes != UNLIMITED:
        kept = sorted(kept, key=lambda path: (len(path), path))[: subtree.nodes]
    if not kept:
        raise NeedsModel(f"the shape {subtree} has no node")
    return tuple(kept)


def evaluate(texts: TextRows, verifier: Verifier, rules: Sequence[tuple[float, Rule]]) -> Sums:
    """Return the sums of a rule's steps for tau; of several, each step follows one with these probabilities (shares).

    Raises:
        NeedsModel: what is not identified.
    """
    trees = texts.trees
    if not trees.text_only:
        name = trees.proposer.get("name", trees.arm)
        raise NeedsModel(f"the q of proposer {brief(name)} depends on where its step began, not on the text alone")
    if not trees.expanded.any():
        raise NeedsModel("the recorded drafts are deterministic and carry no q; record drawn=iid")
    _check_lossless(trees, verifier)
    tokens, steps = [], []
    (temperature, top_k), *others = {(rule.temperature, rule.top_k) for _, rule in rules}
    if others:
        raise NeedsModel("the rules of a mixture have one draft temperature and width")
    certain = pseudo_tokens.certainty(trees) if any(rule.confidence for _, rule in rules) else None
    for accept in texts.accepting(verifier, temperature, top_k):
        weights = [share * accept.weights(rule, certain) for share, rule in rules]
        width = max(part.shape[2] for part in weights)
        total = sum(np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2]))) for part in weights)
        counted = texts.sums(np.asarray(total))
        tokens.append(counted[0])
        steps.append(counted[1])
    kind = "exact" if len(tokens) == 1 else "spread"
    return Sums(texts.requests, np.array(tokens), np.array(steps), float(np.min(steps, 0).sum()), kind)


def evaluate_deterministic(texts: TextRows, verifier: Verifier, subtree: Subtree) -> Sums:
    """Return the tokens and steps that a smaller tree would have had along the recorded texts.

    The recorded trees are deterministic, so the result is exact. Tau is the ratio of the sums.

    Args:
        texts: the recorded texts, with the draft tree at each position.
        verifier: a lossless one.
        subtree: the part of the recorded trees that is drafted.

    Raises:
        NeedsModel: the result does not follow from the recorded rows; states why.
    """
    trees, shape = texts.trees, texts.trees.shape
    _check_lossless(trees, verifier)
    if trees.policy and subtree.choices is None:
        raise _followed(trees)
    check_not_cut(trees, subtree)
    if not trees.ways <= {"deterministic"}:
        raise NeedsModel("sampled drafts differ from step to step; given the text, only deterministic ones are known")
    inside = np.arange(texts.text.shape[1]) < texts.length[:, None]
    inside[:, : texts.first] = False
    if (texts.begins[inside] < 0).any():
        raise NeedsModel(f"a step of the design may begin where no tree was recorded; {EVERY}")
    keep = np.append(np.ones(shape.roots, dtype=bool), subtree.keeps(shape)) & texts.on_text
    deepest = np.zeros(shape.roots, dtype=np.int64)
    rows = np.flatnonzero(keep)
    np.maximum.at(deepest, shape.root[rows], shape.depth[rows])
    accepted = np.where(texts.begins >= 0, deepest[texts.begins], 0)
    weights = (accepted[:, :, None] == np.arange(int(accepted.max(initial=0)) + 1)).astype(float)
    tokens, steps = texts.sums(weights)
    return Sums(texts.requests, tokens[None], steps[None], float(steps.sum()))


def _followed(trees: RecordedTrees) -> NeedsModel:
    """The refusal of trees that a policy decided."""
    return NeedsModel(
        f"policy {brief(trees.policy)} decided how far was drafted, and its decisions are not followed along texts; "
        "name a shape such as 1x1x1 or 3x2x1, which is drafted whole"
    )


def _check_lossless(trees: RecordedTrees, verifier: Verifier) -> None:
    """Refuse texts that a lossless design would not emit, and verifiers that would not emit the target's texts.

    Raises:
        NeedsModel: the recorded texts are not the target's, or the verifier's are not.
    """
    used = trees.verifier
    if trees.emitted and used is not None and not used.lossless:
        if used.lossless is None:
            what = f"it is not known whether verifier {brief(used.name)}, which emitted the recorded texts, is lossless"
        else:
            what = f"the recorded texts are those of the lossy verifier {brief(used.name)}, not the target's"
        raise NeedsModel(f"{what}; record a run of a lossless verifier, or task=verifier_study, to follow texts")
    if not verifier.lossless:
        raise NeedsModel(f"verifier '{verifier.name}' is lossy: it emits other texts than the recorded ones")


def _lacks(texts: TextRows) -> bool:
    """Whether the q of some token of a text is not recorded."""
    inside = np.arange(texts.text.shape[1]) < texts.length[:, None]
    inside[:, : texts.first] = False
    row = texts.row[inside]
    return bool((row < 0).any() or not texts.trees.expanded[row].all())


class _Accept:
    """Probabilities that drafted children are accepted, given the text.

    Args:
        verifier: ``token``, ``kseq`` or ``match``; any lossless one for deterministic trees.
        p, q: ``[R, W + PSEUDO]``.
        missing: what is assumed where no q is recorded: the first child is accepted with this probability.
    """

    def __init__(self, texts: TextRows, verifier: Verifier, p: np.ndarray, q: np.ndarray, missing: float) -> None:
        self.texts, self.verifier, self.missing = texts, verifier, missing
        self._tables: dict[tuple[int, str], np.ndarray] = {}
        trees = texts.trees
        known = (texts.row >= 0) & (np.arange(texts.text.shape[1]) < texts.length[:, None])
        known &= trees.expanded[texts.row]
        self.known = known
        rows = texts.row[known]
        self.rows, self.p, self.q = rows, p[rows], q[rows]
        matches = trees.ids[rows] == texts.text[known][:, None]
        width = trees.ids.shape[1]
        self.y = np.where(matches.any(1), matches.argmax(1), width)  # of others the pseudo token of p

    def weights(self, rule: Rule, certain: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:  # [N, L, D + 1]
        """Return w of a rule.

        Args:
            certain: as in ``pseudo_tokens.certainty``; None for rules without a confidence.
        """
        depth, (count, longest) = depth_of(rule.choices), self.texts.text.shape
        sure = np.ones((count, longest + depth), dtype=bool)
        if rule.confidence:
            assert certain is not None
            lower, upper = (bound[self.rows] for bound in certain)
            if open_ := int(((lower < rule.confidence) & (upper >= rule.confidence)).sum()):
                raise NeedsModel(
                    f"the mass at temperature 1 of tokens that are not recorded decides whether confidence="
                    f"{rule.confidence:g} stops, at {open_} of {len(lower)} rows; set a larger record_top"
                )
            here = np.ones((count, longest), dtype=bool)
            here[self.known] = lower >= rule.confidence
            sure[:, :longest] = here
        children: dict[tuple[int, ...], int] = {}
        for path in rule.choices:
            children[path[:-1]] = max(children.get(path[:-1], 0), path[-1] + 1)
        tables = {k: self._padded(self._of(k, rule.drawn), depth) for k in set(children.values())}
        weights = np.zeros((count, longest, depth + 1))
        reach: dict[tuple[int, ...], np.ndarray] = {(): np.ones((count, longest))}
        grows: dict[tuple[int, ...], np.ndarray] = {(): np.ones((count, longest), dtype=bool)}
        for path in ((), *sorted(rule.choices, key=lambda path: (len(path), path))):
            level = len(path)
            rest = np.ones((count, longest))
            if width := children.get(path, 0):
                accept = tables[width][:, level : level + longest] * grows[path][:, :, None]
                for rank in range(width):
                    reach[(*path, rank)] = reach[path] * accept[:, :, rank]
                    grows[(*path, rank)] = grows[path] & sure[:, level : level + longest]
                rest = 1.0 - accept.sum(2)
            weights[:, :, level] += reach[path] * np.maximum(rest, 0.0)
        return weights

    def _of(self, k: int, drawn: str) -> np.ndarray:  # [n, k]
        """``_accept``, computed once."""
        if (k, drawn) not in self._tables:
            self._tables[k, drawn] = self._accept(k, drawn)
        return self._tables[k, drawn]

    def _padded(self, accept: np.ndarray, depth: int) -> np.ndarray:  # [N, L + depth, k]
        """Acceptance at every token of the texts; nothing beyond their ends."""
        count, longest = self.texts.text.shape
        full = np.zeros((count, longest + depth, accept.shape[1]))
        inside = np.arange(longest) < self.texts.length[:, None]
        full[:, :longest, 0] = np.where(inside, self.missing, 0.0)
        full[:, :longest][self.known] = accept
        return full

    def _accept(self, k: int, drawn: str) -> np.ndarray:  # [n, k]
        """a_r of k siblings at the rows with a q."""
        p, q, here = self.p, self.q, np.arange(len(self.y))
        p_y, q_y = np.maximum(p[here, self.y], 1e-300), q[here, self.y]
        if drawn == "deterministic":
            order = np.argsort(-q[:, :-PSEUDO], axis=1, kind="stable")[:, :k]
            self._check_ranks(order)
            chosen = np.take_along_axis(q, order, 1) > 0
            return ((order == self.y[:, None]) & chosen).astype(float)
        if drawn != "iid":
            raise NeedsModel(
                f"siblings drawn '{drawn}' have no closed form given the text; drawn=iid and drawn=deterministic have"
            )
        if isinstance(self.verifier, Match):
            chance = [q_y * (1 - q_y) ** rank for rank in range(k)]
        elif isinstance(self.verifier, KSeq) and k > 1:
            rho = _rho(p, q, k)
            missed = np.maximum(1.0 - np.minimum(q, p / rho[:, None]).sum(1), 0.0)
            chance = [missed**rank * np.minimum(q_y, p_y / rho) / p_y for rank in range(k)]
        elif isinstance(self.verifier, Token | KSeq):
            theta, left, chance = np.zeros(len(p)), np.ones(len(p)), []
            for _ in range(k):
                w = np.maximum(p - theta[:, None] * q, 0.0)
                s = w.sum(1)
                p_rank = np.divide(w, s[:, None], out=np.zeros_like(w), where=s[:, None] > 0)
                chance.append(left * np.minimum(q_y, p_rank[here, self.y]) / p_y)
                left = left * np.maximum(1.0 - np.minimum(q, p_rank).sum(1), 0.0)
                theta = theta + s
        else:
            name = self.verifier.name
            raise NeedsModel(f"verifier '{name}' has no closed form given the text; token, kseq and match have")
        return np.minimum(np.stack(chance, 1), 1.0)

    def _check_ranks(self, order: np.ndarray) -> None:
        """Refuse texts of which it is not known whether their tokens are among the likeliest of q.

        Args:
            order: ``[n, k]`` the likeliest recorded tokens.

        Raises:
            NeedsModel: a token that is not recorded may be one of the k, and the text's may be it or come after it.
        """
        recorded_q, max_rest = self.texts.trees.q[self.rows], self.texts.trees.rest[self.rows, 3]
        least, kept = recorded_q[np.arange(len(order)), order[:, -1]], self.q[:, -PSEUDO:].sum(1) > 0
        q_y = np.append(recorded_q, np.zeros((len(recorded_q), 1)), 1)[np.arange(len(recorded_q)), self.y]
        open_ = kept & (least <= max_rest) & (q_y <= max_rest)
        if open_.any():
            raise NeedsModel(
                f"the {order.shape[1]} likeliest draft tokens may include some that are not recorded, at "
                f"{int(open_.sum())} of {len(open_)} rows; set a larger record_top"
            )


def _rho(p: np.ndarray, q: np.ndarray, k: int) -> np.ndarray:  # [n]
    """The rho of K-SEQ for k siblings at each row."""
    shape = Shape(len(p), np.repeat(np.arange(len(p)), k))
    token = torch.from_numpy(q.argmax(1)).repeat_interleave(k)
    q_row = np.append(np.arange(len(p)), np.full(shape.nodes, -1))
    draft = Draft(shape, token, "iid", torch.from_numpy(q), q_row)
    rows = torch.from_numpy(np.concatenate([p, np.zeros((shape.nodes, p.shape[1]))]))
    return np.asarray(min_rho(draft, rows))[: len(p)]
