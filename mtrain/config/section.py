"""The base class of all sections of the configuration, and the types that several of them use."""

import difflib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mtrain.paths import expand_home

MAX_INT = 10**15  # enough for "never"; computations with larger numbers could overflow
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
TextLength = Annotated[int, Field(ge=2, le=65536)]  # in tokens
Weight = Annotated[float, Field(ge=0.001, le=1000)]  # relative to others
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
FilePath = Annotated[str, AfterValidator(expand_home)]  # of a file or folder, or a pattern of files


class Section(BaseModel):
    """A frozen, strictly typed group of keys. An unknown key is an error that names the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    removed_keys: ClassVar[frozenset[str]] = frozenset()  # of earlier versions; ignored

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: dict[Any, Any] | Self) -> dict[Any, Any] | Self:
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if key not in cls.removed_keys}
        for key in values:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(cls.model_fields)}"
                shown = " ".join(str(key).split())
                problem = {"key": str(key), "message": f"unknown key '{shown}'; {hint}"}
                raise PydanticCustomError("unknown_key", "{message}", problem)
        return values
