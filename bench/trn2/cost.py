"""The cost of one call of a graph: its least time by published figures, and a range expected."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from qwen3_omni_neuron.neuron.cores import CHIP_CORES
from qwen3_omni_neuron.neuron.graphs.graph import Graph, buffers
from qwen3_omni_neuron.neuron.graphs.weights import Weights

# Published figures, and terms of an expected time. None was measured for this package's graphs.
# NSDK: aws-neuron-sdk, nki/deep-dives; "traced": a decode step of a GLM model over 64 ranks,
# published October 2026.
BYTES_PER_S, FLOPS_PER_S = 2.9e12, 667e12  # of a chip: memory; dense products in bfloat16
SUM_S = 17.5e-6  # the least time of an all-reduce of 8 KB, traced
SUM_BYTES_PER_S = 100e9  # the same trace's fit for larger ones
# Half of a latency-bound kernel, which takes about 40 us, traced (a router's norm, product and top
# 8: 42): an attention or a feed-forward block has two to four products that wait for one another.
PRODUCT_S = 20e-6
# The device idles for 0.437 ms between two calls, each of which the host awaits; or 0.02 ms for the
# start alone. Source: vllm-neuron, its page on asynchronous execution.
AWAITED_CALL_S = 0.44e-3
CALL_START_S = 0.02e-3


class Unpublished(NamedTuple):
    """Terms that nobody has published for a trn2's graphs like ours.

    efficiency: share of the peak that products reach. copy_s: an input or output of a call copied
    between host and device. barrier_s: a call over cores of several chips waits for the last one.
    """

    efficiency: float
    copy_s: float
    barrier_s: float


# By bound of an expected time. Dense prefill reaches 0.33 to 0.41 of the peak, published for trn2.
# Copies: 0.13 ms is a guess of another project's; a user of SDK 2.14.3 measured 0.7 to 3.5 ms a
# round trip, and the middle of 0.13 and 3.5 by ratio is 0.7, too. Barrier: 2.45 ms was measured on
# a trn1 at 8 ranks; likely is the jitter over 64 ranks on vllm-neuron's page (AWAITED_CALL_S),
# since whole tokens at TP 8 were published that leave no time for more.
UNPUBLISHED: Mapping[str, Unpublished] = {
    "low": Unpublished(0.41, 0.13e-3, 0.0),
    "likely": Unpublished(0.37, 0.7e-3, 0.08e-3),
    "high": Unpublished(0.33, 3.5e-3, 2.45e-3),
}
INPUT_S = 0.392e-3 / 489  # host time an input: bench.host, before weights were joined
SBUF_BYTES = 54_500_000  # usable, of a core at LNC 2: NSDK, architecture/trainium2_arch.rst
# Runs of bytes that DMA moves at the full bandwidth, and at a quarter: nki-dma-bandwidth-guide.rst
# calls 2 KiB the minimum and less than 256 bytes severely bound. The quarter is assumed.
FULL_RUN, SHORT_RUN, SHORT_SHARE = 2048, 256, 0.25
SCATTER_INDEX_BYTES = 8  # torch-neuronx's decompositions: an int64 index for each number


def floor_s(flops: float, nbytes: float, lnc: int = 2) -> float:
    """Return the least time for one logical core to compute `flops` and read `nbytes` at once."""
    cores = CHIP_CORES / lnc  # which share a chip's memory and engines evenly
    return max(flops / FLOPS_PER_S, nbytes / BYTES_PER_S) * cores


def host_s(bound: str, inputs: int, copies: int, starts: int = 1) -> float:
    """Return the host's part of the graphs that it starts before it waits; see Cost.expected_s."""
    copies_s = copies * UNPUBLISHED[bound].copy_s
    return max(AWAITED_CALL_S, starts * CALL_START_S + inputs * INPUT_S + copies_s)


def run_share(run: int) -> float:
    """Return the share of the bandwidth at which runs of `run` bytes are moved.

    A power law between SHORT_RUN and FULL_RUN: 0.4 at 512 bytes, 0.63 at 1024.
    """
    run = min(max(run, SHORT_RUN), FULL_RUN)
    return SHORT_SHARE ** (1 - math.log(run / SHORT_RUN, FULL_RUN / SHORT_RUN))


WEIGHTS, STATE = "weights", "state"
RENEWALS = frozenset({"where"})  # reads its state whole, and writes it
GATHERS = frozenset({"index_select", "embedding", "index", "gather"})
SCATTERS = frozenset(
    {"index_put", "index_put_", "index_copy", "index_copy_", "index_add", "index_add_"}
    | {"scatter", "scatter_", "scatter_add", "scatter_add_"}
)
# By the operation: its operands, each with the axis that the product sums over.
PRODUCTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mm": ((0, -1), (1, -2)),
    "bmm": ((0, -1), (1, -2)),
    "addmm": ((1, -1), (2, -2)),
    "baddbmm": ((1, -1), (2, -2)),
    "convolution": (),
}
CONCATENATIONS = frozenset({"cat", "stack"})
# An instruction works on a tile of 128 partitions of at most 512 numbers, a product's also on at
# most 128 of the numbers that it sums over: the NKI performance guide of the SDK.
PARTITIONS, TILE_NUMBERS = 128, 512
# Passes over a tile of what torch computes in one operation: a softmax takes the maximum,
# difference, exponential, sum and quotient; a norm mean, difference, square, mean, root, product,
# weight and bias. Any other operation is one pass.
PASSES: Mapping[str, int] = {"_softmax": 5, "_safe_softmax": 5, "native_layer_norm": 8}
# Contiguous bytes that a DMA descriptor moves between a partition and memory, at least (a smaller
# matrix shares its descriptors) and at most. Assumed: nki-dma-bandwidth-guide.rst calls less than
# the first inefficient.
DESCRIPTOR_BYTES = 512, 65536


@dataclass(frozen=True)
class Scatter:
    """An operation that the compiler writes as single numbers.

    numbers: count of them. dtype: their type. target_bytes: size of what they are written into,
    which may be copied whole.
    """

    numbers: int
    dtype: torch.dtype
    target_bytes: int

    @property
    def moved_bytes(self) -> float:
        """Bytes that take as long at the full bandwidth: the numbers, and the target twice."""
        number = self.dtype.itemsize + SCATTER_INDEX_BYTES
        return self.numbers * number / SHORT_SHARE + 2 * self.target_bytes


@dataclass(frozen=True)
class Gather:
    """A gather of matrices from a stack of them.

    moved_bytes: the matrices read, written and read again. stack_bytes: all of the stack.
    """

    moved_bytes: float
    stack_bytes: int


@dataclass(frozen=True)
class Cost:
    """Cost of one call on one core.

    flops: operations of matrix products, convolutions and attention, including padding and masked
    positions. weight_bytes: weights read, each matrix as often as it is used; of experts and
    embeddings only the gathered rows count. state_bytes: state read, and written. sums: number of
    collectives over the ranks; sum_bytes: size of each rank's inputs to them.

    What a lowering adds, in bytes that take as long at the full bandwidth: gathered_bytes, what is
    gathered is written and read again; transposed_bytes, a matrix whose product sums over its
    contiguous axis is read and written once more; copied_bytes, concatenations of weights or state;
    spilled_bytes, products larger than SBUF. chain: number of products that wait for one another.
    inputs: number of tensors of a call, state and weights (see weights.py) among them. copies:
    number of buffers that are copied from or to the host. scatters, gathers: see their classes.
    refused: operations whose lowering is known to be slow.

    What a compiler writes at least: instructions, one for each tile; descriptors, those by which
    DMA moves weights and state.
    """

    flops: int
    weight_bytes: int
    state_bytes: int
    sums: int = 0
    sum_bytes: int = 0
    gathered_bytes: float = 0
    transposed_bytes: int = 0
    copied_bytes: int = 0
    spilled_bytes: int = 0
    chain: int = 0
    inputs: int = 0
    scatters: tuple[Scatter, ...] = ()
    gathers: tuple[Gather, ...] = ()
    refused: tuple[str, ...] = ()
    copies: int = 0
    instructions: int = 0
    descriptors: int = 0

    @property
    def scattered(self) -> int:
        """Count of the numbers that the compiler writes one by one."""
        return sum(scatter.numbers for scatter in self.scatters)

    @property
    def moved_bytes(self) -> float:
        """All that a lowering adds; see above."""
        scattered = sum(scatter.moved_bytes for scatter in self.scatters)
        moved = self.gathered_bytes + self.transposed_bytes + self.copied_bytes
        return moved + self.spilled_bytes + scattered

    def floor_s(self, lnc: int = 2) -> float:
        """Return the least time of a call by published figures, without collectives."""
        return floor_s(self.flops, self.weight_bytes + self.state_bytes, lnc)

    def expected_s(self, bound: str = "likely", tp: int = 1, lnc: int = 2) -> float:
        """Return the time that a call on `tp` cores is expected to take, as a device may lower it.

        That is the floor with what the lowering moves beside weights and state, the latency of
        products that wait for one another, the collectives, and the host's part of a call. bound:
        of UNPUBLISHED.
        """
        unpublished = UNPUBLISHED[bound]
        nbytes = self.weight_bytes + self.state_bytes + self.moved_bytes
        return (
            floor_s(self.flops / unpublished.efficiency, nbytes, lnc)
            + self.chain * PRODUCT_S
            + self.sums * SUM_S
            + self.sum_bytes / SUM_BYTES_PER_S
            + host_s(bound, self.inputs, self.copies)
            + (unpublished.barrier_s if tp * lnc > CHIP_CORES else 0.0)
        )


class CountingGroup:
    """A neuron.graphs.layers.Group of `size` ranks that counts its collectives."""

    def __init__(self, size: int):
        self._size = size
        self.sums = self.sum_bytes = 0

    def sum(self, x: Tensor) -> Tensor:
        """Count a collective, and return x."""
        self._count(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Count a collective, and return x repeated once per rank along the last axis."""
        self._count(x)
        return torch.cat([x] * self._size, -1)

    def _count(self, x: Tensor) -> None:
        if self._size > 1:
            self.sums += 1
            self.sum_bytes += x.nbytes


def graph_cost(graph: Graph, owner: nn.Module, group: CountingGroup | None = None) -> Cost:
    """Count the cost of a graph over its part.

    owner: the part's module, on the meta device. group: the group that it was parallelized with.
    """
    before = (group.sums, group.sum_bytes) if group else (0, 0)
    example = graph.example(device="meta")
    attention = _Attention()
    kinds = {WEIGHTS: owner.parameters(), STATE: example[len(graph.inputs) :]}
    counter = _Counter(kinds, (*owner.parameters(), *owner.buffers()), attention)
    with torch.no_grad(), FlopCounterMode(display=False) as flops, attention, counter:
        graph.module(owner)(*example)
    held = (*owner.named_parameters(), *owner.named_buffers())
    used = [name for name, tensor in held if id(tensor) in counter.used]
    after = (group.sums, group.sum_bytes) if group else (0, 0)
    sums, sum_bytes = (now - then for now, then in zip(after, before, strict=True))
    return Cost(
        flops.get_total_flops(),
        counter.nbytes[WEIGHTS],
        counter.nbytes[STATE],
        sums,
        sum_bytes,
        counter.gathered_bytes,
        counter.transposed_bytes,
        counter.copied_bytes,
        counter.spilled_bytes,
        counter.chain,
        buffers(graph.inputs)
        + len(graph.state)
        + len(Weights(owner, torch.device("meta")).tensors_of(used)),
        tuple(counter.scatters),
        tuple(counter.gathers),
        tuple(counter.refused),
        graph.copies,
        counter.instructions,
        counter.descriptors,
    )


class _Attention(TorchFunctionMode):
    """Tells whether attention is computed just now, which torch decomposes on the meta device.

    itemsize: None outside; else bytes of a score that leaves the core. torch-neuronx computes
    attention with a mask by plain products, in its inputs' type; without one, over lengths that are
    multiples of 128, a kernel takes it, of which no score leaves the core. That is the looser of
    two published rules: neuron.graphs.parts keeps to the stricter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.itemsize: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key = args[:2]
        kernel = kwargs.get("attn_mask") is None and not (query.shape[-2] | key.shape[-2]) % 128
        self.itemsize = 0 if kernel else query.itemsize
        try:
            return func(*args, **kwargs)
        finally:
            self.itemsize = None


@dataclass(frozen=True)
class _Known:
    """A tensor of weights or state, or a view or a copy of one.

    is_copy: its bytes were counted when it was copied: reading it adds nothing.
    """

    kind: str
    is_copy: bool
    tensor: Tensor


class _Counter(TorchDispatchMode):
    """Counter of what operations read and write; see Cost.

    kinds: the tensors of weights and of state. held: all tensors of the module; used: ids of those
    that are read.
    """

    def __init__(
        self,
        kinds: Mapping[str, Iterable[Tensor]],
        held: Iterable[Tensor],
        attention: _Attention,
    ):
        super().__init__()
        self._attention = attention
        self.nbytes = dict.fromkeys(kinds, 0)
        self.gathered_bytes = 0.0
        self.transposed_bytes = self.copied_bytes = self.spilled_bytes = self.chain = 0
        self.instructions = self.descriptors = 0
        self.scatters: list[Scatter] = []
        self.gathers: list[Gather] = []
        self.refused: list[str] = []
        # Keyed by id; the tensors are kept so that no other tensor gets the same id.
        self._known = {id(t): _Known(kind, False, t) for kind, ts in kinds.items() for t in ts}
        self._held = set(map(id, held))
        self.used: set[int] = set()
        self._depths: dict[int, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.used |= self._held & {id(tensor) for tensor in given}
        self._count_depth(name, given, made)
        if name in PRODUCTS:
            self.instructions += _product_instructions(name, args, made[0])
        elif not func.is_view and name != "_unsafe_view":
            passed = made if name in GATHERS else (*given, *made)
            numbers = max((tensor.numel() for tensor in passed), default=0)
            passes = PASSES.get(name, 1)
            self.instructions += passes * math.ceil(numbers / (PARTITIONS * TILE_NUMBERS))
        self._refuse(name, args)
        known = [self._known[id(tensor)] for tensor in given if id(tensor) in self._known]
        if any(returned.alias_info is not None for returned in func._schema.returns):
            if known:
                self._know(known[0].kind, known[0].is_copy, made)
            if name not in SCATTERS:
                return out
        if name in SCATTERS:
            target = given[0]
            numbers = max(tensor.numel() for tensor in given[1:])
            self.scatters.append(Scatter(numbers, target.dtype, target.nbytes))
        if name in GATHERS:
            self._count_gather(name, args, made[0])
        elif name in RENEWALS and any(k.kind == STATE and not k.is_copy for k in known):
            self._know(STATE, False, made)
            self._read(known)
            self._move(STATE, made[0])
        else:
            self._read(known)
        if name in CONCATENATIONS and known:  # written, and read again
            self._know(known[0].kind, True, made)
            self.copied_bytes += 2 * sum(each.tensor.nbytes for each in known)
        if name == "_to_copy" and known:
            self._know(known[0].kind, True, made)
        if name in PRODUCTS:
            self._count_product(name, args, made[0])
        return out

    def _know(self, kind: str, is_copy: bool, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._known[id(tensor)] = _Known(kind, is_copy, tensor)

    def _read(self, known: Iterable[_Known]) -> None:
        for each in known:
            if not each.is_copy:
                self._move(each.kind, each.tensor)

    def _move(self, kind: str, tensor: Tensor) -> None:
        self.nbytes[kind] += tensor.nbytes
        self.descriptors += _descriptors(tensor)

    def _count_depth(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        depth = max((self._depths[id(t)][0] for t in given if id(t) in self._depths), default=0)
        depth += name in PRODUCTS
        if depth:
            self._depths |= {id(tensor): (depth, tensor) for tensor in made}
            self.chain = max(self.chain, depth)

    def _count_gather(self, name: str, args: Any, out: Tensor) -> None:
        source = args[0]
        known = self._known.get(id(source))
        moved = 3 * out.nbytes / run_share(_run_bytes(name, args))
        if known is not None:
            self._know(known.kind, True, [out])
            if known.kind == WEIGHTS and source.ndim > 2:
                self.gathers.append(Gather(moved, source.nbytes))
            if not known.is_copy:  # it is read once by the count of weights or state
                self._move(known.kind, out)
                moved -= out.nbytes
        self.gathered_bytes += moved

    def _count_product(self, name: str, args: Any, out: Tensor) -> None:
        for index, axis in PRODUCTS[name]:
            factor = args[index]
            known = self._known.get(id(factor))
            if known is None or known.kind != WEIGHTS or 1 in factor.shape[-2:]:
                continue
            if factor.stride(axis) == 1:
                self.transposed_bytes += 2 * factor.nbytes
        itemsize = self._attention.itemsize
        nbytes = out.numel() * (out.itemsize if itemsize is None else itemsize)
        if nbytes > SBUF_BYTES:
            self.spilled_bytes += 2 * nbytes

    def _refuse(self, name: str, args: Any) -> None:
        if name == "as_strided":
            self.refused.append("as_strided: every number is gathered")
        if name == "slice_scatter" and len(args) > 3 and args[3]:
            self.refused.append(f"slice_scatter from {args[3]}: a scatter")
        if name == "convolution" and args[6] and max(args[3]) > 1:
            self.refused.append(f"transposed convolution of stride {max(args[3])}: dilation")


def _product_instructions(name: str, args: Any, out: Tensor) -> int:
    """Count the tiles of a product, those that leave PSUM, and those that transpose its rows."""
    if name == "convolution":
        batch, width, depth = 1, out.shape[1], math.prod(args[1].shape[1:])
        rows = out.numel() // width
    else:
        depth = args[PRODUCTS[name][0][0]].shape[-1]
        batch, rows, width = math.prod(out.shape[:-2]), *out.shape[-2:]
    depths = math.ceil(depth / PARTITIONS)
    tiles = min(
        math.ceil(a / PARTITIONS) * math.ceil(b / TILE_NUMBERS)
        for a, b in ((rows, width), (width, rows))
    )
    transposed = math.ceil(rows / PARTITIONS) * (depths + math.ceil(depth / TILE_NUMBERS))
    return batch * (tiles * (depths + 1) + transposed)


def _descriptors(tensor: Tensor) -> int:
    """Count the descriptors that move a stack of matrices, each over all partitions."""
    least, most = (PARTITIONS * nbytes for nbytes in DESCRIPTOR_BYTES)
    matrix = max(math.prod(tensor.shape[-2:]) * tensor.itemsize, least)
    return PARTITIONS * math.ceil(tensor.nbytes / matrix) * math.ceil(matrix / most)


def _run_bytes(name: str, args: Any) -> int:
    """Return the contiguous bytes behind each index of a gather."""
    source = args[0]
    if name == "gather":
        return source.itemsize
    last = 0 if name == "embedding" else args[1]
    if name == "index":
        last = max(axis for axis, index in enumerate(args[1]) if index is not None)
    run = 1
    for axis in range(source.ndim - 1, last % source.ndim, -1):
        if source.stride(axis) != run:
            break
        run *= source.shape[axis]
    return run * source.itemsize
