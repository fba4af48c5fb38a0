"""A ROCm-first attention runtime: `import rocm_attn as ra`, and then `ra.build_runtime`, `ra.StepRunner` and so on.

Its stable names are those of __init__.pyi, and those of its modules `ra.drafts`, `ra.graphs` and so on. Each is
imported when it is first used: importing rocm_attn itself does not import torch. See docs/stability.md, docs/names.md
and docs/architecture.md.
"""

from rocm_attn.stable_names import StableNames

_NAMES = StableNames(__name__, globals())
__all__ = _NAMES.all
__getattr__, __dir__ = _NAMES.get, _NAMES.dir
