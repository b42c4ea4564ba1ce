"""Training step 2: the thinker and its audio encoder learn the replies to speech and text.

Besides the reply's loss, a CTC loss on the encoder's rows predicts each clip's words, since
repeating a word needs its recognition. Its head is dropped after training. The last phase has
conversations of several turns, without that loss.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.batches import IGNORED, Batch, batch_of, embedded, encoded_audio
from train.fit import Losses, ahead, device, fit
from train.questions import draw_question
from train.speech import TRAINING
from train.vocabulary import KNOWN, SUMS

# Steps, learning rate and share of sums of each phase, whose learning rate decays by the cosine
# schedule. Sums, some of which are held out in each wording, are learned last.
PHASES = ((2500, 1.5e-3, SUMS), (2000, 8e-4, SUMS), (1500, 4e-4, 0.35))
BATCH = 32
TURNS_STEPS, TURNS_BATCH, TURNS_RATE, TURNS_SUMS = 2000, 16, 3e-4, 0.3
EARLIER = (0, 0, 1, 1, 2, 3)  # numbers of earlier turns, drawn alike
LONG = 10  # one step in so many has questions without an answer, long ones, a third of a batch
MOST_LONG = 450  # characters
_NUMBERS = {word: number for number, word in enumerate(KNOWN)}
_UNKNOWN, _BLANK = len(KNOWN), len(KNOWN) + 1


def learn_thinker(model: Any, prompt_builder: PromptBuilder, tokenizer: Any, folder: Path) -> None:
    """Train model.thinker without its vision encoder."""
    torch.manual_seed(0)
    words = nn.Linear(model.config.thinker_config.text_config.hidden_size, _BLANK + 1)
    trained = nn.ModuleDict({"thinker": model.thinker, "words": words}).to(device())

    def batch_of_step(done: int, sums: float, step: int) -> Batch:
        rng = random.Random(done + step)
        is_long = step % LONG == 0
        drawn: dict[str, Any] = {"longest": MOST_LONG, "known": False} if is_long else {}
        questions = [
            draw_question(rng, TRAINING, sums=sums, **drawn)
            for _ in range(BATCH // 3 if is_long else BATCH)
        ]
        return batch_of(questions, prompt_builder, tokenizer, model.config.im_end_token_id)

    def losses_of(batch_at: Callable[[int], Batch], step: int) -> Losses:
        batch = batch_at(step).on_device()
        audio = encoded_audio(model, batch.mels) if batch.mels else None
        losses = {"reply": _reply_loss(model, batch, audio)}
        if audio is not None:
            losses["heard"] = 0.3 * _heard_loss(words(audio), batch, model)
        return losses

    done = 0
    for number, (steps, learning_rate, sums) in enumerate(PHASES, start=1):
        losses = partial(losses_of, ahead(partial(batch_of_step, done, sums), steps))
        fit(f"thinker-{number}", trained, losses, steps, learning_rate, folder)
        done += steps


def learn_turns(model: Any, prompt_builder: PromptBuilder, tokenizer: Any, folder: Path) -> None:
    """Train the thinker on conversations of up to four turns.

    Its embeddings stay as they are: the talker, which may be trained at the same time, reads them.
    """
    model.thinker.get_input_embeddings().requires_grad_(False)
    done = sum(steps for steps, *_ in PHASES)

    def batch_of_step(step: int) -> Batch:
        rng = random.Random(done + step)
        questions = [
            draw_question(rng, TRAINING, sums=TURNS_SUMS, earlier=rng.choice(EARLIER))
            for _ in range(TURNS_BATCH)
        ]
        return batch_of(questions, prompt_builder, tokenizer, model.config.im_end_token_id)

    batch_at = ahead(batch_of_step, TURNS_STEPS)

    def losses_of(step: int) -> Losses:
        batch = batch_at(step).on_device()
        audio = encoded_audio(model, batch.mels) if batch.mels else None
        return {"reply": _reply_loss(model, batch, audio)}

    fit("thinker-turns", model.thinker.to(device()), losses_of, TURNS_STEPS, TURNS_RATE, folder)


def _reply_loss(model: Any, batch: Batch, audio: Tensor | None) -> Tensor:
    rows = embedded(model, batch.token_ids, audio)
    hidden = model.thinker.model.language_model(inputs_embeds=rows).last_hidden_state
    wanted = batch.labels != IGNORED
    return F.cross_entropy(model.thinker.lm_head(hidden[wanted]), batch.labels[wanted])


def _heard_loss(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Return the CTC loss of each clip's words."""
    in_clip = (batch.token_ids == model.config.thinker_config.audio_token_id).sum(1)
    lengths = in_clip[in_clip > 0]
    rows = nn.utils.rnn.pad_sequence(logits.split(lengths.tolist()))
    spoken = [
        torch.tensor([_NUMBERS.get(word, _UNKNOWN) for word in words.split()], dtype=torch.long)
        for words in batch.clip_words
    ]
    return F.ctc_loss(
        rows.log_softmax(-1),
        torch.cat(spoken).to(device()),
        lengths,
        torch.tensor([len(words) for words in spoken]),
        blank=_BLANK,
        zero_infinity=True,
    )
