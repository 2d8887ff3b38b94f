"""Renames weights in files of transformers as its models call them now; its own reader knows the older names."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def named_now(model: Any, found: dict[str, Tensor], new_head: bool) -> dict[str, Tensor]:
    """Return the weights in ``found`` by their current names; ``model`` is a video classifier without its last layer.

    With a new head a file may be of another task, such as pre-training: what that alone has is left out, and what it
    lacks between the backbone and the head (a norm, a pooler) begins as it is in ``model``. A weight that does not fit
    comes as a tensor without data (device "meta"), for the caller's check.
    """
    config = copy.deepcopy(model.config)
    if "classifier.weight" in found:
        config.num_labels = len(found["classifier.weight"])
    with quiet():
        read, about = type(model).from_pretrained(
            None, config=config, state_dict=found, output_loading_info=True, ignore_mismatched_sizes=True
        )
    lacking, own = set(about["missing_keys"]), model.state_dict()
    weights = {name: value for name, value in read.state_dict().items() if name not in lacking}
    weights |= {name: torch.empty(shape, device="meta") for name, shape, _ in about["mismatched_keys"]}
    if new_head:
        backbone = f"{model.base_model_prefix}."
        return weights | {name: own[name] for name in lacking & set(own) if not name.startswith(backbone)}
    return weights | {name: torch.empty(0, device="meta") for name in about["unexpected_keys"]}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: the caller reports what does not fit."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
