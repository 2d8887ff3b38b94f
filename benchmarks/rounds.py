"""Measure two commits in turns: is a difference in speed more than noise?

    git worktree add --detach ../before COMMIT
    python benchmarks/rounds.py --trees ../before . --models swin_tiny --modes compiled --out rounds.json

Every case of every tree is prepared in a process of its own, all at the same time. Then they are measured one at a
time, round after round, the trees in turn. The time of a step that waits for launches varies from round to round; the
time that the GPU is busy (last column, from the profiler) does not.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import commandline
from case import Row, Setting

WORKER = """
import json, sys
import case
setting = case.Setting(**json.loads(sys.argv[1]))
work = case.Case(setting)
work.steps(2)
case.release()
print("{}", flush=True)
for word in sys.stdin:
    row = case.measure(work) if word.strip() == "measure" else {"profile": case.profile(work)}
    print(json.dumps(row), flush=True)
"""


class Worker:
    """One case with the sources and the benchmarks of one tree."""

    def __init__(self, tree: Path, setting: Setting) -> None:
        self.tree, self.setting, self.rounds = tree, setting, list[Row]()
        paths = os.pathsep.join(str(tree.resolve() / folder) for folder in ("src", "benchmarks"))
        environment = os.environ | {
            "PYTHONPATH": paths,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-c", WORKER, json.dumps(asdict(setting))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def listen(self) -> dict[str, Any] | None:
        """The next answer; None when the process has ended (its error is printed above)."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer = self.listen()
        if answer is None:
            raise SystemExit(f"{self.tree}: {self.setting.names} ended")
        return answer

    def row(self) -> Row:
        """The times of all rounds, the smallest time and peak, and the profile of one more step."""
        profile = self.ask("profile")["profile"]
        rounds = [round(row["step ms"], 3) for row in self.rounds]
        peak = {"peak MiB": min(row["peak MiB"] for row in self.rounds)} if "peak MiB" in self.rounds[0] else {}
        busy = {"busy ms": float(profile.split()[0]), "kernels": int(profile.split()[4])}
        return {
            "tree": self.tree.name or ".",
            **self.setting.names,
            "rounds ms": rounds,
            "step ms": min(rounds),
            **peak,
            **busy,
        }


def show(row: Row) -> str:
    name = f"{row['tree']:<10} {row['model']:<14} {row['mode']:<9} {row['method']:<20}"
    times = "  ".join(f"{time:8.2f}" for time in row["rounds ms"])
    return f"{name} {times} ms   {row.get('peak MiB', 0):8.0f} MiB   busy {row['busy ms']:7.2f} ms"


def main(argv: Sequence[str] | None = None) -> None:
    parser = commandline.parser(__doc__)
    parser.add_argument("--trees", nargs="+", type=Path, required=True, help="checkouts of the repository")
    parser.add_argument("--modes", nargs="+", default=["compiled"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int)
    args: argparse.Namespace = parser.parse_args(argv)
    workers = [Worker(tree, setting) for setting in commandline.settings(args) for tree in args.trees]
    try:
        ready = [worker for worker in workers if worker.listen() is not None]
        for turn in range(args.rounds):
            for worker in ready:
                worker.rounds.append(worker.ask("measure"))
            print(f"round {turn + 1} of {args.rounds}", flush=True)
        rows = []
        for worker in ready:
            rows.append(worker.row())
            commandline.write(args, rows)
            print(show(rows[-1]), flush=True)
    finally:
        for worker in workers:
            worker.process.kill()


if __name__ == "__main__":
    main()
