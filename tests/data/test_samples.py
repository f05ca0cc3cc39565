"""Samples: found by number, each target once an epoch, in an order that depends on (seed, number) alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.permutation import Permutation
from data.samples import TokenSamples, samples_in

LENGTHS = [7, 1, 30, 12, 5, 64, 3, 3, 18, 40, 9, 26, 2, 11]  # 231 tokens
EPOCH_OF_EIGHT = 28  # (231 - 1) // 8


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_a_permutation_holds_every_number_once(count: int) -> None:
    permutation = Permutation(count, 7)
    numbers = permutation(np.arange(count))
    assert np.array_equal(np.sort(numbers), np.arange(count))
    assert [permutation.at(place) for place in range(min(count, 300))] == numbers[:300].tolist()


def test_a_permutation_is_even() -> None:
    """Over 3000 keys each of 6 numbers comes first about 500 times (standard deviation 20)."""
    first = np.bincount([Permutation(6, key).at(0) for key in range(3000)], minlength=6)
    assert first.min() > 400 and first.max() < 600


def test_a_permutation_of_billions_stays_64_bit() -> None:
    count = 5_000_000_000
    numbers = Permutation(count, 3)(np.arange(count - 1000, count))
    assert numbers.dtype == np.int64
    assert numbers.min() >= 0 and numbers.max() < count and numbers.max() > 2**32


def test_the_order_is_pinned() -> None:
    """Another order would make every resumed run read other data: it may never change unnoticed."""
    assert Permutation(20, 42)(np.arange(20)).tolist() == [
        12,
        4,
        13,
        9,
        10,
        8,
        11,
        0,
        16,
        19,
        1,
        5,
        15,
        6,
        7,
        14,
        17,
        18,
        2,
        3,
    ]


def test_each_target_is_seen_once_an_epoch(numbered_set: Callable[..., Path]) -> None:
    samples = TokenSamples(numbered_set("set", LENGTHS), 8, seed=3)
    assert len(samples) == EPOCH_OF_EIGHT
    seen = np.concatenate([samples.sample(number)[1:] for number in range(len(samples))])
    assert len(np.unique(seen)) == len(seen) == EPOCH_OF_EIGHT * 8
    assert all(samples.sample(number).shape == (9,) for number in range(len(samples)))
    assert samples.sample(0).dtype == np.int64


def stream_of(samples: TokenSamples, epoch: int) -> list[int]:
    """The epoch's documents end to end, put together from its samples: which is where from, whatever their order."""
    size = len(samples)
    following = {}
    for number in range(epoch * size, (epoch + 1) * size):
        sample = samples.sample(number)
        following[int(sample[0])] = sample
    starts = set(following) - {int(sample[-1]) for sample in following.values()}
    (at,) = starts
    stream = [at]
    while at in following:
        stream += following[at][1:].tolist()
        at = stream[-1]
    return stream


def test_a_document_is_seen_once_an_epoch_and_whole(numbered_set: Callable[..., Path]) -> None:
    prefix = numbered_set("set", LENGTHS)
    bounds = np.concatenate(([0], np.cumsum(LENGTHS))).tolist()
    orders = []
    for epoch in range(3):
        stream = stream_of(TokenSamples(prefix, 8, seed=3), epoch)
        order = []
        while stream:
            number = bounds.index(stream[0])
            document = list(range(bounds[number], bounds[number + 1]))
            assert stream[: len(document)] == document[: len(stream)], "documents are whole but for the epoch's end"
            stream = stream[len(document) :]
            order.append(number)
        assert len(set(order)) == len(order)
        assert len(order) >= len(LENGTHS) - 5, "at most the last 8 tokens are passed over"
        orders.append(order)
    assert orders[0] != orders[1] != orders[2], "epochs have different orders"
    assert orders[0] != sorted(orders[0])


def test_samples_of_an_epoch_are_shuffled(numbered_set: Callable[..., Path]) -> None:
    samples = TokenSamples(numbered_set("set", [4001]), 8, seed=0)
    starts = np.array([samples.sample(number)[0] for number in range(len(samples))])
    assert not np.array_equal(starts, np.sort(starts))
    assert np.median(np.abs(np.diff(starts))) > 500, "neighbours come from far apart"
    following = np.array([samples.sample(number)[0] for number in range(len(samples), 2 * len(samples))])
    assert (starts == following).mean() < 0.05, "and another epoch's samples come in another order"


def test_sample_numbers_are_pure(numbered_set: Callable[..., Path]) -> None:
    prefix = numbered_set("set", LENGTHS)
    straight = [TokenSamples(prefix, 8, seed=5).sample(number).tolist() for number in range(100)]
    samples = TokenSamples(prefix, 8, seed=5)
    for number in np.random.default_rng(0).permutation(100):
        assert samples.sample(number).tolist() == straight[number]
    assert TokenSamples(prefix, 8, seed=6).sample(0).tolist() != straight[0]


def test_long_documents_in_sequences_are_one_document(tmp_path: Path) -> None:
    from data.indexed import IndexedWriter

    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        writer.add_document(list(range(0, 50)), list(range(50, 90)))
        writer.add_document(list(range(100, 120)))
    samples = TokenSamples(tmp_path / "set", 4, seed=0)
    sample = next(
        sample for sample in (samples.read(number) for number in range(len(samples))) if 49 in sample.tokens[:-1]
    )
    assert 50 in sample.tokens and len(set(sample.documents.tolist())) == 1


def test_document_numbers_follow_the_index(numbered_set: Callable[..., Path]) -> None:
    samples = TokenSamples(numbered_set("set", LENGTHS), 16, seed=1)
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for number in range(len(samples)):
        sample = samples.read(number)
        assert samples.documents(number)[sample.documents].tolist() == owner[sample.tokens].tolist()


def test_numbers_far_beyond_32_bits(numbered_set: Callable[..., Path]) -> None:
    """Case C1: samples x epochs beyond 2^31, and beyond 2^40."""
    samples = TokenSamples(numbered_set("set", LENGTHS), 8, seed=0)
    for number in (2**31 - 1, 2**31, 2**33 + 5, 2**40):
        assert samples.sample(number).shape == (9,)
        epoch = number // len(samples)
        seen = np.concatenate(
            [samples.sample(each)[1:] for each in range(epoch * len(samples), (epoch + 1) * len(samples))]
        )
        assert len(np.unique(seen)) == len(seen)


def test_counting_samples_of_a_huge_set() -> None:
    assert samples_in(5 * 2**40 + 1, 1024) == 5 * 2**30
    assert samples_in(9, 8) == 1
    assert samples_in(8, 8) == 0


def test_a_set_smaller_than_a_sample_is_refused(numbered_set: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"small\.bin: expected at least 65 tokens.*found 40"):
        TokenSamples(numbered_set("small", [20, 20]), 64, seed=0)


def ids_consumed(
    samples: TokenSamples, steps: Sequence[int], data: int, accumulate: int, micro: int
) -> list[list[int]]:
    """For each step, the sample numbers of all ranks, as the trainer deals them out, by the tokens that came back."""
    consumed = []
    for step in steps:
        of_step = []
        for rank in range(data):
            for pass_ in range(accumulate):
                first = step * data * accumulate * micro + (pass_ * data + rank) * micro
                of_step += [int(samples.sample(number)[0]) for number in range(first, first + micro)]
        consumed.append(sorted(of_step))
    return consumed


@pytest.mark.parametrize("stop", [7, 8])
def test_the_position_survives_a_resume(numbered_set: Callable[..., Path], stop: int) -> None:
    """Case C6: 20 steps straight == 7 + 13, also stopped exactly at an epoch's end, and with another data size."""
    prefix = numbered_set("set", [257])  # 32 samples of 8: an epoch ends after step 4, 8, 12 of 8 samples
    straight = ids_consumed(TokenSamples(prefix, 8, 0), range(20), data=2, accumulate=4, micro=1)
    before = ids_consumed(TokenSamples(prefix, 8, 0), range(stop), data=2, accumulate=4, micro=1)
    after = ids_consumed(TokenSamples(prefix, 8, 0), range(stop, 20), data=4, accumulate=1, micro=2)
    assert before + after == straight
    for epoch in range(5):
        seen = sum(straight[4 * epoch : 4 * epoch + 4], [])
        assert len(set(seen)) == 32, "each sample once an epoch: nothing repeats, nothing is left out"
