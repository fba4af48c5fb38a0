"""ZeroInputs: tensors of zeros for the calls of layers, where only shapes, dtypes and strides matter."""

import math

import torch
from torch import Tensor

from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.cache.page_format import PageFormat
from rocm_attn.kernels.states.arguments import RecurrentTokens
from rocm_attn.problem import Indexer, PoolKind, Problem
from rocm_attn.recurrence import Recurrence, tensors_of


class ZeroInputs:
    """Zeros for the layers of steps, which share their memory: filling it takes longer than the rest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, problem: Problem, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and out of a layer, [num_tokens, heads, dim] each."""
        dim, v_dim, dtype = problem.head_dim, problem.v_head_dim, problem.dtype
        q = self._zeros("q", (num_tokens, problem.num_q_heads, dim), dtype)
        k = self._zeros("k", (num_tokens, problem.num_kv_heads, dim), dtype)
        out = self._zeros("out", (num_tokens, problem.num_q_heads, v_dim), dtype)
        is_latent = problem.pool is PoolKind.LATENT
        v = k[..., :v_dim] if is_latent else self._zeros("v", (num_tokens, problem.num_kv_heads, v_dim), dtype)
        return q, k, v, out

    def of_lse(self, problem: Problem, num_tokens: int) -> Tensor:
        return self._zeros("lse", (num_tokens, problem.num_q_heads), torch.float32)

    def of_index(self, indexer: Indexer, dtype: torch.dtype, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index keys, index queries and the weights of their heads, for a layer of dtype."""
        k = self._zeros("index k", (num_tokens, indexer.head_dim), dtype)
        q = self._zeros("index q", (num_tokens, indexer.num_heads, indexer.head_dim), dtype)
        return k, q, self._zeros("weights", (num_tokens, indexer.num_heads), torch.float32)

    def of_choice(self, indexer: Indexer, num_tokens: int) -> Tensor:
        """The positions of keys that an indexer elsewhere chooses, int32 [num_tokens, top]."""
        return self._zeros("positions", (num_tokens, indexer.indexing.top), torch.int32)

    def of_fold(self, state: PageFormat, columns: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The values, or gates, and the rows that Layers.fold() takes for a layer with that state."""
        of_tokens = self._zeros("fold", (num_tokens, state.head_dim), state.encoding.dtype)
        return of_tokens, self._zeros("rows", (num_tokens, columns), torch.float32)

    def of_convolution(
        self, form: Recurrence, num_tokens: int, *, spare: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, bias and out of a recurrent layer's convolution; see StateCalls.convolve.

        spare: elements of a row of x beyond a multiple of 16: forwards cut x out of wider rows
        """
        channels, dtype = form.convolution.channels, form.dtype
        weight = self._zeros("convolution", (channels, form.convolution.width), dtype)
        rows = self._zeros("rows of x", (num_tokens, round_up(channels, 16) + spare), dtype)
        out = self._zeros("convolved", (num_tokens, channels), dtype)
        return rows[:, :channels], weight, self._zeros("bias", (channels,), dtype), out

    def of_recurrence(self, form: Recurrence, num_tokens: int) -> RecurrentTokens:
        """The tokens of a recurrent layer. q, k and v lie side by side, as a convolution over all of them leaves them.

        A layer without such a convolution gets rows that lie one after the other.
        """
        of_token = tensors_of(form)

        def zeros(name: str) -> Tensor:
            shape, dtype = of_token[name]
            return self._zeros(name, (num_tokens, *shape), dtype)

        widths = [math.prod(of_token[name].shape) for name in "qkv"]
        if form.convolution.channels == sum(widths):
            sides = torch.split(self._zeros("convolved", (num_tokens, sum(widths)), form.dtype), widths, 1)
            q, k, v = (side.view(num_tokens, *of_token[name].shape) for name, side in zip("qkv", sides, strict=True))
        else:
            q, k, v = map(zeros, "qkv")
        return RecurrentTokens(q, k, v, *map(zeros, ("decay", "beta", "out")))

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = torch.zeros(size, dtype=dtype, device=self._device)
        return held[:size].view(shape)
