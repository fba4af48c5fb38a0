"""A server's steps launch no kernel that was not compiled before it listens, with picks and drafts of every kind.

Compiles for an absent GPU are recorded instead of done, by the key under which Triton keeps a variant. Nothing runs, so
new memory is zeros: each pick finds token 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.capture import prewarm as capture_prewarm
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.machine.compile_watch import CompileWatch
from rocm_attn.machine.target import known_target
from rocm_attn.models.config import AttentionConfig, LayerConfig
from rocm_attn.models.gates import ReluSquared, SwiGLU
from rocm_attn.models.mlp_config import DenseMlp, NoMlp
from rocm_attn.models.rope import Rope
from rocm_attn.selection import build
from rocm_serve import engine as engine_module
from rocm_serve import engine_runtime
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.offline.offline_driver import launched_offline
from tests.amd.offline.test_prewarm_sizes import Variant, names_of, noted_variants
from tests.amd.runner.tiny_model import CONFIG, RECURRENCE, RECURRENT_LAYER, tiny_model
from tests.amd.runner.wide_model import CONTEXT, wide_model

ARCH = "gfx942"
OPTIONS = EngineOptions(
    provider="triton", page_size=16, max_batch_size=4, chunk=64, graphs=False, max_kv_len=256, num_pages=80
)
DRAWN = Sampling(temperature=1.0, top_p=0.9)
REQUESTS = (
    Request((5, 6, 8), 6, ignore_eos=True),
    Request((5, 6, 8, 9) * 30, 6, ignore_eos=True, sampling=DRAWN),
    Request((7,), 5, ignore_eos=True, sampling=replace(DRAWN, top_k=3, min_p=0.1), logprobs=2),
    Request((9, 9), 5, ignore_eos=True, sampling=replace(DRAWN, presence_penalty=1.0, logit_bias=((3, 1.0),))),
    Request((4, 3, 9, 11), 4, ignore_eos=True, min_tokens=2, prompt_logprobs=1, stop_token_ids=(3,)),
    Request((5, 6, 8, 9) * 30, 3, ignore_eos=True),  # finds the pages of a prompt before it
)


@contextmanager
def on_an_absent_gpu() -> Iterator[None]:
    """While active, engines are built for ARCH, launches are recorded, and no fault of the device is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine_runtime, build):
            patch.setattr(module, "detect_target", lambda device: known_target(ARCH))
        patch.setattr(build, "guards_from_settings", lambda: guards_from_settings().without("echo_check"))
        patch.setattr(Engine, "_check_device", lambda engine: None)
        patch.setattr(torch, "empty", torch.zeros)
        with launched_offline(ARCH):
            yield


def compiled_and_served(
    loaded: LoadedModel, requests: Sequence[Request] = REQUESTS, **changes: Any
) -> tuple[set[Variant], set[Variant]]:
    """Returns the variants that are compiled before an engine is ready, and those of its steps afterwards."""
    compiled, served = set[Variant](), set[Variant]()
    with on_an_absent_gpu():
        engine = Engine(loaded, replace(OPTIONS, **changes))
        with noted_variants(compiled):
            engine.compile_all(lambda done, total, name: None)
        with noted_variants(served):
            for each in requests:  # some meet prompts of others, and some run alone
                engine.submit(each)
                engine.step()
            while engine.has_work:
                engine.step()
            engine.generate(requests[:1])
    return compiled, served


@pytest.mark.parametrize(
    "changes",
    [{}, {"speculative": "ngram", "draft_tokens": 3}, {"speculative": "ngram", "draft_tokens": 3, "topk": 2}],
    ids=str,
)
def test_served_steps_launch_nothing_that_was_not_compiled_before(changes: dict[str, Any]) -> None:
    compiled, served = compiled_and_served(wide_model(dtype=torch.bfloat16), **changes)
    assert names_of(served - compiled) == []
    kernels = {"_extend_kernel", "_pick_rows_kernel", "_cut_rows_kernel", "_likeliest_kernel", "_rope_store_kernel"}
    assert kernels <= set(names_of(served))


def test_neither_do_those_of_a_model_with_recurrent_layers() -> None:
    loaded = wide_model(first=(RECURRENT_LAYER,), dtype=torch.bfloat16)
    compiled, served = compiled_and_served(loaded, speculative="ngram", draft_tokens=3)
    assert names_of(served - compiled) == []
    kernels = {"_state_places_kernel", "_convolve_kernel", "_token_steps_kernel", "_chunk_walk_kernel"}
    assert kernels <= set(names_of(served))


def test_mixers_side_by_side_and_layers_of_one_part_launch_nothing_else() -> None:
    """Layers like Falcon-H1's, and like those of Nemotron-H, whose rows do not turn and whose MLPs have no gate."""
    (mixer,) = wide_model().config.layers[0].mixers
    assert isinstance(mixer, AttentionConfig)
    both = LayerConfig((RECURRENCE, mixer), DenseMlp(40, SwiGLU()))
    alone = LayerConfig((replace(mixer, rope=Rope(1.0, 0)),), NoMlp())
    base = replace(CONFIG, layers=(both, alone, LayerConfig((), DenseMlp(40, ReluSquared()))))
    loaded = tiny_model(base=base, context_len=CONTEXT, dtype=torch.bfloat16)
    compiled, served = compiled_and_served(loaded, speculative="ngram", draft_tokens=3)
    assert names_of(served - compiled) == []
    assert {"_chunk_walk_kernel", "_rope_store_kernel"} <= set(names_of(served))


def test_a_kernel_that_is_left_out_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_prewarm, "_pick", lambda runtime, dtype: None)
    monkeypatch.setattr(capture_prewarm, "_prompts", lambda runtime, most_tokens: ())
    compiled, served = compiled_and_served(wide_model(dtype=torch.bfloat16), REQUESTS[:1])
    assert set(names_of(served - compiled)) == {"_pick_rows_kernel", "_rope_store_kernel"}


@pytest.mark.parametrize("first", [(), (RECURRENT_LAYER,)], ids=["attention", "recurrent"])
def test_prewarming_compiles_the_kernels_of_picks_and_an_engine_those_of_its_model_in_addition(
    first: tuple[LayerConfig, ...],
) -> None:
    loaded = wide_model(first=first, dtype=torch.bfloat16)
    with on_an_absent_gpu():
        runtime = Engine(loaded, OPTIONS).runtime
    ahead = set[Variant]()
    with noted_variants(ahead):
        problems = [selection.problem for selection in runtime.selections]
        capture_prewarm.prewarm(
            problems, runtime.target, runtime.options, runtime.states.recurrent, device=torch.device("cpu")
        )
    _, served = compiled_and_served(loaded)
    assert set(names_of(served - ahead)) == {"_rope_store_kernel"}


def test_compiles_after_the_start_are_counted_and_those_before_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CompileWatch(300.0)
    monkeypatch.setattr(engine_module, "compile_watch", lambda: watch)
    loaded = wide_model(dtype=torch.bfloat16)
    with on_an_absent_gpu():
        engine = Engine(loaded, OPTIONS)
        watch.ended(was_cached=False)
        assert engine.report().metrics.compiles_after_start == 1
        with noted_variants(set()):
            engine.compile_all(lambda done, total, name: None)
        assert engine.report().metrics.compiles_after_start == 0
        watch.ended(was_cached=False)
        watch.ended(was_cached=True)
    assert "rocm_attn_compiles_after_start_total 1\n" in engine.report().metrics.as_prometheus()
