"""Figures of the compiler and of the model of tile_cost.py for a layer's kernels, as values of static_figures.json."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.cost.static_figures import LayerFigures, TileCandidate
from tests.amd.aiter_source.checkout import Checkout
from tests.amd.aiter_source.static_figures import of_layer
from tests.amd.offline.cdna_decode import figures_of
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.matrix import Row
from tests.amd.offline.tile_candidates import Estimate, Kind, chosen_tiles, estimate
from tests.amd.offline.tile_cost import lower_bound_clocks


def serving_layer(checkout: Checkout, row: Row, kind: Kind) -> LayerFigures:
    """Returns figures of a layer's serving row, which must have a cost, and of other kernels; nothing is ranked."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = estimate(row, chosen_tiles(row, kind), whole=False, given_programs=True)
    if not found.cost:
        raise ValueError(f"{found.tiles} of {row} spills {found.spills} registers; choose other tiles")
    peers, refused = of_layer(checkout, row, kind)
    arch, step, heads, head_dim, dtype = layer_key(row, kind)
    return LayerFigures(
        arch=arch,
        step=step,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        lower_bound=round(lower_bound_clocks(row, kind), 1),
        ranked="",
        candidates=(candidate(found, serves=True),),
        busy=busy_of(found.cost.cycles),
        peers=peers,
        cdna=figures_of(row, kind),
        refused=refused,
    )


def among(layer: LayerFigures, old: LayerFigures) -> LayerFigures:
    """Returns the layer with the candidates that its serving row was ranked with, if that row is unchanged."""
    if not old.ranked or old.serving.tiles != layer.serving.tiles:
        return layer
    candidates = (layer.serving if each.serves else each for each in old.candidates)
    return replace(layer, ranked=old.ranked, candidates=tuple(candidates))


def layer_key(row: Row, kind: Kind) -> tuple[str, str, tuple[int, int], int, str]:
    """Returns LayerFigures.key of a ranked layer."""
    head_dim, v_head_dim = row.dims
    assert head_dim == v_head_dim, "the model's layers have one head dim"
    step = "decode" if kind is DecodeTiles else "extend"
    return row.arch, step, row.heads, head_dim, str(row.dtype).removeprefix("torch.")


def candidate(found: Estimate, *, serves: bool) -> TileCandidate:
    """Converts an estimate that has a cost."""
    assert found.code
    assert found.cost
    return TileCandidate(found.tiles, serves, kernel_figures(found.code, found.waves, found.cost))
