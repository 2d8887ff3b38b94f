"""timm's optimizers and schedules, as a recipe names them."""

from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from ..errors import UsageError
from .config import Config, Schedule
from .ranges import refuse

WARMUP = "warmup_epochs"
"""key of a parameter group that a task makes: epochs of a warm-up of its own"""
MADE_FOR = {"decay_milestones": ("multistep",), "decay_epochs": ("step",), "decay_rate": ("step", "multistep", "poly")}
"""options of a schedule -> the schedules that have them; timm ignores them in the others"""


def make_optimizer(parameters: Any, config: Config, steps_per_epoch: int) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer for a model or for parameter groups, and its schedule over the run's updates."""
    optimizer, schedule = config.optimizer, config.schedule
    check_options(schedule)
    warmup: Any = schedule.warmup_epochs
    if schedule.warmup_steps:
        warmup += schedule.warmup_steps / steps_per_epoch
        if warmup >= config.epochs:
            updates = config.epochs * steps_per_epoch
            refuse("schedule.warmup_steps", schedule.warmup_steps, f"fewer than all updates of the run, {updates}")
    curve = schedule.name in ("cosine", "tanh", "poly")  # these go from the end of the warm-up to the end of the run
    try:
        made = create_optimizer_v2(
            parameters,
            optimizer.name,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            layer_decay=optimizer.layer_decay,
            **optimizer.options,
        )
        over_time, _ = create_scheduler_v2(
            made,
            schedule.name,
            num_epochs=config.epochs - (warmup if curve else 0),
            warmup_epochs=warmup,
            warmup_prefix=curve,
            warmup_lr=schedule.warmup_lr,
            min_lr=schedule.min_lr,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
            **schedule.options,
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UsageError(f"optimizer {optimizer} or schedule {schedule}: {error}") from error
    if any(WARMUP in group for group in made.param_groups):
        return made, GroupsWarmUp(over_time, made, steps_per_epoch)
    return made, over_time


def check_options(schedule: Schedule) -> None:
    """Raise ``UsageError`` for options that timm would ignore, or take for others."""
    for name, value in schedule.options.items():
        known = MADE_FOR.get(name, (schedule.name,))
        if schedule.name not in known:
            refuse(f"schedule.options.{name}", value, f"with schedule.name {' or '.join(known)}, not {schedule.name}")
    milestones = schedule.options.get("decay_milestones", [])
    numbers = isinstance(milestones, list | tuple) and all(type(its) in (int, float) for its in milestones)
    if not numbers or list(milestones) != sorted(milestones):
        refuse("schedule.options.decay_milestones", milestones, "a list of epochs, in ascending order")


class GroupsWarmUp:
    """A schedule, with a further warm-up for groups that have ``WARMUP``: in these epochs their rate rises from 0."""

    def __init__(self, schedule: Any, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self.schedule, self.optimizer, self.steps_per_epoch = schedule, optimizer, steps_per_epoch
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict

    def step_update(self, step: int) -> None:
        self.schedule.step_update(step)
        for group in self.optimizer.param_groups:
            updates = group.get(WARMUP, 0) * self.steps_per_epoch
            if step < updates:
                group["lr"] *= step / updates
