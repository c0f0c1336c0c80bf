"""Tables small enough to write by hand: only what a test is about has to be stated."""

import pandas as pd


def steps(*rows: dict) -> pd.DataFrame:
    """Step rows, of which each says how many tokens were ``accepted``.

    Where a row says no more: a chain of 3, the next token of which is refused, in a group of one prompt; nothing is
    forced or cut.
    """
    plain = {
        "arm": "speculative", "request": 0, "prefill": False, "forced": 0, "nodes": 3, "depth": 3,
        "stop_had_children": True, "forced_accepted": 0, "forced_accepted_kept": 0,
        "forced_emitted": 0, "forced_emitted_kept": 0, "taken_back": 0, "forks": 0,
        "expected_accepted": 0.0, "expected_kind": "exact", "empty_residual": False, "finish": "",
    }  # fmt: skip
    filled = []
    for row in rows:
        one = plain | row
        one.setdefault("group", one["request"])
        one.setdefault("emitted", one["accepted"] + 1)
        one.setdefault("accepted_kept", one["accepted"])
        one.setdefault("emitted_kept", one["emitted"])
        one.setdefault("legal", one["nodes"])
        one.setdefault("expected_emitted", 1.0 + one["expected_accepted"])
        filled.append(one)
    return pd.DataFrame(filled)
