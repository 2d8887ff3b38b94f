"""Frozen parameters stay as they are, bit for bit, with and without SBP; so do the statistics of frozen norms."""

import pytest
import timm
import torch
from torch import nn

from torchsbp.cli.recipe import parse
from torchsbp.errors import UsageError
from torchsbp.train.distributed import Processes
from torchsbp.train.freeze import freeze
from torchsbp.train.loop import Trainer

from .runs import final, recipe, run, same, stopped_at

FROZEN = ("--freeze", '["patch_embed", "blocks.0", "*.bias"]')


def names(model: nn.Module) -> set[str]:
    return {name for name, its in model.named_parameters() if not its.requires_grad}


def test_patterns_name_parameters_and_modules():
    model = timm.create_model("test_vit")
    everything = {name for name, _ in model.named_parameters()}
    freeze(model, ["patch_embed", "blocks.[01]", "*.norm2.*"])
    expected = {n for n in everything if n.startswith(("patch_embed.", "blocks.0.", "blocks.1.")) or ".norm2." in n}
    assert names(model) == expected
    assert freeze(model, []) == []


@pytest.mark.parametrize(
    "pattern, message",
    [
        (
            "block.0",
            "freeze: 'block.0' names no parameter of the model and no module that has one; its mod",
        ),
        ("*", "leaves nothing to train"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern, message):
    model = timm.create_model("test_vit")
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        freeze(model, [pattern])
    assert names(model) == set()


@pytest.mark.parametrize("preset", ["none", "fast"])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_what_is_frozen_stays_and_the_rest_is_trained(tmp_path, preset, decay):
    path = recipe(tmp_path, sbp={"preset": preset}, optimizer={"layer_decay": decay, "lr": 0.1})
    trainer = Trainer(parse("train", [str(path), *FROZEN]), Processes(torch.device("cpu")))
    before = {name: its.detach().clone() for name, its in trainer.model.named_parameters()}
    frozen = names(trainer.model)
    assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.2.norm1.bias"} <= frozen
    batches = trainer.batches()
    trainer.learner.train()
    for _ in range(3):
        trainer.update(batches)
    changed = {name for name, its in trainer.model.named_parameters() if not torch.equal(its, before[name])}
    assert changed == set(before) - frozen
    grouped = [its for group in trainer.learner.optimizer.param_groups for its in group["params"]]
    assert all(its.requires_grad for its in grouped)


def test_a_run_with_frozen_parameters_resumes_bit_for_bit(tmp_path):
    _, whole = run(tmp_path / "whole", *FROZEN)
    with stopped_at(11):
        run(tmp_path / "killed", *FROZEN)
    code, out = run(tmp_path / "killed", *FROZEN, "--resume=auto")
    assert code == 0
    assert same(final(whole), final(out))


def test_statistics_of_frozen_norms_stay(tmp_path):
    path = recipe(
        tmp_path, task={"model": {"name": "test_resnet", "options": {}, "drop_path": 0.0}}, sbp={"preset": "none"}
    )
    text = path.read_text().replace('"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2', "")
    path.write_text(text)
    options = ["--freeze", '["bn1", "layer1"]', "--task.data.size=32", "--batch=20", "--micro_batch=10", "--epochs=3"]
    trainer = Trainer(parse("train", [str(path), *options]), Processes(torch.device("cpu")))
    before = {name: its.clone() for name, its in trainer.model.named_buffers()}
    batches = trainer.batches()
    trainer.learner.train()
    trainer.update(batches)
    trainer.test(trainer.model)
    trainer.learner.train()  # as after an evaluation
    trainer.update(batches)
    still = {name for name, its in trainer.model.named_buffers() if torch.equal(its, before[name])}
    assert still == {name for name in before if name.startswith(("bn1.", "layer1."))}
    assert not trainer.model.bn1.training
    assert trainer.model.layer2.training


def test_a_norm_without_parameters_is_frozen_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    assert freeze(model, ["0"]) == []
    assert freeze(model, ["1"]) == [model[1][1]]
