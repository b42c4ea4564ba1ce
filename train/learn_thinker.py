"""Second step: the thinker and its audio encoder learn to hear, to read, and what to answer.

Beside the reply, each clip's words are asked of the encoder's rows directly (CTC): what is to be
said again must first be heard. That head is thrown away at the end.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.conversation.template import Conversation
from train.asking import asked
from train.batches import IGNORED, Batch, batch_of, embedded, encoded_sound
from train.fit import Losses, device, fit
from train.hearing import TRAINING
from train.world import SAY, SPOKEN, SUM, SUMS, UNKNOWN

# Steps, learning rate and share of sums, one after the other: each begins as hot as it says and
# cools down. Sums, of which each wording holds some out, are the last to be learned.
PHASES = ((2500, 1.5e-3, SUMS), (1500, 6e-4, SUMS), (1000, 5e-4, SUMS), (1000, 3e-4, 0.45))
BATCH = 32
HEARD = tuple(dict.fromkeys((*SPOKEN, *UNKNOWN, *" ".join((*SAY, *SUM, "plus")).split())))
_BLANK = len(HEARD)


def learn_thinker(model: Any, conversation: Conversation, tokenizer: Any, folder: Path) -> None:
    """Train model.thinker, all but the vision encoder."""
    torch.manual_seed(0)
    words = nn.Linear(model.config.thinker_config.text_config.hidden_size, _BLANK + 1)
    trained = nn.ModuleDict({"thinker": model.thinker, "words": words}).to(device())

    def losses_of(done: int, sums: float, step: int) -> Losses:
        rng = random.Random(done + step)
        questions = [asked(rng, TRAINING, sums=sums) for _ in range(BATCH)]
        batch = batch_of(questions, conversation, tokenizer, model.config.im_end_token_id)
        sound = encoded_sound(model, batch.mels) if batch.mels else None
        rows = embedded(model, batch.token_ids, sound)
        hidden = model.thinker.model.language_model(inputs_embeds=rows).last_hidden_state
        asked_for = batch.labels != IGNORED
        logits = model.thinker.lm_head(hidden[asked_for])
        losses = {"reply": F.cross_entropy(logits, batch.labels[asked_for])}
        if sound is not None:
            losses["heard"] = 0.3 * _heard_loss(words(sound), batch, model)
        return losses

    done = 0
    for number, (steps, learning_rate, sums) in enumerate(PHASES, start=1):
        losses = partial(losses_of, done, sums)
        fit(f"thinker-{number}", trained, losses, steps, learning_rate, folder)
        done += steps


def _heard_loss(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Of the words of each clip, wherever in it they are."""
    in_clip = (batch.token_ids == model.config.thinker_config.audio_token_id).sum(1)
    lengths = in_clip[in_clip > 0]
    rows = nn.utils.rnn.pad_sequence(logits.split(lengths.tolist()))
    said = [torch.tensor([HEARD.index(w) for w in words.split()]) for words in batch.clip_words]
    return F.ctc_loss(
        rows.log_softmax(-1),
        torch.cat(said).to(device()),
        lengths,
        torch.tensor([len(words) for words in said]),
        blank=_BLANK,
        zero_infinity=True,
    )
