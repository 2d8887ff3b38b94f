"""Check sums: a byte that changed on its way is found, wherever it is; what has none is read as before."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from torchsbp.errors import CheckpointError
from torchsbp.train.runs import checkpoint
from torchsbp.train.runs.checkpoint import Folder, read, read_run
from torchsbp.train.runs.checks import TRAILER
from torchsbp.train.runs.weights import export, read_weights

from .runs import evaluate, final, run, same
from .test_tasks import RECORDED

DAMAGED = "is damaged: its content does not have the check sum it was written with"
CONTENT = {"progress": {"step": 3}, "model": {"weight": torch.arange(3000.0)}}


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.unlink()  # best.pt may be the same file
    path.write_bytes(data)


def places(path: Path) -> dict[str, list[int]]:
    """Offsets of each kind in a checkpoint: a part's header, tensors, the directory, the trailer."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as parts:
        tensors = [its for its in parts.infolist() if "/data/" in its.filename]
        tensor = max(tensors, key=lambda its: its.file_size)
        directory = parts.start_dir
    end = tensor.header_offset + tensor.file_size
    return {
        "header": [0, 5, 40, tensor.header_offset + 3, tensor.header_offset + 20],
        "tensor": [*range(tensor.header_offset + 200, end, 777), end - 1],
        "directory": [directory, directory + 17, directory + 60, size - TRAILER - 10, size - TRAILER - 1],
        "trailer": [size - TRAILER, size - TRAILER + 4, size - 32, size - 1],
    }


@pytest.mark.parametrize("kind", ["header", "tensor", "directory", "trailer"])
@pytest.mark.parametrize("bits", [0xFF, 1])
def test_a_flipped_byte_of_a_checkpoint_is_found(tmp_path, kind, bits):
    Folder(tmp_path / "good", 2).save(CONTENT, 3, False)
    good = tmp_path / "good" / "step-0000000003.pt"
    assert same(read_run(good)["model"], CONTENT["model"])
    for offset in places(good)[kind]:
        bad = Path(shutil.copy(good, tmp_path / "bad.pt"))
        flip(bad, offset, bits)
        with pytest.raises(CheckpointError, match=DAMAGED):
            read_run(bad)


def test_a_lost_trailer_is_found(tmp_path):
    Folder(tmp_path, 2).save(CONTENT, 3, False)
    path = tmp_path / "step-0000000003.pt"
    path.write_bytes(path.read_bytes()[:-TRAILER])
    with pytest.raises(CheckpointError, match=DAMAGED):
        read(path)


def test_older_checkpoints_are_read_and_checked_part_by_part(tmp_path):
    path = Path(shutil.copy(RECORDED / "step-0000000006.pt", tmp_path))
    content = read_run(path)
    assert (content["format"], content["progress"]["step"]) == (checkpoint.UNCHECKED, 6)
    for offset in places(path)["tensor"][:3]:
        bad = Path(shutil.copy(path, tmp_path / "bad.pt"))
        flip(bad, offset)
        with pytest.raises(CheckpointError, match=DAMAGED):
            read_run(bad)


def test_files_of_others_are_read(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "new.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        assert torch.equal(read_weights(tmp_path / name)["weight"], torch.ones(2))


def test_a_flipped_byte_of_safetensors_is_found(tmp_path):
    good = tmp_path / "good.safetensors"
    export({"weight": torch.arange(3000.0)}, good, {"step": 3, "config": {"out": "run", "name": 'a "quoted" one'}})
    assert torch.equal(read_weights(good)["weight"], torch.arange(3000.0))
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = range(8 + length, len(data), 997)
    for offset in (0, 1, 7, *range(8, 8 + length, 3), data.index(b"checked"), *tensors, len(data) - 1):
        for bits in (0xFF, 1):
            bad = Path(shutil.copy(good, tmp_path / "bad.safetensors"))
            flip(bad, offset, bits)
            with pytest.raises(CheckpointError, match=r"is damaged|can't be read"):
                read_weights(bad)


def test_safetensors_of_others_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "plain.safetensors")
    assert torch.equal(read_weights(tmp_path / "plain.safetensors")["weight"], torch.ones(2))


def test_a_damaged_checkpoint_is_told_and_the_one_before_continues(tmp_path, capsys):
    """The run ends where it would have: not with the damaged weights."""
    code, out = run(tmp_path)
    assert code == 0
    whole = final(out)
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    flip(newest, places(newest)["tensor"][1])
    capsys.readouterr()
    assert run(tmp_path, "--resume=auto")[0] == 0
    told = capsys.readouterr().err
    assert f"{newest} {DAMAGED}; trying the one before" in told
    assert "at step 18 of 20" in told
    assert same(final(out), whole)


def test_a_damaged_best_checkpoint_is_not_evaluated(tmp_path, capsys):
    _, out = run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0")
    best = out / "checkpoints" / "best.pt"
    flip(best, places(best)["tensor"][0])
    assert evaluate([str(out)]) == 1
    assert f"error: {best} {DAMAGED}" in capsys.readouterr().err
