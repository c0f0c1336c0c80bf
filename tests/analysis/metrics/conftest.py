"""Tables that several tests read."""

import pandas as pd
import pytest

from tests.analysis.metrics.tables import steps


@pytest.fixture
def chain() -> pd.DataFrame:
    """Chains of 3: request 0 accepts 0, 3, 1; request 1 accepts 2 and 3, cut to a single emitted token."""
    return steps(
        {"accepted": 0, "expected_accepted": 0.5},
        {"accepted": 3, "expected_accepted": 2.0, "stop_had_children": False},
        {"accepted": 1, "expected_accepted": 1.5},
        {"accepted": 2, "expected_accepted": 1.0, "request": 1},
        {"accepted": 3, "expected_accepted": 2.5, "request": 1, "stop_had_children": False,
         "accepted_kept": 1, "emitted_kept": 1, "finish": "length"},
    )  # fmt: skip


@pytest.fixture
def requests() -> pd.DataFrame:
    """Two groups of two prompts; the arm that drafts decodes 2 and 3 times as fast. Each prefill takes 1 s."""
    rows = [
        # group, arm, request, decode_tokens, decode_seconds
        (0, "medusa", 0, 10, 1.0), (0, "medusa", 1, 30, 2.0),
        (0, "baseline", 0, 10, 3.0), (0, "baseline", 1, 30, 4.0),
        (1, "medusa", 2, 15, 1.0), (1, "medusa", 3, 15, 0.5),
        (1, "baseline", 2, 15, 3.0), (1, "baseline", 3, 15, 3.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["group", "arm", "request", "decode_tokens", "decode_seconds"])
    return table.assign(sequence=0, violated=-1, prompt_tokens=10, prefill_tokens=1, finish="length").assign(
        queue_seconds=0.0, prefill_seconds=1.0, prefill_compute_seconds=0.5
    )


@pytest.fixture
def forwards() -> pd.DataFrame:
    """One group: a prefill of 1 s, then forwards of 2 s and 3 s with 0.5 s between each."""
    phases = ["propose", "propose_forward", "target", "target_forward", "probabilities", "verify", "commit"]
    rows = [
        (0, True, 0.0, 1.0, 0.1, 0.0, 0.7, 0.6, 0.1, 0.05, 0.05),
        (0, False, 1.5, 2.0, 0.5, 0.4, 1.1, 1.0, 0.2, 0.1, 0.1),
        (0, False, 4.0, 3.0, 0.5, 0.3, 2.0, 1.8, 0.3, 0.1, 0.1),
    ]
    table = pd.DataFrame(rows, columns=["group", "prefill", "start", "whole", *phases])
    return table.assign(arm="medusa", mask_wait=0.0, mask_busy=0.0)
