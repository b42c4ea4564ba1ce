"""How each graph is called on the CPU: the inputs and outputs of the modules of model/.

An axis that may be of any length has a name: rows of a prompt, slots of a step, frames, windows.
State that a call changes in place (keys and values) is an input alone.
"""

from collections.abc import Callable, Sequence

from qwen3_omni_neuron.artifact import Call, TensorSpec
from qwen3_omni_neuron.buckets import buckets_within
from qwen3_omni_neuron.config import Code2WavConfig, DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.engine.decoder import talker_context_length
from qwen3_omni_neuron.model.code2wav import UNIT_DILATIONS
from qwen3_omni_neuron.plan import CompilePlan

Axis = int | str
KERNEL = 7  # of code2wav's causal convolutions


def graph_calls(plan: CompilePlan, config: OmniConfig, graph: str) -> tuple[Call, ...]:
    """Every call of one graph, one for each bucket."""
    return tuple(_CALLS[graph](plan, config))


def _thinker(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    c, dtype = config.thinker.text, plan.dtype
    deepstack = len(config.thinker.vision.deepstack_layers)
    calls = []
    for bucket in _buckets(buckets_within(plan.context_length, plan.prompt_buckets)):
        rows = bucket or "rows"
        inputs = _prompt(c, rows, plan.context_length, dtype) | {
            "visual": TensorSpec(("visual",), "int64"),
            "deepstack": TensorSpec((deepstack, "visual", c.hidden_size), dtype),
        }
        outputs = {
            "logits": TensorSpec((1, c.vocab_size), dtype),
            "accepted": TensorSpec((rows, c.hidden_size), dtype),
        }
        calls.append(Call("prefill", bucket, inputs, outputs))
    token_ids = {"token_ids": TensorSpec(("slots",), "int64")}
    decode = token_ids | _step(c, plan.max_concurrency, plan.context_length, dtype)
    logits = {"logits": TensorSpec(("slots", c.vocab_size), dtype)}
    return [*calls, Call("decode", None, decode, logits)]


def _vision(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    c, calls = config.thinker.vision, []
    for bucket in _buckets(plan.patch_buckets):
        patches: Axis = bucket or "patches"
        rows: Axis = bucket // c.merge_size**2 if bucket else "merged"
        inputs = {
            "patches": TensorSpec(("frames", patches, c.patch_values), plan.dtype),
            "places": TensorSpec((2, patches), "int64"),
            "grid": TensorSpec((2,), "int64"),
            "valid": TensorSpec((patches,), "bool"),
        }
        shape = (1 + len(c.deepstack_layers), "frames", rows, c.output_size)
        calls.append(Call("encode", bucket, inputs, {"rows": TensorSpec(shape, plan.dtype)}))
    return calls


def _audio(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    c = config.thinker.audio
    inputs = {
        "mel": TensorSpec(("windows", c.mel_bins, c.window_mel_frames), plan.dtype),
        "valid": TensorSpec(("windows", c.window_tokens), "bool"),
    }
    rows = TensorSpec(("windows", c.window_tokens, c.output_size), plan.dtype)
    return [Call("encode", None, inputs, {"rows": rows})]


def _talker(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    t = _talker_config(config)
    c, dtype, calls = t.text, plan.dtype, []
    for name in ("text_projection", "hidden_projection"):
        into = {"rows": TensorSpec(("rows", t.thinker_hidden_size), dtype)}
        out = {"rows": TensorSpec(("rows", c.hidden_size), dtype)}
        calls.append(Call(name, None, into, out))
    context = talker_context_length(t, plan.context_length)
    for bucket in _buckets(buckets_within(context, plan.prompt_buckets)):
        inputs = _prompt(c, bucket or "rows", context, dtype)
        calls.append(Call("prefill", bucket, inputs, _codec(c, 1, dtype)))
    rows = {"rows": TensorSpec(("slots", c.hidden_size), dtype)}
    decode = rows | _step(c, plan.max_concurrency, context, dtype)
    return [*calls, Call("decode", None, decode, _codec(c, "slots", dtype))]


def _code_predictor(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    t = _talker_config(config)
    hidden = TensorSpec(("slots", t.text.hidden_size), plan.dtype)
    inputs = {
        "hidden": hidden,
        "code0": TensorSpec(("slots",), "int64"),
        "uniforms": TensorSpec(("slots", t.code_groups - 1), "float32"),
        "top_p": TensorSpec(("slots",), "float32"),
    }
    outputs = {"codes": TensorSpec(("slots", t.code_groups), "int64"), "feedback": hidden}
    return [Call("predict", None, inputs, outputs)]


def _code2wav(plan: CompilePlan, config: OmniConfig) -> list[Call]:
    assert config.code2wav is not None, "a checkpoint that can't speak has no such graph"
    c, calls = config.code2wav, []
    state = _code2wav_state(c, plan.dtype)
    for frames in plan.chunk_frames:
        codes = {"codes": TensorSpec(("slots", c.code_groups, frames), "int64")}
        for name, before, late in (("start", {}, c.latency_samples), ("step", state, 0)):
            samples = TensorSpec(("slots", frames * c.frame_samples - late), plan.dtype)
            calls.append(Call(name, frames, codes | before, {"samples": samples} | state))
    return calls


_CALLS: dict[str, Callable[[CompilePlan, OmniConfig], list[Call]]] = {
    "thinker": _thinker,
    "vision": _vision,
    "audio": _audio,
    "talker": _talker,
    "code_predictor": _code_predictor,
    "code2wav": _code2wav,
}


def _talker_config(config: OmniConfig) -> TalkerConfig:
    assert config.talker is not None, "a checkpoint that can't speak has no such graph"
    return config.talker


def _buckets(sizes: Sequence[int]) -> Sequence[int | None]:
    """One call of any length where there is no bucket."""
    return sizes or (None,)


def _prompt(c: DecoderConfig, rows: Axis, context: int, dtype: str) -> dict[str, TensorSpec]:
    return {
        "rows": TensorSpec((rows, c.hidden_size), dtype),
        "positions": TensorSpec((3, rows), "float32"),
        "last": TensorSpec((1,), "int64"),
        **_cache(c, 1, context, dtype),
    }


def _step(c: DecoderConfig, slots: int, context: int, dtype: str) -> dict[str, TensorSpec]:
    """What a step takes beside its rows. slots: the cache's lines."""
    return {
        "positions": TensorSpec(("slots",), "float32"),
        "slots": TensorSpec(("slots",), "int64"),
        "lengths": TensorSpec(("slots",), "int64"),
        **_cache(c, slots, context, dtype),
    }


def _cache(c: DecoderConfig, lines: int, context: int, dtype: str) -> dict[str, TensorSpec]:
    spec = TensorSpec((c.layers, lines, c.kv_heads, context, c.head_dim), dtype)
    return {"keys": spec, "values": spec}


def _codec(c: DecoderConfig, slots: Axis, dtype: str) -> dict[str, TensorSpec]:
    return {
        "logits": TensorSpec((slots, c.vocab_size), dtype),
        "hidden": TensorSpec((slots, c.hidden_size), dtype),
    }


def _code2wav_state(c: Code2WavConfig, dtype: str) -> dict[str, TensorSpec]:
    """See model.code2wav.State, in its order."""
    state = [TensorSpec(("slots",), "int64")]
    line = TensorSpec(("slots", c.kv_heads, c.sliding_window - 1, c.head_dim), dtype)
    state += [line, line] * c.layers
    held = [(c.hidden_size, KERNEL - 1)] * len(c.upsampling_ratios)
    held.append((c.hidden_size, KERNEL - 1))
    width = c.decoder_dim
    for _ in c.upsample_rates:
        held.append((width, 1))
        width //= 2
        held += [(width, (KERNEL - 1) * dilation) for dilation in UNIT_DILATIONS]
    held.append((width, KERNEL - 1))
    state += [TensorSpec(("slots", channels, inputs), dtype) for channels, inputs in held]
    return {f"state_{index}": spec for index, spec in enumerate(state)}
