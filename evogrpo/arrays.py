"""Arrays of numpy by the type of their values.

Floats are of 64 bits unless the name says otherwise. Nothing here imports torch, so that worker
processes start fast.
"""

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
Float32Array = NDArray[np.float32]
IntArray = NDArray[np.int64]
