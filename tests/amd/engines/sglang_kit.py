"""SGLang's own attention kit, from its wheel, against our backend. Run by the interpreter of SGLang's environment.

    python -m tests.amd.engines.sglang_kit REQUEST OUT

REQUEST: JSON, names of GROUPS; OUT: receives JSON, group -> Tally
"""

import importlib.util
import json
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

NAME = "rocm_attn"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = "contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend"
_KIT = "sglang.test.kits.attention_unittest"
# Other kinds of attention in the kit, whose kernels no CPU wheel has.
_ABSENT = "gdn", "kda", "lightning", "mamba2", "dsv4", "dsa"

Case = Callable[..., object]


@dataclass
class Tally:
    """Results of a group's cases.

    passed: names; reported: those that differ while our backend reported a fault; failed: name -> reason
    """

    passed: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Kit:
    """The kit's modules, with our backend registered and given the layer that a case makes later."""

    def __init__(self) -> None:
        from sglang.srt.layers.attention import attention_registry
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.backends: list[Any] = []
        # Cases with trees are not marked in the server's arguments.
        self.with_trees = False
        self.graphs_replayed = 0
        attention_registry.ATTENTION_BACKENDS[NAME] = self.create
        if importlib.util.find_spec("datasets") is None:  # the kit takes one function of a module that reads some
            sys.modules["datasets"] = MagicMock()
        for kind in _ABSENT:
            sys.modules[f"{_KIT}.attention_methods.{kind}_attention"] = MagicMock()
        self.dense = self.module("attention_methods.dense_attention")
        self.mla = self.module("attention_methods.mla_attention")
        self.verify = self.module("runner_modes.speculative_target_verify_runner")
        self.graphs = self.module("runner_modes.cuda_graph_decode_runner")
        self.drafts = self.module("runner_modes.speculative_draft_runner")
        self.extended = self.module("runner_modes.speculative_draft_extend_runner")
        # SGLang's backends disagree on the window of decode; ours is that of most of them.
        self.dense._SWA_DECODE_EXTEND_WINDOW |= {NAME}
        self._give_models()
        self._use_rows_after_the_first()
        if DEVICE == "cuda":
            self._replay_in_graphs()

    def create(self, runner: Any) -> Any:
        from rocm_attn.integrations.sglang.backend import RocmAttnBackend, serving_of

        serving = replace(serving_of(runner), with_trees=self.with_trees)
        backend = RocmAttnBackend(runner, serving)
        begin = backend.init_forward_metadata_out_graph

        def begin_without_pads(batch: Any, in_capture: bool = False) -> None:
            # The kit pads graphs with sequences that have rows and pages of their own, or with pads in row 0, which its
            # first sequence uses too. SGLang, whose rows begin at 1, gives the number of pads.
            batch.num_padding = int((batch.req_pool_indices[1:] == 0).sum())
            begin(batch, in_capture)

        backend.init_forward_metadata_out_graph = begin_without_pads  # type: ignore[assignment]
        self.backends.append(backend)
        return backend

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{_KIT}.{name}")

    def _give_models(self) -> None:
        """Gives the kit's runners a model. SGLang's runners have one when their backend is made, the kit's do not."""
        from sglang.srt.layers.radix_attention import RadixAttention

        dense, latent = self.dense.MockModelRunner.__init__, self.mla.MockMLAModelRunner.__init__

        def with_dense(runner: Any, *, case: Any, head_dim: int, **more: Any) -> None:
            dense(runner, case=case, head_dim=head_dim, **more)
            window = -1 if case.sliding_window_size is None else case.sliding_window_size
            runner.model = torch.nn.Module()
            runner.model.attention = RadixAttention(
                case.num_heads, head_dim, head_dim**-0.5, case.num_kv_heads, 0, sliding_window_size=window
            )

        def with_latent(runner: Any, *, case: Any, **more: Any) -> None:
            latent(runner, case=case, **more)
            config, pool = more["model_config"], runner.token_to_kv_pool
            rotated = pool.qk_rope_head_dim
            runner.model = torch.nn.Module()
            runner.model.attention = RadixAttention(
                case.num_heads, pool.kv_lora_rank + rotated, config.scaling, 1, 0, v_head_dim=pool.kv_lora_rank
            )

        self.dense.MockModelRunner.__init__ = with_dense
        self.mla.MockMLAModelRunner.__init__ = with_latent
        configure = self.drafts._configure_runner_for_eagle_draft

        def with_attention(runner: Any, *given: Any, **named: Any) -> None:
            attention = runner.model.attention
            configure(runner, *given, **named)
            runner.model.attention = attention

        for module in (self.drafts, self.extended):
            module._configure_runner_for_eagle_draft = with_attention

    def _use_rows_after_the_first(self) -> None:
        """Moves the rows of SGLang's own runners of a draft model's graphs, which pad with row 0."""
        for kind in ("dense", "mla"):
            prepare = f"_prepare_{kind}_draft_replay_state"
            batch = f"_make_{kind}_eagle_draft_forward_batch"
            setattr(self.drafts, prepare, _moved_by_a_row(getattr(self.drafts, prepare)))
            setattr(self.drafts, batch, _in_the_next_row(getattr(self.drafts, batch)))
            extended = f"_make_{kind}_eagle_draft_extend_v2_forward_batch"
            setattr(self.extended, extended, _moved_with_its_table(getattr(self.extended, extended)))

    def _replay_in_graphs(self) -> None:
        """Runs the fill and the layers of each replay that the kit prepares inside a graph, which is then replayed.

        The kit itself calls them one after the other.
        """
        pending: list[tuple[Any, Any]] = []
        runner = self.module("runner_modes.speculative_cuda_graph_runner")

        def begin_replay(backend: Any, capture_batch_size: int, batch: Any) -> None:
            view = SimpleNamespace(**{**vars(batch), "batch_size": capture_batch_size})
            backend.init_forward_metadata_out_graph(view)
            pending.append((backend, view))

        def in_a_graph(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def replay(fixture: Any, batch: Any, inputs: Any) -> torch.Tensor:
                if not pending:
                    return run(fixture, batch, inputs)
                backend, view = pending.pop()
                backend.init_forward_metadata_in_graph(view)
                run(fixture, batch, inputs)  # compiles; stores what the graph stores again
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    backend.init_forward_metadata_in_graph(view)
                    out = run(fixture, batch, inputs)
                out.fill_(float("nan"))
                graph.replay()
                self.graphs_replayed += 1
                return out

            return replay

        self.graphs._init_cuda_graph_replay_metadata = runner._init_cuda_graph_replay_metadata = begin_replay
        for module in (self.graphs, self.verify, self.extended):
            for name in ("run_dense_forward", "run_mla_forward"):
                setattr(module, name, in_a_graph(getattr(module, name)))

    def dense_cases(self, window: bool) -> Iterator[tuple[str, Case]]:
        dense = self.dense
        made = (
            (*dense.make_swa_no_prefix_input_config_cases(NAME), *dense.make_swa_prefix_input_config_cases(NAME))
            if window
            else dense.make_dense_cases(NAME)
        )
        for layout in LAYOUTS:
            for case in made:
                yield (
                    f"{layout} {case.name}",
                    partial(
                        dense.run_dense_attention_case, unittest.TestCase(), case, device=DEVICE, loc_layout=layout
                    ),
                )

    def verified(self) -> Iterator[tuple[str, Case]]:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        for topk in (1, 2):
            self.with_trees = topk > 1
            for page_size, kv_heads in ((1, 4), (16, 4), (16, 2), (16, 1)):
                for prefix in ((3,), (14, 15, 16), (13, 31)):
                    name = f"topk {topk} page {page_size} kv heads {kv_heads} prefix {prefix}"
                    case = self.dense.DenseAttentionCase(
                        name=name,
                        backend=NAME,
                        forward_mode=ForwardMode.TARGET_VERIFY,
                        num_heads=4,
                        num_kv_heads=kv_heads,
                        page_size=page_size,
                        prefix_lens=prefix,
                        extend_lens=(3,) * len(prefix),
                    )
                    yield (
                        name,
                        partial(
                            self.verify.run_dense_eagle_verify_case, unittest.TestCase(), case, topk=topk, device=DEVICE
                        ),
                    )

    def graphed_drafts(self) -> Iterator[tuple[str, Case]]:
        """Yields cases of drafts that are verified or extended, as in a graph of more sequences."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        dense, latent = self.dense.DenseAttentionCase, self.mla.MLAAttentionCase
        kinds = (
            ("dense", dense, self.verify.run_dense_spec_verify_cuda_graph_case),
            ("latent", latent, self.verify.run_mla_eagle_verify_cuda_graph_case),
        )
        for topk in (1, 2):
            self.with_trees = topk > 1
            for kind, of_kind, run in kinds:
                for page_size in (1, 16):
                    case = _drafts_case(of_kind, ForwardMode.TARGET_VERIFY, page_size)
                    name = f"{kind} verify topk {topk} page {page_size}"
                    yield name, self._in_order(self.verify, partial(run, unittest.TestCase(), case, topk=topk))
        self.with_trees = False
        for style in ("small_real", "prod_fill"):
            for kind, of_kind, run in (
                ("dense", dense, self.extended.run_dense_draft_extend_v2_cuda_graph_case),
                ("latent", latent, self.extended.run_mla_draft_extend_v2_cuda_graph_case),
            ):
                case = _drafts_case(of_kind, ForwardMode.DRAFT_EXTEND_V2, 16)
                name = f"{kind} extend {style}"
                yield name, self._in_order(self.extended, partial(run, unittest.TestCase(), case, pad_style=style))

    def _in_order(self, module: Any, run: Case) -> Case:
        """Returns a case whose tables do not scatter pages: this part of the kit writes prefixes contiguously."""

        def in_order() -> None:
            with ExitStack() as patches:
                for name in ("build_dense_attention_fixture", "build_mla_attention_fixture"):
                    build = partial(getattr(module, name), loc_layout="contiguous")
                    patches.enter_context(patch.object(module, name, build))
                run(device=DEVICE)

        return in_order

    def draft_runners(self) -> Iterator[tuple[str, Case]]:
        """Yields cases of SGLang's own runners of a draft model's graphs, which need a GPU."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.with_trees = False
        dense, latent = self.dense.DenseAttentionCase, self.mla.MLAAttentionCase
        kinds = (
            ("dense", dense, self.drafts.run_dense_eagle_draft_cuda_graph_runner_case),
            ("latent", latent, self.drafts.run_mla_eagle_draft_cuda_graph_runner_case),
        )
        for kind, of_kind, run in kinds:
            for topk, page_size in ((1, 1), (1, 16), (2, 1)):
                case = _drafts_case(of_kind, ForwardMode.DECODE, page_size)
                name = f"{kind} draft topk {topk} page {page_size}"
                yield name, partial(run, unittest.TestCase(), case, topk=topk, device=DEVICE)
        for kind, of_kind, run in (
            ("dense", dense, self.extended.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case),
            ("latent", latent, self.extended.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case),
        ):
            case = _drafts_case(of_kind, ForwardMode.DRAFT_EXTEND_V2, 16)
            yield f"{kind} extend by a runner", self._in_order(self.extended, partial(run, unittest.TestCase(), case))

    def latent_cases(self) -> Iterator[tuple[str, Case]]:
        self.with_trees = False
        for rotated in (0, 16):
            more = {"qk_rope_head_dim": rotated} if rotated else {}
            for layout in LAYOUTS[:3]:
                for case in self.mla.make_mla_cases(NAME):
                    run = partial(self.mla.run_mla_attention_case, unittest.TestCase(), case, device=DEVICE, **more)
                    yield f"{layout} {case.name} rope {rotated}", partial(run, loc_layout=layout)

    def graphed(self) -> Iterator[tuple[str, Case]]:
        """Yields decode cases, begun and filled for a graph of more sequences; the kit runs the layers outside it."""
        self.with_trees = False
        dense, latent = self.dense, self.mla
        windows = (*dense.make_swa_no_prefix_input_config_cases(NAME), *dense.make_swa_prefix_input_config_cases(NAME))
        for case in (*dense.make_dense_cases(NAME), *windows):
            if case.forward_mode.is_decode():
                run = self.graphs.run_dense_cuda_graph_decode_case
                yield case.name, partial(run, unittest.TestCase(), case, device=DEVICE)
        for case in latent.make_mla_cases(NAME):
            if case.forward_mode.is_decode():
                run = self.graphs.run_mla_cuda_graph_decode_case
                yield f"latent {case.name}", partial(run, unittest.TestCase(), case, device=DEVICE)

    def run(self, cases: Iterator[tuple[str, Case]]) -> Tally:
        from rocm_attn.errors import DeviceFault

        tally = Tally()
        for name, case in cases:
            self.backends.clear()
            try:
                case()
                for backend in self.backends:
                    backend.attention.check_device()
                tally.passed.append(name)
            except AssertionError as difference:
                try:
                    for backend in self.backends:
                        backend.attention.check_device()
                    tally.failed[name] = str(difference)
                except DeviceFault:
                    tally.reported.append(name)
            except Exception as error:
                tally.failed[name] = f"{type(error).__name__}: {error}"
        return tally


def _drafts_case(of_kind: Any, forward_mode: Any, page_size: int) -> Any:
    """Returns a case of three sequences around a page's end."""
    prefixes = (14, 15, 16)
    heads = {"num_kv_heads": 2} if "num_kv_heads" in of_kind.__dataclass_fields__ else {}
    return of_kind(
        name=f"{forward_mode.name} page {page_size}",
        backend=NAME,
        forward_mode=forward_mode,
        num_heads=4,
        page_size=page_size,
        prefix_lens=prefixes,
        extend_lens=(1 if forward_mode.is_decode() else 3,) * len(prefixes),
        **heads,
    )


def _moved_by_a_row(prepare: Callable[..., None]) -> Callable[..., None]:
    def prepare_moved(fixture: Any, *given: Any) -> None:
        pool = fixture.runner.req_to_token_pool
        rows = pool.req_to_token
        if not hasattr(pool, "unmoved"):
            pool.unmoved = rows.clone()
        rows.copy_(pool.unmoved)  # it is prepared before a capture, and after it again
        prepare(fixture, *given)
        rows[1:].copy_(rows[:-1].clone())

    return prepare_moved


def _moved_with_its_table(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(fixture: Any, *given: Any) -> Any:
        batch = make(fixture, *given)
        batch.req_pool_indices += 1
        rows = fixture.runner.req_to_token_pool.req_to_token
        rows[1:].copy_(rows[:-1].clone())
        return batch

    return made


def _in_the_next_row(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any) -> Any:
        batch = make(*given)
        batch.req_pool_indices += 1
        return batch

    return made


GROUPS: dict[str, Callable[[Kit], Iterator[tuple[str, Case]]]] = {
    "dense": lambda kit: kit.dense_cases(window=False),
    "window": lambda kit: kit.dense_cases(window=True),
    "verify": Kit.verified,
    "latent": Kit.latent_cases,
    "graphs": Kit.graphed,
    "graphs of drafts": Kit.graphed_drafts,
}
# Groups that need a GPU.
GPU_GROUPS: dict[str, Callable[[Kit], Iterator[tuple[str, Case]]]] = {"runners of drafts": Kit.draft_runners}


def main(groups: list[str]) -> dict[str, Tally]:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    kit = Kit()
    return {name: kit.run((GROUPS | GPU_GROUPS)[name](kit)) for name in groups}


if __name__ == "__main__":
    requested, out = map(Path, sys.argv[1:])
    answer = main(json.loads(requested.read_text()))
    out.write_text(json.dumps({name: asdict(tally) for name, tally in answer.items()}))
