"""The callbacks train as a loop by hand does, also when resumed; the examples run."""

import importlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig, schedules
from torchsbp.patching.site import Site
from torchsbp.sampling.recommended import NAMES, VIT

from ..models import LEAN, images
from ..steps import assert_gradients, entry_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = SBPConfig(keep_ratio=schedules.Milestones(((0, 0.25), (3, 0.5))), sampler="random")
EPOCHS, STEPS, ACCUMULATE, BATCH = 2, 4, 2, 2  # an epoch is two optimizer steps of two batches

# Lightning's: about itself, and about what a test does not need.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (".*treespec, LeafSpec", ".*does not have many workers", "Checkpoint directory")
]


def samples() -> list[tuple[Tensor, int]]:
    return [(x, i % 5) for i, x in enumerate(images(STEPS // EPOCHS * ACCUMULATE * BATCH))]


def plain() -> nn.Module:
    return LEAN["vit"].model()


def by_hand() -> nn.Module:
    """The loop that the callbacks stand for: the step is set before each optimizer step, micro-batches count on."""
    model = torchsbp.apply(plain(), config=CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(samples() * EPOCHS, BATCH))
    for step in range(STEPS):
        torchsbp.set_step(model, step)
        for _ in range(ACCUMULATE):
            x, labels = next(batches)
            (F.cross_entropy(model(x), labels) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """What training changed is the same."""
    first = dict(plain().named_parameters())
    found, wanted = ({name: (p - first[name]).detach() for name, p in m.named_parameters()} for m in (model, expected))
    assert_gradients(found, wanted)
    masks = (torchsbp.kept(m).values() for m in (model, expected))  # their names begin where apply was called
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


class Lightning:
    """A LightningModule and its Trainer, of either package."""

    def __init__(self, package: str) -> None:
        self.pl = pl = pytest.importorskip(package)
        self.callback = importlib.import_module("torchsbp.integrations.lightning").SBPCallback
        assert issubclass(self.callback, pl.Callback)

        class Module(pl.LightningModule):
            def __init__(self, build=plain):
                super().__init__()
                self.model = build()

            def training_step(self, batch, _):
                x, labels = batch
                return F.cross_entropy(self.model(x), labels)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

        self.module = Module

    def fit(self, module, folder, *callbacks, resume=None, **options):
        trainer = self.pl.Trainer(
            max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATE, callbacks=list(callbacks), precision="64-true",
            default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False, log_every_n_steps=1,
            enable_model_summary=False, **{"enable_checkpointing": False} | options,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(samples(), BATCH), ckpt_path=resume)
        return trainer


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request, monkeypatch) -> Lightning:
    """Each package as if it were the only one."""
    monkeypatch.delitem(sys.modules, "torchsbp.integrations.lightning", raising=False)
    if request.param == "pytorch_lightning":
        monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    return Lightning(request.param)


def test_lightning_equals_a_loop_by_hand_and_logs(lightning, tmp_path):
    module = lightning.module()
    trainer = lightning.fit(module, tmp_path, lightning.callback(config=CONFIG))
    assert_same_weights(module.model, by_hand())
    assert trainer.callback_metrics["sbp/keep_ratio"] == 0.5


def test_lightning_resumes_with_its_masks_and_ratio(lightning, tmp_path):
    def run(module, **options):
        saving = lightning.pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        callbacks = lightning.callback(config=CONFIG), saving
        lightning.fit(module, tmp_path, *callbacks, enable_checkpointing=True, **options)

    run(lightning.module())
    module = lightning.module()
    run(module, resume=tmp_path / "epoch=0.ckpt")
    assert_same_weights(module.model, by_hand())


def test_lightning_patches_a_named_part_before_the_strategy_wraps_it(lightning, tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = plain(), plain()

        def forward(self, x):
            return self.student(x)

    seen = {}

    def wrapped(self, trainer, module):
        seen["wrapper"], seen["student"] = trainer.strategy.model, entry_of(trainer.strategy.model)

    module = lightning.module(Pair)
    check = type("Check", (lightning.pl.Callback,), {"on_train_start": wrapped})()
    callback = lightning.callback(config=CONFIG, module="model.student")
    ddp = {"strategy": "ddp_find_unused_parameters_true", "devices": 1, "use_distributed_sampler": False}
    with mock.patch.dict(os.environ):
        lightning.fit(module, tmp_path, callback, check, **ddp)
    torch.distributed.destroy_process_group()
    assert isinstance(seen["wrapper"], nn.parallel.DistributedDataParallel)
    assert seen["student"] is module.model.student.patch_embed
    assert not any(isinstance(m, Site) for m in module.model.teacher.modules())
    assert_same_weights(module.model.student, by_hand())


def test_lightning_model_built_in_configure_model_is_patched_there(lightning, tmp_path):
    class Late(lightning.module):
        def __init__(self, config):
            super().__init__(nn.Identity)
            self.built = [plain() if config is None else torchsbp.apply(plain(), config=config)]

        def configure_model(self):
            (self.model,) = self.built

    module = Late(CONFIG)
    lightning.fit(module, tmp_path, lightning.callback(config=CONFIG))
    assert_same_weights(module.model, by_hand())
    with pytest.raises(ValueError, match=r"Late is not patched.*too late.*configure_model.*torchsbp.apply"):
        lightning.fit(Late(None), tmp_path, lightning.callback(config=CONFIG))
    with pytest.raises(ValueError, match=r"patched with SBPConfig\(keep_ratio=0.25.*SBPCallback has .*torchsbp.remove"):
        lightning.fit(Late(SBPConfig(keep_ratio=0.25)), tmp_path, lightning.callback(config=CONFIG))


def test_lightning_fits_twice_and_refuses_what_it_can_not_patch(lightning, tmp_path):
    module, callback = lightning.module(), lightning.callback(config=CONFIG)
    for _ in range(2):
        module.model.load_state_dict(plain().state_dict())
        lightning.fit(module, tmp_path, callback)
    assert_same_weights(module.model, by_hand())
    with pytest.raises(ValueError, match=r"nothing to patch in .*Supported, also inside another module: timm ViT"):
        lightning.fit(lightning.module(lambda: nn.Linear(2, 2)), tmp_path, callback)
    with pytest.raises(TypeError, match="unknown option ratio; allowed: keep_ratio"):
        lightning.callback(ratio=0.5)


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Transformers:
    def __init__(self) -> None:
        self.library = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        self.callback = importlib.import_module("torchsbp.integrations.transformers").SBPCallback

    def trainer(self, model, folder, *callbacks, steps=STEPS, **options):
        arguments = self.library.TrainingArguments(
            folder, max_steps=steps, gradient_accumulation_steps=ACCUMULATE, per_device_train_batch_size=BATCH,
            learning_rate=0.01, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, save_steps=2,
            logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip

        class InOrder(self.library.Trainer):
            def _get_train_sampler(self, dataset=None):
                return torch.utils.data.SequentialSampler(dataset)

        data = [{"x": x, "labels": label} for x, label in samples()]
        return InOrder(model, arguments, train_dataset=data, callbacks=list(callbacks), **options)


@pytest.fixture
def transformers() -> Transformers:
    return Transformers()


def test_trainer_equals_a_loop_by_hand_and_logs(transformers, tmp_path):
    model = Classifier(plain())
    trainer = transformers.trainer(model, tmp_path, transformers.callback(config=CONFIG))
    trainer.train()
    assert_same_weights(model.model, by_hand())
    ratios = [line["sbp/keep_ratio"] for line in trainer.state.log_history if "loss" in line]
    assert ratios == [0.25, 0.25, 0.25, 0.5]


@pytest.mark.parametrize("name", NAMES)
def test_a_ratio_that_is_a_name_is_that_of_the_models_family(transformers, tmp_path, name):
    """Patched by the callback, or with its configuration before."""
    callback = transformers.callback(name)
    for model in (plain(), torchsbp.apply(plain(), name), torchsbp.apply(plain(), **getattr(VIT, name))):
        trainer = transformers.trainer(Classifier(model), tmp_path, callback, steps=1)
        trainer.train()
        (ratio,) = [line["sbp/keep_ratio"] for line in trainer.state.log_history if "loss" in line]
        assert ratio == pytest.approx(getattr(VIT, name)["keep_ratio"])  # a mean over blocks
    other = transformers.trainer(Classifier(torchsbp.apply(plain(), 0.9)), tmp_path, callback, steps=1)
    with pytest.raises(ValueError, match=rf"patched with SBPConfig\(keep_ratio=0.9.* has SBP.*keep_ratio='{name}'"):
        other.train()


def test_trainer_resumes_with_its_masks_and_ratio(transformers, tmp_path):
    transformers.trainer(Classifier(plain()), tmp_path, transformers.callback(config=CONFIG), steps=2).train()
    model = Classifier(plain())
    trainer = transformers.trainer(model, tmp_path, transformers.callback(config=CONFIG))
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3, 4]
    assert_same_weights(model.model, by_hand())


def test_trainer_refuses_a_model_that_is_not_patched(transformers, tmp_path):
    callback = transformers.callback(config=CONFIG)
    trainer = transformers.trainer(None, tmp_path, callback, model_init=lambda: Classifier(plain()))
    with pytest.raises(ValueError, match=r"Classifier is not patched.*model_init.*torchsbp.apply\(model"):
        trainer.train()
    trainer = transformers.trainer(Classifier(plain()), tmp_path)
    trainer.add_callback(callback)
    with pytest.raises(ValueError, match=r"Give SBPCallback to the trainer when that is made"):
        trainer.train()


@pytest.mark.parametrize(
    "name, libraries", [("lightning", ["lightning", "pytorch_lightning"]), ("transformers", ["transformers"])]
)
def test_a_missing_library_is_named_with_its_extra(name, libraries, monkeypatch):
    for library in libraries:
        for module in [m for m in sys.modules if m.split(".")[0] == library]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"torchsbp.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf'pip install "torchsbp\[{name}\]"'):
        importlib.import_module(f"torchsbp.integrations.{name}")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_lightning_example(example, tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    values = example("lightning_vit").main(epochs=1)
    assert values["sbp/keep_ratio"] == 0.25
    assert values["loss"] < 2.3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_trainer_example(example, transformers):
    history = example("trainer_vit").main(epochs=1)
    lines = [line for line in history if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {line["sbp/keep_ratio"] for line in lines} == {0.5}


def test_accelerate_example(example):
    pytest.importorskip("accelerate")
    assert example("accelerate_vit").main(epochs=2) > 0.15
