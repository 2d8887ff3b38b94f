"""Models by the names that the command line takes: from timm, torchvision or transformers, or made by a function of the
user's own. They are built on the meta device."""

import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import UsageError

LIBRARIES = ("timm", "torchvision")
"""Libraries whose names are found without a prefix."""
TRANSFORMERS = "transformers"
SIZE_OPTIONS = {"timm": "img_size", "torchvision": "image_size"}
IMAGE, FRAMES = (3, 224, 224), 16
HELP = "a timm or torchvision name; timm/… or torchvision/… if both; transformers/ViTModel; or module:function"

Shape = tuple[int, ...]


class Named(NamedTuple):
    """A model: how to build it, and the shape of one sample."""

    build: Callable[[], nn.Module]
    shape: Shape


def find_model(name: str, size: int | None = None, channels_last: bool = False, shape: Shape | None = None) -> Named:
    """The model of that name, for images of that size, or samples of that shape."""
    find = of_function if ":" in name else of_transformers if name.startswith(f"{TRANSFORMERS}/") else of_library
    found = find(name, shape[-1] if shape and size is None else size)

    def build() -> nn.Module:
        model = found.build()
        return model.to(memory_format=torch.channels_last) if channels_last else model

    return Named(build, shape or found.shape)


def of_library(name: str, size: int | None) -> Named:
    """A model of timm or torchvision. Without "timm/" or "torchvision/" before the name, timm comes first."""
    library, _, short = name.rpartition("/")
    if library not in ("", *LIBRARIES):
        raise UsageError(f"unknown library {library!r} in {name!r}; known: {', '.join((*LIBRARIES, TRANSFORMERS))}")
    found = [lib for lib in ([library] if library else LIBRARIES) if short.partition(".")[0] in names(lib)]
    if not found:
        raise UsageError(unknown(short, [library] if library else list(LIBRARIES)))
    own = default_input(found[0], short)
    given = {} if size in (None, own[-1]) else {SIZE_OPTIONS[found[0]]: size}
    return Named(lambda: create(found[0], short, given), sized(own, size))


def sized(shape: Shape, size: int | None) -> Shape:
    return shape if size is None else (*shape[:-2], size, size)


def of_transformers(name: str, size: int | None) -> Named:
    """A class of transformers, built from its default configuration."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{TRANSFORMERS} is not installed; pip install 'torchsbp[transformers]'") from error
    short = name.partition("/")[2]
    kind: Any = getattr(transformers, short, None)
    if getattr(kind, "config_class", None) is None:
        near = get_close_matches(short, [its for its in dir(transformers) if "Model" in its or "For" in its], n=5)
        hint = f"did you mean {', '.join(near)}?" if near else "give the name of a model class, such as ViTModel"
        raise UsageError(f"unknown model {short!r} in {TRANSFORMERS}; {hint}")
    config = kind.config_class()
    vision = getattr(config, "vision_config", config)
    if size is not None and hasattr(vision, "image_size"):
        vision.image_size = size
    own = getattr(vision, "image_size", None) or IMAGE[-1]
    sides = (own, own) if isinstance(own, int) else tuple(own)
    image = (getattr(vision, "num_channels", IMAGE[0]), *sides)
    frames = getattr(vision, "num_frames", None)
    return Named(lambda: made(lambda: kind(config), name), sized(image if frames is None else (frames, *image), size))


def of_function(name: str, size: int | None) -> Named:
    """The model that a function returns, "module:function"; the module may be a file in the current folder."""
    path, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(path)
    except Exception as error:
        raise UsageError(f"{name!r}: can't import {path!r}: {type(error).__name__}: {error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(
            f"{name!r}: {path} has no function {function!r}; write module:function, which returns the model"
        )
    return Named(lambda: made(make, name), sized(IMAGE, size))


def made(make: Callable[[], Any], name: str) -> nn.Module:
    """Call ``make`` on the meta device; raise ``UsageError`` if it fails or does not return a module."""
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise UsageError(f"{name!r} can't be built without arguments: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name!r} made {type(model).__name__}; it must return a torch.nn.Module")
    return model


def names(library: str) -> list[str]:
    """The names of all models in a library; raise ``UsageError`` if it is not installed."""
    try:
        if library == "timm":
            import timm

            return timm.list_models()
        import torchvision

        return torchvision.models.list_models()
    except ImportError as error:
        raise UsageError(f"{library} is not installed; install the extra: pip install 'torchsbp[models]'") from error


def unknown(name: str, libraries: list[str]) -> str:
    everything = [known for library in libraries for known in names(library)]
    near = list(dict.fromkeys(get_close_matches(name, everything, n=5, cutoff=0.5)))
    hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() and torchvision.models.list_models() say"
    return f"unknown model {name!r} in {' and '.join(libraries)}; {hint}"


def default_input(library: str, name: str) -> Shape:
    """The shape of one sample, an image or a video."""
    if library == "torchvision":
        from torchvision.models import get_model_builder

        video = ".video." in f"{get_model_builder(name).__module__}."
        return (IMAGE[0], FRAMES, *IMAGE[1:]) if video else IMAGE
    import timm

    config = timm.get_pretrained_cfg(name)
    return tuple(config.input_size) if config is not None else IMAGE


def create(library: str, name: str, options: dict[str, Any]) -> nn.Module:
    """Build a model without weights. ``options`` (the size of images) are left out if the model does not take them."""
    make, tries = maker(library), [options, {}]
    if library == "torchvision":  # without this, detectors load the weights of their backbone
        tries = [{"weights_backbone": None, **given} for given in tries] + tries
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        for given in tries:
            try:
                return make(name, **given)
            except TypeError:  # an option that it does not have
                continue
            except Exception as error:
                raise UsageError(f"{library} can't build {name} with {given}: {error}") from error
    raise UsageError(f"{library} can't build {name} without arguments")


def maker(library: str) -> Callable[..., nn.Module]:
    if library == "timm":
        from timm import create_model

        return create_model
    from torchvision.models import get_model

    return get_model
