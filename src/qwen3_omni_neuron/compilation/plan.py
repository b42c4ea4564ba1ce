"""The compile plan: settings of a compile, their checks and defaults."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, OmniConfig
from qwen3_omni_neuron.options import (
    FROM_1,
    ValueRange,
    check_names,
    integers,
    one_of,
    option,
    options_of,
)

HEARING_MODELS = ("thinker", "vision", "audio")
SPEAKING_MODELS = ("talker", "code_predictor", "code2wav")
MODELS = (*HEARING_MODELS, *SPEAKING_MODELS)
CHUNK_FRAMES = (1, 2, 4, 8, 16, 25)
# Each model's parts, as named in checkpoint.modules.Models.
MODEL_PARTS = {
    "thinker": ("thinker",),
    "vision": ("vision_encoder",),
    "audio": ("audio_encoder",),
    "talker": ("talker", "text_projection", "hidden_projection"),
    "code_predictor": ("code_predictor",),
    "code2wav": ("code2wav",),
}
MODEL_STAGES = dict.fromkeys(("thinker", "vision", "audio"), "thinker") | {
    "talker": "talker",
    "code_predictor": "talker",
    "code2wav": "vocoder",
}
MODEL_OF_PART = {part: model for model, parts in MODEL_PARTS.items() for part in parts}
SAME = "same"  # predictor_dtype: the plan's dtype
_EVERY_MODEL = ("target", "tp", "lnc", "dtype", "opt_level")
_DECODER = ("max_concurrency", "context_length", "prompt_buckets", "decode_buckets", "batches")
_PREDICTOR = ("predictor_top_k", "predictor_dtype")
_BY_MODEL = {
    "thinker": _DECODER,
    "vision": ("patch_buckets",),
    "audio": ("audio_windows",),
    "talker": (*_DECODER, "talker_context_length", "projection_rows"),
    "code_predictor": ("max_concurrency", "batches", *_PREDICTOR),
    "code2wav": ("max_concurrency", "batches", "chunk_frames"),
}


def _setting(help: str, shown: str = "the target's", **more: Any) -> Any:
    return option(MISSING, help, shown=shown, **more)


@dataclass(frozen=True)
class CompilePlan:
    """Settings of a compile, created and checked by `make_plan`.

    Lists of sizes ascend; an empty one allows any size, without padding. model: the checkpoint's
    folder; its path does not affect the compile. adapters: merged in this order; a manifest has
    their digest instead. predictor_dtype: "same": the code predictor is in `dtype`, as the other
    models. "mixed": its weights are, or bfloat16 for int8 and int4, and it computes in float32.
    "float32": its weights are float32, too. chunked_prefill: rows can be appended to a slot's, and
    slots copied. mixed_arithmetic: dtype of activations if weights have another. These two follow
    from the target: see TargetLimits. Trees of earlier versions lack settings that have a default,
    and were compiled with it.
    """

    model: Path
    chunked_prefill: bool
    target: str = _setting("cpu, torchneuron or neuron", "cpu, and torchneuron for a dry run")
    tp: Degrees = _setting(
        "cores that share a part's weights; one number is for all parts", metavar="N|PART=N,..."
    )
    lnc: int = _setting("physical cores per logical core")
    dtype: str = _setting("dtype of weights: auto, or one of the target's", "auto")
    max_concurrency: int = _setting("slots: concurrent requests", "8")
    context_length: int = _setting("positions of a slot's KV cache", "8192")
    talker_context_length: int = _setting(
        "positions of the talker's KV cache", "--context-length + 4105"
    )
    prompt_buckets: tuple[int, ...] = _setting("prompt rows per prefill call", flag="--buckets")
    decode_buckets: tuple[int, ...] = _setting("KV cache positions read by a decode step")
    patch_buckets: tuple[int, ...] = _setting("patches of an image or video frame")
    audio_windows: tuple[int, ...] = _setting("8 s windows per audio encoder call")
    projection_rows: tuple[int, ...] = _setting("rows per call of the talker's projections")
    batches: tuple[int, ...] = _setting("slots per decode step")
    chunk_frames: tuple[int, ...] = _setting("frames per vocoder call")
    predictor_top_k: int = _setting("largest predictor_top_k of a request (0 = no limit)")
    mixed_arithmetic: str = "float32"
    predictor_dtype: str = option(
        SAME, "dtype of the code predictor: auto, same, mixed or float32", shown="auto"
    )
    opt_level: int | None = option(
        None, "the compiler's -O; 1 uses less memory and time", shown="2 for torchneuron"
    )
    adapters: tuple[AdapterPath, ...] = ()

    @property
    def arithmetic(self) -> str:
        """Dtype of activations."""
        return self.mixed_arithmetic if self.dtype in ("mixed", "int8", "int4") else self.dtype

    @property
    def predictor_arithmetic(self) -> str:
        """Dtype of the code predictor's activations."""
        return self.arithmetic if self.predictor_dtype == SAME else "float32"

    @property
    def settings(self) -> dict[str, Any]:
        """SETTINGS as JSON values, without opt_level if the target has none."""
        values = {name: getattr(self, name) for name in SETTINGS} | {"tp": self.tp.setting}
        found = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        return {name: value for name, value in found.items() if value is not None}

    def model_settings(self, model: str) -> dict[str, Any]:
        """Return one model's settings. model: one of MODELS."""
        settings = self.settings | {"tp": self.tp.of(model)}
        names = (*_EVERY_MODEL, *_BY_MODEL[model])
        return {name: settings[name] for name in names if name in settings}

    def degree(self, part: str) -> int:
        """Return the number of cores that share a part's weights. part: see MODEL_PARTS."""
        return self.tp.of(MODEL_OF_PART[part])

    @property
    def if_killed(self) -> str:
        """Advice after a compiler was killed, or ""."""
        if self.opt_level in (None, 1):
            return ""
        return (
            " Try --opt-level 1, which needs less memory. The same command skips finished models; "
            "with another level it compiles them again."
        )

    def command(self, out: Path) -> str:
        """Return the command line that compiles this plan into `out`."""
        return compile_command(self.model, self.adapters, self.settings, out)


SETTINGS = options_of(CompilePlan)
"""Fields of CompilePlan that are `compile` flags and in a manifest."""
SIZES = [name for name, setting in SETTINGS.items() if setting.type == tuple[int, ...]]


def compile_command(
    model: str | Path, adapters: Iterable[AdapterPath], settings: Mapping[str, Any], out: Path
) -> str:
    """Return a `compile` command line. settings: of a manifest of any version."""
    words = ["qwen3-omni-neuron", "compile", "--model", str(model), "--out", str(out)]
    for adapter in adapters:
        words += ["--adapter", str(adapter)]
    for name, setting in SETTINGS.items():
        value = settings.get(name)
        if value not in (None, [], 0):
            words += [
                setting.flag,
                ",".join(map(str, value)) if isinstance(value, list) else str(value),
            ]
    return shlex.join(words)


def cores_of_stages(tp: Degrees, stages: Iterable[str]) -> dict[str, int]:
    """Return the cores that each stage needs: its models' largest degree."""
    return {
        stage: max(tp.of(model) for model, own in MODEL_STAGES.items() if own == stage)
        for stage in stages
    }


def check_groups(tp: Degrees, stages: Iterable[str]) -> None:
    """Raise OptionError if a part is on several, but not all, of its stage's cores.

    It would sum over a subgroup of ranks, unproven on devices. stages: those that share cores.
    """
    stages = tuple(stages)
    cores = max(cores_of_stages(tp, stages).values())
    for model, stage in MODEL_STAGES.items():
        if stage in stages and tp.of(model) not in (1, cores):
            split = ", or placement split" if len(stages) > 1 else ""
            raise OptionError(
                f"tp {tp} has the {model} on {tp.of(model)} of the {cores} cores of "
                f"{' and '.join(stages)}, which is untested on devices. Use 1 or {cores}{split}."
            )


def models_of(config: OmniConfig) -> tuple[str, ...]:
    """Return the names of a checkpoint's models; fewer without a talker."""
    speaks = config.talker is not None and config.code2wav is not None
    return MODELS if speaks else HEARING_MODELS


DEFAULT_CONTEXT_LENGTH = 8192
DEFAULT_FRAMES = 4096  # default limit of a request's frames
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True)
class TargetLimits:
    """Settings that a target allows; the first of each is the default.

    degrees: tensor-parallel degrees. tp: default degrees by instance type; the first also for other
    instances. mixed_degrees: parts may differ in degree. core_sizes: physical cores per logical
    core. chunked_prefill: engines can append rows to a slot's (see engines.protocols.Thinker); else
    prompts are computed whole. auto_dtype: function that resolves "auto" for a checkpoint with
    adapters. predictor_top_k: default; 0: any. predictor_dtypes: allowed ones by dtype, the default
    first; only "same" for other dtypes. sizes: defaults of CompilePlan's lists; others may have any
    size. mixed_arithmetic: dtype of activations in mixed, int8 and int4. opt_levels: the
    compiler's; none if fixed.
    """

    target: str
    degrees: tuple[int, ...]
    tp: Mapping[str, Degrees]
    core_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    predictor_top_k: int
    chunked_prefill: bool
    sizes: Mapping[str, tuple[int, ...]]
    predictor_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    auto_dtype: Callable[[Path, OmniConfig, Sequence[AdapterPath]], str] = (
        lambda folder, config, adapters: config.dtype
    )
    mixed_arithmetic: str = "float32"
    mixed_degrees: bool = False
    opt_levels: tuple[int, ...] = ()


def make_plan(
    model: Path,
    config: OmniConfig,
    limits: TargetLimits,
    instance: str | None = None,
    adapters: Sequence[AdapterPath] = (),
    **given: Any,
) -> CompilePlan:
    """Make the plan from a caller's settings, a target's limits and a checkpoint's config.

    instance: EC2 instance type that determines default degrees; None: the target's first. adapters:
    see CompilePlan. given: some of SETTINGS but target; None: the target's default. tp: see
    Degrees.parse. dtype: "auto" (the checkpoint's dtype, or the limits' choice), or one of the
    limits. context_length: default: 8192, or the model's limit if less. talker_context_length:
    default: context_length, plus the assistant's rows, plus 4096 frames. predictor_dtype: "auto",
    or one of the limits. Sizes ascend. Unless empty, decode buckets always end with the context
    length, batches with max_concurrency, and, without chunked prefill, prompt buckets with the
    context length.
    Raises OptionError with the setting and its allowed values, and CheckpointError for dtype
    "auto" and a quantised checkpoint that can't be read.
    """
    check_names(given, [name for name in SETTINGS if name != "target"])
    given = {name: value for name, value in given.items() if value is not None}
    usual: dict[str, Any] = {
        "lnc": limits.core_sizes[0],
        "dtype": "auto",
        "max_concurrency": DEFAULT_CONCURRENCY,
        "context_length": min(DEFAULT_CONTEXT_LENGTH, config.thinker.text.max_positions),
        "predictor_top_k": limits.predictor_top_k,
        "opt_level": next(iter(limits.opt_levels), None),
        **dict.fromkeys(SIZES, ()),
        **limits.sizes,
    }
    chosen = usual | given
    chosen |= {name: tuple(chosen[name]) for name in SIZES}
    for name, values in _ranges(limits, config).items():
        _check(name, chosen[name], values)
    context_length = chosen["context_length"]
    if config.talker is None:
        chosen["talker_context_length"] = 0
    else:
        most = config.talker.text.max_positions
        longest = min(context_length + ASSISTANT_ROWS + DEFAULT_FRAMES, most)
        length = chosen.setdefault("talker_context_length", longest)
        values = integers(ASSISTANT_ROWS + 1, most, " for this checkpoint")
        _check("talker_context_length", length, values)
    prompts = given.get("prompt_buckets")
    if prompts and prompts[-1] > context_length:
        raise OptionError(
            f"prompt_buckets has {prompts[-1]}, more than the KV cache's {context_length} "
            "positions. Leave it out, or raise context_length."
        )
    chosen["decode_buckets"] = buckets_within(context_length, chosen["decode_buckets"])
    chosen["batches"] = buckets_within(chosen["max_concurrency"], chosen["batches"])
    prompts = chosen["prompt_buckets"]
    if limits.chunked_prefill:  # a longer prompt is several chunks
        chosen["prompt_buckets"] = tuple(sorted({min(rows, context_length) for rows in prompts}))
    else:
        chosen["prompt_buckets"] = buckets_within(context_length, prompts)
    if chosen["dtype"] == "auto":
        chosen["dtype"] = limits.auto_dtype(model, config, adapters)
        if chosen["dtype"] not in limits.dtypes:
            raise OptionError(
                f"this checkpoint is in {config.dtype}, which is not supported; load it with dtype "
                f"{', '.join(limits.dtypes)}."
            )
    dtype, predictor_dtype = chosen["dtype"], chosen.get("predictor_dtype", "auto")
    dtypes = limits.predictor_dtypes.get(dtype, (SAME,))
    where = f" for target {limits.target} in dtype {dtype}"
    _check("predictor_dtype", predictor_dtype, one_of("auto", *dtypes, where=where))
    settings = {
        "tp": _degrees(limits, instance, given.get("tp")),
        "predictor_dtype": dtypes[0] if predictor_dtype == "auto" else predictor_dtype,
        "chunked_prefill": limits.chunked_prefill,
        "mixed_arithmetic": limits.mixed_arithmetic,
        "adapters": tuple(adapters),
    }
    return CompilePlan(**chosen | settings | {"model": model, "target": limits.target})


def _check(name: str, value: Any, values: ValueRange) -> None:
    replace(SETTINGS[name], values=values).check(value)


def _ranges(limits: TargetLimits, config: OmniConfig) -> dict[str, ValueRange]:
    where = f" for target {limits.target}"
    top_ks = integers(1, where=where) if limits.predictor_top_k else one_of(0, where=where)
    most = config.thinker.text.max_positions
    no_level = ValueRange(f"left out{where}", lambda level: level is None)
    levels = one_of(*limits.opt_levels, where=where) if limits.opt_levels else no_level
    ranges = {
        "opt_level": levels,
        "lnc": one_of(*limits.core_sizes, where=where),
        "dtype": one_of("auto", *limits.dtypes, where=where),
        "max_concurrency": FROM_1,
        "context_length": integers(2, most, " for this checkpoint"),
        "predictor_top_k": top_ks,
    }
    block = config.thinker.vision.merge_size**2  # patches that become one row
    for name in SIZES:
        step = block if name == "patch_buckets" else 1
        if name in limits.sizes:
            ranges[name] = _sizes(step, limits.sizes[name] != (), where)
        else:
            words = f"left out{where}, which accepts any size"
            ranges[name] = ValueRange(words, lambda sizes: sizes == ())
    return ranges


def _sizes(step: int, needed: bool, where: str) -> ValueRange:
    words = "a list of " + "one or more " * needed + "ascending sizes"
    words += f", multiples of {step}" * (step > 1) + where

    def accepts(sizes: tuple[int, ...]) -> bool:
        ascends = all(a < b for a, b in zip((0, *sizes), sizes, strict=False))
        return ascends and not any(size % step for size in sizes) and (bool(sizes) or not needed)

    return ValueRange(words, accepts)


def _degrees(limits: TargetLimits, instance: str | None, given: Any) -> Degrees:
    where = f" for target {limits.target}"
    named = [name for name in limits.tp if name]
    if instance is not None and instance not in named:
        raise OptionError(
            f"instance must be {one_of(*named, where=where).phrase}, got {instance!r}."
            if named
            else f"instance is only for the targets on Neuron, and this is{where}. Leave it out."
        )
    usual = limits.tp[instance] if instance else next(iter(limits.tp.values()))
    tp = usual if given is None else Degrees.parse(given, usual)
    if len(tp.each) > 1 and not limits.mixed_degrees:
        raise OptionError(f"tp must be one number for all parts{where}, got {tp}.")
    for degree in tp.each:
        _check("tp", degree, one_of(*limits.degrees, where=where))
    for one in set(MODEL_STAGES.values()):
        check_groups(tp, [one])
    return tp
