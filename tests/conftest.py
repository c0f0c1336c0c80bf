"""One thread per test process (tests run side by side, and tiny models are fastest so), fixed seeds, no network."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("spec_lab", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("spec_lab")


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
