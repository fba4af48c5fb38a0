"""build_runtime: chooses the kernels of a model's layers for this machine, and builds a runtime of them."""

from collections.abc import Sequence

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.guards.registry import Guards, guards_from_settings
from rocm_attn.machine.agreement import Agreement, alone
from rocm_attn.machine.devices import with_index
from rocm_attn.machine.settings import require_kind
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions


def build_runtime(
    problems: Sequence[Problem],
    options: RuntimeOptions,
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
    *,
    device: torch.device | str,
    target: Target | None = None,
    guards: Guards | None = None,
    agree: Agreement = alone,
) -> AttentionRuntime:
    """Chooses kernels for a model's layers, and builds a runtime that allocates its own KV pages.

    problems: one for each layer; layers with equal problems share a plan
    recurrent: recurrent layers, which keep a state per request in place of K and V; they are numbered from 0
    target:   the device; detected if not given
    guards:   the safeguards; default: all but those that the environment switches off (machine/settings.py)
    agree:    how ranks that share a model's layers agree on kernels, graphs and faults: agreement.among(group). All
              ranks must then build their runtimes, capture graphs and begin steps in the same order

    Raises Unsupported if no kernel serves a layer, BadProblem and NeverFits for an impossible pool, and
    BadSetting for safeguards that do not exist, for a device that is not there, and for arguments of another kind.
    """
    require_kind("problems", problems, Sequence, BadSetting)
    for problem in problems:
        require_kind("a layer's problem", problem, Problem, BadSetting)
    require_kind("options", options, RuntimeOptions, BadSetting)
    require_kind("recurrent", recurrent, RecurrentLayers, BadSetting)
    device = with_index(device)
    guards = guards if guards is not None else guards_from_settings()
    require_kind("guards", guards, Guards, BadSetting)
    target = target if target is not None else detect_target(device)
    require_kind("target", target, Target, BadSetting)
    selections = choose_kernels(
        list(dict.fromkeys(problems)),
        target,
        options.provider,
        options.pool_size,
        deterministic=options.deterministic,
        device=device,
        agree=agree,
    )
    kinds = LayerKinds.of(problems, options.spaces(problems), selections)
    return AttentionRuntime(kinds, options, recurrent, device=device, guards=guards, agree=agree)
