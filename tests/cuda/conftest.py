"""Collects this folder's tests on the stand-in only (make test-cuda)."""

import os

collect_ignore_glob = [] if os.environ.get("STAND_IN_LIBRARIES") else ["test_*.py"]
