"""Assertions after the last cell of notebooks/add_a_proposer.py; runs in its kernel."""

import json

assert recent.follow([5, 6, 5, 7, 8, 5], 3) == [7, 8, 5]
assert recent.follow([5, 6, 5, 7, 8, 5], 1) == [7]
assert recent.follow([1, 2, 3], 4) == []
assert steps["recent"]["depth"].max() == 4  # the depth of the YAML
assert metrics.tau_pooled_raw(steps["recent"]) > 1  # some drafts are accepted
assert changes.loc["tau_pooled", "paired"]
assert changes.loc["nodes_per_step", "units"] == 8  # prompts
(pair,) = json.loads(Path("certified/certificate.json").read_text())["pairs"]
assert pair["certified"] == "exact"
assert pair["exact"]["drafts"] == "proposer"  # its own drafts were enumerated, not those of a reference
assert pair["exact"]["drafted"] > 100
