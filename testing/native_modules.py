"""Modules of model/ with random weights, for the C and for torch, and inputs for both."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native.binding import Library, table_of
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.engines.noise import TALKER, Noise, noise_of_frame
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from testing.packed import packed_and_widened, randomize

DTYPES = ("mixed", "float32", "int8", "int4")
POSITIONS = 40
# Behind several layers torch and the C may round an input to neighbouring integers.
ROUNDED = {"int8": 5e-3, "int4": 3e-2}
BLOCK = 512  # rows of a prompt that go through the layers together: see steps.c
LONG = BLOCK + 90
ODD_PREDICTOR = {
    "layers": 2, "hidden_size": 50, "heads": 3, "kv_heads": 1, "head_dim": 24, "ffn_width": 41,
    "vocab_size": 75,
}  # fmt: skip
LARGE_PREDICTOR = {
    "layers": 2, "hidden_size": 256, "head_dim": 128, "ffn_width": 768, "vocab_size": 2048,
}  # fmt: skip


def stack_config(c: DecoderConfig, moe: dict[str, Any] | None, **sizes: Any) -> DecoderConfig:
    """Other sizes than the tiny checkpoint's; moe: None for a dense feed-forward."""
    changed = None if moe is None or c.moe is None else dataclasses.replace(c.moe, **moe)
    return dataclasses.replace(c, moe=changed, **sizes)


# Query heads of a KV head: 2, 2, 3, 8, 1, 2, 2. "wide": sums of more than one chunk of 256 inputs,
# and work enough to share.
STACKS: dict[str, tuple[dict[str, Any] | None, dict[str, int]]] = {
    "tiny": ({}, {}),
    "dense": (None, {"ffn_width": 96}),
    "odd": (
        {"experts": 5, "experts_per_token": 3, "expert_width": 19, "normalize_weights": False},
        {"hidden_size": 50, "heads": 6, "kv_heads": 2, "head_dim": 24, "vocab_size": 77},
    ),
    "one kv head": (
        {"expert_width": 33},
        {"hidden_size": 33, "heads": 8, "kv_heads": 1, "head_dim": 32, "vocab_size": 31},
    ),
    "one expert": (
        {"experts": 1, "experts_per_token": 1, "expert_width": 1},
        {"heads": 3, "kv_heads": 3, "vocab_size": 1},
    ),
    "every expert": ({"experts": 4, "experts_per_token": 4}, {"vocab_size": 33}),
    "wide": ({"expert_width": 290}, {"hidden_size": 300, "layers": 2, "vocab_size": 500}),
}


class Made(NamedTuple):
    """A decoder: for the C, and for torch with the same weights."""

    c: DecoderConfig
    packed: ThinkerModel | TalkerModel
    model: ThinkerModel | TalkerModel
    cache: KvCache

    def native(
        self, library: Library, threads: int = 1, cache: KvCache | None = None
    ) -> NativeSteps:
        return NativeSteps(self.c, self.packed, cache or self.cache, library, threads)


def made(
    config: OmniConfig,
    which: str,
    stack: str,
    dtype: str = "mixed",
    accept_layer: int = 1,
    slots: int = 4,
    positions: int = POSITIONS,
) -> Made:
    moe, sizes = STACKS[stack]
    model: ThinkerModel | TalkerModel
    if which == "thinker":
        thinker = config.thinker
        c = stack_config(thinker.text, moe, **sizes)
        model = ThinkerModel(dataclasses.replace(thinker, text=c), accept_layer)
    else:
        assert config.talker is not None
        shared = {} if moe is None or stack == "tiny" else {"shared_expert_width": 37}
        c = stack_config(config.talker.text, None if moe is None else moe | shared, **sizes)
        model = TalkerModel(dataclasses.replace(config.talker, text=c))
    randomize(model)
    packed, widened = packed_and_widened(model, which, dtype)
    generator = torch.Generator().manual_seed(2)
    cache = KvCache.zeros(c, slots, positions, torch.float32)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return Made(c, packed, widened, cache)


def copied(cache: KvCache) -> KvCache:
    return KvCache(cache.keys.clone(), cache.values.clone())


def inputs_of(c: DecoderConfig, which: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if which == "thinker":
        return torch.randint(0, c.vocab_size, (count,), generator=generator)
    return torch.randn(count, c.hidden_size, generator=generator)


def prompt_rows(c: DecoderConfig, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Rows and rope positions, whose three axes disagree and which are not dense."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, c.hidden_size, generator=generator)
    positions = torch.randint(0, 90, (count, 3), generator=generator).float().t()
    return rows, positions


def decode(
    steps: NativeSteps, slots: list[int], lengths: list[int], positions: list[float], inputs: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """A step with the inputs and outputs of the module's `decode`."""
    if not inputs.is_floating_point():
        return steps.decode(slots, lengths, positions, inputs.tolist())
    hidden = torch.empty(steps._slots, inputs.shape[1])
    rows, places = table_of(inputs, *inputs.shape), range(len(slots))
    logits = steps.decode(slots, lengths, positions, places, rows, None, hidden)
    return logits, hidden[slots]


def parts(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_close_in(
    dtype: str,
    got: Tensor | tuple[Tensor, ...],
    expected: Tensor | tuple[Tensor, ...],
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Within what a dtype's inputs are rounded by."""
    close = ROUNDED.get(dtype, 0.0)
    torch.testing.assert_close(
        parts(got), parts(expected), atol=max(atol, close), rtol=max(rtol, close)
    )


def assert_equal(got: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> None:
    """To the bit."""
    torch.testing.assert_close(parts(got), parts(expected), atol=0, rtol=0)


def talker_config(config: OmniConfig, **sizes: Any) -> TalkerConfig:
    """The tiny checkpoint's, with other sizes of the code predictor."""
    c = config.talker
    assert c is not None
    predictor = dataclasses.replace(c.predictor, **sizes)
    text = dataclasses.replace(c.text, hidden_size=predictor.hidden_size)
    return dataclasses.replace(c, predictor=predictor, text=text)


def random_predictor(c: TalkerConfig, seed: int = 0, embedded: float = 1.0) -> CodePredictor:
    predictor = CodePredictor(c, nn.Embedding(c.text.vocab_size, c.text.hidden_size))
    randomize(predictor, seed, embedded)
    with torch.no_grad():
        predictor.head.mul_(c.predictor.vocab_size**0.5)  # [steps, vocab, hidden]
    return predictor


class CalledPredictor(NativePredictor):
    """NativePredictor that is called as the module whose results it computes."""

    def __call__(
        self,
        hidden: Tensor,
        code0: Tensor,
        starts: Sequence[int] | None = None,
        top_p: Tensor | None = None,
        top_k: int = 50,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict a frame; see CodePredictor.forward, NativePredictor.predict, noise_of_starts."""
        ids, feedback = code0.tolist(), torch.empty_like(hidden)
        sampling = [PredictorSampling(None, top_k, 1.0)] * len(ids)
        if starts is not None and top_p is not None:
            pairs = zip(starts, top_p.tolist(), strict=True)
            sampling = [PredictorSampling(each, top_k, limit) for each, limit in pairs]
        given = range(len(ids)), ids, sampling, hidden, feedback, logits
        return self.predict(*given), feedback


def both_predictors(
    c: TalkerConfig,
    library: Library,
    predictor: CodePredictor,
    dtype: str = "mixed",
    threads: int = 1,
) -> tuple[CalledPredictor, CodePredictor]:
    """In C, and in torch with the same weights."""
    packed, widened = packed_and_widened(predictor, "code_predictor", dtype)
    return CalledPredictor(c, packed, library, threads), widened


def native_predictor(c: TalkerConfig, library: Library, seed: int = 0) -> CalledPredictor:
    return both_predictors(c, library, random_predictor(c, seed))[0]


def frames(c: TalkerConfig, count: int, seed: int = 1) -> tuple[Tensor, Tensor, list[int]]:
    """hidden, code 0 and starts of the noise."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, c.predictor.hidden_size, generator=generator)
    code0 = torch.randint(0, c.text.vocab_size, (count,), generator=generator)
    return hidden, code0, [Noise(seed, TALKER).at(frame) for frame in range(count)]


def noise_of_starts(c: TalkerConfig, starts: Sequence[int]) -> Tensor:
    shape = c.code_groups - 1, c.predictor.vocab_size
    return torch.from_numpy(np.stack([noise_of_frame(start, *shape) for start in starts]))
