"""The cached order of an epoch: one builder, complete files, built anew when what it stands for changes (case C2)."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import data.order
from data.indexed import IndexedDataset
from data.order import EpochOrder
from data.samples import TokenSamples

LENGTHS = np.random.default_rng(0).integers(1, 50, 3000).tolist()


@pytest.fixture
def prefix(numbered_set: Callable[..., Path]) -> Path:
    return numbered_set("set", LENGTHS)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")


def starts(prefix: Path, **changes: object) -> np.ndarray:
    arguments = {"seed": 1, "epoch": 0, "cache_from": 0} | changes
    return EpochOrder(IndexedDataset(prefix), **arguments).starts  # type: ignore[arg-type]


def test_the_cached_order_is_the_computed_one(prefix: Path) -> None:
    computed = starts(prefix, cache_from=10**9)
    assert not Path(f"{prefix}.order").exists()
    assert np.array_equal(starts(prefix), computed)
    assert np.array_equal(starts(prefix), computed)
    assert [Path(name).suffix for name in files(Path(f"{prefix}.order"))] == [".starts"]


def test_a_second_start_builds_nothing(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts(prefix)
    monkeypatch.setattr(data.order, "_build", None)
    starts(prefix)


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 1}])
def test_another_seed_or_epoch_has_its_own_file(prefix: Path, change: dict[str, int]) -> None:
    first = starts(prefix)
    assert not np.array_equal(starts(prefix, **change), first)
    assert len(files(Path(f"{prefix}.order"))) == 2


def test_other_data_under_the_same_name_is_ordered_anew(numbered_set: Callable[..., Path]) -> None:
    prefix = numbered_set("set", LENGTHS)
    starts(prefix)
    numbered_set("set", LENGTHS[::-1])  # the same number of documents and tokens
    assert np.array_equal(starts(prefix), starts(prefix, cache_from=10**9))


def test_the_fingerprint_sees_a_file_written_anew(prefix: Path) -> None:
    """Of a large index only head and tail are read; a change between them shows in the file's time."""
    before = data.order._fingerprint(IndexedDataset(prefix), 1, 0)
    os.utime(f"{prefix}.idx", ns=(1, 1))
    assert data.order._fingerprint(IndexedDataset(prefix), 1, 0) != before


def test_a_half_file_is_never_read(prefix: Path) -> None:
    whole = starts(prefix).copy()
    (path,) = Path(f"{prefix}.order").glob("*.starts")
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:100] + bytes(len(content) - 100)):
        path.unlink()
        path.write_bytes(damaged)
        assert np.array_equal(starts(prefix), whole)
        assert path.read_bytes() == content


def build_slowly(prefix: Path, folder: Path | None, seconds: float, results: "multiprocessing.Queue[object]") -> None:
    built = data.order._build

    def slow(*arguments: object) -> None:
        time.sleep(seconds)
        built(*arguments)  # type: ignore[arg-type]
        results.put("built")

    data.order._build = slow
    order = EpochOrder(IndexedDataset(prefix), 1, 0, folder, 0)
    results.put(int(order.starts.sum()))


def together(
    prefix: Path, folders: list[Path | None], seconds: float
) -> tuple[list[multiprocessing.Process], list[object]]:
    results: multiprocessing.Queue[object] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=build_slowly, args=(prefix, folder, seconds, results)) for folder in folders
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(folders)
    said = []
    while not results.empty():
        said.append(results.get())
    return processes, said


def test_of_four_processes_one_builds_and_all_read_it(prefix: Path) -> None:
    expected = int(starts(prefix, cache_from=10**9).sum())
    _, said = together(prefix, [None] * 4, 1.5)
    assert said.count("built") == 1
    assert said.count(expected) == 4


def test_two_nodes_without_a_shared_folder_each_build_their_own(prefix: Path, tmp_path: Path) -> None:
    nodes: list[Path | None] = [tmp_path / "node0", tmp_path / "node1"]
    _, said = together(prefix, nodes * 2, 0.5)
    assert said.count("built") == 2
    assert all(len(files(node)) == 1 for node in nodes if node is not None)


def test_a_killed_builder_leaves_no_lock_and_no_half_file(prefix: Path) -> None:
    results: multiprocessing.Queue[object] = multiprocessing.Queue()
    builder = multiprocessing.Process(target=build_slowly, args=(prefix, None, 60.0, results))
    builder.start()
    folder = Path(f"{prefix}.order")
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.lock")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(10)
    assert not list(folder.glob("*.starts"))
    began = time.monotonic()
    assert np.array_equal(starts(prefix), starts(prefix, cache_from=10**9))
    assert time.monotonic() - began < 5, "the lock went with its holder"


def test_readers_meanwhile_see_nothing_or_all(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that is killed between two writes: the file under the final name is never there in part."""
    monkeypatch.setattr(data.order, "BLOCK", 100)
    written = data.order._ends
    folder = Path(f"{prefix}.order")

    def stops_midway(*arguments: object):  # type: ignore[no-untyped-def]
        for index, block in enumerate(written(*arguments)):  # type: ignore[arg-type]
            assert not list(folder.glob("*.starts"))
            if index == 10:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(data.order, "_ends", stops_midway)
    with pytest.raises(KeyboardInterrupt):
        starts(prefix)
    assert files(folder) == []


def test_a_folder_that_cannot_be_written_is_replaced(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Data is often read-only; then each machine keeps the order in a temporary folder of its own."""
    real = Path.mkdir

    def refuse(path: Path, *arguments: object, **keywords: object) -> None:
        if path.name.endswith(".order"):
            raise PermissionError(path)
        real(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    assert np.array_equal(starts(prefix), starts(prefix, cache_from=10**9))
    assert len(list((tmp_path / "local").rglob("*.starts"))) == 1


def test_the_next_epoch_is_built_before_it_is_needed(prefix: Path) -> None:
    samples = TokenSamples(prefix, 16, seed=1, cache_from=0)
    samples.sample(0)
    assert len(files(Path(f"{prefix}.order"))) == 1
    samples.sample(len(samples) - 1)
    for thread in threading.enumerate():
        if thread.name == "data-order":
            thread.join(20)
    assert len(files(Path(f"{prefix}.order"))) == 2


@pytest.mark.slow
def test_a_hundred_million_documents(tmp_path: Path) -> None:
    """Indexed in under 20 s, opened again in under 1 s (synthetic sizes, 4 GB of disk for the time of the test)."""
    from data.indexed import write_index

    count, block = 100_000_000, 1 << 22
    rng_sizes = [np.random.default_rng(0).integers(1, 2000, block, dtype=np.int32)]

    def sizes():  # type: ignore[no-untyped-def]
        return (rng_sizes[0][: min(block, count - first)] for first in range(0, count, block))

    bounds = (np.arange(first, min(first + block, count + 1)) for first in range(0, count + 1, block))
    write_index(tmp_path / "big.idx", np.dtype(np.uint16), count, count + 1, sizes, bounds)
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(2 * sum(int(chunk.sum(dtype=np.int64)) for chunk in sizes()))
    began = time.monotonic()
    first = TokenSamples(tmp_path / "big", 2048, seed=0)
    first.sample(0)
    built = time.monotonic()
    again = TokenSamples(tmp_path / "big", 2048, seed=0)
    again.sample(1)
    opened = time.monotonic()
    assert built - began < 20, f"{built - began:.1f} s"
    assert opened - built < 1, f"{opened - built:.2f} s"
    assert len(again) == (again.dataset.token_count - 1) // 2048
