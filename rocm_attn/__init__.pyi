# The stable names at the top, in the groups of docs/names.md, and the modules that have the others. Type checkers read
# this file, and so does __init__.py.
# isort: off

__version__: str

# A model's layers
from rocm_attn.problem import UNLIMITED_WINDOW as UNLIMITED_WINDOW
from rocm_attn.problem import KVEncoding as KVEncoding
from rocm_attn.kernels.cache.page_format import PageFormat as PageFormat
from rocm_attn.kernels.cache.page_format import PoolKind as PoolKind
from rocm_attn.problem import Problem as Problem
from rocm_attn.kernels.cache.page_format import Scales as Scales
from rocm_attn.step.kv_scales import KVScales as KVScales

# A runtime, its rows and its pages
from rocm_attn.runtime import AttentionRuntime as AttentionRuntime
from rocm_attn.selection.build import build_runtime as build_runtime
from rocm_attn.step.options import RuntimeOptions as RuntimeOptions
from rocm_attn.paging.request_table import RequestTable as RequestTable
from rocm_attn.paging.index_spaces import Space as Space

# A step
from rocm_attn.batch.step_batch import NO_TOKEN_IDS as NO_TOKEN_IDS
from rocm_attn.batch.step_batch import StepBatch as StepBatch
from rocm_attn.batch.padding import PadTo as PadTo
from rocm_attn.batch.inputs import ON_HOST as ON_HOST
from rocm_attn.batch.inputs import DeviceInputs as DeviceInputs
from rocm_attn.step.step import Part as Part
from rocm_attn.step.gate import AGAIN as AGAIN
from rocm_attn.step.step import Step as Step
from rocm_attn.step.outputs import PerToken as PerToken
from rocm_attn.step.protocols import LayerCalls as LayerCalls
from rocm_attn.kernels.cache.row_work import QkvWork as QkvWork
from rocm_attn.kernels.cache.row_work import RopePairs as RopePairs
from rocm_attn.kernels.cache.row_work import RopeTable as RopeTable
from rocm_attn.kernels.cache.row_work import RowNorm as RowNorm

# Graphs
from rocm_attn.capture.step_runner import StepRunner as StepRunner
from rocm_attn.capture.graphs import CaptureReport as CaptureReport
from rocm_attn.capture.graphs import recorder_for as recorder_for
from rocm_attn.step.metrics import Metrics as Metrics

# Machines and ranks
from rocm_attn.machine.target import Target as Target
from rocm_attn.machine.target import known_target as known_target

# Errors
from rocm_attn.errors import BadBatch as BadBatch
from rocm_attn.errors import DeviceFault as DeviceFault
from rocm_attn.errors import FitsLater as FitsLater
from rocm_attn.errors import NeverFits as NeverFits
from rocm_attn.errors import OutOfPages as OutOfPages
from rocm_attn.errors import RocmAttnError as RocmAttnError

# Modules with further names
from rocm_attn import errors as errors
from rocm_attn.stable import checks as checks
from rocm_attn.stable import drafts as drafts
from rocm_attn.stable import engines as engines
from rocm_attn.stable import graphs as graphs
from rocm_attn.stable import layers as layers
from rocm_attn.stable import pages as pages
from rocm_attn.stable import ranks as ranks
