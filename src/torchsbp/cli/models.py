"""``torchsbp models [MODEL]``: which families are supported, and what ``apply`` would do with a named model."""

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch import nn

from ..adapters import ADAPTERS
from ..adapters.base import Adapter
from ..adapters.parts import Parts, qualified
from ..adapters.residual import bare_name
from ..config import SBPConfig
from ..ops.attention import RULES
from ..patch import block_classes, find_backbones, survey
from .named import find_model

PURPOSE = "which models are supported, and which blocks of a model"


def run(argv: list[str]) -> int:
    """Which models are supported; of a named one, which blocks are sampled, or why it is refused (exit status 1)."""
    parser = argparse.ArgumentParser("torchsbp models", description=run.__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a timm or torchvision name; timm/… or torchvision/…")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args(argv)
    if args.model is None:
        found = families()
        print(json.dumps(found) if args.json else list_families(found))
        return 0
    about = examine(find_model(args.model).build())
    print(json.dumps({"name": args.model, **about}) if args.json else describe(args.model, about))
    return 0 if about["supported"] else 1


def families() -> list[dict[str, Any]]:
    """Every adapter: its library, name, model class and block classes, with the kinds of descriptions they have."""
    return [
        {
            "library": str(adapter.model).partition(".")[0],
            "family": adapter.name,
            "model": adapter.model,
            "blocks": {block: kinds(parts) for block, parts in adapter.blocks.items()},
            "between stages": kinds(adapter.downsample or ()),
        }
        for adapter in ADAPTERS
    ]


def kinds(parts: Parts | tuple[Parts, ...]) -> list[str]:
    """Of its descriptions, in the order in which they are tried."""
    return list(dict.fromkeys(its.kind for its in several(parts)))


def several(parts: Parts | tuple[Parts, ...]) -> tuple[Parts, ...]:
    return parts if isinstance(parts, tuple) else (parts,)


def list_families(found: list[dict[str, Any]]) -> str:
    lines = []
    for library, members in groupby(sorted(found, key=lambda family: family["library"]), lambda f: f["library"]):
        lines.append(library)
        for family in members:
            lines.append(f"  {family['family'].removeprefix(library).strip():<28} {family['model']}")
            rows = {block.rpartition(".")[2]: its for block, its in family["blocks"].items()}
            rows["layers between stages"] = family["between stages"]
            lines += [f"    {name:<26} {', else '.join(its)}" for name, its in rows.items() if its]
        lines.append("")
    lines += explain_kinds()
    lines.append("torchsbp models NAME shows the blocks of a model; docs/adapters.md says how to add your own.")
    return "\n".join(lines)


def explain_kinds() -> Iterator[str]:
    """What each kind means, and the attention rules that all descriptions of it have."""
    described = [parts for adapter in ADAPTERS for its in adapter.blocks.values() for parts in several(its)]
    for kind, meaning in {parts.kind: parts.meaning for parts in described}.items():
        rules = [rule for rule in RULES if all(rule in parts.rules for parts in described if parts.kind == kind)]
        yield f"{kind}: {meaning}; attention rules: {', '.join(rules)}"


def examine(model: nn.Module) -> dict[str, Any]:
    """What ``apply`` finds in a model, block by block; nothing is changed."""
    backbones: list[dict[str, Any]] = [
        {"name": name, "family": adapter.name, "model": qualified(module), "blocks": list(blocks(module, adapter))}
        for name, module, adapter in find_backbones(model)
    ]
    refused = any(block["problems"] for backbone in backbones for block in backbone["blocks"])
    return {
        "supported": bool(backbones) and not refused,
        "model": qualified(model),
        "block classes": block_classes(model),
        "backbones": backbones,
    }


def blocks(model: nn.Module, adapter: Adapter) -> Iterator[dict[str, Any]]:
    """Blocks and layers between stages; problems are told without names, so that those of like blocks are alike."""
    for place in survey(model, adapter, SBPConfig()):
        yield {
            "name": place.name,
            "class": bare_name(place.module),
            "kind": place.parts.kind,
            "sampled": place.depth is not None,
            "problems": [problem.removeprefix(place.name).lstrip(": ") for problem in place.problems],
        }


def describe(name: str, about: dict[str, Any]) -> str:
    if not about["backbones"]:
        classes = "".join(f"\n  {block}" for block in about["block classes"]) or " not recognisable"
        return (
            f"{name} is not supported: no adapter for {about['model']}. Its block classes:{classes}\n"
            "torchsbp models lists what is supported; docs/adapters.md says how to add an adapter."
        )
    lines = []
    for backbone in about["backbones"]:
        title = f"{name}: {backbone['name']}" if backbone["name"] else name
        lines.append(f"{title}: {backbone['family']}, {backbone['model']}")
        rows = list(group(backbone["blocks"]))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"  {names:<{widths[0]}}  {cls:<{widths[1]}}  {fate}" for names, cls, fate in rows]
        reasons = dict.fromkeys(f"  {b['class']}: {problem}" for b in backbone["blocks"] for problem in b["problems"])
        lines += [f"{name} is not supported:", *reasons] if reasons else []
    return "\n".join(lines)


def group(found: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Neighbours that are alike on one line: their names, their class, and what becomes of them."""

    def fate(block: dict[str, Any]) -> tuple[str, str]:
        taken = f"{block['kind']}, {'sampled' if block['sampled'] else 'exact'}"
        return block["class"], "refused" if block["problems"] else taken

    for alike, same in groupby(found, fate):
        names = [block["name"] for block in same]
        yield names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})", *alike
