"""Megatron's files: written, read, merged, and refused where anything is not as the index says."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.indexed import HEADER_BYTES, IndexedDataset, IndexedWriter, merge, token_dtype, write_index

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 10, 11, 12, 13, 1]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_come_back(write_set: Callable[..., Path], dtype: type) -> None:
    dataset = IndexedDataset(write_set("set", DOCUMENTS, dtype))
    assert [dataset.document(number).tolist() for number in range(3)] == DOCUMENTS
    assert [dataset[number].tolist() for number in range(len(dataset))] == DOCUMENTS
    assert dataset.dtype == dtype
    assert (dataset.document_count, dataset.token_count) == (3, 12)
    assert dataset.document_sizes(0, 3).tolist() == [4, 2, 6]


def test_the_file_is_megatrons_byte_for_byte(write_set: Callable[..., Path]) -> None:
    prefix = write_set("set", DOCUMENTS)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)  # 8 is uint16
    expected += struct.pack("<3i", 4, 2, 6) + struct.pack("<3q", 0, 8, 12) + struct.pack("<4q", 0, 1, 2, 3)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<12H", *sum(DOCUMENTS, []))


def test_a_long_document_is_several_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        writer.add_document([1, 2], [3, 4, 5])
        writer.add_document([6])
    dataset = IndexedDataset(tmp_path / "set")
    assert dataset.document(0).tolist() == [1, 2, 3, 4, 5]
    assert dataset.document_sizes(0, 2).tolist() == [5, 1]
    assert dataset.document_starts(np.array([0, 1, 2])).tolist() == [0, 5, 6]


def test_token_types_are_megatrons_choice() -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


def test_an_abandoned_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 tokens"), IndexedWriter(tmp_path / "set", np.uint16) as writer:
        writer.add_document([1, 2])
        writer.add_document([])
    assert not list(tmp_path.iterdir())


def test_offsets_are_64_bit(tmp_path: Path) -> None:
    """Case C1: five documents of 2^29 tokens; the last begins at byte 4,294,967,296, which 32 bits make 0."""
    sizes = np.full(5, 2**29, dtype=np.int32)
    prefix = tmp_path / "huge"
    bounds = np.arange(6)
    write_index(Path(f"{prefix}.idx"), np.dtype(np.uint16), 5, 6, lambda: [sizes], [bounds])
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(5 * 2**29 * 2)  # a hole, no disk is used
        file.seek(4 * 2**29 * 2)
        file.write(struct.pack("<2H", 77, 78))
    dataset = IndexedDataset(prefix)
    assert dataset.pointers.dtype == np.int64
    assert int(dataset.pointers[-1]) == 4_294_967_296
    assert int(dataset.document_starts(np.array([5]))[0]) == 2_684_354_560
    assert dataset.read(4 * 2**29, 4 * 2**29 + 2).tolist() == [77, 78]


def test_merging_keeps_documents_in_order(write_set: Callable[..., Path], tmp_path: Path) -> None:
    """Case C4."""
    first, second = write_set("first", DOCUMENTS), write_set("second", [[1], [2, 3]])
    merge([first, second, first], tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    expected = [*DOCUMENTS, [1], [2, 3], *DOCUMENTS]
    assert [merged.document(number).tolist() for number in range(merged.document_count)] == expected


def test_merging_sets_of_two_types_is_refused(write_set: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"second\.idx.*uint16.*int32"):
        merge([write_set("first", DOCUMENTS), write_set("second", DOCUMENTS, np.int32)], tmp_path / "all")
    assert not (tmp_path / "all.bin").exists()


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def refused(prefix: Path, *parts: str) -> None:
    """Opening is refused in one sentence that holds all of `parts`."""
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


class TestRefusals:
    """Case C9: the file, what was expected and what was found."""

    @pytest.fixture
    def prefix(self, write_set: Callable[..., Path]) -> Path:
        return write_set("set", DOCUMENTS)

    def test_missing_index(self, tmp_path: Path) -> None:
        refused(tmp_path / "none", "none.idx", "found no such file")

    def test_missing_tokens(self, prefix: Path) -> None:
        Path(f"{prefix}.bin").unlink()
        refused(prefix, "set.bin", "found no such file")

    def test_tokens_one_byte_short(self, prefix: Path) -> None:
        cut(Path(f"{prefix}.bin"), 23)
        refused(prefix, "set.bin", "expected 24 bytes", "found 23 bytes")

    def test_index_cut_in_half(self, prefix: Path) -> None:
        path = Path(f"{prefix}.idx")
        whole = path.stat().st_size
        cut(path, whole // 2)
        refused(prefix, "set.idx", f"expected {whole} bytes", f"found {whole // 2} bytes")

    @pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
    def test_index_without_a_header(self, prefix: Path, length: int) -> None:
        cut(Path(f"{prefix}.idx"), length)
        refused(prefix, "set.idx", f"at least {HEADER_BYTES} bytes", f"found {length} bytes")

    def test_index_of_another_set(self, prefix: Path, write_set: Callable[..., Path]) -> None:
        other = write_set("other", [[1, 2, 3]])
        Path(f"{prefix}.idx").write_bytes(Path(f"{other}.idx").read_bytes())
        refused(prefix, "set.bin", "expected 6 bytes", "found 24 bytes", "index of another file")

    def test_empty_tokens(self, prefix: Path) -> None:
        cut(Path(f"{prefix}.bin"), 0)
        refused(prefix, "set.bin", "expected 24 bytes", "found 0 bytes")

    def test_another_kind_of_file(self, prefix: Path) -> None:
        Path(f"{prefix}.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(60))
        refused(prefix, "set.idx", "begins with", "TNTIDX")

    @pytest.mark.parametrize(("at", "value", "message"), [(9, b"\x02", "version 1"), (17, b"\x06", "type code")])
    def test_unknown_version_or_type(self, prefix: Path, at: int, value: bytes, message: str) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        content[at : at + 1] = value
        Path(f"{prefix}.idx").write_bytes(bytes(content))
        refused(prefix, "set.idx", message)

    def test_a_document_of_no_tokens(self, prefix: Path) -> None:
        self.write(prefix, [4, 0, 8], [0, 1, 2, 3])
        refused(prefix, "set.idx", "at least 1 token", "number 1")

    def test_a_document_of_no_sequences(self, prefix: Path) -> None:
        self.write(prefix, [4, 2, 6], [0, 1, 1, 3])
        refused(prefix, "set.idx", "at least 1 sequence", "document 1")

    def test_no_documents(self, prefix: Path) -> None:
        self.write(prefix, [], [0])
        refused(prefix, "set.idx", "at least one document", "found 0")

    def test_bounds_that_leave_sequences_out(self, prefix: Path) -> None:
        self.write(prefix, [4, 2, 6], [0, 1, 2, 2])
        refused(prefix, "set.idx", "bounds from 0 to 3")

    def test_pointers_that_do_not_follow_from_the_sizes(self, prefix: Path) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        content[HEADER_BYTES + 12 + 8 : HEADER_BYTES + 12 + 16] = struct.pack("<q", 6)
        Path(f"{prefix}.idx").write_bytes(bytes(content))
        refused(prefix, "set.idx", "sequence 1 at byte 8", "byte 6")

    def test_ids_beyond_the_vocabulary(self, prefix: Path) -> None:
        dataset = IndexedDataset(prefix)
        dataset.check_vocabulary(14)
        with pytest.raises(DataError, match=r"set\.bin.*0 to 12.*found 13"):
            dataset.check_vocabulary(13)

    def test_negative_ids(self, write_set: Callable[..., Path]) -> None:
        with pytest.raises(DataError, match="found -4"):
            IndexedDataset(write_set("negative", [[1, -4, 2]], np.int32)).check_vocabulary(100)

    @staticmethod
    def write(prefix: Path, sizes: list[int], bounds: list[int]) -> None:
        array = np.array(sizes, dtype=np.int32)
        write_index(
            Path(f"{prefix}.idx"), np.dtype(np.uint16), len(sizes), len(bounds), lambda: [array], [np.array(bounds)]
        )


MEGATRON_READS = """
import sys, warnings
warnings.simplefilter("ignore")
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
import numpy, torch
ours, theirs = sys.argv[1:]
read = IndexedDataset(ours)
print([read[number].tolist() for number in range(len(read))], read.document_indices.tolist())
builder = IndexedDatasetBuilder(theirs + ".bin", dtype=numpy.int32)
for document in ([3, 4, 5], [70000, 6]):
    builder.add_document(torch.tensor(document), [len(document)])
builder.finalize(theirs + ".idx")
"""


def test_megatron_core_reads_ours_and_we_read_theirs(
    write_set: Callable[..., Path], tmp_path: Path, megatron_core: Path
) -> None:
    ours, theirs = write_set("ours", DOCUMENTS), tmp_path / "theirs"
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON_READS, str(ours), str(theirs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(megatron_core), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{DOCUMENTS} [0, 1, 2, 3]"
    dataset = IndexedDataset(theirs)
    assert [dataset.document(number).tolist() for number in range(2)] == [[3, 4, 5], [70000, 6]]


@pytest.fixture(scope="session")
def megatron_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with megatron-core alone in it: no dependency of ours, and to read a file it needs none of its own."""
    folder = tmp_path_factory.mktemp("megatron")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "megatron-core==0.16.1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        pytest.skip(f"megatron-core 0.16.1 could not be obtained: {done.stderr.strip().splitlines()[-1:]}")
    return folder
