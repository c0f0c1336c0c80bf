"""Assertions after the last cell of notebooks/reading_a_sweep.py; runs in its kernel."""

states = [run.state for run in killed]
assert process.returncode == -9
assert states[0] == "done" and states[-1] == "pending" and "running" not in states
assert sum(run.groups for run in killed) >= 10  # eight of the first run, and some of the second
runs = sweep.runs(folder)
assert [(run.state, run.groups) for run in runs] == [("done", 8)] * 4
assert runs[0] == killed[0]  # not done again
assert len(chains) == 4
for what in ("tau_pooled", "speedup"):
    assert ((chains[f"{what}_low"] <= chains[what]) & (chains[what] <= chains[f"{what}_high"])).all()
assert len(deepest) == 2
for name in deepest:
    steps = metrics.decode_steps(metrics.load(folder / name).steps, "draft_chain")
    share = steps["accepted"].value_counts(normalize=True)
    assert abs(metrics.survival(steps).sum() - (share.index * share).sum()) < 1e-9  # the same mean
assert changes.loc["nodes_per_step", "verdict"] == "significant"  # five tokens drafted, not one
assert changes.loc["tau_pooled", "paired"]  # by prompts
significant = changes[changes["verdict"] == "significant"]
nothing = significant["relative"].astype(float)  # no change: the factor 1, or the difference 0
assert ((significant["simultaneous_low"] > nothing) | (significant["simultaneous_high"] < nothing)).all()
