"""Export a trained model for use elsewhere: write it, read it back, and compare its outputs with the model's."""

import json
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import RunError, UsageError
from .runs.weights import export, read_weights

Inputs = tuple[Tensor, ...]
Runs = Callable[..., Any]

TRACED, COMPARED = 2, (1, 2, 3)
"""batch sizes: of the example that is traced, and of the batches whose outputs are compared"""
TOLERANCE = 1e-4
"""allowed difference, as a share of the largest output: other kernels sum in another order"""
ONE_FILE = 1 << 30
"""An ONNX file may have 2 GiB at most: weights of more bytes than this are written beside it."""
DESCRIPTION = "torchsbp.json"
"""a file in the archive of torch.export, with what the other formats have as metadata"""


class Program(NamedTuple):
    """A format: how to write a model, and how to read it back as something that can be called."""

    write: Callable[[nn.Module, Inputs, Path, dict[str, str]], None]
    read: Callable[[Path], Runs]
    needs: tuple[str, ...] = ()
    """required packages; the extra with the format's name installs them"""


def batched(inputs: Inputs) -> tuple[dict[int, Any], ...]:
    """``dynamic_shapes`` for the exporters: the first dimension of every input is the batch, of any size."""
    return tuple({0: torch.export.Dim("batch", min=1)} for _ in inputs)


def to_torch_export(model: nn.Module, inputs: Inputs, path: Path, about: dict[str, str]) -> None:
    program = torch.export.export(model, inputs, dynamic_shapes=batched(inputs))
    torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(about)})


def of_torch_export(path: Path) -> Runs:
    return torch.export.load(path).module()


def to_onnx(model: nn.Module, inputs: Inputs, path: Path, about: dict[str, str]) -> None:
    program = torch.onnx.export(model, inputs, dynamic_shapes=batched(inputs), dynamo=True, verbose=False)
    assert program is not None
    program.model.metadata_props.update(about)
    size = sum(weight.nbytes for weight in model.state_dict().values())
    program.save(path, external_data=size > ONE_FILE)


def of_onnx(path: Path) -> Runs:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


PROGRAMS = {
    "onnx": Program(to_onnx, of_onnx, ("onnx", "onnxruntime", "onnxscript")),
    "torch_export": Program(to_torch_export, of_torch_export),
}


def write_weights(model: nn.Module, path: Path, about: dict[str, str]) -> None:
    """Write safetensors that ``timm.create_model(…, checkpoint_path=path)`` loads, and check them bit for bit."""
    own = model.state_dict()
    export(own, path, about)
    found = read_weights(path)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)


@torch.no_grad()
def write_program(
    name: str, model: nn.Module, example: Callable[[int], Inputs], path: Path, about: dict[str, str]
) -> float:
    """Write the model itself. Return the largest difference of outputs, relative to the largest output; if that is too
    large, raise ``RunError`` and write nothing. ``example(n)`` gives inputs of n samples."""
    form, inputs = PROGRAMS[name], example(TRACED)
    missing = [package for package in form.needs if find_spec(package) is None]
    if missing:
        raise UsageError(f"{name} needs {', '.join(missing)}: pip install 'torchsbp[{name}]'")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        written = Path(folder) / path.name
        try:
            form.write(model, inputs, written, about)
            runs = form.read(written)
            worst = max(difference(model, runs, example(size)) for size in COMPARED)
        except Exception as error:  # converters raise anything for a model that they can't convert
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RunError(f"this model can't be exported as {name}: {reason}") from error
        if not worst <= TOLERANCE:
            raise RunError(f"exported as {name}, outputs differ by {worst:.1e} of the largest; nothing is written")
        for part in Path(folder).iterdir():
            os.replace(part, path.parent / part.name)
    return worst


def difference(model: nn.Module, runs: Runs, inputs: Inputs) -> float:
    expected, found = tree_leaves(model(*inputs)), tree_leaves(runs(*inputs))
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-9)) for a, b in zip(expected, found, strict=True))
