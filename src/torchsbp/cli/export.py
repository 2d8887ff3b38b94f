"""``torchsbp export RUN --format FORMAT``: write a trained model for use without torchsbp."""

from pathlib import Path

from ..errors import RunError, UsageError
from .trained import opened, parser

PURPOSE = "a trained model as safetensors, ONNX or torch.export"
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}
ON_CPU = ["--device=cpu", "--compile=false", "--channels_last=false"]


def run(argv: list[str]) -> None:
    arguments = parser("export", "Write a trained model for use elsewhere, and compare what is read back with it.")
    arguments.add_argument(
        "--format",
        choices=SUFFIXES,
        default="safetensors",
        help="safetensors: weights for timm; onnx, torch_export: the model itself (default: %(default)s)",
    )
    arguments.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: model{', model'.join(SUFFIXES.values())}"
    )
    own, overrides = arguments.parse_known_args(argv)
    path = own.out or Path(f"model{SUFFIXES[own.format]}")
    if path.suffix != SUFFIXES[own.format]:
        raise UsageError(f"--out {path}: a file of {own.format} ends in {SUFFIXES[own.format]}")
    with opened(own, "export", [*overrides, *ON_CPU]) as its:
        from ..train.exports import write_program, write_weights

        about = its.stored.metadata()
        try:
            if own.format == "safetensors":
                write_weights(its.model, path, about)
                print(f"{path}: the weights, read back bit for bit")
            else:
                worst = write_program(own.format, its.model, its.task.example, path, about)
                print(f"{path}: the model, for any batch size; outputs within {worst:.0e} of the largest")
        except OSError as error:
            raise RunError(f"{path} can't be written: {error.strerror or error}") from error
