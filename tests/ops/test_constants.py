"""Constants: made once for their arguments, held by who notes them, made anew where nothing may be kept."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchsbp.ops.constants import noted, range_of

CPU = torch.device("cpu")


def test_it_is_made_once():
    assert range_of(7, CPU) is range_of(7, CPU)
    assert range_of(7, CPU).tolist() == [*range(7)]
    assert range_of(8, CPU).shape == (8,)


def test_a_simulation_gets_its_own():
    kept = range_of(7, CPU)
    with FakeTensorMode():
        assert isinstance(range_of(7, CPU), FakeTensor)
    assert range_of(7, CPU) is kept


def test_what_is_used_is_noted():
    range_of(5, CPU)
    with noted() as used:
        found = range_of(6, CPU)
        with noted() as inside:
            range_of(5, CPU)
    range_of(7, CPU)
    assert [its.tolist() for its in used] == [found.tolist()]
    assert [its.tolist() for its in inside] == [[*range(5)]]
