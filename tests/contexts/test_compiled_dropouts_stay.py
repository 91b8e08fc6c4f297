"""``compile_pass``: dropout that stays where it is, because it does not fit into the norm."""

import pytest
import torch
import torch.nn.functional as F

import fused_op
from fused_op import fused_layer_norm
from tests.case import SEED
from tests.contexts.test_compile_pass import is_clean
from tests.contexts.test_compiled_dropouts import P, inputs, layer_norm, rewritten

__all__ = ["is_clean"]  # the fixture


def mask_used_elsewhere(branch, residual, weight, bias):
    dropped = F.dropout(branch, P)
    return fused_layer_norm(residual + dropped, weight, bias), dropped


def broadcast(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch[:1], P), weight, bias)


def wide_branch(branch, residual, weight, bias):
    return fused_layer_norm(residual.half() + F.dropout(branch, P), weight, bias)


def columns_first(branch, residual, weight, bias):
    hidden = residual.transpose(0, 1) + F.dropout(branch.transpose(0, 1), P)
    return fused_layer_norm(hidden, weight, bias)


def branch_of_columns(branch, residual, weight, bias):
    columns = (branch * 1).transpose(1, 2).contiguous().transpose(1, 2)
    return fused_layer_norm(residual + F.dropout(columns, P), weight, bias)


def later_weight(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    return fused_layer_norm(hidden, hidden[0, 0].detach() * 2, bias)


def residual_of_its_own(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    return fused_op.fused_add_layer_norm(hidden, branch, weight, bias)[0]


def dropout_of_its_own(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch, P), weight, bias, dropout_p=0.5)


def branch_that_changes(branch, residual, weight, bias):
    rows = branch * 1
    hidden = residual + F.dropout(rows, P)
    rows.mul_(2)
    return fused_layer_norm(hidden, weight, bias), rows


def sum_that_changes(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    output = fused_layer_norm(hidden, weight, bias)
    return output, hidden.mul_(2)


def another_mode(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    with torch.no_grad():
        output = fused_layer_norm(hidden, weight, bias)
    return output + hidden


def in_place_dropout(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch * 1, P, inplace=True), weight, bias)


def in_place_addition(branch, residual, weight, bias):
    hidden = residual * 1
    hidden += F.dropout(branch, P)
    return fused_layer_norm(hidden, weight, bias)


def scaled(branch, residual, weight, bias):
    hidden = torch.add(residual, F.dropout(branch, P), alpha=2)
    return fused_layer_norm(hidden, weight, bias)


def outside_of_training(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch, P, training=False), weight, bias)


def everything_is_dropped(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch, 1.0), weight, bias)


def norm_that_saves_its_output(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    return fused_layer_norm(hidden, weight, bias, memory_efficient=True)


def broadcast_residual(branch, residual, weight, bias):
    return fused_layer_norm(residual[:1] + F.dropout(branch, P), weight, bias)


def residual_of_one_number(branch, residual, weight, bias):
    return fused_layer_norm(residual[0, 0, 0] + F.dropout(branch, P), weight, bias)


def residual_of_columns(branch, residual, weight, bias):
    columns = (residual * 1).transpose(1, 2).contiguous().transpose(1, 2)
    return fused_layer_norm(F.dropout(branch, P) + columns, weight, bias)


def a_number_as_residual(branch, residual, weight, bias):
    return fused_layer_norm(2.0 + F.dropout(branch, P), weight, bias)


def later_bias(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    return fused_layer_norm(hidden, weight, hidden[0, 0].detach() * 2)


def weight_that_changes(branch, residual, weight, bias):
    weight = weight.detach() * 1
    hidden = residual + F.dropout(branch, P)
    weight.add_(1)
    return fused_layer_norm(hidden, weight, bias)


def sum_that_changes_by_an_argument(branch, residual, weight, bias):
    hidden = residual + F.dropout(branch, P)
    F.relu(hidden.data, inplace=True)
    return fused_layer_norm(hidden, weight, bias)


def dropout_in_another_mode(branch, residual, weight, bias):
    with torch.no_grad():
        dropped = F.dropout(branch, P)
    return fused_layer_norm(residual + dropped, weight, bias)


def dropped_twice(branch, residual, weight, bias):
    dropped = F.dropout(branch, P)
    return fused_layer_norm(dropped + dropped, weight, bias)


def never_dropped(branch, residual, weight, bias):
    return fused_layer_norm(residual + F.dropout(branch, 0.0), weight, bias)


def output_that_changes_through_a_view(branch, residual, weight, bias):
    """The norm before is fused, and its output is then known by the view of it alone."""
    output = fused_layer_norm(residual + F.dropout(branch, 1e-9), weight, bias)
    rows = output.view(-1)
    dropped = F.dropout(output, P)
    rows.mul_(2)
    return fused_layer_norm(residual + dropped, weight, bias)


PLACE = "something may change in place what the norm would read"
MODE = "dropout and norm are not in the same mode"
ORDER = "operands or sum do not lie in memory row by row"
STAYS = {
    mask_used_elsewhere: "what it drops is used elsewhere, too",
    broadcast: "the addition broadcasts",
    wide_branch: "the addition converts",
    columns_first: ORDER,
    branch_of_columns: ORDER,
    later_weight: "the parameters of the norm are computed after the addition",
    dropout_of_its_own: "dropout follows the norm, too",
    branch_that_changes: PLACE,
    sum_that_changes: PLACE,
    another_mode: MODE,
    broadcast_residual: "the addition broadcasts",
    residual_of_one_number: "the addition broadcasts",
    residual_of_columns: ORDER,
    later_bias: "the parameters of the norm are computed after the addition",
    weight_that_changes: PLACE,
    sum_that_changes_by_an_argument: PLACE,
    dropout_in_another_mode: MODE,
    a_number_as_residual: "",
    dropped_twice: "",
    never_dropped: "",
    residual_of_its_own: "",
    in_place_dropout: "",
    in_place_addition: "",
    scaled: "",
    outside_of_training: "",
    everything_is_dropped: "",
    norm_that_saves_its_output: "",
}


@pytest.mark.parametrize("function", STAYS)
def test_what_stays(function) -> None:
    """Catches a rewrite that would change values or gradients.

    Each reason is reported, unless what stays is not known as dropout, addition and norm of ours.
    """
    leaves = inputs(torch.float32)
    torch.manual_seed(SEED)
    expected = function(*leaves)
    torch.manual_seed(SEED)
    found, report = rewritten(function, *leaves)
    assert report == (0, {f"dropout: {STAYS[function]}": 1} if STAYS[function] else {})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_stays_without_a_gradient() -> None:
    """Catches a norm with a residual of its own, where no autograd.Function hides its op."""
    with torch.no_grad():
        _, report = rewritten(residual_of_its_own, *inputs(torch.float32))
    assert report == (0, {})


def test_output_that_changes_through_a_view() -> None:
    """Catches the second norm that reads what the change made of the first one's output."""
    _, report = rewritten(output_that_changes_through_a_view, *inputs(torch.float32))
    assert report == (1, {f"dropout: {PLACE}": 1})


def test_a_number_of_columns_that_varies() -> None:
    """Catches a shape of the trace in the graph of all shapes."""
    branch, residual, *_ = inputs(torch.float32)
    for tensor in (branch, residual):
        torch._dynamo.mark_dynamic(tensor, 2)
    norm = lambda x: fused_layer_norm(x, normalized_shape=x.shape[-1:])  # noqa: E731
    _, report = rewritten(lambda b, r: norm(r + F.dropout(b, P)), branch, residual)
    assert report == (0, {"dropout: the normalised dimensions are not constant": 1})


def test_a_call_that_the_fused_op_does_not_take() -> None:
    """Catches an error of the pass that keeps a model from compiling."""

    def function(branch, residual):
        return fused_layer_norm(residual + F.dropout(branch, P), out_dtype=torch.float16)

    branch, residual, *_ = inputs(torch.bfloat16, wide=torch.float32)
    found, (count, left) = rewritten(function, branch, residual)
    assert found.dtype is torch.float16 and count == 0
    (reason,) = left
    assert reason.startswith("dropout: the fused op does not take it")


def test_random_numbers_of_eager_mode_stay() -> None:
    """Catches a mask of this package where eager mode's was asked for."""
    leaves = inputs(torch.float32)
    with torch._inductor.config.patch(fallback_random=True):
        _, report = rewritten(layer_norm, *leaves)
    reason = "dropout: fallback_random asks for the random numbers of eager mode"
    assert report == (0, {reason: 1})
