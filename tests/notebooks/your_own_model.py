"""Assertions after the last cell of notebooks/your_own_model.py; runs in its kernel."""

assert curve[-1]["step"] == training["steps"] >= 100
assert all(curve[-1]["loss"][head] < curve[0]["loss"][head] for head in range(2))
assert metrics.arms(tables) == ["speculative", "bundled", "ngram", "baseline"]
assert tables.requests.groupby("arm")["request"].nunique().tolist() == [12] * 4
assert not {json.loads(line)["id"] for line in lines[::4]} & {
    json.loads(line)["id"] for line in Path("learn.jsonl").read_text().splitlines()
}
for row in rows.values():
    assert row["tau, low"] <= row["tau"] <= row["tau, high"] and row["low"] <= row["speed-up"] <= row["high"]
assert rows["bundled heads"]["tau"] > rows["one minute"]["tau"]
(pair,) = json.loads(Path("certified/certificate.json").read_text())["pairs"]
assert pair["certified"] == "exact"
assert json.loads(Path("trained/drafter/config.json").read_text())
