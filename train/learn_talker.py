"""Training step 3: talker and code predictor learn the codes of a reply in each voice.

They are trained with teacher forcing; a few of the codes that are fed back are wrong. The next word
matters at only one frame in eight, so an auxiliary head, dropped after training, predicts the words
at every frame.
"""

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.model.talker import media_mask, user_positions
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.batches import IGNORED, batch_of, embedded, encoded_audio
from train.codes import GROUPS, SpokenWord, reply
from train.fit import Losses, device, fit
from train.questions import draw_question
from train.speech import TRAINING
from train.talker_sequences import NO_CODE, Talk, UserRows, talk, with_slips
from train.vocabulary import INTRODUCTION, SPOKEN

STEPS = 2500
LEARNING_RATE = 1.5e-3
BATCH = 24
PREDICTED_FRAMES = 160  # of a batch, drawn at random, to train the code predictor
SLIPS = 0.02
USERS, LONG_USERS, MOST_LONG = 1380, 120, 250  # conversations, long ones, their characters
_ALIKE = 125  # conversations of like length, of which a batch has those of its sequences
_END = len(SPOKEN)  # the word after the last one
_INTRODUCTION_SHARE = 0.04
_SILENT_SHARE = 0.08  # replies in brackets
_SECOND_EOS_SHARE = 0.05  # sequences with a second tts_eos, see train.talker_sequences.talk


class Teacher:
    """Random sequences with their right codes, over the trained thinker's hidden states."""

    def __init__(
        self,
        model: Any,
        prompt_builder: PromptBuilder,
        tokenizer: Any,
        words: dict[str, dict[str, SpokenWord]],
        checkpoint: Path,
    ):
        self._model, self._tokenizer, self._words = model, tokenizer, words
        self._config = read_config(checkpoint)
        self._prompt_builder = prompt_builder

    @cached_property
    def _users(self) -> list[UserRows]:
        """Conversations, the shortest first."""
        rng = random.Random("users")
        questions = [draw_question(rng, TRAINING) for _ in range(USERS)]
        questions += [draw_question(rng, TRAINING, longest=MOST_LONG) for _ in range(LONG_USERS)]
        parts = [questions[i : i + 50] for i in range(0, len(questions), 50)]
        users = [user for part in parts for user in self._user_rows(part)]
        return sorted(users, key=lambda user: len(user.rows))

    def batch(self, step: int) -> list[Talk]:
        """Draw the sequences of a step."""
        rng = random.Random(step)
        first = _ALIKE * rng.randrange(len(self._users) // _ALIKE)
        return [self._talk(rng, self._users[first : first + _ALIKE]) for _ in range(BATCH)]

    def _talk(self, rng: random.Random, users: Sequence[UserRows]) -> Talk:
        """Draw one sequence, whose words are independent of the question."""
        reply_words = [rng.choice(SPOKEN) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5)))]
        if rng.random() < _INTRODUCTION_SHARE:
            reply_words = INTRODUCTION.split()
        speaker = rng.choice(sorted(self._words))
        spoken = [self._words[speaker][word] for word in reply_words]
        text, codes = " ".join(reply_words), reply(spoken).codes
        words = _words_of_frames(reply_words, spoken)
        if rng.random() < _SILENT_SHARE:
            text, codes, words = f"({text})", codes[:0], words[:0]
        return talk(
            self._config,
            self._model.thinker.get_input_embeddings(),
            rng.choice(users),
            self._prompt_builder.newline_id,
            self._tokenizer.encode(text),
            codes,
            words,
            speaker,
            second_eos=rng.random() < _SECOND_EOS_SHARE,
        )

    @torch.no_grad()
    def _user_rows(self, questions: Sequence[Any]) -> list[UserRows]:
        """Return the talker's inputs of each conversation."""
        model = self._model
        batch = batch_of(
            questions, self._prompt_builder, self._tokenizer, self._config.im_end_id
        ).on_device()
        audio = encoded_audio(model, batch.mels) if batch.mels else None
        rows = embedded(model, batch.token_ids, audio)
        layer = model.config.talker_config.accept_hidden_layer
        hidden = model.thinker.model.language_model(
            inputs_embeds=rows, output_hidden_states=True
        ).hidden_states[layer]
        found = []
        for ids, labels, deep, shallow in zip(
            batch.token_ids, batch.labels, hidden, rows, strict=True
        ):
            prompt = int((labels != IGNORED).nonzero()[0]) + 1
            user = user_positions(ids[:prompt].cpu(), self._config)
            is_media = media_mask(ids[user].cpu(), self._config)
            media_rows = is_media[:, None].to(deep.device)
            found.append(UserRows(torch.where(media_rows, deep[user], shallow[user]), is_media))
        return found


def learn_talker(model: Any, teacher: Teacher, folder: Path) -> None:
    """Train model.talker.

    Sixteen codec embeddings are added to one row of text. They start at a quarter of their size;
    larger ones hide the text, and only the first word is learned.
    """
    model.thinker.requires_grad_(False)
    with torch.no_grad():
        for table in _codec_tables(model):
            table.weight *= 0.25
    torch.manual_seed(0)
    width = model.config.talker_config.text_config.hidden_size
    words = nn.Linear(width, 2 * (_END + 1))
    trained = nn.ModuleDict({"talker": model.talker, "words": words}).to(device())

    def losses_of(step: int) -> Losses:
        talks = teacher.batch(step)
        hidden = model.talker.model(
            inputs_embeds=talker_inputs(model, talks, step)
        ).last_hidden_state
        labels = _padded([talk.labels for talk in talks], IGNORED)
        wanted = labels != IGNORED
        logits = model.talker.codec_head(hidden[wanted])
        frames = _padded([talk.frames for talk in talks], NO_CODE)
        return {
            "code 0": F.cross_entropy(logits, labels[wanted]),
            "others": _predictor_loss(model, hidden, frames, step),
            "words": 0.5 * _words_loss(words(hidden), _padded([t.words for t in talks], IGNORED)),
        }

    fit("talker", trained, losses_of, STEPS, LEARNING_RATE, folder)


def talker_inputs(model: Any, talks: Sequence[Talk], step: int, slips: float = SLIPS) -> Tensor:
    """Return the talker's inputs: float32 [B, T, hidden]. slips: the share of wrong codes."""
    rows = _padded([talk.rows for talk in talks], 0)
    is_media = _padded([talk.is_media for talk in talks], False)[..., None]
    talker = model.talker
    text = torch.where(is_media, talker.hidden_projection(rows), talker.text_projection(rows))
    codes = with_slips(
        _padded([talk.codes for talk in talks], NO_CODE).cpu(), slips, random.Random(step)
    ).to(rows.device)
    return text + _code_embeddings(model, codes).sum(2)


def _words_of_frames(words: Sequence[str], spoken: Sequence[SpokenWord]) -> Tensor:
    """Return int64 [frames, 2]: the word of each frame, and the next word."""
    now = [SPOKEN.index(word) for word in words]
    both = torch.tensor([now, [*now[1:], _END]]).T
    return both.repeat_interleave(torch.tensor([len(word.codes) for word in spoken]), dim=0)


def _words_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Return the loss of each frame's word and of the next word. logits: [B, T, 2 * words]."""
    return F.cross_entropy(
        logits.unflatten(-1, (2, _END + 1)).flatten(0, 2), words.flatten(), ignore_index=IGNORED
    )


def _code_embeddings(model: Any, codes: Tensor) -> Tensor:
    """Embed codes [..., 16]: float32 [..., 16, hidden], zeros for NO_CODE."""
    tables = _codec_tables(model)
    made = [tables[group](codes[..., group].clamp_min(0)) for group in range(GROUPS)]
    return torch.stack(made, -2) * (codes != NO_CODE)[..., None]


def _codec_tables(model: Any) -> list[nn.Embedding]:
    """Return the embedding of code 0, then those of the other fifteen."""
    others = model.talker.code_predictor.model.codec_embedding
    return [model.talker.get_input_embeddings(), *others]


def _predictor_loss(model: Any, hidden: Tensor, frames: Tensor, step: int) -> Tensor:
    """Return the loss of codes 1 to 15 of some of the frames."""
    predictor = model.talker.code_predictor
    made = (frames[..., 0] != NO_CODE).nonzero()
    chosen = made[torch.randperm(len(made), device=made.device)[:PREDICTED_FRAMES]].unbind(1)
    codes = frames[chosen]
    fed = with_slips(codes.cpu(), SLIPS, random.Random(-step)).to(codes.device)
    embeddings = _code_embeddings(model, fed)[:, : GROUPS - 1]
    rows = torch.cat((hidden[chosen][:, None], embeddings), 1)
    out = predictor.model(inputs_embeds=rows, use_cache=False).last_hidden_state
    logits = [head(out[:, group + 1]) for group, head in enumerate(predictor.lm_head)]
    return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), codes[:, 1:].flatten())


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value).to(device())
