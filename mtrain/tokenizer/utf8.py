"""Which byte pieces may follow others, so that they spell valid UTF-8."""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# The bytes that each state allows, from first to last, and the state after them: The Unicode Standard,
# table 3-7. State 0 is between characters; the others are inside one.
_STATES = (
    "00-7F:0 C2-DF:1 E0-E0:4 E1-EC:2 ED-ED:5 EE-EF:2 F0-F0:6 F1-F3:3 F4-F4:7",
    "80-BF:0",  # the last byte of a character
    "80-BF:1",  # two bytes are missing
    "80-BF:2",  # three bytes are missing
    "A0-BF:1",  # after E0: other characters are shorter
    "80-9F:1",  # after ED: others are surrogates
    "90-BF:2",  # after F0: others are shorter
    "80-8F:2",  # after F4: others are no characters
)
LONGEST = 4  # bytes of a character


def utf8_states(values: Mapping[int, int], size: int) -> npt.NDArray[np.int8]:
    """The state (8, V) after each of V tokens in each state; -1 if the token is not allowed there. `values`
    are the bytes of those tokens that are bytes."""
    after = np.full((len(_STATES), size), -1, np.int8)
    after[0] = 0
    after[0, list(values)] = -1
    for state, ranges in enumerate(_STATES):
        for first, last, following in re.findall("(..)-(..):(.)", ranges):
            allowed = range(int(first, 16), int(last, 16) + 1)
            after[state, [i for i, byte in values.items() if byte in allowed]] = int(following)
    return after
