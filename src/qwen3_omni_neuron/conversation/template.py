"""Messages -> token ids, mel features, patches and positions, by the checkpoint's own files.

The chat template, tokenizer and preprocessors are the checkpoint's, run by transformers. What is
done here is what the reference's processor does between them: the one placeholder of each media
item becomes as many as its encoder makes rows of it.
"""

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.media.items import Film, Media, MediaLoader, Picture, Sound
from qwen3_omni_neuron.conversation.media.log_mel import MelSettings, log_mel
from qwen3_omni_neuron.conversation.media.patches import PatchMaker
from qwen3_omni_neuron.conversation.messages import Messages, read_messages
from qwen3_omni_neuron.conversation.positions import MediaRun, rope_positions, talker_positions
from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, OmniConfig
from qwen3_omni_neuron.model.talker_prompt import user_positions


class Conversation:
    """Turns messages into prompts for one checkpoint.

    Source: transformers Qwen3OmniMoeProcessor.__call__.
    """

    def __init__(self, folder: Path, config: OmniConfig):
        # Imported here: transformers takes seconds, and `import qwen3_omni_neuron` should not.
        from transformers import Qwen2TokenizerFast, WhisperFeatureExtractor

        self._config = config
        try:
            self._tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
            self._features = WhisperFeatureExtractor.from_pretrained(folder)
        except Exception as error:  # each transformers line has its own for a missing file
            raise CheckpointError(
                f"{folder} has no usable tokenizer or preprocessor_config.json: {error}"
            ) from error
        self._mel = MelSettings.of(self._features)
        self._patches = PatchMaker(folder)
        self._template = _chat_template(folder, self._tokenizer.chat_template)
        c = config.thinker
        ids = {"audio": c.audio_token_id, "image": c.image_token_id, "video": c.video_token_id}
        self._placeholders = {
            kind: self._tokenizer.convert_ids_to_tokens(i) for kind, i in ids.items()
        }
        chunk = c.audio.chunk_mel_frames
        chunk_s = chunk * self._features.hop_length / self._features.sampling_rate
        self._sound_tokens_per_s = c.audio.tokens(chunk) / chunk_s
        self.newline_id = self._tokenizer.encode("\n", add_special_tokens=False)[0]

    def prompt(
        self,
        messages: Messages,
        use_audio_in_video: bool = False,
        most_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a conversation, ending where the assistant is to speak.

        messages: dicts with "role" (system, user or assistant) and "content": a string, or a list
        of {"type": "text", "text": ...} and, from users, {"type": "audio", "audio": ...}, "image"
        and "video" (see media.audio, media.image and media.video for what they may hold).
        use_audio_in_video: hear the sound of videos, too. most_tokens: media that alone have more
        are refused before they are decoded.
        Raises MessageError, AudioError, ImageError, VideoError or PromptTooLongError, which say
        which message or item is at fault.
        """
        load = MediaLoader(
            self._patches,
            self._features.sampling_rate,
            use_audio_in_video,
            most_tokens,
            self._sound_tokens_per_s,
        )
        checked, media = read_messages(messages, tuple(self._placeholders.values()), load)
        waveforms = [m.waveform for m in media if m.waveform is not None]
        mel = log_mel(waveforms, self._mel)
        runs = self._runs(media, mel)
        text = self._tokenizer.apply_chat_template(
            checked, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        text = self._expand(text, media, runs)
        token_ids = torch.tensor(self._tokenizer.encode(text, add_special_tokens=False))
        placed = list(zip(self._starts(token_ids, runs), runs, strict=True))
        user_tokens = user_positions(token_ids, self._config)
        rows = len(user_tokens) + ASSISTANT_ROWS
        return Prompt(
            token_ids,
            rope_positions(len(token_ids), placed),
            TalkerPrompt(token_ids[user_tokens], talker_positions(user_tokens, rows, placed)),
            tuple(mel),
            tuple(m.patches for m in media if isinstance(m, Picture)),
            tuple(m.patches for m in media if isinstance(m, Film)),
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, special ones skipped."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _runs(self, media: Sequence[Media], mel: Sequence[Tensor]) -> list[MediaRun]:
        """What becomes of each item. mel: of those that have sound, in order."""
        c, clips, runs = self._config.thinker, iter(mel), []
        for item in media:
            heard = c.audio.tokens(next(clips).shape[1]) if item.waveform is not None else 0
            if isinstance(item, Sound):
                runs.append(MediaRun(heard))
                continue
            frames, height, width = item.patches.grid
            merge = c.vision.merge_size
            step = item.seconds_per_frame * c.positions_per_second
            runs.append(MediaRun(heard, (frames, height // merge, width // merge), step))
        return runs

    def _expand(self, text: str, media: Sequence[Media], runs: Sequence[MediaRun]) -> str:
        """Put each item's tokens where the template has its one placeholder."""
        found = re.split(f"({'|'.join(map(re.escape, self._placeholders.values()))})", text)
        wanted = [self._placeholders[item.kind] for item in media]
        if found[1::2] != wanted:
            raise CheckpointError(
                f"the chat template made {found[1::2]} of media items that are {wanted}. It must "
                "write one placeholder an item, in their order."
            )
        found[1::2] = [self._tokens(item, run) for item, run in zip(media, runs, strict=True)]
        return "".join(found)

    def _tokens(self, item: Media, run: MediaRun) -> str:
        seen, heard = self._placeholders[item.kind], self._placeholders["audio"]
        tokens = "".join(heard if sound else seen for sound in run.is_sound().tolist())
        if isinstance(item, Film) and run.audio_tokens:
            bos, eos = self._tokenizer.audio_bos_token, self._tokenizer.audio_eos_token
            return f"{bos}{tokens}{eos}"
        return tokens

    def _starts(self, token_ids: Tensor, runs: Sequence[MediaRun]) -> list[int]:
        """The index of each run's first token."""
        media = np.isin(token_ids.numpy(), self._config.thinker.media_token_ids)
        indices = media.nonzero()[0].tolist()
        ends = accumulate(len(run) for run in runs)
        return [indices[end - len(run)] for end, run in zip(ends, runs, strict=True)]


def _chat_template(folder: Path, of_tokenizer: Any) -> Any:
    """The processor's template, in either of its files, else the tokenizer's own."""
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    if legacy.exists():
        return json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    if of_tokenizer is None:
        raise CheckpointError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template.json, "
            "nor one in tokenizer_config.json."
        )
    return of_tokenizer
