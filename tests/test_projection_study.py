"""The study of projections: its tables follow from the published rows and from the recorded results."""

import pandas as pd
import pytest

from experiments.projection import measured, published

README = (published.HERE / "README.md").read_text()


@pytest.fixture(scope="module")
def frame():
    return published.results()


def test_the_tables_of_published_rows_are_recomputed(frame):
    for text in (published.by_table(frame), published.rows_of(frame), published.baselines(frame)):
        assert text in README
    kept = pd.read_csv(published.HERE / "published_results.csv", keep_default_na=False)
    for name in ("projected", "error", "unexplained"):
        assert pd.to_numeric(kept[name]).to_numpy() == pytest.approx(frame[name].to_numpy(), rel=1e-3, abs=1e-3)


def test_projections_stay_below_the_tokens_of_a_step(frame):
    assert (frame["projected"] <= frame["bound"] * (1 + 1e-9)).all()


def test_the_context_hardly_matters_at_batch_1(frame, monkeypatch):
    for context in (64, 2048):
        monkeypatch.setattr(published, "CONTEXT", context)
        other = [published.projected(row)["projected"] for row in frame.to_dict("records")]
        assert other == pytest.approx(frame["projected"].to_numpy(), rel=0.02)


def test_the_tables_of_measured_points_are_recomputed():
    frame, lengths = (pd.read_csv(measured.HERE / name) for name in ("measured.csv", "lengths.csv"))
    texts = measured.by_run(frame), measured.points(frame), measured.chains(lengths)
    for text in (*texts, measured.earlier(pd.read_csv(measured.EARLIER))):
        assert text in README
    assert len(frame) == 32 and (frame["error"].abs() <= 0.10).all()


def test_taus_of_other_lengths_lie_within_their_intervals():
    lengths = pd.read_csv(measured.HERE / "lengths.csv")
    assert (lengths["measured"].between(lengths["low"], lengths["high"])).all()
