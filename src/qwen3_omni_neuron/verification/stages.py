"""Results of each stage of a loaded model over a reference's inputs, in slot 0 of its engines."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.reference import (
    TOP_K,
    Arrays,
    ReferenceAnswer,
    spread,
    text_rows,
)


class EngineStages:
    """The stages of a loaded model, in this process, that has no other work."""

    def __init__(self, engines: Engines, config: OmniConfig):
        assert engines.talker is not None and engines.vocoder is not None
        self._thinker: Any = engines.thinker
        self._talker: Any = engines.talker
        self._vocoder, self._config = engines.vocoder, config

    @torch.inference_mode()
    def run(self, prompt: Prompt, answer: ReferenceAnswer) -> Arrays:
        """Compute every stage over the answer's inputs. prompt: the question's."""
        return {
            "prompt": prompt.token_ids.numpy(),
            **self._encoders(prompt),
            **self._thinker_results(prompt, answer.arrays),
            **self._projections(answer.arrays),
            **self._frames(prompt, answer.arrays),
            "samples": self._sound(torch.from_numpy(answer.arrays["codes"])),
        }

    def _encoders(self, prompt: Prompt) -> Arrays:
        c = self._config.thinker
        media = self._thinker.media.encode(prompt)
        if media is None:
            width, levels = c.text.hidden_size, 1 + len(c.vision.deepstack_layers)
            return {"audio": np.empty((0, width)), "vision": np.empty((levels, 0, width))}
        kinds = prompt.token_ids[media.filled]
        visual = media.rows[kinds != c.audio_token_id]
        return {
            "audio": as_array(media.rows[kinds == c.audio_token_id]),
            "vision": as_array(torch.cat((visual[None], media.deepstack))),
        }

    def _thinker_results(self, prompt: Prompt, given: Mapping[str, NDArray[Any]]) -> Arrays:
        media = self._media(prompt, given)
        logits, accepted = self._thinker.prefill(0, prompt, 0, media)
        ids = given["token_ids"].tolist()
        rows = [logits, *(self._thinker.step([0], [token]) for token in ids[:-1])]
        return {"accepted": as_array(accepted), **thinned_logits("thinker", torch.cat(rows))}

    def _media(self, prompt: Prompt, given: Mapping[str, NDArray[Any]]) -> PromptMedia | None:
        """Return the reference's rows of the encoders in the form of ours."""
        ours = self._thinker.media.encode(prompt)
        if ours is None:
            return None
        dtype, rows = ours.rows.dtype, ours.rows.clone()
        is_audio = prompt.token_ids[ours.filled] == self._config.thinker.audio_token_id
        audio, vision = (torch.from_numpy(given[name]).to(dtype) for name in ("audio", "vision"))
        rows[is_audio], rows[~is_audio] = audio, vision[0]
        return PromptMedia(ours.start, ours.filled, rows, ours.visual, vision[1:])

    def _projections(self, given: Mapping[str, NDArray[Any]]) -> Arrays:
        ids = given["token_ids"].tolist()
        spoken = torch.tensor(text_rows(self._config, ids, len(given["codes"])))
        text, accepted = self._talker.text_rows(spoken), torch.from_numpy(given["accepted"])
        hidden = self._talker.project_hidden(accepted.to(text.dtype)) if len(accepted) else text[:0]
        return {"text_projection": thinned(text), "hidden_projection": thinned(hidden)}

    def _frames(self, prompt: Prompt, given: Mapping[str, NDArray[Any]]) -> Arrays:
        """Run talker and code predictor, each frame from the reference's hidden and feedback."""
        talker, codes = self._talker, given["codes"]
        text = text_rows(self._config, given["token_ids"].tolist(), len(codes))
        hidden, feedback = (torch.from_numpy(given[name]) for name in ("hidden", "feedback"))
        talker.prepare(0, prompt.talker, RequestOptions().speaker_id(self._config))
        accepted = torch.from_numpy(given["accepted"]).to(talker.rows(0)[0].dtype)
        logits = [talker.prefill(0, accepted, text[0])]
        states: list[Tensor] = []
        found: dict[str, list[Tensor]] = {"greedy_codes": [], "sampled_codes": [], "feedback": []}
        for frame, code0 in enumerate(codes[:, 0].tolist()):
            states.append(talker.rows(0)[0].clone())
            for kind, uniforms in (("sampled", given["uniforms"][frame]), ("greedy", None)):
                talker.set_rows(0, hidden[frame, None], feedback[frame, None])
                sampling = PredictorSampling(uniforms, TOP_K, 1.0)
                found[f"{kind}_codes"].append(talker.predict([0], [code0], [sampling]))
            found["feedback"].append(talker.rows(0)[1].clone())
            talker.set_rows(0, hidden[frame, None], feedback[frame, None])
            if frame + 1 < len(codes):
                logits.append(talker.step([0], [text[frame + 1]]))
        return {
            "hidden": as_array(torch.cat(states)),
            **thinned_logits("talker", torch.cat(logits)),
            "greedy_codes": torch.cat(found["greedy_codes"]).numpy(),
            "sampled_codes": torch.cat(found["sampled_codes"]).numpy(),
            "feedback": as_array(torch.cat(found["feedback"])),
        }

    def _sound(self, codes: Tensor) -> NDArray[np.float32]:
        """Decode in several chunks, so that the vocoder's state is carried on."""
        half = max(1, len(codes) // 2)
        sizes = self._vocoder.chunk_frames
        size = max([n for n in sizes if n <= half] or [min(sizes)])
        first, *later = codes.split(size)
        parts = self._vocoder.start([0], [first])
        return np.concatenate([*parts, *(self._vocoder.step([0], [c])[0] for c in later)])


def thinned_logits(name: str, logits: Tensor) -> Arrays:
    """Return some channels of logits, and the likeliest tokens."""
    top = logits.argmax(-1).cpu().numpy()
    return {f"{name}_logits": thinned(logits), f"{name}_top": top}


def thinned(x: Tensor) -> NDArray[np.float32]:
    """Return some channels of rows [..., channels]."""
    return as_array(x[..., torch.from_numpy(spread(x.shape[-1])).to(x.device)])


def as_array(x: Tensor) -> NDArray[np.float32]:
    """Return a tensor as an array."""
    array: NDArray[np.float32] = x.float().cpu().numpy()
    return array
