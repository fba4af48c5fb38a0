"""SGLang's models with an encoder: text after its encoder's slots, and cross attention.

Pools and batches are stand-ins. Every output is compared with a reference that shares no code with the project; the
pool is NaN where nothing was stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadBatch, DeviceFault, Unsupported
from rocm_attn.integrations.sglang.encoded import EncodedHooks
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from tests.amd.integrations import sglang_stand_in
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.integrations.sglang_stand_in import (
    DIM,
    KV_HEADS,
    NAN,
    Q_HEADS,
    ROOM,
    TOLERANCE,
    Mode,
    RadixAttention,
    WindowPool,
)

TEXT, CROSS, ENCODER = 0, 1, 2


@dataclass
class Request:
    """A request: its row, the rows of its encoder, and the tokens of its text."""

    row: int
    encoded: int
    kv_len: int = 0
    is_encoded: bool = False


class Engine:
    """A decoder of one layer over text and one of cross attention, after an encoder that calls no backend."""

    def __init__(self, provider: str, device: torch.device, *, serve: bool = True, **of_cross: Any) -> None:
        plain = sglang_stand_in.Engine(provider, device, page_size=1, windows=(-1, -1), serve=False)
        self.device, self.table, self.free, self.rows = device, plain.table, plain.free, plain.rows
        self.ints, self.random_rows = plain.ints, plain.random_rows
        self.layers: list[Any] = [*plain.layers]
        for name, value in {"is_cross_attention": True, **of_cross}.items():
            setattr(self.layers[CROSS], name, value)
        block = nn.Module()
        block.attn = RadixAttention(ENCODER, attn_type=SimpleNamespace(value="encoder_only"))
        plain.model.add_module(f"block{ENCODER}", block)
        self.runner, self.serving = plain.runner, plain.serving
        self.stored: dict[tuple[int, int], tuple[Any, Any]] = {}
        if serve:
            self.hooks = EncodedHooks(self.runner, self.serving)

    def admit(self, encoded: int) -> Request:
        """Returns a request whose encoder makes this many rows, with slots for as much text as there is room for."""
        request = Request(self.rows.pop(0), encoded)
        self.table[request.row] = torch.tensor([self.free.pop() for _ in range(ROOM)]).int().to(self.device)
        return request

    def batch(self, mode: Mode, requests: Sequence[Request], new: Sequence[int]) -> Any:
        """Returns a ForwardBatch. Lengths and slots of text are those after the encoder."""
        lens = [request.kv_len + count for request, count in zip(requests, new, strict=True)]
        slots, encoder_slots = [], []
        for request, length, count in zip(requests, lens, new, strict=True):
            row = self.table[request.row].tolist()
            slots += row[request.encoded + length - count : request.encoded + length]
            encoder_slots += [] if request.is_encoded else row[: request.encoded]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=self.ints([request.row for request in requests]),
            seq_lens=self.ints(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=self.ints(slots),
            extend_seq_lens=self.ints(new).int(),
            extend_seq_lens_cpu=list(new),
            encoder_lens=self.ints([request.encoded for request in requests]),
            encoder_lens_cpu=[request.encoded for request in requests],
            encoder_out_cache_loc=self.ints(encoder_slots),
            spec_info=None,
            mm_inputs=None,
        )

    def store(self, layer: int, request: Request, k: Tensor, v: Tensor) -> None:
        before = self.stored.get((layer, request.row), (k[:0].double().cpu().numpy(),) * 2)
        rows = (each.double().cpu().numpy() for each in (k, v))
        self.stored[layer, request.row] = tuple(  # type: ignore[assignment]  # two of them
            np.concatenate([old, fresh]) for old, fresh in zip(before, rows, strict=True)
        )

    def run(self, mode: Mode, requests: Sequence[Request], new: Sequence[int]) -> None:
        batch = self.batch(mode, requests, new)
        self.hooks.init_forward_metadata(batch)
        q, k, v = (self.random_rows(sum(new), heads, DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        encoded = [0 if request.is_encoded else request.encoded for request in requests]
        of_encoders = [self.random_rows(sum(encoded), KV_HEADS, DIM) for _ in range(2)] if sum(encoded) else [None] * 2
        call: Any = self.hooks.forward_decode if mode is Mode.DECODE else self.hooks.forward_extend
        text = call(q, k, v, self.layers[TEXT], batch)
        crossed = call(q, *of_encoders, self.layers[CROSS], batch)
        first = 0
        for request, rows in zip(requests, encoded, strict=True):
            if rows:
                self.store(CROSS, request, *(each[first : first + rows] for each in of_encoders if each is not None))
            request.is_encoded, first = True, first + rows
        self.keep(requests, new, k, v)
        self.compare(requests, new, q, text, crossed)

    def keep(self, requests: Sequence[Request], new: Sequence[int], k: Tensor, v: Tensor) -> None:
        for request, rows, values in zip(requests, *(torch.split(each, list(new)) for each in (k, v)), strict=True):
            self.store(TEXT, request, rows, values)
            request.kv_len += len(rows)

    def compare(
        self, requests: Sequence[Request], new: Sequence[int], q: Tensor, text: Tensor, crossed: Tensor
    ) -> None:
        for number, out in ((TEXT, text), (CROSS, crossed)):
            first = 0
            for request, count in zip(requests, new, strict=True):
                here = slice(first, first + count)
                nothing = np.zeros((0, KV_HEADS, DIM))
                kv = self.stored.get((number, request.row), (nothing, nothing))
                queries = q[here].double().cpu().numpy()
                want, _ = attention(queries, *kv, Scores(self.layers[number].scaling, causal=number == TEXT))
                found = out.view(-1, Q_HEADS, DIM)[here].double().cpu().numpy()
                assert np.allclose(found, want, atol=TOLERANCE, rtol=TOLERANCE), f"layer {number}, row {request.row}"
                first += count


@pytest.fixture
def engine(provider: str, device: torch.device) -> Engine:
    return Engine(provider, device)


def test_texts_are_read_after_their_encoders_and_see_all_of_them(engine: Engine) -> None:
    """A prompt is longer than its encoder, one comes in parts, and one has none."""
    one, two, none = (engine.admit(rows) for rows in (13, 5, 0))
    engine.run(Mode.EXTEND, [one, two], [7, 9])
    engine.run(Mode.EXTEND, [two, none], [4, 3])
    engine.run(Mode.MIXED, [none, one, two], [1, 5, 1])
    for batch in ([two, one], [none, two, one], [one]):
        engine.run(Mode.DECODE, batch, [1] * len(batch))
    idle: Any = SimpleNamespace(forward_mode=Mode.IDLE, batch_size=0)
    engine.hooks.init_forward_metadata(idle)
    for hooks in (engine.hooks, engine.hooks.crossing):
        hooks.attention.check_device()


def test_an_encoder_with_nan_is_reported(engine: Engine) -> None:
    one = engine.admit(13)
    batch = engine.batch(Mode.EXTEND, [one], [7])
    engine.hooks.init_forward_metadata(batch)
    q, k, v = engine.random_rows(7, Q_HEADS, DIM), *(engine.random_rows(13, KV_HEADS, DIM) for _ in range(2))
    v[4, 0, 3] = NAN
    assert not engine.hooks.forward_extend(q, k, v, engine.layers[CROSS], batch).isnan().any()
    with pytest.raises(DeviceFault, match="K or V of a new token was infinite or NaN"):
        engine.hooks.crossing.attention.check_device()


def test_a_row_that_goes_to_another_request_is_read_after_the_new_encoder(engine: Engine) -> None:
    one, two = engine.admit(9), engine.admit(3)
    engine.run(Mode.EXTEND, [one, two], [4, 2])
    engine.rows.insert(0, one.row)
    engine.stored.clear()
    again = engine.admit(2)
    assert again.row == one.row
    engine.run(Mode.EXTEND, [again], [6])
    engine.run(Mode.DECODE, [again], [1])


def test_a_captured_decode_serves_any_texts_and_encoders(engine: Engine) -> None:
    """SGLang leaves lengths of encoders in padded entries, and captures with some."""
    one, two, three = (engine.admit(rows) for rows in (13, 6, 21))
    engine.run(Mode.EXTEND, [one, two, three], [7, 2, 5])
    hooks, bucket = engine.hooks, 4
    hooks.init_cuda_graph_state(bucket, bucket)
    fill = hooks.get_cuda_graph_seq_len_fill_value()
    q, k, v = (torch.full((bucket, heads, DIM), NAN, device=engine.device) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    static: Any = SimpleNamespace(
        forward_mode=Mode.DECODE,
        batch_size=bucket,
        req_pool_indices=engine.ints([0] * bucket),
        seq_lens=engine.ints([fill] * bucket),
        seq_lens_cpu=None,
        out_cache_loc=engine.ints([0] * bucket),
        encoder_lens=engine.ints([ROOM // 2] * bucket),
        encoder_out_cache_loc=None,
        spec_info=None,
    )
    hooks.init_forward_metadata_out_graph(static, in_capture=True)
    outs: list[Tensor] = []

    def body() -> None:
        hooks.init_forward_metadata_in_graph(static)
        outs[:] = [
            hooks.forward_decode(q, k, v, engine.layers[TEXT], static),
            hooks.forward_decode(q, None, None, engine.layers[CROSS], static),
        ]

    recording, _ = recorder_for(engine.device).record(body)
    for says_padding in (True, False):
        for requests in ([two, one], [three, two, one], [one]):
            count = len(requests)
            raw = engine.batch(Mode.DECODE, requests, [1] * count)
            for name, pad in (("req_pool_indices", 0), ("seq_lens", fill), ("out_cache_loc", 0)):
                getattr(static, name)[:count] = getattr(raw, name)
                getattr(static, name)[count:] = pad
            static.encoder_lens[:count] = raw.encoder_lens
            for each, heads in ((q, Q_HEADS), (k, KV_HEADS), (v, KV_HEADS)):
                each.fill_(NAN)[:count] = engine.random_rows(count, heads, DIM)
            view: Any = SimpleNamespace(**vars(static))
            if says_padding:
                view.num_padding = bucket - count
            hooks.init_forward_metadata_out_graph(view)
            recording.replay()
            engine.keep(requests, [1] * count, k[:count], v[:count])
            engine.compare(requests, [1] * count, q, *outs)
            assert all((out[count:] == 0).all() for out in outs)
    for of_layer in (hooks, hooks.crossing):
        of_layer.attention.check_device()


def test_a_text_that_is_stored_elsewhere_than_after_its_encoder_is_reported(engine: Engine) -> None:
    one = engine.admit(5)
    engine.run(Mode.EXTEND, [one], [4])
    batch = engine.batch(Mode.DECODE, [one], [1])
    batch.encoder_lens += 1  # the slot is then that of the token before
    engine.hooks.init_forward_metadata(batch)
    with pytest.raises(DeviceFault, match="slot"):
        engine.hooks.attention.check_device()


def test_drafts_windows_without_distances_and_pools_of_windows_are_refused(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device, serve=False)
    for serving in (replace(engine.serving, draft_tokens=4), replace(engine.serving, with_trees=True)):
        with pytest.raises(Unsupported, match="drafts for a model with an encoder are not served"):
            EncodedHooks(engine.runner, serving)
    with pytest.raises(Unsupported, match=r"layer 1: cross attention with a window of 7 keys, .* is not served"):
        Engine(provider, device, sliding_window_size=7)
    engine.layers[TEXT].sliding_window_size = 5
    engine.runner.token_to_kv_pool = WindowPool([5, -1], 32, torch.float32, device, DIM)
    with pytest.raises(Unsupported, match="a pool of its own for layers with a window is not served"):
        EncodedHooks(engine.runner, engine.serving)


def test_a_model_that_has_an_encoder_and_does_not_say_so_is_refused(provider: str, device: torch.device) -> None:
    engine = Engine(provider, device, serve=False)
    with pytest.raises(Unsupported, match="layer 1: cross attention in a model that SGLang does not call an encoder"):
        AttentionHooks(engine.runner, engine.serving)


def test_a_table_with_gaps_and_a_batch_without_lengths_of_encoders_are_refused(engine: Engine) -> None:
    one = engine.admit(3)
    batch = engine.batch(Mode.EXTEND, [one], [2])
    batch.encoder_lens = None
    with pytest.raises(BadBatch, match="has no encoder_lens"):
        engine.hooks.init_forward_metadata(batch)
    engine.runner.req_to_token_pool.req_to_token = engine.table[:, : ROOM // 2]
    with pytest.raises(Unsupported, match="rows without gaps are needed"):
        EncodedHooks(engine.runner, engine.serving)
