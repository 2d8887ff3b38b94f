"""Studies of the method, built on the public API. Each is a module; ``Study`` says of what parts."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..report.charts import Drawing
from . import accuracy, contest, contest_charts, gradients, masks, similarity, speed, trajectory
from .plan import Plan
from .results import Finding
from .training import Place, Row, Run, Settings


def none(rows: list[Row]) -> list[Finding]:
    """For a study that has no counterpart in the papers."""
    return []


class Study(NamedTuple):
    """The parts of a study.

    - ``jobs``: the runs that a plan asks for; ``work``: does one run and yields its rows.
    - ``table``, ``drawings`` (keyed by a suffix of the file name) and ``findings`` are made from all rows of a folder.
    - ``at_trained_weights``: its runs start from trained weights, which are made first.
    """

    jobs: Callable[[Plan], list[Run]]
    work: Callable[[Run, Settings, Place], Iterator[Row]]
    table: Callable[[list[Row]], str]
    drawings: Callable[[list[Row]], dict[str, list[Drawing]]]
    findings: Callable[[list[Row]], list[Finding]] = none
    needs_data: bool = True
    at_trained_weights: bool = False


STUDIES = {
    "accuracy": Study(accuracy.jobs, contest.work, accuracy.table, accuracy.drawings, accuracy.findings),
    "contest": Study(contest.jobs, contest.work, contest.table, contest_charts.drawings),
    "gradients": Study(
        gradients.jobs, gradients.work, gradients.table, gradients.drawings, gradients.findings, at_trained_weights=True
    ),
    "masks": Study(masks.jobs, masks.work, masks.table, masks.drawings, masks.findings, needs_data=False),
    "similarity": Study(
        similarity.jobs, similarity.work, similarity.table, similarity.drawings, similarity.findings,
        at_trained_weights=True,
    ),
    "speed": Study(speed.jobs, speed.work, speed.table, lambda rows: {}),
    "trajectory": Study(trajectory.jobs, trajectory.work, trajectory.table, trajectory.drawings, trajectory.findings),
}  # fmt: skip
