"""Run the tests that need a GPU, in several processes at once.

    python benchmarks/cuda_tests.py --jobs 16 --limit 240 --out cuda_tests.json

Prints how many passed, failed or were not done in time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import commandline

OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
LINE = re.compile(rf"^(\S*::.*?) ({'|'.join(OUTCOMES)})\b")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=")


def collected(where: Sequence[str], marked: str) -> list[str]:
    """The names of tests with that mark. Those that compile come first, as they take longest."""
    call = [*PYTEST, "--collect-only", "-q", "-m", marked, *where]
    lines = subprocess.run(call, capture_output=True, text=True).stdout.splitlines()
    return sorted((line for line in lines if "::" in line), key=lambda name: "compiled" not in name)


def run(names: Sequence[str], jobs: int, limit: float) -> tuple[dict[str, str], str]:
    """The outcome of every test, and the output of the processes in which tests failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    end = time.monotonic() + limit
    processes = [
        subprocess.Popen(
            [*PYTEST, "-v", "--tb=short", *names[i::jobs]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for i in range(min(jobs, len(names)))
    ]  # fmt: skip
    said = []
    for process in processes:
        try:
            said.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[0])
    outcomes = dict.fromkeys(names, "NOT DONE")
    for line in "\n".join(said).splitlines():
        if found := LINE.match(line):
            outcomes[found[1]] = found[2]
    return outcomes, "\n".join(text for text in said if "FAILURES" in text or "ERROR" in text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", default=["tests"], help="files or folders")
    parser.add_argument("--marked", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--limit", type=float, default=600, help="seconds for all, finding them included")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="to be recorded")
    parser.add_argument("--commit", default="", help="commit to record, instead of what git says")
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes")
    args = parser.parse_args(argv)
    args.bf16 = True
    begun = time.monotonic()
    names = collected(args.where, args.marked)
    outcomes, texts = run(names, args.jobs, args.limit - (time.monotonic() - begun))
    if texts:
        print(texts, flush=True)
    kinds = [*OUTCOMES, "NOT DONE"]
    counts = {kind.lower(): sum(outcome == kind for outcome in outcomes.values()) for kind in kinds}
    others = {name: outcome for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR", "NOT DONE")}
    for name, outcome in others.items():
        print(f"{outcome}: {name}")
    seconds = time.monotonic() - begun
    print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count), f"{seconds:.0f} s")
    if args.out:
        result = commandline.environment(args) | {"seconds": round(seconds), "counts": counts, "others": others}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
