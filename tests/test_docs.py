"""The pages under docs: their code runs and does what they say."""

import copy
import re
from pathlib import Path

import pytest
import torch

import torchsbp
from torchsbp import SBPConfig, adapters
from torchsbp.cli.main import commands
from torchsbp.ops.reference import gate
from torchsbp.sampling import recommended

from .steps import assert_gradients, step

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "adapters.md").read_text()
FAMILIES = {
    "ViTs of images": recommended.VIT,
    "ConvNeXt": recommended.CONVNEXT,
    "Swin": recommended.SWIN,
    "all others": recommended.UNTRIED,
}


@pytest.fixture
def page(monkeypatch) -> dict:
    """What the example of the page defines."""
    monkeypatch.setattr(adapters, "ADAPTERS", list(adapters.ADAPTERS))
    names: dict = {"__name__": "page"}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S).group(1), names)
    return names


def test_your_own_vit_is_registered_in_under_twenty_lines(page):
    registration = re.search(r"^torchsbp.register\(.*?^\)$", PAGE, re.S | re.M).group(0)
    assert registration.count("\n") + 1 < 20
    assert list(torchsbp.kept(page["model"])) == [f"layers.{i}" for i in range(2, 6)]


@pytest.mark.parametrize("options", [{}, {"per_sample": True}, {"recompute": False}], ids=str)
def test_your_own_vit_gets_the_gradients_of_kept_rows(page, options):
    torch.manual_seed(0)
    plain = page["MyViT"](dim=16, depth=3).double()
    model = torchsbp.apply(copy.deepcopy(plain), config=SBPConfig(0.5, scale="none", **options))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y, found = step(model, x)
    for name, positions in torchsbp.kept(model).items():
        layer = plain.get_submodule(name)

        def gated(module, args, output, p=positions):
            y = output[0] if isinstance(output, tuple) else output
            y = gate(y, (p + y.shape[1] * torch.arange(len(p))[:, None]).flatten())
            return (y, *output[1:]) if isinstance(output, tuple) else y

        layer.attn.register_forward_hook(gated)
        layer.mlp.register_forward_hook(gated)
    expected_y, expected = step(plain, x)
    assert torch.equal(y, expected_y)
    assert_gradients(found, expected)


def test_your_own_vit_passes_the_check(page):
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.S)[1], page)


def test_register_takes_adapters_and_the_last_one_wins(page):
    with pytest.raises(TypeError, match=r"register takes a torchsbp.adapters.Adapter, got dict"):
        torchsbp.register({})
    layout = adapters.Layout(page["MyViT"], entry="patches", stages="layers")
    torchsbp.register(adapters.Adapter("again", {}, layout))
    with pytest.raises(ValueError, match=r"again: this model has parts .*\n  layers.0 is page.Block; supported: "):
        torchsbp.apply(page["MyViT"]())


def test_a_patched_model_is_loaded_where_its_adapter_is_registered():
    with pytest.raises(
        ValueError, match=r"no adapter for page.MyViT: call torchsbp.register\(adapter\) before loading"
    ):
        adapters.registered("my ViT", "page.MyViT")


def test_troubleshooting_names_what_exists_and_is_linked():
    root = Path(__file__).parents[1]
    text = (root / "docs" / "troubleshooting.md").read_text()
    assert "(docs/troubleshooting.md)" in (root / "README.md").read_text()
    titles = ["Out of memory still", "Slower than before", "Compile errors", "Accuracy lower than expected"]
    assert re.findall(r"^## (.*)$", text, re.M) == [*titles, "A run ends because of its data"]
    assert set(re.findall(r"torchsbp (\w+) NAME", text)) <= set(commands())
    assert all(hasattr(torchsbp, name) for name in re.findall(r"torchsbp\.(\w+)", text))
    options = {option for option in re.findall(r"`(\w+)=", text) if option != "PYTORCH_CUDA_ALLOC_CONF"} - {
        "TORCH_LOGS"
    }
    assert options <= set(torchsbp.SBPConfig.__dataclass_fields__)
    for page, heading in re.findall(r"\]\(([\w.]+)(?:#([\w-]+))?\)", text):
        content = (root / "docs" / page).read_text()
        assert not heading or heading in [
            re.sub(r" ", "-", its.lower().replace(".", "")) for its in re.findall(r"^## (.*)$", content, re.M)
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_presets_is_what_is_recommended(family):
    (row,) = [line for line in (DOCS / "usage.md").read_text().splitlines() if line.startswith(f"| {family}")]
    cells = [", ".join(f"{name}={value:g}" for name, value in options.items()) for options in FAMILIES[family]]
    assert row.endswith("".join(f" | `{cell}`" for cell in cells) + " |")
