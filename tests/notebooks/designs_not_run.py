"""Assertions after the last cell of notebooks/designs_not_run.py; runs in its kernel."""

assert set(known["shape"]) == {*chains, *trees}
half = np.hypot((predicted["high"] - predicted["low"]) / 2, (measured.high - measured.low) / 2)
assert abs(predicted["tau"] - measured.mean) < 2 * half
for arm_bounds in of_run.values():
    first = arm_bounds.verifiers[0]
    lost = sum(value.mean for value in first.lost.values())
    assert abs(first.tau.mean + lost - arm_bounds.depth - 1) < 1e-9
assert ((cells["speedup_low"] <= cells["speedup"]) & (cells["speedup"] <= cells["speedup_high"])).all()
assert len(shares) >= 4
