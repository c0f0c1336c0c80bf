"""Assertions after the last cell of notebooks/your_own_model.py; runs in its kernel."""

assert curve[-1]["step"] == training["steps"] >= 50
assert all(curve[-1]["loss"][head] < curve[0]["loss"][head] for head in range(2))
assert training["accepted"][0] > 0.1
assert metrics.arms(tables) == ["medusa", "ngram", "baseline"]
assert tables.requests.groupby("arm")["request"].nunique().tolist() == [12] * 3
assert not {json.loads(line)["question_id"] for line in measured} & {
    json.loads(line)["question_id"] for line in Path("learn.jsonl").read_text().splitlines()
}
for row in rows.values():
    assert row["tau, low"] <= row["tau"] <= row["tau, high"] and row["low"] <= row["speed-up"] <= row["high"]
assert rows["Medusa heads"]["tau"] > 1.05
(pair,) = json.loads(Path("certified/certificate.json").read_text())["pairs"]
assert pair["certified"] == "exact"
assert json.loads(Path("trained/drafter/config.json").read_text())
