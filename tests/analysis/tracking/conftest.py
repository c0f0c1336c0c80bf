"""A run that was tracked offline while it ran, and what wandb wrote of it."""

from pathlib import Path

import pytest

from spec_lab.analysis.tracking import Wandb
from spec_lab.tasks.benchmark import run
from tests.analysis.tracking.views import CONFIG, read_back
from tests.labs import TEXTS, lab, settings


@pytest.fixture(scope="session")
def tracked(tmp_path_factory) -> Path:
    """A run of nine groups, enough for intervals, and a short one, tracked while it went on, offline."""
    out = tmp_path_factory.mktemp("live") / "run"
    assert run(lab((TEXTS * 4)[:-1], tracker=Wandb(mode="offline")), settings(out), CONFIG) == 0
    return out


@pytest.fixture(scope="session")
def seen(tracked) -> dict[str, list[dict]]:
    return read_back(tracked)
