"""The contest at equal time, with the steps of large models: python benchmarks/equal_time.py CONTEST H200.json

The contest's models are small, so that many can be trained. Their steps are hundreds of kernels that hardly fill a GPU,
so fewer rows make them little shorter. To see what sampling gains on a full GPU, this takes the accuracy of the contest
after as many epochs as fit into a time, given the relative step times of a large model of the same family.
"""

import argparse
from pathlib import Path

import commandline
from case import Row
from torchsbp.study import contest, results

LARGE = {
    ("hybrid", "vit_base"): {
        "full": "full",
        "exact": "exact, lean (r=1)",
        "checkpoint": "checkpoint",
        "own rows 0.5": "own rows r=0.5",
        "own rows 0.25": "own rows r=0.25, 9 of 12 blocks",
        "own norm rows 0.5": "norm rows r=0.5",
        "own norm rows 0.25": "norm rows r=0.25",
        "own norm rows decreasing": "norm rows r=0.5 to 0.125",
        "own norm rows, all": "norm rows r=0.75 to 0.125, all blocks",
        "own norm rows, all, few": "norm rows r=0.5 to 0.0625, all blocks",
    },
    ("convnext", "convnext_tiny"): {
        "full": "full",
        "exact": "exact, lean (r=1)",
        "checkpoint": "checkpoint",
        "down exact, own rows 0.5": "own rows r=0.5",
        "own norm rows 0.5": "norm rows r=0.5",
    },
    ("swin", "swin_tiny"): {
        "full": "full",
        "exact": "exact, lean (r=1)",
        "own rows 0.5": "own rows r=0.5",
        "own norm rows 0.5": "norm rows r=0.5",
    },
}
"""(model of the contest, large model) -> arm -> method, left out if it was not measured. "own rows 0.25" keeps a
quarter in 5 of the contest's 7 blocks, which corresponds to 9 of 12."""


def speeds(rows: list[Row]) -> list[Row]:
    """Rows as of ``torchsbp study speed``, with compiled steps of the large model in place of the small one's. A
    method's time is that of full backprop divided by its speed, the ratio of both in one run."""
    found = {(row["model"], row["method"]): row for row in rows if row["mode"] == "compiled"}
    return [
        {
            "study": "speed", "run": f"{model}, {arm}", "model": model, "arm": arm, "steps": 1,
            "ms": found[large, "full"]["step ms"] / found[large, method]["speed"],
            "peak_bytes": found[large, method]["memory"],
        }
        for (model, large), arms in LARGE.items()
        for arm, method in arms.items()
        if (large, method) in found
    ]  # fmt: skip


def table(studied: list[Row], rows: list[Row]) -> str:
    trained = [row for row in studied if row["study"] == "contest"]
    return contest.equal_time([*trained, *speeds(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contest", type=Path, help="folder of a contest")
    parser.add_argument("rows", type=Path, help="JSON file of benchmarks/run.py")
    args = parser.parse_args()
    print(table(results.read(args.contest), commandline.read(args.rows)))


if __name__ == "__main__":
    main()
