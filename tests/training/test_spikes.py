"""Which losses are spikes, and that a resume decides alike."""

import math

from training.progress import Progress
from training.spikes import SpikeDetector

WAVE = [2.0 + 0.1 * math.sin(step) for step in range(200)]


def test_a_jump_is_a_spike_and_a_wave_is_none() -> None:
    detector = SpikeDetector(window=32, threshold=6.0)
    for loss in WAVE:
        assert not detector.is_spike(loss)
        detector.add(loss)
    assert detector.is_spike(3.0)
    assert not detector.is_spike(1.0)  # downward is good news
    assert "loss 3.0000 is 14." in detector.describe(3.0)


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    detector = SpikeDetector(window=32, threshold=6.0)
    for loss in WAVE[:31]:
        detector.add(loss)
    assert not detector.is_spike(1e6)
    detector.add(WAVE[31])
    assert detector.is_spike(1e6)


def test_losses_that_are_not_finite_are_no_spikes_and_do_not_count() -> None:
    detector = SpikeDetector(window=4, threshold=3.0, losses=[2.0, 2.1, 1.9, 2.0])
    for loss in (math.nan, math.inf):
        assert not detector.is_spike(loss)
        detector.add(loss)
    assert detector.losses == [2.0, 2.1, 1.9, 2.0]


def test_a_new_level_is_got_used_to() -> None:
    detector = SpikeDetector(window=8, threshold=6.0, losses=WAVE[:8])
    found = []
    for loss in [4.0] * 8:
        found.append(detector.is_spike(loss))
        detector.add(loss)
    assert found[0] and not any(found[1:])


def test_losses_that_do_not_move_make_no_spike_of_rounding() -> None:
    detector = SpikeDetector(window=4, threshold=6.0, losses=[2.0] * 4)
    assert not detector.is_spike(2.0 + 1e-6) and detector.is_spike(2.1)


def test_the_window_survives_a_resume() -> None:
    detector = SpikeDetector(window=32, threshold=6.0, losses=WAVE[:40])
    again = SpikeDetector(window=32, threshold=6.0, losses=detector.losses)
    assert again.losses == WAVE[8:40] and again.score(3.0) == detector.score(3.0)


def test_samples_passed_over_are_joined_where_they_touch() -> None:
    progress = Progress(samples=8)
    progress.pass_over(16)
    assert (progress.samples, progress.passed_over) == (16, [[8, 16]])
    progress.pass_over(20)
    assert (progress.samples, progress.passed_over) == (20, [[8, 20]])
    progress.samples = 28
    progress.pass_over(32)
    assert (progress.samples, progress.passed_over) == (32, [[8, 20], [28, 32]])
