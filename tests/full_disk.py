"""A disk without space, for this process."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(size=0):
    """Let no file that is written grow beyond ``size`` bytes: writing more raises OSError (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
