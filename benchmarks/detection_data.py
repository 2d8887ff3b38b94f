"""Unpack images with boxes and masks from a zip file, into COCO's layout, which ``torchsbp train`` reads.

    python benchmarks/detection_data.py det_coco445_pennfudan170.zip data        # data/coco, data/pennfudan

The zip has, for every set, ``SET/instances_PART.json`` and images ``SET/PART/…`` in any format that Pillow reads.
Written are ``OUT/SET/annotations/instances_PART.json`` and JPEG images ``OUT/SET/PART/…``.
"""

import argparse
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image


def unpack(archive: zipfile.ZipFile, name: str, out: Path, quality: int) -> int:
    """Unpack one part of one set, given the name of its JSON file. Return the number of its images."""
    folder, _, file = name.rpartition("/")
    part = file.removeprefix("instances_").removesuffix(".json")
    content = json.loads(archive.read(name))
    (out / folder / part).mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        picture = Image.open(io.BytesIO(archive.read(f"{folder}/{part}/{image['file_name']}"))).convert("RGB")
        image["file_name"] = Path(image["file_name"]).with_suffix(".jpg").name
        picture.save(out / folder / part / image["file_name"], quality=quality)
    (out / folder / "annotations").mkdir(exist_ok=True)
    (out / folder / "annotations" / file).write_text(json.dumps(content))
    return len(content["images"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", help="only these")
    parser.add_argument("--quality", type=int, default=92, help="of the JPEG images")
    args = parser.parse_args(argv)
    with zipfile.ZipFile(args.archive) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json") and (not args.sets or name.partition("/")[0] in args.sets):
                print(f"{name}: {unpack(archive, name, args.out, args.quality)} images", flush=True)


if __name__ == "__main__":
    main()
