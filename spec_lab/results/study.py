"""The tables of the verifier study. They are written prompt by prompt, so that a kill keeps every finished prompt."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from spec_lab.results.schema import REPLAY
from spec_lab.results.table_parts import TableParts

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

RECORDED = {
    "id": (_TEXT, "request/position/proposer/verifier"),
    "request": (_WHOLE, "number of the prompt in its run"),
    "position": (_WHOLE, "tokens of the recorded prefix, prompt included"),
    "proposer": (_TEXT, "arm of the proposer"),
    "drawn": (_TEXT, "how it draws siblings"),
    "verifier": (_TEXT, "name of the verifier in the run"),
    "lossless": (_FLAG, "whether the verifier declares itself lossless"),
    "given": (
        _TEXT,
        "what its probabilities are conditional on: the 'draft'; or its 'noise' as well: a sampled outcome",
    ),
    "nodes": (_WHOLE, "drafted nodes"),
    "depth": (_WHOLE, "drafted depth"),
    "children": (_WHOLE, "drafted nodes of the first level"),
    "expected_accepted": (_REAL, "expected accepted tokens"),
    "first_level": (_REAL, "probability that at least one token is accepted"),
    "bound": (_REAL, "largest such probability, over the drawing of the first level; 'deterministic': given it"),
    "propose": (_REAL, "seconds of drafting"),
    "target": (_REAL, "seconds of the target, packing included"),
    "target_forward": (_REAL, "of these, seconds inside its module calls"),
    "probabilities": (_REAL, "seconds of turning logits into target probabilities"),
    "verify": (_REAL, "seconds of verification and choice, the median of several times"),
}
"""One row for each request, position, proposer and verifier; what does not depend on the verifier is repeated."""

TEXTS = {
    "id": (_TEXT, "the request"),
    "request": (_WHOLE, "as in recorded"),
    "name": (_TEXT, "the prompt's id"),
    "workload": (_TEXT, "the prompt's workload"),
    "prompt_tokens": (_WHOLE, "the prompt's length in tokens"),
    "tokens": (pa.list_(_WHOLE), "the recorded text's token ids, prompt included"),
    "error": (_TEXT, "errors while it was recorded or drafted for; empty for none"),
}
"""One row for each recorded text."""


def parts(out: str | Path, replay: bool = False) -> TableParts:
    """Return the tables of a study, which are written and read prompt by prompt.

    A prompt counts as finished once the row of its text is on disk.

    Args:
        replay: whether distributions are recorded.
    """
    tables = {"recorded": RECORDED, "texts": TEXTS}
    return TableParts(Path(out), {"replay": REPLAY, **tables} if replay else tables, unit="request")


def load(out: str | Path, name: str = "recorded") -> pd.DataFrame:
    """Return the rows of a run's finished prompts, whether it is done, running or was stopped.

    Raises:
        ValueError: a file of the run that is not a table.
    """
    return parts(out).load()[name]
