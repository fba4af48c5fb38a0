"""The attention of a small DeepSeek-V4, seeded: a runtime's layers give what transformers' modules give."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.models.families import attention_geometry
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.merging import merge_states
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from tests.amd.tolerances import assert_layers_close

TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
PAGE_SIZE = 16


class TinyV4:
    """Three attention blocks, one of each type, each added to its input; no experts and no hyper-connections."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        config: Any = transformers.DeepseekV4Config(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            head_dim=16,
            partial_rotary_factor=0.5,
            q_lora_rank=16,
            o_lora_rank=8,
            o_groups=2,
            sliding_window=12,
            index_topk=3,
            index_n_heads=16,  # of few heads all may score 0, and topk has no order of equal scores
            index_head_dim=16,
            layer_types=TYPES,
            compress_rates={TYPES[1]: 4, TYPES[2]: 8},
            vocab_size=64,
            max_position_embeddings=128,
        )
        config._attn_implementation = "eager"
        self.config = config
        self.rope = v4.DeepseekV4RotaryEmbedding(config)
        self.layers = [v4.DeepseekV4Attention(config, number).float().eval() for number in range(3)]
        for layer in self.layers:
            for name, weight in layer.named_parameters():
                torch.nn.init.normal_(weight, std=1.0 if "norm" in name or "sinks" in name or "bias" in name else 0.3)
        self.embedding = torch.randn(64, 32)

    @torch.no_grad()
    def whole(self, tokens: Sequence[int]) -> Tensor:
        """[n, hidden]: what transformers gives for all tokens at once, without a cache."""
        x = self.embedding[list(tokens)][None]
        positions = torch.arange(len(tokens))[None]
        embeddings = {kind: self.rope(x, positions, layer_type=kind) for kind in ("main", "compress")}
        behind = positions[0][:, None] - positions[0][None]
        mask = torch.zeros(len(tokens), len(tokens))
        mask = mask.masked_fill((behind < 0) | (behind >= self.config.sliding_window), float("-inf"))[None, None]
        for layer in self.layers:
            x = x + layer(x, embeddings, positions, mask)[0]
        return x[0]


class ServedV4:
    """The same blocks over a runtime: its projections, norms and rotations are transformers', its attention is ours."""

    def __init__(self, model: TinyV4, **options: Any) -> None:
        self.model = model
        fields = {**model.config.to_dict(), "architectures": ["DeepseekV4ForCausalLM"]}
        self.geometry = attention_geometry(fields)
        problems = self.geometry.problems(dtype=torch.float32, page_size=PAGE_SIZE)
        sizes: dict[str, Any] = {"num_pages": 24, "max_num_seqs": 4, "max_kv_len": 96, **options}
        self.runtime = build_runtime(problems, RuntimeOptions(provider="torch", **sizes), device="cpu")
        for number, layer in enumerate(model.layers):
            self.runtime.head_weights.set(number, HeadWeights(sinks=layer.sinks.detach()))

    @torch.no_grad()
    def forward(self, part: Part) -> Tensor:
        x, positions = self.model.embedding[part.token_ids.long()], part.positions.long()
        for number, layer in enumerate(self.model.layers):
            x = x + self._attention(part, number, layer, x, positions)
        return x

    def _attention(self, part: Part, number: int, block: Any, x: Tensor, positions: Tensor) -> Tensor:
        calls, turn = part.layers, v4.apply_rotary_pos_emb
        cos, sin = self.model.rope(x[None], positions[None], layer_type=block.rope_layer_type)
        residual = block.q_a_norm(block.q_a_proj(x))
        q = turn(block.q_b_norm(block.q_b_proj(residual).view(len(x), -1, 16))[None], cos, sin, unsqueeze_dim=2)[0]
        k = turn(block.kv_norm(block.kv_proj(x))[None, :, None], cos, sin, unsqueeze_dim=2)[0]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        calls.store(number, k, k)
        calls.attend(number, q, out, lse)
        if block.compressor is not None:
            far, far_lse = torch.empty_like(q), torch.empty_like(lse)
            self._attend_to_rows(part, self.geometry.rows_of(number), block, x, residual, q, positions, far, far_lse)
            out, _ = merge_states([(out, lse), (far, far_lse)])
        out = turn(out[None], cos, -sin, unsqueeze_dim=2)[0]
        grouped: Tensor = block.o_a_proj(out.reshape(len(x), self.model.config.o_groups, -1)).flatten(1)
        projected: Tensor = block.o_b_proj(grouped)
        return projected

    def _attend_to_rows(
        self,
        part: Part,
        rows_layer: int,
        block: Any,
        x: Tensor,
        residual: Tensor,
        q: Tensor,
        positions: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        calls, compressor, turn = part.layers, block.compressor, v4.apply_rotary_pos_emb
        tokens = self.runtime.kinds.problems[rows_layer].row.tokens
        makers = [compressor] + ([compressor.indexer] if hasattr(compressor, "indexer") else [])
        sides = [(each.kv_proj(x), each.gate_proj(x) + each.position_bias[positions % tokens]) for each in makers]
        dims = [each.head_dim for each in makers]
        if len(makers) > 1:  # both rows' first halves, then both rows' second halves
            values, gates = (
                torch.cat(
                    [half for which in (0, 1) for half in (side.unflatten(1, (2, -1))[:, which] for side in of)], 1
                )
                for of in zip(*sides, strict=True)
            )
        else:
            values, gates = sides[0]
        rows = x.new_empty(len(x), sum(dims))
        calls.fold(rows_layer, values, gates, rows)
        first = self.model.rope(x[None], (positions // tokens * tokens)[None], layer_type="compress")
        made = [
            turn(each.kv_norm(row)[None, :, None], *first, unsqueeze_dim=2)[0]
            for each, row in zip(makers, torch.tensor_split(rows, dims[:-1], 1), strict=True)
        ]
        calls.store(rows_layer, made[0], made[0])
        if len(makers) == 1:
            calls.attend(rows_layer, q, out, lse)
            return
        indexer = compressor.indexer
        at = self.model.rope(x[None], positions[None], layer_type="compress")
        index_q = turn(indexer.q_b_proj(residual).view(len(x), -1, indexer.head_dim)[None], *at, unsqueeze_dim=2)[0]
        weights = indexer.scorer.weights_proj(x) * indexer.scorer.weights_scaling
        calls.store_index(rows_layer, made[1][:, 0])
        calls.select(rows_layer, index_q, weights)
        calls.attend_selected(rows_layer, q, out, lse)

    def serve(self, tokens: Sequence[int], steps: Sequence[int]) -> Tensor:
        """[n, hidden]: the outputs of one request's tokens, given in steps of so many."""
        row, done, found = self.runtime.table.admit(), 0, []
        for new in steps:
            done += new
            self.runtime.table.evict([row], [done - new])
            self.runtime.table.reserve(row, done)
            with self.runtime.step(StepBatch([row], [done], [new], tokens[done - new : done])) as step:
                found.append(self.forward(step.parts[0])[:new])
        self.runtime.table.free(row)
        return torch.cat(found)


def test_a_fresh_graph_of_such_layers_passes_its_check() -> None:
    """Requests with random states, rows and windows: a replay equals the eager step, and so do the pages."""
    served = ServedV4(TinyV4(), swa_pages=12, capture_sizes=(2,))
    runner = StepRunner(served.runtime, lambda part: PerToken(served.forward(part)), recorder_for(torch.device("cpu")))
    rows, tokens = [served.runtime.table.admit() for _ in range(2)], torch.randint(0, 64, (2, 21)).tolist()
    for done in (20, 21):
        for row in rows:
            served.runtime.table.reserve(row, done)
        new = 20 if done == 20 else 1
        fed = [token for each in tokens for token in each[done - new : done]]
        runner.run(StepBatch(rows, [done] * 2, [new] * 2, fed))
    assert (runner.counters.replays, str(runner.counters.graphs_off)) == (1, "")


@pytest.mark.parametrize("swa_pages", [0, 12], ids=["one space", "two spaces"])
@pytest.mark.parametrize("steps", [[41], [5, 1, 1, 9, 1, 3, 21], [1] * 41], ids=["prompt", "chunks", "decode"])
def test_a_small_deepseek_v4_attends_like_transformers(steps: list[int], swa_pages: int) -> None:
    model = TinyV4()
    tokens = torch.randint(0, 64, (41,)).tolist()
    found = ServedV4(model, swa_pages=swa_pages).serve(tokens, steps)
    assert_layers_close(found, model.whole(tokens))
