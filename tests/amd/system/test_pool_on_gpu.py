"""A GPU's pool, sized by measurements: it fills the GPU to the requested share, and no step fails."""

import gc
from dataclasses import replace

import pytest
import torch

from rocm_attn.models.config import AttentionConfig, LayerConfig
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import Rope
from rocm_serve.engine import Engine
from rocm_serve.measured_memory import DeviceMemory
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.runner.largest_steps import run_largest_steps
from tests.amd.runner.tiny_model import CONFIG, tiny_model


@pytest.mark.gpu
def test_a_gpu_is_filled_to_its_share_and_serves_at_the_limit(graphs: bool, device: torch.device) -> None:
    """Every page is written, all graphs are made, and the largest steps run: nothing runs out of memory."""
    memory = DeviceMemory(device)
    gc.collect()  # the engine of another test
    memory.give_back()
    attention = AttentionLayer(num_q_heads=8, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    layer = LayerConfig((AttentionConfig(attention, Rope(theta=10000.0, head_dim=128)),), DenseMlp(4096, SwiGLU()))
    base = replace(CONFIG, layers=(layer,) * 8, hidden_size=1024, vocab_size=128_000)
    loaded = tiny_model(base=base, context_len=1 << 20, dtype=torch.bfloat16, device=device)
    served = Engine(loaded, EngineOptions(graphs=graphs, max_batch_size=256, chunk=8192, provider="triton"))
    report = served.report()
    assert report.step_bytes > 256 * 128_000 * 4
    assert (report.graph_bytes > 0) == graphs
    if graphs:
        made = served.capture_all(lambda done, total, name: None)
        assert made.graphs_off == ""
        assert made.num_bytes <= report.graph_bytes
    run_largest_steps(served)
    served.generate([Request((number + 1,) * 3000, 20) for number in range(300)])
    used = memory.total() - memory.free()
    assert 0.87 * memory.total() <= used <= 0.9 * memory.total(), report.memory_line()
