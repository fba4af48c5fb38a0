"""RowDrafter: the base of drafters that run a model, with their own rows and KV."""

from abc import abstractmethod
from collections.abc import Mapping, Set
from collections.abc import Sequence as Many
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from rocm_attn.capture.graphs import Progress
from rocm_attn.errors import DeviceFault
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.request import Sequence
from rocm_serve.speculation.draft_runners import DraftRunners
from rocm_serve.speculation.drafts import DraftTree
from rocm_serve.speculation.speculation import Drafter


class _HasRow(Protocol):
    @property
    def row(self) -> int: ...


Held = TypeVar("Held", bound=_HasRow)


class RowDrafter(Drafter, Generic[Held]):
    """Drafts with a model whose rows follow the sequences.

    runners: of the model
    table:   its rows, with room for a row for each sequence that runs
    few:     most new tokens of a sequence in the steps of the model that are captured
    """

    def __init__(self, runners: DraftRunners, table: RequestTable, few: int) -> None:
        self.runners, self.table, self._few = runners, table, few
        self._rows: dict[int, Held] = {}  # by the requests' numbers

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> Mapping[int, DraftTree]:
        """Like Drafter.draft. A sequence that the model has no room for, or that is too long for it, gets no drafts.

        After a fault of the device there are none either: no request needs drafts. After any error the model starts
        anew, because its rows may count tokens that no step has stored.
        """
        try:
            return self._draft(decoding, alive)
        except BaseException as error:
            self._keep(frozenset())
            if isinstance(error, DeviceFault):
                return {}
            raise

    @property
    def probabilities(self) -> Tensor:
        return self.runners.probabilities

    def capture_all(self, progress: Progress) -> None:
        self.runners.capture_all(progress)

    def leave(self, number: int) -> None:
        """Frees the row of a request, if it has one. The model reads the request from its first token again."""
        held = self._rows.pop(number, None)
        if held is not None:
            self.table.free(held.row)

    def _keep(self, numbers: Set[int]) -> None:
        """Frees the rows of all other requests."""
        for number in self._rows.keys() - numbers:
            self.leave(number)

    @abstractmethod
    def _draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> dict[int, DraftTree]:
        """Like draft(). Raises DeviceFault."""
