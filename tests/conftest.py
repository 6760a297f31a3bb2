"""Settings of the whole suite: no network, one thread, and property tests that are the same on every run."""

import os

# Before anything imports torch or transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models spend longer waking threads than computing

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")
