"""Tables small enough to write by hand: only what a test is about has to be stated."""

import pandas as pd


def steps(*rows: dict) -> pd.DataFrame:
    """Step rows, of which each says how many tokens were ``accepted``.

    Where a row says no more: a chain of 3, the next token of which is refused, in a group of one prompt; nothing is
    forced or cut.
    """
    plain = {
        "arm": "medusa", "request": 0, "prefill": False, "forced": 0, "nodes": 3, "depth": 3,
        "stop_had_children": True, "forced_accepted": 0, "forced_accepted_kept": 0,
        "forced_emitted": 0, "forced_emitted_kept": 0, "taken_back": 0, "forks": 0,
        "expected_accepted": 0.0, "expected_kind": "exact", "empty_residual": False, "finish": "",
        "sequence": 0, "context": 11,
    }  # fmt: skip
    filled = []
    for row in rows:
        step = plain | row
        step.setdefault("group", step["request"])
        step.setdefault("emitted", step["accepted"] + 1)
        step.setdefault("accepted_kept", step["accepted"])
        step.setdefault("emitted_kept", step["emitted"])
        step.setdefault("legal", step["nodes"])
        step.setdefault("expected_emitted", 1.0 + step["expected_accepted"])
        filled.append(step)
    return pd.DataFrame(filled)
