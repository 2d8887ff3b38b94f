"""Run a command on a GPU that is not there: PyTorch's CUDA code runs as it is, and its kernels are not.

    python benchmarks/null_gpu.py python benchmarks/run.py --modes eager --cases "vit_base:exact, lean (r=1)"

PyTorch's allocator, autograd, CUDA graphs, its compiler and Triton's do all their work, for an H200. So what fails
before a kernel runs fails here too, peaks of memory are those of a GPU but for workspace of cuDNN and cuBLAS, launches
can be counted (``launched``), and step times are what the CPU alone takes. Values mean nothing: whatever reads one back
from the device may go wrong. Needs gcc and a PyTorch with CUDA 13.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NamedTuple

import torch

SOURCE = Path(__file__).with_suffix(".c")
FUNCTIONS = re.compile(r"(__)?cuda|cu[A-Z]|cublas|cudnn|cusparse|cufft|cusolver")
LAUNCHES = re.compile(r"Launch\w*Kernel|[Gg]emm|cublasLtMatmul$|cudnnBackendExecute")


class Launched(NamedTuple):
    kernels: int
    graphs: int


def launched() -> Launched:
    """How much was launched so far in this process, which runs on the null GPU."""
    loaded = ctypes.CDLL(None)
    return Launched(loaded.null_gpu_launches(), loaded.null_gpu_graphs())


def missing() -> str:
    """What a machine lacks to have it, "" if nothing."""
    tools = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    needed = [*tools, *([] if (torch.version.cuda or "").startswith("13.") else ["a PyTorch with CUDA 13"])]
    return " and ".join([*needed, *(["Triton"] if find_spec("triton") is None else [])])


def headers(site: Path) -> list[Path]:
    """Of the runtime that PyTorch was built with; what that package leaves out is Triton's."""
    return [*site.glob("nvidia/cu*/include"), site / "triton/backends/nvidia/include"]


def symbols(*arguments: str | Path) -> set[str]:
    text = subprocess.run(["nm", "-D", *arguments], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()}


def build(site: Path) -> Path:
    """The folder with the libraries; made once for a version of PyTorch and of their source."""
    libraries = sorted((site / "torch/lib").glob("lib*.so"))
    key = [SOURCE.read_text(), Path(__file__).read_text(), *(f"{it} {it.stat().st_size}" for it in libraries)]
    folder = Path(gettempdir()) / f"null_gpu_{sha256(repr(key).encode()).hexdigest()[:16]}"
    if not folder.exists():
        with TemporaryDirectory(prefix="null_gpu_") as made:
            making = Path(made) / "libraries"
            making.mkdir()
            compile_libraries(making, site, symbols("--undefined-only", *libraries))
            with suppress(OSError):  # another process was faster
                making.rename(folder)
    return folder


def compile_libraries(folder: Path, site: Path, asked: set[str]) -> None:
    compile_driver(folder, site, asked)
    compile_compiler(folder, site, {name for name in asked if name.startswith("nvrtc")})


def compile_driver(folder: Path, site: Path, asked: set[str]) -> None:
    """Driver, runtime and libraries are one file, which PyTorch and Triton take for the driver's."""
    include = [f"-I{its}" for its in headers(site)]
    driver, rest = folder / "libcuda.so.1", folder / "rest.c"
    compile_library(driver, [SOURCE, *include])
    others = {name for name in asked | driver_functions(site) if FUNCTIONS.match(name)}
    rest.write_text("".join(map(succeeding, sorted(others - symbols("--defined-only", driver)))))
    compile_library(driver, [SOURCE, rest, *include])
    (folder / "libcuda.so").symlink_to(driver.name)


def compile_compiler(folder: Path, site: Path, asked: set[str]) -> None:
    """NVRTC is a file of its own: PyTorch looks in that one before it looks in what was loaded first."""
    (name,) = {its.name for its in site.glob("nvidia/cu*/lib/libnvrtc.so.*")}
    source, versions = folder / "nvrtc.c", folder / "versions"
    source.write_text("".join(succeeding(each) for each in sorted(asked) if f"{each}(" not in NVRTC) + NVRTC)
    versions.write_text(f"{name} {{ global: *; }};")  # that PyTorch asks for
    compile_library(folder / name, [source, f"-Wl,--version-script={versions}"])


NVRTC = """
int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetPTXSize(void *program, long *size) { return *size = 1, 0; }
int nvrtcGetCUBINSize(void *program, long *size) { return *size = 1, 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { return *lowered = name, 0; }
"""


def succeeding(name: str) -> str:
    """A function in C of any arguments."""
    return f"int {name}() {{ {'null_gpu_launch(); ' * bool(LAUNCHES.search(name))}return 0; }}\n"


def compile_library(library: Path, arguments: list[str | Path]) -> None:
    options = ["-O2", "-w", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{library.name}", "-o", library]
    subprocess.run(["gcc", *options, *arguments, "-ldl"], check=True)


def driver_functions(site: Path) -> set[str]:
    """All that the driver has, as Triton finds its functions by name."""
    text = (site / "triton/backends/nvidia/include/cuda.h").read_text()
    found = re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\(", text)
    return {*found, *(f"{name}_v2" for name in found)}


def environment() -> dict[str, str]:
    """What a process needs to run on the null GPU."""
    site = Path(torch.__file__).parents[1]  # NVIDIA's libraries and Triton are beside it
    folder = build(site)
    return os.environ | {
        "LD_PRELOAD": " ".join(map(str, folder.glob("lib*.so.*"))),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "NULL_GPU_CUDNN": os.environ.get("NULL_GPU_CUDNN", cudnn_version(site)),
    }


def cudnn_version(site: Path) -> str:
    """As cuDNN writes it: 92600 for 9.26.0."""
    (installed,) = site.glob("nvidia_cudnn_cu*.dist-info")
    major, minor, patch, *_ = map(int, re.findall(r"\d+", installed.name.split("-")[1]))
    return str(major * 10000 + minor * 100 + patch)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if missing():
        sys.exit(f"null_gpu.py needs {missing()}")
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
