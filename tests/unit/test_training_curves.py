"""When two loss curves are one curve as far as rounding goes."""

from tools.bench.bench_training.curves import BF16_UNIT, band_of_noise, within_noise

NOISE = [0.0, 1e-3, 4e-3, 3e-3, 1e-2, 2e-3]


def test_band_is_a_unit_of_bfloat16_or_twice_the_largest_noise_so_far():
    assert band_of_noise(NOISE) == [BF16_UNIT, BF16_UNIT, 8e-3, 8e-3, 2e-2, 2e-2]


def test_band_may_be_ahead():
    assert band_of_noise(NOISE, ahead=2) == [8e-3, 8e-3, 2e-2, 2e-2, 2e-2, 2e-2]


def test_says_where_a_curve_is_outside():
    distances = [0.0, BF16_UNIT, 8.1e-3, 8e-3, 0.0, float("nan")]
    assert within_noise(distances, NOISE) == [True, True, False, True, True, False]
    assert within_noise(distances, NOISE, ahead=2)[2]
