"""Text as an array of the code points of its characters."""

import numpy as np
import numpy.typing as npt

CodePoints = npt.NDArray[np.uint32]


def code_points(text: str) -> CodePoints:
    """The code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
