"""Write every table, figure and marked number of docs/study from benchmarks/results.

    python benchmarks/study_page.py            # writes pages and figures
    python benchmarks/study_page.py --check    # says what would change, and fails if anything would

What is made, a whole table or a number in a sentence, stands between two marks of a page:

    <!-- made: table cifar10 contest --> … <!-- /made -->
    <!-- made: epochs hybrid, own rows 0.5, 24 -->−0.29 ± 0.38 (5)<!-- /made -->

The pages of docs/study are written, and the numbers of the contest in the README.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean, variance

import commandline
import equal_time
from case import Row
from torchsbp.cli.study import figures
from torchsbp.report.sheet import sheet
from torchsbp.study import STUDIES, contest, contest_charts, gradients, results, trajectory
from torchsbp.study.arms import FULL

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "study"
FOLDER = ROOT / "docs" / "study"
PLACE = re.compile(r"<!-- made: (.+?) -->(.*?)<!-- /made -->", re.S)
DRAWN = {
    "": ("gradients", "masks", "similarity", "trajectory"),
    "later": ("gradients", "similarity", "trajectory"),
    "chosen": ("gradients",),
    "video": ("similarity",),
    "grids": ("accuracy",),
    "cifar10": ("contest",),
}
"""Folder of results -> studies whose figures the pages show."""
PAPERS = {
    "gradients": "gradients.md", "accuracy": "grids.md", "trajectory": "along-training.md",
    "similarity": "along-training.md", "masks": "along-training.md",
}  # fmt: skip
"""Study -> the page that has its figures."""


@cache
def rows(folder: str) -> tuple[Row, ...]:
    return tuple(results.read(RECORDED / folder.removeprefix("early")))


@cache
def large() -> tuple[Row, ...]:
    """The contest, timed by the steps of large models."""
    trained = [row for row in rows("cifar10") if row["study"] == "contest"]
    return (*trained, *equal_time.speeds(commandline.read(ROOT / "benchmarks" / "results" / "h200.json")))


def table(what: str) -> str:
    """FOLDER STUDY. The folder "early" stands for the results beside the folders."""
    folder, name = what.split()
    return STUDIES[name].table(list(rows(folder)))


def findings(what: str) -> str:
    folder, name = what.split()
    return results.findings_table(STUDIES[name].findings(list(rows(folder))))


def compared(what: str) -> str:
    """All findings of the papers with ours, figure by figure."""
    cells = []
    for folder, names in DRAWN.items():
        for name in names:
            for its in STUDIES[name].findings(list(rows(folder))):
                agrees = {True: "yes", False: "**no**", None: "open"}[its.agrees]
                where = f"[{folder or 'early'}]({PAPERS[name]})"
                cells.append((its.figure, its.paper, its.ours, agrees, where))
    cells.sort(key=lambda cell: (cell[0].startswith("video"), float(re.findall(r"[\d.]+", cell[0])[0]), cell[0]))
    return results.table(("figure", "the paper's finding", "ours", "agrees", "results"), cells)


def tally(what: str) -> str:
    found = [
        its.agrees
        for folder, names in DRAWN.items()
        for name in names
        for its in STUDIES[name].findings(list(rows(folder)))
    ]
    return f"{found.count(True)} agree, {found.count(False)} do not, {found.count(None)} are open"


def tried(what: str) -> str:
    """Every setting that a contest tried, with the accuracy of each seed."""
    cells = [
        (model, arm, f"{lr:g}", f"{depth:g}", length, listed(seeds, length))
        for (model, arm), settings in sorted(contest.tried(list(rows(what))).items())
        for (lr, depth), seeds in sorted(settings.items())
        for length in sorted({length for curve in seeds.values() for length in curve})
    ]
    return results.table(("model", "arm", "rate, times the model's", "stochastic depth", "epochs", "accuracy"), cells)


def listed(seeds: dict[int, contest.Curve], length: int) -> str:
    return ", ".join(f"{curve[length]:.2f}" for _, curve in sorted(seeds.items()) if length in curve)


def signed(values: list[float]) -> str:
    return results.difference(values).replace("-", "−")


def epochs(what: str) -> str:
    """MODEL, ARM, EPOCHS: the difference to full backpropagation. An arm's name may have commas."""
    model, arm, length = parts(what)
    return signed(contest.pairs_of(contest.curves(list(rows("cifar10"))), model, arm)[int(length)])


def timed(of: Callable[[], tuple[Row, ...]]) -> Callable[[str], str]:
    """Return a maker of MODEL, ARM, BUDGET against BAR: the difference to another arm at equal time."""

    def made(what: str) -> str:
        what, _, bar = what.partition(" against ")
        model, arm, budget = parts(what)
        fits = contest.at_equal_time(list(of()))
        (mine,) = (its for its in fits if (its.model, its.arm, f"{its.budget:.1f}") == (model, arm, budget))
        return signed(contest.against(fits, mine, bar))

    return made


def paired(folder: str) -> Callable[[str], str]:
    """Return a maker of MODEL, ARM, EPOCHS against BAR [at EPOCHS]: the difference to another arm, over seeds that both
    have, after as many epochs unless others are given."""

    def made(what: str) -> str:
        what, _, bar = what.partition(" against ")
        model, arm, length = parts(what)
        bar, _, other_length = bar.partition(" at ")
        found = contest.curves(list(rows(folder)))
        mine, other = (
            {seed: curve[int(after)] for seed, curve in found[model, its].items() if int(after) in curve}
            for its, after in ((arm, length), (bar, other_length or length))
        )
        return signed([mine[seed] - other[seed] for seed in sorted(mine) if seed in other])

    return made


def reached(what: str) -> str:
    """MODEL, ARM, EPOCHS: the mean accuracy."""
    model, arm, length = parts(what)
    seeds = contest.curves(list(rows("cifar10")))[model, arm]
    return f"{mean(curve[int(length)] for curve in seeds.values() if int(length) in curve):.1f}"


def weights(what: str) -> str:
    """FOLDER MODEL: the accuracy of the weights at which neighbours or gradients were compared."""
    folder, model = what.split()
    studies = ("similarity", "gradients")
    found = (row for name in studies for row in results.of(rows(folder), name, "accuracy") if row["model"] == model)
    return f"{next(found)['accuracy']:.1f}"


def along(what: str) -> str:
    """FOLDER MODEL, ARM, KEY: at the end, "weights" is the cosine of all weights with full's, else the row's KEY."""
    folder, _, rest = what.partition(" ")
    model, arm, key = parts(rest)
    last = trajectory.series(list(rows(folder)))[model, arm][-1]
    return f"{last['weights']['all']:.2f}" if key == "weights" else f"{last[key]:.1f}"


def bound(what: str) -> str:
    """MODEL, ARM, EPOCHS: the most accuracy that the arm may cost, the far end of the interval."""
    model, arm, length = parts(what)
    pairs = contest.pairs_of(contest.curves(list(rows("cifar10"))), model, arm)[int(length)]
    return f"{(results.interval(pairs) or 0) - mean(pairs):.2f}"


def deviation(what: str) -> str:
    """The standard deviation of paired differences, pooled over arms and lengths with at least 5 pairs."""
    found = contest.curves(list(rows("cifar10")))
    pairs = [its for model, arm in found if arm != FULL for its in contest.pairs_of(found, model, arm).values()]
    return f"{mean(variance(its) for its in pairs if len(its) >= 5) ** 0.5:.2f}"


def gradient(what: str) -> str:
    """FOLDER MODEL, ARM, KEY: the mean over layers; "error" is bias and variance together."""
    folder, _, rest = what.partition(" ")
    model, arm, key = parts(rest)
    values = means(folder, model, arm)
    values["error"] = values["bias"] + values["variance"]
    return f"{values[key]:.2f}" if key == "norm" else f"{values[key]:{'.3f' if key == 'cosine' else '#.2g'}}"


def noise(what: str) -> str:
    """FOLDER MODEL, ARM: what the arm adds to the noise of batches, as the mean over layers in percent."""
    folder, _, rest = what.partition(" ")
    model, _, arm = rest.partition(", ")
    return f"{100 * mean(gradients.shares(compared_at(folder, model, arm)).values()):.1f}"


def compared_at(folder: str, model: str, arm: str) -> Row:
    found = results.of(rows(folder), "gradients", "layers")
    (row,) = (its for its in found if (its["model"], its["arm"]) == (model, arm))
    return row


def means(folder: str, model: str, arm: str, ends: tuple[str, ...] = ("",)) -> dict[str, float]:
    """The numbers of gradients.KEYS, as means over the layers whose names end like that."""
    row = compared_at(folder, model, arm)
    layers = [values for name, values in row["layers"].items() if name.endswith(ends)]
    return dict(zip(gradients.KEYS, map(mean, zip(*layers, strict=True)), strict=True))


def matrices(what: str) -> str:
    """ARM: the variance in the matrices of a ConvNeXt's MLPs, relative to the arm "down exact, own rows 0.5"."""
    mine, other = (
        means("chosen", "convnext", arm, ("mlp.fc1", "mlp.fc2"))["variance"]
        for arm in (what, "down exact, own rows 0.5")
    )
    return f"{mine / other:.2f}"


def parts(what: str) -> tuple[str, str, str]:
    model, _, rest = what.partition(", ")
    arm, _, last = rest.rpartition(", ")
    return model, arm, last


MADE: dict[str, Callable[[str], str]] = {
    "table": table,
    "findings": findings,
    "compared": compared,
    "tally": tally,
    "tried": tried,
    "equal-epochs": lambda what: contest.equal_epochs(list(rows(what))),
    "equal-time": lambda what: contest.equal_time(list(rows(what))),
    "large-time": lambda what: contest.equal_time(list(large())),
    "epochs": epochs,
    "own-clock": timed(lambda: rows("cifar10")),
    "large-clock": timed(large),
    "pair": paired("cifar10"),
    "small-pair": paired("small"),
    "reached": reached,
    "weights": weights,
    "along": along,
    "bound": bound,
    "deviation": deviation,
    "gradient": gradient,
    "noise": noise,
    "matrices": matrices,
}
"""The first word of a mark -> the function that makes the text from the rest of the mark."""


def made(mark: re.Match[str]) -> str:
    kind, _, what = mark[1].partition(" ")
    text, line = MADE[kind](what), "\n" if mark[2].startswith("\n") else ""
    return f"<!-- made: {mark[1]} -->{line}{text}{line}<!-- /made -->"


def pages() -> dict[Path, str]:
    """Page -> the text that it should have."""
    return {path: PLACE.sub(made, path.read_text()) for path in (*sorted(FOLDER.glob("*.md")), ROOT / "README.md")}


def drawings() -> dict[Path, str]:
    """File -> figure."""
    found = {
        FOLDER / (file.replace(".svg", f"_{folder}.svg") if folder else file): drawn
        for folder, names in DRAWN.items()
        for name in names
        for file, drawn in figures(name, list(rows(folder))).items()
    }
    found[FOLDER / "contest_large.svg"] = sheet(contest_charts.in_time(list(large()), "large models' clock"))
    return found


def changed() -> dict[Path, str]:
    """The files that differ from the results, with the text that they should have."""
    wanted = pages() | drawings()
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    check = parser.parse_args().check
    found = changed()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} {'differs' if check else 'written'}")
        if not check:
            path.write_text(text)
    if check and found:
        sys.exit("run python benchmarks/study_page.py")


if __name__ == "__main__":
    main()
