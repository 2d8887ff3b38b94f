"""A small ViT on handwritten digits in an Accelerate loop: SBP is two lines.

python examples/accelerate_vit.py    (needs pip install ".[train,accelerate]"; seconds on a CPU)
accelerate launch examples/accelerate_vit.py    on several GPUs: each draws masks of its own
"""

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchsbp


def main(epochs: int = 6) -> float:
    """Train, and return the accuracy on held-out digits."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    train, valid = random_split(TensorDataset(images, labels), [0.8, 0.2])

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=4
    )
    torchsbp.apply(model, keep_ratio=0.5)  # before prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, batches, tests = accelerator.prepare(
        model, optimizer, DataLoader(train, 8, shuffle=True), DataLoader(valid, 360)
    )

    for epoch in range(epochs):
        model.train()
        for step, (images, labels) in enumerate(batches, start=epoch * len(batches)):
            torchsbp.set_step(model, step)  # for keep-ratio schedules and resuming; else the model counts by itself
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in tests]
        accuracy = torch.cat(right).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
