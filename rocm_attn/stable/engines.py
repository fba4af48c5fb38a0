"""An engine's own pages, tables and graphs: stable names, as `ra.engines`."""

# isort: off

# An engine's own pages, tables and graphs
from rocm_attn.external import Bounds as Bounds
from rocm_attn.external import ExternalAttention as ExternalAttention
from rocm_attn.external import ExternalOptions as ExternalOptions
from rocm_attn.external import LayerSource as LayerSource
from rocm_attn.external import LogAndCount as LogAndCount
from rocm_attn.paging.adopted import CsrSource as CsrSource
from rocm_attn.paging.adopted import TableSource as TableSource
from rocm_attn.paging.adopted import TableUnit as TableUnit
from rocm_attn.paging.adopted import AdoptedTables as AdoptedTables
from rocm_attn.paging.adopted_pages import AdoptedPages as AdoptedPages
from rocm_attn.paging.adopted_pages import EnginePages as EnginePages
from rocm_attn.step.external_step import ONE_EACH as ONE_EACH
from rocm_attn.step.external_step import BoolCells as BoolCells
from rocm_attn.step.external_step import Boundaries as Boundaries
from rocm_attn.step.external_step import Causality as Causality
from rocm_attn.step.external_step import DeviceSpans as DeviceSpans
from rocm_attn.step.external_step import ExternalStep as ExternalStep
from rocm_attn.step.external_step import NewLengths as NewLengths
