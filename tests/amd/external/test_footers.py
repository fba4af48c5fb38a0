"""DeepSeek-V4's window in an engine's pages: records that the engine has stored and ours, with scales in footers."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.problem import Scales
from rocm_attn.step.external_step import ExternalStep
from tests.amd.integrations.oracle import Scores
from tests.amd.integrations.oracle import attention as oracle
from tests.amd.kernels.record_cases import POISON, RecordPages
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.problems import providers, record_layer

KV_LEN, NEW, PAGE_SIZE, PAGES, WINDOW_LEFT = 11, 3, 4, 6, 4


@pytest.mark.parametrize("provider", providers())
def test_footers_of_an_engine_are_read_and_written(provider: str, device: torch.device) -> None:
    """The engine has stored the first tokens, and pages lie further apart than they have to."""
    problem = replace(record_layer(page_size=PAGE_SIZE, scales=Scales.FOOTER), window_left=WINDOW_LEFT)
    records = RecordPages((192, 192), Encoding.E4M3FN, PAGE_SIZE, Scales.FOOTER)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(KV_LEN, 192, generator=generator) * 2.0 ** torch.randint(-3, 3, (KV_LEN, 1), generator=generator)
    rows, q = rows.bfloat16().float(), torch.randn(NEW, 4, 192, generator=generator)
    page_of_token = [[5, 2, 4][token // PAGE_SIZE] for token in range(KV_LEN)]
    stored = torch.full((PAGES, records.page_bytes + 64), POISON, dtype=torch.uint8)
    wanted = stored.clone()
    for token, page in enumerate(page_of_token):
        records.write(wanted[page], token % PAGE_SIZE, rows[token])
        if token < KV_LEN - NEW:
            records.write(stored[page], token % PAGE_SIZE, rows[token])

    memory = stored.to(device)
    k = memory.as_strided((PAGES, PAGE_SIZE, 1, records.row_bytes), (memory.stride(0), *[records.row_bytes] * 2, 1))
    attention = ExternalAttention(
        [LayerSource(problem)],
        TableSource(torch.tensor([[5, 2, 4]], dtype=torch.int32, device=device), null_page=False),
        device=device,
        bounds=Bounds(num_seqs=1, num_tokens=4, kv_len=12, num_pages=PAGES),
        options=ExternalOptions(provider=provider, page_strides=True),
    )
    attention.pages.bind(0, k, k[..., :192], EnginePages(None, None, problem.page_format))
    boundaries, lengths = torch.tensor([0, NEW], device=device), torch.tensor([KV_LEN], device=device)
    step = ExternalStep.extend(boundaries, lengths, num_tokens=NEW, max_q_len=NEW, max_kv_len=KV_LEN)
    attention.begin(step)
    attention.fill()
    new = rows[KV_LEN - NEW :, None].to(device)
    attention.layers.store(0, new, new)
    out = torch.empty(NEW, 4, 192, device=device)
    attention.layers.attend(0, q.to(device), out)

    assert torch.equal(memory.cpu(), wanted)
    values = [records.value(wanted[page], token % PAGE_SIZE) for token, page in enumerate(page_of_token)]
    held = torch.stack(values)[:, None].numpy()
    want, _ = oracle(q.double().numpy(), held, held, Scores(problem.scale, window_left=WINDOW_LEFT))
    assert_attention_close(out.cpu(), torch.from_numpy(want), torch.float32)
