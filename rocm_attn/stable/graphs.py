"""Checks and sizes of graphs, and forwards that are compiled: stable names, as `ra.graphs`."""

# isort: off

# Checks and sizes of graphs, and forwards that are compiled
from rocm_attn.capture.check import NO_CHECK as NO_CHECK
from rocm_attn.capture.check import CaptureCheck as CaptureCheck
from rocm_attn.capture.graphs import eager_steps_before_capture as eager_steps_before_capture
from rocm_attn.hip_graphs.size_ladder import default_ladder as default_ladder
from rocm_attn.step.metrics import Durations as Durations
from rocm_attn.integrations.compiled import SPLITTING_OPS as SPLITTING_OPS
from rocm_attn.integrations.compiled import CompiledForward as CompiledForward
from rocm_attn.integrations.compiled import CompiledLayers as CompiledLayers
from rocm_attn.integrations.compiled import compile_forward as compile_forward
from rocm_attn.integrations.compiled import compiled_layers as compiled_layers
