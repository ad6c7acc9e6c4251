"""Reading an adapter's files without trusting them: regular files only, bounded sizes, and no state but one.

A file is opened once; its signature is taken from the open descriptor, so what was stat'ed is what is read. Messages
name the file, never its folder: they reach clients.
"""

from __future__ import annotations

import os
import stat
from types import TracebackType

from punica_core.errors import AdapterChanged, AdapterInvalid
from punica_core.protocol import FileSignature

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS has left in the place of a large one."""


def lfs_advice(file_name: str) -> str:
    return f"{file_name} is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in its repository."


def signature_of(status: os.stat_result) -> FileSignature:
    """The state of a file, out of its stat."""
    return FileSignature(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class SourceFile:
    """A regular file opened for reading; use it as a context manager.

    expected: the state the reader counts on; None takes the file as it is.
    Raises AdapterChanged if the file is gone or in another state, AdapterInvalid if it is not a regular file or
    cannot be opened.
    """

    def __init__(self, path: str, expected: FileSignature | None = None) -> None:
        self.name = os.path.basename(path)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise AdapterChanged(f"{self.name} is gone; try again once it has been written.") from None
        except OSError as error:
            raise AdapterInvalid(f"{self.name} cannot be opened: {error.strerror}.") from None
        status = os.fstat(self._fd)
        self.signature = signature_of(status)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise AdapterInvalid(f"{self.name} is not a regular file.")
            if expected is not None and expected != self.signature:
                raise self._changed()
        except Exception:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self.signature.size

    def read(self, start: int, count: int) -> bytes:
        """Exactly `count` bytes from byte `start`. Raises as `read_into` does."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes, writable) from byte `start`.

        Raises AdapterChanged at an early end of file, AdapterInvalid when the file system fails.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], start + done)
            except OSError as error:
                raise AdapterInvalid(f"{self.name} cannot be read: {error.strerror}.") from None
            if count == 0:
                raise self._changed()
            done += count

    def check_unchanged(self) -> None:
        """Raise AdapterChanged if the file was written to since it was opened."""
        if signature_of(os.fstat(self._fd)) != self.signature:
            raise self._changed()

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _changed(self) -> AdapterChanged:
        return AdapterChanged(f"{self.name} changed while it was loaded; try again.")
