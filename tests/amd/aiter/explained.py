"""The output of `rocm-attn explain` for MODELS, some with 8-bit K and V or over records: all of it on gfx942, and the
lines that are others on gfx950.

`python -m tests.amd.aiter.explained` writes it again, and the table of docs/models.md.
"""

import contextlib
import difflib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocm_attn.cli import main
from rocm_lab.page_parts import with_rows
from tests.amd.house.source_tree import ROOT

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
ARCHS = ("gfx942", "gfx950")

_EIGHT_BITS = ("--kv-dtype", "fp8", "--kv-scales", "layer")

_RECORDS = ("--kv-dtype", "fp8", "--kv-scales", "group")

# Model, which may have ".eight-bits" or ".records" after it -> the options that it is served with.
MODELS: Mapping[str, tuple[str, ...]] = {
    "llama-3-70b": ("--tp", "8"),
    "gpt-oss-120b": (),
    "gemma-3-27b": (),
    "gemma-3n-e4b": (),
    "deepseek-v3": ("--tp", "8"),
    "deepseek-v3.2": ("--tp", "8"),
    "deepseek-v4-flash": ("--tp", "8"),
    "deepseek-v4.1-flash": ("--tp", "8"),
    "falcon-h1-7b": (),
    "gemma-4": (),
    "glm-5.3-flash": ("--tp", "8"),
    "kimi-k3": ("--tp", "8"),
    "minimax-m2": (),
    "minimax-m3": (),
    "nemotron-h-8b": (),
    "qwen3.5-397b-a17b": ("--tp", "8"),
    "qwen3.8-27b": (),
    "qwen3.8-flash-next": (),
    "llama-3-70b.eight-bits": ("--tp", "8", *_EIGHT_BITS),
    "deepseek-v3.eight-bits": ("--tp", "8", *_EIGHT_BITS),
    "deepseek-v3.2.records": ("--tp", "8", *_RECORDS),
    "deepseek-v4-flash.records": ("--tp", "8", "--kv-dtype", "fp8", "--kv-scales", "footer"),
}


def config_of(model: str) -> Path:
    """Returns a published config, all of it or the fields that its layers need."""
    name = f"{model.removesuffix('.eight-bits').removesuffix('.records')}.json"
    whole = HERE.parent / "runner" / "published" / name
    return whole if whole.exists() else HERE / "configs" / name


def _config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(config_of(model).read_text())
    return config


# Models of the table in docs/models.md.
TABLED = [model for model in MODELS if "source" in _config(model)]
PAGE = ROOT / "docs" / "models.md"


def explained(model: str) -> str:
    """Returns the output on the first arch, and how that on the second one differs from it but for the arch's name."""
    first, second = ARCHS
    text = _explained(model, first)
    renamed, other = (each.splitlines(True) for each in (text.replace(first, second), _explained(model, second)))
    changes = list(difflib.unified_diff(renamed, other, n=0))[2:]  # without the names of files
    return f"{text}\nother lines on {second}:\n{''.join(changes)}"


def _explained(model: str, arch: str) -> str:
    """Returns stdout and stderr of the command, and its exit code, without the config's path."""
    printed, complaints, code = _ran(model, arch)
    text = f"{printed}{complaints}exit code {code}\n"
    return text.replace(str(config_of(model)), f"{model} {' '.join(MODELS[model])}".strip())


def _ran(model: str, arch: str, *options: str) -> tuple[str, str, int]:
    command = ["explain", str(config_of(model)), "--arch", arch, "--page-size", "auto", "--pool", "auto"]
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
        code = main([*command, *MODELS[model], *options])
    return printed.getvalue(), complaints.getvalue(), code


def page_with_table() -> str:
    """Returns docs/models.md with the table of kernels for the models whose configs name their source."""
    return with_rows(PAGE.read_text(), "kernels", [row for model in TABLED for row in _rows(model)])


def _rows(model: str) -> list[str]:
    said = [json.loads(_ran(model, arch, "--json")[0]) for arch in ARCHS]
    numbers: dict[str, int] = {}
    for kinds in zip(*(each["layer_kinds"] for each in said), strict=True):
        what = _what(kinds[0]["problem"])
        for rows in kinds[0]["compressed_rows"]:
            of = f"of {rows['tokens']} tokens" if rows["tokens"] > 1 else "of a token"
            is_among = bool(rows["blocks"]) and rows["own_choice"] and not rows["own_rows"]
            what += f"; and {rows['top'] or 'all'} rows {of}" + " among candidates" * is_among
        steps = [
            _on_each([", ".join(dict.fromkeys(_kernels(kind, step))) for kind in kinds])
            for step in ("decode", "extend")
        ]
        chosen = _on_each([", ".join(_chosen(kind)) for kind in kinds])
        row = f"{what} | {' | '.join(steps)} | {chosen}"
        numbers[row] = numbers.get(row, 0) + len(kinds[0]["layers"])
    for kind in said[0]["recurrent_layers"]:
        state = f"{kind['num_value_heads']} states of {kind['key_dim']} x {kind['value_dim']}"
        size = f"{kind['bytes_per_slot']:,} bytes a layer and slot"
        numbers[f"{kind['rule']}, {state}, {size} | `kernels/states` | `kernels/states` | "] = len(kind["layers"])
    name = f"{model} {' '.join(MODELS[model])}".strip()
    return [f"| {name} | {number} | {row} |\n" for row, number in numbers.items()]


def _kernels(kind: dict[str, Any], step: str) -> list[str]:
    return [each["kernels"].get(step, "none") for each in (kind, *kind["compressed_rows"])]


def _chosen(kind: dict[str, Any]) -> list[str]:
    return [name for each in (kind, *kind["compressed_rows"]) for name in each["over_a_selection"]]


def _what(problem: dict[str, Any]) -> str:
    dims = problem["head_dim"], problem["v_head_dim"]
    parts = [f"{problem['num_q_heads']} heads over {problem['num_kv_heads']}", "/".join(map(str, dict.fromkeys(dims)))]
    parts += ["latent"] * (problem["pool"] == "latent") + ["sinks"] * problem["has_sinks"]
    return ", ".join(parts + [f"window {problem['window_left'] + 1}"] * (problem["window_left"] >= 0))


def _on_each(names: list[str]) -> str:
    if len(set(names)) == 1:
        return ", ".join(f"`{name}`" for name in names[0].split(", ") if name)
    return ", ".join(f"`{name}` on {arch}" for name, arch in zip(names, ARCHS, strict=True))


def place(model: str) -> Path:
    """Returns the path of the golden file."""
    return GOLDEN / f"{model}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in MODELS:
        place(each).write_text(explained(each))
    PAGE.write_text(page_with_table())
