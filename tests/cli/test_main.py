"""The command line: commands are found, mistakes are told in one line, our own keep their traceback."""

import argparse
import subprocess
import sys
import time
from dataclasses import fields

import pytest

import torchsbp
from torchsbp import SBPConfig, errors
from torchsbp.cli import arguments, main, plan
from torchsbp.cli.recipe import find_recipe, recipes
from torchsbp.config import Option, options

from .commands import run


def test_help_lists_the_commands(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    expected = "detect eval export frames models plan predict profile recipe recipes report study targets train"
    assert " ".join(main.commands()) == expected
    assert all(f"  {name} " in out and command.PURPOSE in out for name, command in main.commands().items())


def test_help_and_version_need_no_torch_and_take_less_than_a_second():
    code = "import sys; sys.modules['torch'] = None; from torchsbp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for argv, said in {(): "  train     train from a recipe", ("--version",): torchsbp.__version__}.items():
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
        assert time.perf_counter() - begin < 1


def test_the_version_is_told(capsys):
    assert run(capsys, "--version") == (0, f"torchsbp {torchsbp.__version__}\n", "")


def test_recipes_are_listed_and_printed(capsys):
    status, out, _ = run(capsys, "recipes")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].split() == ["cifar10", "A", "ViT", "of", "12", "blocks,", "64", "patches,", "on", "CIFAR-10."]
    assert [line.split()[0] for line in lines[:-2]] == recipes()
    assert "torchsbp recipe NAME > my.yaml" in lines[-1]
    status, out, _ = run(capsys, "recipe", "imagenet/study")
    assert (status, out) == (0, find_recipe("imagenet/study").read_text())
    status, out, err = run(capsys, "recipe", "nothing")
    assert (status, out) == (2, "")
    assert "no recipe 'nothing': neither a file nor one of cifar10, cifar100" in err


def test_help_needs_torch_alone():
    missing = ("timm", "torchvision", "transformers", "jsonargparse", "yaml", "matplotlib", "tqdm")
    code = f"import sys; sys.modules |= dict.fromkeys({missing}); from torchsbp.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  train     train from a recipe" in done.stdout


def test_a_command_is_a_file(capsys, tmp_path, monkeypatch):
    (tmp_path / "greet.py").write_text('PURPOSE = "say hello"\ndef run(argv):\n    print("hello", *argv)\n')
    monkeypatch.setattr("torchsbp.cli.__path__", [*torchsbp.cli.__path__, str(tmp_path)])
    assert run(capsys, "greet", "you") == (0, "hello you\n", "")
    assert "  greet     say hello" in run(capsys)[1]


@pytest.mark.parametrize(
    "error, status, told",
    [
        (errors.UsageError("a ratio of 2"), 2, "torchsbp plan: a ratio of 2\n"),
        (errors.UsageTypeError("a ratio of 'x'"), 2, "torchsbp plan: a ratio of 'x'\n"),
        (errors.RunError("no run"), 1, "error: no run\n"),
        (errors.DataError("Caught …\n  File x\ntorchsbp.errors.DataError: image 3 can't be read"), 1,
         "error: image 3 can't be read\n"),
        (PermissionError(13, "Permission denied"), 1, "error: [Errno 13] Permission denied\n"),
        (errors.SignalError(), 75, "interrupted: everything is saved; continue with --resume auto\n"),
        (ModuleNotFoundError("No module named 'timm'", name="timm"), 2,
         "torchsbp plan: No module named 'timm'; pip install 'torchsbp[train]' has everything\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_what_is_not_our_fault_is_one_message_and_an_exit_code(capsys, monkeypatch, error, status, told):
    monkeypatch.setattr(plan, "run", raising(error))
    assert run(capsys, "plan") == (status, "", told)


@pytest.mark.parametrize(
    "error",
    [ValueError("ours"), TypeError("ours"), KeyError("ours"), ModuleNotFoundError("ours", name="torchsbp.ops.none")],
    ids=lambda error: type(error).__name__,
)
def test_our_own_mistakes_keep_their_traceback(monkeypatch, error):
    monkeypatch.setattr(plan, "run", raising(error))
    with pytest.raises(type(error), match="ours"):
        main.main(["plan"])


def raising(error: Exception):
    def run(argv):
        raise error

    return run


def test_every_option_of_sbp_is_an_option_in_both_spellings_with_help():
    parser = arguments.parser("plan", "")
    by_name = {option: action for action in parser._actions for option in action.option_strings}
    for field in fields(SBPConfig):
        dashed = f"--{field.name.replace('_', '-')}"
        assert by_name[f"--{field.name}"] is by_name[dashed]
        assert len(by_name[dashed].help) > 20
    assert [option.name for option in options()] == [field.name for field in fields(SBPConfig)]
    for spelling in ("--sbp.keep_ratio", "--sbp.keep-ratio"):
        assert arguments.sbp_config(parser.parse_args(["m", spelling, "0.25"])) == SBPConfig(keep_ratio=0.25)
    for name, precision in {"bfloat16": "bf16", "fp16": "fp16", "fp32": "float32"}.items():
        assert parser.parse_args(["m", "--precision", name]).precision == precision
    given = parser.parse_args(["m", "--keep_ratio", "0.25,0.75", "--per-sample", "yes", "--seed", "3"])
    assert arguments.sbp_config(given) == SBPConfig(keep_ratio=(0.25, 0.75), per_sample=True, seed=3)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("keep_ratio", "0.5", 0.5), ("keep_ratio", "0.25, 0.75", [0.25, 0.75]),
        ("blocks", "0.5", 0.5), ("blocks", "1", 1.0), ("blocks", "4", [4]), ("blocks", "4,-1", [4, -1]),
        ("blocks", "blocks.4", ["blocks.4"]), ("blocks", "stages.0.*,4", ["stages.0.*", "4"]),
        ("recompute", "False", False), ("recompute", "yes", True), ("recompute", "0.5", 0.5), ("recompute", "1", 1.0),
        ("sampler", "random", "random"), ("per_sample", "true", True), ("seed", "7", 7),
    ],
)  # fmt: skip
def test_options_are_read_as_their_types(name, text, value):
    (option,) = [option for option in options() if option.name == name]
    found = arguments.reader(option)(text)
    assert found == value
    assert type(found) is type(value)


def test_what_no_type_can_be_is_refused():
    for types, words in {(bool, float): "true, false or a number", (int,): "a whole number"}.items():
        with pytest.raises(argparse.ArgumentTypeError, match=f"'some' is not {words}$"):
            arguments.reader(Option("x", types, ""))("some")


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
        (["plan", "test_vit", "--memory", "8"], "bytes hold no model; did you mean '8GiB'?"),
        (["plan", "test_vit", "--memory", "10MiB", "--keep-ratio", "0.5"],
         "does not fit in 10.0 MiB (9.0 MiB without the headroom)"),
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
        (["plan"], "the following arguments are required: MODEL"),
        (["profile", "test_vit", "--batch", "0"], "'0' is not a whole number above 0"),
        (["profile", "test_vit", "--recompute", "some"], "'some' is not true, false or a number"),
        (["profile", "test_vit", "--methods", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_wrong_arguments_are_told(capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
