"""Operations that Neuron's compiler rejects are found in HLO, and no graph has any."""

import pytest

from bench.trn2.cost import Cost, Scatter, graph_cost
from testing.graph_lint import faults
from testing.hlo import DTYPES, lint_hlo, lint_stablehlo

# One line each, as XLA prints them.
REJECTED = {
    "EMOD025 dynamic shape": "%a.1 = f32[<=4,2]{1,0} add(f32[<=4,2]{1,0} %x, f32[<=4,2]{1,0} %y)",
    "EVRF004 complex": "%a.1 = c64[4]{0} complex(f32[4]{0} %x, f32[4]{0} %y)",
    "f64": "%a.1 = f64[4]{0} convert(f32[4]{0} %x)",
    "EVRF010 input and kernel dilation": (
        "%c.1 = f32[1,2,9]{2,1,0} convolution(f32[1,2,4]{2,1,0} %x, f32[2,2,3]{2,1,0} %y), "
        "window={size=3 lhs_dilate=2 rhs_dilate=2}, dim_labels=bf0_oi0->bf0"
    ),
    "EVRF011 stride and input dilation": (
        "%c.1 = f32[1,2,9]{2,1,0} convolution(f32[1,2,4]{2,1,0} %x, f32[2,2,3]{2,1,0} %y), "
        "window={size=3 stride=2 lhs_dilate=2}, dim_labels=bf0_oi0->bf0"
    ),
    "EVRF035 dot of integers": "%d.1 = s32[2,2]{1,0} dot(s32[2,2]{1,0} %n, s32[2,2]{1,0} %n)",
    "EVRF013 sort of integers": "%s.1 = s32[4]{0} sort(s32[4]{0} %n), dimensions={0}",
    "EVRF060 scatter of integers": "%s.1 = s32[4]{0} scatter(s32[4]{0} %n, s32[1]{0} %n)",
    "EVRF019 reduce-window of several operands": (
        "%r.1 = (f32[4]{0}, s32[4]{0}) reduce-window(f32[4]{0} %x, s32[4]{0} %n), window={size=2}"
    ),
    "reduce-window (a running sum)": (
        "%r.1 = f32[4]{0} reduce-window(f32[4]{0} %x, f32[] %y), window={size=4 pad=3_0}"
    ),
    "EVRF017/018 dilated reduce-window": (
        "%r.1 = f32[4]{0} reduce-window(f32[4]{0} %x, f32[] %y), window={size=4 rhs_dilate=2}"
    ),
    "while: loop over data": "%w.1 = f32[4]{0} while(f32[4]{0} %x), condition=%c, body=%b",
    "EVRF004 complex ": "ROOT %a.1 = c128[4]{0} complex(f32[4]{0} %x, f32[4]{0} %y)",
}
ACCEPTED = {
    "transposed convolution": (
        "%c.1 = f32[1,2,9]{2,1,0} convolution(f32[1,2,4]{2,1,0} %x, f32[2,2,3]{2,1,0} %y), "
        "window={size=3 pad=1_1 lhs_dilate=2}, dim_labels=bf0_oi0->bf0"
    ),
    "sort (a top-k of floats)": (
        "%s.1 = (f32[4]{0}, s32[4]{0}) sort(f32[4]{0} %x, s32[4]{0} %n), dimensions={0}"
    ),
    "f64 scalar": "%p.1 = f64[] parameter(1)",
    "s64, computed as s32": "%p.1 = s64[4]{0} parameter(1)",
}
PARAMETERS = "%x = f32[4]{0} parameter(0)\n%y = f32[] parameter(1)\n%n = s32[4]{0} parameter(2)\n"


@pytest.mark.parametrize("what", REJECTED)
def test_what_is_rejected_is_seen(what) -> None:
    found = lint_hlo(f"ENTRY main {{\n{PARAMETERS}{REJECTED[what]}\n}}")
    assert found.rejected == {what.strip(): 1}
    assert found.ops["parameter"] == 3


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_is_replaced_is_noted_alone(what) -> None:
    found = lint_hlo(PARAMETERS + ACCEPTED[what])
    assert found.noted == {what: 1}
    assert not found.rejected


def test_what_no_compiler_of_static_stablehlo_takes_is_seen() -> None:
    for line, rejected in (
        ("%0 = stablehlo.add %arg0, %arg1 : tensor<2x3xf32>", None),
        ('%1:2 = "stablehlo.sort"(%0, %c) <{dimension = 0 : i64}> ({', None),
        ("%2 = stablehlo.convert %arg2 : (tensor<f64>) -> tensor<f32>", None),
        ("stablehlo.return %3 : tensor<i1>", None),
        ("%4 = stablehlo.custom_call @mhlo.erf(%arg0) : (tensor<4xf32>) -> tensor<4xf32>", None),
        ("%0 = mhlo.topk %arg0 : tensor<4xf32>", "mhlo.topk"),
        ("%0 = stablehlo.custom_call @Sharding(%arg0) : tensor<4xf32>", "custom_call@Sharding"),
        ("%0 = stablehlo.abs %arg0 : tensor<?x4xf32>", "tensor<?x4xf32>"),
        ("%0 = stablehlo.abs %arg0 : tensor<4xf64>", "tensor<4xf64>"),
        ("%0 = stablehlo.abs %arg0 : tensor<4xcomplex<f32>>", "tensor<4xcomplex<f32>"),
        ("%0:2 = stablehlo.while(%a = %c, %b = %d) : tensor<i32>, tensor<4xf32>", "while"),
    ):
        found = lint_stablehlo(f"module {{\n  func.func @main() {{\n    {line}\n  }}\n}}")
        assert sum(found.ops.values()) == 1
        assert found.rejected == ({rejected: 1} if rejected else {})


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32"])
def test_scatters_in_stablehlo_are_counted_as_in_torch(dtype) -> None:
    types = f"(tensor<6x5x{dtype}>, tensor<2xi64>, tensor<2x5x{dtype}>) -> tensor<6x5x{dtype}>"
    lines = [
        '%0 = "stablehlo.scatter"(%cst, %arg0, %cst_0) <{unique_indices = false}> ({',
        f"^bb0(%arg1: tensor<{dtype}>, %arg2: tensor<{dtype}>):",
        f"  stablehlo.return %arg2 : tensor<{dtype}>",
        f"}}) : {types}",
    ]
    found = lint_stablehlo("\n".join(lines))
    assert found.scatters == [Scatter(10, DTYPES[dtype], 30 * DTYPES[dtype].itemsize)]
    assert not found.rejected


def test_no_graph_holds_an_operation_that_is_rejected(tmp_path) -> None:
    """In HLO and in StableHLO. testing/hlo_table.py says how to install torch_xla, which lowers.

    Nor has StableHLO more scatters than torch: a converter may make one of another operation.
    """
    pytest.importorskip("torch_xla", reason="torch_xla is not installed: nothing was lowered")
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.neuron.graphs.all import static_models
    from testing.hlo_table import lowered
    from testing.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path)
    models = static_models(read_config(folder))
    graphs = 0
    for graph, *both in lowered(folder):
        for found in both:
            assert not found.rejected, graph.label
            assert sum(found.ops.values()) > 5, graph.label
            assert faults(Cost(0, 0, 0, scatters=tuple(found.scatters))) == [], graph.label
            scatters = graph_cost(graph, getattr(models, graph.part)).scatters
            assert found.ops["scatter"] <= len(scatters), graph.label
        graphs += 1
    assert graphs > 20


def test_products_of_the_code_predictor_stay_in_float32(tmp_path) -> None:
    pytest.importorskip("torch_xla", reason="torch_xla is not installed: nothing was lowered")
    import torch

    from testing.hlo_table import lower
    from testing.outlier import predictor_spec, talker_models
    from testing.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path)
    owner = talker_models(folder, torch.bfloat16).code_predictor
    assert owner is not None
    for graph in predictor_spec(folder, "neuron", "mixed").graphs:
        hlo, _ = lower(graph, owner)
        products = [line for line in hlo.splitlines() if " dot(" in line]
        assert len(products) > 15 and all(" = f32[" in line for line in products), graph.label
        assert "bf16" in hlo
