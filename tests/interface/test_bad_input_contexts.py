"""Odd states, contexts and limits: refused with a sentence, or right.

Rows 43 to 69 of the table that begins in test_bad_input.py. After each of them a good call on the
same device is still right (the fixture `still_works`).
"""

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import fused_op
from tests.bad_input import FOUR, names, ours, theirs, with_gradients
from tests.calls import assert_same
from tests.case import Case, make_case
from tests.contexts.test_cuda_graphs import capture
from tests.ops import BF16, DEVICES, F16, F32, F64, Pair, subsets

pytestmark = pytest.mark.usefixtures("still_works")
needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")


@pytest.fixture(params=FOUR, ids=str)
def op(request):
    return request.param


def test_43_freed_storage(op, device):
    x = torch.randn(4, 8, device=device)
    x.untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(RuntimeError, match=r"memory of input, of shape \[4, 8\], is not allocated"):
        ours(op, device)(x)


def test_44_fake_tensors(op, device):
    with FakeTensorMode() as mode:
        x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
        got = with_gradients(ours(op, device))(x, weight)
    assert all(t.fake_mode is mode and t.device == x.device for t in got)
    assert [t.shape for t in got[-2:]] == [x.shape, weight.shape]


def test_45_fake_beside_real(op, device):
    with FakeTensorMode():
        x = torch.randn(4, 8, device=device)
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors first"):
        op.fused(*([x, x] if op.adds else [x]), torch.randn(8, device=device))


def test_46_function_transforms(op, device):
    x = names(device)["Y"].double()

    def fused(x):
        return ours(op, device)(x, eps=1e-5)[0]

    def true(x):
        return theirs(op)(x, eps=1e-5)[0]

    assert_same(torch.func.vmap(fused)(x), true(x))
    assert_same(torch.func.functionalize(fused)(x), true(x))
    assert_same(*(torch.func.grad(lambda x, f=f: f(x).sin().sum())(x) for f in (fused, true)))
    assert_same(*(torch.func.jvp(f, (x,), (x.cos(),)) for f in (fused, true)))


class Marked(torch.Tensor):
    pass


def test_47_subclass_with_torch_function(op, device):
    x = torch.randn(4, 8, device=device)
    got = ours(op, device)(x.as_subclass(Marked))
    assert all(type(t) is Marked for t in got)
    assert_same(tuple(t.as_subclass(torch.Tensor) for t in got), ours(op, device)(x))


def test_48_wrapper_subclass(op, device):
    """Its own memory is none. Sharded tensors (DTensor) are in test_distributed.py."""
    x = torch.randn(4, 8, device=device)
    got = ours(op, device)(TwoTensor(x, 2 * x))
    assert_same(tuple(t.a for t in got), ours(op, device)(x))
    assert_same(got[0].b, ours(op, device)(2 * x)[0])


def test_49_parameter_without_a_shape_yet(op, device):
    weight = torch.nn.UninitializedParameter(device=device)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        ours(op, device)(torch.randn(4, 8, device=device), weight)


def test_50_change_in_place_between_forward_and_backward(op, device):
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 8), (8,)))
    rows = x * 1
    result = ours(op, device)(rows, weight)
    with torch.no_grad():
        (result[1] if op.adds else rows).add_(1)  # what backward reads
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result[0].sum().backward()


def test_51_inference_tensor_in_a_graph(op, device):
    with torch.inference_mode():
        weight = torch.randn(8, device=device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(op, device)(x, weight)


def test_52_backward_twice(op, device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    output = ours(op, device)(x)[0]
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_53_double_backward(op, device):
    """test_autograd.py has the third derivative and every subset too."""
    case = make_case(op, (3, 5), Pair(F64, F64), device)
    x, *others = case.leaves(("input",)).values()

    def function(x):
        return op.fused(x, *others)

    assert torch.autograd.gradgradcheck(function, x)


def test_54_expanded_gradient(op, device):
    case = make_case(op, (4, 33), Pair(F32, F32), device)
    one = torch.ones((), device=device).expand(4, 33)
    case = Case(op, case.inputs, (one,) * len(case.grads))
    case.check(case.run())


def test_55_gradient_of_another_dtype(op, device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    dy = torch.randn(4, 8, device=device, dtype=F64)
    got, expected = (
        torch.autograd.grad(ours(op, device)(x)[0], x, grad) for grad in (dy, dy.float())
    )
    assert got[0].dtype is F32
    assert_same(got, expected, rtol=0, atol=0)


def test_56_gradient_that_does_not_fit(op, device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    output = ours(op, device)(x)[0]
    sparse = output.detach().to_sparse()
    with pytest.raises(RuntimeError, match=r"grad_output must be a dense .+, got layout Sparse"):
        torch.autograd.grad(output, x, sparse, retain_graph=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(output, x, output.detach()[:3])


@pytest.mark.parametrize("op", [op for op in FOUR if op.adds], ids=str)
def test_57_undefined_gradient(op, device):
    """Nothing arrives through one of two outputs."""
    x, residual = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    output, sum = op.fused(x, residual)
    got = torch.autograd.grad(sum, (x, residual), torch.ones_like(sum), retain_graph=True)
    assert_same(got, (torch.ones_like(x),) * 2, rtol=0, atol=0)
    alone = torch.autograd.grad(output, (x, residual), torch.ones_like(x), retain_graph=True)
    both = torch.autograd.grad((output, sum), (x, residual), (torch.ones_like(x),) * 2)
    assert_same(both, tuple(g + 1 for g in alone))


def test_58_gradients_of_some_inputs(op, device):
    case = make_case(op, (5, 33), Pair(F32, F32), device)
    for wanted in subsets(case.present):
        case.check(case.run(wanted))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_59_read_only_and_copy_on_write(op):
    case = make_case(op, (4, 8), Pair(F32, F32), "cpu")
    array = case.inputs["input"].numpy()
    array.flags.writeable = False
    case.check(case.with_inputs(input=torch.from_numpy(array)).run())
    lazy = torch._lazy_clone(case.inputs["input"])
    case.check(case.with_inputs(input=lazy).run(("weight",)))
    assert torch._C._is_cow_tensor(lazy)


def test_60_weight_in_the_memory_of_the_input(op, device):
    x = names(device)["X"]
    got = with_gradients(ours(op, device))(x, x[1])
    assert_same(got, with_gradients(ours(op, device))(x.clone(), x[1].clone()), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [65_537, 131_073])
def test_61_more_rows_than_a_grid_has_blocks(op, device, rows):
    """tests/numerics/test_scale.py has more than 2^31 and 2^32 elements, and 2^28 rows."""
    case = make_case(op, (rows, 3), Pair(BF16, F32), device)
    case.check(case.run())


def test_62_autocast(op, device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with torch.autocast(device, BF16):
        got = ours(op, device)(x, weight)
        short = ours(op, device)(x.to(BF16), weight)
    assert_same(got, ours(op, device)(x, weight), rtol=0, atol=0)
    assert all(t.dtype is BF16 for t in short)


def test_63_deterministic_mode(op, device):
    case = make_case(op, (65, 300), Pair(F32, F32), device)
    expected = case.run()
    torch.use_deterministic_algorithms(True)
    try:
        got = case.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_64_arguments_that_are_too_many_or_unknown(op, device):
    x = torch.randn(4, 8, device=device)
    rows = [x, x] if op.adds else [x]
    with pytest.raises(TypeError, match=f"{op.name}.. got an unexpected keyword argument 'gamma'"):
        op.fused(*rows, gamma=1)
    with pytest.raises(TypeError, match=rf"{op.name}.. takes from 1|2 to \d positional arguments"):
        op.fused(*rows, None, None, 1e-5, None, None)


def in_child(op, rows, queue):
    try:
        result = op.fused(*rows)
        queue.put((result[0] if op.adds else result)[-1, -1].item())
    except RuntimeError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_65_forked_child(op, device):
    """Large enough for threads, which the child has not. CUDA does not survive a fork."""
    rows = [torch.randn(1024, 4096).to(device) for _ in range(1 + op.adds)]
    expected = (op.fused(*rows)[0] if op.adds else op.fused(*rows))[-1, -1].item()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(op, rows, queue))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked child hangs")
    assert child.exitcode == 0
    got = queue.get()
    assert got == expected if device == "cpu" else "initializ" in got


@pytest.mark.parametrize(
    "name", ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm"]
)
def test_66_pickle_and_deepcopy_of_modules(name, device):
    """test_processes.py has those of the functions, test_contexts.py spawned processes."""
    module = getattr(fused_op, name)(8, device=device)
    rows = [torch.randn(4, 8, device=device)] * (2 if "Add" in name else 1)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(other(*rows), module(*rows), rtol=0, atol=0)


@pytest.mark.parametrize("cols", [65_537, 300_001])
@pytest.mark.parametrize("pair", [Pair(F32, F32), Pair(F16, F32)], ids=str)
def test_67_rows_longer_than_on_chip_memory(op, device, pair, cols):
    case = make_case(op, (3, cols), pair, device)
    case.check(case.run())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_beside_meta(op, backend, device):
    """Catches memory that nothing wrote: the dispatcher takes it for a call of meta."""
    x = torch.randn(2, 8, device=device)
    rows, weight = [x] * (2 if op.adds else 1), torch.ones(8, device="meta")
    with pytest.raises(RuntimeError, match="weight: Tensor on device meta is not on the expected"):
        torch.compile(op.fused, backend=backend)(*rows, weight)
    on_meta = torch.compile(op.fused, backend="eager")(*(t.to("meta") for t in rows), weight)
    assert all(t.is_meta for t in (on_meta if op.adds else (on_meta,)))


def test_68_out_of_memory(op, device):
    """The input takes no memory. The output would take 2 PiB, more than a process can address: a
    system may promise less than that, and end the process later. test_scale.py has backward."""
    x = torch.zeros(8, device=device).expand(2**46, 8)
    kind = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    with pytest.raises(kind, match=r"out of memory|can't allocate memory"):
        op.fused(*([x, x] if op.adds else [x]))


@needs_gpu
def test_69_capture_of_what_needs_copies(op):
    """Catches a wait for the GPU on the ways that copy: capture would end with an error."""
    case = make_case(op, (64, 256), Pair(F32, F32), "cuda")
    rows = {name: t for name, t in case.inputs.items() if name not in op.parameters}
    case = case.with_inputs(**{name: t.t().contiguous().t() for name, t in rows.items()})
    leaves = case.leaves(case.present)
    expected = case.run()

    def work():
        outputs = op.fused(*leaves.values(), **case.options)
        outputs = outputs if op.adds else (outputs,)
        return (*outputs, *torch.autograd.grad(outputs, [*leaves.values()], case.grads))

    graph, result = capture(work)
    graph.replay()
    assert_same(tuple(t.detach() for t in result), tuple(expected.values()), rtol=0, atol=0)
