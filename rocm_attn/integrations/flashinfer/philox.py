"""Uniform numbers of seeds and offsets on a device, as CURAND's Philox4x32-10 gives them.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; curand_init and
curand_uniform of CUDA's documentation. FlashInfer's samplers call these.
"""

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Returns four words of each counter and key, int64 [..., 4] with values below 2^32.

    counter: int64 [..., 4]; key: int64 [..., 2]; values below 2^32
    """
    x0, x1, x2, x3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        # Products of two words wrap to 64 bits, which has no effect on their halves.
        low, high = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((high >> 32) & _WORD) ^ x1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ x3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((x0, x1, x2, x3), -1)


def uniforms(seed: Tensor, offset: Tensor, draws: int) -> Tensor:
    """Returns float32 [rows, draws] in (0, 1]: draw d of row r is number offset[r] + d of sequence r of seed[r].

    seed, offset: int64 [rows], read as unsigned
    """
    number = offset[:, None] + torch.arange(draws, device=offset.device)
    block = (number >> 2) & ((1 << 62) - 1)
    row = torch.arange(len(seed), device=seed.device)[:, None].expand_as(block)
    counter = torch.stack((block & _WORD, block >> 32, row, torch.zeros_like(row)), -1)
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD), -1)[:, None].expand(*block.shape, 2)
    word = philox(counter, key).gather(-1, (number & 3)[..., None])[..., 0]
    return word.to(torch.float32) * 2.0**-32 + 2.0**-33
