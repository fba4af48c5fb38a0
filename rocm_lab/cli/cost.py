"""`rocm-attn cost`: predicted times of a model's layers on AMD GPUs, without a GPU."""

from __future__ import annotations

import argparse
import json

from rocm_attn.cli.explain import LayerKind, explained, lines_of
from rocm_lab.cost.cost import Prediction, predictions


def run(options: argparse.Namespace) -> None:
    """Prints predictions for options.config on options.arch. Raises Unsupported if a kind of layer has no kernel."""
    model = explained(options)
    found = [
        (kind, list(predictions(kind.problem, model.target, deterministic=options.deterministic)))
        for kind in model.kinds
    ]
    if options.json:
        kinds = [
            {"layers": list(kind.layers), "cost": [each.as_json() for each in predicted]} for kind, predicted in found
        ]
        print(json.dumps({"arch": model.target.arch, "layer_kinds": kinds}, indent=2))
    else:
        for kind, predicted in found:
            print("\n".join(_lines(kind, predicted)))
    model.require_served(options.page_size)


def _lines(kind: LayerKind, predicted: list[Prediction]) -> list[str]:
    lines = ["", lines_of(kind)[0]]
    if not predicted:
        lines.append(
            "  no times are predicted: static figures exist only for plain layers on gfx942 and gfx950, outside "
            "deterministic mode"
        )
        return lines
    lines.append("  predicted of one layer in Triton, never measured:")
    return lines + [f"    {each.line()}" for each in predicted]
