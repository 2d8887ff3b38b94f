"""Online detection: which frames the encoder's gradient comes from, and how close sampled gradients are to full ones.

    python benchmarks/frame_gradients.py RUN        # of task online_action; any option of torchsbp train may follow

It takes batches of windows of the training data, with the weights as they are. First it prints the length of the
gradient of a frame's features, in the long memory (slots that are not empty) and in the work memory. Then it compares
the gradient of the encoder's weights through sampled frames with that through all: their cosine, and the ratio of their
lengths.
"""

import statistics
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from torchsbp import SBPConfig
from torchsbp.cli.trained import opened, parser
from torchsbp.train.online.detector import OnlineDetector
from torchsbp.train.tasks.online_action import Batch, OnlineAction, multi_label_loss

ARMS = {
    "window, shared by the batch": ("window", False),
    "window": ("window", True),
    "work memory": ("work", True),
}
"""(where frames are kept from, whether each clip keeps its own)"""


def batches(task: OnlineAction, count: int, size: int) -> list[Batch]:
    data = task.train_data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    keys = [(epoch, index) for epoch in range(-(-count * size // len(data))) for index in order]
    return [default_collate([data[key] for key in keys[i * size : (i + 1) * size]]) for i in range(count)]


def gradients(model: OnlineDetector, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Gradients of features ``[B, T, D]``, and of the encoder's weights as one vector. Arms have the same dropout."""
    frames, (empty, targets) = batch
    torch.manual_seed(number)
    model.set_step(number)
    features = model.encode(frames)
    weights = [its for its in model.encoder.parameters() if its.requires_grad]
    loss = multi_label_loss(model.temporal(features, empty), targets)
    of_features, *of_weights = torch.autograd.grad(loss, [features, *weights])
    return of_features, torch.cat([its.flatten() for its in of_weights])


def lengths(of_features: Sequence[Tensor], empty: Sequence[Tensor]) -> tuple[float, float]:
    """Mean length of a frame's gradient, in the long memory and in the work memory."""
    long = empty[0].shape[1]
    norms = [its.norm(dim=-1) for its in of_features]
    filled = torch.cat([its[:, :long][~none] for its, none in zip(norms, empty, strict=True)])
    return filled.mean().item(), torch.cat([its[:, long:].flatten() for its in norms]).mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    options = parser("eval", (__doc__ or "").partition("\n")[0])
    options.prog = "python benchmarks/frame_gradients.py"
    options.add_argument("--batches", type=int, default=16)
    options.add_argument("--size", type=int, default=16, help="clips in a batch")
    options.add_argument("--ratio", type=float, default=0.2, help="the share of frames that is kept")
    own, overrides = options.parse_known_args(sys.argv[1:] if argv is None else argv)
    with opened(own, "eval", ["--device=cpu", *overrides]) as its:
        task, model = its.task, its.model.train()
        assert isinstance(task, OnlineAction)
        assert isinstance(model, OnlineDetector)
        given = batches(task, own.batches, own.size)
        full = [gradients(model, batch, number) for number, batch in enumerate(given)]
        long, work = lengths([its for its, _ in full], [empty for _, (empty, _) in given])
        print(
            f"gradient of a frame's features: long memory {long:.3g}, work memory {work:.3g}, {work / long:.1f} times"
        )
        print("| frames kept from | cosine | length |\n|---|---|---|")
        for arm, (kept, per_sample) in ARMS.items():
            model.config.kept = kept
            model.apply_sbp(SBPConfig(keep_ratio=own.ratio, sampler="frames", per_sample=per_sample))
            found = [gradients(model, batch, number)[1] for number, batch in enumerate(given)]
            pairs = list(zip(found, [exact for _, exact in full], strict=True))
            cosine = statistics.mean(F.cosine_similarity(one, exact, 0).item() for one, exact in pairs)
            length = statistics.mean((one.norm() / exact.norm()).item() for one, exact in pairs)
            print(f"| {arm} | {cosine:.2f} | {length:.2f} |", flush=True)


if __name__ == "__main__":
    main()
