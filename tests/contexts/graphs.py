"""What torch.compile makes of a call: a backend that keeps the graphs' operators, and runs them."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


def opchecks(pair):
    """Those of torch.library.opcheck for arguments of a pair of dtypes.

    All for one pair. Tracing, most of the time, knows of dtypes what fake tensors say, which are
    compared for each pair.
    """
    every = "test_autograd_registration", "test_aot_dispatch_dynamic"
    mixed = (pair.rows, pair.params) == (torch.bfloat16, torch.float32)
    return ("test_schema", "test_faketensor", *(every if mixed else ()))


class Graphs:
    """A backend that keeps the names of the operators it is given, backward included."""

    def __init__(self):
        self.names = []

    def __call__(self, module, example):
        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)(module, example)

    def keep(self, graph, example):
        self.names += [str(node.target) for node in graph.graph.nodes]
        return make_boxed_func(graph.forward)

    def kernels(self):
        """How many kernel calls were compiled since the last time this was asked."""
        count = sum(name.startswith("fused_op.norm") for name in self.names)
        self.names.clear()
        return count
