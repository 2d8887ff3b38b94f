"""The command line, end to end on small models."""

import json
import subprocess
import sys

import pytest

from torchsbp import cli

SMALL = ("test_vit", "--batch", "4")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    return status, *capsys.readouterr()


def test_help_lists_the_commands(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    assert all(name in out and command.purpose in out for name, command in cli.COMMANDS.items())


def test_profile_prints_a_table(capsys):
    status, out, _ = run(capsys, "profile", *SMALL, "--keep-ratio", "0.25", "--recompute", "0.5", "--predict")
    assert status == 0
    assert out.startswith("test_vit, batch 4, 160×160, bf16, adamw: predicted for a CUDA device\n")
    lines = out.splitlines()
    assert lines[2].split("  ")[-1] == "sbp query r=0.25, 50% recomputed"
    names = [line.split("  ")[0] for line in lines]
    assert [n for n in names if n in ("parameters", "gradients", "optimizer state", "saved activations", "peak")]
    assert "saved by block" in lines


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_profile_says_that_it_predicts(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--methods", "full")
    assert "predicted for a CUDA device; there is none here to measure on" in out


@pytest.mark.cuda
@pytest.mark.skipif("not __import__('torch').cuda.is_available()")
def test_profile_measures_on_cuda(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--json")
    found = json.loads(out)
    assert found["measured"]
    assert all(its["peak"] > 0 for its in found["measurements"].values())


def test_profile_as_json(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--methods", "full", "sbp", "--json", "--predict")
    found = json.loads(out)
    assert list(found["predicted"]) == ["full", "sbp query r=0.5, recomputed"]
    full, sbp = found["predicted"].values()
    assert full["saved_bytes"] > sbp["saved_bytes"]
    assert full["input_shape"] == [4, 3, 160, 160]


@pytest.mark.parametrize("name, begin", [("chart.png", b"\x89PNG"), ("deep/chart.svg", b"<?xml")])
def test_profile_draws_a_chart(capsys, tmp_path, name, begin):
    pytest.importorskip("matplotlib")
    status, out, _ = run(
        capsys, "profile", *SMALL, "--methods", "full", "sbp", "--out", str(tmp_path / name), "--predict"
    )
    assert status == 0
    assert f"chart: {tmp_path / name}" in out
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert (tmp_path / name).stat().st_size > 10_000


def test_a_model_without_sbp_is_profiled_without_it(capsys):
    status, out, _ = run(capsys, "profile", "torchvision/resnet18", "--size", "64", "--batch", "4", "--predict")
    assert status == 0
    assert "sbp query r=0.5, recomputed is left out: nothing to patch in torchvision.models.resnet.ResNet" in out
    assert "layer1.0" in out


def test_plan_prints_what_it_tried(capsys):
    status, out, _ = run(capsys, "plan", *SMALL, "--memory", "1GiB")
    assert status == 0
    assert "full" in out
    assert "← chosen" in out
    assert "largest batch with it: " in out


def test_plan_for_a_given_configuration_as_json(capsys):
    _, out, _ = run(capsys, "plan", *SMALL, "--memory", "1GiB", "--keep-ratio", "0.5", "--blocks", "1", "--json")
    found = json.loads(out)
    assert found["options"] == {"keep_ratio": 0.5, "blocks": 1.0}
    assert found["largest_batch"] > 4


@pytest.mark.parametrize(
    "argv, message",
    [
        (["profile", "vit_bas_patch16_224"], "unknown model 'vit_bas_patch16_224' in timm and torchvision; did you"),
        (["profile", "torchvision/test_vit"], "unknown model 'test_vit' in torchvision"),
        (["profile", "jax/vit"], "unknown library 'jax' in 'jax/vit'; known: timm, torchvision"),
        (["profile", "test_vit", "--size", "8"], "the model refuses an input of shape [64, 3, 8, 8]"),
        (["profile", "torchvision/vit_b_16", "--size", "100"], "torchvision can't build vit_b_16 with {'image_size'"),
        (["profile", "test_vit", "--out", "chart.jpg"], "'chart.jpg' is not allowed as a chart; allowed: a file name"),
        (["profile", "test_vit", "--keep-ratio", "2"], "keep_ratio must be a number in (0, 1]"),
        (["profile", "resnet18", "--size", "64", "--methods", "sbp"], "nothing to patch in timm.models.resnet.ResNet"),
        (["plan", "test_vit", "--memory", "16 gigs"], "size '16 gigs' is not understood; write a number and a unit"),
        (["plan", "test_vit", "--memory", "10MiB"], "does not fit in 10.0 MiB (9.0 MiB without the headroom)"),
        (["nonsense"], "unknown command 'nonsense'"),
    ],
)  # fmt: skip
def test_misuse_is_told_in_one_message(capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["plan", "test_vit"], "the following arguments are required: --memory"),
        (["profile", "test_vit", "--batch", "0"], "'0' is not a whole number above 0"),
        (["profile", "test_vit", "--recompute", "some"], "'some' is not true, false or a number from 0 to 1"),
        (["profile", "test_vit", "--methods", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_wrong_arguments_are_told(capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_vit_base_needs_little_memory_of_its_own():
    """In a process of its own: less than 2 GiB resident, exit status 0."""
    code = (
        "import resource, sys\nfrom torchsbp.cli import main\n"
        "status = main(['plan', 'vit_base_patch16_224', '--memory', '16GiB', '--batch', '64'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "largest batch with it: " in done.stdout
    kilobytes = int(done.stdout.splitlines()[-1])
    assert kilobytes < 2 * 2**20
