from torchsbp.cli.main import main
from torchsbp.study import results

TOY = ["--size", "toy", "--eager", "--batch", "16", "--jobs", "0"]


def study(name, data, out, *more):
    return main(["study", name, "--data", str(data), "--out", str(out), *TOY, *more])


def rows_of(name, out):
    return [row for row in results.read(out) if row["study"] == name]
