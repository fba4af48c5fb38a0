"""Sparse and recurrent layers, and parts of attention: stable names, as `ra.layers`."""

# isort: off

# Sparse and recurrent layers, and parts of attention
from rocm_attn.problem import ALL_KEYS as ALL_KEYS
from rocm_attn.problem import AllKeys as AllKeys
from rocm_attn.problem import Indexer as Indexer
from rocm_attn.problem import Row as Row
from rocm_attn.problem import EarlierSelection as EarlierSelection
from rocm_attn.kernels.sparse.arguments import Indexing as Indexing
from rocm_attn.kernels.sparse.arguments import LastUnit as LastUnit
from rocm_attn.kernels.sparse.arguments import Pooling as Pooling
from rocm_attn.recurrence import Recurrence as Recurrence
from rocm_attn.kernels.states.arguments import Update as Update
from rocm_attn.recurrence import Convolution as Convolution
from rocm_attn.paging.state_pool import RecurrentLayers as RecurrentLayers
from rocm_attn.step.head_weights import HeadWeights as HeadWeights
from rocm_attn.step.merging import merge_states as merge_states
from rocm_attn.step.expanded import ExpandedPrefill as ExpandedPrefill
