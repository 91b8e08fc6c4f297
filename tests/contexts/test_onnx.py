"""ONNX, by both exporters, run by onnxruntime.

Catches an op that an exporter does not know, numbers other than those of the model, and a norm that
is spread over ten nodes where that of PyTorch is one.
"""

import io
import logging
import random

import pytest
import torch
from torch import nn

import fused_op
from fused_op import FusedLayerNorm, FusedRMSNorm
from tests.calls import arguments, assert_same, outputs
from tests.contexts.test_tracing import Call
from tests.ops import OPS

# All of them come with the "dev" extra.
reason = "onnx, onnxscript or onnxruntime is not installed"
onnx = pytest.importorskip("onnx", reason=reason)
onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
pytest.importorskip("onnxscript", reason=reason)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EXPORTERS = ["torchscript", "dynamo"]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """The exporters log what else could be installed."""
    caplog.set_level(logging.CRITICAL)


def exported(exporter, module, inputs, **options):
    """The bytes of the ONNX model."""
    buffer = io.BytesIO()
    is_dynamo = exporter != "torchscript"
    torch.onnx.export(module, inputs, buffer, dynamo=is_dynamo, verbose=False, **options)
    return buffer.getvalue()


def node_types(model):
    return [node.op_type for node in onnx.load_from_string(model).graph.node]


def run(model, *inputs):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
    return tuple(torch.from_numpy(array) for array in session.run(None, feeds))


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_every_op(op, exporter, requires_grad):
    args = arguments(op, requires_grad=requires_grad)
    rows = tuple(t.detach() for t in args if t.dim() > 1)
    model = exported(exporter, Call(op.fused, args).eval(), rows)
    assert_same(run(model, *rows), outputs(op.fused(*args)))


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("seed", range(8))
def test_options_at_random(seed, exporter):
    """Catches an option that an exporter forgets, among dtypes and absent parameters."""
    draw = random.Random(f"{seed} {exporter}")
    op = draw.choice(OPS[:4])
    dtype = draw.choice([torch.float32, torch.float16])
    args = arguments(op, dtype=dtype)
    options = {
        "zero_centered": draw.random() < 0.5,
        "rounding": draw.choice(["once", "before_weight"]),
        "normalized_shape": args[0].shape[-1:],
        "out_dtype": draw.choice([None, torch.float32]),
        "dropout_p": 0.5,
        "training": False,
    }
    if op.adds:
        options["residual_dtype"] = draw.choice([None, torch.float32])
    if draw.random() < 0.4:
        args = [t for t in args if t.dim() > 1]
    rows = tuple(t for t in args if t.dim() > 1)
    model = exported(exporter, Call(op.fused, args, **options).eval(), rows)
    result, expected = run(model, *rows), outputs(op.fused(*args, **options))
    assert [t.dtype for t in result] == [t.dtype for t in expected]
    assert_same(result, expected)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_any_number_of_rows(exporter):
    module, inputs = FusedLayerNorm(16), (torch.randn(3, 16),)
    if exporter == "torchscript":
        options = {"input_names": ["input"], "dynamic_axes": {"input": {0: "rows"}}}
    else:
        options = {"dynamic_shapes": ({0: torch.export.Dim("rows")},)}
    model, x = exported(exporter, module, inputs, **options), torch.randn(7, 16)
    assert_same(run(model, x), module(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("native", "fused", "exporter", "opset"),
    [
        (nn.LayerNorm, FusedLayerNorm, "torchscript", 17),
        (nn.LayerNorm, FusedLayerNorm, "dynamo", 18),
        (nn.RMSNorm, FusedRMSNorm, "dynamo", 18),
        (nn.RMSNorm, FusedRMSNorm, "dynamo", 23),
    ],
)
def test_nodes_are_those_of_pytorch(native, fused, exporter, opset):
    x = (torch.randn(3, 16),)
    wanted = node_types(exported(exporter, native(16), x, opset_version=opset))
    assert node_types(exported(exporter, fused(16), x, opset_version=opset)) == wanted
    if native is nn.LayerNorm or opset == 23:
        assert len(wanted) == 1  # else the list above has to be another


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_converted_model(exporter):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.RMSNorm(16)).eval()
    x = torch.randn(3, 16)
    expected = model(x)
    assert len(fused_op.convert(model).converted) == 2
    assert_same(run(exported(exporter, model, (x,)), x), expected)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_disabled(exporter):
    module, x = FusedLayerNorm(16), torch.randn(3, 16)
    with fused_op.disabled():
        model = exported(exporter, module, (x,))
    assert_same(run(model, x), module(x))
