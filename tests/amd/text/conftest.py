"""What the text tests need of their process."""

from __future__ import annotations

import os

# On a GPU, cuBLAS is deterministic only so, and tests/amd/conftest.py asks for deterministic operations. It is read
# when the first matrix product runs, which is later than this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
