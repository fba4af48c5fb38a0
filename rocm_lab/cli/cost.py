"""`rocm-attn cost`: predicted times of a model's layers on AMD GPUs, and faster choices; without a GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rocm_attn.cli.explain import LayerKind, count_of, explained, lines_of
from rocm_attn.providers.select import Selection
from rocm_lab.cost.cost import Prediction, predictions
from rocm_lab.cost.unused_capabilities import Choice, UnusedCapability, unused_of


def run(options: argparse.Namespace) -> None:
    """Prints predictions for options.config on options.arch. Raises Unsupported if a kind of layer has no kernel."""
    model = explained(options)
    choice = Choice(model.target, options.provider, model.pool, options.deterministic)
    found = [(kind, _predicted(kind, choice), _faster(kind, choice)) for kind in model.kinds]
    if options.json:
        kinds: list[dict[str, Any]] = [
            {
                "layers": list(kind.layers),
                "cost": [each.as_json() for each in predicted],
                "faster": [each.as_json() for each in faster],
            }
            for kind, predicted, faster in found
        ]
        print(json.dumps({"arch": model.target.arch, "layer_kinds": kinds}, indent=2))
    else:
        for kind, predicted, faster in found:
            print("\n".join(_lines(kind, predicted, faster)))
    model.require_served(options.page_size)


def _predicted(kind: LayerKind, choice: Choice) -> list[Prediction]:
    return list(predictions(kind.problem, choice.target, deterministic=choice.deterministic))


def _faster(kind: LayerKind, choice: Choice) -> list[UnusedCapability]:
    return unused_of(kind.outcome, choice) if isinstance(kind.outcome, Selection) else []


def _lines(kind: LayerKind, predicted: list[Prediction], faster: list[UnusedCapability]) -> list[str]:
    lines = ["", lines_of(kind)[0]]
    if predicted:
        lines.append("  predicted of one layer in Triton (sequences x cached + new tokens), never measured:")
        lines += [f"    {each.line()}" for each in predicted]
    else:
        lines.append(
            "  no times are predicted: static figures exist only for plain layers on gfx942 and gfx950, outside "
            "deterministic mode"
        )
    if faster:
        lines += [f"  possible gains for {count_of(kind.layers)}:", *(f"  - {each.line()}" for each in faster)]
    return lines
