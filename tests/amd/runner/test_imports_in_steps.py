"""A request waits for no module: all that steps need is imported when an engine is made."""

from tests.amd.forked import run_forked

SERVE = """
import sys
from rocm_serve.engine import Engine
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.runner.tiny_model import tiny_model

drawn = Sampling(temperature=0.8, top_p=0.9, top_k=5, presence_penalty=0.5, repetition_penalty=1.2)
options = EngineOptions(max_batch_size=4, chunk=16, max_kv_len=90, capture_after=0)
with_drafts = EngineOptions(max_batch_size=4, chunk=16, max_kv_len=90, capture_after=0, speculative="ngram")
for options in (options, with_drafts):
    engine = Engine(tiny_model(), options)
    engine.capture_all(lambda *_: None)
    before = set(sys.modules)
    for sampling in (Sampling(), drawn):
        requests = [Request(tuple(range(i, i + 40)), 8, sampling, logprobs=2) for i in range(6)]
        for _ in range(2):  # the second time over cached pages
            last = engine.generate(requests)
    assert all(each.cached_tokens > 0 for each in last)
    print(sorted(set(sys.modules) - before))
"""


def test_steps_import_nothing() -> None:
    served = run_forked(SERVE)
    assert (served.returncode, served.stdout) == (0, "[]\n[]\n"), served.stderr
