"""Load weights from a checkpoint; write them to and load them from a compiled tree.

A tree has one file per model, with parameters in the forms of cpu.precision. Processes share the
mapped files' pages.
"""

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, ShardReader
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.checkpoint.parameters import (
    Part,
    check_names,
    converted,
    copy_piece,
    put_parameter,
)
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm
from qwen3_omni_neuron.checkpoint.tensor_file import (
    Layout,
    layout_bytes,
    map_tensors,
    write_tensors,
)
from qwen3_omni_neuron.compilation.manifest import ModelRecord, record_files
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODEL_STAGES, SAME, CompilePlan
from qwen3_omni_neuron.cpu.memory import map_pages
from qwen3_omni_neuron.cpu.packing import grouped_shape, pack_groups
from qwen3_omni_neuron.cpu.precision import (
    GROUPS,
    PRECISIONS,
    WeightForm,
    library_for,
    part_precision,
    weight_forms,
)
from qwen3_omni_neuron.cpu.rounded_inputs import round_inputs_of
from qwen3_omni_neuron.cpu.target import usable_cores
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.model.torch_threads import one_torch_thread

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "weights.safetensors"
NOT_QUANTISED: Mapping[str, QuantisedForm] = MappingProxyType({})
Forms = Mapping[str, Mapping[str, WeightForm]]
"""Each parameter's form, by part and parameter name."""


def load_checkpoint_models(
    checkpoint: Checkpoint,
    config: OmniConfig,
    dtype: str,
    stages: Collection[str],
    packed: bool,
    predictor_dtype: str = SAME,
) -> Models:
    """Read some stages' modules from a checkpoint, one parameter at a time.

    packed: keep weights packed for the C if this dtype packs them; else widen them for torch.
    Raises CheckpointError; see checkpoint.parameters.load_parts.
    """
    models, parts = lay_out(config, stages)
    check_names(list(parts.values()), checkpoint)
    forms = _forms_of(parts, dtype, predictor_dtype, checkpoint.quantised)
    widened = PRECISIONS[dtype].packed and not packed
    with one_torch_thread():
        for name, part in parts.items():
            for target, kept in _kept(part, checkpoint, forms[name]):
                _put(part.module, target, forms[name][target], kept, widened)
    return models


def load_compiled_models(
    tree: Path,
    config: OmniConfig,
    dtype: str,
    stages: Collection[str],
    packed: bool,
    quantised: Mapping[str, QuantisedForm] = NOT_QUANTISED,
    predictor_dtype: str = SAME,
) -> Models:
    """Load some stages' modules from a tree. Raises ArtifactError.

    The talker also gets the thinker's token embedding. quantised: see Checkpoint.
    """
    models, parts = lay_out(config, stages)
    forms = _forms_of(parts, dtype, predictor_dtype, quantised)
    widened = PRECISIONS[dtype].packed and not packed
    if widened and dtype != "float32":
        stored = layout_bytes(_file_layout(parts, forms))
        wide = 4 * sum(p.numel() for part in parts.values() for p in part.module.parameters())
        logger.warning(
            "%s: %.3g GB of weights take %.3g GB of memory in float32, which torch computes in",
            *(tree, stored / 1e9, wide / 1e9),
        )
    for model, names in MODEL_PARTS.items():
        chosen = {name: parts[name] for name in names if name in parts}
        if chosen:
            kept = _fill(tree / model, chosen, forms, widened)
            if model != "vision" and not widened:
                map_pages(kept)
    if "embedding" in parts:
        given = {"embedding": parts["embedding"]}, forms, widened
        # The thinker maps its pages; here they would count twice.
        _fill(tree / "thinker", *given, prefix="thinker.embedding.")
    return models


def _forms_of(
    parts: Mapping[str, Part],
    dtype: str,
    predictor_dtype: str,
    quantised: Mapping[str, QuantisedForm],
) -> Forms:
    return {
        name: weight_forms(part_precision(name, dtype, predictor_dtype), name, part, quantised)
        for name, part in parts.items()
    }


def quantised_dtype(folder: Path, config: OmniConfig, adapters: Sequence[AdapterPath]) -> str:
    """Return the dtype that keeps a quantised checkpoint's numbers and rounds the others least.

    "int4" if all the thinker's 4-bit matrices are kept as published, else "int8", which keeps the
    same numbers: 4 bits would lose as much as an adapter adds. Raises CheckpointError.
    """
    _, parts = lay_out(config, ("thinker",))
    quantised = Checkpoint(folder, adapters).quantised
    forms = weight_forms(PRECISIONS["int4"], "thinker", parts["thinker"], quantised).values()
    kinds = {form.kind for form in forms}
    return "int4" if "published" in kinds and "int4" not in kinds else "int8"


def _kept(
    part: Part, checkpoint: Checkpoint, forms: Mapping[str, WeightForm]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    pieces = [(t, stored) for t, stored in part.pieces if forms[t].kind != "published"]
    others = converted(
        replace(part, pieces=pieces), checkpoint, lambda target, stored: forms[target].read(stored)
    )
    for target, stored in part.pieces:
        form = forms[target]
        if form.kind == "published":
            with checkpoint.reader() as reader:
                assert isinstance(reader, ShardReader)  # drawn weights are not quantised
                yield target, {target: _published(form, stored, reader)}
        else:
            _, tensor = next(others)
            yield target, form.keep(target, tensor)


def _published(form: WeightForm, pieces: Sequence[Piece], reader: ShardReader) -> Tensor:
    """Read and pack a parameter's published numbers, a stack's matrices one at a time.

    Raises CheckpointError if a shape contradicts config.json.
    """
    groups, (*outer, into) = form.groups, form.shape
    numbers = torch.empty(form.shape, dtype=torch.int8)
    scale = torch.empty((*outer, -(-into // groups.size)), dtype=groups.scale)
    for piece in pieces:
        own, own_scale = reader.numbers(piece.name)
        copy_piece(numbers, piece, own)
        scale[piece.region] = own_scale.to(groups.scale)
    reader.trim()
    packed = torch.empty(grouped_shape(form.matrix, groups), dtype=torch.uint8)
    count, out = prod(form.matrix[:-2]), form.matrix[-2]
    for to, matrix, by in zip(
        packed.view(count, *packed.shape[-3:]),
        numbers.view(count, out, into),
        scale.view(count, out, -1),
        strict=True,
    ):
        to.copy_(pack_groups(matrix, by, groups))
    return packed


def _put(
    module: nn.Module, target: str, form: WeightForm, kept: Mapping[str, Tensor], widened: bool
) -> None:
    if widened:
        put_widened(module, target, form, kept)
    else:
        put_kept(module, target, form, kept)


def put_widened(
    module: nn.Module, target: str, form: WeightForm, kept: Mapping[str, Tensor]
) -> None:
    """Set a module's parameter in float32, and let it round inputs as the C does."""
    put_parameter(module, target, form.widen(kept, target))
    round_inputs_of(module, target, form.kind)


def put_kept(module: nn.Module, target: str, form: WeightForm, kept: Mapping[str, Tensor]) -> None:
    """Set a module's parameter to its kept tensors.

    Adds an int8 matrix's scale, and an int4 one's format, for cpu.native.binding.Weights.matrix.
    """
    put_parameter(module, target, kept[target])
    owner_name, _, name = target.rpartition(".")
    owner = module.get_submodule(owner_name)
    if form.kind in ("int4", "published"):
        setattr(owner, name + GROUPS, form.groups)
    if form.kind == "int8":
        owner.register_buffer(name + SCALE, kept[target + SCALE], persistent=False)


def _map_weights(folder: Path) -> dict[str, Tensor]:
    try:
        return map_tensors(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} can't be read ({error}). Delete {folder} and compile again: "
            "only that model is compiled."
        ) from error


def _fill(
    folder: Path, parts: Mapping[str, Part], forms: Forms, widened: bool, prefix: str = ""
) -> list[Tensor]:
    """Fill parts' modules from a model's folder. Returns the tensors used.

    widened: float32, for torch. prefix: start of these parameters' names; "": the part's name.
    """
    expected = _file_layout(parts, forms, prefix)
    plain = _file_layout(parts, forms, prefix, plain=True)
    stored = _map_weights(folder)
    different = sorted(expected.keys() - stored.keys())
    different = different or ([] if prefix else sorted(stored.keys() - expected.keys()))
    if different:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} does not have the tensors of this version's modules "
            f"({len(different)} differ, {different[0]} first). Delete {folder} and compile again."
        )

    def tensor_of(name: str) -> Tensor:
        tensor, (shape, dtype) = stored[name], expected[name]
        if (tuple(tensor.shape), tensor.dtype) not in ((shape, dtype), plain[name]):
            raise ArtifactError(
                f"{name} in {folder / WEIGHTS_FILE} is {tensor.dtype} {list(tensor.shape)} instead "
                f"of {dtype} {list(shape)}. Delete {folder} and compile again."
            )
        return tensor

    in_use: list[Tensor] = []
    for name, part in parts.items():
        for target, form in forms[name].items():
            tensors = {k: tensor_of((prefix or f"{name}.") + k) for k in form.layout(target)}
            _put(part.module, target, form, tensors, widened)
            in_use += tensors.values()
    return in_use


def compile_model(plan: CompilePlan, model: str, folder: Path) -> ModelRecord:
    """Write a model's weights into `folder`. Raises OSError, CheckpointError."""
    started = time.monotonic()
    checkpoint = Checkpoint(plan.model, plan.adapters)
    parts = _stage_parts(plan, model)
    check_names(list(parts.values()), checkpoint)
    parts = {name: parts[name] for name in MODEL_PARTS[model]}
    forms = _forms_of(parts, plan.dtype, plan.predictor_dtype, checkpoint.quantised)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, part in parts.items():
            for _, kept in _kept(part, checkpoint, forms[name]):
                yield from ((f"{name}.{target}", tensor) for target, tensor in kept.items())

    library = library_for(plan.dtype)
    if library is not None:
        library.grow_pool(usable_cores())
    layout, plain = _file_layout(parts, forms), _file_layout(parts, forms, plain=True)
    write_tensors(folder / WEIGHTS_FILE, layout, tensors(), plain)
    return ModelRecord((), record_files(folder), round(time.monotonic() - started, 3))


def expected_bytes(plan: CompilePlan, model: str) -> int:
    """Return the bytes of a model's weights, if all have their compact form.

    Raises CheckpointError.
    """
    parts, checkpoint = _stage_parts(plan, model), Checkpoint(plan.model, plan.adapters)
    return model_bytes(parts, plan.dtype, plan.predictor_dtype, model, checkpoint.quantised)


def model_bytes(
    parts: Mapping[str, Part],
    dtype: str,
    predictor_dtype: str,
    model: str,
    quantised: Mapping[str, QuantisedForm] = NOT_QUANTISED,
) -> int:
    """Return the bytes of a model's weights in a tree. parts: all of its stage."""
    chosen = {name: parts[name] for name in MODEL_PARTS[model]}
    forms = _forms_of(chosen, dtype, predictor_dtype, quantised)
    return layout_bytes(_file_layout(chosen, forms))


def _stage_parts(plan: CompilePlan, model: str) -> dict[str, Part]:
    return lay_out(read_config(plan.model), (MODEL_STAGES[model],))[1]


def _file_layout(
    parts: Iterable[str], forms: Forms, prefix: str = "", plain: bool = False
) -> Layout:
    """Return shapes and dtypes of some parts' tensors by name, as in their file.

    plain: without compact forms.
    """
    return {
        (prefix or f"{name}.") + kept: expected
        for name in parts
        for target, form in forms[name].items()
        for kept, expected in (form.plain if plain else form).layout(target).items()
    }
