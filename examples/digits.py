"""The task of the demo: scikit-learn's handwritten digits, a small timm ViT and its training, without SBP."""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

SIZE, PATCH = 32, 4
LEARNING_RATE = 1.5e-3


def load() -> tuple[Tensor, Tensor]:
    """The 1797 images, enlarged from 8 × 8, and their labels, in a fixed random order."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None]
    images = F.interpolate((images - images.mean()) / images.std(), (SIZE, SIZE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target)[order]


def vit() -> nn.Module:
    """64 patches, 6 blocks of width 64. With timm's default weights a ViT this narrow would learn slowly."""
    model = VisionTransformer(
        img_size=SIZE,
        patch_size=PATCH,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=6,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        weight_init="jax",
    )
    nn.init.normal_(model.pos_embed)
    return model


class Run:
    """A model in training, with the loss and time of every step and the test accuracy of every epoch."""

    def __init__(self, name: str, model: nn.Module, steps: int) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2, cycle_momentum=False
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.accuracies: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @torch.no_grad()
    def test(self, images: Tensor, labels: Tensor) -> None:
        predicted = self.model.eval()(images).argmax(1)
        self.model.train()
        self.accuracies.append((predicted == labels).float().mean().item())

    def progress(self) -> str:
        accuracy = f", accuracy {self.accuracies[-1]:.1%}" if self.accuracies else ""
        return f"{self.name}: loss {self.losses[-1]:.3f}{accuracy}"
