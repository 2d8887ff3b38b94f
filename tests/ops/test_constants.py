"""Tensors that follow from shapes alone: made once, and held by who must hold them."""

import torch

from torchsbp.ops import constants
from torchsbp.ops.constants import constant, holding, known

CPU = torch.device("cpu")


def counted():
    made = []

    @constant
    def make(n, device):
        made.append(n)
        return torch.full((2,), n, device=device)

    return make, made


def test_a_constant_is_made_once():
    make, made = counted()
    assert make(3, CPU) is make(3, CPU)
    assert make(4, CPU).tolist() == [4, 4]
    assert made == [3, 4]


def test_the_oldest_are_let_go(monkeypatch):
    monkeypatch.setattr(constants, "KEPT", 2)
    make, made = counted()
    for n in (1, 2, 3, 1):
        assert make(n, CPU).tolist() == [n, n]
    assert made == [1, 2, 3, 1]


def test_a_compiler_makes_its_own():
    make, _ = counted()
    known = make(3, CPU)
    found = torch.compile(lambda: make(3, CPU) + 0, backend="eager")()
    assert found is not known
    assert found.tolist() == [3, 3]


def test_a_compiler_holds_what_it_knows():
    """It is made in the first reading, and no operator of the step."""
    made, graphs = [], []

    @known
    def make(n, device):
        made.append(n)
        return torch.full((2,), n, device=device)

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(lambda x: x + make(3, CPU), backend=backend, fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert made == [3]
    assert graphs == [["<built-in function add>"]]
    assert make(3, CPU) is make(3, CPU)


def test_what_is_handed_out_is_held():
    make, _ = counted()
    first = make(1, CPU)
    with holding() as outer:
        make(1, CPU)
        with holding() as inner:
            second = make(2, CPU)
        make(1, CPU)
    make(3, CPU)
    assert all(found is first for found in outer)
    assert len(outer) == 2
    assert inner == [second]
