"""Recorded trees for tests: of runs of tiny models, and made by hand."""

import numpy as np
import pandas as pd

from spec_lab.core.draft import WAYS, Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import Shape
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.recording import Recording
from spec_lab.replay.recorded_trees import RecordedText, RecordedTrees, of_rows
from spec_lab.results.writer import replay_rows_of, rows_of
from spec_lab.verify import Token
from tests.propose.lab import WARM, draft_model, requests

FULL = Recording(top=10**6)


def decoded(target, drawn="iid", tree="2x1", sampling=WARM, verifier=None, recording=FULL, temperature=None, new=10):
    """(trees, rows of ``steps``) of a decoded group of a tiny model."""
    proposer = draft_model(tree, drawn, temperature)
    wanted = requests(sampling, new=new)
    engine = fixed_group(Arm(target, proposer, verifier or Token(), CounterDraws(0), record=recording), wanted)
    infos = [info.slim() for info in engine]
    frame = pd.DataFrame(replay_rows_of(infos, 0, "repeat", target.vocabulary))
    texts = {
        sequence.request.id: RecordedText(len(sequence.request.tokens), np.array(sequence.emitted))
        for sequence in engine.sequences
    }
    facts = {"name": f"draft_{proposer.plan.kind}", **proposer.facts}
    return of_rows(frame, "repeat", texts, facts), pd.DataFrame(rows_of(infos, 0, "repeat")[1])


def by_hand(draft: Draft, p: np.ndarray, top: int | None = None, sampling=WARM, texts=None, proposer=None, steps=None):
    """The recorded trees of a draft with target probabilities ``p`` ``[R, V]``; ``top`` tokens of each row."""
    shape, vocabulary = draft.shape, p.shape[1]
    q = np.zeros_like(p)
    expanded = np.zeros(shape.rows, dtype=bool)
    if draft.q is not None:
        expanded = draft.q_row >= 0
        q[expanded] = draft.q.numpy()[draft.q_row[expanded]]
    token, top = draft.token.numpy(), top or vocabulary
    score = np.maximum(p, q)
    score[shape.parent, token] = 2.0
    width = max(top, int(shape.count.max(initial=0)))
    ids = np.argsort(-score, axis=1, kind="stable")[:, :width]
    tops = [np.take_along_axis(x, ids, 1) for x in (p, q)]
    others = []
    for x in (p, q):
        left = x.copy()
        np.put_along_axis(left, ids, 0.0, 1)
        others.append(left)
    rest = np.stack([others[0].sum(1), others[1].sum(1), others[0].max(1), others[1].max(1)], 1)
    roots = np.zeros(shape.roots, dtype=np.int64)
    local = (ids[shape.parent] == token[:, None]).argmax(1)
    number = np.arange(shape.roots)
    plain = pd.DataFrame(
        {"group": 0, "request": number, "sequence": 0, "forward": 1, "position": 1, "prefill": False}, index=number
    )
    codes = np.array([WAYS.index(draft.drawn)] * shape.nodes) if isinstance(draft.drawn, str) else draft.drawn
    return RecordedTrees(
        "repeat", shape, np.concatenate([roots, token]), local, codes.astype(np.int8), ids.astype(np.int32),
        tops[0], tops[1], rest, expanded, plain if steps is None else steps, vocabulary, sampling, texts or {},
        proposer or {"name": "draft_tree", "temperature": 1.0, "tree": "0", "confidence": 0.0},
    )  # fmt: skip


def without_nodes(roots: int) -> Shape:
    return Shape(roots, np.empty(0, dtype=np.int64))


COLD = Sampling()
