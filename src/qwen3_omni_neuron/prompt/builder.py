"""Messages -> token ids, mel features, pixels and positions."""

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.checkpoint.json_files import read_preprocessor
from qwen3_omni_neuron.errors import CheckpointError, MessageError, PromptTooLongError
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, OmniConfig
from qwen3_omni_neuron.model.talker import user_positions
from qwen3_omni_neuron.prompt.media.fields import ignore
from qwen3_omni_neuron.prompt.media.items import AudioItem, ImageItem, Media, MediaLoader, VideoItem
from qwen3_omni_neuron.prompt.media.log_mel import GrowingClip, MelSettings, features
from qwen3_omni_neuron.prompt.media.pixels import MediaSettings, PixelSettings
from qwen3_omni_neuron.prompt.messages import (
    Check,
    Conversation,
    ConversationPart,
    Messages,
    Truncation,
    check_characters,
    kept_messages,
    read_messages,
    read_tools,
    split,
)
from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.prompt.prompt import (
    MediaRun,
    Placed,
    Prompt,
    TalkerPrompt,
    rope_positions,
    talker_positions,
)
from qwen3_omni_neuron.prompt.tokenizer import (
    AT_ONCE,
    ChatTemplate,
    LiteralText,
    SpecialNames,
    Tokenizer,
)

_EMPTY_TURN: Mapping[str, Any] = {"role": "user", "content": ""}
_MOST_LENGTHS = 1 << 16


@dataclass(frozen=True)
class _Asked:
    """Conversation for the chat template. Fields: see `PromptBuilder.assemble`."""

    messages: Messages
    media: Sequence[Media] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    literal_text: bool = False
    said: Set[int] = frozenset()

    def part(self, begin: int, end: int) -> "_Asked":
        said = {index - begin for index in range(begin, end) if index in self.said}
        return replace(self, messages=self.messages[begin:end], media=(), tools=(), said=said)


class PromptBuilder:
    """Converter of messages into prompts. folder: of the checkpoint.

    Source: transformers Qwen3OmniMoeProcessor.__call__.
    """

    def __init__(self, folder: Path, config: OmniConfig):
        self.folder, self._config = folder, config
        self._tokenizer = words = Tokenizer(folder)
        self.added_tokens, self.tokenizer_json = words.added_tokens, words.to_json
        self.encode_words, self.encode_exactly = words.encode_words, words.encode_exactly
        self.token_bytes, self.decode = words.token_bytes, words.decode
        self.least_tokens = words.least_tokens
        settings = read_preprocessor(folder)
        self._mel, self._pixels = MelSettings.of(settings), PixelSettings.of(settings)
        self._template = ChatTemplate(folder, self._tokenizer)
        c = config.thinker
        ids = {"audio": c.audio_token_id, "image": c.image_token_id, "video": c.video_token_id}
        self._placeholder_ids = ids
        self._placeholders = {kind: words.token(i) for kind, i in ids.items()}
        self.reserved = tuple(self._placeholders.values())
        """Placeholder tokens of media, which no text may contain."""
        chunk = c.audio.chunk_mel_frames
        chunk_s = chunk * self._mel.hop / self._mel.rate
        self.media_settings = MediaSettings(
            self._mel.rate, c.audio.tokens(chunk) / chunk_s, self._pixels.sizes
        )
        self.newline_id = self._tokenizer.encode("\n")[0]
        self._lengths: dict[int, int] = {}  # tokens of a part of a conversation, by its hash

    def prompt(
        self,
        messages: Conversation,
        use_audio_in_video: bool = False,
        most_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        literal_text: bool = False,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation, up to the beginning of the assistant's answer.

        messages: the user's text, or dicts with "role" and "content": a string, or a list of items
        as prompt.media reads them. use_audio_in_video: also use the audio of videos. most_tokens:
        upper bound; a prompt that surely exceeds it is refused unread. tools: functions in OpenAI's
        form. literal_text: names of special tokens are plain words, not tokens. truncation: drops
        the oldest turns beyond its limits.
        Raises MessageError, AudioError, ImageError, VideoError or PromptTooLongError.
        """
        load = self.loader(use_audio_in_video, most_tokens)
        reserved = () if literal_text else self.reserved
        check = self.text_check(most_tokens)
        # Skip the check: truncation may drop the text.
        of_messages = check if truncation is None else ignore
        checked, media = read_messages(messages, reserved, load.read, of_messages)
        return self.assemble(
            checked,
            media,
            tools=read_tools(tools, reserved, check),
            literal_text=literal_text,
            most_tokens=most_tokens,
            truncation=truncation,
        )

    def audio_tokens(self, samples: int) -> int:
        """Return the number of tokens of `samples` at the checkpoint's rate."""
        return self._config.thinker.audio.tokens(math.ceil(samples / self._mel.hop))

    def loader(self, use_audio_in_video: bool, most_tokens: int | None) -> MediaLoader:
        """Return the reader of a conversation's media; see `prompt`."""
        return MediaLoader(
            self._pixels, self._mel, self.media_settings, use_audio_in_video, most_tokens
        )

    def text_check(self, most_tokens: int | None) -> Check:
        """Return the check of a stripped text's length; see `prompt`."""

        def check(text: str, where: str) -> None:
            if most_tokens is not None and (least := self.least_tokens(text.strip())) > most_tokens:
                raise _too_long(f"{where} has {len(text)} characters", least, most_tokens)

        return check

    def assemble(
        self,
        messages: Messages,
        media: Sequence[Media],
        growing: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        literal_text: bool = False,
        said: Collection[int] = (),
        most_tokens: int | None = None,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Return the prompt of messages that prompt.messages.read_messages has read.

        growing: the last item is a clip that still arrives: the prompt ends with its last whole
        window, or before the clip, and the talker's assistant rows are unused. tools: result of
        read_tools. said: indices of the model's replies, whose special names are words. Others: see
        `prompt`.
        Raises PromptTooLongError before tokenising a prompt that can't fit.
        """
        asked = _Asked(messages, media, tools, literal_text, {*said})
        self._check_tools(asked)
        ids = None
        try:
            ids = self._template_ids(asked, most_tokens)
        except PromptTooLongError:
            if truncation is None:
                raise
        if truncation is not None:
            tokens = sum(map(self._media_tokens, media)) - len(media)
            if ids is None or len(ids) + tokens > truncation.surely_fit:
                asked = self._truncated(asked, truncation)
                media, ids = asked.media, self._template_ids(asked, most_tokens)
        assert ids is not None
        clips = [item.clip for item in media if item.clip is not None]
        window = self._config.thinker.audio.window_mel_frames if growing else None
        mel = features(clips, window)
        runs = self._runs(media, mel)
        token_ids, placed = self._expand(ids, media, runs, growing)
        if growing and not len(runs[-1]):
            placed, mel = placed[:-1], mel[:-1]
        return self._prompt_of(token_ids, media, runs, placed, mel)

    def raw(self, given: str | Sequence[int], most_tokens: int) -> Prompt:
        """Return the prompt of text or token ids, without the chat template.

        Names of special tokens, except media's, become their ids.
        Raises MessageError and PromptTooLongError.
        """
        least, ids = 0, list[int]()
        if isinstance(given, str):
            check_characters(given, "the prompt")
            least = self.least_tokens(given)
            ids += [] if least > most_tokens else self._tokenizer.encode(given, most_tokens)
        elif not isinstance(given, Sequence) or any(type(i) is not int for i in given):
            raise MessageError("the prompt is neither a str nor a list of token ids. Give one.")
        else:
            ids += (token_id for token_id in given if isinstance(token_id, int))
        least = max(least, len(ids))
        if least > most_tokens:
            raise PromptTooLongError(
                f"the prompt has {least} tokens or more, but only {most_tokens} fit into the KV "
                "cache beside the reply. Shorten it, or load with a larger context_length."
            )
        c = self._config.thinker
        for token_id in ids:
            if not 0 <= token_id < c.text.vocab_size or token_id in c.media_token_ids:
                raise MessageError(
                    f"the prompt has token {token_id}, which is a media placeholder or not one of "
                    f"the vocabulary's {c.text.vocab_size}. Leave it out."
                )
        if not ids:
            raise MessageError("the prompt is empty: give at least one token.")
        token_ids = torch.tensor(ids, dtype=torch.int64)
        return self._prompt_of(token_ids, (), (), (), ())

    def _prompt_of(
        self,
        token_ids: Tensor,
        media: Sequence[Media],
        runs: Sequence[MediaRun],
        placed: Sequence[Placed],
        mel: Sequence[Tensor],
    ) -> Prompt:
        user_tokens = user_positions(token_ids, self._config)
        user_ids = torch.from_numpy(token_ids.numpy()[user_tokens.numpy()])
        rows = len(user_tokens) + ASSISTANT_ROWS
        return Prompt(
            token_ids,
            rope_positions(len(token_ids), placed),
            TalkerPrompt(user_ids, talker_positions(user_tokens, rows, placed)),
            tuple(mel),
            tuple(m.visual for m in media if isinstance(m, ImageItem)),
            tuple(m.visual for m in media if isinstance(m, VideoItem)),
            audio_tokens=sum(run.audio_tokens for run in runs),
            image_tokens=sum(len(run) - run.audio_tokens for run in runs),
            warnings=tuple(warning for item in media for warning in item.warnings),
        )

    def _check_tools(self, asked: "_Asked") -> None:
        results = any(message["role"] == "tool" for message in asked.messages)
        if not self.takes_tools and (asked.tools or results):
            raise MessageError(
                "this checkpoint's chat template does not support tools. Leave out tools and "
                "messages of role tool, or use another checkpoint."
            )

    def _template_ids(self, asked: "_Asked", most_tokens: int | None = None) -> list[int]:
        """Return a conversation's token ids, with one placeholder for each media item.

        Raises PromptTooLongError for a long text of more than `most_tokens`; short ones pass.
        """
        messages, tools, literal = asked.messages, asked.tools, None
        if asked.literal_text:
            literal = LiteralText(self._all_names)
            messages, tools = literal.marked(messages), literal.marked(tools)
        elif any(name in messages[i]["content"] for i in asked.said for name in self._special):
            literal = LiteralText(self._reply_names)
            messages = [
                literal.marked([message])[0] if index in asked.said else message
                for index, message in enumerate(messages)
            ]
        text = self._template.render(messages, tools or None)
        encode = literal.encode if literal else self._tokenizer.encode
        if most_tokens is None or len(text) <= AT_ONCE:
            return encode(text)
        words = literal.unmarked(text) if literal else text
        least = self.least_tokens(words)
        if least <= most_tokens:
            ids = encode(text, most_tokens)
            if len(ids) <= most_tokens:
                return ids
            least = len(ids)
        raise _too_long(f"the prompt has {len(words)} characters", least, most_tokens)

    def _truncated(self, asked: "_Asked", truncation: Truncation) -> "_Asked":
        """Return a conversation without its oldest turns, if it exceeds the limits.

        A template renders a part alike in any conversation, so parts' lengths add up.
        """
        most = truncation.most_tokens

        def length(part: _Asked) -> int:
            """Count the tokens of a part followed by an empty user turn, or return most + 1."""
            part = replace(part, messages=[*part.messages, _EMPTY_TURN])
            fields = (part.literal_text, *sorted(part.said), repr(part.messages), repr(part.tools))
            key = hash(fields)
            if key not in self._lengths:
                if len(self._lengths) >= _MOST_LENGTHS:
                    self._lengths.clear()
                try:
                    self._lengths[key] = len(self._template_ids(part, most))
                except PromptTooLongError:
                    return most + 1
            return self._lengths[key]

        (_, first), *bounds = split(asked.messages)
        empty = length(_Asked([], literal_text=asked.literal_text))
        turn = length(_Asked([_EMPTY_TURN], literal_text=asked.literal_text)) - empty
        instructions = (
            length(replace(asked, messages=asked.messages[:first], said=frozenset())) - turn
        )
        parts, media_begin, spare = [], len(asked.media), most - instructions
        for begin, end in reversed(bounds):
            pause()
            own = asked.part(begin, end)
            items = _media_count(own.messages)
            media_begin -= items
            tokens = most + 1  # already too long: the exact number does not matter
            if spare >= 0 or truncation.retained < 1:
                tokens = length(own) - empty - items
                media = asked.media[media_begin : media_begin + items]
                tokens += sum(map(self._media_tokens, media))
            spare -= tokens
            parts.append(ConversationPart.of(own.messages, begin, media_begin, tokens))
        parts.reverse()
        kept = truncation.first_kept(instructions, parts)
        if not kept:
            return asked
        begin = parts[kept].begin
        left = kept_messages(asked.messages, begin)
        moved = len(asked.messages) - len(left)
        said = {index - moved for index in asked.said if index >= begin}
        media = asked.media[parts[kept].media_begin :]
        return replace(asked, messages=left, media=media, said=said)

    def _media_tokens(self, item: Media) -> int:
        frames = 0 if item.clip is None else math.ceil(item.clip.samples / self._mel.hop)
        (run,) = self._runs([item], [torch.empty(0, frames)] * (item.clip is not None))
        return len(self._tokens(item, run))

    @property
    def takes_tools(self) -> bool:
        """True if the template shows tools to the model."""
        return self._template.takes_tools

    @cached_property
    def thinks(self) -> bool:
        """True if the template lets replies begin with reasoning."""
        prompt = self._template.render([{"role": "user", "content": ""}])
        return prompt.rstrip().endswith("<think>")

    def whole_windows(self, clip: GrowingClip) -> int:
        """Count a growing clip's whole audio encoder windows so far."""
        window = self._config.thinker.audio.window_mel_frames
        return clip.complete_frames(window) // window

    @cached_property
    def _all_names(self) -> SpecialNames:
        return SpecialNames(self._tokenizer)

    @cached_property
    def _reply_names(self) -> SpecialNames:
        return SpecialNames(self._tokenizer, self._special)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple({*self._tokenizer.special_tokens, *self.reserved})

    def _runs(self, media: Sequence[Media], mel: Sequence[Tensor]) -> list[MediaRun]:
        """Return each item's run of tokens. mel: features of items with audio, in order."""
        c, clips, runs = self._config.thinker, iter(mel), []
        for item in media:
            audio_tokens = 0 if item.clip is None else c.audio.tokens(next(clips).shape[1])
            if isinstance(item, AudioItem):
                runs.append(MediaRun(audio_tokens))
                continue
            frames, height, width = item.visual.grid
            merge = c.vision.merge_size
            step = item.seconds_per_frame * c.positions_per_second
            runs.append(MediaRun(audio_tokens, (frames, height // merge, width // merge), step))
        return runs

    def _expand(
        self, ids: list[int], media: Sequence[Media], runs: Sequence[MediaRun], growing: bool
    ) -> tuple[Tensor, list[Placed]]:
        """Expand placeholders to their items' tokens, int64 [S]; also return the runs.

        growing: leave out the tokens after the last item.
        """
        template, media_ids = np.array(ids, dtype=np.int64), self._config.thinker.media_token_ids
        found = [at for at, token_id in enumerate(ids) if token_id in media_ids]
        wanted = [self._placeholder_ids[item.kind] for item in media]
        if template[found].tolist() != wanted:
            names = [self._tokenizer.token(i) for i in template[found]]
            raise CheckpointError(
                f"the chat template wrote {names} instead of one placeholder per media item in "
                f"order, {[self._tokenizer.token(i) for i in wanted]}. Use another template."
            )
        parts, placed, at, length = [], [], 0, 0
        for place, item, run in zip(found, media, runs, strict=True):
            tokens = self._tokens(item, run)
            parts += [template[at:place], tokens]
            length += place - at
            placed.append((length + (len(tokens) - len(run)) // 2, run))
            length += len(tokens)
            at = place + 1
        if not growing:
            parts.append(template[at:])
        return torch.from_numpy(np.concatenate(parts)), placed

    def _tokens(self, item: Media, run: MediaRun) -> NDArray[np.int64]:
        """Return an item's tokens in brackets; video and audio tokens are interleaved."""
        own, audio = self._placeholder_ids[item.kind], self._placeholder_ids["audio"]
        tokens = np.where(run.is_audio(), audio, own)
        if isinstance(item, VideoItem) and run.audio_tokens:
            named = self._tokenizer.named_tokens
            begin, end = (
                self._tokenizer.encode(named[f"audio_{edge}_token"]) for edge in ("bos", "eos")
            )
            return np.array([*begin, *tokens, *end])
        return tokens


def _media_count(messages: Messages) -> int:
    contents = (message["content"] for message in messages)
    items = (item for content in contents if not isinstance(content, str) for item in content)
    return sum(item["type"] != "text" for item in items)


def _too_long(what: str, least: int, most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"{what}, which are {least} tokens or more, but only {most} fit into the KV cache "
        "beside the reply. Shorten the conversation, let `truncation` drop its oldest turns, or "
        "load with a larger context_length."
    )
