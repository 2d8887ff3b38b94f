"""A small ViT on handwritten digits in Lightning: SBP is one callback.

python examples/lightning_vit.py    (needs pip install ".[train,lightning]"; seconds on a CPU)
"""

import lightning as L
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from torchsbp.integrations.lightning import SBPCallback
from torchsbp.sampling.schedules import ramp


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model(
            "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=4
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(epochs: int = 6) -> dict[str, float]:
    """Train, and return the logged values of the last step and validation."""
    L.seed_everything(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    train, valid = random_split(TensorDataset(images, labels), [0.8, 0.2])
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[SBPCallback(keep_ratio=ramp(0.25, 1.0, steps=400))],  # full backprop from step 400 on
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(Classifier(), DataLoader(train, 16, shuffle=True), DataLoader(valid, 360))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main())
