"""The tables of docs/capacity.md, made by `rocm-attn capture-plan`: python -m tests.amd.docs.capacity writes them."""

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocm_attn.cli import main
from rocm_lab.page_parts import with_rows
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "capacity.md"
GPU, MAX_BATCH_SIZE, MAX_KV_LEN = "mi300x", 256, 8192
# Models, GPUs, and ranks for which times are told.
TIMED = (("Llama-3.1-8B", 1), ("Llama-3.3-70B", 8), ("Qwen3-32B", 1), ("Qwen3-30B-A3B", 1))
TIMED_GPUS = ("mi300x", "mi355x", "h200")


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    }


_QWEN3: dict[str, object] = {
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

# The sizes in the config.json of the models that these names have on the Hugging Face hub.
MODELS: Mapping[str, Mapping[str, object]] = {
    "Llama-3.1-8B": _llama(4096, 14_336, 32, 32),
    "Llama-3.3-70B": _llama(8192, 28_672, 80, 64),
    "Llama-3.1-405B": _llama(16_384, 53_248, 126, 128),
    "Qwen3-32B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        **_QWEN3,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        **_QWEN3,
    },
}


def plan(config: Mapping[str, object], num_gpus: int, gpu: str = GPU) -> dict[str, Any]:
    """Returns the JSON of capture-plan, for a model on that many GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        words = ["capture-plan", str(file), "--gpu", gpu, "--tp", str(num_gpus), "--json"]
        words += ["--max-batch-size", str(MAX_BATCH_SIZE), "--max-kv-len", str(MAX_KV_LEN)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(words) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def row(name: str, num_gpus: int) -> str:
    """Returns the table's row of a model on that many GPUs."""
    fit = (planned := plan(MODELS[name], num_gpus))["fit"]
    weights = planned["weights_bytes"] / 2**30
    token = fit["kv"] / fit["tokens"] / 2**10
    room = fit["room"]
    cells = [f"{weights:.1f} GiB", f"{token:.0f} KiB", f"{room:,}", f"{room // MAX_KV_LEN:,}"]
    if not room:
        cells = [f"{weights:.1f} GiB", f"{token:.0f} KiB", "does not fit", ""]
    return f"| {name} | {num_gpus} | " + " | ".join(cells) + " |\n"


def times_row(name: str, num_gpus: int, gpu: str) -> str:
    """Returns the row of times of a model on that many GPUs of a name."""
    told = plan(MODELS[name], num_gpus, gpu)
    decode, bound, budget = told["decode_ms"], told["lower_bound_ms"], told["budget"]
    most = str(budget["max_batch_size"])
    steps = [f"{decode[size]:.3g} ({bound[size]:.3g})" for size in ("1", "32", most)]
    rest = [most, f"{1e3 * int(most) / decode[most]:,.0f}", f"{told['first_token_ms']:.3g}"]
    cells = [*steps, *rest, *(f"{budget['beside'][num]} ({budget['latency_ms'][num]:.3g})" for num in ("1", most))]
    return f"| {name} | {num_gpus} {gpu.upper()} | " + " | ".join(cells) + " |\n"


def page() -> str:
    """Returns the text of docs/capacity.md."""
    tokens = (row(name, num_gpus) for name in MODELS for num_gpus in (1, 8))
    times = (times_row(*timed, gpu) for timed in TIMED for gpu in TIMED_GPUS)
    return with_rows(with_rows(PAGE.read_text(), "tokens", tokens), "times", times)


if __name__ == "__main__":
    PAGE.write_text(page())
