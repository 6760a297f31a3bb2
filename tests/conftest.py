"""Settings of the whole suite: no network, and property tests that are the same on every run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")
