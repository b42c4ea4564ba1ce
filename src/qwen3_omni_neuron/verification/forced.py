"""Results of each stage of the reference over inputs from one of its own replies.

They are recorded once, and computed over again with other weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.model.code_predictor import sample_top, top_p_limits
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.oracle import Reference
from qwen3_omni_neuron.verification.reference import (
    TOP_K,
    Arrays,
    text_rows,
)
from qwen3_omni_neuron.verification.stages import as_array, thinned, thinned_logits


@dataclass(frozen=True)
class Given:
    """Inputs of the stages in one reply.

    token_ids: generated ids [N]. codes: int64 [frames, 16]. thinker, talker: keyword arguments of
    the text model over prompt and reply, and of the talker's model. prompt_rows, talker_rows: rows
    before the first step.
    """

    prompt: Prompt
    token_ids: list[int]
    codes: Tensor
    thinker: dict[str, Any]
    talker: dict[str, Any]
    prompt_rows: int
    talker_rows: int


def record(reference: Reference, prompt: Prompt, end: int, tokens: int, frames: int) -> Given:
    """Let the reference answer greedily, and record its stages' inputs.

    end: token that ends the text. tokens, frames: most of each.
    """
    model = reference.model
    with (
        _calls(reference.thinker_model) as of_thinker,
        _calls(model.talker.model) as of_talker,
    ):
        result = reference.generate(
            prompt,
            thinker_eos_token_id=end,
            thinker_min_new_tokens=2,
            thinker_max_new_tokens=tokens,
            talker_min_new_tokens=2,
            talker_max_new_tokens=frames + 1,
        )
    thinker, talker = _joined(of_thinker), _joined(of_talker)
    first = of_thinker[0]
    deepstack = first.get("deepstack_visual_embeds")
    if deepstack is not None and len(deepstack):
        mask = first["visual_pos_masks"]  # [1, S], in 4.57 [1, S, hidden]
        later = thinker["inputs_embeds"].shape[1] - mask.shape[1]
        padding = mask.new_zeros(1, later, *mask.shape[2:])
        thinker["visual_pos_masks"] = torch.cat((mask, padding), 1)
        thinker["deepstack_visual_embeds"] = deepstack
    talker_rows = of_talker[0]["inputs_embeds"].shape[1]
    codes = result.codes.cpu()
    return Given(prompt, result.token_ids, codes, thinker, talker, len(prompt), talker_rows)


@contextmanager
def _calls(module: Any) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(dict(kwargs)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


class _CalledError(Exception):
    """The thinker was called."""


def _first_call(reference: Reference, prompt: Prompt) -> dict[str, Any]:
    """Return the keyword arguments of the text model's first call for a prompt."""
    found: dict[str, Any] = {}

    def keep(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        found.update(kwargs)
        raise _CalledError

    hook = reference.thinker_model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with suppress(_CalledError):
            reference.generate(prompt)
    finally:
        hook.remove()
    return found


def _joined(calls: list[dict[str, Any]]) -> dict[str, Any]:
    rows = torch.cat([call["inputs_embeds"] for call in calls], 1)
    return {
        "inputs_embeds": rows,
        # Without a mask 4.57 takes an image's positions for several sequences in a row.
        "attention_mask": rows.new_ones(rows.shape[:2], dtype=torch.long),
        "position_ids": torch.cat([call["position_ids"] for call in calls], -1),
        "use_cache": False,
    }


class Stages:
    """The stages of the reference over given inputs."""

    def __init__(self, reference: Reference, config: OmniConfig):
        assert config.talker is not None, "the checkpoint speaks"
        self.reference, self._config = reference, config
        self._talker, self._accept = reference.model.talker, config.talker.accept_hidden_layer

    @torch.no_grad()
    def inputs(self, given: Given) -> Arrays:
        """Return inputs and results that no dtype rounds: see verification.reference."""
        rows = given.thinker["inputs_embeds"]
        spoken = torch.tensor(text_rows(self._config, given.token_ids, len(given.codes)))
        embedded = self.reference.model.thinker.get_input_embeddings()(spoken.to(rows.device))
        accepted, _ = self._thinker(given)
        talker = self._talker
        return {
            "prompt": given.prompt.token_ids.numpy(),
            "token_ids": np.array(given.token_ids),
            "codes": given.codes.numpy(),
            **self._encoded(given.prompt, given.thinker),
            "text_projection": thinned(talker.text_projection(embedded)),
            "hidden_projection": thinned(talker.hidden_projection(accepted)),
            "feedback": as_array(self._feedback(given.codes)),
            "samples": self.reference.decode(given.codes.to(rows.device)).cpu().numpy(),
        }

    @torch.no_grad()
    def encoders(self, prompt: Prompt) -> Arrays:
        """Return the rows of a prompt's media."""
        return self._encoded(prompt, _first_call(self.reference, prompt))

    def _encoded(self, prompt: Prompt, thinker: dict[str, Any]) -> Arrays:
        """Return the rows of media among the thinker's inputs."""
        c, ids = self._config.thinker, prompt.token_ids
        rows = thinker["inputs_embeds"][0, : len(prompt)]
        visual = rows[(ids == c.image_token_id).to(rows.device)]
        deepstack = thinker.get("deepstack_visual_embeds")
        levels = [visual, *(deepstack if deepstack is not None else ())]
        missing = 1 + len(c.vision.deepstack_layers) - len(levels)
        return {
            "audio": as_array(rows[(ids == c.audio_token_id).to(rows.device)]),
            "vision": as_array(torch.stack([*levels, *[visual] * missing])),
        }

    @torch.no_grad()
    def outputs(self, given: Given, hidden: Tensor | None, uniforms: Tensor) -> Arrays:
        """Return what the decoders compute.

        hidden: input of the code predictor, [frames, hidden]; None: the talker's own. uniforms:
        float32 [frames, 15].
        """
        accepted, logits = self._thinker(given)
        frames = len(given.codes)
        states = self._talker.model(**given.talker).last_hidden_state[0]
        states = states[given.talker_rows - 1 :][:frames]
        found = {
            "accepted": as_array(accepted),
            **_logits("thinker", logits),
            "hidden": as_array(states),
            **_logits("talker", self._talker.codec_head(states)),
        }
        start = states if hidden is None else hidden.to(states)
        for kind, numbers in (("greedy", None), ("sampled", uniforms)):
            chosen, margins = self._predict(start, given.codes[:, 0], numbers)
            found[f"{kind}_codes"], found[f"{kind}_margins"] = chosen.numpy(), margins.numpy()
        return found

    def _thinker(self, given: Given) -> tuple[Tensor, Tensor]:
        """Return the accept layer's rows of media [M, hidden], and the logits [N, vocab]."""
        model, rows = self.reference.thinker_model, given.prompt_rows
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output)[0, :rows].clone())

        hook = model.layers[self._accept - 1].register_forward_hook(keep)
        try:
            last = model(**given.thinker).last_hidden_state[0]
        finally:
            hook.remove()
        tokens = torch.tensor(self._config.thinker.media_token_ids)
        media = torch.isin(given.prompt.token_ids, tokens)
        logits = self.reference.model.thinker.lm_head(last[rows - 1 :])
        return kept[0][media.to(last.device)], logits

    def _feedback(self, codes: Tensor) -> Tensor:
        tables = self._tables
        parts = [table(codes[:, g].to(table.weight.device)) for g, table in enumerate(tables)]
        return torch.stack(parts).sum(0)

    @property
    def _tables(self) -> list[Any]:
        return [
            self._talker.get_input_embeddings(),
            *self._talker.code_predictor.get_input_embeddings(),
        ]

    def _predict(
        self, hidden: Tensor, code0: Tensor, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the codes [frames, 16] of the code predictor, and their margins [frames, 15].

        Greedy: of its logit over the next, in standard deviations of the logits. Sampled: distance
        of its random number from the interval's end, as a probability.
        """
        predictor, tables = self._talker.code_predictor, self._tables
        device = hidden.device
        rows, codes, margins = hidden[:, None], [code0.to(device)], []
        for step, head in enumerate(predictor.lm_head):
            rows = torch.cat((rows, tables[step](codes[-1])[:, None]), 1)
            states = predictor.model(inputs_embeds=rows, use_cache=False).last_hidden_state
            logits = head(states[:, -1]).float()
            if uniforms is None:
                code, margin = logits.argmax(-1), gaps(logits)
            else:
                code, margin = _sampled(logits, uniforms[:, step].to(device))
            codes.append(code)
            margins.append(margin)
        return torch.stack(codes, 1).cpu(), torch.stack(margins, 1).cpu()


def gaps(logits: Tensor) -> Tensor:
    """Return the margin of each row's largest logit, in the row's deviations."""
    first, second = logits.float().topk(2).values.unbind(-1)
    return (first - second) / logits.float().std(-1)


def _sampled(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    top_p = top_p_limits([1.0] * len(logits)).to(logits.device)
    codes = sample_top(logits, uniforms, TOP_K, top_p)
    kept = logits.topk(min(TOP_K, logits.shape[-1])).values.softmax(-1).cumsum(-1)
    return codes, (kept - uniforms[:, None]).abs().amin(-1)


def _logits(name: str, logits: Tensor) -> Arrays:
    return {**thinned_logits(name, logits), f"{name}_margins": gaps(logits).cpu().numpy()}
