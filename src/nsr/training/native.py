"""C++ of ours, compiled where it runs and for what it runs on.

A library is compiled once, in seconds, into the user's cache folder; its name is a hash of all that it is made from, so
another source, compiler or processor makes another one. It knows plain pointers alone, and nothing of torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from nsr.training.whole_file import replacing

# Sums may be taken in any order and mathematical functions a vector at a time; nothing here relies on infinities. Not
# for the linker: a library linked with -ffast-math takes denormal numbers away from the whole process that loads it.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")
_LINK = ("-shared", "-fopenmp")
_SECONDS = 300


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or ``g++``, where there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


@cache
def load_library(source: Path, definitions: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of one C++ file.

    Args:
        source: The file.
        definitions: Of the preprocessor, such as ``"NSR_WIDTH=32"``.

    Raises:
        RuntimeError: There is no compiler, or it refuses the file.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(f"{source.name} needs a C++ compiler: install g++, or name one in $CXX.")
    flags = [*_COMPILE, *_vectors(), *(f"-D{definition}" for definition in definitions)]
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    made_from = [source.read_text(), cxx, version, *flags, *_LINK, platform.machine(), _processor()]
    name = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    library = _cache_folder() / f"{source.stem}-{name}.so"
    if not library.is_file():
        with replacing(library) as partial, TemporaryDirectory() as folder:
            compiled = Path(folder) / "compiled.o"
            _call([cxx, *flags, "-c", "-o", str(compiled), str(source)])
            _call([cxx, *_LINK, "-o", str(partial), str(compiled)])
    return ctypes.CDLL(str(library))


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command[0]} cannot compile {command[-1]}:\n{done.stderr[-2000:]}")


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Where tensors on the CPU lie, as arguments of a library's function; they must be contiguous."""
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _vectors() -> list[str]:
    """By default compilers use half of what AVX-512 has."""
    return ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []


def _processor() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsr" / "native"
