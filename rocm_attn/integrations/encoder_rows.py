"""store_at_slots: stores K and V that belong to no new token of a step, such as an encoder's, for cross attention."""

from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.external import ExternalAttention
from rocm_attn.kernels.metadata.error_word import ERROR_WORD
from rocm_attn.machine.devices import on_device


def store_at_slots(attention: ExternalAttention, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes K and V of any tokens to slots of a layer's pages, which are compared with no table.

    An infinity or NaN is stored as 0, and is a fault of the step that has begun.

    k, v:  [n or more, kv_heads, head_dim | v_head_dim]
    slots: int32 or int64 [n]; -1, or one in page 0: this token is not stored
    Raises BadTensor for fewer rows than slots: the other slots would keep K and V of other tokens; WrongState before a
    step.
    """
    if min(len(k), len(v)) < len(slots):
        raise BadTensor(f"there are {len(k)} rows of K and {len(v)} of V for {len(slots)} slots; give one of each")
    tokens, of_step = len(slots), attention.gate.begun().step.tensors.counts
    with on_device(attention.device):
        counts, pages = of_step.clone(), attention.pages.layer(layer)
        counts[1] = tokens
        attention.ops.store_kv(k[:tokens], v[:tokens], slots.int(), counts, pages, null_page=True)
        of_step[ERROR_WORD].bitwise_or_(counts[ERROR_WORD])
