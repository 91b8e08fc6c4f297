"""What torch.compile makes of a call: a backend that keeps the graphs' operators, and runs them."""

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


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
