"""Drawing as one launch: packing is the same anywhere; graphs are tested on a GPU, in tests/test_cuda.py."""

import copy
import pickle
from typing import NamedTuple

import torch
from torch import Tensor

from torchsbp.sampling.captures import ALIGNED, Captures, pack


class Tree(NamedTuple):
    grid: tuple[int, ...]
    rows: Tensor
    inverse: Tensor
    constant: Tensor
    nothing: Tensor | None = None


def test_a_copy_is_the_tree_with_tensors_of_its_own():
    constant, inverse = torch.arange(4), torch.tensor([3, -1, 0], dtype=torch.int32)
    tree = [Tree((2, 2), torch.arange(6).view(2, 3), inverse, constant), Tree((1,), torch.arange(5), inverse, constant)]
    packed = pack(tree, [constant], torch.device("cpu"))
    found = packed.copy()
    packed.content.zero_()
    for its, expected in zip(found, tree, strict=True):
        assert its.grid == expected.grid
        assert its.nothing is None
        assert its.constant is constant
        for a, b in ((its.rows, expected.rows), (its.inverse, expected.inverse)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
            assert (a.data_ptr() - found[0].rows.data_ptr()) % ALIGNED == 0
    assert found[0].inverse.data_ptr() == found[1].inverse.data_ptr()  # packed once
    assert packed.content.numel() == 48 + 16 + 48


def test_on_a_cpu_everything_is_drawn_as_it_stands():
    captures, step = Captures(), torch.zeros((), dtype=torch.int64)
    drawn = [captures.drawn(lambda sizes: step * sizes, torch.tensor(2), step.add_(1), "the same") for _ in range(3)]
    assert [int(found) for found in drawn] == [2, 4, 6]
    assert not captures.graphs


def test_a_copy_has_its_own():
    captures = Captures()
    captures.graphs["captured"] = None
    assert not copy.deepcopy(captures).graphs
    assert not pickle.loads(pickle.dumps(captures)).graphs
