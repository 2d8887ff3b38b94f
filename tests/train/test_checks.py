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

from .runs import evaluate, final, lines, run, same
from .test_tasks import RECORDED

DAMAGED = "is damaged: its content does not have the check sum it was written with"
CONTENT = {"progress": {"step": 3}, "model": {"weight": torch.arange(3000.0)}}


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.unlink()  # best.pt may be the same file
    path.write_bytes(data)


def places(path: Path) -> dict[str, list[int]]:
    """Offsets of each kind in a checkpoint: a part's header, the pickle, tensors, the directory, the trailer."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as parts:
        tensors = [its for its in parts.infolist() if "/data/" in its.filename]
        tensor = max(tensors, key=lambda its: its.file_size)
        pickle = next(its for its in parts.infolist() if its.filename.endswith("data.pkl"))
        directory = parts.start_dir
    end = tensor.header_offset + tensor.file_size
    text = pickle.header_offset + 80
    return {
        "header": [0, 5, 40, tensor.header_offset + 3, tensor.header_offset + 20],
        "pickle": [*range(text, text + pickle.file_size - 20, 7)],
        "tensor": [*range(tensor.header_offset + 200, end, 777), end - 1],
        "directory": [directory, directory + 17, directory + 60, size - TRAILER - 10, size - TRAILER - 1],
        "trailer": [size - TRAILER, size - TRAILER + 4, size - 32, size - 1],
    }


@pytest.mark.parametrize("kind", ["header", "pickle", "tensor", "directory", "trailer"])
@pytest.mark.parametrize("bits", [0xFF, 1])
def test_a_flipped_byte_of_a_checkpoint_is_found(tmp_path, kind, bits):
    """And the run goes on from the one before."""
    folder = Folder(tmp_path, 2)
    folder.save(CONTENT, 3, False)
    folder.save(CONTENT, 6, False)
    before, newest = folder.steps()
    assert same(read_run(newest)["model"], CONTENT["model"])
    good = newest.read_bytes()
    for offset in places(newest)[kind]:
        flip(newest, offset, bits)
        told = []
        assert folder.newest(told.append)[0] == before
        assert told == [f"{newest} {DAMAGED}; trying the one before"]
        newest.write_bytes(good)


def test_a_checkpoint_that_was_cut_off_anywhere_is_found(tmp_path):
    folder = Folder(tmp_path, 2)
    folder.save(CONTENT, 3, False)
    folder.save(CONTENT, 6, False)
    before, newest = folder.steps()
    good = newest.read_bytes()
    for length in (0, 1, *(offset for kind in places(newest).values() for offset in kind), len(good) - 1):
        newest.write_bytes(good[:length])
        told = []
        assert folder.newest(told.append)[0] == before
        assert "is damaged" in told[0] or "can't be read: it is truncated" in told[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_takes_no_place_among_the_last(tmp_path, keep):
    """It would have been kept, for its higher step, and those that are written now removed."""
    folder = Folder(tmp_path, keep)
    folder.save(CONTENT, 3, best=True)
    folder.save(CONTENT, 6, False)
    newest = folder.steps()[-1]
    flip(newest, 300)
    path, _ = folder.newest([].append)
    assert path.name == ("best.pt" if keep == 1 else "step-0000000003.pt")
    told = []
    folder.put_aside(path, 3, told.append)
    assert told == [f"{newest} is now aside-{newest.name}: the run goes on from {path.name}"]
    folder.save(CONTENT, 4, False)
    expected = ["step-0000000003.pt", "step-0000000004.pt"][-keep:]
    assert [path.name for path in folder.steps()] == expected
    assert folder.newest(told.append)[0].name == "step-0000000004.pt"
    assert len(told) == 1


def test_without_any_good_checkpoint_nothing_is_put_aside(tmp_path):
    folder = Folder(tmp_path, 2)
    folder.save(CONTENT, 3, best=True)
    flip(tmp_path / "step-0000000003.pt", 300)
    flip(tmp_path / "best.pt", 300)
    told = []
    with pytest.raises(CheckpointError, match=f"none of the 2 checkpoints in {tmp_path} can be read"):
        folder.newest(told.append)
    assert len(told) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-0000000003.pt", "best.pt"}


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
    names = {path.name for path in (out / "checkpoints").iterdir()}
    assert names == {"best.pt", "aside-step-0000000020.pt", "step-0000000018.pt", "step-0000000020.pt"}


def test_with_one_checkpoint_kept_and_damaged_the_best_continues(tmp_path, capsys):
    _, out = run(tmp_path, "--checkpoint.keep=1")
    whole, record = final(out), lines(out)
    (newest,) = (out / "checkpoints").glob("step-*")
    flip(newest, places(newest)["tensor"][1])
    assert run(tmp_path, "--checkpoint.keep=1", "--resume=auto")[0] == 0
    assert f"resumed from {out / 'checkpoints' / 'best.pt'} at step " in capsys.readouterr().err
    assert same(final(out), whole)
    assert lines(out) == record


def test_a_run_that_goes_back_leaves_its_later_checkpoints_aside(tmp_path):
    """A later --resume auto would else continue what was left behind."""
    _, out = run(tmp_path, "--checkpoint.keep=9")
    whole = final(out)
    assert run(tmp_path, f"--resume={out / 'checkpoints' / 'step-0000000009.pt'}", "--checkpoint.keep=2")[0] == 0
    assert same(final(out), whole)
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    steps = (10, 12, 15, 18, 20)
    assert left == [
        *(f"aside-step-{step:010d}.pt" for step in steps), "best.pt", "step-0000000018.pt", "step-0000000020.pt"
    ]  # fmt: skip


def test_a_damaged_best_checkpoint_is_not_evaluated(tmp_path, capsys):
    _, out = run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0")
    best = out / "checkpoints" / "best.pt"
    flip(best, places(best)["tensor"][0])
    assert evaluate([str(out)]) == 1
    assert f"error: {best} {DAMAGED}" in capsys.readouterr().err
