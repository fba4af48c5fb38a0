"""The serving engine and OpenAI server on rocm_attn: `rocm_serve.load_model`, `rocm_serve.Engine` and so on.

The stable names are those of __init__.pyi. Each is imported when it is first used. See docs/serving.md.
"""

from rocm_attn.stable_names import StableNames

_NAMES = StableNames(__name__, globals())
__all__ = _NAMES.all
__getattr__, __dir__ = _NAMES.get, _NAMES.dir
