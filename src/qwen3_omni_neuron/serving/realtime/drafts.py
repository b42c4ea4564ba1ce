"""A client's item -> the message that the session reads, and the item as clients see it."""

import sys
from dataclasses import dataclass

from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.media import MediaReader, sound_bytes
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.ids import new_id
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

ITEM_BYTES = 1024  # bytes that an item counts for beside its content


@dataclass
class Draft:
    """A client's item while it is read, not yet in a turn.

    message: message for the session; its media may still have to be decoded. shown: the item as
    clients see it. account: the session's account. size: bytes that the item holds there.
    """

    id: str
    message: Json
    shown: Json
    account: Account
    size: int = 0

    def hold(self, size: int) -> None:
        """Count bytes of the item. Raises ApiError."""
        self.account.hold(size)
        self.size += size

    def drop(self) -> None:
        """Release the item's bytes."""
        self.account.release(self.size)
        self.size = 0


def read_item(item: Item, account: Account, media: MediaReader, codec: Codec) -> Draft:
    """Read a client's item, except media that need decoding: see `MediaReader.finish`.

    codec: format of its sound. Raises ApiError.
    """
    draft = draft_of(item, account)
    try:
        draft.hold(ITEM_BYTES + text_bytes(item))
        if isinstance(item, MessageItem):
            _read_content(draft, item, media, codec)
    except BaseException:
        draft.drop()
        raise
    return draft


def text_bytes(item: Item) -> int:
    """Return the memory in bytes of an item's text and of its images as clients see them."""
    if isinstance(item, CallItem):
        texts: list[str | None] = [item.name, item.arguments]
    elif isinstance(item, OutputItem):
        texts = [item.output]
    else:
        texts = [t for part in item.content for t in (part.text, part.transcript, part.image_url)]
    return sum(sys.getsizeof(text) for text in texts if text is not None)


def draft_of(item: Item, account: Account) -> Draft:
    """Return the draft of an item, without a message's content. It holds no bytes."""
    item_id = item.id or new_id("item_")
    if isinstance(item, OutputItem):
        shown = {"type": item.type, "call_id": item.call_id, "output": item.output}
        return Draft(item_id, {"role": "tool", "content": item.output}, shown, account)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        calls = [{"type": "function", "function": function}]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        shown = {"type": item.type, "call_id": item.call_id or new_id("call_"), **function}
        return Draft(item_id, message, shown, account)
    message = {"role": item.role, "content": []}
    return Draft(item_id, message, {"type": "message", "role": item.role, "content": []}, account)


def _read_content(draft: Draft, item: MessageItem, media: MediaReader, codec: Codec) -> None:
    """Read a message's parts into its draft. Raises ApiError."""
    content: list[Json] = []
    for index, part in enumerate(item.content):
        read, shown = _read_part(part, item.role, f"item.content.{index}", media, codec)
        if read["type"] == "audio":
            draft.hold(sound_bytes(read["audio"]))
        content.append(read)
        draft.shown["content"].append(shown)
    only_text = item.role != "user"
    draft.message["content"] = "".join(x["text"] for x in content) if only_text else content


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
        raise ApiError(400, message, "invalid_value", f"{where}.type")
    if part.type == "input_audio":
        sound = _required(part.audio, where, "audio")
        samples = decoded_sound(sound, codec, f"{where}.audio")
        samples = Resampler(codec.rate, TURN_RATE).push(samples, last=True)
        shown = {"type": "input_audio", "transcript": part.transcript}
        return {"type": "audio", "audio": samples, "sampling_rate": TURN_RATE}, shown
    url = _required(part.image_url, where, "image_url")
    read = media.read({"type": "image_url", "image_url": {"url": url}}, f"{where}.image_url")
    return read, {"type": "input_image", "image_url": url}


def _required(value: str | None, where: str, name: str) -> str:
    if value is None:
        message = f"{where} has no {name}."
        raise ApiError(400, message, "missing_field", f"{where}.{name}")
    return value
