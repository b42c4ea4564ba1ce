"""The reference: transformers' generate.

Audio is one forward over the codes: the reference's chunked_decode loses samples at boundaries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3OmniMoeForConditionalGeneration

from qwen3_omni_neuron.prompt.prompt import Prompt

NO_EOS = -1  # an id that is never generated
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False}
RECORDED = ("inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds")


@dataclass(frozen=True)
class ReferenceResult:
    """A reply of the reference.

    token_ids: EOS included. codes: int64 [frames, groups]. thinker_calls, talker_calls: the
    arguments in RECORDED of each forward of the text model, and of the talker's model.
    """

    token_ids: list[int]
    codes: Tensor
    thinker_calls: list[dict[str, Any]]
    talker_calls: list[dict[str, Any]]


class Reference:
    """The reference model of a checkpoint, greedy, on "cpu" or one "cuda" device."""

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str | None = None
    ):
        transformers.logging.set_verbosity_error()
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            checkpoint, dtype=dtype, device_map=device
        ).eval()
        _make_predictor_greedy(self.model.talker.code_predictor)
        if Version(transformers.__version__) < Version("5"):
            _keep_audio_windows_apart(self.model.thinker)
        # Otherwise transformers 5.23's talker fails for prompts with images and audio.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config

    @property
    def thinker_model(self) -> Any:
        """Module with embed_tokens, layers and norm (4.x: `model` of the thinker)."""
        inner = self.model.thinker.model
        return getattr(inner, "language_model", inner)

    def generate(self, prompt: Prompt, **options: Any) -> ReferenceResult:
        """Answer greedily, with the reference's options; thinker_eos_token_id: default NO_EOS.

        The reference fails if the reply has fewer than two tokens or no frame.
        """
        ids = prompt.token_ids[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media_inputs(prompt)}
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        code2wav, decode = self.model.code2wav, self.model.code2wav.chunked_decode
        options = {"thinker_eos_token_id": NO_EOS, **GREEDY, **options}
        with (
            _calls(self.thinker_model) as thinker_calls,
            _calls(self.model.talker.model) as talker_calls,
            patch.object(code2wav, "chunked_decode", wraps=decode) as decoded,
        ):
            generated = self.model.generate(**inputs, **options)[0]
        sequences = generated if isinstance(generated, Tensor) else generated.sequences
        token_ids = sequences[0, len(prompt) :].tolist()
        codes = decoded.call_args.args[0][0].t()
        return ReferenceResult(token_ids, codes, thinker_calls, talker_calls)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes, int64 [frames, groups], in one forward to float32 [samples]."""
        return self.model.code2wav(codes.t()[None])[0, 0].float()


@contextmanager
def _calls(module: Any) -> Iterator[list[dict[str, Any]]]:
    """Record the arguments of a module's calls in the block."""
    calls: list[dict[str, Any]] = []

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        calls.append({n: kwargs[n] for n in RECORDED if kwargs.get(n) is not None})

    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def media_inputs(prompt: Prompt) -> dict[str, Tensor]:
    """Return the prompt's media in the reference's form."""
    inputs = {}
    if prompt.audio_mel:
        frames = [mel.t() for mel in prompt.audio_mel]  # [frames, mels] a clip
        mask = pad_sequence([torch.ones(len(f)).long() for f in frames], batch_first=True)
        inputs["feature_attention_mask"] = mask
        inputs["input_features"] = pad_sequence(frames, batch_first=True).transpose(1, 2)
    for visuals, values, grid in (
        (prompt.images, "pixel_values", "image_grid_thw"),
        (prompt.videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if visuals:
            inputs[values] = torch.cat([v.patches().flatten(0, 1) for v in visuals])
            inputs[grid] = torch.tensor([v.grid for v in visuals])
    return inputs


def _make_predictor_greedy(predictor: Any) -> None:
    """Fix 4.57, which samples the code predictor even if talker_do_sample is False."""
    original = predictor.generate

    def generate(**kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("top_k", "top_p")}
        return original(**{**kwargs, "do_sample": False})

    predictor.generate = generate


def _keep_audio_windows_apart(thinker: Any) -> None:
    """Encode each 8 s window on its own.

    Without flash attention 4.57's encoder attends across windows and clips; training and 5.x use
    windows. Results differ for windows under 1 s beside longer ones.
    """
    window = thinker.config.audio_config.n_window_infer

    def get_audio_features(
        input_features: Tensor, feature_attention_mask: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        lengths = feature_attention_mask.sum(1).tolist()
        clips = [f[:, :n] for f, n in zip(input_features, lengths, strict=True)]
        windows = [w for clip in clips for w in clip.split(window, 1)]
        encoded = [thinker.audio_tower(w, feature_lens=torch.tensor([w.shape[1]])) for w in windows]
        return torch.cat([e.last_hidden_state for e in encoded])

    thinker.get_audio_features = get_audio_features
