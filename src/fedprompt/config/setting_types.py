"""What the sections of a config are made of: their base classes and the types of their values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

MOST_ROUNDS = 1_000_000
MOST_EPOCHS = 100_000

Positive = Annotated[int, Field(ge=1, lt=2**31)]
NotNegative = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
RelativeRate = Annotated[str, Field(pattern=r"^\d+(\.\d+)?%$")]
Share = Annotated[float, Field(gt=0, le=1)]
Bound = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=150, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]

DeviceName = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]  # the program chooses, and the run file says what it chose
ScheduleName = Literal["constant", "cosine", "local_cosine"]

SiteName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


def _on_disk(value: str) -> str:
    """A name that a file system can have."""
    if "\0" in value or len(value) > 1024 or any(len(part.encode()) > 255 for part in value.split("/")):
        raise ValueError("be a path of at most 1024 letters, 255 bytes in each part, and no null character")
    return value


Location = Annotated[str, AfterValidator(_on_disk)]  # a path, or a name that may be one


def _validation_size(value: Any) -> Any:
    """No images are no validation split."""
    share, number = type(value) is float and 0 <= value < 1, type(value) is int and 0 <= value < 2**31
    if not (value is None or share or number):
        raise ValueError("be a share below 1, or a whole number of images per domain and class")
    return value or None


ValidationSize = Annotated[
    Annotated[int, Field(ge=0, lt=2**31)] | Annotated[float, Field(ge=0, lt=1)] | None,
    BeforeValidator(_validation_size),
]


class Section(BaseModel):
    """Unknown keys are errors, and nothing is converted silently: the text "False" is not a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Grown(Section):
    """A section with settings that were added later. At their defaults they are absent from hashes and run files, so that
    those of earlier versions stay equal.
    """

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        defaults = {name: type(self).model_fields[name].default for name in self.later}
        return {
            name: value
            for name, value in values.items()
            if name not in defaults or getattr(self, name) != defaults[name]
        }


class Extensible(Grown):
    """A section that names something others can add to. Where there are no `options`, hashes and run files have none."""

    later: ClassVar[tuple[str, ...]] = ("options",)
