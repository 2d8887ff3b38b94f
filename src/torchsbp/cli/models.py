"""``torchsbp models [MODEL]``: list the supported families, or show what ``apply`` would do with a model."""

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch import nn

from ..adapters import ADAPTERS, Adapter, Layout, find_backbones
from ..adapters.base import Descriptions, several
from ..adapters.blocks import block_classes
from ..adapters.names import bare_name, qualified
from ..config import SBPConfig, resolved
from ..ops.rules import RULES
from ..patching.survey import survey
from .named import HELP, find_model

EXACT = " (exact: nothing is sampled; the lines above say what a ratio below 1 samples)"
PURPOSE = "which models are supported, and which blocks of a model"


def run(argv: list[str]) -> int:
    """List the supported models. For a named one, show which blocks are sampled, or why it is refused (exit status
    1)."""
    parser = argparse.ArgumentParser("torchsbp models", description=run.__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help=HELP)
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
    """Every adapter: its library, name, model class, other classes that hold its blocks, and block classes with the
    kinds of descriptions they have."""
    return [
        {
            "library": str(adapter.every_layout[0].model).partition(".")[0],
            "family": adapter.name,
            "model": adapter.every_layout[0].model,
            "also in": [layout.model for layout in adapter.every_layout[1:]],
            "blocks": {block: kinds(descriptions) for block, descriptions in adapter.blocks.items()},
            "between stages": kinds(adapter.downsample or ()),
            "recommended": adapter.recommended._asdict(),
        }
        for adapter in ADAPTERS
    ]


def kinds(descriptions: Descriptions) -> list[str]:
    """The kinds of these descriptions, in the order in which they are tried."""
    return list(dict.fromkeys(its.kind for its in several(descriptions)))


def list_families(found: list[dict[str, Any]]) -> str:
    lines = []
    for library, members in groupby(sorted(found, key=lambda family: family["library"]), lambda f: f["library"]):
        lines.append(library)
        for family in members:
            lines.append(f"  {family['family'].removeprefix(library).strip():<28} {family['model']}")
            lines += [f"  {'':<28} {other}" for other in family["also in"]]
            rows = {block.rpartition(".")[2]: its for block, its in family["blocks"].items()}
            rows["layers between stages"] = family["between stages"]
            lines += [f"    {name:<26} {', else '.join(its)}" for name, its in rows.items() if its]
        lines.append("")
    lines += explain_kinds()
    lines.append("torchsbp models NAME shows the blocks of a model; docs/adapters.md says how to add your own.")
    return "\n".join(lines)


def explain_kinds() -> Iterator[str]:
    """What each kind means, and the attention rules that all descriptions of it have."""
    described = [one for adapter in ADAPTERS for its in adapter.blocks.values() for one in several(its)]
    for kind, meaning in {its.kind: its.meaning for its in described}.items():
        rules = [rule for rule in RULES if all(rule in its.rules for its in described if its.kind == kind)]
        yield f"{kind}: {meaning}; attention rules of all: {', '.join(rules)}" if rules else f"{kind}: {meaning}"


def examine(model: nn.Module) -> dict[str, Any]:
    """What ``apply`` finds in a model, block by block; nothing is changed."""
    backbones: list[dict[str, Any]] = [
        {
            "name": name,
            "family": adapter.name,
            "model": qualified(module),
            "blocks": list(blocks(module, adapter, layout)),
            "recommended": adapter.recommended_for(module)._asdict(),
        }
        for name, module, adapter, layout in find_backbones(model)
    ]
    refused = any(block["problems"] for backbone in backbones for block in backbone["blocks"])
    return {
        "supported": bool(backbones) and not refused,
        "model": qualified(model),
        "block classes": block_classes(model),
        "backbones": backbones,
    }


def blocks(model: nn.Module, adapter: Adapter, layout: Layout) -> Iterator[dict[str, Any]]:
    """Blocks and layers between stages. Problems don't name their block, so that similar blocks have equal ones."""
    for place in survey(model, adapter, layout, resolved(SBPConfig(), adapter.recommended_for(model))):
        yield {
            "name": place.name,
            "class": bare_name(place.module),
            "kind": place.description.kind,
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
        lines += [f"{name} is not supported:", *reasons] if reasons else list(recommendations(backbone["recommended"]))
    return "\n".join(lines)


def recommendations(recommended: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines that say what the presets of these names mean for the family."""
    for preset, options in recommended.items():
        told = ", ".join(f"{option}={value}" for option, value in options.items())
        yield f"  {preset}: {told}{EXACT if options['keep_ratio'] == 1 else ''}"


def group(found: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Neighbouring blocks that are alike, as one line: their names, their class, and how they are run."""

    def fate(block: dict[str, Any]) -> tuple[str, str]:
        taken = f"{block['kind']}, {'sampled' if block['sampled'] else 'exact'}"
        return block["class"], "refused" if block["problems"] else taken

    for alike, same in groupby(found, fate):
        names = [block["name"] for block in same]
        yield names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})", *alike
