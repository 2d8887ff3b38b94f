"""THUMOS's layout: annotations in its own format, targets made from them, and all that can be wrong with them."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchsbp.cli.main import main
from torchsbp.errors import DataError
from torchsbp.train.data.actions import Segment, WholeVideos, Windows
from torchsbp.train.data.annotations import THUMOS, read_annotations
from torchsbp.train.data.thumos import Thumos
from torchsbp.train.data.window import Window

HEAD = "video,type,type_idx,start,end,startFrame,endFrame"
ROWS = [
    "video_validation_0000051,Billiards,12,1.0,2.5,30,75",
    "video_validation_0000051,Ambiguous,102,4.0,5.0,120,150",
    "video_validation_0000052,CliffDiving,22,0.5,1.5,15,45",
    "video_validation_0000052,Diving,26,0.5,1.5,15,45",
]


def layout(root: Path, rows: list[str] = ROWS, frames: int = 40) -> Path:
    """Frames of two videos, one an array and one in pictures, and a file of annotations."""
    draw = np.random.default_rng(0)
    (root / "frames" / "video_validation_0000052").mkdir(parents=True)
    pixels = draw.integers(0, 256, (frames, 6, 8, 3), dtype=np.uint8)
    np.save(root / "frames" / "video_validation_0000051.npy", pixels)
    for number in range(12):
        Image.fromarray(np.full((6, 8, 3), 20 * number, np.uint8)).save(
            root / "frames" / "video_validation_0000052" / f"{number:05}.jpg"
        )
    (root / "val.csv").write_text("\n".join([HEAD, *rows]))
    return root


def targets(root: Path, *options: str) -> int:
    return main(["targets", str(root / "val.csv"), str(root), "--split", "train", *options])


def test_targets_have_22_columns_made_from_annotations(tmp_path, capsys):
    root = layout(tmp_path)
    assert targets(root) == 0
    assert capsys.readouterr().out.split() == ["4", "segments", "2", "videos", "52", "frames"]
    first = np.load(root / "target_perframe" / "video_validation_0000051.npy")
    assert first.shape == (40, 22)
    billiards = 1 + THUMOS.index("Billiards")
    assert first[:, billiards].nonzero()[0].tolist() == [4, 5, 6, 7, 8, 9]  # seconds 1 to 2.5, 4 frames each
    assert first[:, 21].nonzero()[0].tolist() == [16, 17, 18, 19]
    assert first[:, 0].tolist() == [float(not 4 <= i < 10 and not 16 <= i < 20) for i in range(40)]
    second = np.load(root / "target_perframe" / "video_validation_0000052.npy")
    both = [1 + THUMOS.index(name) for name in ("CliffDiving", "Diving")]
    assert second[:, both].sum(1).nonzero()[0].tolist() == [2, 3, 4, 5]
    assert second[:, both].sum() == 8
    assert (root / "train.txt").read_text().split() == ["video_validation_0000051", "video_validation_0000052"]
    assert (root / "classes.txt").read_text().split() == THUMOS


def test_the_original_folder_of_texts_says_the_same(tmp_path):
    rows = [row.split(",") for row in ROWS]
    folder = tmp_path / "annotation"
    folder.mkdir()
    for name in {row[1] for row in rows}:
        lines = [f"{video}  {start} {end}" for video, its, _, start, end, *_ in rows if its == name]
        (folder / f"{name}_val.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "val.csv").write_text("\n".join([HEAD, *ROWS]))
    texts, table = read_annotations(folder), read_annotations(tmp_path / "val.csv")
    assert sorted(its[:4] for its in texts) == sorted(its[:4] for its in table)
    assert texts[0].where == f"{folder / 'Ambiguous_val.txt'}:1"
    assert table[1].where == f"{tmp_path / 'val.csv'}:3"


def test_frames_and_segments_are_read(tmp_path):
    root = layout(tmp_path)
    targets(root)
    videos = Thumos(root, "train", 4.0)
    assert videos.counts == [40, 12]
    array = np.load(root / "frames" / "video_validation_0000051.npy")
    assert torch.equal(videos.read(0, [3, 0, 3]), torch.from_numpy(array[[3, 0, 3]]).permute(0, 3, 1, 2))
    assert videos.read(1, [2, 5]).float().mean((1, 2, 3)).tolist() == [40, 100]
    billiards = 1 + THUMOS.index("Billiards")
    assert videos.segments(0) == [Segment(billiards, 1.0, 2.5), Segment(21, 4.0, 5.0)]


def test_pictures_are_in_the_order_of_their_numbers(tmp_path):
    root = layout(tmp_path)
    for path in (root / "frames" / "video_validation_0000052").iterdir():
        path.rename(path.with_name(f"{int(path.stem)}.jpg"))
    targets(root)
    assert Thumos(root, "train", 4.0).read(1, range(12)).float().mean((1, 2, 3)).tolist() == list(range(0, 240, 20))


def test_a_second_split_leaves_the_first_as_it_is(tmp_path):
    root = layout(tmp_path, ROWS[:2])
    targets(root)
    (root / "val.csv").write_text("\n".join([HEAD, *ROWS[2:]]))
    targets(root, "--split", "test")
    with (root / "segments.csv").open() as file:
        assert [row["video"][-2:] for row in csv.DictReader(file)] == ["51", "51", "52", "52"]
    assert len(Thumos(root, "train", 4.0).segments(0)) == 2
    assert Thumos(root, "test", 4.0).videos == ["video_validation_0000052"]


def snapshot(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda names: [names[1], names[0], *names[2:]], "BasketballDunk in line 1, {own} has BaseballPitch"),
        (lambda names: [*names, "Skating"], "Skating in line 21, {own} has nothing"),
        (lambda names: names[:-1], "nothing in line 20, {own} has VolleyballSpiking"),
    ],
)
def test_other_classes_than_those_of_the_folder_are_refused(tmp_path, capsys, change, difference):
    """Targets of the other split would be mislabelled."""
    root = layout(tmp_path / "data")
    targets(root)
    capsys.readouterr()
    before, own, other = snapshot(root), root / "classes.txt", tmp_path / "other.txt"
    other.write_text("\n".join(THUMOS))
    assert targets(root, f"--classes={other}") == 0
    assert snapshot(root) == before
    other.write_text("\n".join(change(THUMOS)))
    assert targets(root, "--split=test", f"--classes={other}") == 2
    assert capsys.readouterr().err.endswith(
        f"--classes {other} has {difference.format(own=own)}: targets in {root} would have columns of two meanings. "
        f"Leave --classes out, or remove {own} and make the targets of every split again\n"
    )
    assert snapshot(root) == before


def test_names_of_columns_that_are_there_anyway_are_refused(tmp_path, capsys):
    (tmp_path / "other.txt").write_text("Background\nDiving\nAmbiguous\n")
    assert targets(layout(tmp_path / "data"), f"--classes={tmp_path / 'other.txt'}") == 1
    assert "other.txt:1 is Background, which has a column anyway; name actions only\n" in capsys.readouterr().err


def test_targets_say_how_many_frames_a_second_they_were_made_for(tmp_path, capsys):
    root = layout(tmp_path)
    assert targets(root, "--fps=2.5") == 0
    assert (root / "fps.txt").read_text() == "2.5\n"
    before, rate = snapshot(root), root / "fps.txt"
    assert targets(root) == 0  # as before
    assert snapshot(root) == before
    assert Thumos(root, "train", 2.5).segments(0)[0].end == 2.5
    capsys.readouterr()
    assert targets(root, "--split=test", "--fps=4") == 2
    again = f"remove {rate} and make the targets of every split again"
    assert capsys.readouterr().err.endswith(
        f"--fps 4.0 differs from {rate}, 2.5, which other targets in {root} were made for. "
        f"Leave --fps out, or {again}\n"
    )
    with pytest.raises(DataError) as found:
        Thumos(root, "train", 4.0)
    assert str(found.value) == (
        f"{rate}: targets were made for 2.5 frames a second, but task.data.fps is 4.0. "
        f"Set task.data.fps=2.5, or {again}"
    )
    rate.write_text("four")
    with pytest.raises(DataError, match=r"fps.txt can't be read \(could not .*; allowed: a number, frames a second"):
        Thumos(root, "train", 4.0)
    rate.unlink()
    assert Thumos(root, "train", 4.0).counts == [40, 12]  # older folders don't say


VIDEO = "video_validation_0000051"


@pytest.mark.parametrize(
    "row, told, frames",
    [
        (f"{VIDEO},Diving,26,9.0,12.0,0,0", "1 reaching beyond their video, clipped", [36, 37, 38, 39]),
        (f"{VIDEO},Diving,26,-1.0,0.5,0,0", "1 reaching beyond their video, clipped", [0, 1]),
        (f"{VIDEO},Diving,26,11.0,12.0,0,0", "1 wholly outside of their video, left out", []),
        (f"{VIDEO},Diving,26,3.0,3.0,0,0", "1 empty, left out", []),
        (f"{VIDEO},Diving,26,3.0,2.0,0,0", "1 empty, left out", []),
        (f"{VIDEO},Diving,26,3.05,3.1,0,0", "5 segments", [12]),  # between two frames
        (f"{VIDEO},Billiards,12,2.0,3.0,0,0", "1 overlapping one of their class", []),
    ],
)
def test_what_can_be_handled_is_counted(tmp_path, capsys, row, told, frames):
    root = layout(tmp_path, [*ROWS, row])
    assert targets(root) == 0
    assert told in [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = np.load(root / "target_perframe" / f"{VIDEO}.npy")
    assert found[:, 1 + THUMOS.index("Diving")].nonzero()[0].tolist() == frames


@pytest.mark.parametrize(
    "row, message",
    [
        (f"{VIDEO},Skating,5,1,2,0,0", "val.csv:6: unknown class 'Skating'; known: BaseballPitch, BasketballDunk"),
        (
            f"{VIDEO},Background,0,5,6,0,0",
            "VolleyballSpiking, Ambiguous. Frames of no segment are background: leave the line out\n",
        ),
        (f"{VIDEO},Background,0,5,6,0,0", "val.csv:6: unknown class 'Background'; known: BaseballPitch, Basketball"),
        (f"{VIDEO},Diving,26,one,2,0,0", "val.csv:6: expected video, type, start, end, found"),
        (f"{VIDEO},Diving,26,nan,2,0,0", "val.csv:6: times must be finite numbers of seconds, found nan and 2"),
        ("video_test_1,Diving,26,1,2,0,0", "val.csv:6: no frames of video_test_1: neither"),
        (f"{VIDEO},Diving", "val.csv:6: expected video, type, start, end, found"),
    ],
)
def test_what_can_not_be_understood_is_refused_with_file_and_line(tmp_path, capsys, row, message):
    assert targets(layout(tmp_path, [*ROWS, row])) == 1
    assert message in capsys.readouterr().err


def test_missing_videos_may_be_left_out(tmp_path, capsys):
    root = layout(tmp_path, [*ROWS, "video_test_1,Diving,26,1,2,0,0"])
    assert targets(root, "--skip-missing") == 0
    assert "1 videos without frames, left out" in capsys.readouterr().out


def test_annotations_that_are_none_are_refused(tmp_path, capsys):
    (tmp_path / "val.csv").write_text("video,start\na,1\n")
    assert targets(tmp_path) == 1
    assert "val.csv:1: no column type, end; needed: video, type, start, end" in capsys.readouterr().err
    assert main(["targets", str(tmp_path / "no.csv"), str(tmp_path), "--split", "x"]) == 1
    assert "no.csv can't be read: No such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["targets", str(tmp_path / "empty"), str(tmp_path), "--split", "x"]) == 1
    assert "expected CLASS_val.txt or CLASS_test.txt" in capsys.readouterr().err
    (tmp_path / "empty" / "Diving_val.txt").write_bytes(b"video\xff 1 2")
    assert main(["targets", str(tmp_path / "empty"), str(tmp_path), "--split", "x"]) == 1
    assert "Diving_val.txt can't be read: no text ('utf-8' codec" in capsys.readouterr().err
    (tmp_path / "val.csv").write_text(f'video,type,start,end\n"{"never closed" * 11_000}')
    assert targets(tmp_path) == 1
    assert "val.csv can't be read: field larger than field limit" in capsys.readouterr().err


def test_broken_layouts_are_refused_with_the_line_of_the_list(tmp_path):
    root = layout(tmp_path)
    targets(root)
    path = root / "target_perframe" / f"{VIDEO}.npy"
    np.save(path, np.zeros((39, 22)))
    with pytest.raises(
        DataError, match=r"train.txt:1: targets .* are \(39, 22\), but there are 40 frames and 22 columns"
    ):
        Thumos(root, "train", 4.0)
    path.unlink()
    with pytest.raises(DataError, match=r"train.txt:1: targets .* can't be read .*: make them with torchsbp targets"):
        Thumos(root, "train", 4.0)
    np.save(root / "frames" / f"{VIDEO}.npy", np.zeros((40, 6, 8), np.float32))
    with pytest.raises(DataError, match=r"train.txt:1: .* has float32 \(40, 6, 8\); allowed: uint8 \[frames, height"):
        Thumos(root, "train", 4.0)
    (root / "frames" / f"{VIDEO}.npy").unlink()
    with pytest.raises(DataError, match=r"train.txt:1: no frames of video_validation_0000051: neither"):
        Thumos(root, "train", 4.0)
    with pytest.raises(DataError, match=r"valid.txt can't be read .*: make it with torchsbp targets"):
        Thumos(root, "valid", 4.0)


@pytest.mark.parametrize(
    "text, message",
    [
        (f"\n{VIDEO}\n\nanother\n", "train.txt:4: no frames of another: neither"),
        (f"{VIDEO}\n\n{VIDEO}\n", f"train.txt:3 is {VIDEO}, as is line 1; remove one of them"),
        ("\n\n", "train.txt is empty: make it with torchsbp targets"),
    ],
)
def test_lists_are_refused_with_their_lines(tmp_path, text, message):
    root = layout(tmp_path)
    targets(root)
    (root / "train.txt").write_text(text)
    with pytest.raises(DataError) as found:
        Thumos(root, "train", 4.0)
    assert message in str(found.value)


def test_windows_lie_within_their_video_and_short_ones_are_filled(tmp_path):
    root = layout(tmp_path)
    targets(root)
    videos = Thumos(root, "train", 4.0)
    windows = Windows(videos, Window(long=3, long_rate=2, work=16))
    assert len(windows) == 3  # two of the first video, one of the second, which is shorter than the work memory
    assert windows.short == 1
    for _ in range(20):
        for index in range(2):
            frames, (empty, found) = windows[index]
            assert frames.shape == (19, 3, 6, 8)
            assert found.shape == (16, 22)
            assert not found[:, 21].sum() > 4
    frames, (empty, found) = windows[2]
    assert found[12:, 21].tolist() == [1.0] * 4
    assert found[:12].tolist() == videos.targets(1).tolist()
    assert empty.tolist() == [True, True, False]
    assert torch.equal(frames[3:15], videos.read(1, range(12)))
    assert WholeVideos(videos)[1][0].shape == (12, 3, 6, 8)
    assert windows.where(2) == "video video_validation_0000052"
