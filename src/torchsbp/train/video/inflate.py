"""Video Swin from weights of torchvision's Swin of images, as its authors begin: each frame of a patch has the image's
kernel over their number, each distance in time has the image's position biases."""

from torch import Tensor
from torchvision.models.video.swin_transformer import SwinTransformer3d

PATCH = {"features.0.0.": "patch_embed.proj.", "features.0.2.": "patch_embed.norm."}
TABLE, INDEX = "relative_position_bias_table", "relative_position_index"


def inflated(weights: dict[str, Tensor], model: SwinTransformer3d) -> dict[str, Tensor]:
    """As they are, if they are not of images."""
    if "features.0.0.weight" not in weights or weights["features.0.0.weight"].dim() != 4:
        return weights
    own = model.state_dict()
    return {name: fitted(name, value, own) for name, value in map(numbered, weights.items())}


def numbered(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """By its name in the model of videos, whose stages are counted from 0: the patches are not among them."""
    name, value = item
    for before, now in PATCH.items():
        if name.startswith(before):
            return now + name.removeprefix(before), value
    if name.startswith("features."):
        _, number, rest = name.split(".", 2)
        return f"features.{int(number) - 1}.{rest}", value
    return name, value


def fitted(name: str, value: Tensor, own: dict[str, Tensor]) -> Tensor:
    if name == "patch_embed.proj.weight":
        frames = own[name].shape[2]
        return value[:, :, None].expand(-1, -1, frames, -1, -1) / frames
    if name.endswith(TABLE):
        return value.repeat(own[name].shape[0] // value.shape[0], 1)
    return own[name] if name.endswith(INDEX) else value
