"""C++ of ours, compiled where it runs and for what it runs on: fast paths on a CPU, each with a plain PyTorch twin.

A library is compiled once, in seconds, into the user's cache folder; its name is a hash of all that it is made from, so
another source, compiler or processor makes another one. It knows plain pointers alone, and nothing of torch. Where
there is no compiler, or where it refuses, the plain twins compute the same, several times as slowly.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

# Sums may be taken in any order and mathematical functions a vector at a time; nothing here relies on infinities. Not
# for the linker: a library linked with -ffast-math takes denormal numbers away from the whole process that loads it.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")
_LINK = ("-shared", "-fopenmp")
_SECONDS = 300
_SHARED = Path(__file__).parent  # headers for all


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or ``g++``, where there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


@cache
def load_library(source: Path, definitions: Sequence[str] = ()) -> ctypes.CDLL | None:
    """A library, or ``None`` where there is no compiler; where the compiler refuses, a warning says why.

    Args:
        source: The C++ file.
        definitions: Of the preprocessor, such as ``"NSR_WIDTH=32"``.
    """
    try:
        return compiled(source, definitions)
    except CannotCompileError as error:
        if compiler() is not None:
            warnings.warn(f"{error}\nPlain operators do its work, more slowly.", stacklevel=2)
        return None


class CannotCompileError(RuntimeError):
    """There is no compiler, it refuses the file, or the library cannot be kept and loaded."""


def compiled(source: Path, definitions: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of one C++ file, which may include the headers beside it and those of this folder.

    Raises:
        CannotCompileError: See there.
    """
    cxx = compiler()
    if cxx is None:
        raise CannotCompileError(f"{source.name} needs a C++ compiler: install g++, or name one in $CXX.")
    flags = [*_COMPILE, *_vectors(), *(f"-D{definition}" for definition in definitions)]
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    headers = {*source.parent.glob("*.h"), *_SHARED.glob("*.h")}
    sources = [path.read_text() for path in (source, *sorted(headers))]
    made_from = [*sources, cxx, version, *flags, *_LINK, platform.machine(), _processor()]
    name = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    file = f"{source.stem}-{name}.so"
    try:
        return ctypes.CDLL(str(_made(_cache_folder() / file, [cxx, *flags, f"-I{_SHARED}"], source)))
    except CannotCompileError:
        raise
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: there is no home folder
        raise CannotCompileError(
            f"{file} cannot be made, kept in the user's cache folder and loaded from there: {error}. "
            "$XDG_CACHE_HOME names another folder."
        ) from error


def _made(library: Path, compile_: list[str], source: Path) -> Path:
    """Compile and link, where that has not been done before."""
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=library.parent) as folder:
            unlinked, linked = Path(folder) / "unlinked.o", Path(folder) / "linked.so"
            _call([*compile_, "-c", "-o", str(unlinked), str(source)])
            _call([compile_[0], *_LINK, "-o", str(linked), str(unlinked)])
            os.replace(linked, library)  # whole or not at all
    return library


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        raise CannotCompileError(f"{command[0]} cannot compile {command[-1]}:\n{done.stderr[-2000:]}")


def threads(most: int) -> ctypes.c_int:
    """How many threads share out so many pieces: torch's setting, of which a library of ours knows nothing itself."""
    return ctypes.c_int(max(1, min(most, torch.get_num_threads())))


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Where tensors on the CPU lie, as arguments of a library's function; they must be contiguous."""
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def struct_of_pointers(*tensors: Tensor) -> ctypes.Array[Any]:
    """A C++ struct of pointers alone, as an argument; the tensors must be contiguous and outlive it."""
    return (ctypes.c_void_p * len(tensors))(*pointers(*tensors))


def struct_of_numbers(*numbers: int) -> ctypes.Array[Any]:
    """A C++ struct of ``int64_t`` alone, as an argument."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


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
