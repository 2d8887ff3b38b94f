"""Weights of classes in the loss: what they are, and what they do to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchsbp.errors import DataError, UsageError
from torchsbp.train import tasks
from torchsbp.train.ranges import check
from torchsbp.train.tasks.classification import Augment, Classification, ClassificationOptions, Data

from .runs import run, train
from .test_recipes import picture_folder


@pytest.fixture
def root(tmp_path):
    """Three classes of 4, 2 and 4 images."""
    root = picture_folder(tmp_path / "data")
    for number in (0, 1):
        (root / "train" / "class1" / f"{number}.jpg").unlink()
    return root


def task(root, weights, **augment) -> Classification:
    options = ClassificationOptions(data=Data(root=root), augment=Augment(**augment), class_weights=weights)
    result = tasks.start(options, seed=0)
    result.check(2)
    return result


def test_balanced_weights_make_up_for_the_number_of_images(root):
    weights = task(root, "balanced").class_weights
    assert weights.tolist() == pytest.approx([10 / 12, 10 / 6, 10 / 12])
    assert (weights * torch.tensor([4, 2, 4])).sum() == 10  # on average an image counts as before


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_a_weighted_mean_over_images(root, smoothing):
    its = task(root, [1.0, 3.0, 0.5], smoothing=smoothing)
    scores, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    smooth = (1 - smoothing) * F.one_hot(labels, 3) + smoothing / 3
    expected = -(smooth * torch.tensor([1.0, 3.0, 0.5]) * scores.float().log_softmax(1)).sum(1)
    torch.testing.assert_close(its.loss(nn.Identity(), (scores, labels)), expected.float().mean())
    halves = [its.loss(nn.Identity(), (scores[part], labels[part])) for part in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(torch.stack(halves).mean(), expected.float().mean())


def test_equal_weights_are_none(root):
    batch = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    losses = [task(root, weights).loss(nn.Identity(), batch) for weights in ("none", [1.0, 1.0, 1.0])]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "weights, augment, message",
    [
        (
            "balanced",
            {"mixup": 0.2},
            "class_weights and mixup: a mixed image has two classes; set task.augment",
        ),
        ([1.0, 2.0], {}, r"allowed: none, balanced, or 3 numbers, not all 0: class0, class1, class2"),
        ([0.0, 0.0, 0.0], {}, "or 3 numbers, not all 0"),
    ],
)
def test_weights_without_meaning_are_refused(root, weights, augment, message):
    with pytest.raises(UsageError, match=message):
        task(root, weights, **augment)


def test_negative_weights_and_other_words_are_refused(capsys):
    with pytest.raises(UsageError, match=r"task.class_weights=\[1.0, -1.0\] is not allowed"):
        check(ClassificationOptions(class_weights=[1.0, -1.0]), "task")
    with pytest.raises(UsageError, match="class_weights='always' is not allowed"):
        check(ClassificationOptions(class_weights="always"))
    with pytest.raises(SystemExit):
        train(["digits", "--task.class_weights=always"])
    assert "class_weights" in capsys.readouterr().err


def test_a_class_without_images_cannot_be_balanced(root):
    its = tasks.start(ClassificationOptions(data=Data(root=root), class_weights="balanced"), seed=0)
    its.train_images.labels[:] = [0, 0, 2]
    with pytest.raises(DataError, match="balanced: class1 has no training images"):
        its.check(2)


def test_a_run_with_weights(tmp_path):
    task = {"augment": {"mixup": 0.0, "cutmix": 0.0}}
    code, _ = run(tmp_path, "--task.class_weights=balanced", task=task, epochs=1, schedule={"warmup_epochs": 0})
    assert code == 0
