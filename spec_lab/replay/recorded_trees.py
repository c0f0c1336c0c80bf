"""Recorded draft trees, read from the table ``replay`` of a run or of a verifier study.

Every row has a vocabulary of its own: the tokens that were recorded for it. Verifiers compare tokens only with those of
the same row and of its children, so a node's token is given by its index among its parent's recorded tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.core.draft import WAYS, Drawn
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape
from spec_lab.decode.recording import ID_BYTES, unpack_ids
from spec_lab.replay.recording_memory import check_memory
from spec_lab.results import run_state, study, sweep
from spec_lab.results.manifest import begun
from spec_lab.results.schema import REPLAY
from spec_lab.results.writer import load, load_replay
from spec_lab.verify import (
    Cascade,
    Diversed,
    FLy,
    Gumbel,
    KSeq,
    Lenient,
    Match,
    Relaxed,
    Synthetic,
    Token,
    Traversal,
    Typical,
    Verifier,
)

TEXT_ONLY = ("draft_chain", "draft_tree", "draft_best_first", "draft_reranked")
"""Names of proposers that are ``Proposer.text_only`` in manifests that do not state it."""

DEPTH_POLICIES = ("fixed", "heuristic", "bandit", "goodput", "recorded")
"""Policies that read no q unless their facts state a rule; others, and those of other packages, are assumed to."""

VERIFIERS: Mapping[str, Callable[..., Verifier]] = {
    "token": Token, "traversal": Traversal, "match": Match, "kseq": KSeq, "cascade": Cascade, "lenient": Lenient,
    "typical": Typical, "relaxed": Relaxed,
}  # fmt: skip
"""The verifiers by the names of ``conf/verifier``; ``gumbel`` reads noise, which is not recorded."""

MAKERS: Mapping[str, Callable[..., Verifier]] = {
    **VERIFIERS, "gumbel": Gumbel, "diversed": Diversed, "fly": FLy, "synthetic": Synthetic,
}  # fmt: skip
KNOWN = {f"spec_lab.verify.{make.__name__}": name for name, make in MAKERS.items()}
"""The names of verifiers of which it is known whether they are lossless, by ``_target_``."""

TOLERANCE = 1e-3
"""By how much the mass of a recorded row may differ from 1: it is recorded in float32."""

NOTHING = "nothing was recorded: no recorded step has drafted; record_share may be too small, or the run has just begun"

AGAIN = "copy the file again from where the run was written, or run again"


class NeedsModel(ValueError):
    """The recorded rows do not identify what a design would do; names what is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"needs the model: {why}")


@dataclass(frozen=True, eq=False)
class RecordedText:
    """A recorded text.

    Args:
        prompt: tokens of the prompt.
        tokens: ``[n]`` the output.
    """

    prompt: int
    tokens: np.ndarray


@dataclass(frozen=True)
class RunVerifier:
    """The verifier of a run.

    Args:
        lossless: whether its texts have the target's distribution; None where this is not known.
        written: as ``designs.verifier_of`` reads it; empty if replay has none of that name.
    """

    name: str
    lossless: bool | None
    written: str = ""

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> RunVerifier | None:
        """Return that of a run; None where its manifest states none."""
        config = (manifest.get("config") or {}).get("verifier")
        if not isinstance(config, Mapping):
            return None
        path = str(config.get("_target_", ""))
        options = {str(key): value for key, value in config.items() if not str(key).startswith("_")}
        name = KNOWN.get(path, "")
        try:
            verifier = MAKERS[name](**options)
        except (KeyError, TypeError, ValueError):  # of another package, or options of another version
            return RunVerifier(path, None)
        written = ":".join([name, ",".join(f"{key}={value}" for key, value in options.items())]).rstrip(":")
        return RunVerifier(verifier.name, verifier.lossless, written if name in VERIFIERS else "")


@dataclass(frozen=True, eq=False)
class RecordedTrees:
    """The recorded trees of one arm, as one forest of B trees with R rows, M of them nodes.

    Args:
        token: ``[R]`` the token of every row.
        local: ``[M]`` the index of each node's token among the recorded tokens of its parent.
        codes: ``[M]`` int8, how each node was drawn, as its index in ``WAYS``.
        ids: ``[R, W]`` int32, the recorded tokens of each row; -1 fills up.
        p: ``[R, W]`` float64, their target probabilities at temperature 1; 0 fills up.
        q: ``[R, W]`` float64, their draft probabilities as drawn from; 0 fills up, and where ``expanded`` is False.
        rest: ``[R, 4]`` float64: of all other tokens the mass of p and of q, and the largest p and q.
        expanded: ``[R]`` bool, whether the row has a q.
        steps: ``[B]`` one row for each tree: group, request, sequence, forward, position, prefill.
        vocabulary: V.
        sampling: of the target; all requests of a run have the same.
        texts: by request; empty where none is known.
        proposer: the manifest's facts on the arm's proposer.
        verifier: of the run; None where its manifest states none.
        emitted: whether the run's verifier emitted the texts; else the target alone did, as in a verifier study.
    """

    arm: str
    shape: Shape
    token: np.ndarray
    local: np.ndarray
    codes: np.ndarray
    ids: np.ndarray
    p: np.ndarray
    q: np.ndarray
    rest: np.ndarray
    expanded: np.ndarray
    steps: pd.DataFrame
    vocabulary: int
    sampling: Sampling
    texts: Mapping[int, RecordedText]
    proposer: Mapping[str, Any]
    verifier: RunVerifier | None = None
    emitted: bool = True

    @property
    def ways(self) -> frozenset[Drawn]:
        """The ways of drawing that occur."""
        return frozenset(WAYS[code] for code in np.unique(self.codes).tolist())

    @property
    def draft_temperature(self) -> float | None:
        """The temperature at which the drafter sampled; None where the manifest does not state it."""
        if "temperature" not in self.proposer:
            return None
        temperature = self.proposer["temperature"]
        return self.sampling.temperature if temperature is None else float(temperature)

    @property
    def text_only(self) -> bool:
        """Whether q follows from the text before a token alone, wherever the step began (``Proposer.text_only``)."""
        return bool(self.proposer.get("text_only", self.proposer.get("name") in TEXT_ONLY))

    @property
    def policy(self) -> str:
        """The name of the policy that decided how far was drafted; empty for none."""
        policy = self.proposer.get("policy")
        return str(policy.get("name") or "policy") if isinstance(policy, Mapping) else ""

    @property
    def stops_by_q(self) -> bool:
        """Whether the shape of a tree follows from the q of its tokens: by confidence, a policy's rule, or the best."""
        policy = self.proposer.get("policy")
        ruled = isinstance(policy, Mapping) and ("rule" in policy or self.policy not in DEPTH_POLICIES)
        best = self.proposer.get("tree") in ("best first", "reranked")
        return ruled or best or bool(self.proposer.get("confidence"))

    @cached_property
    def decode(self) -> np.ndarray:  # [B] bool
        """Trees of steps after the prefill."""
        return ~self.steps["prefill"].to_numpy(dtype=bool)


def read(folder: Path, arms: tuple[str, ...] = ()) -> dict[str, RecordedTrees]:
    """Return the recorded trees of a run or a verifier study by arm; none if no step was recorded.

    Args:
        folder: its directory; it may be running.
        arms: only these; all if empty.

    Raises:
        ValueError: no run there, a run without recorded distributions, no such arm, or more rows than fit into memory.
        OSError: a file that cannot be read.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder of a run but a file: name the run's output_dir")
    if sweep.is_sweep(folder) and not run_state.is_run(folder):
        raise ValueError(f"{folder} is a sweep: name the folder of one of its runs (spec-lab state {folder})")
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} is no folder of a run: it has no manifest.json")
    if (manifest.get("config") or {}).get("record") != "replay":
        raise ValueError(f"the run in {folder} has recorded no distributions: run it with record=replay")
    check_memory(folder)
    texts: dict[str, dict[int, RecordedText]] = {}
    studied = (folder / "texts.parquet").exists() or any((folder / "parts").glob("texts-*.parquet"))
    if studied:
        tables = study.parts(folder, replay=True).load()
        frame = tables["replay"]
        outputs = {
            int(row.request): RecordedText(int(row.prompt_tokens), np.asarray(row.tokens)[int(row.prompt_tokens) :])
            for row in tables["texts"].itertuples()
        }
        texts = dict.fromkeys(frame["arm"].unique(), outputs)
    else:
        frame = load_replay(folder)
        for name, requests in load(folder).requests.groupby("arm"):
            first = requests[requests["sequence"] == 0]
            rows = zip(first["request"], first["prompt_tokens"], first["tokens"], strict=True)
            texts[str(name)] = {int(n): RecordedText(int(length), np.asarray(tokens)) for n, length, tokens in rows}
    gathered = any((folder / file).exists() for file in ("requests.parquet", "texts.parquet"))
    if frame.empty and gathered and not (folder / "replay.parquet").exists():
        raise ValueError(f"{folder}/replay.parquet is missing: {AGAIN}")
    if wrong := [name for name in REPLAY if frame[name].isna().any()]:
        raise ValueError(f"{folder}/replay.parquet is damaged: its column {wrong[0]} has empty cells; {AGAIN}")
    known = sorted(frame["arm"].unique())
    for name in arms:
        if name not in known:
            raise ValueError(f"{folder} has no recorded arm '{name}'; it has {', '.join(known) or 'none'}")
    facts, verifier = manifest.get("proposers") or {}, RunVerifier.of(manifest)
    try:
        trees = {
            name: of_rows(frame[frame["arm"] == name], name, texts.get(name, {}), facts.get(name, {}))
            for name in known
            if not arms or name in arms
        }
        return {name: replace(recorded, verifier=verifier, emitted=not studied) for name, recorded in trees.items()}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def of_rows(
    frame: pd.DataFrame,
    arm: str,
    texts: Mapping[int, RecordedText] | None = None,
    proposer: Mapping[str, Any] | None = None,
) -> RecordedTrees:
    """Return the trees of rows of the table ``replay``.

    Args:
        frame: rows of one arm.
        texts, proposer: see ``RecordedTrees``.

    Raises:
        ValueError: there is no row, a damaged one (named with its column), or requests with different sampling
            parameters.
    """
    if frame.empty:
        raise ValueError(f"nothing is recorded of the arm '{arm}' yet")
    frame = frame.sort_values(["group", "request", "sequence", "forward", "row"], kind="stable", ignore_index=True)
    if frame["sampling"].nunique() > 1:
        raise ValueError(f"the requests of the arm '{arm}' have different sampling parameters")
    name = frame["id"].to_numpy()
    row, above, way = (frame[column].to_numpy() for column in ("row", "parent", "way"))
    _refuse(row < 0, name, "row", "it is negative")
    first = np.flatnonzero(row == 0)
    tree = np.cumsum(row == 0) - 1  # of each row
    if not len(first) or tree[0] < 0 or (row != np.arange(len(frame)) - first[tree]).any():
        raise ValueError(f"a recorded tree of the arm '{arm}' lacks a row; {AGAIN}")
    is_node = row > 0
    _refuse(is_node & ((above < 0) | (above >= row)), name, "parent", "it is no earlier row of the tree")
    _refuse(is_node & ~np.isin(way, WAYS), name, "way", f"it is none of {', '.join(WAYS)}")
    try:
        sampling = Sampling(**json.loads(frame["sampling"].iloc[0]))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"replay.parquet is damaged: row {name[0]}, column sampling: {error}; {AGAIN}") from error
    vocabulary = int(frame["vocabulary"].mode().iloc[0])
    _refuse((frame["vocabulary"] != vocabulary).to_numpy() | (vocabulary < 1), name, "vocabulary", "it differs or is 0")
    roots = len(first)
    number = np.empty(len(frame), dtype=np.int64)  # each row's number in the forest
    number[~is_node] = np.arange(roots)
    number[is_node] = roots + np.arange(int(is_node.sum()))
    parent = number[first[tree] + above][is_node]
    order = np.argsort(number, kind="stable")
    ids, p, q, expanded = _unpacked(frame, vocabulary)
    rest = frame[["p_rest", "q_rest", "p_most", "q_most"]].to_numpy(dtype=np.float64)
    _check_mass(name, ids, p, q, rest, vocabulary)
    ids, p, q, rest = ids[order], p[order], q[order], rest[order]
    token = frame["token"].to_numpy()[order]
    matches = ids[parent] == token[roots:, None]
    if not matches.any(1).all():
        raise ValueError(f"a recorded row of the arm '{arm}' lacks the token of one of its children; {AGAIN}")
    keys = ["group", "request", "sequence", "forward", "position", "prefill"]
    return RecordedTrees(
        arm,
        Shape(roots, parent),
        token,
        matches.argmax(1) if len(matches) else np.empty(0, dtype=np.int64),
        np.array([WAYS.index(drawn) for drawn in way[is_node]], dtype=np.int8),
        ids,
        p,
        q,
        rest,
        expanded[order],
        frame.loc[first, keys].reset_index(drop=True),
        vocabulary,
        sampling,
        texts or {},
        proposer or {},
    )


def _refuse(wrong: np.ndarray, name: np.ndarray, column: str, why: str) -> None:
    """Refuse a damaged table.

    Args:
        wrong: ``[R]`` rows that are.
        name: ``[R]`` their ids.
        why: what is wrong there.
    """
    if wrong.any():
        raise ValueError(f"replay.parquet is damaged: row {name[wrong.argmax()]}, column {column}: {why}; {AGAIN}")


def _unpacked(frame: pd.DataFrame, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, p and q ``[R, W]`` of the rows, and which have a q ``[R]``."""
    name = frame["id"].to_numpy()
    packed = {column: frame[column].to_numpy() for column in ("ids", "p", "q")}
    size = {column: np.array([*map(len, cells)], dtype=np.int64) for column, cells in packed.items()}
    count = size["p"] // 4
    _refuse((size["p"] % 4 > 0) | (count == 0), name, "p", "it is no list of float32")
    _refuse(count > vocabulary, name, "p", f"it has more tokens than the vocabulary, {vocabulary}")
    _refuse((size["ids"] > 0) & (size["ids"] != ID_BYTES * count), name, "ids", "its length differs from that of p")
    _refuse((size["ids"] == 0) & (count != vocabulary), name, "ids", "it is empty, but p is not of all tokens")
    _refuse((size["q"] > 0) & (size["q"] != size["p"]), name, "q", "its length differs from that of p")
    ids = np.full((len(frame), int(count.max())), -1, dtype=np.int32)
    p, q = np.zeros(ids.shape), np.zeros(ids.shape)
    for row, (id_bytes, top, drafted) in enumerate(zip(*packed.values(), strict=True)):
        ids[row, : count[row]] = unpack_ids(id_bytes) if id_bytes else np.arange(count[row])
        p[row, : count[row]] = np.frombuffer(top, dtype="<f4")
        if drafted:
            q[row, : count[row]] = np.frombuffer(drafted, dtype="<f4")
    return ids, p, q, size["q"] > 0


def _check_mass(
    name: np.ndarray, ids: np.ndarray, p: np.ndarray, q: np.ndarray, rest: np.ndarray, vocabulary: int
) -> None:
    """Refuse rows that hold no distributions; shapes are those of ``RecordedTrees``."""
    _refuse(np.asarray((ids >= vocabulary).any(1)), name, "ids", f"a token is not below the vocabulary, {vocabulary}")
    ordered = np.sort(ids, 1)
    _refuse(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1), name, "ids", "a token occurs twice")
    for index, (column, mass) in enumerate((("p", p), ("q", q))):
        _refuse(
            np.any(~np.isfinite(mass) | (mass < 0), axis=1), name, column, "a probability is negative or not finite"
        )
        other, largest = rest[:, index], rest[:, index + 2]
        for end, values in (("rest", other), ("most", largest)):
            _refuse(~(np.isfinite(values) & (values >= 0)), name, f"{column}_{end}", "it is negative or not finite")
        _refuse(largest > other + 1e-6, name, f"{column}_most", f"it is larger than {column}_rest")
        total = mass.sum(1) + other
        wrong = (abs(total - 1) > TOLERANCE) & (total != 0)
        _refuse(wrong, name, column, f"with {column}_rest it does not sum to 1")
