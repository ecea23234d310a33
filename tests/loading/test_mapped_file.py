"""Files that are mapped: what the system is asked for ahead of the arrays that are looked at."""

import mmap
from pathlib import Path

import pytest

from octavo.loading.mapped_file import MappedFile

_MIB = 1 << 20


class _Recorded:
    """A mapping of some MiB that notes what is asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, [0] * -(-size // _MIB)

    def __len__(self) -> int:
        return self.size

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0 and 0 < length <= _MIB and start + length <= self.size
        self.asked[start // _MIB] += 1


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the system takes no such advice")
def test_each_part_of_a_file_is_asked_for_once_before_it_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    file = MappedFile(str(path))
    file.data = mapping = _Recorded(200 * _MIB + 5)  # type: ignore[assignment]

    def ask(begin: int, num_bytes: int) -> set[int]:
        before = [*mapping.asked]
        file._read_ahead(begin, begin + num_bytes)
        return {i for i, count in enumerate(mapping.asked) if count > before[i]}

    assert ask(100, 10 * _MIB) == {*range(11)}
    assert ask(5 * _MIB, 10 * _MIB) == {*range(11, 15)}  # the rest of it
    assert ask(15 * _MIB - 1, 1) == set()
    assert ask(150 * _MIB + 3, 100 * _MIB) == {*range(150, 201)}  # elsewhere, and not beyond the end
    assert ask(200 * _MIB, 5) == set()
    assert ask(20 * _MIB, 2 * _MIB) == {20, 21}
    assert max(mapping.asked) == 1
