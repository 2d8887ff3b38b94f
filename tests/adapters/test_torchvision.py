"""torchvision's own ways: attention that is ``nn.MultiheadAttention``, one packed projection."""

import pytest

import torchsbp

from ..models import MODELS

VIT = MODELS["torchvision vit"]


def test_the_class_token_is_kept():
    model = torchsbp.apply(VIT.model(), keep_ratio=0.5)
    model(VIT.images())
    kept = torchsbp.kept(model)
    assert list(kept) == ["encoder.layers.encoder_layer_1", "encoder.layers.encoder_layer_2"]
    assert all(positions.shape == (2, 9) and (positions[:, 0] == 0).all() for positions in kept.values())


def test_dropout_is_refused_by_name():
    with pytest.raises(ValueError, match=r"self_attention.dropout is 0.1, which is not supported"):
        torchsbp.apply(VIT.model(attention_dropout=0.1))
