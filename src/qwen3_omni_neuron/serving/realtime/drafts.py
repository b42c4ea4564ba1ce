"""A client's item -> a turn that the session has not read yet, with the item as clients see it."""

import sys
from functools import partial
from typing import Any

import numpy as np

from qwen3_omni_neuron.prompt.turns import Turn
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.media import Hold, MediaReader, sound_bytes
from qwen3_omni_neuron.serving.openai.bodies import check_further
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import ITEM, names_in
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    TURN_RATE,
    Codec,
    Resampler,
    decoded_sound,
)
from qwen3_omni_neuron.serving.realtime.events import (
    CallItem,
    ContentPart,
    Item,
    Json,
    MessageItem,
    OutputItem,
)

# Fields of a part of content by its type, beside those without effect.
_PART_FIELDS = {
    **{"input_text": ("text",), "input_audio": ("audio", "transcript")},
    **{"input_image": ("image_url",), "output_text": ("text",), "output_audio": ("transcript",)},
}
ITEM_BYTES = 1024  # bytes that an item counts for beside its content


def new_item(kind: str, item_id: str | None = None, **fields: Any) -> Json:
    """Return an item as clients see it."""
    item_id = item_id or new_id("item_")
    return {"id": item_id, "object": "realtime.item", "type": kind, "status": "completed", **fields}


def read_item(item: Item, account: Account, media: MediaReader, codec: Codec) -> Turn:
    """Read a client's item, except media that need decoding: see `MediaReader.finish`.

    codec: format of its sound. Returns a draft: `Session.read` has to read its message. The account
    holds its size. Raises ApiError.
    """
    check_further(item, "item", _taken(item))
    draft = draft_of(item)
    account.hold(draft.size)
    try:
        if isinstance(item, MessageItem):
            _read_content(draft, item, partial(hold, draft, account), media, codec)
    except BaseException:
        account.release(draft.size)
        raise
    return draft


def hold(draft: Turn, account: Account, size: int) -> None:
    """Count bytes of a draft. Raises ApiError."""
    account.hold(size)
    draft.size += size


def draft_of(item: Item) -> Turn:
    """Return the draft of an item, without a message's content. No account holds its size."""
    if isinstance(item, OutputItem):
        draft = Turn("tool", item.output)
        draft.shown = new_item(item.type, item.id, call_id=item.call_id, output=item.output)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        draft = Turn("assistant", "", calls=[{"type": "function", "function": function}])
        call_id = item.call_id or new_id("call_")
        draft.shown = new_item(item.type, item.id, call_id=call_id, **function)
    else:
        draft = Turn(item.role, [])
        draft.shown = new_item(item.type, item.id, role=item.role, content=[])
    draft.id, draft.size = draft.shown["id"], ITEM_BYTES + _text_bytes(item)
    return draft


def _text_bytes(item: Item) -> int:
    """Return the memory in bytes of an item's text and of its images as clients see them."""
    if isinstance(item, CallItem):
        texts: list[str | None] = [item.name, item.arguments]
    elif isinstance(item, OutputItem):
        texts = [item.output]
    else:
        texts = [t for part in item.content for t in (part.text, part.transcript, part.image_url)]
    return sum(sys.getsizeof(text) for text in texts if text is not None)


def _read_content(
    draft: Turn, item: MessageItem, hold: Hold, media: MediaReader, codec: Codec
) -> None:
    """Read a message's parts into its draft. Raises ApiError."""
    taken = names_in(ITEM, "content[]")
    for index, part in enumerate(item.content):
        if part.type != "input_image":
            check_further(part, f"item.content[{index}]", taken)
        _check_fields(part, f"item.content[{index}]")
        read, shown = _read_part(part, item.role, f"item.content[{index}]", media, codec)
        if read["type"] == "audio":
            hold(sound_bytes(len(read["audio"])))
        draft.given.append(read)
        draft.shown["content"].append(shown)
    if item.role != "user":
        draft.given = "".join(part["text"] for part in draft.given)


def _check_fields(part: ContentPart, where: str) -> None:
    """Refuse a field that parts of other types have. Raises ApiError."""
    own = _PART_FIELDS[part.type]
    for name in ("text", "audio", "transcript", "image_url"):
        if getattr(part, name) is not None and name not in own:
            raise wrong_value(
                f"{where}.{name}: a part of type {part.type} has {' and '.join(own)} alone. Send "
                "another part, or leave it out.",
                f"{where}.{name}",
            )


def _taken(item: Item) -> frozenset[str]:
    """Return an item's fields without effect: any, where it is an assistant's."""
    names = names_in(ITEM, "")
    return names if getattr(item, "role", "") == "assistant" else names - {"*"}


def _read_part(
    part: ContentPart, role: str, where: str, media: MediaReader, codec: Codec
) -> tuple[Json, Json]:
    """Return a part of a message's content for the API, and as clients see it."""
    text = part.text if part.type in ("input_text", "output_text") else part.transcript
    # Pipecat's client sends an assistant's text as input_text.
    if role == "assistant" and part.type in ("output_text", "output_audio", "input_text"):
        text = _required(text, where, "transcript" if part.type == "output_audio" else "text")
        return {"type": "text", "text": text}, {"type": "output_text", "text": text}
    if part.type == "input_text":
        text = _required(text, where, "text")
        return {"type": "text", "text": text}, {"type": "input_text", "text": text}
    if role != "user" or part.type.startswith("output_"):
        message = f"{where} is {part.type}, which a message of role {role} can't have."
        raise wrong_value(message, f"{where}.type")
    if part.type == "input_audio":
        sound = _required(part.audio, where, "audio")
        samples = decoded_sound(sound, codec, f"{where}.audio")
        samples = Resampler(codec.rate, TURN_RATE).push(samples, last=True)
        shown = {"type": "input_audio", "transcript": part.transcript}
        return {"type": "audio", "audio": samples, "sampling_rate": TURN_RATE}, shown
    url = _required(part.image_url, where, "image_url")
    read = media.read({**(part.model_extra or {}), "type": "input_image", "image_url": url}, where)
    # As an array: it can be longer than all text that a stored session may have.
    return read, {"type": "input_image", "image_url": np.frombuffer(url.encode(), np.uint8)}


def _required(value: str | None, where: str, name: str) -> str:
    if value is None:
        message = f"{where} has no {name}."
        raise ApiError(400, message, "missing_field", f"{where}.{name}")
    return value
