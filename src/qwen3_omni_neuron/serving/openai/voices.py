"""Voices by name: the checkpoint's, and those of other services, which one of them speaks for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from qwen3_omni_neuron.errors import OptionError, did_you_mean
from qwen3_omni_neuron.serving.openai.errors import wrong_value

OTHER_VOICES: Mapping[str, str] = {
    **dict.fromkeys(("alloy", "coral", "marin", "nova", "sage", "shimmer"), "Chelsie"),
    **dict.fromkeys(("ash", "cedar", "onyx"), "Ethan"),
    **dict.fromkeys(("ballad", "echo", "fable", "verse"), "Aiden"),
    **dict.fromkeys(("cherry", "serena", "tina"), "Chelsie"),
}
"""OpenAI's voices and DashScope's, and the released checkpoint's voices that speak for them."""


class VoiceId(BaseModel):
    """A voice by its id, which is its name."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str


def _name(given: Any) -> Any:
    """Return the name in a voice object, and anything else unchanged."""
    if isinstance(given, Mapping) and set(given) == {"id"}:
        return given["id"]
    return given


VoiceName = Annotated[str, BeforeValidator(_name, json_schema_input_type=str | VoiceId)]
"""Field with a voice's name, which clients may send as an object, too."""


class Voices:
    """Names of a model's voices. A checkpoint without a talker has none, and only writes text."""

    def __init__(self, names: tuple[str, ...], aliases: Sequence[str] = ()):
        """aliases: NAME=VOICE, which precede OTHER_VOICES, as ServerSettings has them.

        Raises OptionError if one of them is for a voice that the model does not have.
        """
        self.names = names
        self._own = {name.lower(): name for name in names}
        self._aliases = {
            name: self._own.get(voice.lower(), names[0])
            for name, voice in OTHER_VOICES.items()
            if names
        }
        for alias in aliases if names else ():
            name, _, voice = alias.partition("=")
            if voice.lower() not in self._own:
                raise OptionError(
                    f"the voice alias {alias!r} is for a voice {voice!r}, which this checkpoint "
                    f"does not have. It has {', '.join(names)}."
                )
            self._aliases[name.lower()] = self._own[voice.lower()]

    @property
    def default(self) -> str | None:
        """The default voice."""
        return self.names[0] if self.names else None

    def speaker(self, voice: str, param: str) -> str:
        """Return the name of the checkpoint's voice that speaks. param: the request's field.

        Raises ApiError for an unknown voice.
        """
        found = self._own.get(voice.lower()) or self._aliases.get(voice.lower())
        if found is None:
            known = ", ".join(self.names) or "none"
            hint = did_you_mean(voice.capitalize(), self.names)
            hint = hint or did_you_mean(voice.lower(), self._aliases)
            message = f"there is no voice {voice[:80]!r}.{hint} There are: {known}."
            raise wrong_value(message, param)
        return found
