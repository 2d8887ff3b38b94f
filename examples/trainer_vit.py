"""A small ViT on handwritten digits with transformers' Trainer: SBP is one callback.

python examples/trainer_vit.py    (needs pip install ".[train,transformers]"; seconds on a CPU)
"""

import tempfile

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import random_split
from transformers import EvalPrediction, Trainer, TrainingArguments

from torchsbp.integrations.transformers import SBPCallback


class Classifier(nn.Module):
    """A timm model that returns loss and logits, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 48, "depth": 4}
        self.vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.vit(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean().item()}


def main(epochs: int = 6) -> list[dict[str, float]]:
    """Train, and return what the Trainer logged."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, digits.target
    samples = [{"pixel_values": i, "labels": n} for i, n in zip(images, labels.tolist(), strict=True)]
    train, valid = random_split(samples, [0.8, 0.2])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=2e-3,
            logging_steps=30, eval_strategy="epoch", save_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = Trainer(
            Classifier(), arguments, train_dataset=train, eval_dataset=valid, compute_metrics=accuracy,
            callbacks=[SBPCallback(keep_ratio=0.5)],
        )  # fmt: skip
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
