"""The names that options take; the command line shows them without importing torch."""

# The suites of suites.py. "all" is all of them, in this order.
SUITES = (
    "few-tiles",
    "odd-dims",
    "verify",
    "mixed",
    "chunks",
    "soft-cap",
    "ranges",
    "short",
    "eight-bits",
    "decode",
    "decode-192",
    "page-sizes",
)
ALL_SUITES = "all"
# The suite of host_time.py: the host's time for a step. It has no lower bound on the device.
HOST = "host"
# The suite of random_cases.py, which is not among all.
RANDOM = "random"
# The layers of layers.py.
LAYERS = ("llama-8b", "llama-70b", "llama-70b-tp8", "gpt-oss", "gemma-256", "deepseek-v3-tp8")
