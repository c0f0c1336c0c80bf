"""Assertions after the last cell of notebooks/first_steps.py; runs in its kernel."""

from spec_lab.text.detokenizer import Finish

assert metrics.arms(tables) == ["medusa", "baseline"]
assert len(tables.requests) == 2 * 8  # both arms decoded every prompt
assert len(metrics.walltime_speedup_paired(tables.requests, "medusa")) == 8
assert speedup.low <= speedup.mean <= speedup.high
assert abs(1 + survival.sum() - metrics.tau_pooled_raw(steps)) < 1e-9  # accepted tokens, counted by depth
assert abs(difference.mean()) < 5 * error
assert "".join(span.text for span in spans) == output["text"]
assert {"accepted", "bonus"} <= {span.kind for span in spans}
assert isinstance(update.event, Finish)
