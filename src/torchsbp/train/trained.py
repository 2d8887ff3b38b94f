"""A trained model and its task, without what training needs."""

import torch
from torch import nn

from . import tasks
from .config import Config
from .data.seeds import seed_everything
from .distributed import Processes
from .runs.stored import Stored
from .runs.weights import check_fit, head_names
from .task import Task


def trained(stored: Stored, config: Config, processes: Processes) -> tuple[Task, nn.Module]:
    """The task, and its model with the stored weights, in eval mode on the device. ``config`` is that of the run, which
    the user may have changed."""
    seed_everything(config.seed)  # as in training: a task may draw its data
    task = tasks.trained(config.task, config.seed, stored.about)
    layout = task.channels_last if config.channels_last else torch.contiguous_format
    task.to(processes.device, layout)
    model = task.model(start=False)
    check_fit(model.state_dict(), stored.weights, head_names(model), str(stored.path))
    model.load_state_dict(stored.weights)
    model.to(processes.device).to(memory_format=layout).eval()
    if config.compile:
        task.compile(model, config.compile_mode)
    return task, model
