"""Micro-batches: the same for whoever asks, disjoint between ranks, and right about targets and documents."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.batches import NO_TARGET, MicroBatch, TrainingData, ValidationData
from data.errors import DataError
from data.samples import mask_path

LENGTHS = [7, 1, 30, 12, 5, 64, 3, 3, 18, 40, 9, 26, 2, 11]
END = 1


def hash_of(batch: MicroBatch) -> str:
    return hashlib.sha256(batch.tokens.numpy().tobytes() + batch.targets.numpy().tobytes()).hexdigest()


def test_targets_are_the_next_tokens(numbered_set: Callable[..., Path]) -> None:
    batch = TrainingData(numbered_set("set", LENGTHS), 8, seed=0).micro_batch([3, 0, 20])
    assert batch.tokens.shape == batch.targets.shape == (3, 8)
    assert batch.tokens[:, 1:].equal(batch.targets[:, :-1])
    assert batch.sample_numbers.tolist() == [3, 0, 20]
    assert batch.document_ids is None
    assert {tensor.dtype.itemsize for tensor in (batch.tokens, batch.targets, batch.sample_numbers)} == {8}


def test_two_readers_read_the_same_and_ranks_do_not(numbered_set: Callable[..., Path]) -> None:
    """Cases A9, A10: what first and last stage read is equal over 50 steps and a resume; data-parallel ranks differ."""
    prefix = numbered_set("set", [811])  # 101 samples of 8: an epoch is no whole number of batches
    readers = {(stage, rank): TrainingData(prefix, 8, seed=0) for stage in (0, 1) for rank in (0, 1)}
    seen: list[int] = []
    for step in range(50):
        if step == 20:  # a resume: all start anew
            readers = {key: TrainingData(prefix, 8, seed=0) for key in readers}
        for pass_ in range(2):
            batches = {}
            for stage, rank in readers:
                first = (step * 2 + pass_) * 4 + rank * 2
                batches[stage, rank] = readers[stage, rank].micro_batch([first, first + 1])
            assert hash_of(batches[0, 0]) == hash_of(batches[1, 0])
            assert hash_of(batches[0, 1]) == hash_of(batches[1, 1])
            assert hash_of(batches[0, 0]) != hash_of(batches[0, 1])
            seen += [int(row[0]) for rank in (0, 1) for row in batches[0, rank].tokens]
    for epoch in range(len(seen) // 101):
        assert len(set(seen[101 * epoch : 101 * epoch + 101])) == 101, "ranks read disjoint samples"


def test_swapped_inputs_and_targets_are_seen(numbered_set: Callable[..., Path]) -> None:
    batch = TrainingData(numbered_set("set", LENGTHS), 8, seed=0).micro_batch([0])
    assert hash_of(batch) != hash_of(MicroBatch(batch.targets, batch.tokens, batch.sample_numbers, None))


def documents_with_ends(lengths: list[int]) -> list[list[int]]:
    return [[*range(10, 9 + length), END] for length in lengths]


def test_document_ids_change_after_each_end(write_set: Callable[..., Path]) -> None:
    data = TrainingData(
        write_set("set", documents_with_ends(LENGTHS)), 16, seed=0, end_of_document=END, document_mask=True
    )
    for number in range(12):
        batch = data.micro_batch([number])
        assert batch.document_ids is not None
        tokens, ids = batch.tokens[0].tolist(), batch.document_ids[0].tolist()
        assert ids[0] == 0
        for place in range(1, 16):
            assert ids[place] - ids[place - 1] == (tokens[place - 1] == END), "an end belongs to its own document"


def test_ends_alone_part_documents_where_the_index_does_not(write_set: Callable[..., Path]) -> None:
    """Sets by others may hold everything in one "document" with end tokens inside."""
    prefix = write_set("set", [sum(documents_with_ends(LENGTHS), [])])
    batch = TrainingData(prefix, 16, 0, END, document_mask=True).micro_batch(range(12))
    assert batch.document_ids is not None
    ends = (batch.tokens == END).long().cumsum(1) - (batch.tokens == END).long()
    assert batch.document_ids.equal(ends)


def test_the_index_alone_parts_documents_without_ends(numbered_set: Callable[..., Path]) -> None:
    batch = TrainingData(numbered_set("set", LENGTHS), 16, 0, document_mask=True).micro_batch(range(12))
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[batch.tokens.numpy()]
    assert batch.document_ids is not None
    assert np.array_equal(np.diff(batch.document_ids.numpy()) > 0, np.diff(owner) != 0)


def test_the_end_of_document_is_a_target(write_set: Callable[..., Path]) -> None:
    """Case D3: every end is predicted, also where it pads the last window."""
    prefix = write_set("set", documents_with_ends(LENGTHS))
    data = ValidationData(prefix, 16, END)
    targets = data.micro_batch(data.windows()).targets
    assert int((targets == END).sum()) == len(LENGTHS)
    training = TrainingData(prefix, 16, 0, END).micro_batch(range(14))
    assert int((training.targets == END).sum()) >= len(LENGTHS) - 2
    assert int((training.targets == NO_TARGET).sum()) == 0


@pytest.mark.parametrize("length", [1, 8, 16, 230, 231, 1000])
def test_each_target_is_evaluated_once(numbered_set: Callable[..., Path], length: int) -> None:
    data = ValidationData(numbered_set("set", LENGTHS), length)  # 231 tokens
    batch = data.micro_batch(np.arange(len(data)))
    targets = batch.targets[batch.targets != NO_TARGET]
    assert targets.tolist() == list(range(1, 231))
    assert batch.tokens[batch.targets != NO_TARGET].tolist() == list(range(230))


def test_windows_beyond_the_end_have_no_targets(numbered_set: Callable[..., Path]) -> None:
    data = ValidationData(numbered_set("set", LENGTHS), 16, document_mask=True)
    batch = data.micro_batch([len(data), len(data) + 7])
    assert batch.tokens.shape == (2, 16)
    assert (batch.targets == NO_TARGET).all()


def test_fixed_windows_are_spread_over_the_set(numbered_set: Callable[..., Path]) -> None:
    data = ValidationData(numbered_set("set", [1601]), 16)
    assert data.windows(4).tolist() == [0, 25, 50, 75]
    assert data.windows().tolist() == list(range(100))
    assert data.windows(102).tolist() == list(range(102))


def test_document_ids_of_windows(write_set: Callable[..., Path]) -> None:
    data = ValidationData(write_set("set", documents_with_ends(LENGTHS)), 16, END, document_mask=True)
    batch = data.micro_batch(data.windows())
    assert batch.document_ids is not None
    ends = (batch.tokens == END).long().cumsum(1) - (batch.tokens == END).long()
    assert batch.document_ids[:-1].equal(ends[:-1])


def test_a_target_mask_decides_what_is_a_target(write_set: Callable[..., Path]) -> None:
    documents = [[10, 11, 12, 20, 21, END], [10, 13, 22, END], [14, 15, 23, END]]
    prefix = write_set("set", documents)
    mask = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    mask_path(prefix).write_bytes(bytes(mask))
    data = TrainingData(prefix, 4, seed=0)
    assert not data.every_token_is_a_target
    batch = data.micro_batch(range(3))
    kept = batch.targets != NO_TARGET
    assert set(batch.targets[kept].tolist()) <= {20, 21, 22, 23, END}
    following = np.array([data.samples[0].sample(number)[1:] for number in range(3)])
    assert np.array_equal(kept.numpy(), (following >= 20) | (following == END)), "what is left out is a prompt"
    validation = ValidationData(prefix, 4)
    targets = validation.micro_batch(validation.windows()).targets
    assert targets[targets != NO_TARGET].tolist() == [20, 21, END, 22, END, 23, END]


def test_a_mask_of_the_wrong_size_is_refused(write_set: Callable[..., Path]) -> None:
    prefix = write_set("set", documents_with_ends([20, 20]))
    mask_path(prefix).write_bytes(bytes(39))
    with pytest.raises(DataError, match=r"set\.mask\.bin: expected 40 bytes.*found 39"):
        TrainingData(prefix, 8, seed=0)


def test_every_token_is_a_target_without_a_mask(numbered_set: Callable[..., Path]) -> None:
    assert TrainingData(numbered_set("set", LENGTHS), 8, seed=0).every_token_is_a_target


def test_ids_beyond_the_model_are_refused_at_opening(numbered_set: Callable[..., Path]) -> None:
    prefix = numbered_set("set", LENGTHS)
    with pytest.raises(DataError, match=r"set\.bin.*0 to 99.*found 230"):
        TrainingData(prefix, 8, seed=0, vocab_size=100)
    with pytest.raises(DataError, match=r"set\.bin.*found 230"):
        ValidationData(prefix, 8, vocab_size=100)


def test_ids_that_the_first_look_missed_never_reach_the_model(
    numbered_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.indexed.IndexedDataset.check_vocabulary", lambda *_: None)
    data = TrainingData(numbered_set("set", LENGTHS), 8, seed=0, vocab_size=100)
    with pytest.raises(DataError, match=r"set\.bin.*0 to 99"):
        data.micro_batch(range(28))
