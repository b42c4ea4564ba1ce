"""Output items of a response while it is made, and the events that tell of them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from qwen3_omni_neuron.serving.openai.ids import PUBLIC_ID_BYTES, new_id
from qwen3_omni_neuron.serving.openai.reply_text import Call, Content, Reasoning, ReplyPart

Json = dict[str, Any]
_SAID = ("type", "role", "content", "call_id", "name", "arguments", "output")
ResponseEvent = tuple[str, Json]
"""Type and fields of an event, without its number."""
# Prefix of an item's id, by its type.
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}


class OutputItems:
    """Items of one response: a text, reasoning or call each, in the order of the reply.

    items: all items so far, as OpenAI's API has them; the last one may be in progress.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._texts: list[str] = []  # parts of the item in progress
        self._logprobs: list[Json] = []
        self._open: str | None = None  # its type

    def add(self, part: ReplyPart) -> Iterator[ResponseEvent]:
        """Add the next part of the reply. Yields the events for it."""
        if isinstance(part, Call):
            yield from self.end()
            yield from self._call(part)
            return
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        if self._open != kind:
            yield from self.end()
            yield from self._begin(kind)
        self._texts.append(part.text)
        logprobs = part.logprobs if isinstance(part, Content) else ()
        self._logprobs += logprobs
        yield self._of_part(f"response.{self._text_kind}.delta", logprobs, delta=part.text)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """End the last item with a status. Yields the events for it.

        A reply of no text and no call is a message without text: clients expect one.
        """
        if all(item["type"] == "reasoning" for item in self.items) and self._open != "message":
            yield from self.end()
            yield from self._begin("message")
        yield from self.end(status)

    def end(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """End the text in progress, if there is one. Yields the events for it."""
        if self._open is None:
            return
        kind, text, item = self._text_kind, "".join(self._texts), self.items[-1]
        item |= {"status": status, "content": [_part(kind, text, self._logprobs)]}
        yield self._of_part(f"response.{kind}.done", self._logprobs, text=text)
        yield self._of_part("response.content_part.done", part=item["content"][0])
        yield self._of_item("response.output_item.done")
        self._open = None

    def _begin(self, kind: str) -> Iterator[ResponseEvent]:
        self._open, self._texts, self._logprobs = kind, [], []
        if kind == "message":
            item: Json = {"id": _item_id(kind), "type": kind, "role": "assistant"}
        else:
            item = {"id": _item_id(kind), "type": kind, "summary": []}
        self.items.append(item | {"status": "in_progress", "content": []})
        yield self._of_item("response.output_item.added")
        yield self._of_part("response.content_part.added", part=_part(self._text_kind, ""))

    def _call(self, call: Call) -> Iterator[ResponseEvent]:
        name = _item_id("function_call")
        item = {"id": name, "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append(item | {"status": "in_progress", "arguments": ""})
        yield self._of_item("response.output_item.added")
        where = {"item_id": name, "output_index": len(self.items) - 1}
        status = "completed" if call.complete else "incomplete"
        self.items[-1] |= {"status": status, "arguments": call.arguments}
        arguments = "response.function_call_arguments"
        yield f"{arguments}.delta", where | {"delta": call.arguments}
        yield f"{arguments}.done", where | {"arguments": call.arguments, "name": call.name}
        yield self._of_item("response.output_item.done")

    @property
    def _text_kind(self) -> str:
        return "output_text" if self._open == "message" else "reasoning_text"

    def _of_item(self, event: str) -> ResponseEvent:
        return event, {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _of_part(self, event: str, logprobs: Sequence[Json] = (), **more: Any) -> ResponseEvent:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        fields = {**where, "content_index": 0, **more}
        if event.startswith("response.output_text"):
            fields["logprobs"] = [_in_event(one) for one in logprobs]
        return event, fields


def sent_back(item: Json) -> Json:
    """Return an item as a later turn takes it: without log-probabilities, which may be long."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def with_ids(items: Iterable[Json]) -> dict[str, bytes]:
    """Return an input's items in JSON by their ids: the client's, unless it has come before."""
    made = dict[str, bytes]()
    for item in items:
        name = item.get("id")
        if not isinstance(name, str) or name in made:
            name = _item_id(item.get("type", "message"))
        made[name] = to_json(item | {"id": name})
    return made


def ids_listed(items: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """Return a conversation's items as a list of them has them, each by an id of its own.

    An item that is sent again is left out. Another one of the same id gets a new id, which is the
    same in every list of the conversation. Only items that share an id are parsed.
    """
    items = list(items)
    shared = {name for name, count in Counter(name for name, _ in items).items() if count > 1}
    made, said = dict[str, bytes](), set[tuple[str, bytes]]()
    for own, content in items:
        name, number = own, 1
        if own in shared:
            key = own, _digest(listed(own, content))
            if key in said:
                continue
            said.add(key)
        while name in made:
            number += 1
            name = f"{own}_{number}"
        made[name] = content
    return made


def listed(name: str, content: bytes) -> Json:
    """Return an item as a list has it: with its id there, type, status and parts."""
    made = {"type": "message", "status": "completed", **from_json(content), "id": name}
    said = made.get("content")
    if isinstance(said, str):
        kind = "output_text" if made["role"] == "assistant" else "input_text"
        made["content"] = [_part(kind, said)]
    return made


def _digest(item: Json) -> bytes:
    """Return a digest of what an item says, without what clients leave out or add."""
    said = {name: item.get(name) for name in _SAID}
    if isinstance(said["content"], list):
        said["content"] = [
            {name: value for name, value in part.items() if name not in ("annotations", "logprobs")}
            for part in said["content"]
        ]
    return hashlib.blake2b(to_json(said)).digest()


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    part: Json = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "output_text" else part


def _item_id(kind: str) -> str:
    return new_id(_PREFIXES[kind], PUBLIC_ID_BYTES)


def _in_event(logprob: Json) -> Json:
    """Return a token's log-probability as events have it: without the token's bytes."""
    likeliest = [_without_bytes(other) for other in logprob["top_logprobs"]]
    return _without_bytes(logprob) | {"top_logprobs": likeliest}


def _without_bytes(logprob: Json) -> Json:
    return {"token": logprob["token"], "logprob": logprob["logprob"]}
