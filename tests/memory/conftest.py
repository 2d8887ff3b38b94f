import pytest

from torchsbp.ops import graphs


@pytest.fixture
def no_graphs(monkeypatch):
    """As of large models: nothing is captured, so nothing is held that is more than a small model needs."""
    monkeypatch.setattr(graphs, "LARGEST", 0)
