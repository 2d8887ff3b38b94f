"""Read weights to begin from, and write weights for others, as safetensors that plain timm loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import CheckpointError
from ..record import WEIGHTS
from . import checks
from .checkpoint import BEST, read, replace_file


def file_of(path: Path) -> Path:
    """The file to read: the path itself, or in a run's folder the best checkpoint, or the final weights if that is
    gone."""
    if not path.is_dir():
        return path
    best, last = path / "checkpoints" / BEST, path / WEIGHTS
    return best if best.exists() or not last.exists() else last


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of a run's folder, a checkpoint of ours (the average, if there is one), safetensors or a state
    dict."""
    path = file_of(path)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            checks.check_safetensors(path)
            return load_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"no weights at {path}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} can't be read: it is truncated, or no safetensors: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    content = read(path)
    for key in ("ema", "model", "state_dict"):
        if isinstance(content.get(key), dict):
            return tensors(content[key], path)
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return content
    held = f"it holds {', '.join(map(str, list(content)[:8]))}" if content else "it is empty"
    raise CheckpointError(f"{path} has no weights; {held}")


def tensors(found: dict[str, Any], path: Path) -> dict[str, Tensor]:
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path} has no weights: {name} is of type {type(value).__name__}")
    return found


def load_weights(model: nn.Module, path: Path, new_head: bool = False) -> None:
    """Load weights into the model. All must be there and fit, except the classifier's if ``new_head``."""
    weights = read_weights(path)
    own = model.state_dict()
    head = head_names(model)
    if new_head:
        weights = {name: own[name] if name in head else value for name, value in weights.items()}
        weights |= {name: own[name] for name in head}
    check_fit(own, weights, head, str(path))
    model.load_state_dict(weights)


def classifiers(model: nn.Module) -> Sequence[str]:
    """Names of the layers that are a timm model's classifier."""
    found = getattr(model, "default_cfg", {}).get("classifier") or ()
    return [found] if isinstance(found, str) else found


def head_names(model: nn.Module) -> set[str]:
    """Names of the parameters of a timm model's classifier."""
    prefixes = tuple(f"{name}." for name in classifiers(model))
    return {name for name in model.state_dict() if prefixes and name.startswith(prefixes)}


def check_fit(own: dict[str, Tensor], found: dict[str, Tensor], head: set[str], path: str) -> None:
    """Raise ``CheckpointError`` if weights are missing, unknown or of another shape, and say which."""
    missing, unknown = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model: it lacks {_some(missing)} and has {_some(unknown)} that this model has not"
        )
    shapes = [f"{n} {tuple(found[n].shape)}, here {tuple(own[n].shape)}" for n in own if found[n].shape != own[n].shape]
    if shapes and all(found[n].shape == own[n].shape for n in own if n not in head):
        raise CheckpointError(
            f"{path} has another classifier: {_some(shapes)}; to fine-tune with a new one set task.model.new_head: true"
        )
    if shapes:
        raise CheckpointError(f"{path} is of a model of another size: {_some(shapes)}")


def export(weights: dict[str, Tensor], path: Path, metadata: dict[str, Any]) -> None:
    """Write safetensors that ``timm.create_model(..., checkpoint_path=path)`` loads."""
    from safetensors.torch import save

    content = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    described = {key: str(value) for key, value in metadata.items()}
    data = checks.summed_safetensors(save(content, {**described, **checks.SUMMED, checks.SUM: checks.ZEROS}))
    replace_file(path, lambda file: file.write(data))


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" or "nothing"
