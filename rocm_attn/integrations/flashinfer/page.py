"""Appends K and V of new tokens to pages. Names and arguments are FlashInfer's.

A token whose sequence, place or page does not exist is not written. Infinities and NaN are written as 0.
Nothing waits for the device, so all of it may be captured.
"""

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.integrations.flashinfer.calls import pages_of
from rocm_attn.integrations.flashinfer.requests import check_layout, check_rows, provider_of
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.kernels.attention.arguments import rows_are_contiguous
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.machine.devices import on_device, with_index
from rocm_attn.problem import DTYPES
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON


def step_ops(device: torch.device) -> StepOps:
    """Returns the launches around attention on a device, those of the chosen provider."""
    provider = provider_of()
    on_triton = provider in ("triton", "aiter") or (provider == "auto" and device.type == "cuda")
    return (TRITON if on_triton else TORCH).ops()


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Returns the tokens of each sequence, [S]: those of its full pages and of its last page."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each new token's sequence and its place there, int32 [nnz] each. New tokens are a sequence's last ones.

    append_indptr: int [S + 1], the first new token of each sequence; seq_lens: int [S], new tokens included
    nnz:           entries; those after append_indptr[S] get sequence -1 and place 0
    batch_indices, positions: int32 [nnz], written if they are given
    Raises BadTensor.
    """
    device = append_indptr.device
    given = {"batch_indices": batch_indices, "positions": positions}
    for name, tensor in given.items():
        if tensor is not None:
            check_rows(name, tensor, (nnz,), torch.int32, device)
    if batch_indices is None:
        batch_indices = torch.empty(nnz, dtype=torch.int32, device=device)
    if positions is None:
        positions = torch.empty(nnz, dtype=torch.int32, device=device)
    if append_indptr.shape[0] < 2 or nnz == 0:
        batch_indices.fill_(-1)
        positions.zero_()
        return batch_indices, positions
    if seq_lens.dim() != 1 or len(seq_lens) < append_indptr.shape[0] - 1:
        raise BadTensor(
            f"append_indptr names {append_indptr.shape[0] - 1} sequences and seq_lens is {list(seq_lens.shape)}; give "
            "one length for each"
        )
    indptr, kv_len = append_indptr.long(), seq_lens.to(device).long()
    token = torch.arange(nnz, device=device)
    seq = torch.searchsorted(indptr[1:].contiguous(), token, right=True)
    is_new = token < indptr[-1]
    seq = torch.where(is_new, seq, 0)
    place = kv_len[seq] - indptr[seq + 1] + token
    batch_indices.copy_(torch.where(is_new, seq, -1))
    positions.copy_(torch.where(is_new, place, 0))
    return batch_indices, positions


@as_in_flashinfer
def append_paged_kv_cache(append_key: Tensor, given: Given) -> None:
    """Writes K and V of new tokens to their places: page kv_indices[kv_indptr[seq] + place // page_size].

    append_key, append_value: [nnz, kv_heads, head_dim]
    batch_indices, positions: int [nnz], the sequence and the place of each token
    paged_kv_cache:           as in BatchDecodeWithPagedKVCacheWrapper.run, written in place
    Raises BadTensor, Unsupported.
    """
    pages = pages_of(given.paged_kv_cache, check_layout(given.kv_layout))
    _append((append_key, given.append_value), pages, given)


@as_in_flashinfer
def append_paged_mla_kv_cache(append_ckv: Tensor, given: Given) -> None:
    """Like append_paged_kv_cache, but for latent rows and rotated parts of keys.

    append_ckv, append_kpe: [nnz, dim]; ckv_cache, kpe_cache: [pages, page_size, dim], written in place
    Raises BadTensor, Unsupported.
    """
    if given.ckv_cache is None or given.kpe_cache is None:
        raise BadTensor("ckv_cache and kpe_cache are None; give both")
    rows = append_ckv.unsqueeze(1), given.append_kpe.unsqueeze(1)
    _append(rows, (given.ckv_cache.unsqueeze(2), given.kpe_cache.unsqueeze(2)), given)


def _slots(given: Given, num_pages: int, page_size: int) -> Tensor:
    """Returns int32 [nnz]: page * page_size + offset of each token, or -1 if it has no place. Raises BadTensor."""
    for name in ("batch_indices", "positions"):
        tensor = getattr(given, name)
        if tensor.dim() != 1 or tensor.is_floating_point() or len(tensor) != len(given.batch_indices):
            raise BadTensor(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be integers, one for each of "
                f"{len(given.batch_indices)} new tokens"
            )
    indices, indptr = given.kv_indices, given.kv_indptr
    num_seqs = indptr.shape[0] - 1
    if num_seqs < 1 or not len(indices):
        return torch.full_like(given.batch_indices, -1, dtype=torch.int32)
    seq, place, bounds = given.batch_indices.long(), given.positions.long(), indptr.long()
    is_seq = (seq >= 0) & (seq < num_seqs)
    seq = torch.where(is_seq, seq, 0)
    page_no = torch.div(place, page_size, rounding_mode="floor")
    entry = bounds[seq] + page_no
    is_place = is_seq & (place >= 0) & (entry < bounds[seq + 1]) & (entry >= 0) & (entry < len(indices))
    page = indices[torch.where(is_place, entry, 0)].long()
    is_place &= (page >= 0) & (page < num_pages)
    return torch.where(is_place, page * page_size + place - page_no * page_size, -1).to(torch.int32)


def _append(rows: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], given: Given) -> None:
    """Writes rows [nnz, heads, dim] to pages [pages, page_size, heads, dim]. Raises BadTensor, Unsupported."""
    device, slots = pages[0].device, _slots(given, *pages[0].shape[:2])
    if pages[0].shape[:3] != pages[1].shape[:3]:
        raise BadTensor(f"the sides of the KV cache are {list(pages[0].shape)} and {list(pages[1].shape)}")
    if pages[0].shape[0] * pages[0].shape[1] > torch.iinfo(torch.int32).max:
        raise BadTensor(f"the KV cache is {list(pages[0].shape)}; it must have at most 2^31 - 1 tokens")
    for name, side, its in zip(("the first", "the second"), rows, pages, strict=True):
        check_rows(f"{name} side of new tokens", side, (len(slots), *its.shape[2:]), its.dtype, device)
    if pages[0].dtype not in DTYPES:
        raise Unsupported(
            f"pages in {pages[0].dtype} cannot be appended to; write their codes, or keep K and V in "
            f"{', '.join(map(str, DTYPES))}"
        )
    if not rows_are_contiguous(*pages):
        raise BadTensor(
            f"the sides of the KV cache have strides {[list(side.stride()) for side in pages]}; the elements of a head "
            "must be contiguous"
        )
    if not len(slots):
        return
    k, v = (side if side.stride(-1) == 1 else side.contiguous() for side in rows)
    counts = torch.full((4,), len(slots), dtype=torch.int32, device=device)
    with on_device(with_index(device)):
        step_ops(device).store_kv(k, v, slots, counts, LayerPages.plain(*pages), null_page=False)
