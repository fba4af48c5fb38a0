"""The hooks of the check of states, in classes that stand for SGLang's; steps are begun by our hooks of attention.

The stand-ins follow SGLang 0.5.23: HybridLinearAttnBackend (srt/layers/attention/hybrid_linear_attn_backend.py), and
the methods of MambaPool that carry state along with a slot (srt/mem_cache/memory_pool.py).
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import DeviceFault, Unsupported
from rocm_attn.integrations.state_watch import ALL_NEW
from tests.amd.integrations.modules import install
from tests.amd.integrations.sglang_stand_in import Engine, Graph, Mode, Request

HOOKS = "rocm_attn.integrations.sglang.state_hooks"
REPORT = "a slot that the engine names for a sequence's recurrent state"
NUM_SLOTS = 9
# Sequences of a graph; tokens of a sequence that a step verifies.
MOST_GRAPHED, DRAFTS = 3, 4


class HybridLinearAttnBackend:
    def __init__(self, full_attn_backend: Any, linear_attn_backend: Any, full_attn_layers: list[int]) -> None:
        self.full_attn_backend, self.linear_attn_backend = full_attn_backend, linear_attn_backend
        self.req_to_token_pool = full_attn_backend.req_to_token_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in (self.full_attn_backend, self.linear_attn_backend):
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        for backend in (self.full_attn_backend, self.linear_attn_backend):
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.full_attn_backend.init_forward_metadata_in_graph(forward_batch)

    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices: Any, mamba_track_indices: Any, mamba_steps_to_track: Any, model: Any
    ) -> None:
        """Copies states after drafts; none are here."""

    def init_cpu_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise AssertionError("graphs are refused before")

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> None:
        raise AssertionError("graphs are refused before")


class GDNAttnBackend:
    """Names the slots that it was given. A state is read in each step."""

    is_draft_worker = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.slots, self.tracked = device, list[int](), list[int]()
        self.forward_metadata: Any = None
        self.static = torch.full((MOST_GRAPHED,), -1, dtype=torch.int32, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Names slots in memory that does not move; -1 for pads, which stand for rows without a request."""
        slots = [] if in_capture else self.slots
        self.static.copy_(torch.tensor(slots + [-1] * (MOST_GRAPHED - len(slots))))
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=self.static, mamba_track_indices=None)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.forward_metadata = SimpleNamespace(
            mamba_cache_indices=ints(self.slots),
            mamba_track_indices=ints(self.tracked).long() if self.tracked else None,
        )


class Mamba2AttnBackend(GDNAttnBackend):
    """Says whose states are read."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        is_prompt = forward_batch.forward_mode is Mode.EXTEND
        has = forward_batch.seq_lens != forward_batch.extend_seq_lens
        self.forward_metadata.mixed_metadata = SimpleNamespace(has_initial_states=has) if is_prompt else None
        self.forward_metadata.num_prefills = len(has) if is_prompt else 0


class MambaPool:
    """Clears and copies what was registered with its slots."""

    def __init__(self) -> None:
        states = {"temporal": torch.zeros(1, NUM_SLOTS), "intermediate_ssm": torch.zeros(1, MOST_GRAPHED, DRAFTS)}
        self.mamba_cache = SimpleNamespace(**states, replayssm_d=None)
        self.siblings = list[Any]()

    def register_slot_state(self, state: Any) -> None:
        self.siblings.append(state)

    def clear_slots(self, *slots: int) -> None:
        for each in self.siblings:
            each.reset_slots(torch.tensor(slots, dtype=torch.int32))

    def copy_from(self, source: int, target: int) -> None:
        for each in self.siblings:
            each.copy_slots(torch.tensor([source]), torch.tensor([target]))

    def to_host_and_back(self, source: int, target: int) -> None:
        for each in self.siblings:
            each.load_cpu_slots(each.get_cpu_slots(torch.tensor([source])), torch.tensor([target]))


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's modules as far as the hooks read them, and the module of the hooks."""
    settings = SimpleNamespace(
        pp_size=1,
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
        features=SimpleNamespace(enable_mis=False),
        enable_hierarchical_cache=False,
        disaggregation_mode="null",
    )
    backend = type("HybridLinearAttnBackend", (HybridLinearAttnBackend,), dict(vars(HybridLinearAttnBackend)))
    getters = ("get_disagg", "get_exec", "get_memory", "get_parallel")
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.layers.attention.hybrid_linear_attn_backend": {"HybridLinearAttnBackend": backend},
        "sglang.srt.runtime_context": dict.fromkeys(getters, lambda: settings),
    }
    install(monkeypatch, modules)
    monkeypatch.delitem(sys.modules, HOOKS, raising=False)
    hooks = importlib.import_module(HOOKS)
    for _ in range(2):
        hooks.watch()
    yield SimpleNamespace(backend=backend, settings=settings)
    sys.modules.pop(HOOKS, None)
    vars(importlib.import_module("rocm_attn.integrations.sglang")).pop("state_hooks", None)


class Hybrid:
    """An engine with a layer of attention and recurrent ones that keep no state: only their slots are named."""

    def __init__(
        self, sglang: Any, provider: str, device: torch.device, kind: type = GDNAttnBackend, **more: Any
    ) -> None:
        self.engine, self.recurrent, self.states = Engine(provider, device, **more), kind(device), MambaPool()
        pool = self.engine.runner.req_to_token_pool
        pool.mamba_pool, pool.mamba_ckpt_pool = self.states, None
        self.backend = sglang.backend(self.engine.hooks, self.recurrent, [0])
        self.ids = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0)).to(device)

    def step(
        self, requests: Sequence[Request], new: Sequence[int], slots: list[int], mode: Mode = Mode.EXTEND, **more: Any
    ) -> None:
        """Begins a step and runs its layer. more: fields of the batch"""
        self.recurrent.slots = slots
        if mode is Mode.EXTEND and max(new) == 1 and requests[0].kv_len:
            mode = Mode.DECODE
        given = {"input_ids": self.ids, "mamba_track_mask": None, **more}
        step = self.engine.step_of(self.engine.batch(mode, requests, new, **given), new)
        self.backend.init_forward_metadata(step.batch)
        self.engine.forward(step)
        self.engine.keep(requests, step)

    def capture(self, width: int, mode: Mode) -> Callable[[Sequence[Request], list[int]], None]:
        """Returns a function that runs steps of a graph: of requests, with these slots."""
        self.engine.hooks.init_cuda_graph_state(MOST_GRAPHED, MOST_GRAPHED * DRAFTS)
        batch: dict[str, Any] = {"input_ids": self.ids, "mamba_track_mask": None}
        graph = Graph(self.engine, MOST_GRAPHED, width=width, mode=mode, backend=self.backend, **batch)

        def run(requests: Sequence[Request], slots: list[int]) -> None:
            self.recurrent.slots = slots
            graph.replay(requests)

        return run

    def accept(self, requests: Sequence[Request], counts: list[int], tracked: tuple[list[int], list[int]]) -> None:
        """Takes drafts back: of each request's last DRAFTS tokens a number stays. tracked: slots, and their drafts"""
        last, *others = (self.engine.ints(each) for each in ([count - 1 for count in counts], *tracked))
        self.backend.update_mamba_state_after_mtp_verify(last, *others, model=None)
        for request, count in zip(requests, counts, strict=True):
            request.kv_len -= DRAFTS - count

    def check(self) -> None:
        self.engine.hooks.attention.check_device()

    def is_reported(self) -> bool:
        """True if a step since the last call was reported for its states."""
        try:
            self.check()
        except DeviceFault as fault:
            said = str(fault)
        else:
            return False
        return REPORT in said


@pytest.mark.parametrize("kind", [GDNAttnBackend, Mamba2AttnBackend])
def test_steps_are_checked_and_a_wrong_slot_is_reported(
    kind: type, sglang: Any, provider: str, device: torch.device
) -> None:
    hybrid = Hybrid(sglang, provider, device, kind)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    hybrid.states.clear_slots(3, 4)
    hybrid.step([one, two], [5, 9], [3, 4])
    hybrid.step([one, two], [1, 1], [3, 4])
    hybrid.step([one, two], [4, 2], [3, 4])  # the next chunks of their prompts
    hybrid.check()
    hybrid.step([one, two], [1, 1], [4, 3])
    assert hybrid.is_reported()
    hybrid.step([one, two], [1, 1], [3, 4])  # what follows from a wrong state
    assert hybrid.is_reported()


@pytest.mark.parametrize("kind", [GDNAttnBackend, Mamba2AttnBackend])
def test_a_slot_that_was_not_cleared_is_reported_if_layers_read_it(
    kind: type, sglang: Any, provider: str, device: torch.device
) -> None:
    hybrid = Hybrid(sglang, provider, device, kind)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    hybrid.step([one], [5], [3])  # the memory of a slot is zeroes at first
    hybrid.states.clear_slots(3)
    hybrid.step([two], [5], [3])
    hybrid.check()
    hybrid.step([hybrid.engine.admit()], [5], [3])
    assert hybrid.is_reported() == (kind is GDNAttnBackend)


def test_a_state_goes_with_copies_and_over_the_host(sglang: Any, provider: str, device: torch.device) -> None:
    """A prefix that two requests share: each has a copy of the state, in a slot of its own."""
    hybrid = Hybrid(sglang, provider, device)
    one = hybrid.engine.admit()
    hybrid.step([one], [5], [3])
    hybrid.states.copy_from(3, 5)
    hybrid.states.to_host_and_back(3, 6)
    for slot in (5, 6, 3):
        hybrid.step([one], [1], [slot])
        one.kv_len -= 1
        hybrid.check()
    hybrid.step([one], [1], [7])  # the copy was lost
    assert hybrid.is_reported()


@pytest.mark.parametrize("graphed", [False, True])
def test_a_slot_has_the_state_after_the_drafts_that_were_accepted(
    graphed: bool, sglang: Any, provider: str, device: torch.device
) -> None:
    """Steps of drafts, whose states are kept by their counts; in the radix cache too, for a second request."""
    hybrid = Hybrid(sglang, provider, device)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    replay = hybrid.capture(DRAFTS, Mode.TARGET_VERIFY) if graphed else None

    def verify(requests: Sequence[Request], slots: list[int]) -> None:
        if replay is None:
            hybrid.step(requests, [DRAFTS] * len(requests), slots, Mode.TARGET_VERIFY)
        else:
            replay(requests, slots)

    hybrid.step([one, two], [5, 9], [3, 4])
    for counts, at in (([2, 4], [0, -1]), ([1, 3], [-1, -1])):
        verify([one, two], [3, 4])
        hybrid.accept([one, two], counts, ([6, 7], at))
    hybrid.step([one, two], [1, 1], [3, 4])
    hybrid.check()
    one.kv_len = 6  # the first draft
    hybrid.step([one], [1], [6])
    hybrid.check()
    verify([two, one], [4, 6])
    hybrid.accept([one, two], [1, 2], ([], []))  # counts that were mixed up
    hybrid.step([two, one], [1, 1], [4, 6])
    assert hybrid.is_reported()


def test_drafts_after_a_wrong_state_are_reported_and_what_was_kept_of_them_too(
    sglang: Any, provider: str, device: torch.device
) -> None:
    hybrid = Hybrid(sglang, provider, device)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    hybrid.step([one, two], [5, 9], [3, 4])
    hybrid.step([one, two], [DRAFTS] * 2, [4, 3], Mode.TARGET_VERIFY)
    assert hybrid.is_reported()
    hybrid.accept([one, two], [1, 1], ([], []))
    hybrid.step([one, two], [1, 1], [3, 4])
    assert hybrid.is_reported()


def test_a_captured_decode_is_checked_in_each_replay(sglang: Any, provider: str, device: torch.device) -> None:
    hybrid = Hybrid(sglang, provider, device)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    replay = hybrid.capture(1, Mode.DECODE)
    hybrid.step([one, two], [5, 9], [3, 4])
    replay([one, two], [3, 4])
    replay([two], [4])
    replay([two, one], [4, 3])
    hybrid.check()
    replay([one, two], [4, 3])
    assert hybrid.is_reported()


def test_the_attention_of_a_draft_model_has_no_states(sglang: Any, provider: str, device: torch.device) -> None:
    hybrid = Hybrid(sglang, provider, device, type("GDNAttnBackend", (GDNAttnBackend,), {"is_draft_worker": True}))
    assert not hybrid.states.siblings
    hybrid.step([hybrid.engine.admit()], [5], [3])
    hybrid.accept([], [], ([], []))
    hybrid.check()


def test_states_that_a_radix_cache_tracks_are_those_after_whole_chunks_and_after_a_decode(
    sglang: Any, provider: str, device: torch.device
) -> None:
    hybrid = Hybrid(sglang, provider, device)
    one, two = hybrid.engine.admit(), hybrid.engine.admit()
    hybrid.recurrent.tracked = [6, 7]
    mask = torch.tensor([True, False], device=device)
    chunks = torch.tensor([4, 99], device=device)
    hybrid.step([one, two], [6, 6], [3, 4], mamba_track_mask=mask, mamba_track_aligned_lens=lambda: chunks)
    one.kv_len = 4
    hybrid.step([one], [2], [6], mamba_track_mask=None)
    hybrid.check()
    hybrid.step([one, two], [1, 1], [6, 4], mamba_track_mask=mask.flip(0), mamba_track_aligned_lens=lambda: None)
    hybrid.step([two], [1], [7], mamba_track_mask=None)
    hybrid.check()
    one.kv_len = 4
    hybrid.step([one], [1], [6], mamba_track_mask=None)  # six tokens and more are in it by now
    assert hybrid.is_reported()


def test_a_slot_for_a_state_that_is_not_tracked_keeps_what_it_has(
    sglang: Any, provider: str, device: torch.device
) -> None:
    hybrid = Hybrid(sglang, provider, device)
    one = hybrid.engine.admit()
    hybrid.recurrent.tracked = [6]
    off, chunk = torch.tensor([False], device=device), torch.tensor([4], device=device)
    hybrid.step([one], [6], [3], mamba_track_mask=off, mamba_track_aligned_lens=lambda: chunk)
    hybrid.check()
    one.kv_len = 4
    hybrid.step([one], [2], [6])
    assert hybrid.is_reported()


def test_a_step_without_sequences_is_not_checked(sglang: Any, provider: str, device: torch.device) -> None:
    hybrid = Hybrid(sglang, provider, device)
    idle = SimpleNamespace(forward_mode=Mode.IDLE, batch_size=0)
    hybrid.engine.hooks.init_forward_metadata = hybrid.recurrent.init_forward_metadata = lambda _: None  # type: ignore[method-assign]
    hybrid.backend.init_forward_metadata(idle)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"overlap": SimpleNamespace(enable_two_batch_overlap=True)}, "two halves of a batch that overlap"),
        ({"features": SimpleNamespace(enable_mis=True)}, "several items scored in a prompt"),
        ({"enable_hierarchical_cache": True}, "a hierarchical cache"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
    ],
)
def test_what_is_not_followed_is_refused(change: dict[str, Any], words: str, sglang: Any, device: torch.device) -> None:
    vars(sglang.settings).update(change)
    with pytest.raises(Unsupported, match=f"ROCM_ATTN_WATCH_STATES is 1 and SGLang runs with {words}; unset it"):
        Hybrid(sglang, "torch", device)


def test_other_layers_and_graphs_are_refused(sglang: Any, device: torch.device) -> None:
    kda = type("KDAAttnBackend", (GDNAttnBackend,), {})
    with pytest.raises(Unsupported, match="the model's recurrent layers run on KDAAttnBackend"):
        Hybrid(sglang, "torch", device, kda)
    hybrid = Hybrid(sglang, "torch", device)
    other = SimpleNamespace(req_to_token_pool=None)
    with pytest.raises(Unsupported, match="its attention runs on SimpleNamespace"):
        sglang.backend(other, hybrid.recurrent, [0])
    for prepare in ("init_cpu_graph_state", "init_forward_metadata_for_breakable_cuda_graph_capture"):
        with pytest.raises(Unsupported, match="SGLang captures graphs of prompts, or on a CPU"):
            getattr(hybrid.backend, prepare)(None)
    with pytest.raises(Unsupported, match="SGLang runs with trees of drafts"):
        Hybrid(sglang, "torch", device, with_trees=True)


def test_folded_tokens_of_slots(sglang: Any) -> None:
    """A step's slots by themselves: pads name no slot, and a sequence's own slot takes all of its tokens."""
    from rocm_attn.integrations.sglang.state_slots import slots_of

    metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 4], dtype=torch.int32), mamba_track_indices=None)
    batch = SimpleNamespace(mamba_track_mask=None, forward_mode=Mode.EXTEND)
    slots = slots_of(metadata, batch, 4, torch.zeros(0, 0))
    assert slots.read.tolist() == [3, 4, 0, 0]
    assert slots.written.tolist() == [[3], [4], [0], [0]]
    assert slots.folded.flatten().tolist()[:2] == [ALL_NEW, ALL_NEW]
