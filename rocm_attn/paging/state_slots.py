"""require_state_slots: checks the tensors in which a forward keeps state per request, before anything is captured."""

from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.machine.devices import require_tensor
from rocm_attn.paging.request_table import RequestTable


def require_state_slots(table: RequestTable, **states: Tensor) -> None:
    """Checks tensors that hold state per request, given by name. Call it before steps are run or captured.

    Each must have an entry for every row of the request table, the reserved row 0 included, which padded sequences use.
    Then every sequence of every padded batch has an entry. Raises BadTensor.
    """
    entries = table.spaces[0].entries
    for name, state in states.items():
        require_tensor(name, state)
        found = state.shape[0] if state.dim() else 0
        if found < len(entries):
            raise BadTensor(
                f"{name} has {found} entries; it must have {len(entries)}, one per row: sequences have rows 0 to "
                f"{len(entries) - 1}, and padded ones row 0"
            )
        if state.device != entries.device:
            raise BadTensor(f"{name} is on {state.device}; the request table is on {entries.device}")
