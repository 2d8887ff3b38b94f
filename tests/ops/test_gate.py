import pytest
import torch

from torchsbp.ops import reference
from torchsbp.ops.gate import gate

from .helpers import RATIOS, kept_rows


@pytest.mark.parametrize("ratio", RATIOS)
def test_equals_reference_and_saves_only_indices(ratio):
    torch.manual_seed(0)
    y = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    rows, dy = kept_rows(2, 20, ratio), torch.randn_like(y)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        ours = gate(y, rows)
    theirs = reference.gate(y, rows)
    assert torch.equal(ours, theirs)
    assert set(saved) <= {torch.int64}
    assert torch.equal(*(torch.autograd.grad(z, y, dy)[0] for z in (ours, theirs)))
