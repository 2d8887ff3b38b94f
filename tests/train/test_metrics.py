"""Bytes saved for backward."""

import torch

from torchsbp.train.metrics import SavedBytes


def test_saved_bytes_count_a_storage_once_and_no_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    floats = 3 * 4 + 3 * 8  # the input, and tanh's output, which two layers save
    saved = SavedBytes()
    with saved.counting(model):
        y = model(torch.randn(3, 4))
    y.sum().backward()
    assert saved.mib == 4 * floats / 2**20
    assert torch.isfinite(model[0].weight.grad).all()
