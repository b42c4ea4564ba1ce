"""Training step 2: the thinker and its audio encoder learn the replies to speech and text.

Besides the reply's loss, a CTC loss on the encoder's rows predicts each clip's words, since
repeating a word needs its recognition. Its head is dropped after training. The last phase has
conversations of several turns, without that loss.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.batches import IGNORED, Batch, batch_of, embedded, encoded_audio
from train.fit import Losses, device, fit
from train.questions import draw_question
from train.speech import TRAINING
from train.vocabulary import SAY, SPOKEN, SUM, SUMS, UNKNOWN

# Steps, learning rate and share of sums of each phase, whose learning rate decays by the cosine
# schedule. Sums, some of which are held out in each wording, are learned last.
PHASES = ((2500, 1.5e-3, SUMS), (1500, 6e-4, SUMS), (1000, 5e-4, SUMS), (1000, 3e-4, 0.45))
BATCH = 32
TURNS_STEPS, TURNS_BATCH, TURNS_RATE, TURNS_SUMS = 2500, 16, 3e-4, 0.4
EARLIER = (0, 0, 1, 1, 2, 3)  # numbers of earlier turns, drawn alike
HEARD = tuple(dict.fromkeys((*SPOKEN, *UNKNOWN, *" ".join((*SAY, *SUM, "plus")).split())))
_BLANK = len(HEARD)


def learn_thinker(model: Any, prompt_builder: PromptBuilder, tokenizer: Any, folder: Path) -> None:
    """Train model.thinker without its vision encoder."""
    torch.manual_seed(0)
    words = nn.Linear(model.config.thinker_config.text_config.hidden_size, _BLANK + 1)
    trained = nn.ModuleDict({"thinker": model.thinker, "words": words}).to(device())

    def losses_of(done: int, sums: float, step: int) -> Losses:
        rng = random.Random(done + step)
        questions = [draw_question(rng, TRAINING, sums=sums) for _ in range(BATCH)]
        batch = batch_of(questions, prompt_builder, tokenizer, model.config.im_end_token_id)
        audio = encoded_audio(model, batch.mels) if batch.mels else None
        losses = {"reply": _reply_loss(model, batch, audio)}
        if audio is not None:
            losses["heard"] = 0.3 * _heard_loss(words(audio), batch, model)
        return losses

    done = 0
    for number, (steps, learning_rate, sums) in enumerate(PHASES, start=1):
        losses = partial(losses_of, done, sums)
        fit(f"thinker-{number}", trained, losses, steps, learning_rate, folder)
        done += steps
    learn_turns(model, prompt_builder, tokenizer, folder, done)


def learn_turns(
    model: Any, prompt_builder: PromptBuilder, tokenizer: Any, folder: Path, done: int
) -> None:
    """Train the thinker on conversations of up to four turns. done: steps before this phase."""

    def losses_of(step: int) -> Losses:
        rng = random.Random(done + step)
        questions = [
            draw_question(rng, TRAINING, sums=TURNS_SUMS, earlier=rng.choice(EARLIER))
            for _ in range(TURNS_BATCH)
        ]
        batch = batch_of(questions, prompt_builder, tokenizer, model.config.im_end_token_id)
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
    spoken = [torch.tensor([HEARD.index(w) for w in words.split()]) for words in batch.clip_words]
    return F.ctc_loss(
        rows.log_softmax(-1),
        torch.cat(spoken).to(device()),
        lengths,
        torch.tensor([len(words) for words in spoken]),
        blank=_BLANK,
        zero_infinity=True,
    )
