"""The names that options take; the command line shows them without importing torch."""

from __future__ import annotations

# Of suites.py; "all" is all of them, in this order.
SUITES = (
    "few-tiles",
    "odd-dims",
    "verify",
    "mixed",
    "chunks",
    "soft-cap",
    "decode",
    "decode-192",
    "page-sizes",
)
ALL_SUITES = "all"
# Of host_time.py: what the host needs for a step, which has no floor on the device.
HOST = "host"
# Of layers.py.
LAYERS = ("llama-8b", "llama-70b", "llama-70b-tp8", "gpt-oss", "gemma-256", "deepseek-v3-tp8")
