"""Models by name, as the command line takes them: of timm or torchvision, built on the meta device."""

import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import UsageError

LIBRARIES = ("timm", "torchvision")
SIZE_OPTIONS = {"timm": "img_size", "torchvision": "image_size"}


class Named(NamedTuple):
    """A model of a library: how to build it, its number of input channels and its image size."""

    build: Callable[[], nn.Module]
    channels: int
    size: int


def find_model(name: str, size: int | None = None, channels_last: bool = False) -> Named:
    """The model of that name, "timm/…" or "torchvision/…" where both have it, for images of that size."""
    library, _, short = name.rpartition("/")
    if library not in ("", *LIBRARIES):
        raise UsageError(f"unknown library {library!r} in {name!r}; known: {', '.join(LIBRARIES)}")
    found = [lib for lib in ([library] if library else LIBRARIES) if short.partition(".")[0] in names(lib)]
    if not found:
        raise UsageError(unknown(short, [library] if library else list(LIBRARIES)))
    channels, own = default_input(found[0], short)
    given = {} if size in (None, own) else {SIZE_OPTIONS[found[0]]: size}

    def build() -> nn.Module:
        model = create(found[0], short, given)
        return model.to(memory_format=torch.channels_last) if channels_last else model

    return Named(build, channels, size or own)


def names(library: str) -> list[str]:
    """Of all models; an error if the library is not installed."""
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


def default_input(library: str, name: str) -> tuple[int, int]:
    """Channels and size of its images."""
    if library == "torchvision":
        return 3, 224
    import timm

    config = timm.get_pretrained_cfg(name)
    shape = config.input_size if config is not None else (3, 224, 224)
    return shape[0], shape[-1]


def create(library: str, name: str, options: dict[str, Any]) -> nn.Module:
    """Built without weights; the size of images is told to models that ask for it."""
    make, tries = maker(library), [options, {}]
    if library == "torchvision":  # detectors would load the weights of their backbone
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
