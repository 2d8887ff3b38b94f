"""The masks of five steps: which positions are kept, and how soon every position has been kept once."""

from collections.abc import Iterator

import torch

from ..patching.apply import apply, kept
from ..report.charts import WIDTH, Drawing, tick_text
from . import results
from .models import build
from .plan import Plan
from .results import Finding
from .training import Place, Row, Run, Settings

SIDE, STEPS, SAMPLERS = 14, 5, ("grid", "random")


def jobs(plan: Plan) -> list[Run]:
    return [Run("vit", sampler) for sampler in SAMPLERS]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield one row: the kept patches of every step, at a keep-ratio of one half."""
    model = build("vit", "toy", 4 * SIDE, 10).train()
    apply(model, keep_ratio=0.5, sampler=run.arm)
    steps = []
    for _ in range(STEPS):
        model(torch.zeros(1, 3, 4 * SIDE, 4 * SIDE))
        steps.append((next(iter(kept(model).values()))[0, 1:] - 1).tolist())
    yield {"kept": steps}


def seen(row: Row, steps: int) -> float:
    """The share of positions that were kept in at least one of the first ``steps`` steps."""
    return len({position for its in row["kept"][:steps] for position in its}) / SIDE**2


def table(rows: list[Row]) -> str:
    cells = [
        (row["arm"], *(f"{seen(row, steps):.3f}" for steps in range(1, STEPS + 1)))
        for row in results.of(rows, "masks", "kept")
    ]
    return results.table(("sampler", *(f"seen after {steps}" for steps in range(1, STEPS + 1))), cells)


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    return {"": [drawing(row) for row in results.of(rows, "masks", "kept")]}


def drawing(row: Row) -> Drawing:
    """The masks of all steps side by side, kept patches filled."""
    parts, cell, gap = [], 6.5, 9
    left = (WIDTH - STEPS * SIDE * cell - (STEPS - 1) * gap) / 2
    for number, positions in enumerate(row["kept"]):
        start = left + number * (SIDE * cell + gap)
        places = ((start + position % SIDE * cell, 4 + position // SIDE * cell) for position in positions)
        squares = "".join(f"M{x:g},{y:g}h{cell}v{cell}h-{cell}z" for x, y in places)
        parts.append(f'<rect class="frame" x="{start}" y="4" width="{SIDE * cell}" height="{SIDE * cell}"/>')
        parts.append(f'<path class="bar c0" d="{squares}"/>')
        parts.append(tick_text(start + SIDE * cell / 2, SIDE * cell + 20, f"step {number + 1}", "middle"))
    unit = f"kept patches of {SIDE} × {SIDE}, in colour"
    return Drawing(f"{row['arm']} masks, half kept", unit, parts, round(SIDE * cell) + 26)


def findings(rows: list[Row]) -> list[Finding]:
    found = {row["arm"]: row for row in results.of(rows, "masks", "kept")}
    if set(found) < set(SAMPLERS):
        return []
    texts = [
        f"{sampler}: {100 * seen(row, 2):.0f} % after 2 steps, {100 * seen(row, 5):.0f} % after 5"
        for sampler, row in found.items()
    ]
    paper = "grid masks can have visited all positions after two steps, random ones have not"
    return [Finding("7", paper, "; ".join(texts), seen(found["grid"], 2) == 1 > seen(found["random"], 2))]
