"""Codes that differ from float32's: of single frames, and of replies whose codes are fed back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.quantising.arithmetic import PREDICTOR, RELEASED, TALKER, WIDE, Arithmetic, compute_in
from bench.quantising.cases import Weights, decoder_logits, random_inputs
from bench.quantising.rounding import CHOICES, INT8_32, PREDICTOR_SAME, STORED, Choice
from qwen3_omni_neuron.cpu.eager import EagerSlots
from qwen3_omni_neuron.model.code_predictor import CodePredictor, sample_top, top_p_limits
from qwen3_omni_neuron.model.config import TalkerConfig
from qwen3_omni_neuron.model.decoder import Decoder
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.prompt.prompt import rope_positions
from testing.command_line import Row

PROMPT_ROWS = 9
TEMPERATURE, TOP_K, TOP_P = 0.9, 50, 0.8  # of code 0; of all codes; of codes 1 to 15
WAYS = ("greedy", "sampled")


@dataclass(frozen=True)
class Numbers:
    """Numbers of a talker or a code predictor: an arithmetic, over weights of a choice."""

    arithmetic: Arithmetic = WIDE
    choice: Choice = STORED

    def __str__(self) -> str:
        if self.choice == STORED:
            return self.arithmetic.name
        if self.choice.only:
            return f"{self.choice.layers} in {self.choice.only} alone"
        down = self.choice.down or self.choice.layers
        return f"{self.choice.layers}, down {down}"

    def predictor(self, weights: Weights) -> CodePredictor:
        """Return the code predictor, with its table of code 0."""
        made = weights.predictor(self.choice).code_predictor
        assert made is not None
        self._compute(made, made.decoder)
        return made

    def talker(self, weights: Weights) -> TalkerModel:
        """Return the talker, without its codec embedding."""
        made = weights.talker(self.choice)
        self._compute(made, made.decoder)
        return made

    def _compute(self, module: nn.Module, decoder: Decoder) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.arithmetic.products)
        compute_in(decoder, self.arithmetic)


INT8 = Numbers(choice=PREDICTOR_SAME)
INT8_TALKER = Numbers(choice=CHOICES["talker"][2])
PREDICTORS = (*map(Numbers, PREDICTOR), INT8)
BETWEEN = tuple(
    Numbers(choice=Choice(INT8_32, INT8_32, only=only))
    for only in ("", "attention", "gate_up", "down", "head", "layers.2.ffn.gate_up")
)
"""Code predictors with less in int8, or in smaller groups."""
TALKERS = (*map(Numbers, TALKER), INT8_TALKER)
RELEASED_NUMBERS = Numbers(RELEASED)
LOOPS = (
    *((Numbers(), predictor) for predictor in PREDICTORS),
    *((talker, Numbers()) for talker in TALKERS[1:]),
    (RELEASED_NUMBERS, RELEASED_NUMBERS),
    (INT8_TALKER, INT8),
)
"""Talker and code predictor of a reply."""


@torch.inference_mode()
def frame_rows(weights: Weights, about: Row, frames: int) -> Iterator[Row]:
    """Compare code 0, and codes 1 to 15, of frames whose inputs are float32's."""
    c, draw = weights.config.talker, torch.Generator().manual_seed(1)
    assert c is not None
    _, rows, given = random_inputs(weights, frames)
    shape = c.code_groups, c.predictor.vocab_size
    noise = gumbel(draw, frames, *shape)
    plain = weights.talker(STORED)
    (hidden,) = decoder_logits(plain, c.text, [rows])[1]

    def talker_codes(numbers: Numbers) -> tuple[Tensor, Tensor]:
        talker, kind = numbers.talker(weights), numbers.arithmetic.products
        slots = EagerSlots(c.text, talker, 1, frames, kind)
        logits = []
        for at, row in enumerate(rows.rows.to(kind)):
            if at == 0:
                logits.append(slots.prefill(0, row[None], rows.positions[:, :1])[0])
            else:
                logits.append(slots.step([0], row[None])[0])
        every = _spoken(weights, torch.cat(logits))
        return every.argmax(-1)[:, None], _drawn(every, noise[:, 0])[:, None]

    def predictor_codes(numbers: Numbers) -> tuple[Tensor, Tensor]:
        predictor, kind = numbers.predictor(weights), numbers.arithmetic.products
        top_p = top_p_limits([TOP_P] * frames)
        inputs = hidden.to(kind), given[:, 0]
        greedy, sampled = predictor(*inputs)[0], predictor(*inputs, noise[:, 1:], top_p)[0]
        return greedy[:, 1:], sampled[:, 1:]

    compared: tuple[tuple[str, tuple[Numbers, ...], Callable[..., tuple[Tensor, Tensor]]], ...] = (
        ("talker", TALKERS, talker_codes),
        ("code predictor", (*PREDICTORS, *BETWEEN), predictor_codes),
    )
    for model, every, codes_of in compared:
        reference = codes_of(every[0])
        for numbers in every:
            found = {"measure": "frames", **about, "model": model, "numbers": str(numbers)}
            for way, ours, theirs in zip(WAYS, codes_of(numbers), reference, strict=True):
                same = ours == theirs
                found[f"{way}_frames"] = float(same.all(1).float().mean())
                found[f"{way}_codes"] = float(same.float().mean())
            yield {**found, "frames": frames}


@torch.inference_mode()
def loop_rows(weights: Weights, about: Row, replies: int, frames: int) -> Iterator[Row]:
    """Compare replies whose codes are fed back: the first frame that differs."""
    c, draw = weights.config.talker, torch.Generator().manual_seed(2)
    assert c is not None
    _, rows, _ = random_inputs(weights, replies * (PROMPT_ROWS + frames))
    text = rows.rows.view(replies, PROMPT_ROWS + frames, -1)
    noise = gumbel(draw, frames, replies, c.code_groups, c.predictor.vocab_size)
    reference: dict[str, Tensor] = {}
    for talker, predictor in LOOPS:
        found = {"measure": "replies", **about, "talker": str(talker), "predictor": str(predictor)}
        modules = talker.talker(weights), predictor.predictor(weights)
        kinds = talker.arithmetic.products, predictor.arithmetic.products
        for way in WAYS:
            numbers = noise if way == "sampled" else None
            codes = _reply_codes(weights, c, modules, kinds, text, numbers)
            differs = (codes != reference.setdefault(way, codes)).any(2)  # [replies, frames]
            first = torch.where(differs.any(1), differs.int().argmax(1), frames)
            found[f"{way}_first"] = float(first.float().mean())
            found[f"{way}_same"] = float((first == frames).float().mean())
        yield {**found, "replies": replies, "frames": frames}


def _reply_codes(
    weights: Weights,
    c: TalkerConfig,
    modules: tuple[TalkerModel, CodePredictor],
    kinds: tuple[torch.dtype, torch.dtype],
    text: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """Return the codes of replies, int64 [replies, frames, 16].

    kinds: types of the talker's and the predictor's products. text: prompt rows and then the text
    row of each frame, [replies, rows, hidden]. noise: [frames, replies, 16, vocab]; None: greedy.
    """
    (talker, predictor), (kind, predictor_kind) = modules, kinds
    replies, every = len(text), list(range(len(text)))
    slots = EagerSlots(c.text, talker, replies, text.shape[1], kind)
    positions = rope_positions(PROMPT_ROWS)
    begun = [slots.prefill(r, text[r, :PROMPT_ROWS].to(kind), positions) for r in every]
    logits, hidden = (torch.cat(each) for each in zip(*begun, strict=True))
    top_p, codes = top_p_limits([TOP_P] * replies), []
    for frame in range(text.shape[1] - PROMPT_ROWS):
        of_codes = _spoken(weights, logits)
        if noise is None:
            code0 = of_codes.argmax(-1)
            frame_codes, feedback = predictor(hidden.to(predictor_kind), code0)
        else:
            code0 = _drawn(of_codes, noise[frame, :, 0])
            inputs = hidden.to(predictor_kind), code0, noise[frame, :, 1:], top_p
            frame_codes, feedback = predictor(*inputs)
        codes.append(frame_codes)
        row = feedback.float() + text[:, PROMPT_ROWS + frame]
        logits, hidden = slots.step(every, row.to(kind))
    return torch.stack(codes, 1)


def _spoken(weights: Weights, logits: Tensor) -> Tensor:
    """Return the logits of code 0 alone, in float32: the others are those of special tokens."""
    assert weights.config.code2wav is not None
    return logits[:, : weights.config.code2wav.codebook_size].float()


def gumbel(draw: torch.Generator, *shape: int) -> Tensor:
    """Return the noise of draws."""
    return -torch.empty(shape).exponential_(generator=draw).log()


def _drawn(logits: Tensor, noise: Tensor) -> Tensor:
    return sample_top(logits / TEMPERATURE, noise, TOP_K, top_p_limits([1.0] * len(logits)))
