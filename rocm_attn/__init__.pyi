# The stable names, each once, in the groups of docs/names.md. Type checkers read this file, and so does __init__.py.
# isort: off

# A model's layers
from rocm_attn.problem import UNLIMITED_WINDOW as UNLIMITED_WINDOW
from rocm_attn.problem import KVEncoding as KVEncoding
from rocm_attn.kernels.cache.page_format import Encoding as Encoding
from rocm_attn.kernels.cache.page_format import PageFormat as PageFormat
from rocm_attn.kernels.cache.page_format import PoolKind as PoolKind
from rocm_attn.problem import Problem as Problem
from rocm_attn.problem import ALL_KEYS as ALL_KEYS
from rocm_attn.problem import AllKeys as AllKeys
from rocm_attn.problem import Indexer as Indexer
from rocm_attn.problem import EarlierSelection as EarlierSelection
from rocm_attn.kernels.sparse.arguments import Indexing as Indexing
from rocm_attn.kernels.sparse.arguments import LastUnit as LastUnit
from rocm_attn.kernels.sparse.arguments import Pooling as Pooling
from rocm_attn.kernels.cache.page_format import Scales as Scales
from rocm_attn.step.head_weights import HeadWeights as HeadWeights
from rocm_attn.step.kv_scales import KVScales as KVScales
from rocm_attn.paging.convert import Conversion as Conversion
from rocm_attn.paging.convert import convert_pages as convert_pages

# A runtime, its rows and its pages
from rocm_attn.runtime import AttentionRuntime as AttentionRuntime
from rocm_attn.selection.build import build_runtime as build_runtime
from rocm_attn.step.options import RuntimeOptions as RuntimeOptions
from rocm_attn.paging.request_table import RequestTable as RequestTable
from rocm_attn.paging.state_slots import require_state_slots as require_state_slots
from rocm_attn.paging.index_spaces import Space as Space

# A step
from rocm_attn.batch.step_batch import NO_TOKEN_IDS as NO_TOKEN_IDS
from rocm_attn.batch.step_batch import StepBatch as StepBatch
from rocm_attn.batch.padding import PadTo as PadTo
from rocm_attn.batch.inputs import ON_HOST as ON_HOST
from rocm_attn.batch.inputs import DeviceInputs as DeviceInputs
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT as NO_PARENT
from rocm_attn.batch.drafts import Drafts as Drafts
from rocm_attn.batch.step_batch import draft_batch as draft_batch
from rocm_attn.batch.mask import StepMask as StepMask
from rocm_attn.batch.mask import TreeMask as TreeMask
from rocm_attn.batch.prefixes import PrefixGroup as PrefixGroup
from rocm_attn.batch.prefixes import SharedPrefixes as SharedPrefixes
from rocm_attn.step.step import Part as Part
from rocm_attn.step.step import Series as Series
from rocm_attn.step.gate import AGAIN as AGAIN
from rocm_attn.step.accepting import select_last_accepted as select_last_accepted
from rocm_attn.step.step import Step as Step
from rocm_attn.step.outputs import PerToken as PerToken
from rocm_attn.step.protocols import LayerCalls as LayerCalls
from rocm_attn.kernels.cache.row_work import QkvWork as QkvWork
from rocm_attn.kernels.cache.row_work import RopePairs as RopePairs
from rocm_attn.kernels.cache.row_work import RopeTable as RopeTable
from rocm_attn.kernels.cache.row_work import RowNorm as RowNorm
from rocm_attn.step.merging import merge_states as merge_states
from rocm_attn.step.expanded import ExpandedPrefill as ExpandedPrefill

# Graphs
from rocm_attn.capture.step_runner import StepRunner as StepRunner
from rocm_attn.capture.check import NO_CHECK as NO_CHECK
from rocm_attn.capture.check import CaptureCheck as CaptureCheck
from rocm_attn.capture.graphs import CaptureReport as CaptureReport
from rocm_attn.capture.graphs import eager_steps_before_capture as eager_steps_before_capture
from rocm_attn.capture.graphs import recorder_for as recorder_for
from rocm_attn.hip_graphs.size_ladder import default_ladder as default_ladder
from rocm_attn.step.metrics import Metrics as Metrics
from rocm_attn.step.metrics import Durations as Durations

# Forwards that are compiled
from rocm_attn.integrations.compiled import SPLITTING_OPS as SPLITTING_OPS
from rocm_attn.integrations.compiled import CompiledForward as CompiledForward
from rocm_attn.integrations.compiled import CompiledLayers as CompiledLayers
from rocm_attn.integrations.compiled import compile_forward as compile_forward
from rocm_attn.integrations.compiled import compiled_layers as compiled_layers

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
from rocm_attn.step.external_step import ExternalStep as ExternalStep
from rocm_attn.step.external_step import Lengths as Lengths

# Tokens that move to another pool
from rocm_attn.integrations.kv_passport import KVExtent as KVExtent
from rocm_attn.integrations.kv_passport import KVPassport as KVPassport
from rocm_attn.integrations.kv_transfer import KVExporter as KVExporter
from rocm_attn.integrations.kv_transfer import KVImporter as KVImporter

# Machines and ranks
from rocm_attn.machine.agreement import Agreement as Agreement
from rocm_attn.machine.agreement import RanksDiverged as RanksDiverged
from rocm_attn.machine.agreement import alone as alone
from rocm_attn.machine.agreement import among as among
from rocm_attn.machine.target import Target as Target
from rocm_attn.machine.target import known_target as known_target

# Looking on
from rocm_attn.guards.registry import Guards as Guards
from rocm_attn.guards.registry import guards_from_settings as guards_from_settings
from rocm_attn.machine.watchdog import Watchdog as Watchdog
from rocm_attn.watch.flight_recorder import FlightRecorder as FlightRecorder
from rocm_attn.watch.sampled_check import SampledCheck as SampledCheck
from rocm_attn.watch.shadow_check import shadow_check as shadow_check

# Errors
from rocm_attn.errors import BadBatch as BadBatch
from rocm_attn.errors import BadLogits as BadLogits
from rocm_attn.errors import BadModel as BadModel
from rocm_attn.errors import BadProblem as BadProblem
from rocm_attn.errors import BadRequest as BadRequest
from rocm_attn.errors import BadSetting as BadSetting
from rocm_attn.errors import BadTensor as BadTensor
from rocm_attn.errors import CapacityExceeded as CapacityExceeded
from rocm_attn.errors import DeviceFault as DeviceFault
from rocm_attn.errors import FitsLater as FitsLater
from rocm_attn.errors import GraphStale as GraphStale
from rocm_attn.errors import NeverFits as NeverFits
from rocm_attn.errors import NotCopied as NotCopied
from rocm_attn.errors import OutOfPages as OutOfPages
from rocm_attn.errors import OutOfRows as OutOfRows
from rocm_attn.errors import RocmAttnError as RocmAttnError
from rocm_attn.errors import Unsupported as Unsupported
from rocm_attn.errors import WrongState as WrongState
