"""Stand-ins for the tracer, neuronx-cc and the runtime's model, for one rank.

A traced module is kept under a number, which is its HLO and its NEFF; a core runs it as a module on
the CPU, over the weights and the state that NxD's own code assigns by name. So NxD's own checks,
routing, saving and loading run, and nothing is compiled: a saved model can only be loaded in the
process that traced it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qwen3_omni_neuron.checkpoint.modules import fill

USER_INPUT, INPUT_WEIGHT, INPUT_STATE, OUTPUT = range(4)
Named = dict[str, Tensor]


@dataclass
class MetaTensor:
    """An input or output. data_type: a torch dtype, where the real class has a number."""

    type: int
    checkpoint_key: bytes
    shape: list[int]
    data_type: torch.dtype
    user_input_key: bytes = b""


@dataclass
class Program:
    """A traced module with its inputs and outputs, in place of the HLO module and its metaneff.

    flags: those given to the compiler.
    """

    number: int
    module: nn.Module
    input_tensors: list[MetaTensor]
    output_tensors: list[MetaTensor]
    output_aliases_to: dict[int, int]
    flags: str = ""
    entry_computation_id: int = 0
    computations: list[Any] = field(
        default_factory=lambda: [SimpleNamespace(id=0, instructions=[])]
    )

    def SerializeToString(self) -> bytes:  # noqa: N802, a method of protocol buffers
        return str(self.number).encode()

    def names(self, kind: int) -> list[str]:
        found = [tensor for tensor in self.input_tensors if tensor.type == kind]
        return [(t.user_input_key or t.checkpoint_key).decode() for t in found]


PROGRAMS: list[Program] = []


class Flattener:
    """Inputs in the program's order, without unused ones; here all are used."""

    def __init__(self, layout: Sequence[int], exclude: Sequence[int] | None):
        self.layout, self.exclude = layout, exclude

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        assert len(inputs) == len(self.layout)
        return list(inputs)


class Packer:
    """The program's outputs in the form of the module's forward: a tuple."""

    def __init__(self, layout: Sequence[int], identifiers: Sequence[int], constants: Named):
        self.layout, self.identifiers, self.constants = layout, identifiers, constants

    def __call__(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs[index] for index in self.layout)


def generate_hlo(module: nn.Module, inputs: Mapping[str, Tensor], **options: bool) -> Any:
    """Trace: call the module once, and find the buffers that it replaced."""
    assert options["enable_aliasing"]
    assert options["treat_inputs_as_kwargs"]
    before = dict(module.named_buffers())
    outputs = module(**inputs)
    after = dict(module.named_buffers())
    states = {name for name, tensor in before.items() if after[name] is not tensor}
    for name in states:
        changed, kept = after[name], before[name]
        assert (changed.shape, changed.dtype) == (kept.shape, kept.dtype), name
    fill(module, before.items())
    weights = {**dict(module.named_parameters()), **before}
    kinds = {name: INPUT_STATE if name in states else INPUT_WEIGHT for name in weights}
    named_inputs = [meta(USER_INPUT, "", tensor) for tensor in inputs.values()]
    named_weights = [meta(kinds[name], name, tensor) for name, tensor in weights.items()]
    held = [index for index, tensor in enumerate(named_weights) if tensor.type == INPUT_STATE]
    program = Program(
        len(PROGRAMS),
        module,
        named_inputs + named_weights,
        [meta(OUTPUT, "", tensor) for tensor in outputs] + [named_weights[i] for i in held],
        {len(outputs) + place: len(inputs) + index for place, index in enumerate(held)},
    )
    PROGRAMS.append(program)
    layout = tuple(range(len(outputs)))
    return SimpleNamespace(
        hlo_module=program,
        metaneff=program,
        flattener=Flattener(tuple(range(len(inputs))), None),
        packer=Packer(layout, layout, {}),
        weight_name_to_idx={name: len(inputs) + i for i, name in enumerate(weights)},
    )


def meta(kind: int, name: str, tensor: Tensor) -> MetaTensor:
    return MetaTensor(kind, name.encode(), list(tensor.shape), tensor.dtype)


def neuron_xla_compile(module_bytes: bytes, compiler_flags: str, **_options: object) -> bytes:
    PROGRAMS[int(module_bytes)].flags = compiler_flags
    return module_bytes


class SpmdModel:
    """A program on its core, in place of the runtime's model.

    It is a TorchScript class like the runtime's own, so that NxDModel can be saved.
    """

    def __init__(self, neff: str, metaneff: str, local_ranks: int, ranks: int):
        assert neff == metaneff
        assert local_ranks == 1 and ranks == 1, "this device has one core"
        self.number = int(neff)  # the number stands for the NEFF: TorchScript has no bytes
        self.state: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def initialize(
        self, states: list[dict[str, Tensor]], weights: list[dict[str, Tensor]], first: int
    ) -> None:
        """Take a rank's state and weights. All models share the tensors that they are given."""
        self.weights = weights[first]
        self.state = states[first] if len(states) > 0 else self.state
        torch.ops.neuron.eager_check(self.number, self.state, self.weights)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return torch.ops.neuron.eager_run(self.number, inputs, self.state, self.weights)

    def forward_ranked(self, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [self.forward(inputs[0])]

    def forward_async(self, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [self.forward(inputs[0])]


class LayoutTransformation:
    """A class that NxDModel names, and creates only where a graph has priority."""

    def __init__(self) -> None:
        self.unused = 0

    def forward(self, weights: list[dict[str, Tensor]], on_cpu: bool) -> list[dict[str, Tensor]]:
        return weights


def check(number: int, state: Named, weights: Named) -> None:
    """Assert that weights and state have the shapes and types of the trace."""
    for tensor in PROGRAMS[number].input_tensors:
        if tensor.type != USER_INPUT:
            given = state if tensor.type == INPUT_STATE else weights
            found = given[tensor.checkpoint_key.decode()]
            assert (list(found.shape), found.dtype) == (tensor.shape, tensor.data_type)


@torch.no_grad()
def run(number: int, inputs: list[Tensor], state: Named, weights: Named) -> list[Tensor]:
    """Call a program. Its state is updated in place."""
    program = PROGRAMS[number]
    module = program.module
    names, kept = program.names(USER_INPUT), program.names(INPUT_STATE)
    for name, tensor, traced in zip(names, inputs, program.input_tensors, strict=False):
        assert (list(tensor.shape), tensor.dtype) == (traced.shape, traced.data_type), name
    fill(module, ((name, weights[name]) for name in program.names(INPUT_WEIGHT)))
    fill(module, ((name, state[name]) for name in kept))
    outputs = module(**dict(zip(names, inputs, strict=True)))
    left = dict(module.named_buffers())
    for name in kept:
        state[name].copy_(left[name])
    return list(outputs)


LIBRARIES: list[Any] = []  # kept here: an operator is removed with its library


def install() -> None:
    """Register the operators and classes that NxDModel's TorchScript names."""
    named = "Dict(str, Tensor)"
    held = f"{named} state, {named} weights"
    library = torch.library.Library("neuron", "DEF")
    LIBRARIES.append(library)
    for schema, function in (
        (f"eager_check(int number, {held}) -> ()", check),
        (f"eager_run(int number, Tensor[] inputs, {held}) -> Tensor[]", run),
        (f"_parallel_load({named}[] weights) -> {named}[]", lambda weights: weights),
    ):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    classes = SimpleNamespace(
        SPMDModel=torch.jit.script(SpmdModel),
        LayoutTransformation=torch.jit.script(LayoutTransformation),
        SPMDBucketModel=type("SPMDBucketModel", (), {}),
    )
    vars(torch.classes)["neuron"] = classes


@contextmanager
def device_memory() -> Iterator[None]:
    """Create on the CPU the tensors that are requested on a device."""
    with _OnCpu():
        yield


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("privateuseone"):
            given["device"] = "cpu"
        return func(*args, **given)


TYPES = SimpleNamespace(USER_INPUT=USER_INPUT, INPUT_WEIGHT=INPUT_WEIGHT, INPUT_STATE=INPUT_STATE)
METANEFF = SimpleNamespace(MetaTensor=SimpleNamespace(Type=TYPES), MetaNeff=Program)
STRUCTURE = SimpleNamespace(Flattener=Flattener, Packer=Packer)


def torch_dtype(data_type: torch.dtype) -> torch.dtype:
    """Stand in for get_torch_dtype: MetaTensor has a torch dtype."""
    return data_type
