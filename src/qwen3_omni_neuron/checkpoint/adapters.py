"""LoRA adapters in PEFT's folders, checked against a checkpoint and merged into its weights.

For a layer's matrix W [out, into] a folder has A [r, into] and B [out, r]. In float32 the merged
matrix is:

    plain     W + B A scale      scale = weight lora_alpha / r, or / sqrt(r) with use_rslora
    stack     W + B_e A_e scale for expert e of E: transformers 5 and PEFT's target_parameters store
              a layer's experts as one, A [E r, into] with A_e in rows, B [out, r E] with B_e in
              every E-th column. gate_up_proj has up_proj's rows after gate_proj's
    table     W + (B A)^T scale for an embedding W [tokens, width]: A [r, tokens], B [width, r]

PEFT also writes W itself for lm_head and embed_tokens, which replaces the checkpoint's. Other
methods (DoRA, modules_to_save ...) are refused by name.
Source: PEFT 0.21, scaling and merge of its LoRA layers.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint.headers import read_headers
from qwen3_omni_neuron.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_INNER = ".base_layer."
_FACTOR = re.compile(r"(.+)\.lora_((?:embedding_)?[AB])(?:\.default)?(?:\.weight)?")
_BASE = re.compile(r"(.+)\.base_layer\.weight")
_TABLES = (".embed_tokens", ".codec_embedding")
# Parts that released names lack: PEFT's wrapper, also after "thinker.", and transformers 5's
# attribute for the thinker's decoder and encoders.
_PEFT = re.compile(r"^(thinker\.)?base_model\.model\.")
_PREFIXES = (
    (_PEFT, r"\1"),
    (re.compile(r"^(thinker\.)?model\.language_model\."), r"\1model."),
    (re.compile(r"^(thinker\.)?model\.(?=(?:audio_tower|visual)\.)"), r"\1"),
)
# Settings of training, injection, or names.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    *("target_modules", "target_parameters", "task_type", "lora_dtype", "lorap_lr_ratio"),
    *("lorap_emb_lr", "eva_config", "loftq_config"),
}
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # init_lora_weights that don't change W
_ANY = r".*\."  # PEFT's own prefix for a stack of gate_proj and up_proj
_STACK_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FIRST = ".0.down_proj.weight"  # of a layer's experts
_MERGE = "Merge it by PEFT's merge_and_unload, save that, and load the merged checkpoint"


@dataclass(frozen=True)
class AdapterPath:
    """An adapter's folder and weight."""

    folder: Path
    weight: float = 1.0

    @staticmethod
    def of(given: "str | Path | tuple[str | Path, float]") -> "AdapterPath":
        """Return the adapter of a folder, or of a folder and weight."""
        folder, weight = given if isinstance(given, tuple | list) else (given, 1.0)
        return AdapterPath(Path(folder), float(weight))

    def __str__(self) -> str:
        plain = self.weight == 1 and "=" not in str(self.folder)
        return str(self.folder) if plain else f"{self.folder}={self.weight!r}"


@dataclass(frozen=True)
class _Change:
    """Change of one weight: names of A and B, factor of B A, and a stack's parts.

    base: name of the adapter's own copy of the weight; None: change the checkpoint's. table: the
    weight is an embedding table.
    """

    a: str
    b: str
    scale: float
    part_of_a: slice | EllipsisType = ...
    part_of_b: tuple[slice, slice] | EllipsisType = ...
    base: str | None = None
    table: bool = False

    def merged(self, weight: "Tensor", read: "Callable[[str], Tensor]") -> "Tensor":
        a, b = read(self.a)[self.part_of_a].float(), read(self.b)[self.part_of_b].float()
        added = (b @ a).t() if self.table else b @ a
        return added.mul_(self.scale).add_(weight if self.base is None else read(self.base))


class Adapter:
    """Adapter, checked against the shapes of a checkpoint's tensors by released name.

    given: folder and weight. changes: by the weight's released name. Raises CheckpointError for an
    unreadable folder, an unsupported setting, and a tensor that does not fit.
    """

    def __init__(self, given: AdapterPath, shapes: Mapping[str, tuple[int, ...]]):
        self.path, self.given = given.folder / ADAPTER_WEIGHTS, given
        self._config, self._shapes = _read_config(given.folder), shapes
        if not self.path.exists():
            raise self._error(f"has no {ADAPTER_WEIGHTS}. Save it by PEFT's save_pretrained")
        self._tensors = read_headers(given.folder, [ADAPTER_WEIGHTS])
        if not self._tensors:
            raise self._error("has no tensors. Save it again")
        grouped: dict[tuple[str, bool], dict[str, str]] = {}
        for name in self._tensors:
            weight, factor = self._weight_of(name)
            # A layer's two stacks have one name, one inside the other's wrapper.
            inner = weight not in shapes and _INNER in name
            grouped.setdefault((weight, inner), {})[factor] = name
        self.changes: dict[str, _Change] = {}
        for (weight, _), names in grouped.items():
            if not {"A", "B"} <= names.keys():
                raise self._error(f"lacks A or B for {weight}. Save it again")
            self.changes |= (self._change if weight in shapes else self._stack)(weight, **names)
        self._check_targets()

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"The adapter {self.given.folder} {what}.")

    def _weight_of(self, name: str) -> tuple[str, str]:
        """Return the released name of a tensor's weight, and "A", "B" or "base".

        Both stacks' names end in .mlp.experts.
        """
        unread = self._error(
            f"has {name}, which is not a LoRA factor A or B of a supported layer. {_MERGE}"
        )
        if found := _BASE.fullmatch(name):
            layer, kind = found[1], "base"
        elif found := _FACTOR.fullmatch(name):
            layer, kind = found[1], found[2]
        else:
            raise unread
        for pattern, kept in _PREFIXES:
            layer = pattern.sub(kept, layer)
        layer = f"{layer}.".replace(_INNER, ".").removesuffix(".")
        for released in (layer, f"thinker.{layer}"):
            if f"{released}.weight" in self._shapes:
                is_table = released.endswith(_TABLES)
                if kind != "base" and is_table != kind.startswith("embedding_"):
                    raise unread
                return f"{released}.weight", kind.removeprefix("embedding_")
            if f"{released}{_FIRST}" in self._shapes:
                return released, kind
        raise self._error(
            f"has {name}, but the checkpoint has no {layer}.weight. It was trained on "
            f"{self._config.get('base_model_name_or_path')!r}: name that checkpoint, or another "
            "adapter"
        )

    def _change(
        self,
        weight: str,
        A: str,  # noqa: N803
        B: str,  # noqa: N803
        base: str | None = None,
    ) -> dict[str, _Change]:
        if len(shape := self._shapes[weight]) != 2:
            raise self._error(f"adapts {weight} of shape {list(shape)}, which is not a matrix")
        rank, scale = self._rank_and_scale(A)
        table = weight.removesuffix(".weight").endswith(_TABLES)
        out, into = shape[::-1] if table else shape
        self._check(weight, A, (rank, into))
        self._check(weight, B, (out, rank))
        if base is not None:
            self._check(weight, base, shape)
        return {weight: _Change(A, B, scale, base=base, table=table)}

    def _stack(self, experts: str, A: str, B: str) -> dict[str, _Change]:  # noqa: N803
        hidden, width = self._shapes[experts + _FIRST]
        number = next(e for e in count() if f"{experts}.{e}.down_proj.weight" not in self._shapes)
        # A's width tells which stack it is: hidden or an expert's.
        is_down = (self._tensors[A].shape[1:], self._tensors[B].shape[:1]) == ((width,), (hidden,))
        parameter = "down_proj" if is_down else "gate_up_proj"
        out, into = (hidden, width) if is_down else (2 * width, hidden)
        rank, scale = self._rank_and_scale(A, f".{parameter}")
        self._check(f"{experts}.{parameter}", A, (number * rank, into))
        self._check(f"{experts}.{parameter}", B, (out, number * rank))
        matrices, changes = _STACK_PARTS[parameter], {}
        rows = out // len(matrices)
        for expert in range(number):
            for at, matrix in enumerate(matrices):
                changes[f"{experts}.{expert}.{matrix}.weight"] = _Change(
                    *(A, B, scale, slice(expert * rank, (expert + 1) * rank)),
                    (slice(at * rows, (at + 1) * rows), slice(expert, None, number)),
                )
        return changes

    def _check_targets(self) -> None:
        """Refuse a file that lacks a layer of target_modules but has others of its block."""
        targets = self._config.get("target_modules") or ""
        if isinstance(targets, str) or self._config.get("exclude_modules"):
            return
        blocks = {weight.rsplit(".", 2)[0] for weight in self.changes}
        for weight in self._shapes.keys() - self.changes.keys():
            layer = weight.removesuffix(".weight")
            named = any(layer == target or layer.endswith(f".{target}") for target in targets)
            if named and layer.rpartition(".")[0] in blocks:
                raise self._error(
                    f"has no tensors for {layer}, which its target_modules names. Save it again"
                )

    def _check(self, weight: str, name: str, shape: tuple[int, ...]) -> None:
        stored = self._tensors[name]
        if stored.shape != shape or stored.dtype not in _FLOATS:
            raise self._error(
                f"has {name} of {stored.dtype} {list(stored.shape)}; {weight} and "
                f"{ADAPTER_CONFIG} need {list(shape)} in {', '.join(_FLOATS)}. It was trained on "
                "another checkpoint, or its two files don't belong together"
            )

    def _rank_and_scale(self, name: str, parameter: str = "") -> tuple[int, float]:
        """Return the rank of a tensor A, and the factor of its B A.

        parameter: a dot and the parameter's name, if patterns include it.
        """
        # Patterns match the trained module's names: remove only PEFT's parts.
        layer = _PEFT.sub(r"\1", name).replace(_INNER, ".").rpartition(".lora_")[0] + parameter
        rank = self._number("rank_pattern", "r", layer)
        alpha = self._number("alpha_pattern", "lora_alpha", layer)
        over = math.sqrt(rank) if self._config.get("use_rslora") else rank
        return rank, self.given.weight * alpha / over

    def _number(self, pattern: str, default: str, layer: str) -> Any:
        for key, number in (self._config.get(pattern) or {}).items():
            end = key.removeprefix("^").removeprefix(_ANY)
            if layer == end or (key[0] != "^" and layer.endswith(f".{end}")):
                return number
        return self._config[default]


def adapters_digest(adapters: Sequence[AdapterPath]) -> str:
    """Return a sha256 of adapters' files, weights and order. Raises CheckpointError."""
    digest = hashlib.sha256()
    for adapter in adapters:
        digest.update(f"{adapter.weight!r}\n".encode())
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            try:
                digest.update((adapter.folder / name).read_bytes())
            except OSError as error:
                raise unreadable(adapter.folder, error) from error
    return digest.hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    settings = {name: value for name, value in config.items() if value not in (None, False, [], {})}
    known = {"peft_type": "LORA", "bias": "none"}
    if config.get("init_lora_weights", True) in _STARTS:
        settings.pop("init_lora_weights", None)
    for name, value in sorted(settings.items()):
        if known.get(name, value) != value or name not in {*_WITHOUT_EFFECT, *_READ, *known}:
            raise CheckpointError(
                f"The adapter {folder} has {name} {value!r}: only LoRA and rsLoRA over linear "
                f"layers and experts are supported. {_MERGE}."
            )
    patterns = [key for of in ("rank_pattern", "alpha_pattern") for key in config.get(of) or {}]
    if unread := [key for key in patterns if not re.fullmatch(r"(?:\^|\.\*\\\.)?[\w.]+", key)]:
        raise CheckpointError(
            f"The adapter {folder} has the pattern {unread[0]!r}; only layers' names, or ends of "
            "them, are supported. Write each name out."
        )
    return config


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    """Return an adapter's error."""
    return CheckpointError(
        f"The adapter {folder} can't be read: {error}. Name a folder with {ADAPTER_CONFIG} and "
        f"{ADAPTER_WEIGHTS}, as PEFT saves it."
    )
