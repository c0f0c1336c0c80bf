"""All targets by name."""

from tests.nightly.fuzzing import runs, texts, weights

TARGETS = {**texts.TARGETS, **weights.TARGETS, **runs.TARGETS}
