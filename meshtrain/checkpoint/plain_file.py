"""Plain files: how a file of a checkpoint is opened that somebody else may have put there.

Neither a link is followed nor a pipe waited for. What is wrong with the file itself is damage
(DamagedError); what keeps it from being read now is not (UnreadableError).
"""

import errno
import os
import stat
from pathlib import Path

from meshtrain.errors import DamagedError, MissingError, UnreadableError


def open_plain(path: Path) -> tuple[int, int]:
    """Opens a file for reading; returns descriptor and size.

    Raises DamagedError: it is missing, or not a regular file; UnreadableError: it cannot be read
    now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        about = os.fstat(descriptor)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError(path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(path, "is a link, which nobody follows here") from error
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise DamagedError(path, "is no file") from error
        raise UnreadableError(path, error.strerror) from error
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise DamagedError(path, "is no file")
    return descriptor, about.st_size


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of a file; raises as `open_plain`, and DamagedError: it has more than `most`
    bytes."""
    descriptor, size = open_plain(path)
    with open(descriptor, "rb") as file:
        if size > most:
            raise DamagedError(path, f"has {size:,} bytes; at most {most:,} are expected")
        try:
            return file.read(most)
        except OSError as error:
            raise UnreadableError(path, error.strerror) from error


def file_exists(path: Path) -> bool:
    """As `os.path.lexists`, but raises UnreadableError on other errors, where `lexists` returns
    False."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableError(path, error.strerror) from error
    return True
