"""``torchsbp plan``: what it tried, and what it needs itself."""

import json
import subprocess
import sys

from .commands import SHALLOW, SMALL, run


def test_plan_prints_what_it_tried(capsys):
    status, out, _ = run(capsys, "plan", *SMALL, "--memory", "1GiB")
    assert status == 0
    assert "full" in out
    assert "← chosen" in out
    assert "largest batch with it: " in out
    assert "can't patch" not in out


def test_a_plan_says_that_a_model_can_not_be_patched(capsys):
    _, out, _ = run(capsys, "plan", "resnet18", "--batch", "2", "--size", "64", "--memory", "1GiB")
    assert out.endswith("\ntorchsbp can't patch this model: torchsbp models resnet18 says why\n")


def test_plan_for_a_given_configuration_as_json(capsys):
    _, out, _ = run(capsys, "plan", *SHALLOW, "--memory", "1GiB", "--keep-ratio", "0.5", "--blocks", "1", "--json")
    found = json.loads(out)
    assert found["options"] == {"keep_ratio": 0.5, "blocks": 1.0}
    assert found["largest_batch"] > 4


def test_vit_base_needs_little_memory_of_its_own():
    """In a process of its own: less than 2 GiB resident, exit status 0. (getrusage would count who began it.)"""
    code = (
        "import re, sys\nfrom torchsbp.cli.main import main\n"
        "status = main(['plan', 'vit_base_patch16_224', '--memory', '16GiB', '--batch', '64'])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "largest batch with it: " in done.stdout
    kilobytes = int(done.stdout.splitlines()[-1])
    assert kilobytes < 2 * 2**20


def test_a_detector_is_not_said_to_fit(capsys):
    detector = ("torchvision/fasterrcnn_mobilenet_v3_large_320_fpn", "--batch", "1", "--size", "128")
    status, out, _ = run(capsys, "plan", *detector, "--memory", "8GiB")
    assert status == 0
    assert "or more: not known whether it fits  ← chosen" in out
    assert "Only backbone is covered" in out
    assert "largest batch with it" not in out
    _, out, _ = run(capsys, "plan", *detector, "--memory", "8GiB", "--json")
    assert json.loads(out)["largest_batch"] is None
    _, out, _ = run(capsys, "profile", *detector, "--methods", "full", "--predict")
    assert [line for line in out.splitlines() if line.startswith("peak, or more")]
    assert "Activations are those of backbone alone" in out


def test_the_largest_batch_by_configuration(capsys):
    status, out, _ = run(capsys, "plan", *SHALLOW, "--memory=300MiB", "--largest-batch", "--json")
    assert status == 0
    found = json.loads(out)
    batches = {its["config"]: its["batch"] for its in found["largest"]}
    assert list(batches)[::2] == ["full", "checkpoint", "sbp query r=0.5, all blocks, recomputed"]
    assert batches["full"] < batches["exact lean, recomputed"]
    assert batches["full"] < batches["sbp query r=0.5, recomputed"]
    assert all(its["predicted"] <= found["usable"] == int(0.9 * found["memory"]) for its in found["largest"])
    _, out, _ = run(capsys, "plan", *SHALLOW, "--memory=300MiB", "--largest_batch", "--keep_ratio=0.25")
    title, line = out.splitlines()
    name, about = title.split(", ", 1)
    assert name == "tests.cli.commands:shallow"
    assert about == "160×160, bf16, adamw: the largest batch in 300 MiB, of which 270 MiB may be allocated"
    assert line.split()[:2] == ["sbp", "query"]
    assert line.endswith(" MiB predicted")


def test_memory_must_be_given_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = run(capsys, "plan", *SMALL)
    assert status == 2
    assert "there is no GPU here: say how much memory yours has, such as --memory 16GiB" in err
