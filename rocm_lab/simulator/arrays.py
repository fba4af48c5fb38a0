"""Arrays of lanes, and the types that operands have."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

U16, I16, F16 = (np.dtype(name) for name in ("uint16", "int16", "float16"))
U32, I32, F32 = (np.dtype(name) for name in ("uint32", "int32", "float32"))
U64, I64, F64 = (np.dtype(name) for name in ("uint64", "int64", "float64"))
