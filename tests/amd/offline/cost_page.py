"""The figures of docs/cost.md, made from static_figures.json alone: the text between two comments of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import Problem
from rocm_lab.cost import cost
from rocm_lab.cost.cost import GPUS, SHAPES, predicted, predictions
from rocm_lab.cost.published import published_decodes
from rocm_lab.cost.static_figures import StaticFigures

LAYER = Problem(32, 8, 128, torch.bfloat16, v_head_dim=128, page_size=16, scale=128**-0.5)
# With which decode for CDNA serves, and with which it does not.
_TRITONS = ("3.9.0", "3.8.0")
_SECTION = re.compile(r"(<!-- made by cost_page: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def rewritten(page: str) -> str:
    """The page with its figures anew. Raises KeyError for a section that is not known."""
    # They were read as the module was imported, and may have been written since.
    cost.FIGURES = StaticFigures.read()
    return _SECTION.sub(lambda found: f"{found[1]}{_MAKERS[found[2]]()}", page)


def _on(arch: str, triton: str) -> Target:
    return replace(known_target(arch), releases=Releases(triton=Release.of(triton)))


def _sample() -> str:
    lines = [each.line() for each in predictions(LAYER, _on("gfx942", _TRITONS[0]))]
    said = [f"    {line}" for line in lines if line.startswith("64d4k")]
    head = "  predicted of one layer in Triton, never measured:"
    return "\n".join(["```", head, *said, "```", ""])


def _decodes() -> str:
    lines = ["| | step | `triton.cdna_decode`, us | GB/s | `triton.decode`, us | GB/s |", "|---|---|---|---|---|---|"]
    for arch, gpu in GPUS.items():
        for shape in SHAPES:
            found = [predicted(LAYER, _on(arch, triton), shape) for triton in _TRITONS]
            cells = [text for each in found if each for text in (each.seconds.text(1e-6), each.speed.text(1e9))]
            lines.append(f"| {' | '.join([gpu.name, str(shape), *cells])} |")
    return "\n".join([*lines, ""])


def _published() -> str:
    lines = [
        "| | source | heads | step | predicted, us | predicted, GB/s | published, GB/s | inside |",
        "|---" * 8 + "|",
    ]
    for each in published_decodes():
        layer, prediction = each.layer, each.prediction
        heads = f"{layer.num_q_heads} x {layer.num_kv_heads} of {layer.head_dim}"
        times = [prediction.seconds.text(1e-6), prediction.speed.text(1e9), f"{each.speed / 1e9:.0f}"]
        cells = [each.gpu, each.source, heads, str(prediction.shape), *times, "yes" if each.is_inside else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


_MAKERS: dict[str, Callable[[], str]] = {
    "sample": _sample,
    "decodes": _decodes,
    "published": _published,
}
