"""Video Swin from weights of a Swin of images, as its authors begin: each frame of a patch gets the image's kernel
divided by the number of frames, each distance in time gets the image's position biases."""

import re

from torch import Tensor
from torchvision.models.video.swin_transformer import SwinTransformer3d

PATCH = {"features.0.0.": "patch_embed.proj.", "features.0.2.": "patch_embed.norm."}
TABLE, INDEX = "relative_position_bias_table", "relative_position_index"


def inflated(weights: dict[str, Tensor], model: SwinTransformer3d) -> dict[str, Tensor]:
    """Return weights of torchvision's or timm's Swin of images for the video model; other weights as they are."""
    if "layers.0.blocks.0.norm1.weight" in weights:
        names = {name: of_timm(name) for name in weights}
    elif "features.0.0.weight" in weights and weights["features.0.0.weight"].dim() == 4:
        names = {name: of_torchvision(name) for name in weights}
    else:
        return weights
    own = model.state_dict()
    indices = {name: index for name, index in own.items() if name.endswith(INDEX)}
    return {names[name]: fitted(names[name], value, own) for name, value in weights.items()} | indices


def of_torchvision(name: str) -> str:
    """Return a weight's name in the video model, which does not count the patch embedding among its ``features``."""
    for before, now in PATCH.items():
        if name.startswith(before):
            return now + name.removeprefix(before)
    if name.startswith("features."):
        _, number, rest = name.split(".", 2)
        return f"features.{int(number) - 1}.{rest}"
    return name


def of_timm(name: str) -> str:
    """Return a weight's name in the video model. timm's stages begin with down-sampling; here it is between stages."""
    part = re.match(r"layers\.(\d+)\.(blocks|downsample)\.", name)
    if part:
        number = 2 * int(part[1]) - (part[2] == "downsample")
        name = f"features.{number}.{name[part.end() :]}"
    return name.replace(".mlp.fc1.", ".mlp.0.").replace(".mlp.fc2.", ".mlp.3.").replace("head.fc.", "head.")


def fitted(name: str, value: Tensor, own: dict[str, Tensor]) -> Tensor:
    if name == "patch_embed.proj.weight":
        frames = own[name].shape[2]
        return value[:, :, None].expand(-1, -1, frames, -1, -1) / frames
    if name.endswith(TABLE) and name in own:
        return value.repeat(own[name].shape[0] // value.shape[0], 1)
    return value
