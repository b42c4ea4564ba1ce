"""LoRA adapters in PEFT's folders: checked against a checkpoint, and merged into its weights.

A folder has adapter_config.json and adapter_model.safetensors. For the matrix W [out, into] of a
layer it has A [r, into] and B [out, r], from which the merged matrix follows in float32:

    plain     W + B A scale      scale = weight lora_alpha / r, or / sqrt(r) with use_rslora
    DoRA      m (W + B A scale) / |W + B A scale|, by rows: the magnitudes m and the norms are [out]
    table     W + (B A)^T scale, W [rows, width], A [r, rows], B [width, r]
    stack     W + B_e A_e scale for expert e of E: transformers 5 and PEFT's target_parameters hold
              a layer's experts as one, A [E r, into] with A_e in rows, B [out, r E] with B_e in
              every E-th column. gate_up_proj has up_proj's rows after gate_proj's

A tensor that is no factor, as those of modules_to_save are, takes the place of the stored one; a
stack of experts [E, out, into] that of its matrices.

Source: PEFT 0.21, scaling and merge of its LoRA layers, tables and DoRA.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint.headers import StoredTensor, read_headers
from qwen3_omni_neuron.checkpoint.json_files import open_regular, read_json, reason
from qwen3_omni_neuron.errors import CheckpointError, format_value, printable

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME_CHARACTERS = 200
_BLOCK_BYTES = 1 << 20
_MOST_NUMBER = 10**9
_FLOATS = ("F32", "F16", "BF16")
_A, _B, _MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
_TABLE_A, _TABLE_B = "lora_embedding_A", "lora_embedding_B"
_WHOLE = "whole"
_INNER = ".base_layer."
_FACTOR = re.compile(
    rf"(.+)\.({_A}|{_B}|{_MAGNITUDE}|{_TABLE_A}|{_TABLE_B})(?:\.default)?(?:\.weight)?"
)
_WRAPPER = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
# What stands before or within a name beside the checkpoint's own: PEFT's wrapper, also after
# "thinker.", and the holder that transformers 5 puts around the thinker's decoder and encoders.
_PEFT = re.compile(r"^(thinker\.)?base_model\.model\.")
_PREFIXES = (
    (_PEFT, r"\1"),
    (re.compile(r"^(thinker\.)?model\.language_model\."), r"\1model."),
    (re.compile(r"^(thinker\.)?model\.(?=(?:audio_tower|visual)\.)"), r"\1"),
)
# Settings that only training, PEFT's injection, or the names of tensors depend on.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config"),
    *("megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "target_modules", "target_parameters", "task_type", "lora_dtype"),
    *("lorap_lr_ratio", "lorap_emb_lr", "eva_config", "loftq_config"),
}
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"}
_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # init_lora_weights that leave W as it is
_ANY = r".*\."  # PEFT itself writes it, where it makes one stack of gate_proj and up_proj
_PATTERN = re.compile(rf"(?:\^|{re.escape(_ANY)})?[\w.]+")
_STACK_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FIRST = ".0.down_proj.weight"  # of a layer's experts
_STACK = re.compile(r"(.+\.mlp\.experts)\.(?:weight|gate_up_proj|down_proj)")


@dataclass(frozen=True)
class AdapterPath:
    """An adapter's folder, and the weight of what it adds."""

    folder: Path
    weight: float = 1.0

    @staticmethod
    def of(given: "str | Path | tuple[str | Path, float]") -> "AdapterPath":
        """Return a caller's folder, or pair of folder and weight."""
        folder, weight = given if isinstance(given, tuple | list) else (given, 1.0)
        return AdapterPath(Path(folder), float(weight))

    def __str__(self) -> str:
        """Return the words of --adapter that give it."""
        plain = self.weight == 1 and "=" not in str(self.folder)
        return str(self.folder) if plain else f"{self.folder}={self.weight!r}"


_Part = slice | tuple[slice | int, slice]


@dataclass(frozen=True)
class _Change:
    """Change of one weight by an adapter.

    names: names of its tensors by kind. scale: factor of B A. part: by kind the part that is this
    weight's, where the weights of a stack share tensors.
    """

    names: Mapping[str, str]
    scale: float
    part: Mapping[str, _Part] = field(default_factory=dict)

    def merged(self, weight: "Tensor", read: "Callable[[str], Tensor]") -> "Tensor":
        """Return a weight of float32 with this change."""
        import torch

        factors = {
            kind: read(name)[self.part.get(kind, ...)].float() for kind, name in self.names.items()
        }
        if _WHOLE in factors:
            return factors[_WHOLE]
        if _TABLE_A in factors:
            return (factors[_TABLE_B] @ factors[_TABLE_A]).t() * self.scale + weight
        merged = (factors[_B] @ factors[_A]).mul_(self.scale).add_(weight)
        if _MAGNITUDE in factors:
            norms = torch.linalg.norm(merged, dim=1)
            merged *= (factors[_MAGNITUDE] / norms)[:, None]
        return merged


class Adapter:
    """An adapter, checked against the shapes of a checkpoint's tensors by released name.

    given: its folder and weight. path: its file. changes: what it does to each weight, by released
    name. Raises CheckpointError for a folder that can't be read, a kind or a setting that is not
    implemented, and a tensor that does not fit.
    """

    def __init__(self, given: AdapterPath, shapes: Mapping[str, tuple[int, ...]]):
        self.path, self.given = given.folder / ADAPTER_WEIGHTS, given
        self._config, self._shapes = _read_config(given.folder), shapes
        self._tensors = _read_tensors(given.folder)
        grouped: dict[tuple[str, bool], dict[str, str]] = {}
        for name in self._tensors:
            weight, kind = self._weight_of(name)
            # The two stacks of a layer's experts have one name, one within the other's wrapper.
            names = grouped.setdefault((weight, weight not in shapes and _INNER in name), {})
            if kind in names:
                raise self._error(f"has two tensors for {weight}: {_shown(name)} is one")
            names[kind] = name
        self.changes: dict[str, _Change] = {}
        for (weight, _), names in grouped.items():
            changes = (self._change if weight in shapes else self._stack)(weight, names)
            if twice := changes.keys() & self.changes.keys():
                of = _shown(next(iter(names.values())))
                raise self._error(f"has two changes of {min(twice)}: {of} is of one")
            self.changes |= changes
        replaced = [w for (w, _), names in grouped.items() if names.keys() & {_WHOLE, _MAGNITUDE}]
        if replaced and given.weight != 1:
            raise self._error(
                f"has modules_to_save or DoRA (for {_shown(replaced[0])}), which no weight scales, "
                f"got weight {given.weight:g}. Leave the weight out"
            )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"The adapter {self.given.folder} {what}.")

    def _weight_of(self, name: str) -> tuple[str, str]:
        """Return the released name of the weight that a tensor is for, and the tensor's kind.

        The name of a layer's stack ends in .mlp.experts.gate_up_proj or .down_proj, and in
        .mlp.experts.weight for its factors, which don't say which of them it is.
        """
        found = _FACTOR.fullmatch(name)
        weight, kind = (f"{found[1]}.weight", found[2]) if found else (name, _WHOLE)
        weight = _own_name(weight)
        for released in (weight, f"thinker.{weight}"):
            stack = _STACK.fullmatch(released)
            if released in self._shapes or (stack and f"{stack[1]}{_FIRST}" in self._shapes):
                return released, kind
        base = self._config.get("base_model_name_or_path")
        raise self._error(
            f"has {_shown(name)}, and the checkpoint has no {_shown(weight)}. It was trained on "
            f"{format_value(base)}: name that checkpoint, or another adapter"
        )

    def _change(self, weight: str, names: Mapping[str, str]) -> dict[str, _Change]:
        """Return the change of one weight. names: its tensors by kind."""
        shape, kinds = self._shapes[weight], set(names)
        if kinds == {_WHOLE}:
            self._check(weight, names[_WHOLE], shape)
            return {weight: _Change(names, 1.0)}
        factors = (_TABLE_A, _TABLE_B) if _TABLE_A in kinds or _TABLE_B in kinds else (_A, _B)
        self._check_kinds(weight, kinds, factors)
        out, into = self._matrix(weight)
        if factors != (_A, _B):
            out, into = into, out
            if _MAGNITUDE in kinds:
                raise self._error(f"has DoRA for the table {weight}, which is not implemented")
        rank, scale = self._rank_and_scale(names[factors[0]])
        self._check(weight, names[factors[0]], (rank, into))
        self._check(weight, names[factors[1]], (out, rank))
        if _MAGNITUDE in kinds:
            self._check(weight, names[_MAGNITUDE], (out,))
        return {weight: _Change(names, scale)}

    def _stack(self, stack: str, names: Mapping[str, str]) -> dict[str, _Change]:
        """Return the changes of all experts' matrices by a stack, or by its one pair of A and B."""
        experts, _, parameter = stack.rpartition(".")
        hidden, width = self._matrix(experts + _FIRST)
        number = 1
        while self._shapes.get(f"{experts}.{number}.down_proj.weight") == (hidden, width):
            number += 1
        sides = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
        rank, scale = 0, 1.0
        if parameter in sides:
            self._check(stack, names[_WHOLE], (number, *sides[parameter]))
        else:
            self._check_kinds(experts, set(names), (_A, _B))
            # Which stack it is stands in no name, and the width of A tells: hidden or an expert's.
            a, b = (self._tensors[names[kind]].shape for kind in (_A, _B))
            parameter = "down_proj" if (a[1:], b[:1]) == ((width,), (hidden,)) else "gate_up_proj"
            stack, (out, into) = f"{experts}.{parameter}", sides[parameter]
            rank, scale = self._rank_and_scale(names[_A], f".{parameter}")
            self._check(stack, names[_A], (number * rank, into))
            self._check(stack, names[_B], (out, number * rank))
        matrices, changes = _STACK_PARTS[parameter], {}
        rows = sides[parameter][0] // len(matrices)
        for expert in range(number):
            for at, matrix in enumerate(matrices):
                own = slice(at * rows, (at + 1) * rows)
                part: dict[str, _Part] = {
                    _A: slice(expert * rank, (expert + 1) * rank),
                    _B: (own, slice(expert, None, number)),
                    _WHOLE: (expert, own),
                }
                changes[f"{experts}.{expert}.{matrix}.weight"] = _Change(names, scale, part)
        return changes

    def _matrix(self, weight: str) -> tuple[int, int]:
        """Return the two sides of a weight of the checkpoint."""
        if len(shape := self._shapes[weight]) != 2:
            raise self._error(
                f"adapts {weight}, whose shape is {list(shape)}: implemented are matrices and "
                "tables of two axes"
            )
        return shape[0], shape[1]

    def _check_kinds(self, weight: str, kinds: set[str], factors: tuple[str, str]) -> None:
        wanted = {*factors, _MAGNITUDE} if self._config.get("use_dora") else {*factors}
        if kinds != wanted:
            raise self._error(
                f"has {', '.join(sorted(kinds))} for {weight}, and {', '.join(sorted(wanted))} "
                "was expected. Save it again"
            )

    def _check(self, weight: str, name: str, shape: tuple[int, ...]) -> None:
        stored = self._tensors[name]
        if stored.shape != shape or stored.dtype not in _FLOATS:
            raise self._error(
                f"has {_shown(name)} of {stored.dtype} {list(stored.shape)}; {weight} and "
                f"{ADAPTER_CONFIG} need {list(shape)} in {', '.join(_FLOATS)}. It was trained on "
                "another checkpoint, or its two files don't belong together"
            )

    def _rank_and_scale(self, name: str, parameter: str = "") -> tuple[int, float]:
        """Return the rank of the layer that has a tensor A, and the factor of its B A.

        parameter: name of the parameter in the layer, with a dot before it, where patterns name it.
        """
        # Patterns are of names in the module that was trained: only PEFT's own is taken off.
        layer = _WRAPPER.sub("", _PEFT.sub(r"\1", name)).rpartition(".lora_")[0] + parameter
        rank = self._number("rank_pattern", "r", layer)
        alpha = self._number("alpha_pattern", "lora_alpha", layer)
        over = math.sqrt(rank) if self._config.get("use_rslora") else rank
        return rank, self.given.weight * alpha / over

    def _number(self, pattern: str, default: str, layer: str) -> Any:
        """Return the rank or alpha of a layer: of the first pattern that its name ends with."""
        for key, number in (self._config.get(pattern) or {}).items():
            end = key.removeprefix("^").removeprefix(_ANY)
            if layer == end or (key[0] != "^" and layer.endswith(f".{end}")):
                return number
        return self._config[default]


def adapters_digest(adapters: Sequence[AdapterPath]) -> str:
    """Return a sha256, as 64 hex digits, of adapters' files, weights and order, without paths.

    Raises CheckpointError for a file that is missing or can't be read.
    """
    digest = hashlib.sha256()
    for adapter in adapters:
        digest.update(f"{adapter.weight!r}\n".encode())
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            try:
                with open_regular(adapter.folder / name) as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
            except OSError as error:
                raise unreadable(adapter.folder, error) from error
    return digest.hexdigest()


def _own_name(name: str) -> str:
    """Return a tensor's name without what training put before or within it."""
    for pattern, kept in _PREFIXES:
        name = pattern.sub(kept, name)
    return _WRAPPER.sub("", name)


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    if not (folder / ADAPTER_WEIGHTS).exists():
        pickled = folder / "adapter_model.bin"
        but = (
            f", but {pickled.name}, which is not read: it may run code" if pickled.exists() else ""
        )
        raise CheckpointError(
            f"The adapter {folder} has no {ADAPTER_WEIGHTS}{but}. Save it anew by PEFT's "
            "save_pretrained, which writes that file."
        )
    return read_headers(folder, [ADAPTER_WEIGHTS])


def _read_config(folder: Path) -> dict[str, Any]:
    """Read an adapter's settings. Raises CheckpointError for those that are not implemented."""
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        if not isinstance(config, dict):
            raise ValueError(f"{ADAPTER_CONFIG} is not an object")
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"The adapter {folder} is of type {format_value(kind)}; LORA is implemented. Merge it "
            "by PEFT, and load the merged checkpoint."
        )
    settings = {name: value for name, value in config.items() if value not in (None, False, [], {})}
    if settings.get("bias") == "none":
        del settings["bias"]
    if config.get("init_lora_weights", True) in _STARTS:
        settings.pop("init_lora_weights", None)
    if unknown := sorted(settings.keys() - _WITHOUT_EFFECT - _READ):
        raise CheckpointError(
            f"The adapter {folder} has {_shown(unknown[0])} "
            f"{format_value(settings[unknown[0]])}, which is not implemented and may change its "
            "weights. Merge it by PEFT, and load the merged checkpoint."
        )
    _check_numbers(folder, config)
    return config


def _check_numbers(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ranks are whole numbers from 1, and alphas are numbers."""
    for name, pattern, kinds, least in (
        ("r", "rank_pattern", (int,), 1),
        ("lora_alpha", "alpha_pattern", (int, float), -_MOST_NUMBER),
    ):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict) or not all(map(_PATTERN.fullmatch, patterns)):
            raise CheckpointError(
                f"The adapter {folder} has {pattern} {format_value(patterns)}; implemented are "
                "names of layers, whole or their ends. Write each name out."
            )
        for value in (config.get(name), *patterns.values()):
            if type(value) not in kinds or not least <= value <= _MOST_NUMBER:
                wanted = "numbers" if float in kinds else "whole numbers"
                raise CheckpointError(
                    f"The adapter {folder} has {name} or {pattern} {format_value(value)}; both are "
                    f"{wanted} from {least} to {_MOST_NUMBER}. Save it again."
                )


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    """Return the error of an adapter whose files can't be read."""
    return CheckpointError(
        f"The adapter {folder} can't be read: {reason(error)}. Name a folder with {ADAPTER_CONFIG} "
        f"and {ADAPTER_WEIGHTS}, as PEFT saves it."
    )


def _shown(name: str) -> str:
    return printable(name, _NAME_CHARACTERS)
