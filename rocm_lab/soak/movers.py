"""Tokens that leave pages and come into others, all layers at once or each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.integrations.kv_passport import KVExtent
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter


@dataclass(slots=True)
class Sent:
    """An export: a buffer, and the entries that its tokens look up. by_layers: each layer has a stretch of its own

    is_checked: whether the checksum is in it, with the states of recurrent layers
    """

    extent: KVExtent
    buffer: Tensor
    stored: list[int]
    by_layers: bool = False
    is_checked: bool = True


@dataclass(slots=True)
class Movers:
    """The two ends of a pool, with its present scales and pages."""

    exporter: KVExporter
    importer: KVImporter
    num_layers: int

    @classmethod
    def of(cls, holder: Any, num_layers: int) -> Movers:
        """Makes the ends of a runtime or of an engine's attention."""
        exporter = KVExporter(holder)
        return cls(exporter, KVImporter(holder, exporter.passport), num_layers)

    def room(self, extent: KVExtent, device: torch.device) -> Tensor:
        """A buffer for an export."""
        return torch.zeros(self.exporter.num_bytes(extent), dtype=torch.uint8, device=device)

    def export(self, pages: Any, kv_len: int, device: torch.device, *, by_layers: bool) -> tuple[KVExtent, Tensor]:
        """Exports tokens. Raises what the exporter does."""
        extent = self.exporter.extent(pages, kv_len)
        buffer = self.room(extent, device)
        if not by_layers:
            self.exporter.export(pages, extent, buffer)
            return extent, buffer
        for layer, part in self._parts(extent, buffer):
            self.exporter.export_layer(layer, pages, extent, part)
        return extent, buffer

    def import_(self, pages: Any, sent: Sent) -> None:
        """Imports what was sent. Raises what the importer does."""
        if not sent.by_layers:
            self.importer.import_pages(pages, sent.extent, sent.buffer)
            return
        for layer, part in self._parts(sent.extent, sent.buffer):
            self.importer.import_layer(layer, pages, sent.extent, part)

    def _parts(self, extent: KVExtent, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields each layer with its stretch of the buffer."""
        first = 0
        for layer in range(self.num_layers):
            end = first + self.exporter.num_layer_bytes(extent, layer)
            yield layer, buffer[first:end]
            first = end
