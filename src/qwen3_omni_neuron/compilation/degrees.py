"""Degrees of tensor parallelism."""

import re
from dataclasses import asdict, dataclass, replace

from qwen3_omni_neuron.errors import OptionError, format_value

_NUMBER = re.compile("[0-9]{1,4}")
_OF_MODEL = {
    "thinker": "thinker",
    "vision": "encoders",
    "audio": "encoders",
    "talker": "talker",
    "code_predictor": "predictor",
    "code2wav": "vocoder",
}


@dataclass(frozen=True)
class Degrees:
    """Number of cores that share each part's weights.

    A part is on the first cores of its stage, a code predictor of degree 1 on each of the talker's.
    talker: with projections. encoders: vision and audio.
    """

    thinker: int
    talker: int
    predictor: int
    vocoder: int
    encoders: int

    @classmethod
    def same(cls, degree: int) -> "Degrees":
        """Return one degree for every part."""
        return cls(degree, degree, degree, degree, degree)

    @classmethod
    def parse(cls, given: "Degrees | int | str", usual: "Degrees") -> "Degrees":
        """Read degrees: 8, "8", or "thinker=8,predictor=1". Raises OptionError.

        usual: degrees of the parts that are not named.
        """
        if isinstance(given, Degrees):
            return given
        if _NUMBER.fullmatch(str(given)):
            return cls.same(int(given))
        named: dict[str, int] = {}
        for word in str(given).split(","):
            part, _, degree = word.partition("=")
            if part not in asdict(usual) or part in named or not _NUMBER.fullmatch(degree):
                raise OptionError(
                    f"tp must be a number, or some of "
                    f"{','.join(f'{name}=N' for name in asdict(usual))}, got {format_value(given)}."
                )
            named[part] = int(degree)
        return replace(usual, **named)

    @property
    def each(self) -> tuple[int, ...]:
        """The distinct degrees, ascending."""
        return tuple(sorted(set(asdict(self).values())))

    @property
    def setting(self) -> int | str:
        """The JSON value for `parse`; one number for equal degrees."""
        return self.each[0] if len(self.each) == 1 else str(self)

    def of(self, model: str) -> int:
        """Return the degree of a model's parts. model: one of compilation.plan.MODELS."""
        degree: int = getattr(self, _OF_MODEL[model])
        return degree

    def __str__(self) -> str:
        if len(self.each) == 1:
            return str(self.each[0])
        return ",".join(f"{part}={degree}" for part, degree in asdict(self).items())
