"""The benchmark of lookups: on a few files it measures every proposer, and writes its table."""

import pandas as pd
import pytest

from experiments.training_free import lookup


def test_every_proposer_is_measured_with_and_without_a_store(tmp_path, capsys):
    for folder, functions in (("text", 40), ("packages", 20)):
        (tmp_path / folder).mkdir()
        text = "".join(f"def function_{one}(argument):\n    return argument + {one}\n\n\n" for one in range(functions))
        (tmp_path / folder / "module.py").write_text(text)
    given = ["--own", "40", "80", "--store", "150", "--steps", "5", "--evict", "1", "--out", str(tmp_path)]
    folders = ["--text", str(tmp_path / "text"), "--packages", str(tmp_path / "packages")]
    table = lookup.main(given + folders)
    assert list(zip(table["proposer"], table["own"], table["store"], strict=True)) == [
        *[(name, own, store) for name in ("suffix", "sam") for own in (40, 80) for store in (0, 150)],
        ("rest", 0, 150),
    ]
    assert (table["p10"] > 0).all()
    assert (table["tokens_per_step"] > 1).any(), "drafted tokens are accepted"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "lookup.csv"), table)
    assert "tokens_per_step" in capsys.readouterr().out
    with pytest.raises(ValueError, match="tokens of Python source, fewer than"):
        lookup.main([*given, "--own", "10000", *folders])
