"""Decoders that attend to an encoder's K and V, too: Whisper, and Llama 3.2 with images.

SGLang's table has the slots of a request's encoder first, and those of its text after them. So the layers of a model
are served by two ExternalAttention:

    layers over text     read each row from the end of its encoder on; steps are those of a model without an encoder
    cross attention      read each row from its beginning; a step's tokens see all that was stored of their encoder
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rocm_attn.capture.engine_kernels import run_nothing
from rocm_attn.errors import BadBatch, Unsupported
from rocm_attn.integrations.encoder_rows import store_at_slots
from rocm_attn.integrations.sglang.geometry import ModelLayer, layers_with_pages, of_text
from rocm_attn.integrations.sglang.hooks import AttentionHooks, Serving
from rocm_attn.integrations.sglang.seen import ForwardBatchView, RadixAttentionView, Runner
from rocm_attn.paging.adopted import CsrSource, Source
from rocm_attn.paging.index_spaces import Space
from rocm_attn.truth.adopted import try_nothing


class TextRows:
    """The part of SGLang's table that has the slots of texts: a list per row, from the end of its encoder on.

    table: int32 [rows, width], slots
    """

    def __init__(self, table: Tensor) -> None:
        if not table.is_contiguous():
            raise Unsupported(
                f"the table of slots has strides {table.stride()}; rows without gaps are needed to read texts after "
                "their encoders"
            )
        self._table = table
        with torch.inference_mode(False):
            self._row_at = torch.arange(table.shape[0] + 1, dtype=torch.int64, device=table.device) * table.shape[1]
            self._text_at = self._row_at.clone()

    @property
    def source(self) -> CsrSource:
        """The lists. A list ends no earlier than its row of the table."""
        return CsrSource(self._text_at, self._table.view(-1), null_page=True)

    def begin_at(self, rows: Tensor, encoder_lens: Tensor) -> None:
        """Makes the lists of rows begin after as many slots. rows, encoder_lens: integers [n], on the device"""
        rows = rows.long()
        self._text_at.index_copy_(0, rows, self._row_at[rows] + encoder_lens)


class EncodedHooks(AttentionHooks):
    """AttentionHooks for a model with an encoder: serves the layers over text, and hands cross attention on.

    crossing: the hooks of cross attention

    Raises Unsupported for drafts and for pages of several tokens, and as AttentionHooks does.
    """

    def __init__(self, runner: Runner, serving: Serving) -> None:
        if serving.draft_tokens or serving.with_trees:
            raise Unsupported("drafts for a model with an encoder are not served; serve it without a draft model")
        if runner.page_size > 1:
            raise Unsupported(
                f"pages have {runner.page_size} tokens, and SGLang finds a new token's place in its page by the text "
                "without the encoder, so that it may be another token's; use --page-size 1"
            )
        self._text_rows = TextRows(runner.req_to_token_pool.req_to_token)
        super().__init__(runner, serving)
        self.crossing = CrossHooks(runner, replace(serving, tried=try_nothing, ran_ahead=run_nothing))

    def _served(self, runner: Runner) -> list[ModelLayer]:
        # The layers of encoders that SGLang has store nothing and call no backend.
        return [each for each in layers_with_pages(runner, self._serving.layer_type) if of_text(each.layer)]

    def _sources(self) -> dict[Space, Source]:
        sources = super()._sources()
        if set(sources) != {Space.FULL}:
            raise Unsupported("a pool of its own for layers with a window is not served in a model with an encoder")
        return {Space.FULL: self._text_rows.source}

    def init_forward_metadata(self, forward_batch: ForwardBatchView) -> None:
        """Begins an eager step of both. Raises the errors of ExternalAttention.begin and fill."""
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            return
        self._find_texts(forward_batch)
        super().init_forward_metadata(forward_batch)
        self.crossing.begin_eager(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *more: object, **named: object) -> None:
        """Fixes the memory that graphs read, of both. Raises NeverFits."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *more, **named)
        self.crossing.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatchView, in_capture: bool = False) -> None:
        """Begins a step of both outside of its graph, before its capture and each replay."""
        self._find_texts(forward_batch)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.crossing.init_forward_metadata_out_graph(_OverEncoders(forward_batch), in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatchView) -> None:
        """Fills a step of both; captured in its graph before its layers."""
        super().init_forward_metadata_in_graph(forward_batch)
        self.crossing.fill(None)

    def _run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttentionView, *call: Any) -> Tensor:
        if layer.is_cross_attention:
            return self.crossing._run(q, k, v, layer, *call)
        return super()._run(q, k, v, layer, *call)

    def _find_texts(self, batch: ForwardBatchView) -> None:
        rows = batch.req_pool_indices[: batch.batch_size]
        self._text_rows.begin_at(rows, _encoder_lens(batch)[: batch.batch_size])


class CrossHooks(AttentionHooks):
    """AttentionHooks of the layers that attend to an encoder's K and V. Their lengths are those of encoders."""

    SHORT_KV: ClassVar[bool] = True

    def _served(self, runner: Runner) -> list[ModelLayer]:
        found = layers_with_pages(runner, self._serving.layer_type)
        return [each for each in found if each.layer.is_cross_attention]

    def begin_eager(self, batch: ForwardBatchView) -> None:
        """Begins and fills an eager step."""
        step = self._steps.eager(_OverEncoders(batch))
        if step is not None:
            self.begin(step, None)

    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttentionView,
        batch: ForwardBatchView,
        saves: bool,
        more: dict[str, Any],
    ) -> Tensor:
        """Stores K and V of encoders that are new in the step, and returns the attention of its tokens."""
        slots = batch.encoder_out_cache_loc
        if saves and k is not None and v is not None and slots is not None and len(slots):
            heads, place = layer.tp_k_head_num, self._place(layer)
            k, v = k.view(-1, heads, layer.qk_head_dim), v.view(-1, heads, layer.v_head_dim)
            store_at_slots(self.attention, place, k, v, slots)
        return super()._run(q, None, None, layer, batch, False, more)


class _OverEncoders:
    """A batch with the lengths of its encoders in place of those of its texts. Everything else is the batch's."""

    def __init__(self, batch: ForwardBatchView) -> None:
        self._batch, self.seq_lens = batch, _encoder_lens(batch)
        on_host: Sequence[int] | None = getattr(batch, "encoder_lens_cpu", None)
        self.seq_lens_cpu = None if on_host is None else torch.tensor(on_host)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def _encoder_lens(batch: ForwardBatchView) -> Tensor:
    if batch.encoder_lens is None:
        raise BadBatch("a batch of a model with an encoder has no encoder_lens; they say where its texts begin")
    return batch.encoder_lens
