"""Unpack a downloaded archive, never outside its folder."""

import shutil
import stat
import tarfile
import zipfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive into ``folder``.

    Entries that would leave the folder (absolute paths, ``..``, links that point outside) or are no files (devices,
    pipes) end it with an error; permissions are those of new files.

    Raises:
        ValueError: The archive is neither, is damaged, or holds such an entry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        else:
            raise ValueError(f"{archive} is neither a tar nor a zip archive.")
    except tarfile.FilterError as error:
        raise ValueError(f"{archive} is not safe to unpack: {error}") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
        # RuntimeError is zipfile's word for a password or a compression that it does not know
        raise ValueError(f"{archive} is damaged ({error}); fetch it anew.") from error


def _unpack_zip(archive: Path, folder: Path) -> None:
    root = folder.resolve()
    with zipfile.ZipFile(archive) as file:
        for entry in file.infolist():
            target = (root / entry.filename.replace("\\", "/")).resolve()
            if not target.is_relative_to(root):
                raise ValueError(f"{archive} is not safe to unpack: {entry.filename!r} is outside {folder}.")
            kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where the archive does not say
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"{archive} is not safe to unpack: {entry.filename!r} is no plain file.")
            if entry.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open(entry) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
